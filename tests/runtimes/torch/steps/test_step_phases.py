"""Steps with micro-batches, clipped gradients, batches in the host's memory: recorded, and beside what is allocated."""

from dataclasses import replace

import pytest
import torch

from qsync_opt.errors import ProblemError
from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig
from qsync_opt.runtimes.torch.execution import apply, undo
from qsync_opt.runtimes.torch.steps import RecordingOptions, Stepper, profile_steps, read_events, trace_steps
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.steps import PHASES, StepPredictor

FEW = RecordingOptions(warm_up=2, repeats=2, traced=2, clip_norm=1.0)


class Accumulating(Stepper):
    """Adds up the gradients of some micro-batches before each step of the optimizer."""

    micro_batches = 1

    def step(self, marks=None):
        for _ in range(self.micro_batches):
            loss = self.example.forward()
            loss.backward()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def recorded():
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 16))
    model = Gpt(GptConfig(vocabulary=64, context=16, width=32, heads=2, layers=2)).train()
    graph = capture(model, (tokens, tokens))
    example = TrainingExample(model=model, args=(tokens, tokens))
    optimizer = torch.optim.AdamW(model.parameters())
    costs = profile_steps(example, graph, optimizer, precisions=["BF16"], mixed=0, options=FEW, progress=False)
    return graph, example, optimizer, costs


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_memory_of_accumulated_gradients_is_what_was_allocated(recorded, precision):
    graph, example, optimizer, costs = recorded
    plan = {operator.name: precision for operator in graph.by_role(Role.ADJUSTABLE)}
    stepper = Accumulating(example, optimizer)
    apply(example.model, plan, graph=graph)
    try:
        for micro_batches in (1, 2, 3):
            stepper.micro_batches = micro_batches
            for _ in range(2):
                stepper.step()
            now = peak = 0
            for change in read_events(trace_steps(stepper, 1, memory=True)).changes:
                now += change.num_bytes
                peak = max(peak, now)
            predictor = StepPredictor(graph, costs, micro_batches=micro_batches)
            predicted = predictor.memory(predictor.plan(plan)).peak_bytes - costs.resident_bytes
            assert predicted == pytest.approx(peak, rel=1e-4)
    finally:
        undo(example.model)


def test_clipping_is_recorded_and_lengthens_the_step(recorded):
    graph, _, _, costs = recorded
    assert costs.phases["clip"].host > 0
    assert "copies" not in costs.phases  # a cpu's batch is where it is wanted
    plan = {operator.name: "FP32" for operator in graph.by_role(Role.ADJUSTABLE)}
    bare = replace(costs, phases={label: work for label, work in costs.phases.items() if label != "clip"})
    with_clip, without = (
        StepPredictor(graph, c) for c in (replace(costs, resting_share=1.0), replace(bare, resting_share=1.0))
    )
    longer = with_clip.steady_ns(with_clip.plan(plan)) - without.steady_ns(without.plan(plan))
    assert longer == costs.phases["clip"].host
    bound = 1e-3
    model = torch.nn.Linear(4, 4)
    norms = []

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    Stepper(TrainingExample(model=model, args=(torch.randn(8, 4),)), Watching(model.parameters(), lr=0.0), bound).step()
    assert norms == [pytest.approx(bound, rel=1e-3)]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ProblemError, match="clip_norm"):
            RecordingOptions(clip_norm=wrong)


def test_a_batch_in_the_hosts_memory_is_copied_in_every_step():
    model = torch.nn.Linear(4, 2, device="meta")
    x = torch.zeros(3, 4)
    example = TrainingExample(model=model, args=((x, {"more": x}),), kwargs={"scale": 2.0}, loss=lambda y: y.sum())
    assert example.is_elsewhere
    moved = example.moved()
    assert not moved.is_elsewhere
    assert {t.device.type for t in (moved.args[0][0], moved.args[0][1]["more"])} == {"meta"}
    assert moved.kwargs["scale"] == 2.0
    seen = []
    model.forward = lambda pair, scale: (
        seen.append(pair[0].device.type) or torch.nn.functional.linear(pair[0], model.weight)
    )
    marks = []
    Stepper(example, torch.optim.SGD(model.parameters(), lr=0.1)).step(marks)
    assert seen == ["meta"]
    assert len(marks) == len(PHASES) + 1
    assert example.is_elsewhere  # the example itself is left as it was
