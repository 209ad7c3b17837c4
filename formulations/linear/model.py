"""A mixed-integer linear program, independent of any solver, and its LP text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Terms = Mapping[int, float]
"""Column index to coefficient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One variable: ``lower`` <= it <= ``upper``, whole if ``integer``, with coefficient ``cost`` in the objective."""

    name: str
    lower: float
    upper: float
    integer: bool
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One constraint: ``lower`` <= sum of terms <= ``upper``; either side may be infinite."""

    name: str
    terms: Terms
    lower: float
    upper: float


@dataclass(slots=True, kw_only=True)
class LinearModel:
    """Minimise ``constant`` plus the columns' costs, subject to the rows.

    It is filled by `add_column` and `add_row`, and only read by solvers.
    """

    name: str
    constant: float = 0.0
    columns: list[Column] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add_column(
        self, name: str, *, lower: float = 0.0, upper: float = 1.0, integer: bool = False, cost: float = 0.0
    ) -> int:
        """Add a column and return its index."""
        self.columns.append(Column(name=name, lower=lower, upper=upper, integer=integer, cost=cost))
        return len(self.columns) - 1

    def add_row(self, name: str, terms: Terms, *, lower: float = -math.inf, upper: float = math.inf) -> None:
        """Add a row; zero coefficients are left out."""
        kept = {column: float(value) for column, value in terms.items() if value}
        self.rows.append(Row(name=name, terms=kept, lower=lower, upper=upper))

    def objective(self, values: Sequence[float]) -> float:
        """Objective at a point, one value per column."""
        return math.fsum([self.constant, *(c.cost * v for c, v in zip(self.columns, values, strict=True))])

    def to_lp(self) -> str:
        """The model in the CPLEX LP text format, for people and for golden files.

        Columns appear by their names, with characters that the format forbids replaced, in the order of the model.
        """
        names = _lp_names([column.name for column in self.columns])
        lines = [f"\\ {self.name}", "Minimize"]
        costs = {i: column.cost for i, column in enumerate(self.columns) if column.cost}
        lines += _wrap(" objective:", _terms(costs, names) + ([f"+ {_number(self.constant)}"] if self.constant else []))
        lines.append("Subject To")
        for label, row in zip(_lp_names([row.name for row in self.rows]), self.rows, strict=True):
            terms = _terms(row.terms, names) or ["0"]
            if row.lower == row.upper:
                lines += _wrap(f" {label}:", [*terms, f"= {_number(row.upper)}"])
                continue
            if row.upper < math.inf:
                lines += _wrap(f" {label}{'_upper' * (row.lower > -math.inf)}:", [*terms, f"<= {_number(row.upper)}"])
            if row.lower > -math.inf:
                lines += _wrap(f" {label}{'_lower' * (row.upper < math.inf)}:", [*terms, f">= {_number(row.lower)}"])
        lines.append("Bounds")
        for name, column in zip(names, self.columns, strict=True):
            lower = "-inf" if column.lower == -math.inf else _number(column.lower)
            upper = "+inf" if column.upper == math.inf else _number(column.upper)
            lines.append(f" {lower} <= {name} <= {upper}")
        integers = [name for name, column in zip(names, self.columns, strict=True) if column.integer]
        if integers:
            lines += ["Generals", *_wrap("", integers)]
        return "\n".join([*lines, "End", ""])


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _terms(terms: Terms, names: Sequence[str]) -> list[str]:
    return [f"{'-' if value < 0 else '+'} {_number(abs(value))} {names[column]}" for column, value in terms.items()]


def _lp_names(names: Sequence[str]) -> list[str]:
    """Names of letters, digits and a few signs only, with a number where two would coincide."""
    result: list[str] = []
    seen: set[str] = set()
    for name in names:
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "_.[],#|") else "_" for c in name)
        plain = plain.replace("[", "(").replace("]", ")")
        unique, k = plain, 1
        while unique in seen:
            k += 1
            unique = f"{plain}~{k}"
        seen.add(unique)
        result.append(unique)
    return result


def _wrap(head: str, words: Sequence[str], width: int = 100) -> list[str]:
    lines, line = [], head
    for word in words:
        if len(line) + len(word) + 1 > width and line.strip():
            lines.append(line)
            line = "   "
        line += f" {word}"
    return [*lines, line]
