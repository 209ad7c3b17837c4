"""Collection of measured times on a cpu."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qsync_opt.costs.learned import Phase, load_record, programs_of, workload_of
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.kernels import ops
from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.costs import FAMILIES, LIMITS, MODELS, Limits, captured, collect, sweep
from qsync_opt.runtimes.torch.costs.collection import disturbed
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.profiling import OperatorBench, profile
from qsync_opt.testing import make_device_vector

COLLECTION = "qsync_opt.runtimes.torch.costs.collection"
SMALL = Limits(flops=1e6, elements=2**14)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time budget in operators instead of seconds: every look at the clock costs one. Little is repeated."""
    clock = itertools.count()
    monkeypatch.setattr(f"{COLLECTION}.MODELS", {})
    monkeypatch.setattr("qsync_opt.runtimes.timing.MAX_ROUNDS", 2)
    monkeypatch.setattr("qsync_opt.runtimes.torch.costs.probes._SIDE", {"cpu": 64})
    monkeypatch.setattr("qsync_opt.runtimes.torch.costs.probes._LARGE_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(f"{COLLECTION}.time", SimpleNamespace(monotonic=lambda: next(clock)))


def test_a_record_has_every_precision_casts_and_sums(counted: None, tmp_path) -> None:
    record = collect("cpu", budget_s=20.0, name="tested", limits=SMALL)
    assert record.devices[0].name == "tested"
    phases = {sample.phase for sample in record.samples}
    assert phases == set(Phase)
    of_linear = {s.precision for s in record.samples if record.workloads[s.workload].kind == "linear"}
    assert of_linear == {p for p in device_formats("cpu") if ops.supports("linear", p, "cpu")}
    # Rates are raised to what was observed, so that the roofline is a floor of every time.
    for program, device, sample in record.programs():
        assert device.floor_ns(program) <= sample.ns * (1 + 1e-9)
    assert all(s.kernel for s in record.samples if s.precision == "INT8" and s.phase is Phase.FORWARD)
    record.save(tmp_path / "r.gz")
    assert load_record(tmp_path / "r.gz") == record


def test_the_sweep_is_the_same_for_a_seed_and_keeps_its_limits() -> None:
    first, again = (list(itertools.islice(sweep(LIMITS["cpu"], 5), 40)) for _ in range(2))
    assert [c.workload for c in first] == [c.workload for c in again]
    assert {c.workload.kind for c in first} == set(FAMILIES)
    for candidate in first:
        specs = (*candidate.workload.inputs, *candidate.workload.outputs)
        assert max(spec.elements for spec in specs) <= LIMITS["cpu"].elements
        assert candidate.workload.flops <= LIMITS["cpu"].flops


def test_a_swept_operator_is_described_as_a_captured_one() -> None:
    """Random shapes are built without a capture; a captured model with the same operator must give the same program."""

    class Model(torch.nn.Module):
        def __init__(self, work) -> None:
            super().__init__()
            columns, depth = work.inputs[1].shape
            self.zero = torch.nn.Parameter(torch.zeros(()))
            self.linear = torch.nn.Linear(depth, columns, bias=len(work.inputs) > 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x + self.zero)

    candidate = next(c for c in sweep(LIMITS["cpu"], 1) if c.workload.kind == "linear")
    graph = capture_model(Model(candidate.workload), (torch.randn(candidate.workload.inputs[0].shape),)).graph
    operator = next(o for o in graph if o.op_type == "linear")
    formats = device_formats("cpu")
    for precision in ("INT8", "FP32"):
        swept = programs_of(candidate.workload, precision, formats[precision])
        assert swept == programs_of(workload_of(graph, operator), precision, formats[precision])


def test_swept_normalizations_and_poolings_of_images_are_described_as_captured_ones() -> None:
    class Model(torch.nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.zero = torch.nn.Parameter(torch.zeros(()))
            self.norm, self.pool = torch.nn.BatchNorm2d(channels), torch.nn.AdaptiveAvgPool2d(1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.norm(x + self.zero), self.pool(y + self.zero)

    swept = {c.workload.kind: c.workload for c in itertools.islice(sweep(LIMITS["cpu"], 1), len(FAMILIES))}
    works = swept["batch_norm"], swept["adaptive_avg_pool2d"]
    inputs = tuple(torch.randn(work.inputs[0].shape) for work in works)
    graph = capture_model(Model(works[0].inputs[1].shape[0]), inputs).graph
    for work in works:
        operator = next(o for o in graph if o.op_type == work.kind)
        assert workload_of(graph, operator) == work


def test_models_are_captured_with_unlike_operators() -> None:
    candidates = captured("perceptron", *MODELS["perceptron"](1))
    assert {c.workload.kind for c in candidates} >= {"linear", "layer_norm", "gelu", "cross_entropy_loss"}
    assert any(c.workload.role is Role.ADJUSTABLE for c in candidates)


def test_stretches_with_slow_fixed_work_are_doubtful() -> None:
    # The third run took twice as long: what was measured on either side of it is, and the slower stretch comes first.
    assert disturbed([(0, 100.0), (3, 101.0), (5, 200.0), (6, 104.0), (9, 150.0)]) == [5, 3, 4, 6, 7, 8]
    assert disturbed([(0, 100.0), (40, 107.0)]) == []


def test_doubtful_times_are_measured_again_and_the_lower_one_is_kept(
    counted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock shows three times as much during the first visit of every operator."""
    factor = {"now": 3.0}
    measure = OperatorBench.measure

    def slowed(self, stopwatch, repeats):
        cost = measure(self, stopwatch, repeats)
        return replace(cost, forward_ns=round(factor["now"] * 10**6), backward_ns=0)

    def all_of_them(levels):
        factor["now"] = 1.0
        return list(range(levels[-1][0]))

    monkeypatch.setattr(OperatorBench, "measure", slowed)
    vector = make_device_vector(peak_flops=dict.fromkeys(device_formats("cpu"), 1e9))
    monkeypatch.setattr(f"{COLLECTION}.probe_device", lambda *_: vector)
    monkeypatch.setattr(f"{COLLECTION}.disturbed", all_of_them)
    monkeypatch.setattr(f"{COLLECTION}.AGAIN", 0.6)
    record = collect("cpu", budget_s=10.0, name="tested", limits=SMALL)
    operators = [s for s in record.samples if s.phase is Phase.FORWARD and s.spread > 0]
    assert operators
    assert {s.ns for s in operators} == {10**6}
    assert {s.spread for s in operators} == {2.0}
    assert "measured again" in record.note


def test_only_cards_are_divided() -> None:
    with pytest.raises(ProblemError, match="only a card is divided"):
        collect("cpu", multiprocessors=16)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ProblemError, match="budget"):
        collect("cpu", budget_s=-1)
    with pytest.raises(UnsupportedError):
        collect("meta")


def test_a_profile_of_chosen_operators_has_only_these() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    result = capture_model(model, (torch.randn(2, 8),))
    names = [o.name for o in result.graph if o.op_type == "linear"]
    part = profile(result, precisions=["FP32"], operators=names[:1], repeats=2, progress=False)
    assert list(part.operators) == names[:1]
    with pytest.raises(ProblemError, match="no entry"):
        part.cost(names[1])
