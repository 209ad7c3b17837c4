"""Sensitivities as bare numbers, with what is excluded: what a problem is built from and what ranks exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from qsync_opt.io.codec import Fields, check_name, check_number

SENSITIVITY_FORMAT = "qsync-sensitivities/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityValues(Mapping[str, Mapping[str, float]]):
    """Operator to precision to sensitivity of one worker.

    ``unit`` says what they are measured in. ``excluded`` names, per operator, the precisions that it must not get, each
    with the reason in words.
    """

    unit: str
    values_of: Mapping[str, Mapping[str, float]]
    excluded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.unit, "sensitivities: unit")
        for operator, row in self.values_of.items():
            for precision, value in row.items():
                check_number(value, f"sensitivity of {operator!r} in {precision}")
        for name in ("values_of", "excluded"):
            nested = {key: MappingProxyType(dict(row)) for key, row in getattr(self, name).items()}
            object.__setattr__(self, name, MappingProxyType(nested))

    def __getitem__(self, operator: str) -> Mapping[str, float]:
        return self.values_of[operator]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of)

    def __len__(self) -> int:
        return len(self.values_of)

    def to_json(self) -> dict[str, Any]:
        """The values as plain JSON data."""
        return {
            "format": SENSITIVITY_FORMAT,
            "unit": self.unit,
            "values": {operator: dict(row) for operator, row in self.values_of.items()},
            "excluded": {operator: dict(row) for operator, row in self.excluded.items()},
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "sensitivities") -> Self:
        """Read values from their JSON data.

        Raises:
            ProblemError: Another format; an unknown, missing or unusable entry.
        """
        reader = Fields(data, where)
        reader.version(SENSITIVITY_FORMAT)
        values = {
            operator: {precision: row.number(precision) for precision in row}
            for operator, row in reader.children("values")
        }
        excluded = {
            operator: {precision: row.text(precision) for precision in row}
            for operator, row in reader.children("excluded")
        }
        found = cls(unit=reader.text("unit"), values_of=values, excluded=excluded)
        reader.finish()
        return found
