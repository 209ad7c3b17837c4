"""The choice of draft and length while a server runs: follows what is accepted, with hysteresis, between given graphs.

Per draft and draft position a Beta posterior says how likely the token there is accepted; its prior is what the draft's
positions show together, and theirs is the planned acceptance. Old cycles of a draft fade, so that the controller
notices when the kind of text changes. Drafts that do not run are tried for a cycle now and then, within a fixed share
of the time; a trial that wins pays for the next one at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsync_opt.decoding.problem import Choice, Problem, Regime
from qsync_opt.errors import ProblemError
from qsync_opt.io import check_fields

_TRIALS_IN_CREDIT = 4
"""Most trials that a long time without any saves up for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured graph that the controller may choose: its times in a regime; ``draft`` None is plain decoding."""

    draft: str | None
    length: int
    cycle_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """How fast a `Controller` follows and how careful it is.

    Attributes:
        memory_cycles: Cycles after which what was seen counts 1/e.
        prior_cycles: Cycles that the planned acceptance counts as.
        margin: Relative gain in time per token that a change must promise.
        dwell_cycles: Least cycles between two changes, but for the return to plain decoding.
        deviations: Standard deviations below its mean at which a draft's acceptance counts.
        trial_share: Largest share of the time that trials of drafts may cost.

    Raises:
        ProblemError: A value is out of range.
    """

    memory_cycles: float = 16.0
    prior_cycles: float = 4.0
    margin: float = 0.02
    dwell_cycles: int = 8
    deviations: float = 1.0
    trial_share: float = 0.005

    def __post_init__(self) -> None:
        check_fields(self, "controller options")
        if self.memory_cycles < 1 or self.prior_cycles <= 0 or self.margin >= 1 or self.trial_share > 1:
            raise ProblemError(
                f"controller options: memory_cycles is {self.memory_cycles!r}, prior_cycles {self.prior_cycles!r}, "
                f"margin {self.margin!r} and trial_share {self.trial_share!r}, but they must be at least 1, above 0, "
                "below 1 and at most 1"
            )


class _Belief:
    """What is known of one draft: faded counts by position, accepted and rejected."""

    def __init__(self, planned: float, positions: int, options: ControllerOptions) -> None:
        self.planned = planned
        self.weight = options.prior_cycles
        self.fading = math.exp(-1 / options.memory_cycles)
        self.accepted = [0.0] * positions
        self.rejected = [0.0] * positions
        self._values: dict[float, list[float]] = {}

    @property
    def positions(self) -> int:
        """Draft positions that are counted."""
        return len(self.accepted)

    def observe(self, length: int, accepted: Sequence[int]) -> None:
        """Add one cycle, which counts as one however large its batch: sequences of a batch are alike."""
        self._values.clear()
        self.accepted = [count * self.fading for count in self.accepted]
        self.rejected = [count * self.fading for count in self.rejected]
        for position in range(length):
            self.accepted[position] += sum(count > position for count in accepted) / len(accepted)
            self.rejected[position] += sum(count == position for count in accepted) / len(accepted)

    def values(self, deviations: float) -> list[float]:
        """The mean of each position, moved by some standard deviations, inside [0, 1]; asked for by every graph."""
        if deviations not in self._values:
            self._values[deviations] = self._moved(deviations)
        return self._values[deviations]

    def _moved(self, deviations: float) -> list[float]:
        accepted, rejected = sum(self.accepted), sum(self.rejected)
        together = (self.weight * self.planned + accepted) / (self.weight + accepted + rejected)
        values = []
        for yes, no in zip(self.accepted, self.rejected, strict=True):
            total = self.weight + yes + no
            mean = (self.weight * together + yes) / total
            values.append(min(1.0, max(0.0, mean + deviations * math.sqrt(mean * (1 - mean) / (total + 1)))))
        return values


class Controller:
    """Chooses between the graphs of one regime, cycle by cycle.

    Call `choose` before a cycle and `observe` after it. Pure Python: the same observations give the same choices.

    Args:
        problem: Where times and planned acceptances stand.
        regime: Name of the regime.
        graphs: The choices whose graphs were captured, as (draft, length); plain decoding always is one.
        options: See `ControllerOptions`.
        like: A controller of another regime of the same text: both believe the same of each draft that both have.

    Raises:
        ProblemError: The problem has no such regime or choice.

    Source: ours.
    """

    def __init__(
        self,
        problem: Problem,
        regime: str,
        graphs: Sequence[tuple[str, int]],
        options: ControllerOptions | None = None,
        *,
        like: Controller | None = None,
    ) -> None:
        self.options = options or ControllerOptions()
        self.regime: Regime = problem.regime(regime)
        choices = [self.regime.choice(draft, length) for draft, length in dict.fromkeys(graphs)]
        self.plain = Graph(draft=None, length=0, cycle_ns=self.regime.plain_ns)
        self.graphs = (self.plain, *(Graph(draft=c.draft, length=c.length, cycle_ns=c.cycle_ns) for c in choices))
        shared: Mapping[str, _Belief] = {} if like is None else like._beliefs
        self._beliefs: dict[str, _Belief] = {
            draft: shared[draft] if draft in shared and shared[draft].positions >= belief.positions else belief
            for draft, belief in self._planned_beliefs(problem, choices).items()
        }
        # Trials take the draft's shortest graph, which costs least where all is rejected; the drafts take turns.
        self._trials = [min(self._of(draft), key=lambda graph: graph.length) for draft in self._beliefs]
        worst_ns = max((graph.cycle_ns for graph in self._trials), default=0)
        self._most_credit_ns = float(_TRIALS_IN_CREDIT * worst_ns)
        self._credit_ns = 0.0
        self._since_change = self.options.dwell_cycles
        self._trial: Graph | None = None
        self.current = self._best(-self.options.deviations)

    def _of(self, draft: str) -> list[Graph]:
        return [graph for graph in self.graphs if graph.draft == draft]

    def _planned_beliefs(self, problem: Problem, choices: Sequence[Choice]) -> dict[str, _Belief]:
        """Per draft, the planned acceptance of its longest choice."""
        longest = {choice.draft: choice for choice in sorted(choices, key=lambda choice: choice.length)}
        return {
            draft: _Belief(choice.acceptance.at(problem.confidence) or 0.0, choice.length, self.options)
            for draft, choice in longest.items()
        }

    def time_per_token_ns(self, graph: Graph, deviations: float = 0.0) -> float:
        """Nanoseconds per token by what is believed now, acceptances moved by some standard deviations."""
        if graph.draft is None:
            return float(graph.cycle_ns)
        tokens = reached = 1.0
        for value in self._beliefs[graph.draft].values(deviations)[: graph.length]:
            reached *= value
            tokens += reached
        return graph.cycle_ns / tokens

    def _best(self, deviations: float) -> Graph:
        """The fastest graph; plain decoding where none is faster."""
        return min(self.graphs, key=lambda graph: self.time_per_token_ns(graph, deviations))

    def choose(self) -> Graph:
        """The graph of the next cycle."""
        options, careful = self.options, -self.options.deviations
        if self.current.draft is not None and self.time_per_token_ns(self.current) >= self.plain.cycle_ns:
            self._change(self.plain)  # at once: it loses
        best = self._best(careful)
        bar_ns = (1 - options.margin) * self.time_per_token_ns(self.current, careful)
        if self._since_change >= options.dwell_cycles and self.time_per_token_ns(best, careful) < bar_ns:
            self._change(best)
        self._trial = self._affordable_trial()
        return self._trial or self.current

    def _change(self, graph: Graph) -> None:
        self.current, self._since_change = graph, 0

    def _affordable_trial(self) -> Graph | None:
        """The next draft to try, once enough is saved for a cycle of it that accepts nothing."""
        for graph in self._trials:
            if graph.draft != self.current.draft and self._loss_ns(graph, 1.0) <= self._credit_ns:
                self._trials.remove(graph)
                self._trials.append(graph)
                return graph
        return None

    def _loss_ns(self, graph: Graph, tokens: float) -> float:
        """What a cycle of a trial costs more than the current graph takes for its tokens."""
        return graph.cycle_ns - tokens * self.time_per_token_ns(self.current)

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn from the cycle that `choose` gave: how many drafted tokens each sequence of the batch accepted.

        Raises:
            ProblemError: No sequence, or a number below 0 or above the cycle's length.
        """
        graph = self._trial or self.current
        if not accepted:
            raise ProblemError("observe got no sequence, but a cycle has at least one")
        for count in accepted:
            if not 0 <= count <= graph.length:
                raise ProblemError(
                    f"a sequence accepted {count!r} tokens, but a cycle of length {graph.length} accepts 0 to "
                    f"{graph.length}"
                )
        if self._trial is not None:
            self._credit_ns -= self._loss_ns(graph, 1 + sum(accepted) / len(accepted))
        if graph.draft is not None:
            self._beliefs[graph.draft].observe(graph.length, accepted)
        self._credit_ns = min(self._credit_ns + self.options.trial_share * graph.cycle_ns, self._most_credit_ns)
        self._since_change += 1
        self._trial = None

    def beliefs(self) -> Mapping[str, tuple[float, ...]]:
        """Draft to the mean acceptance believed of each position."""
        return {draft: tuple(belief.values(0.0)) for draft, belief in self._beliefs.items()}
