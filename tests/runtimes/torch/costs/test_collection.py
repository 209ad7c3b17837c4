"""Collection of measured times on a cpu."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from qsync_opt.costs.learned import Phase, load_record, programs_of, workload_of
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.kernels import ops
from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.costs import FAMILIES, LIMITS, MODELS, Limits, captured, collect, sweep
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.profiling import profile

SMALL = Limits(flops=1e6, elements=2**14)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_record_has_every_precision_casts_and_sums(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr("qsync_opt.runtimes.torch.costs.collection.MODELS", {})
    record = collect("cpu", budget_s=4.0, name="tested", limits=SMALL)
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


def test_models_are_captured_with_unlike_operators() -> None:
    candidates = captured("perceptron", *MODELS["perceptron"](1))
    assert {c.workload.kind for c in candidates} >= {"linear", "layer_norm", "gelu", "cross_entropy_loss"}
    assert any(c.workload.role is Role.ADJUSTABLE for c in candidates)


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
