"""Second derivatives in few kernels: those that torch's own formulas have."""

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.probes import batch_norm_twice, product_twice


def _twice(run, operands, *, seed=3):
    """Result, gradients, and derivatives of gradients and result together by all operands and by what comes back."""
    tensors = [x.clone().requires_grad_() for x in operands]
    aliases = [x.view_as(x) for x in tensors]
    output = run(*aliases)
    generator = torch.Generator().manual_seed(seed)
    signs = lambda x: torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1  # noqa: E731
    back = (output.detach() * signs(output)).requires_grad_()
    # A loss that is not linear, so that the result's own derivative matters too.
    loss = (output.tanh() * back).sum()
    gradients = torch.autograd.grad(loss, tensors, torch.ones_like(loss, requires_grad=True), create_graph=True)
    projected = sum((g * signs(g)).sum() for g in gradients)
    return output, gradients, torch.autograd.grad(projected, [*tensors, back])


def _same(found, expected):
    output, gradients, derivatives = found
    torch.testing.assert_close(output, expected[0])
    for ours, theirs in zip((*gradients, *derivatives), (*expected[1], *expected[2]), strict=True):
        torch.testing.assert_close(ours, theirs)


def _operands(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_of_a_linear_layer(defer, bias):
    operands = _operands((2, 3, 40), (30, 40), (30,))[: 2 + bias]
    run = lambda *x: product_twice("linear", x, {}, defer=defer, trained=(True, True))[0]  # noqa: E731
    _same(_twice(run, operands), _twice(F.linear, operands))


@pytest.mark.parametrize(
    ("op_type", "function", "shapes", "options"),
    [
        ("conv2d", F.conv2d, ((3, 4, 7, 6), (8, 4, 3, 3), (8,)), {"stride": 2, "padding": 1}),
        ("conv2d", F.conv2d, ((3, 4, 7, 6), (8, 2, 3, 3)), {"groups": 2, "padding": "same"}),
        ("conv2d", F.conv2d, ((3, 4, 7, 6), (8, 4, 1, 1)), {}),
        ("conv1d", F.conv1d, ((4, 9), (6, 4, 3), (6,)), {"dilation": 2}),
        ("conv_transpose2d", F.conv_transpose2d, ((2, 4, 5, 5), (4, 6, 3, 3), (6,)), {"stride": 2}),
    ],
)
@pytest.mark.parametrize("defer", [False, True])
def test_of_a_convolution(op_type, function, shapes, options, defer):
    operands = _operands(*shapes)
    run = lambda *x: product_twice(op_type, x, options, defer=defer, trained=(True, True))[0]  # noqa: E731
    _same(_twice(run, operands), _twice(lambda *x: function(*x, **options), operands))


def test_operands_that_are_not_trained_get_their_second_derivative_alone():
    x, w = _operands((2, 5), (3, 5))
    found = []
    for run in (F.linear, lambda *a: product_twice("linear", a, {}, defer=True, trained=(False, True))[0]):
        alias, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = run(alias, weight).tanh().sum()
        (gradient,) = torch.autograd.grad(loss, weight, torch.ones_like(loss, requires_grad=True), create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [alias, weight]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_deferred_derivatives_are_available_without_a_derivative_of_the_result():
    x, w = _operands((2, 5), (30, 5))
    derivatives = []
    for twice in (False, True):
        alias, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        output, pending = product_twice("linear", (alias, weight), {}, defer=True, trained=(True, True))
        if not twice:
            output = F.linear(alias, weight)
        loss = output.sum()  # linear: its second derivative by the result is none
        (gradient,) = torch.autograd.grad(loss, alias, torch.ones_like(loss, requires_grad=True), create_graph=True)
        (found,) = torch.autograd.grad(gradient.square().sum(), weight, allow_unused=True)
        derivatives.append(found if found is not None else pending.pop())
    torch.testing.assert_close(*derivatives)
    assert pending.pop() is None


@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (7, 5), (4, 5, 6)])
def test_of_a_batch_normalization(shape):
    x, weight, bias = _operands(shape, (5,), (5,))
    x = x * 3 + 2
    stats = [torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
    ours = [t.clone() for t in stats]

    def run(x, weight, bias):
        args = (x, *ours, weight, bias, True, 0.3, 1e-3)
        return batch_norm_twice(OperatorCall("norm", "batch_norm", "", F.batch_norm, args, {}))

    expected = _twice(lambda x, w, b: F.batch_norm(x, *stats, w, b, True, 0.3, 1e-3), (x, weight, bias))
    _same(_twice(run, (x, weight, bias)), expected)
    for mine, theirs in zip(ours, stats, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_weights_of_a_normalization_that_are_computed_keep_their_derivative():
    x, raw, bias = _operands((6, 5, 4), (5,), (5,))

    def run(x, raw, bias):
        args = (x, None, None, raw.exp(), bias * 2, True, 0.1, 1e-5)
        return batch_norm_twice(OperatorCall("norm", "batch_norm", "", F.batch_norm, args, {}))

    expected = _twice(lambda x, w, b: F.batch_norm(x, None, None, w.exp(), b * 2, True, 0.1, 1e-5), (x, raw, bias))
    _same(_twice(run, (x, raw, bias)), expected)


def test_evaluation_and_other_kinds_are_left_to_torch():
    x = torch.randn(4, 3, requires_grad=True)
    args = (x, torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3), False)
    assert batch_norm_twice(OperatorCall("norm", "batch_norm", "", F.batch_norm, args, {})) is None
    assert product_twice("matmul", (x, x.mT), {}, defer=True, trained=(True, True)) is None
