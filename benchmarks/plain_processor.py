"""Operators in low precisions on a processor without 16-bit and 8-bit instructions, against the same in FP32.

Forward and backward passes through ``kernels.ops.execute``, in turn, in one thread; ``ATEN_CPU_CAPABILITY``,
``ONEDNN_MAX_CPU_ISA`` and ``NUMBA_CPU_FEATURES`` leave AVX2 alone, as on most laptops. The figure of an operator is the
median over rounds of its time divided by that in FP32 of the same round:

    python benchmarks/plain_processor.py              # two minutes on an idle processor
    python benchmarks/plain_processor.py --own        # with all instructions of this processor; no record is written
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ["OMP_NUM_THREADS"] = "1"
if "--own" not in sys.argv:
    os.environ.update(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2")
    os.environ.update(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+popcnt")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from results_head import results_head  # noqa: E402

from qsync_opt.kernels import KernelOptions, backend, ops  # noqa: E402

ASKED = 1.5
"""Times FP32 that no operator was to exceed."""
PRECISIONS = ("FP32", "BF16", "INT8")
# Batch, channels, height, stride and kernel of depthwise convolutions of MobileNetV2 at 224 x 224 and 32 x 32, and of
# EfficientNet.
DEPTHWISE = ((8, 32, 112, 1, 3), (8, 96, 112, 2, 3), (8, 144, 56, 1, 3), (8, 384, 14, 1, 3), (8, 960, 7, 1, 3),
             (32, 96, 16, 1, 3), (8, 240, 28, 1, 5))  # fmt: skip
# Batch, input and output channels, height, kernel.
CONVOLUTIONS = ((8, 3, 64, 112, 7), (8, 64, 64, 56, 3), (8, 144, 24, 56, 1), (8, 256, 256, 14, 3), (8, 320, 1280, 7, 1))
# Rows, inputs and outputs.
LINEAR = ((16, 16, 16), (32, 64, 64), (64, 128, 128), (128, 10, 256), (256, 256, 1024), (2048, 768, 768))
# Batch, rows, inner size and columns.
BATCHED = ((4, 16, 8, 16), (16, 64, 32, 64), (48, 128, 64, 128))


def operators() -> dict[str, tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], dict[str, Any]]]:
    """By name: kind, function, operands and other arguments."""
    found: dict[str, Any] = {}

    def operand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    for n, c, h, stride, k in DEPTHWISE:
        keywords = {"stride": stride, "padding": k // 2, "groups": c}
        name = f"depthwise {k} x {k}, {n} x {c} x {h} x {h}, stride {stride}"
        found[name] = ("conv2d", F.conv2d, (operand(n, c, h, h), operand(c, 1, k, k)), keywords)
    for n, c, m, h, k in CONVOLUTIONS:
        name = f"convolution {k} x {k}, {n} x {c} x {h} x {h} to {m}"
        found[name] = ("conv2d", F.conv2d, (operand(n, c, h, h), operand(m, c, k, k)), {"padding": k // 2})
    for rows, inputs, outputs in LINEAR:
        operands = operand(rows, inputs), operand(outputs, inputs), operand(outputs)
        found[f"linear, {rows} x {inputs} to {outputs}"] = ("linear", F.linear, operands, {})
    for b, n, k, m in BATCHED:
        found[f"batched product, {b} x {n} x {k} x {m}"] = ("bmm", torch.bmm, (operand(b, n, k), operand(b, k, m)), {})
    return found


def times_of(kind: str, function: Any, operands: Any, keywords: dict[str, Any], budget_s: float) -> dict[str, Any]:
    """Seconds in every round by precision and pass; rounds until the budget is spent, at least seven."""
    seconds: dict[str, dict[str, list[float]]] = {p: {"forward": [], "both": []} for p in PRECISIONS}
    began, calls, rounds = time.perf_counter(), 1, 0

    def run(precision: str) -> None:
        forward = both = 0.0
        for call in range(calls):
            options = KernelOptions(seed=1, offset=call)
            start = time.perf_counter()
            result = ops.execute(kind, precision, function, operands, keywords, options)
            middle = time.perf_counter()
            torch.autograd.grad(result, operands, result.detach())
            forward, both = forward + middle - start, both + time.perf_counter() - start
        seconds[precision]["forward"].append(forward / calls)
        seconds[precision]["both"].append(both / calls)

    for precision in PRECISIONS * 3:
        run(precision)
    calls = max(1, int(2e-3 / seconds["FP32"]["both"][-1]))
    for lists in seconds.values():
        for each in lists.values():
            each.clear()
    while rounds < 7 or (time.perf_counter() - began < budget_s and rounds < 200):
        for precision in PRECISIONS:
            run(precision)
        rounds += 1
    return seconds


def main() -> None:
    """Measure every operator and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", action="store_true", help="with all instructions of this processor, without a record")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds per operator")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "plain-processor.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    records = []
    for name, (kind, function, operands, keywords) in operators().items():
        seconds = times_of(kind, function, operands, keywords, arguments.budget)
        base = seconds["FP32"]
        row: dict[str, Any] = {"operator": name, "rounds": len(base["both"])}
        row["fp32_us"] = round(1e6 * statistics.median(base["both"]), 1)
        for precision in PRECISIONS[1:]:
            for which in ("forward", "both"):
                ratios = [a / b for a, b in zip(seconds[precision][which], base[which], strict=True)]
                row[f"{precision.lower()}_{which}_times"] = round(statistics.median(ratios), 3)
        print(json.dumps(row), flush=True)
        records.append(row)
    asked = []
    for precision in ("bf16", "int8"):
        worst = max(records, key=lambda row: row[f"{precision}_both_times"])
        measured = worst[f"{precision}_both_times"]
        what = f"{precision.upper()} forward and backward, slowest of {len(records)} operators, times FP32"
        met = measured <= ASKED
        asked.append(
            {"what": what, "asked": f"<= {ASKED}", "measured": measured, "met": met, "note": worst["operator"]}
        )
        print(asked[-1])
    if not arguments.own:
        head = results_head("AVX2 only (emulated), 1 thread", {"torch": torch.__version__})
        data = {**head, "runs": backend.explain("cpu"), "asked": asked, "records": records}
        arguments.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
