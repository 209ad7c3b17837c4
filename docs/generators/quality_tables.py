"""Tables and figures of the page on the indicator's truth, from ``benchmarks/results/quality.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_pages import Record, table

PARTS = ("output", "weight_gradient", "input_gradient")
MEASURES = {"after_steps": "loss after steps", "at_once": "loss at once", "gradient": "gradient variance"}


def _records(data: Record, section: str) -> list[Record]:
    return list(data["sections"].get(section, {}).get("records", ()))


def _on_card(record: Record) -> bool:
    return "NVIDIA" in str(record["hardware"])


def operator_records(data: Record) -> list[dict[str, Any]]:
    """Records of single operators with a label that says where they were run."""
    return [
        {**record, "label": f"{record['model']} on {'a card' if _on_card(record) else 'a CPU'}"}
        for record in _records(data, "operators")
        if _on_card(record) or record["model"] == "resnet50"
    ]


def harm_record(data: Record) -> Record:
    """What was measured on a card."""
    return next(record for record in _records(data, "harm") if _on_card(record))


def plan_records(data: Record) -> list[Record]:
    """Records of whole plans."""
    return _records(data, "whole-model")


def train_records(data: Record) -> list[Record]:
    """Records of training."""
    return _records(data, "train")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def operators_table(data: Record) -> str:
    """Shares of operators within the bounds, and medians."""
    header = ("model", "case", "operators", *(f"{part.replace('_', ' ')}: within, median" for part in PARTS))
    rows = [
        (
            record["label"],
            record["case"],
            record["operators"],
            *(
                f"{_percent(record['within'].get(part))}, {record['median'][part]:.2f}"
                if part in record["within"]
                else "–"
                for part in PARTS
            ),
        )
        for record in operator_records(data)
    ]
    return table(header, rows)


def ranks_table(data: Record) -> str:
    """Rank correlations of every indicator, all operators and those with clear harm."""
    record = harm_record(data)
    clear = record["after_steps"]["clear"]
    header = ("indicator", *MEASURES.values(), f"loss after steps, {clear['operators']} operators with clear harm")

    def show(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    rows = [
        (kind, *(show(record[m]["spearman"][kind]) for m in MEASURES), show(clear["spearman"][kind]))
        for kind in record["indicators"]
    ]
    rows.append(("best possible at this reliability", *(show(record[m]["ceiling"]) for m in MEASURES), "–"))
    return table(header, rows)


def plans_table(data: Record) -> str:
    """Predicted over measured for every plan."""
    header = (
        "model", "plan", "standard error of the measured", "probed", "propagated", "probed on other batches",
        "one at a time, summed, over together",
    )  # fmt: skip
    rows = [
        (
            record["model"],
            row["plan"],
            _percent(row["standard_error"] / row["measured"]),
            *(f"{row['ratios'][kind]:.2f}" for kind in ("probed", "propagated", "probed, other batches")),
            "–" if row["measured_alone_over_together"] is None else f"{row['measured_alone_over_together']:.2f}",
        )
        for record in plan_records(data)
        for row in record["plans"]
    ]
    return table(header, rows)


def training_table(data: Record) -> str:
    """Scores and deficits."""
    header = ("model", "setting", "policy", "seeds", "score", "worse than full precision", "gap recovered")
    rows = [
        (
            record["model"],
            setting,
            policy,
            found["seeds"],
            f"{found['mean']:.4g}" + (f" ± {found['spread']:.2g}" if found["spread"] else ""),
            "–"
            if policy == "full precision"
            else f"{found['worse_than_full']:.4f} ± {found['worse_than_full_error'] or 0:.4f}",
            _percent(found["recovered"]) if policy not in ("full precision", "uniform INT8") else "–",
        )
        for record in train_records(data)
        for setting, policies in record["summary"].items()
        for policy, found in policies.items()
    ]
    return table(header, rows)


def cost_table(data: Record) -> str:
    """What scoring costs."""
    header = ("model", "parameters", "probes", "seconds", "training steps per precision", "memory above a step")
    rows = [
        (
            record["model"],
            f"{record['parameters'] / 1e6:.0f} M",
            score["probes"],
            f"{score['seconds']:.2f}",
            f"{score['steps_per_precision']:.1f}",
            _percent(score["extra_memory"]),
        )
        for record in _records(data, "cost")
        for score in record["scoring"]
    ]
    return table(header, rows)


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def quality_figures(data: Record) -> dict[str, str]:
    """Figures and tables by the names under which pages ask for them."""
    harm, sections = harm_record(data), data["sections"]
    bert = next(record for record in plan_records(data) if record["model"] == "bert")
    mixed = [row["ratios"]["probed"] for row in bert["plans"] if row["plan"].startswith("mixed")]
    predicted = [
        harm["indicators"]["probed"][name] / harm["factor"] ** 2 / value
        for name, value in harm["gradient"]["mean"].items()
    ]
    found = {
        "quality.hardware": sections["operators"]["records"][0]["hardware"],
        "quality.date": sections["operators"]["date"],
        "quality.bert.mixed": _span(mixed),
        "quality.single": _span(predicted),
        "quality.repeats": str(harm["after_steps"]["repeats"]),
        "quality.factor": f"{harm['factor']:g}",
        "quality.steps": str(harm["steps"]),
        "quality.clear": str(harm["after_steps"]["clear"]["operators"]),
        "quality.operators": str(len(harm["gradient"]["mean"])),
        "quality.model": harm["what"],
        "quality.table.operators": operators_table(data),
        "quality.table.ranks": ranks_table(data),
        "quality.table.plans": plans_table(data),
        "quality.table.training": training_table(data),
        "quality.table.cost": cost_table(data),
    }
    for measure in MEASURES:
        part = harm[measure]
        others = [
            value
            for kind, value in part["spearman"].items()
            if value is not None and kind not in ("probed", "propagated")
        ]
        found[f"quality.{measure}.probed"] = f"{part['spearman']['probed']:.2f}"
        found[f"quality.{measure}.best-baseline"] = f"{max(others):.2f}"
        found[f"quality.{measure}.ceiling"] = f"{part['ceiling']:.2f}"
        found[f"quality.{measure}.reliability"] = f"{part['reliability']:.2f}"
    clear = harm["after_steps"]["clear"]["spearman"]
    found["quality.clear.probed"] = f"{clear['probed']:.2f}"
    found["quality.clear.best-baseline"] = (
        f"{max(v for k, v in clear.items() if k not in ('probed', 'propagated')):.2f}"
    )
    return found


def overview(data: Mapping[str, Any]) -> str:
    """What the page of measured results shows."""
    return "Read [Does the indicator tell the truth?](background/quality.md) for what these mean.\n\n" + "\n".join(
        (operators_table(data), ranks_table(data), plans_table(data), training_table(data), cost_table(data))
    )
