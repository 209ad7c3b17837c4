import pytest

from qsync_opt.costs import CostFit, MeasuredCost, fit_cost
from qsync_opt.errors import ProblemError
from qsync_opt.io import decode, encode


def test_a_line_is_found_again() -> None:
    fit = fit_cost((n, 5000 + 30_000 * n / 2**20) for n in (2**12, 2**16, 2**20, 2**24))
    assert (fit.base_ns, fit.ns_per_mi_elements) == (5000, 30_000)
    assert fit.worst_error < 1e-3
    assert fit.samples == 4


def test_small_sizes_count_as_much_as_large_ones() -> None:
    # A fit of absolute errors would leave the small size far off; this one is wrong by the same share at each end.
    fit = fit_cost([(2**10, 2000.0), (2**20, 40_000.0), (2**24, 400_000.0)])
    errors = [abs(fit.ns(n) - t) / t for n, t in ((2**10, 2000.0), (2**24, 400_000.0))]
    assert max(errors) == pytest.approx(fit.worst_error, abs=0.2)
    assert fit.worst_error < 0.3


def test_coefficients_are_never_negative() -> None:
    falling = fit_cost([(2**10, 9000.0), (2**20, 3000.0)])
    assert falling.ns_per_mi_elements == 0
    steep = fit_cost([(2**10, 1.0), (2**11, 1000.0)])
    assert steep.base_ns == 0
    assert steep.worst_error > 0.5


def test_one_size_gives_a_time_per_element() -> None:
    fit = fit_cost([(2**20, 700.0), (2**20, 700.0)])
    assert (fit.base_ns, fit.ns_per_mi_elements) == (0, 700)


def test_ns_rounds_down_as_the_problem_file_does() -> None:
    assert CostFit(base_ns=7, ns_per_mi_elements=3).ns(2**20 - 1) == 9


@pytest.mark.parametrize(
    ("samples", "text"),
    [([], "no measurement"), ([(0, 5.0)], "above zero"), ([(4, float("nan"))], "nan"), ([(4, -1.0)], "-1")],
)
def test_unusable_samples_are_refused(samples: list[tuple[int, float]], text: str) -> None:
    with pytest.raises(ProblemError, match=text):
        fit_cost(samples)


@pytest.mark.parametrize("field", ["forward_ns", "saved_bytes", "backward_workspace_bytes"])
def test_negative_costs_are_refused(field: str) -> None:
    with pytest.raises(ProblemError, match=f"{field} is -1"):
        MeasuredCost(**{"forward_ns": 1, "backward_ns": 1, field: -1})


def test_a_cost_survives_json() -> None:
    cost = MeasuredCost(forward_ns=1, backward_ns=2, saves_inputs=(0, 2), saves_output=True, alias_input=1)
    assert decode(MeasuredCost, encode(cost), "cost") == cost


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"forward_ns": 1.5}, "forward_ns is 1.5"),
        ({"saves_output": 1}, "saves_output is 1"),
        ({"alias_input": -1}, "alias_input is -1"),
        ({"surprise": 1}, "unknown key 'surprise'"),
    ],
)
def test_unusable_json_is_refused(change: dict[str, object], text: str) -> None:
    data = {**encode(MeasuredCost(forward_ns=1, backward_ns=2)), **change}
    with pytest.raises(ProblemError, match=text):
        decode(MeasuredCost, data, "cost")
