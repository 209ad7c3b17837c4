"""Time products with packed weights and write one record per shape, format and rows to a JSON file.

python benchmarks/weight_only.py [--quick] [--cpu] [--output benchmarks/results/weight-only.json]

On a card every figure is the median of replays of a captured graph that goes through copies of the weight beyond the
cache. ``share_of_copy`` is bytes of codes, scales, activations and results per second over the measured bandwidth of a
copy. On a CPU the fastest of some calls counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "kernel_bench"))
from measuring import copy_bandwidth, median_s

from qsync_opt.io import write_json
from qsync_opt.kernels.weight_only import PackedWeight, explain, linear, pack

FORMAT = "qsync-bench-weight-only/1"
# Outputs and inputs of the products of Llama-3-8B: query with key and value, output, gate with up, down.
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
CPU_SHAPES = {"gemma-270m gate_up": (4096, 640), "gemma-270m down": (640, 2048), "square": (4096, 4096)}
FORMATS = {"W4A16": (4, "A16"), "W8A16": (8, "A16"), "W4A8": (4, "A8")}
ROWS = (1, 2, 4, 8, 16, 32, 512, 2048)
BEYOND_CACHE_BYTES = 200e6
GROUP = 128


def _in_turn(call: Callable[[Any], Any], weights: list[Any]) -> Callable[[], None]:
    def run() -> None:
        for weight in weights:
            call(weight)

    return run


def _fastest_s(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def _seconds(call: Callable[[Any], Any], weights: list[Any], device: torch.device) -> float:
    if device.type == "cuda":
        return median_s(_in_turn(call, weights), calls=1) / len(weights)
    return _fastest_s(lambda: call(weights[0]))


def _copies(weight: Any, memory_bytes: int, device: torch.device) -> list[Any]:
    if device.type == "cpu":
        return [weight]
    count = max(2, round(BEYOND_CACHE_BYTES / memory_bytes))
    if isinstance(weight, PackedWeight):
        return [weight.to("cpu").to(device) for _ in range(count)]
    return [weight.clone() for _ in range(count)]


def records(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth() if device.type == "cuda" else None
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, (outputs, inputs) in (SHAPES if device.type == "cuda" else CPU_SHAPES).items():
        weight = torch.randn((outputs, inputs), device=device)
        dense = _copies(weight.to(half), weight.to(half).nbytes, device)
        for rows in ROWS[::3] if quick else ROWS:
            if device.type == "cpu" and rows > 512:
                continue
            x = torch.randn((rows, inputs), device=device, dtype=half)
            dense_s = _seconds(lambda w, x=x: torch.nn.functional.linear(x, w), dense, device)
            for format, (bits, activations) in FORMATS.items():
                packed = pack(weight, bits, GROUP)
                copies = _copies(packed, packed.memory_bytes, device)

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
                    "seconds": seconds,
                    "dense_seconds": dense_s,
                    "bytes_per_s": moved / seconds,
                }
                if bandwidth is not None:
                    record["share_of_copy"] = moved / seconds / bandwidth
                    exact = linear(x[:16], packed, activations=activations, backend="reference").double()
                    error = (linear(x[:16], packed, activations=activations).double() - exact).abs().amax()
                    record["largest_error"] = float(error / exact.abs().amax())
                print(json.dumps(record), flush=True)
                yield record


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
    results = list(records(device, options.quick))
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    write_json(
        options.output,
        {
            "format": FORMAT,
            "date": datetime.date.today().isoformat(),
            "hardware": card,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "group": GROUP,
            "records": results,
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
