"""Figures in the text of the page on the indicator's truth, from ``benchmarks/results/quality.json``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from quality_records import (
    MEASURES,
    OURS,
    harm_record,
    harm_records,
    on_card,
    operator_records,
    percent,
    plan_records,
    rate_of,
    records,
    recovered,
    shared_errors,
    train_records,
)
from quality_tables import cost_table, operators_table, plans_table, ranks_table, training_table
from results_pages import Record


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _plans_of(data: Record, model: str, *beginnings: str) -> list[Record]:
    """The plans of a model whose names begin so."""
    record = next(record for record in plan_records(data) if record["model"] == model)
    return [row for row in record["plans"] if row["plan"].startswith(beginnings)]


def _ratios(data: Record, model: str, *beginnings: str) -> list[float]:
    """Predicted over measured of the plans of a model whose names begin so."""
    return [row["ratios"]["probed"] for row in _plans_of(data, model, *beginnings)]


def _inside(ratios: list[float]) -> str:
    return f"{sum(0.75 <= ratio <= 1.25 for ratio in ratios)} of {len(ratios)}"


def _baselines(ranks: Mapping[str, float | None]) -> list[float]:
    return [value for kind, value in ranks.items() if value is not None and kind not in OURS]


def _gains(runs: Sequence[Record], setting: str, policy: str, rival: str, measure: str = "score") -> list[float]:
    """By how much less a policy has of a measure than another, seed by seed."""
    ours, theirs = (
        {run["seed"]: run[measure] for run in runs if (run["policy"], run["setting"]) == (which, setting)}
        for which in (policy, rival)
    )
    return [theirs[seed] - ours[seed] for seed in sorted(ours.keys() & theirs.keys())]


def _ahead(runs: Sequence[Record], setting: str, policy: str, rival: str, measure: str = "score") -> str:
    """By how much less a policy has of a measure than another: mean over seeds and standard error."""
    gains = _gains(runs, setting, policy, rival, measure)
    if len(gains) < 2:
        return "–"
    return f"{statistics.fmean(gains):.3f} ± {statistics.stdev(gains) / len(gains) ** 0.5:.3f}"


def _seeds_needed(gains: Sequence[float]) -> str:
    """Seeds after which a true difference of this mean and scatter is told from 0 at 95 %, four times out of five."""
    if len(gains) < 2:
        return "–"
    return f"{math.ceil((2.8 * statistics.stdev(gains) / statistics.fmean(gains)) ** 2):,}"


def _training_figures(data: Record) -> dict[str, str]:
    """Gap between uniform INT8 and full precision, and what each plan recovers, per model."""
    found = {}
    for record in sorted(records(data, "train"), key=lambda record: bool(record["summary"])):  # finished ones last
        summary, steps = record["summary"], record["steps"]
        if not summary and any(other["model"] == record["model"] for other in train_records(data)):
            continue
        if not summary:
            summary, steps = record["unfinished_summary"], max(run["steps"] for run in record["unfinished"])
        model, harsh = record["model"], summary[record["chosen"]]
        low = harsh["uniform INT8"]
        found[f"quality.{model}.seeds"] = str(low["seeds"])
        found[f"quality.{model}.steps"] = str(steps)
        found[f"quality.{model}.asked-steps"] = str(record["steps"])
        found[f"quality.{model}.gap"] = f"{low['worse_than_full']:.3f} ± {low['worse_than_full_error'] or 0:.3f}"
        for name, setting in (("as-is", next(iter(summary))), ("forward", "INT8 forward, per tensor, error x 4")):
            if setting in summary:
                other = summary[setting]["uniform INT8"]
                found[f"quality.{model}.gap-{name}"] = (
                    f"{other['worse_than_full']:.3f} ± {other['worse_than_full_error'] or 0:.3f}"
                )
        for setting, every in summary.items():
            factor = setting.rpartition("error x ")[2] if "error x" in setting else "1"
            if "forward and backward" not in setting:
                continue
            gap = every["uniform INT8"]
            found[f"quality.{model}.x{factor}.gap"] = (
                f"{gap['worse_than_full']:.3f} ± {gap['worse_than_full_error']:.3f}"
            )
            found[f"quality.{model}.x{factor}.seeds"] = str(gap["seeds"])
            for rival in ("probed", "hessian", "fisher", "random"):
                name = f"quality.{model}.x{factor}.progress-{rival}"
                found[name] = _ahead(record["runs"], setting, "progress", rival)
            for policy in every:
                if every[policy]["worse_than_full_error"] is not None:
                    found[f"quality.{model}.x{factor}.{policy.replace(' ', '-')}.worse"] = (
                        f"{every[policy]['worse_than_full']:.3f} ± {every[policy]['worse_than_full_error']:.3f}"
                    )
                if policy not in ("full precision", "uniform INT8"):
                    found[f"quality.{model}.x{factor}.{policy.replace(' ', '-')}"] = recovered(every, policy)
        for name, measure in (("", "score"), (".loss", "last_training_loss")):
            own = _ahead(record["runs"], record["chosen"], "probed", "random", measure)
            found[f"quality.{model}.random-probed{name}"] = own
        found[f"quality.{model}.random-probed.seeds"] = _seeds_needed(
            _gains(record["runs"], record["chosen"], "probed", "random")
        )
        for policy in record["plans"]:
            found[f"quality.{model}.{policy}"] = recovered(harsh, policy)
            found[f"quality.{model}.{policy}.loss"] = percent(harsh[policy]["recovered_in_training_loss"])
    return found


def _plan_noise_figures(data: Record) -> dict[str, str]:
    """What plans of one time add to the gradient's variance, as shares of that between batches."""
    section = data["sections"]["plan-noise"]
    found = {"plan-noise.date": section["date"], "plan-noise.hardware": section["hardware"]}
    for record in section["records"]:
        name, rows = f"plan-noise.{record['model']}", record["plans"]
        measured = {row["plan"].replace(" ", "-"): row["measured"] for row in rows if row["plan"] != "random"}
        found |= {f"{name}.{plan}": f"{100 * share:.1f} %" for plan, share in measured.items()}
        random = [row["measured"] for row in rows if row["plan"] == "random"]
        ratios = [row["predicted"] / row["measured"] for row in rows if not row["plan"].startswith("uniform")]
        better = sum(share < measured["probed"] for share in random)
        found |= {
            f"{name}.what": record["what"].partition(",")[0],
            f"{name}.rank": f"{record['rank']:.2f}",
            f"{name}.ratio": _span(ratios),
            f"{name}.random": f"{100 * min(random):.1f} to {100 * max(random):.1f} %",
            f"{name}.random-count": str(len(random)),
            f"{name}.random-better": str(better) if better else "none",
            f"{name}.gain": f"{100 * (statistics.fmean(random) - measured['probed']):.1f} %",
        }
    return found


def quality_figures(data: Record) -> dict[str, str]:
    """Figures and tables by the names under which pages ask for them."""
    harm, sections = harm_record(data), data["sections"]
    own = [record for record in harm_records(data) if "SGD" not in record["optimizer"]]
    other = next((record for record in own if "16" in record["backward"]), harm)
    predicted = [
        harm["indicators"]["probed"][name] / harm["factor"] ** 2 / value
        for name, value in harm["gradient"]["mean"].items()
    ]
    found = {
        "quality.hardware": sections["operators"]["records"][0]["hardware"],
        "quality.date": sections["operators"]["date"],
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
    for kind, rank in other["after_steps"]["spearman"].items():
        found[f"quality.half.{kind}"] = "–" if rank is None else f"{rank:.2f}"
    found["quality.half.ceiling"] = f"{other['after_steps']['ceiling']:.2f}"
    found["quality.half.repeats"], found["quality.half.factor"] = (
        str(other["after_steps"]["repeats"]),
        f"{other['factor']:g}",
    )
    for model in dict.fromkeys(record["model"] for record in plan_records(data)):
        ratios = _ratios(data, model, "mixed")
        found[f"quality.{model}.mixed"], found[f"quality.{model}.inside"] = _span(ratios), _inside(ratios)
        plain, widened = _ratios(data, model, "uniform BF16")
        sums = [row["ratios"].get("probed, sum", row["ratios"]["probed"]) for row in _plans_of(data, model, "mixed")]
        found[f"quality.{model}.sums"], found[f"quality.{model}.sums-inside"] = _span(sums), _inside(sums)
        found[f"quality.{model}.bf16"], found[f"quality.{model}.bf16-wide"] = f"{plain:.2f}", f"{widened:.2f}"
    for record in plan_records(data):
        found |= _rectified_figures(record)
    for measure in MEASURES:
        part = harm[measure]
        for kind, rank in part["spearman"].items():
            found[f"quality.{measure}.{kind}"] = "–" if rank is None else f"{rank:.2f}"
        found[f"quality.{measure}.best-baseline"] = f"{max(_baselines(part['spearman'])):.2f}"
        found[f"quality.{measure}.ceiling"] = f"{part['ceiling']:.2f}"
        found[f"quality.{measure}.reliability"] = f"{part['reliability']:.2f}"
    found |= _noise_of_harm(harm) | _shared_figures(data)
    for record in own:
        if "16" not in record["backward"]:
            part, name = record["after_steps"], f"quality.{rate_of(record)}"
            found[f"{name}.repeats"], found[f"{name}.ceiling"] = str(part["repeats"]), f"{part['ceiling']:.2f}"
            found[f"{name}.best-baseline"] = f"{max(_baselines(part['spearman'])):.2f}"
            found[f"{name}.reliability"] = f"{part['reliability']:.2f}"
            found[f"{name}.clear"] = str(part["clear"]["operators"])
            found[f"{name}.clear.best-baseline"] = f"{max(_baselines(part['clear']['spearman'])):.2f}"
            last = part["by_step"][str(record["evaluated"][-1])]
            found[f"{name}.last.reliability"] = f"{last['reliability']:.2f}"
            for kind, rank in part["spearman"].items():
                error = part.get("spearman_error", {}).get(kind)
                found[f"{name}.{kind}"] = "–" if rank is None else f"{rank:.2f}" + (f" ± {error:.2f}" if error else "")
                for which, ranks in (("clear", part["clear"]["spearman"]), ("last", last["spearman"])):
                    found[f"{name}.{which}.{kind}"] = "–" if ranks.get(kind) is None else f"{ranks[kind]:.2f}"
    for record in records(data, "cost"):
        name = f"quality.cost.{record['model']}"
        plain, probed = record["scoring"][0], record["scoring"][-1]
        found[name] = f"{plain['steps_per_precision']:.1f}"
        found[f"{name}.probed"] = f"{probed['steps_per_precision']:.1f}"
        if "on_card" in plain:
            found[f"{name}.launches"] = f"{plain['on_card']['launches']:,}"
            found[f"{name}.busy"] = f"{1e3 * plain['on_card']['busy_s']:.0f} ms"
    clear = harm["after_steps"]["clear"]["spearman"]
    for kind in OURS:
        found[f"quality.clear.{kind}"] = "–" if clear.get(kind) is None else f"{clear[kind]:.2f}"
    found["quality.clear.best-baseline"] = f"{max(_baselines(clear)):.2f}"
    parts = (_operator_figures, _training_figures, _noise_figures, _plan_noise_figures)
    return found | {name: text for part in parts for name, text in part(data).items()}


def _operator_figures(data: Record) -> dict[str, str]:
    """Shares of operators within the bounds: per case and result, and from least to most where training rounds so."""
    found: dict[str, str] = {}
    spans: dict[str, list[float]] = {}
    for record in operator_records(data):
        case, few = record["case"], record["operators"] < 10
        for part, share in record["within"].items():
            key = f"quality.within.{record['model']}"
            slug = case.lower().replace(",", "").replace("/", "-").replace(" ", "-")
            found[f"{key}.{slug}.{part.replace('_', '-')}"] = percent(share)
            if not few and case != "FP16" and "nearest" not in case and "random" not in case:
                spans.setdefault(f"{key}.training", []).append(share)
    return found | {key: f"{100 * min(values):.0f} to {100 * max(values):.0f} %" for key, values in spans.items()}


def _rectified_figures(record: Record) -> dict[str, str]:
    """Rank of its operators; where a model has rectifiers, the loss and the parts of uniform INT8's increase."""
    model, ranks = record["model"], record["ranks"].get("INT8", {})
    found = {} if ranks.get("probed") is None else {f"quality.{model}.rank": f"{ranks['probed']:.2f}"}
    uniform = next(row for row in record["plans"] if row["plan"] == "uniform INT8")
    parts = uniform.get("parts")
    if not parts or not parts["measured"]:
        return found
    measured, predicted, whole = parts["measured"], parts["predicted"], uniform["measured"]
    found[f"quality.{model}.loss"] = f"{record['loss']:.2f}"
    found[f"quality.{model}.uniform"] = f"{uniform['ratios']['probed']:.2f}"
    found[f"quality.{model}.uniform-error"] = percent(uniform["standard_error"] / whole)
    for name, value in (
        ("smooth", predicted["smooth"]),
        ("flips", predicted["flips"]),
        ("shift", predicted["shift"]),
        ("frozen", measured["frozen"]),
        ("moved", measured["shift"]),
    ):
        found[f"quality.{model}.{name}"] = f"{value / whole:.2f}"
    return found


def _noise_of_harm(harm: Record) -> dict[str, str]:
    """What other repeats would give: scatter of ranks, how often one is ahead, and the last evaluation by itself."""
    part, found = harm["after_steps"], {}
    for kind, error in part.get("spearman_error", {}).items():
        found[f"quality.after_steps.{kind}-error"] = f"{error:.2f}"
    for kind in OURS:
        shares = part.get("ahead", {}).get(kind, {})
        found[f"quality.ahead.{kind}"] = percent(min((v for k, v in shares.items() if k not in OURS), default=None))
        for other in OURS:
            if other in shares:
                found[f"quality.ahead.{kind}.{other}"] = percent(shares[other])
    return found


def _shared_figures(data: Record) -> dict[str, str]:
    """Of runs that share errors, on a card and on a CPU."""
    found: dict[str, str] = {}
    for record in records(data, "harm"):
        if not shared_errors(record):
            continue
        part, name = record["after_steps"], f"quality.shared.{'card' if on_card(record) else 'cpu'}"
        found |= {f"{name}.{key}": f"{part[key]:.2f}" for key in ("reliability", "ceiling")}
        found |= {f"{name}.repeats": str(part["repeats"]), f"{name}.steps": str(record["steps"])}
        found |= {f"{name}.model": record["what"], f"{name}.operators": str(len(part["mean"]))}
        found[f"{name}.best-baseline"] = f"{max(_baselines(part['spearman'])):.2f}"
        for kind, rank in part["spearman"].items():
            error = part["spearman_error"].get(kind)
            found[f"{name}.{kind}"] = "–" if rank is None else f"{rank:.2f}" + (f" ± {error:.2f}" if error else "")
            shares = part["ahead"].get(kind, {})
            found[f"{name}.ahead.{kind}"] = percent(min((v for k, v in shares.items() if k not in OURS), default=None))
    return found


def _noise_figures(data: Record) -> dict[str, str]:
    """Noise beside the gradient: of the whole, and of the median element of attention's projections."""
    found = {}
    for record in records(data, "noise"):
        key = f"quality.noise.{record['backward']}"
        medians = [part["median"] for name, part in record["parameters"].items() if name.endswith("qkv.weight")]
        found[f"{key}.whole"] = f"{100 * record['whole']:.1f} %"
        found[f"{key}.qkv"] = _span(medians)
    return found
