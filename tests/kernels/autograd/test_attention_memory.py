"""Attention in 16 bits without 16-bit units: the fused kernel, part by part, with the results of the whole."""

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.kernels.autograd import half_values


def _operands(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).bfloat16().requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("shape", [(3, 12, 8), (3, 2, 12, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_three_and_four_dimensions_have_the_values_and_gradients_of_fp32(shape, causal, monkeypatch):
    monkeypatch.setattr(half_values, "_PART", 12 * 8)  # a part per sample
    operands = _operands(*shape)
    wide = [x.detach().float().requires_grad_() for x in operands]
    result = half_values.attention(*operands, is_causal=causal)
    expected = F.scaled_dot_product_attention(*wide, is_causal=causal)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.float(), expected, rtol=2**-7, atol=2**-7)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(result, operands, gradient.bfloat16())
    wanted = torch.autograd.grad(expected, wide, gradient)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-5, atol=2**-5)


def test_masks_of_three_dimensions():
    operands = _operands(3, 12, 8)
    mask = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(2)) > 0.3
    result = half_values.attention(*operands, attn_mask=mask)
    expected = F.scaled_dot_product_attention(*(x.detach().float() for x in operands), attn_mask=mask)
    torch.testing.assert_close(result.float(), expected, rtol=2**-7, atol=2**-7)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(result.sum(), operands))


def test_nothing_of_the_size_of_the_weights_of_attention_is_saved():
    operands = _operands(2, 64, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        half_values.attention(*operands)
    assert max(x.numel() for x in saved) < 2 * 64 * 64
