"""Scaled products: the specification against float64, what is refused, and the tables of choices."""

import json
import math

import pytest
import torch

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.kernels.matmul import TABLES, Choice, ProductKind, read_choices, write_choices
from qsync_opt.kernels.matmul import scaled as matmul

CODES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
# Relative error (norms): one rounding to the result's type, at most its unit roundoff, and 1e-6 for FP32 arithmetic.
BOUNDS = {torch.bfloat16: 2**-8 + 1e-6, torch.float16: 2**-11 + 1e-6, torch.float32: 1e-6}


def _codes(shape, dtype):
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(dtype)


def _expected(a, b, a_scale, b_scale, bias, epilogue):
    x = (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).mT
    x = x if bias is None else x + bias.double()
    return {"none": x, "relu": x.relu(), "gelu": torch.nn.functional.gelu(x)}[epilogue], x


def _error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("out_dtype", BOUNDS)
@pytest.mark.parametrize("epilogue", matmul.EPILOGUES)
@pytest.mark.parametrize("codes", CODES)
def test_product_is_that_of_the_values_of_the_codes(codes, epilogue, out_dtype):
    a, b = _codes((9, 70), codes), _codes((13, 70), codes)
    a_scale, b_scale, bias = torch.rand(9, 1), torch.rand(13, 1), torch.randn(13)
    found, before = matmul.scaled_mm_aux(a, b, a_scale, b_scale, bias, epilogue=epilogue, out_dtype=out_dtype)
    expected, preactivation = _expected(a, b, a_scale, b_scale, bias, epilogue)
    assert found.dtype is out_dtype
    assert _error(found, expected) < BOUNDS[out_dtype]
    assert _error(before, preactivation) < BOUNDS[out_dtype]
    single = matmul.scaled_mm(a, b, a_scale, b_scale, bias, epilogue=epilogue, out_dtype=out_dtype)
    assert torch.equal(single, found)


@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 5, 0), (1, 1, 1), (1, 7, 129), (17, 3, 16)])
def test_any_sizes(shape):
    rows, columns, depth = shape
    a, b = _codes((rows, depth), torch.int8), _codes((columns, depth), torch.int8)
    found = matmul.scaled_mm(a, b, torch.ones(1), torch.ones(1), torch.arange(float(columns)), out_dtype=torch.float32)
    assert torch.equal(found, (a.double() @ b.double().T + torch.arange(columns)).float())


def test_scales_per_matrix_row_and_block():
    a, b = _codes((3, 5, 300), torch.int8), _codes((3, 6, 300), torch.int8)
    a_blocks, b_blocks = torch.rand(3, 5, 3), torch.rand(3, 6, 3)
    widen = lambda scale: scale.repeat_interleave(128, -1)[..., :300]  # noqa: E731
    found = matmul.scaled_mm(a, b, a_blocks, b_blocks, out_dtype=torch.float32)
    assert _error(found, _expected(a, b, widen(a_blocks), widen(b_blocks), None, "none")[0]) < 1e-6
    mixed = matmul.scaled_mm(a, b, a_blocks, b_blocks[..., :1].contiguous(), out_dtype=torch.float32)
    assert _error(mixed, _expected(a, b, widen(a_blocks), b_blocks[..., :1], None, "none")[0]) < 1e-6
    per_matrix = torch.rand(3)
    found = matmul.scaled_mm(a, b, per_matrix, torch.ones(1), out_dtype=torch.float32)
    assert _error(found, _expected(a, b, per_matrix[:, None, None], torch.ones(1), None, "none")[0]) < 1e-6


def test_int8_sums_are_exact_beyond_32_bits():
    a = torch.full((2, 200_000), -128, dtype=torch.int8)
    found = matmul.scaled_mm(a, a, torch.ones(1), torch.ones(1), out_dtype=torch.float32)
    assert (found == float(200_000 * 128 * 128)).all()


def test_not_a_number_comes_through():
    a, b = _codes((4, 32), torch.int8), _codes((5, 32), torch.int8)
    scale = torch.tensor([1.0, math.nan, 1.0, 1.0])
    for epilogue in matmul.EPILOGUES:
        found = matmul.scaled_mm(a, b, scale, torch.ones(1), epilogue=epilogue)
        assert found[1].isnan().all()
        assert not found[0].isnan().any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"a": torch.zeros(4, 8)}, "a is torch.float32"),
        ({"b": torch.zeros(5, 8).to(torch.float8_e5m2)}, "both must be INT8, or both FP8"),
        ({"b": torch.zeros(8, 5, dtype=torch.int8).t()}, "not contiguous along the contraction"),
        ({"b": torch.zeros(5, 9, dtype=torch.int8)}, "needed are"),
        ({"a": torch.zeros(8, dtype=torch.int8)}, "1 dimensions"),
        ({"a_scale": torch.ones(3)}, "a_scale has 3 elements"),
        ({"b_scale": torch.ones(1, dtype=torch.float64)}, "b_scale has 1 elements of torch.float64"),
        ({"bias": torch.ones(4)}, "needed is (5,)"),
        ({"epilogue": "tanh"}, "allowed are none, relu, gelu"),
        ({"out_dtype": torch.int32}, "allowed are bfloat16"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(change, text):
    arguments = {
        "a": torch.zeros(4, 8, dtype=torch.int8),
        "b": torch.zeros(5, 8, dtype=torch.int8),
        "a_scale": torch.ones(1),
        "b_scale": torch.ones(1),
    }
    with pytest.raises(UnsupportedError, match="scaled_mm") as caught:
        matmul.scaled_mm(**{**arguments, **change})
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_mm_aux"])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_operators_keep_their_promises(name, lead):
    a, b = _codes((*lead, 4, 40), torch.int8), _codes((*lead, 6, 40), torch.int8)
    scales = torch.rand(*lead, 4), torch.rand(*lead, 6)
    operator = getattr(torch.ops.qsync_opt, name).default
    torch.library.opcheck(operator, (a, b, *scales, torch.randn(6), "gelu", torch.float32, False))


def _kind(**changes):
    numbers = {"result_bytes": 2, "batch": 1, "rows": 8, "columns": 9, "depth": 10, "multiprocessors": 132}
    return ProductKind(**{"a": "INT8", "b": "INT8", "promoting": False, **numbers, **changes})


def test_tables_come_back_as_written(tmp_path):
    path = tmp_path / "table.json"
    table = {
        _kind(): Choice(variant=3),
        _kind(a="E4M3", b="E5M2", promoting=True): Choice(variant=0, splits=4, group=2),
    }
    write_choices(path, table)
    assert read_choices(path) == table


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"variant": -1}, "variant"),
        ({"a": "INT4"}, "INT4"),
        ({"promoting": 1}, "promoting is 1"),
        ({"speed": 1}, "unknown key 'speed'"),
        ({"rows": 0}, "rows is 0"),
    ],
)
def test_bad_tables_are_refused(tmp_path, change, text):
    path = tmp_path / "table.json"
    write_choices(path, {_kind(): Choice(variant=3)})
    data = json.loads(path.read_text())
    data["choices"][0].update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(ProblemError, match="choices") as caught:
        read_choices(path)
    assert text in str(caught.value)


def test_tables_of_the_package_can_be_read():
    paths = list(TABLES.glob("matmul-*.json"))
    assert paths
    for path in paths:
        assert read_choices(path)


def test_the_largest_magnitude_beside_the_result():
    a, b = _codes((6, 9), torch.int8), _codes((5, 9), torch.int8)
    scales, bias = (torch.rand(6), torch.rand(5)), torch.randn(5)
    found, largest = matmul.scaled_mm_amax(a, b, *scales, bias)
    assert torch.equal(found, matmul.scaled_mm(a, b, *scales, bias))
    assert torch.equal(largest, found.abs().amax().float().reshape(1))
    assert matmul.scaled_mm_amax(a[:0], b, scales[0][:0], scales[1])[1].item() == 0
    torch.library.opcheck(torch.ops.qsync_opt.scaled_mm_amax.default, (a, b, *scales, bias, torch.bfloat16))
