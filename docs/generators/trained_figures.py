"""Figures of training under plans on a CPU, from ``benchmarks/results/training-quality.json``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from results_pages import Record, table

FULL, LOWEST, RANDOM = "full precision", "uniform lowest", "random"
_WORDS = {"held_out_loss": "held-out loss", "accuracy": "accuracy", "fit": "training loss of the final weights"}
_KEYS = {"minus_full_precision": "", "minus_random": ".minus-random"}


def trained_figures(data: Record) -> dict[str, str]:
    """The noise that plans add, and what their runs lose, per subject."""
    records = {record["subject"]: record for record in data["records"]}
    found = {
        "trained.hardware": data["hardware"],
        "trained.date": data["date"],
        "trained.table.noise": _noise_table(records),
        "trained.table.runs": _runs_table(records),
        "trained.table.harm": _harm_table(records),
        "trained.asked": str(len(data["asked"])),
        "trained.met": str(sum(row["met"] for row in data["asked"])),
        "trained.subjects": "; ".join(
            f"*{name}*: {r['what']}, {r['steps']} steps" for name, r in records.items() if r["factor"] == 1.0
        ),
    }
    known = [d for d in _held_out_differences(records) if d["half_width"] is not None]
    found["trained.differences"] = str(len(known))
    found["trained.differences-outside"] = str(sum(abs(d["mean"]) > d["half_width"] for d in known))
    for row in data["asked"]:
        subject, _, what = row["what"].partition(": ")
        if " minus that of " in what:
            other = what.partition(" minus that of ")[2].replace(" ", "-")
            spread = row["note"].partition(" over")[0].replace("+-", "±")
            found[f"trained.{subject}.ours-minus-{other}"] = f"{row['measured']:+.3f} {spread}"
    for name, record in records.items():
        change = record["change_of_held_out_loss_in_last_fifth"]
        found[f"trained.{name}.change"] = f"{100 * change:+.1f} %"
        for policy, entries in record["plans"].items():
            frozen = [entry["frozen_over_batch_noise"] for entry in entries if "frozen_over_batch_noise" in entry]
            if frozen:
                mean = _percent(statistics.fmean(frozen))
                found[f"trained.{name}.{policy.replace(' ', '-')}.frozen"] = mean
        for policy, row in record["summary"].items():
            plan = f"trained.{name}.{policy.replace(' ', '-')}"
            found[f"{plan}.noise"] = _percent(row["gradient_variance_over_batch_noise"])
            for key, end in _KEYS.items():
                for measure, difference in row.get(key, {}).items():
                    text = _cell(difference)
                    if text is not None:
                        found[f"{plan}.{measure.replace('_', '-')}{end}"] = text
                        found[f"{plan}.seeds"] = str(difference["seeds"])
        for key, end in (("harm_of_noise", ""), ("harm_of_noise_at_one_cost", "-at-one-cost")):
            for measure in record[key]:
                text = _harm(record, key, measure)
                if text is not None:
                    found[f"trained.{name}.harm{end}.{measure.replace('_', '-')}"] = text
        found |= {f"trained.{name}.cheapest.{key}": text for key, text in _cheapest(record).items()}
    return found


def _held_out_differences(records: Mapping[str, Record]) -> list[Record]:
    """All differences of the held-out loss with errors as they are."""
    return [
        row[key]["held_out_loss"]
        for record in records.values()
        if record["factor"] == 1.0
        for row in record["summary"].values()
        for key in _KEYS
        if key in row
    ]


def _cheapest(record: Record) -> dict[str, str]:
    """The operators that together take the first tenth of the way in time, and how much of the noise goes with them."""
    rows = [row for row in record["cheapest_first"] if row["time"] <= 0.1]
    return {
        "count": f"{len(rows)} of {len(record['cheapest_first'])}",
        "time": f"{100 * rows[-1]['time']:.2g} %",
        "removed": f"{100 * (1 - rows[-1]['over_batch_noise'] / _lowest_noise(record)):.0f} %",
    }


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:,.0f} %"


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
            against = [_cell(random.get(measure)) for measure in ("held_out_loss", "fit")]
            rows.append([name, policy, str(seeds), *cells, *against])
    header = ["", "plan", "seeds", *(f"{words} minus full precision's" for words in _WORDS.values())]
    return table([*header, "held-out loss minus that of random plans", "training loss minus theirs"], rows)


def _harm_table(records: Mapping[str, Record]) -> str:
    """Per subject, what the noise of uniform lowest costs by lines through all plans, and through those of one cost."""
    header = ["", "noise of uniform lowest"]
    rows = [[name, _percent(_lowest_noise(record))] for name, record in records.items()]
    for plans, key in (("all plans", "harm_of_noise"), ("plans of one cost", "harm_of_noise_at_one_cost")):
        for measure, words in (("held_out_loss", "held-out loss"), ("fit", "training loss")):
            header.append(f"{words}, {plans}")
            for row, record in zip(rows, records.values(), strict=True):
                row.append(_harm(record, key, measure) or "–")
    return table(header, rows)


def _lowest_noise(record: Record) -> float:
    return float(record["summary"][LOWEST]["gradient_variance_over_batch_noise"])


def _harm(record: Record, key: str, measure: str) -> str | None:
    """Slope in the noise times the noise of uniform lowest; None: too few seeds."""
    row = record[key].get(measure)
    if row is None or row["half_width"] is None:
        return None
    noise = _lowest_noise(record)
    return _cell({"mean": noise * row["slope"], "half_width": noise * row["half_width"]})


def _cell(difference: Record | None) -> str | None:
    if difference is None or difference["half_width"] is None:
        return None
    return f"{difference['mean']:+.4f} ± {difference['half_width']:.4f}"
