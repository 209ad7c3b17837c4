import multiprocessing

import pytest

from qsync_opt.runtimes.torch.ddp import WorkerError, Workers

WORKER = """
import sys
from qsync_opt.runtimes.torch.ddp import RESULT
def serve(rank, connection, said):
    for work in iter(connection.recv, None):
        for step in range(3):
            connection.send(("progress", (step + 1, 3, f"rank {rank}")))
        if work == "fails" and rank == 1:
            raise SystemExit("the dog ate the gradients")
        if work == "silent":
            raise SystemExit(0)
        connection.send((RESULT, (rank, said, work)))
    print("no more work", file=sys.stderr)
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    (tmp_path / "demo_test_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    return Workers("demo_test_worker", "hello", count=2, log_folder=tmp_path)


def _ignore(rank, progress):
    pass


def test_results_come_in_rank_order_and_progress_is_passed_on(workers, tmp_path):
    progress = []
    with workers:
        for work in ("first", "second one"):
            results = workers.run(work, lambda rank, entry: progress.append((rank, entry)))
            assert results == [(0, "hello", work), (1, "hello", work)]
    for rank in (0, 1):
        assert [entry for r, entry in progress if r == rank] == [(i, 3, f"rank {rank}") for i in (1, 2, 3)] * 2
        assert (tmp_path / f"worker-{rank}.log").read_text() == "no more work\n"  # ended by itself


@pytest.mark.parametrize(
    ("work", "message"),
    [("fails", r"worker 1 ended with status 1: the dog ate the gradients"), ("silent", "it printed nothing")],
)
def test_a_worker_that_ends_too_early_is_an_error_with_its_last_line(workers, work, message):
    with pytest.raises(WorkerError, match=message), workers:
        workers.run(work, _ignore)


def test_no_worker_is_left_after_an_error(workers):
    started = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt), workers:
        raise KeyboardInterrupt
    assert len(started) >= 2
    assert all(process.exitcode is not None for process in started)
