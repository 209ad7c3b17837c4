"""Planned models under torch.compile, and fixed operators that read 16 bits."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import ModelError
from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply, run_fixed, undo
from qsync_opt.runtimes.torch.interception import OperatorCall

pytestmark = [
    # torch's own, about a cache of constants.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


PLAN = {"0/linear": "INT8", "2/linear": "BF16"}


def _compiled(model):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)


def test_a_compiled_plan_is_one_graph_with_new_noise_in_every_pass():
    options = ApplyOptions(kernels=KernelOptions(backward="eight", weights="step"))
    model, x = apply(_model(), PLAN, options=options), torch.randn(8, 16)
    run = _compiled(model)
    results = [run(x) for _ in range(3)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not any(torch.equal(a, b) for a, b in ((results[0], results[1]), (results[1], results[2])))
    # A plan that takes over goes on behind the passes that the compiled code counted.
    assert applied_plan(model).options.kernels.offset == 3
    results[-1].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    exact = undo(model)(x)
    for result in results:
        assert ((result.double() - exact).norm() / exact.norm()).item() < 0.05
    model.eval()
    apply(model, PLAN, options=options)
    assert torch.equal(run(x), run(x))


def test_the_callers_counter_decides_the_noise():
    step = torch.zeros(1, dtype=torch.int64)
    model, x = apply(_model(), PLAN, options=ApplyOptions(kernels=KernelOptions(step=step))), torch.randn(8, 16)
    run = _compiled(model)
    first, again = run(x), run(x)
    step.add_(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, run(x))
    assert applied_plan(model).options.kernels.offset == 0


def test_an_operator_without_a_plan_is_named_while_compiling():
    model = apply(_model(), {"0/linear": "INT8"})
    run = _compiled(model)
    with pytest.warns(UserWarning, match="adjustable operator '2/linear' is not in the plan"):
        run(torch.randn(8, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(torch.randn(8, 16))


def test_a_plan_of_another_model_is_refused_while_compiling():
    class Half(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    model = apply(Half(nn.Linear(16, 4), nn.Linear(4, 4)), {"0/linear": "INT8", "1/linear": "INT8"})
    with pytest.raises((ModelError, torch._dynamo.exc.TorchDynamoException), match="did not meet '1/linear'"):
        _compiled(model)(torch.randn(8, 16))


@pytest.mark.parametrize(
    "function",
    [lambda x: x**2, lambda x: 2**x, lambda x: x.norm(dim=-1, keepdim=True)],
    ids=["x ** 2", "2 ** x", "x.norm()"],
)
def test_methods_of_tensors_written_in_python_are_compiled(function):
    class Between(nn.Sequential):
        def forward(self, x):
            return self[1](function(self[0](x)))

    torch.manual_seed(0)
    between = function(torch.randn(8, 4))
    model = apply(Between(nn.Linear(16, 4), nn.Linear(between.shape[1], 4)), {"0/linear": "BF16", "1/linear": "FP32"})
    x = torch.randn(8, 16)
    run = _compiled(model)
    assert torch.equal(run(x), run(x))
    found = applied_plan(model).interception.seen
    assert len(found) == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


CALLS = {
    "cross-entropy": (F.cross_entropy, {}),
    "its sum, some left out, weighted": (
        F.cross_entropy,
        {"reduction": "sum", "ignore_index": 3, "weight": torch.arange(1.0, 8.0).bfloat16()},
    ),
    "smoothed": (F.cross_entropy, {"label_smoothing": 0.1}),
    "probabilities": (F.cross_entropy, {"probabilities": True}),
    "softmax": (F.softmax, {"dim": -1}),
    "log-softmax": (F.log_softmax, {"dim": 1}),
    "of a type": (F.softmax, {"dim": -1, "dtype": torch.float64}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fixed_operators_give_what_a_cast_before_them_gives(name, dtype):
    torch.manual_seed(0)
    function, kwargs = CALLS[name]
    kwargs = dict(kwargs)
    x = torch.randn(5, 7).mul_(4).to(dtype).requires_grad_()
    args = [x]
    if function is F.cross_entropy:
        args.append(torch.rand(5, 7) if kwargs.pop("probabilities", False) else torch.tensor([0, 3, 2, 6, 3]))
    mine = run_fixed(OperatorCall("a", "a", "", function, tuple(args), kwargs))
    exact = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
    theirs = function(x.float(), *args[1:], **exact)
    assert mine.dtype is theirs.dtype
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    grad = torch.randn_like(theirs)
    pairs = torch.autograd.grad(mine, x, grad), torch.autograd.grad(theirs, x, grad)
    torch.testing.assert_close(*(pair[0] for pair in pairs), rtol=2**-7, atol=1e-7)


def test_one_sample_has_its_classes_first():
    logits = torch.randn(7).bfloat16()
    call = OperatorCall("a", "a", "", F.cross_entropy, (logits, torch.tensor(2)), {})
    torch.testing.assert_close(run_fixed(call), F.cross_entropy(logits.float(), torch.tensor(2)))
