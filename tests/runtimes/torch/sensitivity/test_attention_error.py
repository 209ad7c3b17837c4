import pytest
import torch
import torch.nn.functional as F

from qsync_opt.runtimes.torch.sensitivity import attention_call, attention_errors

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.5},
    "boolean mask": {"attn_mask": torch.ones(6, 6).tril().bool()},
    "additive mask per head": {"attn_mask": torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))},
    "grouped": {"enable_gqa": True},
}


def operands(name):
    heads = 2 if name == "grouped" else 4
    return [torch.randn(2, h, 6, 8) for h in (4, heads, heads)]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("precision", ["BF16", "FP16"])
def test_errors_are_of_the_size_that_the_real_kernel_makes(name, precision):
    dtype = torch.bfloat16 if precision == "BF16" else torch.float16
    full = [x.requires_grad_() for x in operands(name)]
    low = [x.detach().to(dtype).requires_grad_() for x in full]
    grad = torch.randn(2, 4, 6, 8)
    exact, rough = (F.scaled_dot_product_attention(*x, **_mask_as(CASES[name], x[0].dtype)) for x in (full, low))
    exact_grads = torch.autograd.grad(exact, full, grad)
    rough_grads = torch.autograd.grad(rough, low, grad.to(dtype))
    measured = [
        float((a.detach() - b.detach().float()).square().sum())
        for a, b in zip((exact, *exact_grads), (rough, *rough_grads), strict=True)
    ]
    call = attention_call(tuple(x.detach() for x in full), CASES[name])
    found = attention_errors(call, grad)[precision].tolist()
    for predicted, real in zip(found, measured, strict=True):
        assert 0.5 < predicted / real < 2


def _mask_as(options, dtype):
    mask = options.get("attn_mask")
    return options if mask is None or mask.dtype is torch.bool else {**options, "attn_mask": mask.to(dtype)}


def test_sizes_are_those_of_the_two_products():
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 5)
    scores, mixed = attention_call((q, k, v), {}).sizes()
    assert (scores.products, scores.rows, scores.contraction, scores.columns) == (8, 6, 8, 7)
    assert (mixed.products, mixed.rows, mixed.contraction, mixed.columns) == (8, 6, 7, 5)


def test_tf32_rounds_less_than_bf16_and_fp16_is_infinite_beyond_its_range():
    q, k, v = operands("plain")
    found = attention_errors(attention_call((q, k, v), {}), torch.randn(2, 4, 6, 8))
    assert 0 < found["TF32"][0] < found["BF16"][0]
    large = attention_errors(attention_call((q, k, v * 1e6), {}), torch.randn(2, 4, 6, 8))
    assert torch.isinf(large["FP16"]).all()
    assert torch.isfinite(large["BF16"]).all() and torch.isfinite(large["TF32"]).all()
