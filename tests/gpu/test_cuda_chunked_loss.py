"""Cross-entropy of a linear layer in chunks on a card: against FP64, compiled, and under a plan."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.kernels import KernelOptions, backend, layers, ops
from qsync_opt.kernels.autograd import linear_cross_entropy
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROWS, FEATURES, CLASSES = 640, 128, 1000
BOUNDS = {"FP32": 1e-5, "TF32": 3e-3, "BF16": 1e-2, "FP16": 2e-3, "INT8": 0.05, "FP8": 0.1}


def _data():
    torch.manual_seed(0)
    x, w, b = (
        torch.randn(s, device=CUDA).requires_grad_() for s in ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    )
    target = torch.randint(CLASSES, (ROWS,), device=CUDA)
    target[::7] = -100
    with torch.no_grad():
        w.mul_(FEATURES**-0.5)
    return x, w, b, target


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("precision", [*BOUNDS, "INT8-BWD8", "FP8-BWD8"])
@pytest.mark.parametrize("rows", [128, 640])
def test_loss_and_gradients_against_fp64(precision, rows):
    if not ops.supports("linear", precision, CUDA):
        pytest.skip(f"this card has no {precision}")
    x, w, b, target = _data()
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    true = F.cross_entropy(F.linear(*exact), target, label_smoothing=0.1)
    options, operands = KernelOptions(half_format=backend.half_format(CUDA)), precision
    if precision not in ("FP32", "TF32", "BF16", "FP16"):
        operands, options = ops.eight_bit(precision, options)
    loss = linear_cross_entropy(x, w, b, target, operands, options, label_smoothing=0.1, rows=rows)
    assert abs(loss.item() - true.item()) < 0.01 * true.item()
    bound = 3 * BOUNDS[precision.removesuffix("-BWD8")]
    for mine, theirs in zip(torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(true, exact), strict=True):
        assert mine.dtype is torch.float32
        assert _norm_error(mine, theirs) < bound


def test_memory_is_that_of_a_chunk():
    classes, rows = 32000, 16384
    x = torch.randn(rows, 64, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    w, target = torch.randn(classes, 64, device=CUDA).requires_grad_(), torch.randint(classes, (rows,), device=CUDA)
    layers.linear_cross_entropy(x[:256], w, target[:256]).backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layers.linear_cross_entropy(x, w, target).backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * rows * classes  # the logits alone, in 16 bits


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(128, 256), layers.LinearCrossEntropy(256, CLASSES)

    def forward(self, x, target):
        return self.head(self.body(x), target)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("precision", ["BF16", "INT8", "INT8-BWD8", "FP8-BWD8"])
def test_a_compiled_plan_trains_as_the_eager_one(precision):
    if not ops.supports("linear", precision, CUDA):
        pytest.skip(f"this card has no {precision}")
    torch.manual_seed(0)
    model, x = Classifier().to(CUDA), torch.randn(384, 128, device=CUDA)
    target = torch.randint(CLASSES, (384,), device=CUDA)
    exact = F.cross_entropy(model.head.logits(model.body(x)), target)
    apply(model, {"body/linear": precision, "head/linear": precision}, options=ApplyOptions())
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    for run in (model, compiled, compiled):
        model.zero_grad()
        loss = run(x, target)
        loss.backward()
        assert abs(loss.item() - exact.item()) < 0.02 * exact.item()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_captured_loss_has_new_noise():
    x, w, b, target = (t.detach().requires_grad_() if t.is_floating_point() else t for t in _data())
    step = torch.zeros(1, dtype=torch.int64, device=CUDA)
    options = KernelOptions(backward="eight", weight_granularity="tensor", step=step, half_format="BF16")

    def run():
        return torch.autograd.grad(linear_cross_entropy(x, w, b, target, "INT8", options, rows=256), (x, w))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
        step.add_(1)
    graph.replay()
    first = [part.clone() for part in result]
    graph.replay()
    assert not any(torch.equal(a, b) for a, b in zip(first, result, strict=True))
