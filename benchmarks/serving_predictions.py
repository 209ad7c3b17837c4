"""Serving as predicted and as measured, on two unequal processes: a model made on the spot, or one that is named.

    python benchmarks/serving_predictions.py [--rounds 3] [--output FILE]
    python benchmarks/serving_predictions.py --model MODEL [--earlier FILE] --output FILE

Each round profiles the model, plans it for two processes of which one has half the memory for weights of the other,
says what the plan, an even split and equal bits should do, and only then serves them. A machine that others share is
faster at one time than at another: what counts is the median of the rounds, and the records have every one. Rounds of
an ``--earlier`` record count too, so that they may be some time apart.

With a ``.gguf`` file the head has 8 bits; `serving_peers.py` measures the same beside other engines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from results_head import processors, results_head

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.serving import run_serving_demo, sample_config, write_sample

MADE_UP = {"layers": 8, "hidden": 768, "inner": 2048, "heads": 12, "kv_heads": 4, "vocabulary": 4096}
PHASES = ("prefill", "decode")
HEAD = "W8"


def one_round(model: str, label: str, number: int, head: str | None) -> list[dict[str, Any]]:
    """Records of one round, one for each plan."""
    result = run_serving_demo(model, head=head, say=lambda text: print(f"{label} {number}: {text}", flush=True))
    records = []
    for measured, predicted in zip(result.measured, result.predicted, strict=True):
        record: dict[str, Any] = {"model": label, "round": number, "plan": measured.label}
        expected = {"prefill": predicted.prefill_tokens_per_s, "decode": predicted.decode_tokens_per_s or 0.0}
        actual = {"prefill": measured.prefill_tokens_per_s, "decode": measured.decode_tokens_per_s}
        for phase in PHASES:
            record[f"{phase}_tokens_per_s"] = {"predicted": expected[phase], "measured": actual[phase]}
        record["total_s"] = {
            "predicted": predicted.prefill_s + predicted.decode_s,
            "measured": predicted.prefill_s * expected["prefill"] / actual["prefill"]
            + predicted.decode_s * expected["decode"] / actual["decode"],
        }
        record["stages"] = [
            {"device": s.device, "groups": len(s.groups), "schemes": dict(s.schemes),
             "memory_kib": {"predicted": s.memory_kib, "measured": measured.memory_kib[s.device]}}
            for s in predicted.stages
        ]  # fmt: skip
        print(
            f"{label} {number}: {measured.label}: "
            + ", ".join(f"{phase} {expected[phase]:.0f} predicted, {actual[phase]:.0f} measured" for phase in PHASES)
            + "; memory "
            + ", ".join(
                f"{s['memory_kib']['predicted'] / s['memory_kib']['measured'] - 1:+.1%}" for s in record["stages"]
            ),
            flush=True,
        )
        records.append(record)
    return records


def asked(label: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was set as a target, beside what these records say."""
    rows = []
    plans = dict.fromkeys(r["plan"] for r in records)
    for phase in PHASES:
        ratios = {}
        for plan in plans:
            pairs = [r[f"{phase}_tokens_per_s"] for r in records if r["plan"] == plan]
            ratios[plan] = statistics.median(p["predicted"] for p in pairs) / statistics.median(
                p["measured"] for p in pairs
            )
        worst = max(ratios.values(), key=lambda x: abs(x - 1))
        rows.append(
            {"what": f"{label}: {phase} tokens/s, predicted over measured, medians, the plan that is furthest off",
             "asked": "0.9 to 1.1", "measured": round(worst, 3), "met": 0.9 <= worst <= 1.1,
             "note": ", ".join(f"{plan}: {x:.3f}" for plan, x in ratios.items())}
        )  # fmt: skip
    memory = [s["memory_kib"]["predicted"] / s["memory_kib"]["measured"] - 1 for r in records for s in r["stages"]]
    rows.append(
        {"what": f"{label}: peak memory, predicted over measured less 1, all stages of all rounds",
         "asked": "-0.02 to 0.05", "measured": [round(min(memory), 4), round(max(memory), 4)],
         "met": min(memory) >= -0.02 and max(memory) <= 0.05, "note": ""}
    )  # fmt: skip
    times = {p: statistics.median(r["total_s"]["measured"] for r in records if r["plan"] == p) for p in plans}
    others = {plan: seconds for plan, seconds in times.items() if plan != "planned"}
    gain = min(others.values(), default=times["planned"]) / times["planned"]
    rows.append(
        {"what": f"{label}: time of the best baseline over that of the plan, medians", "asked": ">= 1",
         "measured": round(gain, 3), "met": gain >= 1.0,
         "note": ", ".join(f"{plan}: {1e3 * seconds:.0f} ms" for plan, seconds in times.items())}
    )  # fmt: skip
    return rows


def main() -> None:
    """Run all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or .gguf file; one is made by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--earlier", metavar="FILE", help="a record of this model whose rounds count too")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "serving-predictions.json"))
    options = parser.parse_args()
    head = results_head(processors(), {"torch": torch.__version__})
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_sample(Path(folder) / "made-up", sample_config(**MADE_UP)))
        label = Path(model).stem
        head_scheme = HEAD if model.endswith(".gguf") else None
        records: list[dict[str, Any]] = []
        if options.earlier is not None:
            earlier = json.loads(Path(options.earlier).read_text(encoding="utf-8"))["records"]
            records = [r for r in earlier if r["model"] == label]
        done = len({r["round"] for r in records})
        records += [r for k in range(options.rounds) for r in one_round(model, label, done + k, head_scheme)]
        rows = asked(label, records)
    write_json(options.output, {**head, "asked": rows, "records": records})
    for row in rows:
        print(f"{row['what']}: asked {row['asked']}, measured {row['measured']}")


if __name__ == "__main__":
    main()
