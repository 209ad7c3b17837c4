import json
import os
from pathlib import Path

import pytest

from qsync_opt.runtimes.torch.demo import launch

WORKER = """
import sys
from qsync_opt.runtimes.torch.demo.launch import emit
said, rank = sys.argv[1], int(sys.argv[2])
for line in sys.stdin:
    spec = line.strip()
    for step in range(3):
        emit("progress", done=step + 1, total=3, label=f"rank {rank}")
    if spec.endswith("fails") and rank == 1:
        raise SystemExit("the dog ate the gradients")
    if spec.endswith("silent"):
        raise SystemExit(0)
    emit("result", rank=rank, said=said, spec=spec)
print("no more work", file=sys.stderr)
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    (tmp_path / "demo_test_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return launch.Workers("demo_test_worker", "hello", threads=[1, 1], log_folder=tmp_path)


def _ignore(rank, event):
    pass


def test_results_come_in_rank_order_and_progress_is_passed_on(workers, tmp_path):
    progress = []
    with workers:
        for spec in ("first", "second one"):
            results = workers.run(Path(spec), lambda rank, event: progress.append((rank, dict(event))))
            assert [(result["rank"], result["said"], result["spec"]) for result in results] == [
                (0, "hello", spec),
                (1, "hello", spec),
            ]
    for rank in (0, 1):
        assert [event["done"] for r, event in progress if r == rank] == [1, 2, 3] * 2
        assert (tmp_path / f"worker-{rank}.log").read_text() == "no more work\n"  # ended by itself


@pytest.mark.parametrize(
    ("spec", "message"),
    [("fails", r"worker 1 ended with status 1: the dog ate the gradients"), ("silent", "it printed nothing")],
)
def test_a_worker_that_ends_too_early_is_an_error_with_its_last_line(workers, spec, message):
    with pytest.raises(launch.WorkerError, match=message), workers:
        workers.run(Path(spec), _ignore)


def test_no_worker_is_left_after_an_error(workers, monkeypatch):
    started = []
    real = launch.subprocess.Popen
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    with pytest.raises(KeyboardInterrupt), workers:
        raise KeyboardInterrupt
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_events_are_one_json_line_each(capsys):
    launch.emit("progress", done=1, total=2, label="a\nb")
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(line) == {"event": "progress", "done": 1, "total": 2, "label": "a\nb"}
