"""Plans: the width of every message."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from qsync_opt.errors import ProblemError
from qsync_opt.io import Document, Extras, Json, freeze
from qsync_opt.messages.problem import WIDEST, Problem

PLAN_FORMAT = "qsync-messages-plan/1"

Widths = npt.NDArray[np.uint8]
Bits = Mapping[str, tuple[tuple[Widths, ...], ...]]
"""Exchange to rounds to pairs to the width of each message."""


def _read_bits(data: Any, place: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ProblemError(f"{place} must be an object: exchange to rounds to pairs to widths")
    result: dict[str, Any] = {}
    for name, rounds in data.items():
        where = f"{place} of exchange {name!r}"
        result[name] = [[_widths(pair, where) for pair in _list(group, where)] for group in _list(rounds, where)]
    return result


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise ProblemError(f"{where}: {data!r} is no list; give rounds, in each round pairs, in each pair widths")
    return data


def _widths(data: Any, where: str) -> Widths:
    for value in _list(data, where):
        if type(value) is not int or not 1 <= value <= WIDEST:
            raise ProblemError(f"{where}: a width is {value!r}, but widths are whole numbers from 1 to {WIDEST}")
    return np.array(data, dtype=np.uint8)


def _write_bits(bits: Bits) -> dict[str, Any]:
    return {name: [[pair.tolist() for pair in group] for group in rounds] for name, rounds in bits.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan(Document):
    """The width in bits of each message: by exchange, round and pair, an array of shape (messages,).

    Source: the plan file format of this package, "qsync-messages-plan/1".
    """

    FORMAT: ClassVar = PLAN_FORMAT
    KIND: ClassVar = "plan"

    bits: Annotated[Bits, Json(read=_read_bits, write=_write_bits)]
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bits = {}
        for name, rounds in self.bits.items():
            bits[name] = tuple(tuple(np.array(pair, dtype=np.uint8) for pair in group) for group in rounds)
            for group in bits[name]:
                for pair in group:
                    pair.flags.writeable = False
        object.__setattr__(self, "bits", bits)
        freeze(self, "bits", "extras")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and _write_bits(self.bits) == _write_bits(other.bits)

    __hash__ = None  # type: ignore[assignment]

    def check(self, problem: Problem) -> None:
        """Refuse a plan that is not of this problem.

        Raises:
            ProblemError: An exchange, a round, a pair or a message is missing or too many, or a width is not on the
                menu; the text names the place.
        """
        menu = problem.menu
        known = {exchange.name for exchange in problem.exchanges}
        for name in self.bits:
            if name not in known:
                raise ProblemError(f"the plan has the exchange {name!r}, which problem {problem.name!r} lacks")
        for exchange in problem.exchanges:
            if exchange.name not in self.bits:
                raise ProblemError(f"the plan lacks the exchange {exchange.name!r} of problem {problem.name!r}")
            rounds = self.bits[exchange.name]
            shape, needed = [len(group) for group in rounds], [len(group) for group in exchange.rounds]
            if shape != needed:
                raise ProblemError(
                    f"exchange {exchange.name!r}: the plan's rounds have {shape} pairs, but the problem's {needed}; "
                    "it may be the plan of another partition"
                )
            widths = [pair for group in rounds for pair in group]
            for pair, chosen in zip(exchange.pairs, widths, strict=True):
                if chosen.shape != pair.beta.shape:
                    raise ProblemError(
                        f"exchange {exchange.name!r}, {pair.label}: the plan has {chosen.size} widths for "
                        f"{pair.beta.size} messages; it may be the plan of another partition"
                    )
                for width in np.unique(chosen).tolist():
                    if width not in menu:
                        raise ProblemError(
                            f"exchange {exchange.name!r}, {pair.label}: a width is {width}, but allowed are "
                            f"{', '.join(map(str, menu))}"
                        )


def uniform_plan(problem: Problem, bits: int) -> Plan:
    """The plan that gives every message the same width.

    Raises:
        ProblemError: The width is not on the problem's menu.
    """
    plan = Plan(
        bits={
            e.name: tuple(tuple(np.full(p.beta.shape, bits, np.uint8) for p in group) for group in e.rounds)
            for e in problem.exchanges
        }
    )
    plan.check(problem)
    return plan


def in_rounds(plan: Plan, problem: Problem) -> Plan:
    """A plan in the rounds of a problem, from rounds that hold the same pairs in the same order, as `by_bytes` has.

    Raises:
        ProblemError: It has other exchanges, pairs or messages.
    """
    bits = dict(plan.bits)
    for exchange in problem.exchanges:
        pairs = itertools.chain.from_iterable(plan.bits.get(exchange.name, ()))
        groups = [tuple(itertools.islice(pairs, len(group))) for group in exchange.rounds]
        further = tuple(pairs)
        bits[exchange.name] = (*groups, further) if further else tuple(groups)
    regrouped = Plan(bits=bits)
    regrouped.check(problem)
    return regrouped
