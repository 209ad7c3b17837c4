"""Figures of training under plans on a CPU, from ``benchmarks/results/training-quality.json``."""

from __future__ import annotations

from results_pages import Record, table

FULL = "full precision"


def trained_figures(data: Record) -> dict[str, str]:
    """A table per subject, and what was asked."""
    found = {"trained.hardware": data["hardware"], "trained.date": data["date"]}
    for record in data["records"]:
        name = f"trained.{record['subject']}"
        found[f"{name}.table"] = _table(record)
        found[f"{name}.what"] = record["what"]
        found[f"{name}.steps"] = str(record["steps"])
        found[f"{name}.seeds"] = _seeds(record)
        found[f"{name}.change"] = f"{100 * record['change_of_held_out_loss_in_last_fifth']:+.1f} %"
        for policy, row in record["summary"].items():
            key = f"{name}.{policy.replace(' ', '-')}"
            found[f"{key}.noise"] = f"{row['gradient_variance_over_batch_noise']:.2g}"
            for other, label in (("minus_full_precision", "worse"), ("minus_random", "random")):
                for measure, difference in row.get(other, {}).items():
                    found[f"{key}.{label}.{measure.replace('_', '-')}"] = _interval(difference)
    asked = [row for row in data["asked"] if row["measured"] is not None]
    found["trained.asked"] = str(len(asked))
    found["trained.met"] = str(sum(row["met"] for row in asked))
    return found


def _interval(difference: Record) -> str:
    half = difference["half_width"]
    return f"{difference['mean']:+.4f}" + ("" if half is None else f" ± {half:.4f}")


def _seeds(record: Record) -> str:
    counts = [
        difference["seeds"]
        for row in record["summary"].values()
        for difference in row.get("minus_full_precision", {}).values()
    ]
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _table(record: Record) -> str:
    measures = [m for m in ("held_out_loss", "accuracy", "last_training_loss") if m in _first(record)]
    words = {"held_out_loss": "held-out loss", "accuracy": "accuracy", "last_training_loss": "training loss"}
    header = ["plan", "added gradient variance over that of batches"]
    header += [f"{words[m]} minus full precision's" for m in measures] + ["held-out loss minus that of random plans"]
    rows = []
    for policy, row in record["summary"].items():
        cells: list[object] = [policy, f"{row['gradient_variance_over_batch_noise']:.2g}"]
        cells += [_cell(row.get("minus_full_precision", {}).get(m)) for m in measures]
        rows.append([*cells, _cell(row.get("minus_random", {}).get("held_out_loss"))])
    return table(header, rows)


def _first(record: Record) -> Record:
    return next(row["minus_full_precision"] for row in record["summary"].values() if "minus_full_precision" in row)


def _cell(difference: Record | None) -> str | None:
    return None if difference is None else _interval(difference)
