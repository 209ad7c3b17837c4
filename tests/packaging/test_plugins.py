"""Conformance checks find faults, and an outside package is found through its entry points."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qsync_opt.cluster import DeviceType
from qsync_opt.costs import ProfileCosts, RooflineCosts
from qsync_opt.errors import ProblemError
from qsync_opt.registry import Kind
from qsync_opt.sensitivity import WeightIndicator
from qsync_opt.testing import check_cost_model, check_indicator, expect

ROOT = Path(__file__).resolve().parents[2]
DEVICE = DeviceType(name="T4", count=1, memory_limit_bytes=2**34, precisions=("INT8", "FP16", "FP32"))


def changed(change):
    """The weight indicator with its table changed."""

    class Changed(WeightIndicator):
        def sensitivities(self, graph, knowledge, device_formats):
            table = {name: dict(row) for name, row in super().sensitivities(graph, knowledge, device_formats).items()}
            change(table)
            return table

    return Changed()


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        (lambda table: table.pop("fc1"), r"no sensitivities for \['fc1'\]"),
        (lambda table: table["fc1"].update(INT8=-1.0), "'fc1' in INT8 is -1.0: finite, at least 0"),
        (lambda table: table["fc1"].update(INT8=float("nan")), "is nan: finite"),
        (lambda table: table["fc1"].update(FP32=0.5), "FP32 is 0.5: must be 0"),
        (lambda table: table["fc1"].update(FP4=0.5), "in FP4: the device has INT8, BF16, FP32 only"),
    ],
)
def test_a_faulty_indicator_is_found(change, needle):
    with pytest.raises(AssertionError, match=needle):
        check_indicator(changed(change))


def test_an_indicator_that_changes_its_mind_is_found():
    calls = []

    def change(table):
        calls.append(1)
        table["fc1"]["INT8"] += len(calls)

    with pytest.raises(AssertionError, match="an equal call gives other values"):
        check_indicator(changed(change))


def test_an_indicator_without_a_usable_label_is_found():
    indicator = WeightIndicator()
    indicator.estimate = ""
    with pytest.raises(AssertionError, match="a text or None"):
        check_indicator(indicator)


def test_faulty_cost_models_are_found():
    class OtherGraph(RooflineCosts):
        def profile(self, graph, device):
            from qsync_opt.testing import make_profile, residual_graph

            return make_profile(residual_graph())

    class NoCasts(RooflineCosts):
        def profile(self, graph, device):
            from dataclasses import replace

            return replace(super().profile(graph, device), casts={})

    with pytest.raises(AssertionError, match="of another graph"):
        check_cost_model(OtherGraph(), device=DEVICE)
    with pytest.raises(AssertionError, match=r"makes no usable problem: .*the cast"):
        check_cost_model(NoCasts(), device=DEVICE)
    with pytest.raises(ProblemError, match=r"'T4' has no profile; .*'roofline'"):
        check_cost_model(ProfileCosts(), device=DEVICE)


def test_groups_are_named_after_the_kind():
    assert {kind.group for kind in Kind} == {
        "qsync_opt.solvers",
        "qsync_opt.formulations",
        "qsync_opt.indicators",
        "qsync_opt.cost_models",
        "qsync_opt.runtimes",
        "qsync_opt.quantizers",
        "qsync_opt.communication_hooks",
        "qsync_opt.checkpoint_writers",
    }
    with pytest.raises(AssertionError, match="words"):
        expect(False, "words")


@pytest.mark.slow
def test_the_example_package_installs_and_conforms(tmp_path):
    """Installed without its dependencies into a folder of its own; its check runs in a fresh interpreter."""
    pytest.importorskip("ortools")
    source, target = tmp_path / "source", tmp_path / "site"
    subprocess.run(["cp", "-r", str(ROOT / "examples" / "plugin_solver"), str(source)], check=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(target), str(source)], check=True, timeout=250, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, str(source / "check.py")], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "solver 'own' comes from the package own-solver",
        "conformance checks passed",
        "diamond: optimal with own 0.1.0, objective 2.0",
    ]
    doctor = [sys.executable, "-c", "import sys; from qsync_opt.cli import main; sys.exit(main())", "doctor"]
    listed = subprocess.run([*doctor, "--require", "own"], env=environment, capture_output=True, text=True, timeout=250)
    assert listed.returncode == 0, listed.stdout
    assert "from own-solver" in listed.stdout
