import json
import os
from pathlib import Path

import pytest

from qsync_opt.runtimes.torch.demo import launch

WORKER = """
import sys
from qsync_opt.runtimes.torch.demo.launch import emit
rank = int(sys.argv[2])
for step in range(3):
    emit("progress", done=step + 1, total=3, label=f"rank {rank}")
if sys.argv[1].endswith("fails") and rank == 1:
    raise SystemExit("the dog ate the gradients")
if not sys.argv[1].endswith("silent"):
    emit("result", rank=rank)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "demo_test_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "demo_test_worker"


def _run(worker: str, spec: str, folder: Path, progress: list[tuple[int, dict[str, object]]]):
    return launch.run_workers(
        worker,
        Path(spec),
        world_size=2,
        threads=[1, 1],
        log_folder=folder,
        on_progress=lambda rank, event: progress.append((rank, dict(event))),
    )


def test_results_come_in_rank_order_and_progress_is_passed_on(worker, tmp_path):
    progress: list[tuple[int, dict[str, object]]] = []
    results = _run(worker, "good", tmp_path, progress)
    assert [result["rank"] for result in results] == [0, 1]
    for rank in (0, 1):
        assert [event["done"] for r, event in progress if r == rank] == [1, 2, 3]


def test_a_failing_worker_is_an_error_with_its_last_line(worker, tmp_path):
    with pytest.raises(launch.WorkerError, match=r"worker 1 ended with status 1: the dog ate the gradients"):
        _run(worker, "fails", tmp_path, [])


def test_a_worker_without_result_is_an_error(worker, tmp_path):
    with pytest.raises(launch.WorkerError, match="it printed nothing"):
        _run(worker, "silent", tmp_path, [])


def test_events_are_one_json_line_each(capsys):
    launch.emit("progress", done=1, total=2, label="a\nb")
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(line) == {"event": "progress", "done": 1, "total": 2, "label": "a\nb"}
