"""Figures on predicted steps of compiled models."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from results_pages import Record, environment, percent

_MODELS = {"gpt": "GPT", "bert": "BERT", "vit": "ViT"}


def compiled_figures(data: Record, held_out: Record) -> dict[str, str]:
    """Of the record of compiled steps, and of recorded plans predicted from the others of their recording."""
    summary = data["summary"]

    def both_of(found: Sequence[float]) -> str:
        if not found:
            return "not measured"
        sizes = [abs(error) for error in found]
        return f"{100 * statistics.fmean(sizes):.1f} % on average and {100 * max(sizes):.1f} % at worst"

    def between(found: Sequence[float]) -> str:
        return f"{percent(min(found))} to {percent(max(found))}" if found else "not measured"

    alone = [case for case in data["cases"] if len(case["workers"]) == 1]
    figures = {}
    for what, cases in (
        ("one", [case for case in alone if case["cluster"] != "whole"]),
        ("whole", [case for case in alone if case["cluster"] == "whole"]),
        ("two", [case for case in data["cases"] if len(case["workers"]) == 2]),
    ):
        figures |= {
            f"compiled.{what}": both_of([case["time_error"] for case in cases]),
            f"compiled.{what}-cases": str(len(cases)),
            f"compiled.memory-{what}": between([w["memory_error"] for case in cases for w in case["workers"]]),
        }
    whole = [profile for profile in data["profiles"] if profile["what"].endswith("on whole")]
    parts = [profile for profile in data["profiles"] if profile not in whole]
    for what, count in (("one", 1), ("two", 2)):
        profiles = [profile for profile in data["profiles"] if profile["workers"] == count]
        errors = [plan["memory_error"] for profile in profiles for plan in profile["plans"]]
        figures[f"compiled.memory-recorded-{what}"] = between(errors)
    for what, profiles in (("", parts), ("-whole", whole)):
        errors = [plan["time_error"] for profile in profiles for plan in profile["plans"]]
        figures[f"compiled.recorded{what}"] = both_of(errors)
    rows = []
    for model, cluster in dict.fromkeys((case["model"], case["cluster"]) for case in data["cases"]):
        cases = [case for case in data["cases"] if (case["model"], case["cluster"]) == (model, cluster)]
        peaks = between([w["memory_error"] for case in cases for w in case["workers"]])
        name, _, batch = model.partition("-short-b")
        times = both_of([case["time_error"] for case in cases])
        rows.append(f"| {_MODELS[name]}, batch {batch}; {cluster} | {len(cases)} | {times} | {peaks} |")
    slowdowns = [shares[-1] for shares in data["slowdowns"].values() if len(shares) > 1]
    new = [case["time_error"] for case in data["cases"] if not case["plan_recorded_alone"]]
    return figures | {
        "compiled.hardware": environment(data)["hardware"],
        "compiled.date": environment(data)["date"],
        "compiled.cases": str(len(data["cases"])),
        "compiled.all": both_of([case["time_error"] for case in data["cases"]]),
        "compiled.new-cases": str(len(new)),
        "compiled.new": both_of(new),
        "compiled.rank": f"{summary['spearman_compiled']:.3f}",
        "compiled.rows": "\n".join(rows),
        "compiled.slowdown-part": " and ".join(f"{share:.2f}" for share in slowdowns),
        **_held_out(held_out["cases"]),
        "compiled.seconds": f"{summary['compiled']['profile_seconds_most']:.0f} s",
    }


def memory_figures(data: Record) -> dict[str, str]:
    """Of peaks that the compiler's code gives."""
    summary = data["summary"]
    known = [case for case in data["cases"] if not case["plan"].startswith("drawn")]
    return {
        "compiled.code-cases": str(summary["memory"]["cases"]),
        "compiled.code-drawn": str(summary["memory"]["cases"] - len(known)),
        "compiled.code-known": str(len(known)),
        "compiled.code": f"{percent(summary['memory']['lowest'])} to {percent(summary['memory']['highest'])}",
        "compiled.code-passes": (
            f"{percent(summary['memory_of_passes']['lowest'])} to {percent(summary['memory_of_passes']['highest'])}"
        ),
        "compiled.code-mean": f"{100 * summary['memory']['mean_absolute']:.1f} %",
        "compiled.code-seconds": f"{summary['asked_seconds_most']:.0f} s",
        "compiled.code-hardware": environment(data)["hardware"],
        "compiled.code-date": environment(data)["date"],
    }


def _held_out(cases: Sequence[Record]) -> dict[str, str]:
    """Of plans all of whose costs other plans had."""
    figures = {}
    for name in ("gpt", "vit"):
        known = [case for case in cases if case["model"].startswith(name) and not case["scaled_costs"]]
        for what in ("time", "memory"):
            errors = [case[f"{what}_error"] for case in known]
            figures[f"compiled.held-out-{name}-{what}"] = f"{percent(min(errors))} and {percent(max(errors))}"
    sixteen = [case["time_error"] for case in cases if case["plan"] == "uniform FP16"]
    return figures | {"compiled.held-out-fp16": f"{percent(min(sixteen))} and {percent(max(sixteen))}"}
