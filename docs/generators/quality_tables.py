"""Tables of the page on the indicator's truth, from ``benchmarks/results/quality.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quality_records import (
    MEASURES,
    PARTS,
    harm_records,
    operator_records,
    percent,
    plan_records,
    rate_of,
    records,
    recovered,
    shared_errors,
)
from results_pages import Record, table


def operators_table(data: Record) -> str:
    """Shares of operators within the bounds, and medians."""
    header = ("model", "case", "operators", *(f"{part.replace('_', ' ')}: within, median" for part in PARTS))
    rows = [
        (
            record["label"],
            record["case"],
            record["operators"],
            *(
                f"{percent(record['within'].get(part))}, {record['median'][part]:.2f}"
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
    record, *others = harm_records(data)
    columns = [(name, record[measure]) for measure, name in MEASURES.items()]
    for other in others:
        by = "" if other["optimizer"] == record["optimizer"] else f" by {other['optimizer']}"
        rate = "" if rate_of(other) == rate_of(record) else f", {rate_of(other)} rate"
        backward = "" if other["backward"] == record["backward"] else f", {other['backward']}"
        errors = "" if shared_errors(other) == shared_errors(record) else ", errors of each run"
        columns.append((f"loss after steps{by}{rate}{errors}{backward}", other["after_steps"]))
    clear = record["after_steps"]["clear"]
    columns.append((f"loss after steps, {clear['operators']} operators with clear harm", clear))

    def show(value: float | None, error: float | None = None) -> str:
        return "–" if value is None else f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")

    rows = [
        (kind, *(show(part["spearman"].get(kind), part.get("spearman_error", {}).get(kind)) for _, part in columns))
        for kind in record["indicators"]
    ]
    rows.append(("best possible at this reliability", *(show(part.get("ceiling")) for _, part in columns)))
    return table(("indicator", *(name for name, _ in columns)), rows)


def plans_table(data: Record) -> str:
    """Predicted over measured for every plan."""
    header = (
        "model", "plan", "standard error of the measured", "probed", "its plain sum", "propagated",
        "probed on other batches",
        "one at a time, summed, over together",
    )  # fmt: skip
    rows = [
        (
            record["model"],
            row["plan"],
            percent(None if row["standard_error"] is None else row["standard_error"] / row["measured"]),
            f"{row['ratios']['probed']:.2f}",
            f"{row['ratios'].get('probed, sum', row['ratios']['probed']):.2f}",
            *(f"{row['ratios'][kind]:.2f}" for kind in ("propagated", "probed, other batches")),
            "–" if row["measured_alone_over_together"] is None else f"{row['measured_alone_over_together']:.2f}",
        )
        for record in plan_records(data)
        for row in record["plans"]
    ]
    return table(header, rows)


def training_table(data: Record) -> str:
    """Scores and deficits."""
    header = (
        "model",
        "setting",
        "policy",
        "seeds",
        "score",
        "worse than full precision",
        "gap recovered",
        "in training loss",
    )
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
            *(
                (recovered(every, policy), percent(found["recovered_in_training_loss"]))
                if policy not in ("full precision", "uniform INT8")
                else ("–", "–")
            ),
        )
        for record in records(data, "train")
        for policy, found, setting, every in _trained(record)
    ]
    return table(header, rows)


def _trained(record: Record) -> list[tuple[str, Record, str, Mapping[str, Record]]]:
    """Policy, what came of it, the setting, and all its policies; runs that were stopped say after how many steps."""
    length = f"{record['steps']} steps"
    found = [
        (policy, part, f"{setting}; {length}", every)
        for setting, every in record["summary"].items()
        for policy, part in every.items()
    ]
    for setting, every in record["unfinished_summary"].items():
        steps = max(run["steps"] for run in record["unfinished"])
        stopped = f"{setting}; stopped after {steps} of {length}"
        found += [(policy, part, stopped, every) for policy, part in every.items()]
    return found


def cost_table(data: Record) -> str:
    """What scoring costs."""
    header = (
        "model", "parameters", "one training step", "probes", "scoring", "training steps, all precisions",
        "per precision scored", "memory above a step",
    )  # fmt: skip
    rows = [
        (
            record["model"],
            f"{record['parameters'] / 1e6:.0f} M",
            f"{1e3 * record['step_s']:.0f} ms",
            score["probes"],
            f"{score['seconds']:.2f} s",
            f"{score['steps']:.1f}",
            f"{score['steps_per_precision']:.1f} ({record['scored_precisions']})",
            percent(score["extra_memory"]),
        )
        for record in records(data, "cost")
        for score in record["scoring"]
    ]
    return table(header, rows)


def overview(data: Mapping[str, Any]) -> str:
    """What the page of measured results shows."""
    return "Read [How good the indicator is](background/quality.md) for what these mean.\n\n" + "\n".join(
        (operators_table(data), ranks_table(data), plans_table(data), training_table(data), cost_table(data))
    )
