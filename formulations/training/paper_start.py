"""QSync's allocator as it was published: exhaustive initial plans of subgraphs, then one pass of recovery.

The graph is cut wherever all that follows reads one operator alone. The memory limit is shared out over the blocks in
proportion to what each can save; of each block all assignments of precisions are tried, and the fastest within its
share is kept. `qsync` starts from better plans, which is why it finds some where this method fails.
"""

from __future__ import annotations

import itertools
import math
import time

from qsync_opt.formulations.training.paper_greedy import DeviceState, adjustable_positions, keeps_limits, recover
from qsync_opt.training import (
    Answer,
    Problem,
    ProblemDevice,
    SolveOptions,
    TerminationStatus,
    precisions_by_rank,
)

MOST_OPERATORS = 8
"""Adjustable operators of a block at most, for whose 3**8 plans there is time; larger ones are cut in forward order."""


def subgraphs(problem: Problem, device: ProblemDevice) -> list[list[int]]:
    """Positions of the adjustable operators of each block, in forward order.

    Source: QSync (IPDPS 2024), initial setting of the allocator; the cut of large blocks is ours.
    """
    last_reader = list(range(len(problem.operators)))
    for position, operator in enumerate(problem.operators):
        for source in operator.inputs:
            last_reader[problem.index(source)] = position
    adjustable = set(adjustable_positions(problem, device))
    blocks: list[list[int]] = []
    block: list[int] = []
    pending: set[int] = set()  # operators before the present one that it or a later one reads
    for position in range(len(problem.operators)):
        if position in adjustable:
            block.append(position)
        pending = {source for source in pending if last_reader[source] > position}
        if block and not pending:  # all that follows reads this operator alone
            blocks.append(block)
            block = []
        if last_reader[position] > position:
            pending.add(position)
    blocks += [block] if block else []
    return [block[i : i + MOST_OPERATORS] for block in blocks for i in range(0, len(block), MOST_OPERATORS)]


def published_start(problem: Problem, device: ProblemDevice, deadline: float) -> DeviceState:
    """The initial plan: each block at the fastest of its assignments within its share of the memory; may break limits.

    Blocks are planned in forward order, with the ones before as planned and the ones behind at their lowest precision,
    so that casts between blocks count. Of the blocks for which there is no time, the lowest precisions stay.

    Source: QSync (IPDPS 2024). Ours: the exact memory and casts of the problem instead of sums over the block, no reuse
        of plans by blocks of like structure but other costs, and that the last block is planned too.
    """
    positions = adjustable_positions(problem, device)
    names = {position: problem.operators[position].name for position in positions}
    ladders = {position: precisions_by_rank(problem, device, names[position]) for position in positions}
    every = {operator.name: precisions_by_rank(problem, device, operator.name) for operator in problem.adjustable}
    highest = DeviceState(problem, device, {name: steps[-1] for name, steps in every.items()})
    state = DeviceState(problem, device, {name: steps[0] for name, steps in every.items()})
    blocks = subgraphs(problem, device)
    excess_kib = max(0, highest.memory_kib - device.memory_limit_kib)
    savings_kib = [_saving_kib(highest, block, ladders) for block in blocks]
    total_kib = max(1, sum(savings_kib))
    for block, saving_kib in zip(blocks, savings_kib, strict=True):
        must_save_kib = math.ceil(excess_kib * saving_kib / total_kib)
        lowest_kib = state.memory_kib
        allowed_kib = lowest_kib + max(0, saving_kib - must_save_kib)
        best: tuple[tuple[int, int], tuple[str, ...]] | None = None
        for choice in itertools.product(*(ladders[position] for position in block)):
            for position, precision in zip(block, choice, strict=True):
                if state.precisions[position] != precision:
                    state.change(position, precision)
            value = state.compute_ns, state.memory_kib
            if state.memory_kib <= allowed_kib and (best is None or value < best[0]):
                best = value, choice
            if time.monotonic() > deadline:
                break
        chosen = best[1] if best is not None else tuple(ladders[position][0] for position in block)
        for position, precision in zip(block, chosen, strict=True):
            if state.precisions[position] != precision:
                state.change(position, precision)
    return state


def _saving_kib(highest: DeviceState, block: list[int], ladders: dict[int, tuple[str, ...]]) -> int:
    """Memory that a block saves when it alone goes from its highest precisions to its lowest."""
    before = highest.memory_kib
    moves = [move for position in block for move in highest.change(position, ladders[position][0])]
    saved = before - highest.memory_kib
    highest.undo(moves)
    return max(0, saved)


class PublishedFormulation:
    """The method ``qsync-published``: the allocator as published, with no other plan to fall back on.

    Source: QSync (IPDPS 2024), allocator.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every device type; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        devices: dict[str, dict[str, str]] = {}
        for device in problem.devices:
            state = published_start(problem, device, deadline)
            if not keeps_limits(state):
                late = time.monotonic() > deadline
                return Answer(
                    termination=TerminationStatus.TIME_LIMIT if late else TerminationStatus.ERROR,
                    solve_seconds=time.monotonic() - started,
                    reason=f"device {device.name!r}: the initial plan of the published allocator takes "
                    f"{state.iteration_ns} ns and {state.memory_kib} KiB, of {problem.latency_limit_ns} ns and "
                    f"{device.memory_limit_kib} KiB allowed, which proves nothing; use 'qsync' or 'greedy'",
                )
            recover(state, passes=1, deadline=deadline)
            devices[device.name] = state.choices()
        return Answer(
            termination=TerminationStatus.TIME_LIMIT if time.monotonic() > deadline else TerminationStatus.FEASIBLE,
            devices=devices,
            solve_seconds=time.monotonic() - started,
        )
