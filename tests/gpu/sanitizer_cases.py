"""Small cases of every compiled kernel, for ``make sanitize`` to run under compute-sanitizer.

A script rather than a test: the sanitizer watches a whole process, and slows it down a hundred times.
"""

from __future__ import annotations

import itertools

import torch

from qsync_opt.kernels import feed_forward, library, matmul_choices
from qsync_opt.kernels.formats import FORMATS
from qsync_opt.kernels.matmul import scaled_mm
from qsync_opt.kernels.quantize_ops import GRANULARITIES, UNIT, dequantize_matrix, quantize_matrix, recast_matrix

SOURCES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 5), (33, 160), (130, 264), (5, 40000), (132, 260))


def _quantizers() -> int:
    count = 0
    for shape, source, format in itertools.product(SHAPES, SOURCES, FORMATS):
        x = torch.randn(shape, device="cuda").to(source)
        for granularity, view in itertools.product(GRANULARITIES, (x, x.t().contiguous().t(), x[:, ::2])):
            transposed = granularity != "block"
            result = quantize_matrix(view, format, granularity=granularity, transposed=transposed, backend="compiled")
            quantize_matrix(view, format, granularity=granularity, backend="compiled")
            dequantize_matrix(result.codes, result.scale, source, backend="compiled")
            count += 3
        recast_matrix(result.codes, result.scale, torch.int8, rounding="stochastic", backend="compiled")
        torch.ops.qsync_opt.gelu_backward_amax(x, torch.ops.qsync_opt.gelu_amax(x)[0])
        count += 3
    return count


def _products() -> int:
    count = 0
    for (rows, columns, depth), format in itertools.product(((16, 16, 16), (130, 72, 272), (33, 17, 50)), FORMATS):
        a, b = torch.randn(rows, depth, device="cuda"), torch.randn(columns, depth, device="cuda")
        for granularity in ("tensor", "row"):
            x, y = (quantize_matrix(t, format, granularity=granularity, backend="compiled") for t in (a, b))
            for out in (torch.bfloat16, torch.float32):
                scaled_mm(x.codes, y.codes, x.scale, y.scale, epilogue="gelu", out_dtype=out)
                count += 1
    return count


def main() -> None:
    if not (library.activate(UNIT) and matmul_choices.activate()):
        raise SystemExit(f"the compiled kernels do not run here: {library.reason(UNIT) or library.reason('matmul')}")
    assert feed_forward.UNIT == UNIT  # declares the operators of GELU
    calls = _quantizers() + _products()
    torch.cuda.synchronize()
    print(f"{calls} calls ran")


if __name__ == "__main__":
    main()
