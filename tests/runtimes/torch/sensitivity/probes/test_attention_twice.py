"""Attention that is differentiated twice: what torch's own formulas have, and nothing of the scores' size kept."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_opt.runtimes.torch.sensitivity.probes import attention_twice

SEEN = torch.ones(5, 7, dtype=torch.bool).tril(1)
UNSEEN_ROW = SEEN.clone().index_fill_(0, torch.tensor([2]), False)


def _operands(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _twice(run, operands):
    """Result, gradients, and derivatives of products with them by all operands and by what comes back."""
    tensors = [x.clone().requires_grad_() for x in operands]
    output = run(*[x.view_as(x) for x in tensors])
    generator = torch.Generator().manual_seed(3)
    some = lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
    back = some(output).requires_grad_()
    loss = (output.tanh() * back).sum()  # not linear, so that the result's own derivative matters, too
    gradients = torch.autograd.grad(loss, tensors, torch.ones_like(loss, requires_grad=True), create_graph=True)
    projected = sum((g * some(g)).sum() for g in gradients)
    return output, *gradients, *torch.autograd.grad(projected, [*tensors, back])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": SEEN},
        {"attn_mask": UNSEEN_ROW},
        {"attn_mask": torch.linspace(-2, 2, 35, dtype=torch.float64).view(5, 7)},
    ],
    ids=["plain", "causal", "scaled", "seen", "row without anything seen", "added"],
)
@pytest.mark.parametrize("leading", [(2, 3), (4,)])
def test_of_attention(options, leading):
    operands = _operands((*leading, 5, 4), (*leading, 7, 4), (*leading, 7, 6))
    with sdpa_kernel(SDPBackend.MATH):
        wanted = _twice(lambda *x: F.scaled_dot_product_attention(*x, **options), operands)
    found = _twice(lambda *x: attention_twice(x, options), operands)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_operands_that_are_transposed():
    operands = _operands((2, 5, 3, 4), (2, 7, 3, 4), (2, 7, 3, 4))
    run = lambda of: lambda *x: of(*(y.transpose(1, 2) for y in x))  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        wanted = _twice(run(F.scaled_dot_product_attention), operands)
    for ours, theirs in zip(_twice(run(lambda *x: attention_twice(x, {})), operands), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_nothing_of_the_size_of_the_scores_is_kept():
    kept = []
    q, k, v = (x.requires_grad_() for x in _operands((2, 64, 4), (2, 64, 4), (2, 64, 4)))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        output = attention_twice((q, k, v), {"is_causal": True})
        start = torch.ones_like(output, requires_grad=True)
        torch.autograd.grad(output, (q, k, v), start, create_graph=True)
    assert kept
    assert max(kept) <= q.numel()


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"enable_gqa": True}])
def test_other_kinds_are_left_to_torch(options):
    assert attention_twice(_operands((2, 5, 4), (2, 7, 4), (2, 7, 4)), options) is None


def test_a_trained_mask_and_operands_that_are_broadcast_are_left_to_torch():
    q, k, mask = _operands((2, 5, 4), (2, 7, 4), (5, 7))
    assert attention_twice((q, k, k, mask.requires_grad_()), {}) is None
    assert attention_twice((q, k[:1], k[:1]), {}) is None
