"""The choice of draft and length while a server runs: follows what is accepted, with hysteresis, between given graphs.

Per draft, experts of different memories each keep faded counts by draft position, and their average by how well they
have foretold what was accepted is believed: while the text stays of one kind the longest memory leads, and where it
changes a short one within a few cycles. Drafts that cost nothing to make, such as look-up's, are watched: they are
compared with the tokens that come out anyway, also behind the length that runs. The other ones that do not run are
tried for a cycle now and then, within a fixed share of the time; a trial that loses nothing leaves that share to the
next one, and a change of the text lends for a few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qsync_opt.decoding.acceptance import acceptance_by_position
from qsync_opt.decoding.problem import Choice, Problem, Regime
from qsync_opt.errors import ProblemError
from qsync_opt.io import check_fields

_TRIALS_IN_CREDIT = 2
"""Most trials that a long time without any saves up for."""
_TRIALS_LENT = 2
"""Trials for whose time, with what is saved, a change of one draft lends to the others."""
_LENT_CYCLES = 64
"""Cycles after the change in which they may be made."""
_PLANNED_TOKENS, _ALIKE_TOKENS, _DOUBTED_TOKENS = 2.0, 4.0, 8.0
"""Tokens that the planned acceptance counts as; the positions together, for each one; at most all, once in doubt."""
_CHANGED = 0.02
"""Weight of the longest memory below which a text has changed; 1 / 6 gives a false alarm in some hundred cycles."""
_LEANING = 0.25
"""Share of all measured cycles that the position before counts as."""
_LEAST, _MOST = 0.002, 0.998
"""Limits of what an expert foretells, so that it can be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured graph that the controller may choose: its times in a regime; ``draft`` None is plain decoding."""

    draft: str | None
    length: int
    cycle_ns: int


class Judged(NamedTuple):
    """A draft position in one cycle: how many sequences accepted the token there, and how many rejected it."""

    position: int
    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """How fast a `Controller` follows and how careful it is.

    Attributes:
        memory_cycles: Of each expert, the cycles after which what was seen counts 1/e.
        change_rate: Share of an expert's weight that is given to all in each cycle: how often the text changes.
        margin: Relative gain in time per token that a change must promise.
        dwell_cycles: Least cycles between two changes, but for the return to plain decoding.
        deviations: Standard deviations below its mean at which a draft's acceptance counts.
        plain_deviations: The same while decoding is plain.
        trial_share: Largest share of the time that trials of drafts may cost.

    Raises:
        ProblemError: A value is out of range.
    """

    memory_cycles: tuple[float, ...] = (8.0, 32.0, 256.0)
    change_rate: float = 0.001
    margin: float = 0.01
    dwell_cycles: int = 4
    deviations: float = 0.5
    plain_deviations: float = 1.0
    trial_share: float = 0.002

    def __post_init__(self) -> None:
        check_fields(self, "controller options")
        if (
            not self.memory_cycles
            or min(self.memory_cycles) < 1
            or not 0 < self.change_rate < 1
            or self.margin >= 1
            or self.trial_share > 1
        ):
            raise ProblemError(
                f"controller options: memory_cycles is {self.memory_cycles!r}, change_rate {self.change_rate!r}, "
                f"margin {self.margin!r} and trial_share {self.trial_share!r}, but they must be at least 1 each, "
                "between 0 and 1, below 1 and at most 1"
            )


class _Expert:
    """Counts by position that fade at one rate, what they foretell, and how much that is trusted."""

    def __init__(self, planned: Sequence[float], memory_cycles: float, weight: float) -> None:
        self.planned, self.weight = [min(_MOST, max(_LEAST, value)) for value in planned], weight
        self.mean_planned = sum(self.planned) / len(self.planned) if self.planned else _LEAST
        self.fading = math.exp(-1 / memory_cycles)
        self.accepted, self.rejected = [0.0] * len(planned), [0.0] * len(planned)
        self.estimate()

    def scale(self, factor: float) -> None:
        """Let what was seen count so many times as much."""
        self.accepted = [factor * count for count in self.accepted]
        self.rejected = [factor * count for count in self.rejected]

    def estimate(self) -> None:
        """The mean of each position: its prior is what was planned, its odds moved as those of all positions were."""
        accepted = sum(self.accepted)
        self.seen = accepted + sum(self.rejected)
        expected = sum(
            value * (yes + no) for value, yes, no in zip(self.planned, self.accepted, self.rejected, strict=True)
        )
        prior_yes, prior_no = _PLANNED_TOKENS * self.mean_planned, _PLANNED_TOKENS * (1 - self.mean_planned)
        odds_ratio = (prior_yes + accepted) * (prior_no + self.seen - expected)
        odds_ratio /= (prior_no + self.seen - accepted) * (prior_yes + expected)
        self.means = []
        for value, yes, no in zip(self.planned, self.accepted, self.rejected, strict=True):
            prior = value * odds_ratio / (1 - value + value * odds_ratio)
            self.means.append(min(_MOST, max(_LEAST, (_ALIKE_TOKENS * prior + yes) / (_ALIKE_TOKENS + yes + no))))

    def log_likelihood(self, judged: Sequence[Judged]) -> float:
        """Of what a cycle showed, by what was foretold."""
        means = self.means
        return sum(yes * math.log(means[k]) + no * math.log(1 - means[k]) for k, yes, no in judged)


class _Belief:
    """What is known of one draft: experts, and their average by weight.

    Source: M. Herbster and M. Warmuth, "Tracking the best expert", Machine Learning 1998 (fixed share).
    """

    def __init__(self, planned: Sequence[float], options: ControllerOptions) -> None:
        self.positions, self.change_rate = len(planned), options.change_rate
        count = len(options.memory_cycles)
        self.experts = [_Expert(planned, memory, 1 / count) for memory in sorted(options.memory_cycles)]
        self._values: dict[float, list[float]] = {}
        self._changed = False

    def observe(self, judged: Sequence[Judged]) -> bool:
        """Add what one cycle showed, sequences one by one: the average of a batch of different texts is what is sought.

        Returns whether the longest memory has just lost its weight: the text has changed.
        """
        self._values.clear()
        likelihoods = [expert.log_likelihood(judged) for expert in self.experts]
        highest, count = max(likelihoods), len(self.experts)
        weights = [
            expert.weight * math.exp(likelihood - highest)
            for expert, likelihood in zip(self.experts, likelihoods, strict=True)
        ]
        total = sum(weights)
        for expert, weight in zip(self.experts, weights, strict=True):
            expert.weight = (1 - self.change_rate) * weight / total + self.change_rate / count
            expert.scale(expert.fading)
            for position, yes, no in judged:
                expert.accepted[position] += yes
                expert.rejected[position] += no
            expert.estimate()
        before, self._changed = self._changed, self.experts[-1].weight < _CHANGED
        return self._changed and not before

    def doubt(self) -> None:
        """Let what was seen count little: the text has changed since."""
        self._values.clear()
        for expert in self.experts:
            if expert.seen > _DOUBTED_TOKENS:
                expert.scale(_DOUBTED_TOKENS / expert.seen)
                expert.estimate()

    def values(self, deviations: float) -> list[float]:
        """The mean of each position, moved by some standard deviations, inside [0, 1]; asked for by every graph."""
        if deviations not in self._values:
            self._values[deviations] = [self._moved(position, deviations) for position in range(self.positions)]
        return self._values[deviations]

    def _moved(self, position: int, deviations: float) -> float:
        mean = square = 0.0
        for expert in self.experts:
            value = expert.means[position]
            mean += expert.weight * value
            # Positions move together, so that those seen say how sure one is that was not.
            square += expert.weight * (value**2 + value * (1 - value) / (_ALIKE_TOKENS + expert.seen + 1))
        return min(1.0, max(0.0, mean + deviations * math.sqrt(max(0.0, square - mean**2))))


def _smoothed(positions: Sequence[float]) -> list[float]:
    """Acceptances by position, each leaning on the one before: later ones were measured in fewer cycles."""
    reached, before, result = 1.0, next(iter(positions), 0.0), []
    for value in positions:
        before = (reached * value + _LEANING * before) / (reached + _LEANING)
        result.append(before)
        reached *= value
    return result


class Controller:
    """Chooses between the graphs of one regime, cycle by cycle.

    Call `choose` before a cycle and `observe` after it, and between them `watch` for drafts that did not run. Pure
    Python: the same observations give the same choices.

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
        self._turns = list(self._beliefs)
        worst_ns = max((min(graph.cycle_ns for graph in self._of(draft)) for draft in self._turns), default=0)
        self._most_credit_ns = float(_TRIALS_IN_CREDIT * worst_ns)
        self._most_lent_ns = float(_TRIALS_LENT * worst_ns)
        self._credit_ns, self._lent_cycles = 0.0, 0
        self._changed_draft: str | None = None
        self._since_change = self.options.dwell_cycles
        self._trial: Graph | None = None
        self._watched: set[str] = set()
        self._beside: list[Judged] = []
        self.current = self._best(-self.options.plain_deviations)

    def _of(self, draft: str | None) -> list[Graph]:
        return [graph for graph in self.graphs if graph.draft == draft]

    def _planned_beliefs(self, problem: Problem, choices: Sequence[Choice]) -> dict[str, _Belief]:
        """Per draft, the planned acceptance of each position; how careful to be, the options say."""
        by_draft: dict[str, dict[int, float]] = {}
        for choice in choices:
            acceptance = choice.acceptance.at(problem.confidence if choice.acceptance.mid is None else "mid")
            by_draft.setdefault(choice.draft, {})[choice.length] = acceptance or 0.0
        return {draft: _Belief(_smoothed(acceptance_by_position(own)), self.options) for draft, own in by_draft.items()}

    def time_per_token_ns(self, graph: Graph, deviations: float = 0.0) -> float:
        """Nanoseconds per token by what is believed now, acceptances moved by some standard deviations."""
        return graph.cycle_ns / self._expected_tokens(graph, deviations)

    def _expected_tokens(self, graph: Graph, deviations: float = 0.0) -> float:
        if graph.draft is None:
            return 1.0
        tokens = reached = 1.0
        for value in self._beliefs[graph.draft].values(deviations)[: graph.length]:
            reached *= value
            tokens += reached
        return tokens

    def _best(self, deviations: float) -> Graph:
        """The fastest graph; plain decoding where none is faster."""
        return min(self.graphs, key=lambda graph: self.time_per_token_ns(graph, deviations))

    def choose(self) -> Graph:
        """The graph of the next cycle."""
        options = self.options
        if self.current.draft is not None and self.time_per_token_ns(self.current) >= self.plain.cycle_ns:
            self._change(self.plain)  # at once: it loses
        careful = -(options.deviations if self.current.draft else options.plain_deviations)
        best = self._best(careful)
        bar_ns = (1 - options.margin) * self.time_per_token_ns(self.current, careful)
        if self._since_change >= options.dwell_cycles and self.time_per_token_ns(best, careful) < bar_ns:
            self._change(best)
        self._trial, self._beside = self._affordable_trial(), []
        return self._trial or self.current

    def _change(self, graph: Graph) -> None:
        self.current, self._since_change = graph, 0

    def _affordable_trial(self) -> Graph | None:
        """The next draft to try, in its graph that is expected to lose least, once that much is saved or lent.

        None that runs or is watched, and none that would not gain if all its tokens were accepted.
        """
        bar_ns = (1 - self.options.margin) * self.time_per_token_ns(self.current)
        lent_ns = self._most_lent_ns if self._lent_cycles > 0 else 0.0
        for draft in self._turns:
            graphs = self._of(draft)
            if draft == self.current.draft or draft in self._watched:
                continue
            if min(graph.cycle_ns / (graph.length + 1) for graph in graphs) >= bar_ns:
                continue
            losses_ns = {graph: self._loss_ns(graph, self._expected_tokens(graph)) for graph in graphs}
            trial = min(graphs, key=losses_ns.__getitem__)
            if losses_ns[trial] <= self._credit_ns + (0.0 if draft == self._changed_draft else lent_ns):
                self._turns.remove(draft)
                self._turns.append(draft)
                return trial
            if not lent_ns:
                return None  # it is its turn: cheaper ones would spend what is saved for it
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
            self._credit_ns -= max(0.0, self._loss_ns(graph, 1 + sum(accepted) / len(accepted)))
        if graph.draft is not None:
            judged = [
                Judged(k, sum(n > k for n in accepted), sum(n == k for n in accepted)) for k in range(graph.length)
            ]
            self._learn(graph.draft, judged + self._beside)
        self._credit_ns = min(self._credit_ns + self.options.trial_share * graph.cycle_ns, self._most_credit_ns)
        self._since_change += 1
        self._lent_cycles -= 1
        self._trial = None

    def watch(self, draft: str, judged: Sequence[Judged]) -> None:
        """Learn what would have become of drafts that cost nothing, compared with the tokens that came out anyway.

        Those are drafts that did not run, and of the one that ran the positions behind its length.

        A draft that is watched once is not tried at the cost of time any more. Drafts and positions that no graph has
        are ignored.
        """
        if draft not in self._beliefs:
            return
        known = [verdict for verdict in judged if verdict.position < self._beliefs[draft].positions]
        if not known:
            return
        self._watched.add(draft)
        if draft == (self._trial or self.current).draft:
            self._beside = known  # one cycle is learned from once
        else:
            self._learn(draft, known)

    def _learn(self, draft: str, judged: Sequence[Judged]) -> None:
        if self._beliefs[draft].observe(judged):
            for other, belief in self._beliefs.items():
                if other != draft:
                    belief.doubt()
            self._lent_cycles, self._changed_draft = _LENT_CYCLES, draft

    def beliefs(self) -> Mapping[str, tuple[float, ...]]:
        """Draft to the mean acceptance believed of each position."""
        return {draft: tuple(belief.values(0.0)) for draft, belief in self._beliefs.items()}
