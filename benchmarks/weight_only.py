"""Time products with packed weights and write one record per shape, format and rows to a JSON file (`qsync-results/1`).

python benchmarks/weight_only.py [--quick] [--cpu] [--output benchmarks/results/weight-only.json]

On a card every figure is the median of replays of a captured graph that goes through copies of the weight beyond the
cache. ``share_of_copy`` is bytes of codes, scales, activations and results per second over the measured bandwidth of a
copy; of up to 16 rows it is asked to be at least 0.75. On a CPU the fastest of some calls counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "kernel_bench"))
from measuring import copies_beyond_cache, copy_bandwidth, median_in_turn_s
from results_head import results_head

from qsync_opt.io import write_json
from qsync_opt.kernels.weight_only import PackedWeight, explain, linear, pack

# Outputs and inputs of the products of Llama-3-8B: query with key and value, output, gate with up, down.
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
CPU_SHAPES = {"gemma-270m gate_up": (4096, 640), "gemma-270m down": (640, 2048), "square": (4096, 4096)}
FORMATS = {"W4A16": (4, "A16"), "W8A16": (8, "A16"), "W4A8": (4, "A8")}
ROWS = (1, 2, 4, 8, 16, 32, 512, 2048)
GROUP = 128
FEW_ROWS, LEAST_SHARE = 16, 0.75
"""Most rows of a small batch, and the share of a copy's bandwidth that its products should reach."""


def _fastest_s(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def _seconds(call: Callable[[Any], Any], weights: list[Any], device: torch.device) -> float:
    if device.type == "cuda":
        return median_in_turn_s(call, weights)
    return _fastest_s(lambda: call(weights[0]))


def _copies(weight: Any, memory_bytes: int, device: torch.device) -> list[Any]:
    if device.type == "cpu":
        return [weight]
    count = copies_beyond_cache(memory_bytes)
    if isinstance(weight, PackedWeight):
        return [replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone()) for _ in range(count)]
    return [weight.clone() for _ in range(count)]


def records(device: torch.device, bandwidth: float | None, quick: bool) -> Iterator[dict[str, Any]]:
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, (outputs, inputs) in (SHAPES if device.type == "cuda" else CPU_SHAPES).items():
        weight = torch.randn((outputs, inputs), device=device)
        row_counts = [rows for rows in (ROWS[::3] if quick else ROWS) if device.type == "cuda" or rows <= 512]
        inputs_of = {rows: torch.randn((rows, inputs), device=device, dtype=half) for rows in row_counts}
        dense = _copies(weight.to(half), weight.to(half).nbytes, device)
        dense_s = {
            rows: _seconds(lambda w, x=x: torch.nn.functional.linear(x, w), dense, device)
            for rows, x in inputs_of.items()
        }
        del dense
        for format, (bits, activations) in FORMATS.items():
            packed = pack(weight, bits, GROUP)
            copies = _copies(packed, packed.memory_bytes, device)
            for rows, x in inputs_of.items():

                def call(w: PackedWeight, x: torch.Tensor = x, taken: str = activations) -> torch.Tensor:
                    return linear(x, w, activations=taken)

                seconds = _seconds(call, copies, device)
                moved = packed.memory_bytes + x.nbytes + rows * outputs * x.element_size()
                record = {
                    "shape": name,
                    "outputs": outputs,
                    "inputs": inputs,
                    "rows": rows,
                    "format": format,
                    "group": GROUP,
                    "threads": torch.get_num_threads(),
                    "seconds": seconds,
                    "dense_seconds": dense_s[rows],
                    "bytes_per_s": moved / seconds,
                }
                if bandwidth is not None:
                    record["copy_bytes_per_s"] = bandwidth
                    record["share_of_copy"] = moved / seconds / bandwidth
                    exact = linear(x[:16], packed, activations=activations, backend="reference").double()
                    error = (linear(x[:16], packed, activations=activations).double() - exact).abs().amax()
                    record["largest_error"] = float(error / exact.abs().amax())
                print(json.dumps(record), flush=True)
                yield record


def asked(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked of few rows on a card, by format and shape: the least share over the numbers of rows."""
    rows = []
    for format in FORMATS:
        for shape in SHAPES:
            shares = [
                record["share_of_copy"]
                for record in results
                if (record["format"], record["shape"]) == (format, shape) and record["rows"] <= FEW_ROWS
            ]
            least = min(shares, default=None)
            rows.append(
                {
                    "what": f"{format} {shape}, 1 to {FEW_ROWS} rows: least share of the bandwidth of a copy",
                    "asked": f">= {LEAST_SHARE}",
                    "measured": least,
                    "met": least is not None and least >= LEAST_SHARE,
                    "note": "" if shares else "not measured",
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer numbers of rows")
    parser.add_argument("--cpu", action="store_true", help="on the CPU even if there is a card")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "weight-only.json")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu or not torch.cuda.is_available() else "cuda")
    if reason := explain(device):
        print(f"compiled products do not run on {device}: {reason}", file=sys.stderr)
        return 1
    bandwidth = copy_bandwidth() if device.type == "cuda" else None
    results = list(records(device, bandwidth, options.quick))
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    head = results_head(card, {"torch": torch.__version__})
    write_json(options.output, {**head, "asked": asked(results) if device.type == "cuda" else [], "records": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
