"""Small cases of every compiled kernel, for ``make sanitize`` to run under compute-sanitizer.

A script rather than a test: the sanitizer watches a whole process, and slows it down a hundred times.
"""

from __future__ import annotations

import itertools
import sys

import torch

from qsync_opt.kernels import feed_forward, library, matmul_choices, matmul_tuning
from qsync_opt.kernels.formats import FORMATS
from qsync_opt.kernels.matmul import scaled_mm, scaled_mm_aux
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


def _tiles() -> int:
    """Every tile of the products: whole and split, several per block, with and without an activation, one scale."""
    count = 0
    for codes, promoting in itertools.product((torch.int8, torch.float8_e4m3fn), (False, True)):
        name = {torch.int8: "INT8", torch.float8_e4m3fn: "E4M3"}[codes]
        tiles = matmul_choices.variants(name, promoting=promoting)
        for index, ((rows, columns, depth), splits) in itertools.product(
            tiles, (((130, 72, 272), 1), ((300, 200, 1040), 2), ((33, 17, 50), 1), ((4200, 1100, 656), 1))
        ):
            a, b = (matmul_tuning.random_codes((n, depth), codes) for n in (rows, columns))
            blocks = -(-depth // 128) if promoting else 1
            scales = [torch.rand(n, blocks, device="cuda") for n in (rows, columns)]
            for out in (torch.bfloat16, torch.float32):
                kind = matmul_choices.kind_of(a, b, out, promoting=promoting)
                matmul_choices.remember(kind, matmul_choices.Choice(variant=index, splits=splits, group=2))
                scaled_mm(a, b, *scales, out_dtype=out)
                scaled_mm_aux(a, b, *scales, epilogue="gelu", out_dtype=out)
                scaled_mm(a, b, *(scale[0, :1] for scale in scales), out_dtype=out)
                matmul_choices.forget(kind)
                count += 3
    return count


def main(names: list[str]) -> None:
    """Run the named groups of cases, or all."""
    if not (library.activate(UNIT) and matmul_choices.activate()):
        raise SystemExit(f"the compiled kernels do not run here: {library.reason(UNIT) or library.reason('matmul')}")
    assert feed_forward.UNIT == UNIT  # declares the operators of GELU
    groups = {"quantizers": _quantizers, "products": _products, "tiles": _tiles}
    calls = sum(groups[name]() for name in names or groups)
    torch.cuda.synchronize()
    print(f"{calls} calls ran")


if __name__ == "__main__":
    main(sys.argv[1:])
