import pytest
import torch
from torch import nn

from qsync_opt.errors import ProblemError
from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.job import (
    Job,
    PlanningOptions,
    auto_plan,
    divides_by_squares,
    example_of,
    job_indicator,
    noise_of,
)
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import NoiseOptions, sensitivities


def make():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4))
    return model, torch.randn(16, 32)


def cross_entropy(output):
    return nn.functional.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64))


OPTIMIZERS = {
    "none": lambda model: None,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(
    ("optimizer", "changes", "indicator"),
    [
        ("none", {}, "progress"),
        ("AdamW", {}, "progress"),
        ("NAdam", {}, "progress"),
        ("SGD", {}, "probed"),
        ("SGD", {"indicator": "progress"}, "progress"),
        ("AdamW", {"indicator": "probed"}, "probed"),
        ("AdamW", {"indicator": "propagated"}, "propagated"),
        ("AdamW", {"probes": 0}, "propagated"),
    ],
)
def test_the_indicator_is_that_of_the_optimizer_unless_one_is_asked_for(optimizer, changes, indicator):
    model, x = make()
    job = Job(model, example_of(model, x, None), PlanningOptions(**changes), OPTIMIZERS[optimizer](model))
    assert job_indicator(job) == indicator


def test_one_group_that_divides_by_nothing_is_enough_to_leave_progress_alone():
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters())
    assert divides_by_squares(optimizer)
    optimizer.param_groups.append({"params": [], "lr": 0.1})
    assert not divides_by_squares(optimizer)


@pytest.mark.parametrize(
    ("changes", "said"), [({"indicator": "gut feeling"}, "'auto', 'progress'"), ({"probes": 0}, "1 or more")]
)
def test_options_that_name_no_usable_indicator(changes, said):
    with pytest.raises(ProblemError, match=said):
        PlanningOptions(**{"indicator": "progress", **changes})


def test_noise_is_that_of_the_kernels_of_the_job():
    kernels = KernelOptions(rounding="nearest", activation_granularity="row", weight_granularity="tensor")
    assert noise_of(kernels) == NoiseOptions(
        rounding="nearest",  # type: ignore[arg-type]
        activation_granularity="row",  # type: ignore[arg-type]
        weight_granularity="tensor",  # type: ignore[arg-type]
    )
    assert noise_of(KernelOptions(backward="eight")) == NoiseOptions(backward="eight")
    assert noise_of(KernelOptions()) == NoiseOptions()


@pytest.mark.parametrize(("optimizer", "kind"), [("AdamW", "progress"), ("SGD", "probed")])
def test_a_job_is_planned_by_the_indicator_of_its_optimizer_for_its_own_kernels(tmp_path, optimizer, kind):
    model, x = make()
    kernels = KernelOptions(backward="eight", weight_granularity="tensor")
    options = PlanningOptions(
        cache_dir=tmp_path, progress=False, precisions=("INT8",), compare=False, trial=False, kernels=kernels
    )
    plan = auto_plan(model, x, loss=cross_entropy, optimizer=OPTIMIZERS[optimizer](model), options=options)
    found = collect_statistics(
        model,
        [x],
        step=lambda model, batch: cross_entropy(model(batch)),
        graph=plan.model.graph,
        **{"adaptive_probes" if kind == "progress" else "probes": 1},
    )
    formats = plan.model.profiles[plan.device_type].formats
    expected = sensitivities(plan.model.graph, found, formats, options=noise_of(kernels), kind=kind)
    assert plan.sensitivity_unit == expected.kind.unit
    assert f"({plan.sensitivity_unit})" in plan.describe()
    values = plan.model.sensitivities[plan.device_type]
    for name, row in expected.items():
        assert dict(values[name]) == pytest.approx(dict(row))
    half = sensitivities(plan.model.graph, found, formats, options=NoiseOptions(), kind=kind)
    assert values["0/linear"]["INT8"] > 1.1 * half["0/linear"]["INT8"]


def test_a_job_file_of_another_indicator_is_measured_anew(tmp_path, caplog):
    model, x = make()

    def plan(optimizer):
        options = PlanningOptions(
            cache_dir=tmp_path,
            job_file=tmp_path / "job.json",
            progress=False,
            precisions=("INT8",),
            compare=False,
            trial=False,
        )
        return auto_plan(model, x, loss=cross_entropy, optimizer=OPTIMIZERS[optimizer](model), options=options)

    assert plan("AdamW").sensitivity_unit == "share of progress"
    assert plan("AdamW").sensitivity_unit == "share of progress"
    assert "indicator" not in caplog.text
    assert plan("SGD").sensitivity_unit == "squared gradient"
    assert "is of a job with other indicator" in caplog.text
