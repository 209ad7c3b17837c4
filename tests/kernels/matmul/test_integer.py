import pytest
import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import backend
from qsync_opt.kernels.matmul import exact_convolution, int8_bmm, int8_mm, integer


def _codes(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def _transposed_in_memory(codes):
    return torch.empty(codes.t().shape, dtype=codes.dtype).copy_(codes.t()).t()


@pytest.mark.parametrize("how", ["auto", "reference"])
@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (3, 5, 1), (17, 33, 65), (2, 2000, 3), (0, 4, 3), (3, 0, 4)])
def test_products_are_exact(how, n, k, m):
    a, b = _codes(n, k), _codes(k, m)
    expected = (a.double() @ b.double()).to(torch.int32)
    assert torch.equal(int8_mm(a, b, how), expected)
    assert torch.equal(int8_mm(a, _codes(m, k).copy_(b.t()).t(), how), expected)
    batch_a, batch_b = _codes(3, n, k), _codes(3, k, m)
    expected = (batch_a.double() @ batch_b.double()).to(torch.int32)
    assert torch.equal(int8_bmm(batch_a, batch_b, how), expected)


@pytest.mark.parametrize(("n", "k", "m"), [(5, 1, 6), (1, 4, 6), (1, 1, 4), (4, 6, 1)])
def test_products_of_single_rows_and_columns_are_exact_in_every_layout(n, k, m):
    a, b = _codes(n, k), _codes(k, m)
    expected = a.int() @ b.int()
    for left in (a, _transposed_in_memory(a)):
        for right in (b, _transposed_in_memory(b)):
            assert torch.equal(int8_mm(left, right), expected)
            assert torch.equal(int8_bmm(left[None], right[None])[0], expected)


@pytest.mark.parametrize("how", ["auto", "reference"])
def test_the_largest_sums_are_exact(how):
    a = torch.full((4, 5000), 127, dtype=torch.int8)
    b = torch.full((5000, 4), -127, dtype=torch.int8)
    b[0, 0] = -126
    product = int8_mm(a, b, how)
    assert product[0, 0].item() == -5000 * 127 * 127 + 127
    assert product[1, 1].item() == -5000 * 127 * 127


CONVOLUTIONS = [
    # x, weight, stride, padding, dilation, groups
    ((2, 3, 9), (4, 3, 3), (2,), (1,), (1,), 1),
    ((1, 6, 8, 7), (4, 3, 3, 2), (1, 2), (1, 0), (2, 1), 2),
    ((2, 4, 5, 5), (4, 1, 3, 3), (1, 1), (1, 1), (1, 1), 4),
    ((1, 130, 6, 6), (5, 130, 3, 3), (1, 1), (0, 0), (1, 1), 1),
    ((1, 2, 4, 5, 6), (3, 2, 2, 2, 3), (1, 1, 2), (0, 1, 1), (1, 1, 1), 1),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("how", ["auto", "compiled", "reference"])
def test_convolutions_are_exact(case, how):
    x_shape, w_shape, stride, padding, dilation, groups = case
    if how == "compiled" and not integer.has_native_product(torch.device("cpu")):
        pytest.skip("this CPU has no exact integer product")
    x, weight = _codes(*x_shape), _codes(*w_shape)
    geometry = (stride, padding, dilation, False, (0,) * len(stride), groups)
    expected = torch.convolution(x.double(), weight.double(), None, *geometry).to(torch.int32)
    assert torch.equal(exact_convolution(x, weight, geometry, how), expected)


def test_compiled_refuses_where_there_is_no_integer_product(monkeypatch):
    monkeypatch.setattr(integer, "has_native_product", lambda device: False)
    with pytest.raises(UnsupportedError, match="compiled"):
        int8_mm(_codes(2, 2), _codes(2, 2), "compiled")
    assert int8_mm(_codes(2, 2), _codes(2, 2), "auto").dtype is torch.int32


def test_explain_says_what_runs():
    text = backend.explain("cpu")
    assert set(text) == {"linear", "convolution", "batched", "product", "attention"}
    assert all(text.values())


def test_cuda_precisions_by_capability():
    assert backend.cuda_precisions((7, 0)) == ("FP16", "FP32")
    assert backend.cuda_precisions((7, 5)) == ("INT8-BWD8", "INT8", "FP16", "FP32")
    assert backend.cuda_precisions((8, 6)) == ("INT8-BWD8", "INT8", "BF16", "FP16", "TF32", "FP32")
    assert backend.cuda_precisions((9, 0)) == (
        *("INT8-BWD8", "INT8", "FP8-BWD8", "FP8"),
        *("BF16", "FP16", "TF32", "FP32"),
    )
    with pytest.raises(UnsupportedError, match="meta"):
        backend.device_precisions("meta")
