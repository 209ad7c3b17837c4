"""Time decoding of a Llama-3-8B-shaped random model on one card, W4A16 and W8A16 beside BF16, all captured.

python benchmarks/serving_card.py [--layers 32] [--context 256] [--seconds 120] [--output FILE]

``floor_s`` is the bytes that a pass must read (weights, head, cached keys and values) over the measured bandwidth of a
copy; ``times_floor`` the measured time over it. ``graph_s`` is the median of replays alone; ``pass_s`` has the host's
part and the tokens on their way back, too. ``kernels`` sums a profile of one replay by kernel, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "kernel_bench"))
from measuring import copy_bandwidth
from results_head import results_head

from qsync_opt.io import write_json
from qsync_opt.kernels.weight_only import explain
from qsync_opt.runtimes.torch.serving import PAGE, Choice, StageModel, Step, config_from_json, group_names
from qsync_opt.serving import Stage

MOST_TIMES_FLOOR = 1.35
"""Times its floor that a pass in W4 may take."""
ROWS = (1, 2, 4, 8, 16)
SCHEMES = ("W4", "W8", "W16")
REPLAYS = 30
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip


class RandomWeights:
    """Weights drawn on the card when they are asked for."""

    def __init__(self, data: dict[str, Any]) -> None:
        hidden, inner, size = data["hidden_size"], data["intermediate_size"], 128
        queries, keys = data["num_attention_heads"] * size, data["num_key_value_heads"] * size
        self._shapes = {
            "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
            "o_proj": (hidden, queries), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
            "down_proj": (hidden, inner), "embed_tokens": (data["vocab_size"], hidden),
            "lm_head": (data["vocab_size"], hidden),
        }  # fmt: skip
        self._hidden = hidden

    def names(self) -> Iterable[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        return next((shape for part, shape in self._shapes.items() if f"{part}." in name), (self._hidden,))

    def read(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        height, *width = self.shape(name)
        if not width:
            return torch.ones(height, device="cuda")
        return torch.randn(len(range(*rows.indices(height))), *width, device="cuda").mul_(0.02)


def step_of(rows: int, context: int) -> Step:
    """A decoding pass after which each of ``rows`` sequences has ``context`` positions."""
    pages = -(-context // PAGE)
    return Step(
        number=0,
        tokens=tuple((17 + row,) for row in range(rows)),
        starts=(context - 1,) * rows,
        pages=tuple(tuple(range(1 + row * pages, 1 + (row + 1) * pages)) for row in range(rows)),
        choices=(Choice(),) * rows,
    )


def replay_s(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def pass_s(stage: StageModel, step: Step) -> float:
    times = []
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        stage.run(step).tolist()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def kernels_of(graph: torch.cuda.CUDAGraph) -> dict[str, list[float]]:
    """Microseconds and calls of the costliest kernels of a replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return {event.key[:80]: [round(event.self_device_time_total, 1), event.count] for event in events[:16]}


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked of a pass in W4, by its rows."""
    measured = {record["rows"]: record["times_floor"] for record in records if record["scheme"] == "W4"}
    return [
        {
            "what": f"W4, {rows} sequences: a decoding pass over its floor",
            "asked": f"<= {MOST_TIMES_FLOOR}",
            "measured": measured.get(rows),
            "met": rows in measured and measured[rows] <= MOST_TIMES_FLOOR,
            "note": "" if rows in measured else "not measured",
        }
        for rows in ROWS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=256, help="positions of each sequence after the pass")
    parser.add_argument("--seconds", type=float, default=110.0, help="begin no further measurement after so long")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "serving-card.json")
    options = parser.parse_args()
    began = time.monotonic()
    if not torch.cuda.is_available() or explain("cuda"):
        print(
            f"this needs a card: {explain('cuda') if torch.cuda.is_available() else 'there is none'}", file=sys.stderr
        )
        return 1
    torch.manual_seed(1)
    data = {**LLAMA_8B, "num_hidden_layers": options.layers}
    config, names = config_from_json(data), group_names(options.layers)
    bandwidth = copy_bandwidth()
    records: list[dict[str, Any]] = []
    errors: list[str] = []

    def save() -> None:
        head = results_head(torch.cuda.get_device_name(), {"torch": torch.__version__})
        more = {"layers": options.layers, "copy_bandwidth": bandwidth, "errors": errors}
        document = {**head, **more, "asked": asked(records), "records": records}
        write_json(options.output, document)

    print(f"{torch.cuda.get_device_name()}, copies at {bandwidth / 1e12:.2f} TB/s", flush=True)
    for scheme in SCHEMES:
        if time.monotonic() - began > options.seconds:
            break
        try:
            loading = time.perf_counter()
            plan_stage = Stage(device="card", groups=names)
            stage = StageModel(
                config, RandomWeights(data), plan_stage, dict.fromkeys(names, scheme),
                dtype=torch.bfloat16, device="cuda",
            )  # fmt: skip
            stage.reserve(1 + max(ROWS) * -(-options.context // PAGE))
            torch.cuda.synchronize()
            print(f"{scheme}: loaded in {time.perf_counter() - loading:.1f} s, {stage.bytes / 1e9:.2f} GB", flush=True)
            embedding = config.vocabulary * config.hidden * 2  # of which a pass reads a few rows
            position = 2 * config.layers * config.kv_heads * config.head_size * 2
            for rows in ROWS:
                if time.monotonic() - began > options.seconds:
                    break
                step = step_of(rows, options.context)
                started = time.perf_counter()
                stage.run(step)
                torch.cuda.synchronize()
                captured = time.perf_counter() - started
                (graph,) = [g.graph for key, g in stage._graphs._graphs.items() if key[0] == rows]
                floor = (stage.bytes - embedding + rows * options.context * position) / bandwidth
                seconds = replay_s(graph)
                record = {
                    "scheme": scheme,
                    "rows": rows,
                    "context": options.context,
                    "graph_s": seconds,
                    "pass_s": pass_s(stage, step),
                    "floor_s": floor,
                    "times_floor": seconds / floor,
                    "capture_s": captured,
                }
                if rows in (1, 16):
                    record["kernels"] = kernels_of(graph)
                records.append(record)
                print(json.dumps(record), flush=True)
                save()
        except (RuntimeError, AssertionError) as failure:  # the other schemes still say something
            errors.append(f"{scheme}: {failure!r}"[:2000])
            print(errors[-1], file=sys.stderr, flush=True)
        stage = None
        torch.cuda.empty_cache()
    save()
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
