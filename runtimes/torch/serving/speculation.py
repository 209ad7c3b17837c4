"""What a server drafts before its next pass: always the same, or what a controller finds to pay.

Drafts are looked up in a request's own text (``lookup``), or computed by the model's own weights: at activations of
INT8 (``A8``) or FP8 (``F8``), from the upper halves of a cache of 8 bits (``K4``), or both (``A8K4``). A specification
reads ``off``, ``lookup:N`` or ``A8:N`` with at most N tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qsync_opt.decoding import AcceptanceCounts, Controller, ControllerOptions, Judged, Problem
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.steps import SELF_DRAFTS

LOOKUP = "lookup"
DRAFTS = (LOOKUP, *SELF_DRAFTS)
LONGEST = 16
"""Most tokens of a draft."""


class Cycle(NamedTuple):
    """The draft of a pass and its length; plain decoding for length 0."""

    draft: str | None = None
    length: int = 0


PLAIN = Cycle()


class Speculation(Protocol):
    """Decides what micro-batches draft; asked and told by the engine's thread alone."""

    @property
    def drafts(self) -> frozenset[str]:
        """The drafts that it may choose."""

    @property
    def watched(self) -> int:
        """Tokens of look-up's drafts that are compared with what is decoded while fewer of them run; 0 for none."""

    def choose(self, microbatch: int, batch: int, context: int) -> Cycle:
        """What a micro-batch drafts next.

        Args:
            microbatch: Its number.
            batch: Its sequences.
            context: The tokens of its longest sequence.
        """

    def observe(self, microbatch: int, accepted: Sequence[int]) -> None:
        """Learn how many drafted tokens each sequence accepted of those that `choose` last gave this micro-batch."""

    def watch(self, microbatch: int, judged: Sequence[Judged], seconds: float) -> None:
        """Learn, before `observe`, what would have become of look-up's drafts in that cycle.

        Args:
            microbatch: As `choose` had it.
            judged: By position, behind those that look-up itself drafted; empty if there was nothing to look up.
            seconds: What finding that out took.
        """


class FixedSpeculation:
    """The same draft in every cycle.

    Raises:
        ProblemError: An unknown draft, or an unusable length.
    """

    def __init__(self, draft: str, length: int) -> None:
        if draft not in DRAFTS:
            raise ProblemError(f"draft is {draft!r}, but allowed are {', '.join(DRAFTS)}")
        if not 1 <= length <= LONGEST:
            raise ProblemError(f"a draft has {length} tokens, but allowed are 1 to {LONGEST}")
        self.cycle = Cycle(draft, length)
        self._accepted, self._judged = [0] * length, [0] * length

    @property
    def drafts(self) -> frozenset[str]:
        """See `Speculation`."""
        return frozenset([str(self.cycle.draft)])

    @property
    def watched(self) -> int:
        """See `Speculation`: nothing."""
        return 0

    def watch(self, microbatch: int, judged: Sequence[Judged], seconds: float) -> None:
        """See `Speculation`; nothing is learned."""

    @property
    def acceptance(self) -> AcceptanceCounts:
        """What became of drafts of the whole length so far."""
        return AcceptanceCounts(accepted=tuple(self._accepted), judged=tuple(self._judged))

    def choose(self, microbatch: int, batch: int, context: int) -> Cycle:
        """See `Speculation`."""
        return self.cycle

    def observe(self, microbatch: int, accepted: Sequence[int]) -> None:
        """See `Speculation`."""
        for position in range(self.cycle.length):
            self._accepted[position] += sum(count > position for count in accepted)
            self._judged[position] += sum(count >= position for count in accepted)


def parse_speculation(text: str) -> FixedSpeculation | None:
    """The speculation of a specification; None for ``off``.

    Raises:
        ProblemError: It is none.
    """
    if text == "off":
        return None
    draft, separator, length = text.partition(":")
    if not separator or not (length.isascii() and length.isdigit()):
        specs = ", ".join(f"{name}:N" for name in DRAFTS)
        raise ProblemError(
            f"speculation is {text!r}, but allowed are off, auto, {specs}, such as {LOOKUP}:4, and a problem file that "
            "'decoding measure' wrote"
        )
    return FixedSpeculation(draft, int(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    regime: str
    batch: int
    context: int


_WATCHING_SHARE = 0.001
"""Largest share of the time that watching look-up may take of the host."""


class AdaptiveSpeculation:
    """Chooses by a controller per micro-batch and regime; regimes share what they know of acceptance.

    A pass belongs to the regime with the smallest measured batch and context that hold it, or else the largest ones.

    Args:
        problem: Its regimes have the keys ``x-batch`` and ``x-context``, as `measure_speculation` writes.
        refused: Drafts that cannot run here, by name, with the reason; they are never chosen.
        options: Of the controllers.

    Raises:
        ProblemError: A regime lacks a key, or the problem has an unknown draft.

    Source: ours.
    """

    def __init__(
        self, problem: Problem, *, refused: Mapping[str, str] | None = None, options: ControllerOptions | None = None
    ) -> None:
        self.problem, self.refused, self._options = problem, dict(refused or {}), options
        for draft in problem.drafts:
            if draft not in DRAFTS:
                raise ProblemError(
                    f"problem {problem.name!r} has the draft {draft!r}, but this server has {', '.join(DRAFTS)}; "
                    "measure on this machine by 'decoding measure'"
                )
        longest = max((c.length for regime in problem.regimes for c in regime.choices), default=0)
        if longest > LONGEST:
            raise ProblemError(
                f"problem {problem.name!r} has drafts of {longest} tokens, but this server drafts {LONGEST} at most"
            )
        lookups = [c.length for regime in problem.regimes for c in regime.choices if c.draft == LOOKUP]
        self._longest_lookup = max(lookups, default=0) if LOOKUP in self.drafts else 0
        self._watching_credit_s = 0.0
        self._sizes = [_size(problem, regime.name) for regime in problem.regimes]
        self._controllers: dict[tuple[int, str], Controller] = {}
        self._current: dict[int, Controller] = {}

    @property
    def drafts(self) -> frozenset[str]:
        """See `Speculation`."""
        return frozenset(self.problem.drafts) - frozenset(self.refused)

    @property
    def watched(self) -> int:
        """See `Speculation`: nothing while watching has taken more than its share of the time."""
        return self._longest_lookup if self._watching_credit_s >= 0 else 0

    def regime(self, batch: int, context: int) -> str:
        """The regime of a pass."""

        def misfit(size: _Size) -> tuple[bool, int, bool, int]:
            return size.batch < batch, abs(size.batch - batch), size.context < context, abs(size.context - context)

        return min(self._sizes, key=misfit).regime

    def choose(self, microbatch: int, batch: int, context: int) -> Cycle:
        """See `Speculation`."""
        regime = self.regime(batch, context)
        if (microbatch, regime) not in self._controllers:
            graphs = [(c.draft, c.length) for c in self.problem.regime(regime).choices if c.draft in self.drafts]
            self._controllers[microbatch, regime] = Controller(
                self.problem, regime, graphs, self._options, like=next(iter(self._controllers.values()), None)
            )
        controller = self._current[microbatch] = self._controllers[microbatch, regime]
        graph = controller.choose()
        return Cycle(graph.draft, graph.length)

    def observe(self, microbatch: int, accepted: Sequence[int]) -> None:
        """See `Speculation`."""
        controller = self._current[microbatch]
        controller.observe(accepted)
        # Time that was not used is not saved up.
        credit_s = self._watching_credit_s + _WATCHING_SHARE * controller.current.cycle_ns / 1e9
        self._watching_credit_s = min(credit_s, 0.0)

    def watch(self, microbatch: int, judged: Sequence[Judged], seconds: float) -> None:
        """See `Speculation`."""
        began = time.perf_counter()
        self._current[microbatch].watch(LOOKUP, judged)
        self._watching_credit_s -= seconds + time.perf_counter() - began


def _size(problem: Problem, regime: str) -> _Size:
    values = []
    for key in ("x-batch", "x-context"):
        value = problem.extras.get(("regimes", regime, key))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ProblemError(
                f"regime {regime!r} of problem {problem.name!r} has {key} {value!r}, but a server needs a number of at "
                "least 1 there; measure on this machine by 'decoding measure'"
            )
        values.append(value)
    return _Size(regime=regime, batch=values[0], context=values[1])
