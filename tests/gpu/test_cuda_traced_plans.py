"""Planned models that are compiled, and planned steps that are captured as a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def _planned(precision, **options):
    if not ops.supports("linear", precision, CUDA):
        pytest.skip(f"this card has no {precision}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 64), nn.LogSoftmax(-1))
    plan = {"0/linear": precision, "3/linear": precision}
    return apply(model.to(CUDA), plan, options=ApplyOptions(kernels=KernelOptions(**options))), torch.randn(
        384, 256, device=CUDA
    )


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def _step(run, model, x):
    model.zero_grad(set_to_none=True)
    output = run(x)
    output.square().mean().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("precision", ["INT8", "FP8"])
@pytest.mark.parametrize("backward", ["half", "eight"])
def test_a_compiled_plan_trains_as_the_eager_one(precision, backward):
    model, x = _planned(precision, backward=backward)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    outputs = []
    for _ in range(3):
        mine, theirs = _step(compiled, model, x), _step(model, model, x)
        # The noise differs: errors are those of two independent roundings.
        assert max(map(_norm_error, mine, theirs)) < {"INT8": 0.08, "FP8": 0.3}[precision]
        outputs.append(mine[0])
    assert not torch.equal(outputs[1], outputs[2])
    model.eval()
    with torch.no_grad():
        assert torch.equal(compiled(x), compiled(x))


def test_a_captured_step_has_new_noise_and_the_present_weights():
    model, x = _planned("INT8", backward="eight", weights="step")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            _step(model, model, x)  # the codes of the weights are kept now, and must not get into the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = _step(model, model, x)[0]
        results = []
        for _ in range(2):
            graph.replay()
            results.append(output.clone())
        with torch.no_grad():
            model[3].weight.zero_()
            model[3].bias.copy_(torch.arange(64.0))
        graph.replay()
    stream.synchronize()
    assert not torch.equal(*results)
    assert 0 < _norm_error(*results) < 0.05
    assert _norm_error(output, torch.arange(64.0, device=CUDA).log_softmax(-1).expand(384, 64)) < 1e-2


class _Masked(nn.Module):
    """Attention whose mask is expanded along the keys, and follows from no input unless ``shown`` is one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(64, 192)

    def forward(self, x, shown=None):
        positions = torch.arange(x.shape[1], device=x.device)
        visible = positions >= 0 if shown is None else shown
        mask = visible[None, None, :, None].expand(x.shape[0], 1, -1, x.shape[1])
        heads = self.project(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads, attn_mask=mask)


def _fused(run):
    """Whether attention runs in a fused kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return any(part in event.name for event in profile.events() for part in ("flash", "fmha"))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("autocast", ["BF16", None])
def test_attention_under_a_mask_that_is_expanded_along_the_keys_is_fused(autocast, given):
    model, x = _Masked().to(CUDA), torch.randn(4, 128, 64, device=CUDA)
    batch = (x, torch.ones(128, dtype=torch.bool, device=CUDA)) if given else (x,)
    expected = model(*batch)
    with torch.autocast("cuda", torch.bfloat16):
        assert not _fused(lambda: model(*batch))
    plan = {"project/linear": "BF16", "scaled_dot_product_attention": "BF16"}
    apply(model, plan, options=ApplyOptions(autocast=autocast, compiled=True))
    result = model(*batch)
    result.float().square().mean().backward()
    assert _fused(lambda: model(*batch))
    assert _norm_error(result, expected) < 0.02
    assert model.project.weight.grad.isfinite().all()
