"""Single figures in running text: a page writes ``{{ name }}``, and the figure comes from ``benchmarks/results``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from results_pages import Record, environment, load_results, percent

_PLACE = re.compile(r"\{\{ ([\w.-]+) \}\}")


def figures() -> dict[str, str]:
    """Name to figure."""
    results = load_results()
    return {
        **_predicted(results["predicted-cuda.json"]),
        **_indicator(results["indicator.json"]),
        **_solvers(results["solvers.json"]),
        **_capture(results["capture.json"]),
    }


def with_figures(text: str, known: Mapping[str, str]) -> str:
    """Fill in the figures of a page.

    Raises:
        KeyError: A page asks for a figure that is not known.
    """
    return _PLACE.sub(lambda found: known[found[1]], text)


def _span(values: Iterable[float], form: str) -> str:
    found = list(values)
    return f"{min(found):{form}} to {max(found):{form}}"


def _predicted(data: Record) -> dict[str, str]:
    rows = data["rows"]
    times, memories = ([row[key] for row in rows] for key in ("time_error", "memory_error"))
    plain = next(row for row in rows if row["plan"] == "uniform FP32")
    return {
        "predicted.hardware": environment(data)["hardware"],
        "predicted.date": environment(data)["date"],
        "predicted.time": f"{percent(min(times))} to {percent(max(times))}",
        "predicted.time-fp32": percent(plain["time_error"]),
        "predicted.time-highest": percent(max(times)),
        "predicted.memory": f"{percent(min(memories))} to {percent(max(memories))}",
        "predicted.plans": str(len(rows)),
        **{
            f"predicted.{row['plan'].removeprefix('uniform ').lower()}.measured": f"{row['measured_ms']:.0f} ms"
            for row in rows
            if row["plan"].startswith("uniform ")
        },
    }


def _indicator(data: Record) -> dict[str, str]:
    kinds = ("output", "weight_gradient", "input_gradient")
    ratios = [found[kind] for found in data["operators"] for kind in kinds if found.get(kind) is not None]
    probed = [network for network in data["networks"] if network["indicator"] == "probed"]
    swept = [network for network in data["networks"] if network["indicator"] == "propagated"]
    by_depth = [network for network in data["networks"] if network["indicator"] == "depth"]
    return {
        "indicator.operators": _span(ratios, ".2f"),
        "indicator.cases": str(len(ratios)),
        "indicator.probed.rank": _span((n["all"]["spearman"] for n in probed), ".2f"),
        "indicator.propagated.rank": _span((n["all"]["spearman"] for n in swept), ".2f"),
        "indicator.depth.rank": _span((n["all"]["spearman"] for n in by_depth), ".2f"),
        "indicator.probed.plans": _span(
            (n["plans"][end] for n in probed for end in ("ratio_lowest", "ratio_highest")), ".2f"
        ),
        "indicator.propagated.plans": _span(
            (n["plans"][end] for n in swept for end in ("ratio_lowest", "ratio_highest")), ".2f"
        ),
    }


def _solvers(data: Record) -> dict[str, str]:
    found = {}
    for key, values in data["summary"].items():
        size, method = key.split(" ", 1)
        name = f"solvers.{method}.{size}"
        found[f"{name}.seconds"] = f"{values['seconds']['median']:.2g} s"
        found[f"{name}.worst-seconds"] = f"{values['seconds']['worst']:.2g} s"
        found[f"{name}.proved"] = f"{values['optimal']} of {values['cases']}"
        found[f"{name}.worst-error"] = f"{100 * values['error']['worst']:.2g} %"
        found[f"{name}.median-error"] = f"{100 * values['error']['median']:.3g} %"
        found[f"{name}.median-share"] = f"{100 * values['error_share_of_range']['median']:.2g} %"
    found["solvers.hardware"] = environment(data)["hardware"]
    return found


def _capture(data: Record) -> dict[str, str]:
    models = [model for model in data["models"] if model["operators"] > 10]
    return {
        "capture.models": str(len(models)),
        "capture.seconds": _span((model["seconds"] for model in models), ".0f") + " s",
        "capture.operators": _span((model["operators"] for model in models), "d"),
    }
