"""The commands ``qsync-opt costs ...``."""

import json
from pathlib import Path

import pytest

from qsync_opt.costs.learned import CostRecord, fit_laws, load_record
from qsync_opt.testing import make_cost_record, make_device_vector

pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, CostRecord]:
    folder = tmp_path_factory.mktemp("costs")
    record = make_cost_record(16)
    record.save(folder / "record.json.gz")
    fit_laws(record, errors=False, rounds=1).save(folder / "model.npz")
    return folder / "record.json.gz", folder / "model.npz", record


def test_fit_writes_a_model_and_prints_its_card(run, files, tmp_path: Path) -> None:
    record, _, content = files
    status, output, _ = run("costs", "fit", record, "--output", tmp_path / "m.npz", "--no-errors", "--json")
    card = json.loads(output)
    assert status == 0
    assert card["samples"] == len(content)
    assert card["training_digest"] == content.digest()
    assert (tmp_path / "m.npz").exists()


def test_check_tells_fitting_from_predicting(run, files, tmp_path: Path) -> None:
    record, model, _ = files
    status, output, _ = run("costs", "check", record, "--model", model)
    assert status == 0
    assert "fitted to this very record" in output
    other = make_cost_record(16, (make_device_vector("other", 2.0),), seed=1)
    other.save(tmp_path / "other.gz")
    status, output, _ = run("costs", "check", tmp_path / "other.gz", "--model", model, "--json")
    data = json.loads(output)
    assert not data["trained_on_this_record"]
    assert set(data["errors"]) == {"all", "linear", "gelu", "relu"}
    assert status == (0 if data["errors"]["all"]["coverage"] >= 0.8 else 1)


def test_check_refuses_a_changed_device(run, files, tmp_path: Path) -> None:
    _, model, _ = files
    make_cost_record(6, (make_device_vector(bandwidth_bytes_per_s=9e10),)).save(tmp_path / "changed.gz")
    status, _, errors = run("costs", "check", tmp_path / "changed.gz", "--model", model)
    assert status == 2
    assert "was changed or throttled" in errors


def test_bad_files_are_one_line_and_exit_2(run, files, tmp_path: Path) -> None:
    record, model, _ = files
    for arguments in (
        ("fit", model, "--output", tmp_path / "x.npz"),
        ("check", record, "--model", record),
        ("check", tmp_path / "absent.gz", "--model", model),
        ("fit", record, "--output", record),
        ("choose", record),
    ):
        status, _, errors = run("costs", *arguments)
        assert status == 2, arguments
        assert errors.count("\n") == 1, errors
    assert load_record(record)


def test_an_unknown_command_of_the_group_names_none_of_ours(run) -> None:
    status, _, errors = run("costs", "guess")
    assert status == 2
    assert "guess" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--multiprocessors", "16,x"), "16,x"),
        (("--multiprocessors", "16,16"), "different numbers"),
        (("--multiprocessors", "0"), "above zero"),
        (("--multiprocessors", "16", "--name", "half"), "names of their own"),
    ],
)
def test_partitions_are_checked_before_anything_is_measured(run, tmp_path: Path, arguments, message: str) -> None:
    status, _, errors = run("costs", "collect", tmp_path / "r.json.gz", *arguments)
    assert status == 2
    assert message in errors
