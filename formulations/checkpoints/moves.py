"""Rows are moved away from what is slowest, one group of rows at a time, while this shortens the plan."""

from __future__ import annotations

from qsync_opt.checkpoints import Problem

Counts = list[dict[str, int]]
"""For each piece, the number of rows of each writer."""
MOST_MOVES = 400
MOST_CHOICES = 10_000
"""Pairs of a piece and a writer that holds it; beyond, moves take long."""


def has_few_choices(problem: Problem) -> bool:
    """Whether there are at most `MOST_CHOICES`."""
    return sum(len(piece.writers) for piece in problem.pieces) <= MOST_CHOICES


def improve(problem: Problem, counts: Counts, bound: float) -> Counts:
    """Move rows from the slowest writer or host to others, as long as it gets faster; ``counts`` is not changed.

    Of use where the problem `has_few_choices`.

    Source: ours; a descent, which may end before the optimum.
    """
    balance = _Balance(problem, counts)
    for _ in range(MOST_MOVES):
        if balance.seconds <= bound or not balance.move(bound):
            break
    return balance.counts


class _Balance:
    """Rows by piece and writer, and the bytes of each writer and host."""

    def __init__(self, problem: Problem, counts: Counts) -> None:
        self._problem = problem
        self.counts = [dict(rows) for rows in counts]
        self._writers = dict.fromkeys(problem.writers, 0)
        self._hosts = dict.fromkeys(problem.hosts, 0)
        for piece, rows in zip(problem.pieces, self.counts, strict=True):
            for name, count in rows.items():
                self._add(name, count * piece.row_bytes)

    def _add(self, name: str, num_bytes: int) -> None:
        self._writers[name] += num_bytes
        self._hosts[self._problem.writers[name].host] += num_bytes

    @property
    def seconds(self) -> float:
        """Of the slowest writer or host."""
        return max(map(self._seconds, self._writers), default=0.0)

    def _seconds(self, name: str) -> float:
        """Until a writer and its host are done."""
        writer = self._problem.writers[name]
        return max(
            self._writers[name] / writer.bytes_per_s, self._hosts[writer.host] / self._problem.hosts[writer.host]
        )

    def move(self, bound: float) -> bool:
        """Move rows from one slowest writer so that all that the move touches is faster; False if there are none."""
        slowest = max(self._writers, key=self._seconds)
        now = self._seconds(slowest)
        best: tuple[float, int, str, str, int] | None = None
        full = [name for name in self._writers if self._seconds(name) >= now]  # those on a full host, too
        for source in full:
            for number, rows in enumerate(self.counts):
                if source not in rows:
                    continue
                for target in self._problem.pieces[number].writers:
                    if target == source or self._seconds(target) >= now:
                        continue
                    for count in self._amounts(number, source, target, now, bound):
                        after = self._after(number, source, target, count)
                        if after < now and (best is None or after < best[0]):
                            best = (after, number, source, target, count)
        if best is None:
            return False
        _, number, source, target, count = best
        self._shift(number, source, target, count)
        return True

    def _amounts(self, number: int, source: str, target: str, now: float, bound: float) -> set[int]:
        """Numbers of rows worth a try: what the source has too much, what the target still takes, and half-way."""
        piece, writers, hosts = self._problem.pieces[number], self._problem.writers, self._problem.hosts
        rows = self.counts[number][source]
        own, other = writers[source], writers[target]
        excess = max(
            self._writers[source] - bound * own.bytes_per_s,
            (self._hosts[own.host] - bound * hosts[own.host]) if own.host != other.host else 0.0,
        )
        room = now * other.bytes_per_s - self._writers[target]
        if own.host != other.host:
            room = min(room, now * hosts[other.host] - self._hosts[other.host])
        wanted = (int(excess // piece.row_bytes), -int(-excess // piece.row_bytes), int(room / 2 // piece.row_bytes), 1)
        return {min(rows, count) for count in wanted if count > 0}

    def _after(self, number: int, source: str, target: str, count: int) -> float:
        self._shift(number, source, target, count)
        after = max(self._seconds(source), self._seconds(target))
        self._shift(number, target, source, count)
        return after

    def _shift(self, number: int, source: str, target: str, count: int) -> None:
        rows, num_bytes = self.counts[number], count * self._problem.pieces[number].row_bytes
        rows[source] -= count
        if not rows[source]:
            del rows[source]
        rows[target] = rows.get(target, 0) + count
        self._add(source, -num_bytes)
        self._add(target, num_bytes)
