import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions, layers
from qsync_opt.kernels.autograd import chunk_rows, linear_cross_entropy

ROWS, FEATURES, CLASSES = 37, 16, 29


def _data(dtype=torch.float64, ignored=5):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(CLASSES, FEATURES, generator=generator, dtype=torch.float64)
    b = torch.randn(CLASSES, generator=generator, dtype=torch.float64)
    w, b = (t.to(torch.float64 if dtype is torch.float64 else torch.float32).requires_grad_() for t in (w, b))
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[:ignored] = -100
    return x, w, b, target


def _chunked(x, w, b, target, rows, precision="", options=None, **how):
    return linear_cross_entropy(x, w, b, target, precision, options or KernelOptions(), rows=rows, **how)


@given(
    rows=st.integers(1, ROWS + 3),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored=st.integers(0, ROWS - 1),
    has_bias=st.booleans(),
    scale=st.floats(-3, 3),
)
@settings(max_examples=60, deadline=None)
def test_loss_and_gradients_are_those_of_torch(rows, smoothing, reduction, ignored, has_bias, scale):
    x, w, b, target = _data(ignored=ignored)
    b = b if has_bias else None
    leaves = [t for t in (x, w, b) if t is not None]
    how = {"label_smoothing": smoothing, "reduction": reduction}
    expected = F.cross_entropy(F.linear(x, w, b), target, **how)
    loss = _chunked(x, w, b, target, rows, **how)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    pairs = zip(torch.autograd.grad(loss * scale, leaves), torch.autograd.grad(expected * scale, leaves), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_the_layer_and_a_loss_in_fp32(dtype):
    x, w, b, target = _data(dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    true = torch.autograd.grad(F.cross_entropy(F.linear(*exact), target), exact)
    usual_loss = F.cross_entropy(F.linear(x, w.to(dtype), b.to(dtype)).float(), target)
    usual = torch.autograd.grad(usual_loss, (x, w, b))
    loss = _chunked(x, w, b, target, 8)
    assert loss.dtype is torch.float32
    assert abs(loss.item() - usual_loss.item()) < 2e-6 * usual_loss.item()
    for mine, theirs, reference, leaf in zip(torch.autograd.grad(loss, (x, w, b)), usual, true, (x, w, b), strict=True):
        assert mine.dtype is leaf.dtype
        error, usual_error = ((t.double() - reference).norm() / reference.norm() for t in (mine, theirs))
        assert error <= 1.2 * usual_error + 1e-6


def test_no_target_counts():
    x, w, b, target = _data(ignored=ROWS)
    loss = _chunked(x, w, b, target, 8)
    assert loss.isnan()
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (x, w, b)))
    assert _chunked(x, w, b, target, 8, reduction="sum").item() == 0.0


def test_small_gradients_survive_fp16():
    x, w, b, target = _data(torch.float16)
    loss = _chunked(x, w, b, target, 8)
    (gradient,) = torch.autograd.grad(loss * 2.0**-14, w)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    (true,) = torch.autograd.grad(F.cross_entropy(F.linear(*exact), target) * 2.0**-14, exact[1])
    assert (gradient.double() - true).norm() < 2e-3 * true.norm()


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
@pytest.mark.parametrize("backward", ["half", "eight"])
def test_gradients_in_8_bits_are_unbiased(precision, backward):
    x, w, b, target = _data(torch.float32)
    exact = torch.autograd.grad(F.cross_entropy(F.linear(x, w, b), target), (x, w))
    draws, totals, squares = 300, [0.0, 0.0], [0.0, 0.0]
    for offset in range(draws):
        options = KernelOptions(backward=backward, weight_granularity="tensor", offset=offset)
        parts = torch.autograd.grad(_chunked(x, w, b, target, 16, precision, options), (x, w))
        for i, part in enumerate(parts):
            totals[i], squares[i] = totals[i] + part.double(), squares[i] + part.double().square()
    for total, square, true in zip(totals, squares, exact, strict=True):
        mean = total / draws
        spread = (square / draws - mean.square()).clamp_min(0).sqrt()
        # Six standard errors; rounded logits shift probabilities, by the curvature of the softmax.
        shift = (mean - true).abs() - 6 * spread / draws**0.5
        assert float(shift.max()) < 0.04 * float(true.abs().max())


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_a_weight_gradient_that_is_added_in_parts_is_the_same(precision, monkeypatch):
    x, w = torch.randn(96, 32), torch.randn(600, 32, requires_grad=True)
    target = torch.randint(0, 600, (96,))

    def gradient():
        options = KernelOptions(backward="eight", weight_granularity="tensor")
        return torch.autograd.grad(_chunked(x, w, None, target, 32, precision, options), w)[0]

    in_parts = gradient()
    monkeypatch.setattr("qsync_opt.kernels.autograd.products._PARTS", 1)
    assert torch.equal(in_parts, gradient())


def test_logits_of_all_tokens_never_exist(monkeypatch):
    softened, plain = [], F.log_softmax

    def log_softmax(logits, *args, **kwargs):
        softened.append(logits.shape[0])
        return plain(logits, *args, **kwargs)

    x, w, b, target = _data(torch.float32)
    monkeypatch.setattr("qsync_opt.kernels.autograd.chunked_loss.CHUNK_BYTES", 0)
    monkeypatch.setattr("qsync_opt.kernels.autograd.chunked_loss._ALIGNED", 8)
    monkeypatch.setattr("qsync_opt.kernels.autograd.chunked_loss.F.log_softmax", log_softmax)
    layers.linear_cross_entropy(x, w, target, b).backward()
    assert softened == [8, 8, 8, 8, 5]


@pytest.mark.parametrize(("rows", "classes"), [(8192, 32000), (100, 10), (0, 5), (5000, 10**9), (8191, 50257)])
def test_chunks_are_equal_and_within_their_bytes(rows, classes):
    count = chunk_rows(rows, classes)
    assert count >= 1
    assert count == rows or count * classes * 4 <= 256 * 2**20 + 128 * classes * 4 or rows == 0


def test_shift_is_that_of_a_causal_language_model():
    x, w, _, _ = _data(torch.float32)
    x, target = x[:36].view(3, 12, FEATURES), torch.randint(CLASSES, (3, 12))
    expected = F.cross_entropy(F.linear(x, w)[:, :-1].reshape(-1, CLASSES), target[:, 1:].reshape(-1))
    torch.testing.assert_close(layers.linear_cross_entropy(x, w, target, shift=True), expected)


def test_module_has_the_parameters_of_a_linear_layer():
    torch.manual_seed(0)
    plain, module = torch.nn.Linear(FEATURES, CLASSES), layers.LinearCrossEntropy(FEATURES, CLASSES, ignore_index=3)
    module.load_state_dict(plain.state_dict())
    x, target = torch.randn(2, 5, FEATURES), torch.randint(CLASSES, (2, 5))
    expected = F.cross_entropy(plain(x).view(-1, CLASSES), target.view(-1), ignore_index=3)
    torch.testing.assert_close(module(x, target), expected)
    torch.testing.assert_close(module.logits(x), plain(x))


def test_autocast_decides_where_it_is_on():
    x, w, b, target = _data(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = layers.linear_cross_entropy(x, w, target, b)
    assert torch.equal(loss, layers.linear_cross_entropy(x, w, target, b, precision="BF16"))
    assert not torch.equal(loss, layers.linear_cross_entropy(x, w, target, b))


def test_compiled_passes_give_the_same():
    x, w, b, target = _data(torch.float32)
    compiled = torch.compile(layers.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    mine, theirs = (
        torch.autograd.grad(run(x, w, target, b, label_smoothing=0.1), (x, w, b))
        for run in (compiled, layers.linear_cross_entropy)
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_refusals():
    x, w, _, target = _data(torch.float32)
    for arguments, how, text in (
        ((x, w.t(), target), {}, r"x is \(37, 16\) and weight \(16, 29\)"),
        ((x, w, target[1:]), {}, r"target is \(36,\)"),
        ((x, w, target.float()), {}, "for probabilities use F.cross_entropy"),
        ((x, w, target), {"reduction": "none"}, "reduction='none': allowed are mean, sum"),
        ((x, w, target), {"label_smoothing": 2.0}, "label_smoothing=2.0"),
        ((x, w, target), {"precision": "FP16"}, "cannot run in FP16 on cpu"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            layers.linear_cross_entropy(*arguments, **how)
    (gradient,) = torch.autograd.grad(layers.linear_cross_entropy(x, w, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()
