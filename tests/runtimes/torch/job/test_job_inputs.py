"""What users hand to `auto_plan`: optimizers of every kind, models with or without a loss, what cannot be trained."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import qsync_opt
from qsync_opt.errors import ModelError, ProblemError, UnsupportedError
from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.ddp import free_port, process_group
from qsync_opt.runtimes.torch.execution import applied_plan
from qsync_opt.runtimes.torch.job import ExecutionMode, Job, check_training, example_of, parameters_put_back, time_modes
from qsync_opt.runtimes.torch.profiling import like, try_plan
from qsync_opt.runtimes.torch.support import (
    TrainingExample,
    check_steps,
    default_loss,
    model_loss,
    optimizer_name,
    single,
    state_bytes,
)
from qsync_opt.training import Plan


def mean_square(output):
    return output.float().square().mean()


def job(model, loss=mean_square):
    return Job(model, example_of(model, torch.randn(4, 8), loss), qsync_opt.PlanningOptions())


def test_a_model_without_loss_but_with_rectifiers_keeps_the_unit_of_its_optimizer(caplog):
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 8)
    options = qsync_opt.PlanningOptions(progress=False, trial=False, compare=False)
    plan = qsync_opt.auto_plan(model, batch, options=options)
    assert "no floating-point tensor" not in caplog.text
    assert plan.sensitivity_unit == "share of progress"


def test_wrong_options_and_batches_are_refused_before_anything_is_measured(monkeypatch):
    def capture(*_):
        raise AssertionError("captured")

    monkeypatch.setattr("qsync_opt.runtimes.torch.job.planning.capture_model", capture)
    for memory, text in ((-5, "memory is -5: bytes above 0 are needed"), ("-1 GiB", "memory"), ("3 parsecs", "memory")):
        with pytest.raises((UnsupportedError, ProblemError), match=text):
            qsync_opt.auto_plan(nn.Linear(8, 1), torch.randn(4, 8), options=qsync_opt.PlanningOptions(memory=memory))
    with pytest.raises(ModelError, match=r"batches is a Tensor .* pass \[batch\]"):
        qsync_opt.auto_plan(nn.Linear(8, 1), torch.randn(4, 8), batches=torch.randn(4, 8))


def two():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    parts = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(model[1].parameters())]
    return model, parts


def test_several_optimizers_step_as_one():
    model, parts = two()
    alone = copy.deepcopy(model)
    theirs = [torch.optim.SGD(alone[0].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(alone[1].parameters())]
    together = single(parts)
    for _ in range(3):
        x = torch.randn(4, 8)
        for network, optimizers in ((model, [together]), (alone, theirs)):
            mean_square(network(x)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    assert state_bytes(together) == sum(map(state_bytes, theirs)) > 0
    copied = like(together, torch.device("cpu"))
    assert optimizer_name(copied) == optimizer_name(together) == "SGD and AdamW"
    assert [group["lr"] for group in copied.param_groups] == [0.1, 1e-3]
    assert not copied.state


def test_a_job_with_several_optimizers_is_planned_and_they_are_left_alone(tmp_path):
    model, parts = two()
    mean_square(model(torch.randn(4, 8))).backward()
    for part in parts:
        part.step()
    before = copy.deepcopy([part.state_dict() for part in parts])
    gradients = [p.grad.clone() for p in model.parameters()]
    options = qsync_opt.PlanningOptions(
        precisions=("FP32", "BF16"), compare=False, probes=0, cache_dir=tmp_path, progress=False, memory="1 GiB"
    )
    x, state = torch.randn(4, 8), torch.get_rng_state()
    plan = qsync_opt.auto_plan(model, x, loss=mean_square, optimizer=parts, options=options)
    # Measuring draws numbers, on the first start and on some ranks alone: the script's own must not depend on that.
    assert torch.equal(torch.get_rng_state(), state)
    assert plan.model.profiles[plan.device_type].optimizer.state_bytes == state_bytes(single(parts))
    assert str([part.state_dict() for part in parts]) == str(before)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


class Closed(torch.optim.SGD):
    def __init__(self, params, base):
        super().__init__(params, lr=base)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda p: torch.optim.LBFGS(p), UnsupportedError, "the step of LBFGS needs closure"),
        (lambda p: Closed(p, 0.1), UnsupportedError, "Closed cannot be built anew .* 'base'.*: leave optimizer out"),
        (lambda p: "AdamW", ModelError, "optimizer is a str: an optimizer of torch is needed, or a list"),
        (lambda p: [], ModelError, "optimizer is a list: "),
    ],
)
def test_optimizers_that_cannot_be_timed(make, error, said):
    with pytest.raises(error, match=said):
        optimizer = single(make(nn.Linear(8, 1).parameters()))
        check_steps(optimizer)
        like(optimizer, torch.device("cpu"))


def test_the_loss_that_a_model_returns_is_found():
    x = torch.randn(3, requires_grad=True)
    loss = x.sum()
    for output in (loss, {"logits": x, "loss": loss}, (loss, x), [loss[None], x]):
        assert model_loss(output) == loss
        assert default_loss(output) == loss
    assert model_loss((x, loss)) is None
    assert default_loss((x, loss)) == 2 * loss


def test_a_guessed_loss_is_told(caplog):
    with caplog.at_level(logging.WARNING, "qsync_opt"):
        check_training(job(nn.Linear(8, 1)))
        assert not caplog.records
        check_training(job(nn.Linear(8, 3), loss=None))
    assert "pass loss=" in caplog.text


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (nn.Linear(8, 1).requires_grad_(False), mean_square, "every parameter is frozen"),
        (nn.Linear(8, 1), lambda output: mean_square(output).detach(), "no gradient flows from the loss"),
        (nn.Linear(8, 3), lambda output: output, r"the loss is of shape \(4, 3\), but one number is needed"),
        (nn.Linear(8, 3), lambda output: 1.0, "the loss is a float"),
    ],
)
def test_what_cannot_be_trained(model, loss, said):
    with pytest.raises(ModelError, match=said):
        check_training(job(model, loss))


def test_a_scripted_model_is_refused():
    with pytest.raises(UnsupportedError, match="scripted"):
        job(torch.jit.script(nn.Linear(8, 1))).check()


def test_a_sharded_model_is_refused():
    with process_group(0, 1, free_port(), timeout_s=60):
        model = fully_shard(nn.Linear(8, 1), mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="with the whole model, then fully_shard, then apply"):
            job(model).check()


def test_a_loss_with_parameters_keeps_its_gradients(tmp_path):
    model, head = nn.Linear(8, 4), nn.Linear(4, 1)
    head.weight.grad = torch.ones(1, 4)
    options = qsync_opt.PlanningOptions(
        precisions=("FP32", "BF16"), compare="passes", cache_dir=tmp_path, progress=False, memory="1 GiB"
    )
    x = torch.randn(4, 8, requires_grad=True)
    with torch.no_grad():  # as a script may be in where it plans
        qsync_opt.auto_plan(model, x, loss=lambda output: mean_square(head(output.float())), options=options)
    assert x.grad is None
    assert head.bias.grad is None
    assert torch.equal(head.weight.grad, torch.ones(1, 4))
    assert all(p.grad is None for p in model.parameters())


class Mixing(nn.Module):
    """Reads the result of an operator beside an FP32 weight, in an operation that takes one type alone."""

    def __init__(self, last):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), last

    def forward(self, x):
        x = self.first(x)
        return self.last(x, x)


def test_a_way_that_an_operation_of_the_model_refuses_is_left_out(caplog):
    model = Mixing(nn.Bilinear(8, 8, 2))
    example = TrainingExample(model=model, args=(torch.randn(4, 8),), loss=mean_square)
    modes = [
        ExecutionMode(name="FP32", precisions={"first/linear": "FP32"}),
        ExecutionMode(name="BF16 autocast", precisions={"first/linear": "BF16"}, autocast="BF16"),
    ]
    fine, autocast = time_modes(example, modes, None, KernelOptions())
    assert fine.pass_ns > 0
    assert fine.needed_bytes is not None
    assert autocast.needed_bytes is None
    assert "BF16 autocast does not run and is left out" in caplog.text
    assert applied_plan(model) is None


def test_a_plan_that_an_operation_of_the_model_refuses_is_told():
    model = Mixing(lambda a, b: torch.linalg.svdvals(a))
    example = TrainingExample(model=model, args=(torch.randn(4, 8),), loss=mean_square)
    plan = Plan(problem="made", devices={"cpu": {"first/linear": "BF16"}})
    with pytest.raises(UnsupportedError, match=r"does not run under its plan \(.*cast the inputs"):
        try_plan(example, plan, None, KernelOptions())
    assert applied_plan(model) is None


def test_recorded_steps_put_back_what_only_the_optimizer_has():
    model, head = nn.Linear(8, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1.0)
    before = [p.detach().clone() for p in (*model.parameters(), *head.parameters())]
    with parameters_put_back(model, optimizer):
        mean_square(head(model(torch.randn(4, 8)))).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *head.parameters()), strict=True))


class Centred(nn.Module):
    """With an operation that the table of roles does not know, and that does not take 16 bits."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return self.b(h - torch.quantile(h, 0.5, 1, keepdim=True))


def test_fixed_operators_of_the_graph_get_full_precision_under_the_plan_of_any_rank(tmp_path):
    torch.manual_seed(0)
    model, x = Centred(), torch.randn(8, 8)
    plain = model(x)
    options = qsync_opt.PlanningOptions(compare=False, trial=False, cache_dir=tmp_path, progress=False, memory="1 GiB")
    with pytest.warns(UserWarning, match="quantile"):
        plan = qsync_opt.auto_plan(model, x, loss=mean_square, options=options)
    everywhere = {plan.device_type: dict.fromkeys(plan.devices[plan.device_type], "BF16")}
    theirs = replace(
        plan, plan=replace(plan.plan, devices=everywhere), worthwhile=True, problem=None, solution=None, model=None
    )
    qsync_opt.apply(model, theirs)
    assert torch.allclose(model(x), plain, atol=0.2)
