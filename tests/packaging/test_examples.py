"""Every example runs on a CPU and says what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qsync_opt.io import format_sensitivity

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name):
    """Standard output of an example, run as a reader would."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_plan_an_onnx_file():
    out = run("plan_onnx_file/run.py")
    assert "exit status 0" in out
    assert "note: costs of T4 are estimates: roofline from the NVIDIA T4 data sheet" in out
    objective = re.search(r"^objective +(\S+)", out, re.MULTILINE)[1]
    assert f"sensitivity {format_sensitivity(float(objective))} (gap" in out  # Python finds the same plan


def test_greedy_against_ilp():
    out = run("greedy_against_ilp.py")
    assert out.count(" ilp ") == out.count(" greedy ") == out.count(" exact ") == 5
    worst = float(re.search(r"greedy is at most (\S+) %", out)[1])
    assert 0.0 <= worst < 1.0


@pytest.mark.slow
def test_hugging_face_fine_tuning():
    pytest.importorskip("transformers")
    out = run("huggingface_finetuning.py")
    first, last = re.search(r"^plan: loss (\S+) at first, (\S+) after", out, re.MULTILINE).groups()
    assert float(last) < 0.5 * float(first)


@pytest.mark.slow
def test_hugging_face_trainer():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out = run("huggingface_trainer.py")
    first, last = re.search(r"^loss (\S+) at first, (\S+) after", out, re.MULTILINE).groups()
    assert float(last) < 0.7 * float(first)
    assert "resumed to the same weights: True" in out


@pytest.mark.slow
def test_hugging_face_accelerate():
    pytest.importorskip("accelerate")
    out = run("huggingface_accelerate.py")
    first, last = re.search(r"^loss (\S+) at first, (\S+) after", out, re.MULTILINE).groups()
    assert float(last) < float(first)
    assert "resumed to the same losses: True" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["huggingface_trainer", "huggingface_accelerate"])
def test_hugging_face_on_two_workers(name, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # One file of output per worker: on a shared pipe their lines may run into one another.
    launch = ["--nproc_per_node", "2", "--log-dir", str(tmp_path / "logs"), "--redirects", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    outputs = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert len(outputs) == 2
    printed = [output for output in outputs if output]  # Accelerate prints on the first worker alone
    assert printed
    for output in printed:
        assert re.search(r"resumed to the same \w+: True", output)
        assert ": False" not in output


@pytest.mark.slow
def test_hybrid_ddp():
    out = run("hybrid_ddp.py")
    sums = re.findall(r"sum of weights (\S+)", out)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    for first, last in re.findall(r"loss (\S+) > (\S+),", out):
        assert float(last) < float(first)


def test_every_example_is_listed_and_tested():
    listed = (EXAMPLES / "README.md").read_text()
    here = Path(__file__).read_text()
    for path in EXAMPLES.iterdir():
        if path.name in ("README.md", "__pycache__"):
            continue
        assert path.name in listed
        assert path.name in here or path.name == "plugin_solver"  # installed and run in test_plugins.py
