import pytest

from qsync_opt.costs import DeviceProfile, IterationOverhead
from qsync_opt.errors import ProblemError
from qsync_opt.model import OpGraph
from qsync_opt.testing import FORWARD_NS, make_profile, residual_graph
from qsync_opt.training import MeasuredPasses, calibrate, uniform_choices
from qsync_opt.training.calibration import UniformPredictor


@pytest.fixture
def graph() -> OpGraph:
    return residual_graph()


def _passes(graph: OpGraph, profile: DeviceProfile, precision: str) -> tuple[int, int]:
    return UniformPredictor(graph, profile, precision).predict(profile.overhead)


def _measure(graph: OpGraph, truth: DeviceProfile) -> dict[str, MeasuredPasses]:
    passes = {precision: _passes(graph, truth, precision) for precision in truth.formats}
    return {p: MeasuredPasses(forward_ns=f, backward_ns=b) for p, (f, b) in passes.items()}


def test_a_uniform_prediction_is_the_sum_of_its_parts(graph: OpGraph) -> None:
    forward_ns, backward_ns = _passes(graph, make_profile(graph), "FP32")
    assert forward_ns == 8 * FORWARD_NS
    # The embedding's result has two users, whose gradients are summed.
    assert backward_ns == 16 * FORWARD_NS + 100 + 200_000 * 4096 // 2**20
    assert uniform_choices(graph, make_profile(graph), "BF16")["up"] == "BF16"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_known_overhead_is_found_again(graph: OpGraph, kind: str) -> None:
    host_ns = 3000 if kind == "cuda" else 0
    overhead = IterationOverhead(forward_ns_per_operator=700, backward_ns_per_operator=1300)
    truth = make_profile(graph, kind=kind, host_ns=host_ns, overhead=overhead)
    found = calibrate(graph, make_profile(graph, kind=kind, host_ns=host_ns), _measure(graph, truth)).overhead
    assert found.forward_ns_per_operator == pytest.approx(700, abs=2)
    assert found.backward_ns_per_operator == pytest.approx(1300, abs=2)
    assert found.residual < 1e-3
    assert {check.precision for check in found.iterations} == {"INT8", "BF16", "FP32"}
    for check in found.iterations:
        assert check.summed_forward_ns < check.predicted_forward_ns


def test_the_overhead_is_never_negative_and_the_rest_is_told(graph: OpGraph) -> None:
    profile = make_profile(graph)
    quick = {"FP32": MeasuredPasses(forward_ns=8 * FORWARD_NS // 2, backward_ns=16 * FORWARD_NS // 2)}
    overhead = calibrate(graph, profile, quick).overhead
    assert (overhead.forward_ns_per_operator, overhead.backward_ns_per_operator) == (0, 0)
    assert overhead.residual == pytest.approx(1.0, abs=0.05)


def test_contradicting_iterations_are_balanced(graph: OpGraph) -> None:
    profile = make_profile(graph)
    measured = {}
    for precision, factor in (("FP32", 1.3), ("BF16", 1.5)):
        forward_ns, backward_ns = _passes(graph, profile, precision)
        measured[precision] = MeasuredPasses(
            forward_ns=round(factor * forward_ns), backward_ns=round(factor * backward_ns)
        )
    overhead = calibrate(graph, profile, measured).overhead
    errors = [
        (c.predicted_forward_ns + c.predicted_backward_ns) / (c.forward_ns + c.backward_ns) - 1
        for c in overhead.iterations
    ]
    assert sum(errors) == pytest.approx(0, abs=0.01)
    assert 0 < overhead.residual < 0.2


def test_without_iterations_nothing_is_fitted_and_empty_ones_are_refused(graph: OpGraph) -> None:
    assert calibrate(graph, make_profile(graph), {}).overhead == IterationOverhead()
    with pytest.raises(ProblemError, match="forward_ns is 0"):
        MeasuredPasses(forward_ns=0, backward_ns=5)
