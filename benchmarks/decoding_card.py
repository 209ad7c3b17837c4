"""Speculative decoding on one card: what drafting and judging cost, and what a plan makes of it; all passes captured.

python benchmarks/decoding_card.py [--layers 32] [--seconds 150] [--output FILE]

A Llama-3-8B-shaped random model in W4 with caches of 16 and of 8 bits, and in BF16. A regime is a number of sequences
and the positions that each has cached. Times are medians of whole passes, host and tokens on their way back included:
of passes over 1 to 9 tokens of each sequence, and of one drafted token. How often drafts are accepted is not of this
model, whose weights are random, but of ``decoding-acceptance.json``: Gemma 3 270M, texts of CPython's manual. With
these a plan is made for each cache; ``speedup`` is over plain decoding with the same cache, by the mean acceptances,
where the plan goes by their lower bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from results_head import asked_row, results_head
from serving_card import LLAMA_8B, RandomWeights

from qsync_opt.decoding import (
    DraftMeasurement,
    Measurements,
    Problem,
    RegimeTimes,
    build_problem,
    evaluate,
    expected_tokens,
)
from qsync_opt.io import read_json, write_json
from qsync_opt.runtimes.torch.serving import (
    SELF_DRAFTS,
    LocalWorkers,
    StageModel,
    config_from_json,
    group_names,
    measure_times,
)
from qsync_opt.serving import Stage
from qsync_opt.systems import solve

RESULTS = Path(__file__).parent / "results"
SERVED: Mapping[str, tuple[str, int | None]] = {"W4": ("W4", None), "W4, 8-bit cache": ("W4", 8), "BF16": ("W16", None)}
"""Weight scheme, and bits of the cache where they are not the computing type's."""
REGIMES = ((1, 256), (4, 256), (8, 256), (16, 256), (1, 8192), (8, 8192), (32, 8192))
LENGTHS = (1, 2, 3, 4, 6, 8)
ROUNDS = 7
SHORT, FEW, LONG = 256, 8, (32, 8192)
MOST_COST, COST_ROWS, SHORT_SPEEDUP, LONG_SPEEDUP, LEAST_SPEEDUP, NEAR = 0.85, (4, 8, 16), 1.05, 1.4, 0.99, 0.03


def accepted(path: Path, kv_bits: int | None) -> dict[str, DraftMeasurement]:
    """Acceptances of drafts by a record on weights that are not rotated, or, where it has none, on rotated ones."""
    drafts: dict[str, DraftMeasurement] = {}
    for record in sorted(read_json(path, {"qsync-results/1"})["records"], key=lambda record: record["served"]):
        counts = {"accepted": tuple(record["accepted"]), "judged": tuple(record["judged"])}
        if record["draft"] not in drafts and (record["draft"] == "lookup" or record["draft"] in SELF_DRAFTS):
            drafts[record["draft"]] = DraftMeasurement(memory_kib=0, **counts)
    return {name: draft for name, draft in drafts.items() if kv_bits == 8 or "K4" not in name}


def name_of(batch: int, context: int) -> str:
    return f"batch {batch}, context {context}"


def measure(served: str, layers: int, drafts: list[str], until: float) -> dict[str, RegimeTimes]:
    """Times of the regimes that time suffices for."""
    scheme, kv_bits = SERVED[served]
    data = {**LLAMA_8B, "num_hidden_layers": layers}
    names = group_names(layers)
    stage = StageModel(
        config_from_json(data), RandomWeights(data), Stage(device="card", groups=names), dict.fromkeys(names, scheme),
        dtype=torch.bfloat16, device="cuda", kv_bits=kv_bits,
    )  # fmt: skip
    lengths = LENGTHS if drafts else LENGTHS[:1]
    times = {}
    for batch, context in REGIMES:
        if time.monotonic() > until:
            break
        verify_ns, draft_ns = measure_times(LocalWorkers([stage]), drafts, lengths, batch, context, ROUNDS)
        name = name_of(batch, context)
        times[name] = RegimeTimes(name=name, weight=1 / len(REGIMES), verify_ns=verify_ns, draft_ns=draft_ns)
        print(served, name, verify_ns, draft_ns, flush=True)
    return times


def speedups(problem: Problem) -> dict[str, dict[str, float]]:
    """Of each regime's choices, the times plain decoding takes by the mean acceptance."""
    return {
        regime.name: {
            f"{choice.draft} {choice.length}": expected_tokens(choice.acceptance.at("mid") or 0.0, choice.length)
            * regime.plain_ns
            / (choice.length * choice.draft_ns + choice.verify_ns)
            for choice in regime.choices
        }
        for regime in problem.regimes
    }


def plan_records(
    served: str, times: dict[str, RegimeTimes], drafts: dict[str, DraftMeasurement]
) -> list[dict[str, Any]]:
    """A record of each regime: times, the plan's choice, and what that and the best choice gain."""
    measurements = Measurements(
        name=served, memory_kib=0, lengths=LENGTHS, drafts=drafts, regimes=tuple(times.values())
    )
    problem = build_problem(measurements)
    plan = solve(problem).plan
    evaluate(problem, plan)
    gains = speedups(problem)
    records = []
    for regime in problem.regimes:
        selection, own = plan.choices[regime.name], times[regime.name]
        chosen = "plain" if selection is None else f"{selection.draft} {selection.length}"
        best = max(gains[regime.name], key=lambda choice: gains[regime.name][choice])
        records.append(
            {
                "served": served,
                "regime": regime.name,
                "verify_ns": {str(tokens): ns for tokens, ns in own.verify_ns.items()},
                "draft_ns": dict(own.draft_ns),
                "chosen": chosen,
                "speedup": gains[regime.name].get(chosen, 1.0),
                "best": best if gains[regime.name][best] > 1 else "plain",
                "best_speedup": max(1.0, gains[regime.name][best]),
            }
        )
    return records


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked of one card beside what was measured."""
    planned = [record for record in records if "chosen" in record]
    costs = {
        f"{record['regime']}": record["draft_ns"]["A8"] / record["verify_ns"]["5"]
        for record in planned
        if record["served"] == "W4" and record["regime"] in {name_of(rows, SHORT) for rows in COST_ROWS}
    }
    worst = max(costs, key=lambda regime: costs[regime], default="not measured")
    few = [r for r in planned if r["regime"] in {name_of(b, SHORT) for b, c in REGIMES if c == SHORT and b <= FEW}]
    hesitant = [r for r in few if r["chosen"] != "plain" and r["speedup"] < SHORT_SPEEDUP]
    long = [r["speedup"] for r in planned if r["regime"] == name_of(*LONG)]
    least = min((r["speedup"] for r in planned), default=None)
    near = [r["speedup"] >= (1 - NEAR) * r["best_speedup"] for r in planned]
    share = sum(near) / len(near) if near else None
    return [
        asked_row(
            f"drafting a token with A8 over judging 4, {COST_ROWS[0]} to {COST_ROWS[-1]} sequences of {SHORT}",
            f"<= {MOST_COST}",
            costs.get(worst),
            worst in costs and costs[worst] <= MOST_COST,
            worst,
        ),
        asked_row(
            f"up to {FEW} sequences of {SHORT}: least speed of plans that speculate over plain decoding",
            f">= {SHORT_SPEEDUP}, or declined",
            min((r["speedup"] for r in few if r["chosen"] != "plain"), default=None),
            bool(few) and not hesitant,
            "; ".join(f"{r['served']}, {r['regime']}: {r['chosen']}" for r in few),
        ),
        asked_row(
            f"{name_of(*LONG)}: speed of the plan over plain decoding, the least of both caches",
            f">= {LONG_SPEEDUP}",
            min(long, default=None),
            bool(long) and min(long) >= LONG_SPEEDUP,
            "",
        ),
        asked_row(
            "least speed of a plan over plain decoding", f">= {LEAST_SPEEDUP}", least,
            least is not None and least >= LEAST_SPEEDUP, "",
        ),
        asked_row(
            "regimes whose plan is within 3 % of the best choice", ">= 0.95", share,
            share is not None and share >= 0.95,
            "; ".join(f"{r['served']}, {r['regime']}: {r['chosen']}, best {r['best']}" for r in planned
                      if r["speedup"] < (1 - NEAR) * r["best_speedup"]),
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no further regime after so long")
    parser.add_argument("--acceptance", type=Path, default=RESULTS / "decoding-acceptance.json")
    parser.add_argument("--output", type=Path, default=RESULTS / "decoding-card.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a card", file=sys.stderr)
        return 1
    torch.manual_seed(1)
    until = time.monotonic() + options.seconds
    records: list[dict[str, Any]] = []
    for served, (_, kv_bits) in SERVED.items():
        drafts = accepted(options.acceptance, kv_bits) if served != "BF16" else {}
        times = measure(served, options.layers, list(drafts), until)
        torch.cuda.empty_cache()
        if drafts:
            records += plan_records(served, times, drafts)
        else:
            records += [
                {"served": served, "regime": name, "verify_ns": {"1": own.verify_ns[1]}} for name, own in times.items()
            ]
        head = results_head(torch.cuda.get_device_name(), {"torch": torch.__version__})
        document = {**head, "layers": options.layers, "acceptance": options.acceptance.name, "asked": asked(records)}
        write_json(options.output, {**document, "records": records})
    print(json.dumps(asked(records), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
