"""Figures of training under plans on a CPU, from ``benchmarks/results/training-quality.json``."""

from __future__ import annotations

from collections.abc import Mapping

from results_pages import Record, table

FULL, LOWEST, RANDOM = "full precision", "uniform lowest", "random"
_WORDS = {"held_out_loss": "held-out loss", "accuracy": "accuracy", "last_training_loss": "training loss"}


def trained_figures(data: Record) -> dict[str, str]:
    """The noise that plans add, and what their runs lose, per subject."""
    records = {record["subject"]: record for record in data["records"]}
    asked = [row for row in data["asked"] if row["measured"] is not None]
    found = {
        "trained.hardware": data["hardware"],
        "trained.date": data["date"],
        "trained.table.noise": _noise_table(records),
        "trained.table.runs": _runs_table(records),
        "trained.asked": str(len(asked)),
        "trained.met": str(sum(row["met"] for row in asked)),
        "trained.subjects": "; ".join(f"*{name}*: {r['what']}, {r['steps']} steps" for name, r in records.items()),
    }
    for row in asked:
        subject, _, what = row["what"].partition(": ")
        if " minus that of " in what:
            other = what.partition(" minus that of ")[2].replace(" ", "-")
            spread = row["note"].partition(" over")[0].replace("+-", "±")
            found[f"trained.{subject}.minus-{other}"] = f"{row['measured']:+.3f} {spread}"
    for name, record in records.items():
        for policy, row in record["summary"].items():
            noise = row["gradient_variance_over_batch_noise"]
            found[f"trained.{name}.{policy.replace(' ', '-')}.noise"] = _percent(noise)
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _noise_table(records: Mapping[str, Record]) -> str:
    """Plans against subjects: gradient variance that each adds, as a share of that between batches."""
    policies = list(dict.fromkeys(policy for record in records.values() for policy in record["summary"]))
    rows = []
    for policy in policies:
        found = [record["summary"].get(policy) for record in records.values()]
        rows.append(
            [policy, *(None if row is None else _percent(row["gradient_variance_over_batch_noise"]) for row in found)]
        )
    return table(["plan", *records], rows)


def _runs_table(records: Mapping[str, Record]) -> str:
    """Every subject and plan that was trained with two seeds or more: differences with their 95 % intervals."""
    rows = []
    for name, record in records.items():
        for policy, row in record["summary"].items():
            worse, random = row.get("minus_full_precision", {}), row.get("minus_random", {})
            if "held_out_loss" not in worse or worse["held_out_loss"]["half_width"] is None:
                continue
            cells = [_cell(worse.get(measure)) for measure in _WORDS]
            seeds = worse["held_out_loss"]["seeds"]
            rows.append([name, policy, str(seeds), *cells, _cell(random.get("held_out_loss"))])
    header = ["", "plan", "seeds", *(f"{words} minus full precision's" for words in _WORDS.values())]
    return table([*header, "held-out loss minus that of random plans"], rows)


def _cell(difference: Record | None) -> str | None:
    if difference is None or difference["half_width"] is None:
        return None
    return f"{difference['mean']:+.4f} ± {difference['half_width']:.4f}"
