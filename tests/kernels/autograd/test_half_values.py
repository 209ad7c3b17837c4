"""16-bit operators computed in FP32 from 16-bit values, as on processors without 16-bit instructions."""

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.kernels import KernelOptions, backend, ops
from qsync_opt.kernels.matmul import half

BF16_ROUNDING = 2.0**-8


@pytest.fixture
def without_units(monkeypatch):
    monkeypatch.setattr(half, "_has_half_units", lambda: False)


def _leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def _masked_attention(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


CALLS = {
    "linear": ("linear", F.linear, (_leaf, (2, 5, 7), (3, 7), (3,)), {}),
    "one row": ("linear", F.linear, (_leaf, (7,), (3, 7), (3,)), {}),
    "matmul": ("matmul", torch.matmul, (_leaf, (2, 3, 5, 7), (7, 4)), {}),
    "broadcast": ("matmul", torch.matmul, (_leaf, (2, 3, 5, 7), (3, 7, 4)), {}),
    "addmm": ("addmm", torch.addmm, (_leaf, (4,), (5, 7), (7, 4)), {}),
    "baddbmm": ("baddbmm", torch.baddbmm, (_leaf, (2, 5, 4), (2, 5, 7), (2, 7, 4)), {"beta": 0.5, "alpha": 2}),
    "conv2d": ("conv2d", F.conv2d, (_leaf, (2, 4, 9, 8), (6, 2, 3, 2), (6,)), {"stride": 2, "padding": 1, "groups": 2}),
    "conv1d": ("conv1d", F.conv1d, (_leaf, (3, 9), (4, 3, 3)), {"padding": 1}),
    "conv_transpose2d": ("conv_transpose2d", F.conv_transpose2d, (_leaf, (2, 3, 4, 4), (3, 2, 2, 2)), {"stride": 2}),
    "attention": ("scaled_dot_product_attention", F.scaled_dot_product_attention, (_leaf, *[(2, 3, 6, 8)] * 3), {}),
    "causal": (
        "scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        (_leaf, *[(2, 3, 6, 8)] * 3),
        {"is_causal": True, "scale": 0.3},
    ),
    "masked": ("scaled_dot_product_attention", _masked_attention, (_leaf, *[(2, 3, 6, 8)] * 3, (6, 6)), {}),
    "einsum": ("einsum", torch.einsum, ("bik,bkj->bij", (_leaf, (2, 3, 4), (2, 4, 5))), {}),
    "ellipsis": ("einsum", torch.einsum, ("...k,jk->...j", (_leaf, (2, 3, 4), (5, 4))), {}),
    "sum": ("einsum", torch.einsum, ("ik,jl->ij", (_leaf, (3, 4), (2, 5))), {}),
}


def _call(name):
    op_type, function, shapes, kwargs = CALLS[name]
    equation = ()
    if isinstance(shapes[0], str):
        equation, shapes = (shapes[0],), shapes[1]
    leaves = tuple(shapes[0](*shape) for shape in shapes[1:])
    return op_type, function, (*equation, *leaves), kwargs, leaves


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_the_16_bit_values(without_units, name):
    op_type, function, args, kwargs, leaves = _call(name)
    result = ops.execute(op_type, "BF16", function, args, kwargs)
    grad = torch.randn_like(result)
    gradients = torch.autograd.grad(result, leaves, grad)
    rounded = {id(leaf): leaf.detach().bfloat16().double().requires_grad_() for leaf in leaves}
    exact = function(*[rounded.get(id(value), value) for value in args], **kwargs)
    expected = torch.autograd.grad(exact, list(rounded.values()), grad.double())
    assert result.dtype is torch.bfloat16
    assert result.shape == exact.shape
    assert _norm_error(result, exact) < BF16_ROUNDING
    for mine, theirs in zip(gradients, expected, strict=True):
        assert mine.dtype is torch.float32
        assert _norm_error(mine, theirs) < 2 * BF16_ROUNDING
        assert torch.equal(mine, mine.bfloat16().float())  # rounded as the operator's own gradients are


@pytest.mark.parametrize("name", [name for name in CALLS if name != "masked"])
def test_both_paths_agree_to_the_last_rounding(monkeypatch, name):
    op_type, function, args, kwargs, leaves = _call(name)
    results = []
    for has_units in (True, False):
        monkeypatch.setattr(half, "_has_half_units", lambda has_units=has_units: has_units)
        monkeypatch.setattr(half, "_has_matrix_units", lambda: True)
        result = ops.execute(op_type, "BF16", function, args, kwargs)
        gradients = torch.autograd.grad(result, leaves, torch.ones_like(result))
        results.append((result, *gradients))
    # Torch's fused attention rounds its weights to 16 bits too, and some convolutions add the bias to a rounded sum.
    allowed = BF16_ROUNDING * (4 if op_type == "scaled_dot_product_attention" else 2)
    for one, other in zip(*results, strict=True):
        assert one.dtype is other.dtype
        assert _norm_error(one, other) < allowed


@pytest.mark.parametrize("name", ["linear", "matmul", "conv2d", "attention", "einsum"])
def test_what_is_saved_has_16_bits(without_units, name):
    op_type, function, args, kwargs, _ = _call(name)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        ops.execute(op_type, "BF16", function, args, kwargs)
    wide = [t for t in saved if t.dtype is torch.float32]
    assert saved
    assert sum(t.numel() for t in wide) <= (36 if name == "attention" else 0)  # one number per row of queries


def test_dropout_of_attention_is_the_same_in_both_passes(without_units):
    query, key, value = (_leaf(1, 2, 6, 6) for _ in range(3))
    with torch.no_grad():
        value.copy_(torch.eye(6))
    kwargs = {"dropout_p": 0.5}
    result = ops.execute(
        "scaled_dot_product_attention", "BF16", F.scaled_dot_product_attention, (query, key, value), kwargs
    )
    before = torch.get_rng_state()
    result.float().sum().backward()
    assert torch.equal(before, torch.get_rng_state())
    # With the identity for values the result is the weights after dropout; the gradient of a value sums its column.
    assert (result == 0).any()
    assert _norm_error(value.grad, result.detach().float().sum(2)[..., None].expand_as(value)) < 2 * BF16_ROUNDING


@pytest.mark.parametrize("name", ["linear", "matmul", "addmm", "conv2d", "masked", "einsum", "ellipsis"])
def test_gradients_can_be_differentiated_again(without_units, name):
    op_type, function, args, kwargs, leaves = _call(name)

    def penalty(run, args, leaves):
        gradients = torch.autograd.grad(run(args).float().square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in gradients), leaves)

    mine = penalty(lambda values: ops.execute(op_type, "BF16", function, values, kwargs), args, leaves)
    doubles = {id(leaf): leaf.detach().double().requires_grad_() for leaf in leaves}
    exact = [doubles.get(id(value), value) for value in args]

    def plain(values):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return function(*values, **kwargs).to(torch.float64)

    def penalty_64(args, leaves):
        gradients = torch.autograd.grad(plain(args).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)

    for one, other in zip(mine, penalty_64(exact, list(doubles.values())), strict=True):
        assert _norm_error(one, other) < 0.05


def test_transforms_of_torch_func_keep_torchs_own_path(without_units):
    weight = torch.randn(3, 7)
    rows = torch.func.vmap(lambda x: ops.execute("linear", "BF16", F.linear, (x, weight)))(torch.randn(4, 7))
    assert rows.shape == (4, 3)


def test_empty_operands(without_units):
    x, weight = torch.randn(0, 7, requires_grad=True), _leaf(3, 7)
    result = ops.execute("linear", "BF16", F.linear, (x, weight))
    result.sum().backward()
    assert result.shape == (0, 3)
    assert not weight.grad.any()


def test_8_bit_gradients_do_not_depend_on_the_path(monkeypatch):
    x, weight = _leaf(6, 1100), _leaf(5, 1100)
    image, taps = _leaf(2, 4, 6, 6), _leaf(4, 4, 3, 3)
    for backward in ("half", "eight"):
        options, results = KernelOptions(backward=backward), []
        for has_units in (True, False):
            monkeypatch.setattr(half, "_has_half_units", lambda has_units=has_units: has_units)
            line = ops.execute("linear", "INT8", F.linear, (x, weight), {}, options)
            convolved = ops.execute("conv2d", "INT8", F.conv2d, (image, taps), {}, options)
            gradients = torch.autograd.grad(line.float().sum(), (x, weight))
            results.append((*gradients, *torch.autograd.grad(convolved.float().square().sum(), (image, taps))))
        for one, other in zip(*results, strict=True):
            assert _norm_error(one, other) < 2 * BF16_ROUNDING


def test_explain_says_which_path_runs(without_units, monkeypatch):
    text = backend.explain("cpu")
    assert text["product"] == "FP32 arithmetic on 16-bit values: no BF16 instructions here"
    assert text["attention"].startswith("FP32 arithmetic")
    monkeypatch.setattr(half, "_has_half_units", lambda: True)
    assert backend.explain("cpu")["product"] == "BF16 instructions"
