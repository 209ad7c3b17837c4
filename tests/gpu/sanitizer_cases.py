"""Small cases of every compiled kernel, for ``make sanitize`` to run under compute-sanitizer.

    python tests/gpu/sanitizer_cases.py [GROUP ...]

A script rather than a test: the sanitizer watches a whole process, and slows it down a hundred times.
"""

from __future__ import annotations

import functools
import itertools
import sys

import torch

from qsync_opt.kernels.autograd import feed_forward_block as feed_forward
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.convolution import scaled_conv2d
from qsync_opt.kernels.matmul import scaled_mm, scaled_mm_amax, scaled_mm_aux
from qsync_opt.kernels.matmul import tiles as matmul_choices
from qsync_opt.kernels.matmul import tuning as matmul_tuning
from qsync_opt.kernels.quantize import FORMATS, GRANULARITIES, UNIT, dequantize_matrix, quantize_matrix

SOURCES = (torch.float32, torch.bfloat16, torch.float16)
CONVOLUTION_TILES = 8
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
        torch.ops.qsync_opt.gelu_backward_amax(x, torch.ops.qsync_opt.gelu_amax(x)[0])
        for grad, rounding in itertools.product((None, x), ("nearest", "stochastic")):
            bound = x.abs().amax().float().reshape(1)
            torch.ops.qsync_opt.gelu_quantize(x, grad, bound, format, rounding, 0, None, grad is not None)
        count += 6
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


def _tiles(codes: torch.dtype, promoting: bool) -> int:
    """Every tile of the products: whole and split, several per block, with and without an activation, one scale."""
    count = 0
    name = {torch.int8: "INT8", torch.float8_e4m3fn: "E4M3"}[codes]
    tiles = matmul_choices.variants(name, promoting=promoting)
    small = [((130, 72, 272), 1), ((300, 200, 1040), 2), ((33, 17, 50), 1)]
    for index, ((rows, columns, depth), splits) in itertools.product(tiles, [*small, ((4200, 1100, 656), 1)]):
        a, b = (matmul_tuning.random_codes((n, depth), codes) for n in (rows, columns))
        blocks = -(-depth // 128) if promoting else 1
        scales = [torch.rand(n, blocks, device="cuda") for n in (rows, columns)]
        bias = torch.randn(columns, device="cuda")
        for out in (torch.bfloat16, torch.float32) if rows < 4000 else (torch.bfloat16,):
            kind = matmul_choices.kind_of(a, b, out, promoting=promoting)
            matmul_choices.remember(kind, matmul_choices.Choice(variant=index, splits=splits, group=2))
            scaled_mm(a, b, *scales, bias, out_dtype=out)
            scaled_mm_aux(a, b, *scales, epilogue="gelu", out_dtype=out)
            scaled_mm_amax(a, b, *(scale[0, :1] for scale in scales), out_dtype=out)
            matmul_choices.remember(kind, None)
            count += 3
    return count


def _convolutions() -> int:
    """Every tile of the INT8 convolution and its other ways: narrow inputs, groups, depthwise, a tap per pixel."""
    count = 0
    # Samples, input channels, size, output channels, kernel, stride, groups.
    shapes = [(2, 64, 14, 72, 3, 1, 1), (3, 128, 9, 136, 1, 2, 1), (2, 3, 33, 64, 7, 2, 1), (40, 64, 28, 256, 1, 1, 1)]
    apart = [(2, 96, 9, 48, 3, 1, 3), (2, 40, 11, 40, 3, 2, 40), (1, 17, 7, 5, 2, 1, 1)]
    wide = torch.cuda.get_device_capability()[0] == 9
    for shape, tile in itertools.chain(
        itertools.product(shapes, range(-1, CONVOLUTION_TILES if wide else 0)), ((shape, -1) for shape in apart)
    ):
        n, c, size, k, kernel, stride, groups = shape
        x = torch.randint(-127, 128, (n, c, size, size), device="cuda", dtype=torch.int8)
        weight = torch.randint(-127, 128, (k, c // groups, kernel, kernel), device="cuda", dtype=torch.int8)
        geometry = {"stride": (stride,) * 2, "padding": (kernel // 2,) * 2, "groups": groups}
        factors = (torch.rand(n, device="cuda"), torch.rand(k, device="cuda"), torch.randn(k, device="cuda"))
        for out, given in ((torch.bfloat16, factors), (torch.float32, (*factors[:2], None))):
            try:
                scaled_conv2d(x, weight, *given, **geometry, out_dtype=out, tile=tile)
            except RuntimeError as error:
                if "does not divide" not in str(error):  # a tile that does not suit the channels
                    raise
                continue
            count += 1
    return count


GROUPS = {
    "quantizers": _quantizers,
    "products": _products,
    "tiles-int8": functools.partial(_tiles, torch.int8, False),
    "tiles-int8-blocks": functools.partial(_tiles, torch.int8, True),
    "tiles-fp8": functools.partial(_tiles, torch.float8_e4m3fn, False),
    "tiles-fp8-blocks": functools.partial(_tiles, torch.float8_e4m3fn, True),
    "convolutions": _convolutions,
}


def main(names: list[str]) -> None:
    """Run the named groups of cases, or all."""
    strange = [name for name in names if name not in GROUPS]
    if strange:
        raise SystemExit(f"no group {', '.join(strange)}: allowed are {', '.join(GROUPS)}")
    if not (library.activate(UNIT) and matmul_choices.activate() and library.activate("convolution")):
        reasons = (library.reason(unit) for unit in (UNIT, "matmul", "convolution"))
        raise SystemExit(f"the compiled kernels do not run here: {next(filter(None, reasons))}")
    assert feed_forward.UNIT == UNIT  # declares the operators of GELU
    for name in names or GROUPS:
        calls = GROUPS[name]()
        torch.cuda.synchronize()
        print(f"{name}: {calls} calls ran", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
