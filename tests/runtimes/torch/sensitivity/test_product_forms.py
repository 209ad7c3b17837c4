"""Reductions against the operator itself, run on non-negative tensors: T(a, b, c) = sum(f(a, b) * c)."""

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.numerics import Granularity
from qsync_opt.runtimes.torch.sensitivity import operand_slots, product_of, replace_operands


def conv(function, **options):
    return lambda x, w: ((x, w), options, function)


CASES = {
    "linear": ("linear", lambda x, w: ((x, w), {}, F.linear), (3, 5, 4), (6, 4)),
    "linear vector": ("linear", lambda x, w: ((x, w), {}, F.linear), (4,), (6, 4)),
    "mm": ("mm", lambda x, w: ((x, w), {}, torch.mm), (3, 4), (4, 5)),
    "mm by keyword": ("mm", lambda x, w: ((x,), {"mat2": w}, torch.mm), (3, 4), (4, 5)),
    "bmm": ("bmm", lambda x, w: ((x, w), {}, torch.bmm), (2, 3, 4), (2, 4, 5)),
    "matmul broadcast": ("matmul", lambda x, w: ((x, w), {}, torch.matmul), (2, 1, 3, 4), (5, 4, 6)),
    "matmul with a matrix": ("matmul", lambda x, w: ((x, w), {}, torch.matmul), (2, 3, 4), (4, 5)),
    "matmul of vectors": ("matmul", lambda x, w: ((x, w), {}, torch.matmul), (4,), (4,)),
    "reversed matmul": ("matmul", lambda x, w: ((w, x), {}, torch.Tensor.__rmatmul__), (3, 4), (4, 5)),
    "addmm": ("addmm", lambda x, w: ((torch.zeros(5), x, w), {}, torch.addmm), (3, 4), (4, 5)),
    "einsum": ("einsum", lambda x, w: (("bhid,bhjd->bhij", x, w), {}, torch.einsum), (2, 3, 4, 5), (2, 3, 6, 5)),
    "einsum list": ("einsum", lambda x, w: (("bi,ij", [x, w]), {}, torch.einsum), (3, 4), (4, 5)),
    "einsum ellipsis": ("einsum", lambda x, w: (("...i,ji->...j", x, w), {}, torch.einsum), (2, 3, 4), (5, 4)),
    "einsum with a lone sum": ("einsum", lambda x, w: (("abk,kc->ac", x, w), {}, torch.einsum), (2, 3, 4), (4, 5)),
    "einsum outer": ("einsum", lambda x, w: (("i,j->ji", x, w), {}, torch.einsum), (3,), (4,)),
    "conv1d": ("conv1d", conv(F.conv1d, padding=2), (2, 3, 9), (4, 3, 5)),
    "conv1d without batch": ("conv1d", conv(F.conv1d), (3, 9), (4, 3, 5)),
    "conv2d same": ("conv2d", conv(F.conv2d, padding="same"), (2, 3, 6, 5), (4, 3, 3, 2)),
    "conv2d grouped": (
        "conv2d",
        conv(F.conv2d, stride=2, padding=(2, 1), dilation=2, groups=2),
        (3, 4, 9, 8),
        (6, 2, 3, 3),
    ),
    "conv2d pointwise": ("conv2d", conv(F.conv2d), (2, 6, 4, 5), (8, 6, 1, 1)),
    "conv2d pointwise with steps": ("conv2d", conv(F.conv2d, stride=(2, 3), groups=2), (3, 4, 7, 8), (6, 2, 1, 1)),
    "conv2d pointwise padded": ("conv2d", conv(F.conv2d, padding=1), (2, 3, 4, 4), (5, 3, 1, 1)),
    "conv3d": ("conv3d", conv(F.conv3d, stride=(1, 2, 1)), (2, 2, 4, 5, 4), (3, 2, 2, 3, 2)),
    "conv_transpose1d": ("conv_transpose1d", conv(F.conv_transpose1d, padding=1), (2, 3, 6), (3, 4, 3)),
    "conv_transpose2d": (
        "conv_transpose2d",
        conv(F.conv_transpose2d, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 5, 4),
        (4, 3, 3, 3),
    ),
}


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


@pytest.fixture(params=list(CASES))
def case(request):
    op_type, call, first, second = CASES[request.param]
    generator = torch.Generator().manual_seed(1)

    def run(x, w):
        args, kwargs, function = call(x, w)
        return function(*args, **kwargs)

    def form(x, w):
        args, kwargs, function = call(x, w)
        return product_of(op_type, function, args, kwargs).form

    x, w = (torch.rand(shape, generator=generator) for shape in (first, second))
    return run, form, x, w, torch.rand(run(x, w).shape, generator=generator)


def dot(a, b):
    return float((a * b).sum())


def convolved(form):
    return hasattr(form, "geometry")


def test_contraction(case):
    run, form_of, x, w, _ = case
    form = form_of(x, w)
    if convolved(form):
        found = dot(form.first_by_contraction(form.first), form.by_input_channel(form.second))
    else:
        found = dot(form.first.sum(1), form.second.sum(2))
    assert found == pytest.approx(float(run(x, w).sum()), rel=1e-5)


def test_rows(case):
    run, form_of, x, w, c = case
    form = form_of(x, w)
    if convolved(form):
        found = dot(form.first_by_row(form.first), form.merge_groups(form.result(c)))
    else:
        found = dot(form.first.sum(2), form.result(c).sum(2))
    assert found == pytest.approx(float((run(x, torch.ones_like(w)) * c).sum()), rel=1e-5)


def test_columns(case):
    run, form_of, x, w, c = case
    form = form_of(x, w)
    if convolved(form):
        weights = form.by_output_channel(form.second)
        by_position = dot(form.columns_by_position(weights), form.result(c).sum(0, keepdim=True))
        found = dot(weights, form.columns_of_weight(form.result(c)))
        assert by_position == pytest.approx(found, rel=1e-5)
    else:
        found = dot(form.second.sum(1), form.result(c).sum(1))
    assert found == pytest.approx(float((run(torch.ones_like(x), w) * c).sum()), rel=1e-5)


def test_volume_counts_multiplications_padding_included(case):
    run, form_of, x, w, _ = case
    form = form_of(x, w)
    ones = float(run(torch.ones_like(x), torch.ones_like(w)).sum())
    assert form.sizes.volume >= ones * (1 - 1e-6)
    if form.first.dim() == 3 and not convolved(form):
        assert form.sizes.volume == pytest.approx(ones)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("conv")])
def test_sampled_rows_belong_to_the_sample(name):
    op_type, call, first, second = CASES[name]
    args, kwargs, function = call(torch.rand(first), torch.rand(second))
    form, c = product_of(op_type, function, args, kwargs).form, torch.rand_like(function(*args, **kwargs))
    part, rows = form.sample(1)
    by_row = form.first.sum(2)[:, rows]
    torch.testing.assert_close(part.sum(2), by_row)
    assert form.result(c).sum(2)[:, rows].shape == by_row.shape


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("conv")])
def test_sums_at_positions_of_the_input_are_those_of_rows_and_contractions(name):
    op_type, call, first, second = CASES[name]
    x, w = torch.rand(first), torch.rand(second)
    args, kwargs, function = call(x, w)
    form = product_of(op_type, function, args, kwargs).form
    c = torch.rand(form.first_by_row(form.first).shape)
    merged = form.first.unflatten(1, (form.sizes.products, -1)).sum(2)
    assert dot(merged, form.rows_by_position(c)) == pytest.approx(dot(form.first_by_row(form.first), c), rel=1e-5)
    weights = form.by_input_channel(form.second)
    assert dot(form.first, form.contraction_by_position(weights)) == pytest.approx(
        dot(form.first_by_contraction(form.first), weights), rel=1e-5
    )
    assert form.result_places == tuple(form.result(function(*args, **kwargs)).shape[2:])


def test_scales_per_row_and_channel_can_leave_an_integer_product():
    x, w = torch.rand(2, 4, 5, 5), torch.rand(6, 4, 3, 3)
    form = product_of("conv2d", F.conv2d, (x, w), {}).form
    assert form.slice_dims("first", Granularity.ROW) == (1, 2, 3)
    assert form.slice_dims("first", Granularity.CHANNEL) == (0, 2, 3)
    assert form.slice_dims("second", Granularity.CHANNEL) == (1, 2, 3)
    transposed = product_of("conv_transpose2d", F.conv_transpose2d, (x, torch.rand(4, 6, 3, 3)), {}).form
    assert transposed.slice_dims("second", Granularity.CHANNEL) == (0, 2, 3)


@pytest.mark.parametrize("name", list(CASES))
def test_operands_are_found_and_replaced_wherever_they_stand(name):
    op_type, call, first, second = CASES[name]
    x, w = torch.rand(first), torch.rand(second)
    args, kwargs, function = call(x, w)
    slots = operand_slots("op", op_type, function, args, kwargs)
    assert [slot.tensor is operand for slot, operand in zip(slots, (x, w), strict=True)] == [True, True]
    new_args, new_kwargs = replace_operands(args, kwargs, slots, [2 * x, 3 * w])
    torch.testing.assert_close(function(*new_args, **new_kwargs), 6 * function(*args, **kwargs))


def test_einsum_that_is_no_product_of_two_is_refused():
    a = torch.rand(3, 3)
    with pytest.raises(UnsupportedError, match="operator 'mix/einsum': einsum of 3 tensors"):
        operand_slots("mix/einsum", "einsum", torch.einsum, ("ij,jk,kl->il", a, a, a), {})


def test_missing_operand_is_named():
    with pytest.raises(UnsupportedError, match="operator 'fc/linear' was called without its argument 'weight'"):
        operand_slots("fc/linear", "linear", F.linear, (torch.rand(2),), {})
