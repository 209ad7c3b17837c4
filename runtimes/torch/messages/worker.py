"""One worker process of `launched`: trains on its part as often as it is told to."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from qsync_opt.messages import Plan
from qsync_opt.runtimes.torch.ddp import RESULT, process_group
from qsync_opt.runtimes.torch.messages.launched import Run, part_file
from qsync_opt.runtimes.torch.messages.partition import load_part
from qsync_opt.runtimes.torch.messages.training import train

_WAIT_S = 600.0
"""How long a worker waits for another, on a machine that does other work too."""


def serve(rank: int, connection: Connection, world: int, port: int, folder: Path) -> None:
    """Do runs until None comes; each result is a pair of what was measured and the problem's file data."""
    part = load_part(part_file(folder, rank))
    with process_group(rank, world, port, timeout_s=_WAIT_S):
        for run in iter(connection.recv, None):
            assert isinstance(run, Run)
            plan = None if run.plan is None else Plan.from_json(run.plan)
            trained, problem = train(
                part, run.options, plan, with_problem=run.with_problem,
                on_epoch=lambda epoch, run=run: connection.send(("epoch", (epoch, run.options.epochs))),
            )  # fmt: skip
            connection.send((RESULT, (trained, problem)))
