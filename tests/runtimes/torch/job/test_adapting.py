import dataclasses
import json

import pytest
import torch

from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.runtimes.torch.execution import apply
from qsync_opt.runtimes.torch.job import (
    PlanAdapter,
    PlanningOptions,
    load_job,
    plan_job,
    save_job,
    with_speed,
    with_workers,
)
from qsync_opt.training import Plan, evaluate


@pytest.fixture(scope="module")
def job_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def followed(job_folder, run_workers):
    return run_workers("adapting_worker.py", "follow", job_folder)


def test_all_ranks_move_at_the_same_step(followed):
    first, second = followed
    assert [move["step"] for move in first["moves"]] == [move["step"] for move in second["moves"]] == [5, 9]
    assert [move["digest"] for move in first["moves"]] == [move["digest"] for move in second["moves"]]
    assert first["weights"] == second["weights"]
    shrunk, grown = second["moves"]
    assert shrunk["memory"] <= second["needed"] - 4096
    assert set(shrunk["applied"]) & {"BF16", "INT8"}
    assert not grown["applied"]  # FP32 is as good again: the model is left alone
    assert first["slower"]


def test_too_little_memory_stops_all_ranks(followed):
    assert followed[0]["said"].startswith("ProblemError: there is no plan for this job")
    assert followed[1]["said"].startswith("NotReadyError: rank 0 failed: ProblemError")


def test_what_only_one_rank_finds_wrong_stops_all(followed):
    wrong = "ProblemError: speed of this rank's device is nan, but it must be a finite number"
    assert followed[0]["unusable"].startswith(f"NotReadyError: rank 1 failed: {wrong}")
    assert followed[1]["unusable"].startswith(wrong)
    other = "'a.weight' is (128, 64) in the checkpoint and (96, 64) in the model"
    assert followed[0]["models"].startswith("NotReadyError: rank 1 failed: ModelError: ")
    assert followed[1]["models"].startswith("ModelError: ")
    assert all(other in told["models"] for told in followed)
    for told in followed:
        assert "the option job_file of auto_plan differs between ranks" in told["options"]
        assert told["options"].endswith("(False on rank 0, True on rank 1); give the same PlanningOptions on all ranks")


def test_workers_that_start_again_measure_nothing(followed, job_folder, run_workers):
    assert followed[0]["again"] == followed[1]["again"]
    assert followed[0]["again"]["types"] == ["big", "small"]
    (alone,) = run_workers("adapting_worker.py", "restart", job_folder, world_size=1)
    assert alone["left"]["types"] == ["small"]  # the other worker has left
    assert alone["unknown"]["said"] == "measured again"
    assert any(
        "is of a job with other device type 'other': measuring anew" in text for text in alone["unknown"]["told"]
    )
    assert any("with other parameters: measuring anew" in text for text in alone["model"]["told"])


def test_a_job_file_is_the_job(followed, job_folder, tmp_path):
    made, facts = load_job(job_folder / "job.json")
    save_job(made, tmp_path / "again.json", facts)
    assert (tmp_path / "again.json").read_text() == (job_folder / "job.json").read_text()
    plan = plan_job(made, "small")
    assert plan.plan.devices == plan_job(load_job(tmp_path / "again.json")[0], "small").plan.devices
    slow = plan_job(with_speed(made, {"small": 3.0, "big": 1.0}), "small")
    # The same plan: at another speed another one may be best.
    same = Plan(problem=slow.problem.name, devices=plan.solution.plan.devices)
    before = plan.solution.evaluation.devices["small"].backward_end_ns
    assert evaluate(slow.problem, same).devices["small"].backward_end_ns == pytest.approx(3 * before, rel=0.01)
    with pytest.raises(ProblemError, match="'nobody'"):
        with_workers(made, {"nobody": 1})
    with pytest.raises(ProblemError, match="above 0"):
        with_speed(made, {"small": 0.0})
    more = with_workers(made, {"small": 7})
    assert more.cluster.num_workers == 7
    assert set(more.profiles) == set(more.sensitivities) == {"small"}


def test_less_memory_than_was_planned_with_is_seen_from_the_start(followed, job_folder):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = torch.nn.Linear(64, 128), torch.nn.Linear(128, 128), torch.nn.Linear(128, 4)

    options = PlanningOptions(memory="1 GiB", slack=9.0, compare=False, trial=False)
    plan = plan_job(with_workers(load_job(job_folder / "job.json")[0], {"small": 1}), "small", options)
    less = plan.memory_bytes["small"] - 4096
    adapter = PlanAdapter(apply(Net(), plan), plan, options=options, every=1, memory=lambda: less)
    assert adapter.step().memory_bytes["small"] <= less
    assert adapter.step() is None


@pytest.mark.parametrize("told", [None, "5 GiB", [1]])
def test_memory_that_is_no_number_is_shown(followed, job_folder, told):
    plan = plan_job(with_workers(load_job(job_folder / "job.json")[0], {"small": 1}), "small")
    with pytest.raises(ProblemError, match=r"memory of this rank's device is .*, but it must be a finite number"):
        PlanAdapter(torch.nn.Linear(2, 2), plan, memory=lambda: told)


def test_a_device_that_is_endlessly_fast_has_a_plan(followed, job_folder):
    made = with_workers(load_job(job_folder / "job.json")[0], {"small": 1})
    assert not plan_job(with_speed(made, {"small": 1e-30}), "small").worthwhile


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("network"),
        lambda data: data.update(format="qsync-job/9"),
        lambda data: data.update(unknown=1),
        lambda data: data["profiles"].pop("small"),
        lambda data: data["graph"]["operators"].pop(),
        lambda data: data["devices"][0].update(count=0),
    ],
)
def test_a_job_file_that_is_not_whole_is_refused(followed, job_folder, tmp_path, change):
    data = json.loads((job_folder / "job.json").read_text())
    change(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(QSyncError) as failure:
        load_job(tmp_path / "bad.json")
    if "qsync-job/9" not in str(failure.value):  # a file of a later version is not damaged
        assert str(failure.value).endswith(
            "; remove the file, and the next start of auto_plan measures the job and writes it anew"
        )


def test_a_truncated_job_file_is_refused(followed, job_folder, tmp_path):
    text = (job_folder / "job.json").read_text()
    (tmp_path / "short.json").write_text(text[: len(text) // 2])
    with pytest.raises(ProblemError, match="truncated, remove the file, and the next start of auto_plan"):
        load_job(tmp_path / "short.json")
    assert dataclasses.is_dataclass(load_job(job_folder / "job.json")[0])
