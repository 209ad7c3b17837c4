"""The choice of draft and length while a server runs: follows what is accepted, with hysteresis, between given graphs.

Per draft and draft position a Beta posterior says how likely the token there is accepted; its prior is what the draft's
positions show together, and theirs is the planned acceptance. Where recent cycles contradict older ones, the text is of
another kind: older ones are forgotten. Drafts that do not run are tried for a cycle now and then, within a fixed share
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
_CHANGE_DEVIATIONS = 2.0
"""Standard deviations between recent acceptance and that before which say that the text has changed."""


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
        memory_cycles: Cycles after which what was seen counts 1/e, while the text stays of one kind.
        recent_cycles: The same for what says whether it does.
        prior_cycles: Cycles that the planned acceptance counts as.
        margin: Relative gain in time per token that a change must promise.
        dwell_cycles: Least cycles between two changes, but for the return to plain decoding.
        deviations: Standard deviations below its mean at which a draft's acceptance counts.
        trial_share: Largest share of the time that trials of drafts may cost.

    Raises:
        ProblemError: A value is out of range.
    """

    memory_cycles: float = 96.0
    recent_cycles: float = 8.0
    prior_cycles: float = 4.0
    margin: float = 0.01
    dwell_cycles: int = 4
    deviations: float = 0.25
    trial_share: float = 0.004

    def __post_init__(self) -> None:
        check_fields(self, "controller options")
        if (
            self.memory_cycles < 1
            or self.recent_cycles < 1
            or self.prior_cycles <= 0
            or self.margin >= 1
            or self.trial_share > 1
        ):
            raise ProblemError(
                f"controller options: memory_cycles is {self.memory_cycles!r}, recent_cycles {self.recent_cycles!r}, "
                f"prior_cycles {self.prior_cycles!r}, margin {self.margin!r} and trial_share {self.trial_share!r}, but "
                "they must be at least 1, at least 1, above 0, below 1 and at most 1"
            )


class _Belief:
    """What is known of one draft: faded counts by position, accepted and rejected; recent ones apart."""

    def __init__(self, planned: float, positions: int, options: ControllerOptions) -> None:
        self.planned = planned
        self.weight = options.prior_cycles
        self.fading = [math.exp(-1 / memory) for memory in (options.recent_cycles, options.memory_cycles)]
        self.recent, self.kept = ([[0.0] * positions, [0.0] * positions] for _ in range(2))
        self._values: dict[float, list[float]] = {}

    @property
    def positions(self) -> int:
        """Draft positions that are counted."""
        return len(self.kept[0])

    def observe(self, length: int, accepted: Sequence[int]) -> bool:
        """Add one cycle, which counts as one however large its batch: sequences of a batch are alike.

        Returns whether recent cycles contradict all that are kept: then they alone are.
        """
        self._values.clear()
        for counts, fading in zip((self.recent, self.kept), self.fading, strict=True):
            for which, found in enumerate(counts):
                for position in range(self.positions):
                    found[position] *= fading
                    if position < length:
                        hits = sum((n == position) if which else (n > position) for n in accepted)
                        found[position] += hits / len(accepted)
        recent, kept = (tuple(map(sum, counts)) for counts in (self.recent, self.kept))
        judged = sum(recent)
        share = (kept[0] + 0.5) / (sum(kept) + 1)
        z = _CHANGE_DEVIATIONS
        # As in Wilson's interval: few tokens prove nothing, however near to 0 or 1 the share is.
        most = z * math.sqrt(share * (1 - share) / judged + (z / (2 * judged)) ** 2)
        changed = abs(recent[0] / judged - share) > most
        if changed:
            self.kept = [list(found) for found in self.recent]
        return changed

    def doubt(self) -> None:
        """Let what is kept count as little as the prior: the text has changed since it was seen."""
        total = sum(map(sum, self.kept))
        factor = min(1.0, self.weight / total) if total else 1.0
        self.kept = [[factor * count for count in found] for found in self.kept]
        self._values.clear()

    def values(self, deviations: float) -> list[float]:
        """The mean of each position, moved by some standard deviations, inside [0, 1]; asked for by every graph."""
        if deviations not in self._values:
            self._values[deviations] = self._moved(deviations)
        return self._values[deviations]

    def _moved(self, deviations: float) -> list[float]:
        accepted, rejected = self.kept
        seen = sum(accepted) + sum(rejected)
        together = (self.weight * self.planned + sum(accepted)) / (self.weight + seen)
        values = []
        for yes, no in zip(accepted, rejected, strict=True):
            mean = (self.weight * together + yes) / (self.weight + yes + no)
            # Positions are alike, so that those seen say how sure one is that was not.
            spread = math.sqrt(mean * (1 - mean) / (self.weight + seen + 1))
            values.append(min(1.0, max(0.0, mean + deviations * spread)))
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
        if graph.draft is not None and self._beliefs[graph.draft].observe(graph.length, accepted):
            self._credit_ns = self._most_credit_ns  # the others are worth a trial, too
            for draft, belief in self._beliefs.items():
                if draft != graph.draft:
                    belief.doubt()
        self._credit_ns = min(self._credit_ns + self.options.trial_share * graph.cycle_ns, self._most_credit_ns)
        self._since_change += 1
        self._trial = None

    def beliefs(self) -> Mapping[str, tuple[float, ...]]:
        """Draft to the mean acceptance believed of each position."""
        return {draft: tuple(belief.values(0.0)) for draft, belief in self._beliefs.items()}
