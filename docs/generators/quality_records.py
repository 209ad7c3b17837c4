"""Records of ``benchmarks/results/quality.json``, as the page on the indicator's truth takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_pages import Record

PARTS = ("output", "weight_gradient", "input_gradient")
OURS = ("probed", "propagated", "loss", "progress")
MEASURES = {"after_steps": "loss after steps", "at_once": "loss at once", "gradient": "gradient variance"}


def records(data: Record, section: str) -> list[Record]:
    """Of one section; none where it was not measured."""
    return list(data["sections"].get(section, {}).get("records", ()))


def on_card(record: Record) -> bool:
    """Whether it was measured on a card."""
    return "NVIDIA" in str(record["hardware"])


def operator_records(data: Record) -> list[dict[str, Any]]:
    """Records of single operators that were run on a card."""
    return [{**record, "label": record["model"]} for record in records(data, "operators") if on_card(record)]


def harm_records(data: Record) -> list[Record]:
    """What was measured on a card: by the model's own optimizer first, backward in 8 bits before 16, then others.

    Of several that differ in nothing but the learning rate, the more reliable one is first.
    """

    def order(record: Record) -> tuple[Any, ...]:
        certain = record["after_steps"]["reliability"]
        return "SGD" in record["optimizer"], "16" in record["backward"], -certain

    return sorted((record for record in records(data, "harm") if on_card(record)), key=order)


def rate_of(record: Record) -> str:
    """How the learning rate goes."""
    return str(record.get("rate", "constant"))


def shared_errors(record: Record) -> bool:
    """Whether runs with an error and with the reversed one add errors that one run noted, instead of their own."""
    return "full precision" in record.get("errors", "")


def harm_record(data: Record) -> Record:
    """What was measured on a card by the model's own optimizer, in the lowest precision."""
    return harm_records(data)[0]


def plan_records(data: Record) -> list[Record]:
    """Records of whole plans."""
    return records(data, "whole-model")


def train_records(data: Record) -> list[Record]:
    """Records of training that has come to its end."""
    return [record for record in records(data, "train") if record["summary"]]


def percent(value: float | None) -> str:
    """As text."""
    return "–" if value is None else f"{100 * value:.0f} %"


def recovered(policies: Mapping[str, Record], policy: str) -> str:
    """Share of the gap that a plan closes, with its standard error."""
    part, gap = policies[policy], policies["uniform INT8"]["worse_than_full"]
    error = part["worse_than_full_error"]
    return f"{100 * part['recovered']:.0f}" + ("" if error is None else f" ± {100 * error / gap:.0f}") + " %"
