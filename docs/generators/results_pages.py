"""What was measured? Tables from ``benchmarks/results/*.json``, made anew with every build, so that they cannot drift.

A file whose ``format`` has a function in ``TABLES`` gets a table of its own; of any other file every list of records
becomes a table. All show hardware, versions, date and command, as far as the file records them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOST_ROWS = 60
MOST_COLUMNS = 14
_HARDWARE = ("hardware", "gpu", "device", "cpu", "machine")
Record = Mapping[str, Any]


def load_results(folder: Path = RESULTS) -> dict[str, Record]:
    """File name to content of every result file."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers stand right."""
    body = [[cell(value) for value in row] for row in rows]
    numeric = [bool(body) and all(_is_number(row[i]) for row in body) for i in range(len(header))]
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join("---:" if right else "---" for right in numeric) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """A value as it stands in a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ").replace("[", "&#91;")  # no link by chance


def span(values: Iterable[float], form: str) -> str:
    """Least and greatest of some values, in one format."""
    found = list(values)
    return f"{min(found):{form}} to {max(found):{form}}"


def percent(value: float) -> str:
    """A signed share in percent."""
    return f"{100 * value:+.1f} %"


def _is_number(text: str) -> bool:
    try:
        float(text.removesuffix(" %"))
    except ValueError:
        return text == "–"
    return True


def environment(data: Record) -> dict[str, str]:
    """Hardware, versions, date and command of a result file, as far as it records them."""
    places = [data, *(data[key] for key in ("environment", "provenance", "meta") if isinstance(data.get(key), dict))]
    places += _sections(data).values()  # what the file as a whole does not say, its first section does
    merged: dict[str, Any] = {}
    for place in reversed(places):
        merged.update(place)
    hardware = [text for key in _HARDWARE if isinstance(merged.get(key), str) and (text := str(merged[key]))]
    if isinstance(merged.get("cores"), int):
        hardware.append(f"{merged['cores']} cores")
    versions = dict(merged["versions"]) if isinstance(merged.get("versions"), dict) else {}
    for key in ("python", "torch", "cuda"):
        if isinstance(merged.get(key), str):
            versions.setdefault(key, merged[key])
    command = merged.get("command", "")
    found = {
        "hardware": ", ".join(dict.fromkeys(hardware)),
        "versions": ", ".join(f"{name} {value}" for name, value in sorted(versions.items())),
        "date": str(merged.get("date", "")),
        "command": command if isinstance(command, str) else " ".join(map(str, command)),
    }
    return {key: text or "not recorded in the file" for key, text in found.items()}


def provenance(name: str, data: Record) -> str:
    """The lines under a heading: file, hardware, versions, date and command."""
    return f"File `benchmarks/results/{name}`. {_described(data)}\n"


def _described(data: Record) -> str:
    found = environment(data)
    command = found["command"]
    shown = command if command.startswith("not recorded") else f"`{command}`"
    return f"Hardware: {found['hardware']}. Versions: {found['versions']}. Date: {found['date']}. Command: {shown}."


def _predicted(data: Record) -> str:
    rows = data["rows"]
    model = ", ".join(f"{key} {value}" for key, value in data["model"].items())
    text = f"A transformer ({model}), batch {data['batch']}. Errors are (predicted - measured) / measured.\n\n"
    header = (
        "plan",
        "predicted ms",
        "measured ms",
        "error of time",
        "predicted MiB",
        "measured MiB",
        "error of memory",
    )
    return text + table(
        header,
        (
            (
                row["plan"],
                f"{row['predicted_ms']:.1f}",
                f"{row['measured_ms']:.1f}",
                percent(row["time_error"]),
                f"{row['predicted_mib']:.0f}",
                f"{row['measured_mib']:.0f}",
                percent(row["memory_error"]),
            )
            for row in rows
        ),
    )


def _solvers(data: Record) -> str:
    text = (
        "Synthetic problems of four families (CNN, encoder, decoder, mixture of experts). `error` is the relative "
        "distance of a plan's sensitivity from the lowest known; `proved` counts proved optima. Wide limits make the "
        "lowest sensitivity small and relative errors of `qsync` large.\n\n"
    )
    rows = []
    for key, found in data["summary"].items():
        size, method = key.split(" ", 1)
        rows.append(
            (
                size,
                method,
                found["cases"],
                found["optimal"],
                f"{found['error']['median']:.3g}",
                f"{found['error']['worst']:.3g}",
                f"{found['seconds']['median']:.3f}",
                f"{found['seconds']['worst']:.3f}",
            )
        )
    header = ("operators", "method", "cases", "proved", "median error", "worst error", "median s", "worst s")
    text += table(header, rows)
    for name, section in data["sections"].items():
        if environment(section)["hardware"] != environment(data)["hardware"]:
            text += f"\nOf another machine, section `{name}`: {_described(section)}\n"
    text += "\nWhat is asked of the solvers, and what was measured:\n\n"
    words = {True: "yes", False: "no", None: "not measured"}
    asked = ((r["what"], r["asked"], r["measured"], words[r["met"]]) for r in data["report"]["requirements"])
    text += table(("what", "asked", "measured", "met"), asked)
    return text


def _capture(data: Record) -> str:
    header = (
        "model",
        "parameters",
        "operators",
        "adjustable",
        "products found",
        "products counted by torch",
        "FLOPs equal",
        "seconds",
    )
    rows = (
        (
            m["model"],
            f"{m['parameters'] / 1e6:.1f} M",
            m["operators"],
            m["adjustable"],
            m["products_found"],
            m["products_counted"],
            m["flops_found"] == m["flops_counted"],
            f"{m['seconds']:.1f}",
        )
        for m in data["models"]
    )
    return f"Capture of whole training forward passes. {data['note'].capitalize()}.\n\n" + table(header, rows)


def _indicator(data: Record) -> str:
    text = (
        "Single operators: predicted over measured variance (1 is exact), over shapes, data, formats and roundings.\n\n"
    )
    groups: dict[tuple[str, str], list[float]] = {}
    for found in data["operators"]:
        ratios = [found[key] for key in ("output", "weight_gradient", "input_gradient") if found.get(key) is not None]
        groups.setdefault((found["measured_by"], found["precision"]), []).extend(ratios)
    text += table(
        ("measured by", "precision", "cases", "lowest", "median", "highest"),
        (
            (by, precision, len(ratios), f"{min(ratios):.3f}", f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}")
            for (by, precision), ratios in sorted(groups.items())
        ),
    )
    text += (
        "\nWhole networks: predicted over measured increase of the gradient's variance when one operator runs in low "
        "precision (`one`), and for random whole plans (`plans`). `rank` is Spearman's correlation and `ratio` the "
        "median. The first says whether the order of operators is right, which is what a plan depends on.\n\n"
    )
    header = ("network", "steps trained", "indicator", "rank, one", "ratio, one", "rank, plans", "ratio, plans")
    rows = (
        (
            n["network"],
            n["training_steps"],
            n["indicator"],
            f"{n['all']['spearman']:.2f}",
            f"{n['all']['ratio_median']:.3g}",
            f"{n['plans']['spearman']:.2f}",
            f"{n['plans']['ratio_median']:.3g}",
        )
        for n in data["networks"]
    )
    return text + table(header, rows)


def _gpu_tests(data: Record) -> str:
    counts = data["counts"]
    return table(tuple(counts), [tuple(counts.values())])


def _quality(data: Record) -> str:
    from quality_tables import overview  # which builds on this module

    return overview(data)


TABLES: Mapping[str, tuple[str, Callable[[Record], str]]] = {
    "qsync-bench-predicted/1": ("Predicted beside measured", _predicted),
    "qsync-bench-capture/1": ("Capture", _capture),
    "qsync-indicator-check/1": ("Indicator", _indicator),
    "qsync-bench-gpu-tests/1": ("Tests on a GPU", _gpu_tests),
    "qsync-bench-quality/1": ("Truth of the indicator and quality of training", _quality),
}
"""Value of ``format`` to heading and table."""


def _flat(record: Record) -> dict[str, object]:
    """Scalars of a record, those one level down under ``outer.inner``."""
    result: dict[str, object] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            result.update({f"{key}.{k}": v for k, v in value.items() if not isinstance(v, dict | list)})
        elif not isinstance(value, list):
            result[key] = value
    return result


def record_tables(records: Sequence[Record]) -> str:
    """Records as tables, one for each set of keys, small ones first; long ones are cut with a line that says so."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in map(_flat, records):
        groups.setdefault(tuple(record), []).append(record)
    parts = []
    groups.pop((), None)  # records of lists alone have nothing to show
    for columns, rows in sorted(groups.items(), key=lambda group: len(group[1])):
        parts.append(table(columns[:MOST_COLUMNS], (list(row.values())[:MOST_COLUMNS] for row in rows[:MOST_ROWS])))
        if len(rows) > MOST_ROWS:
            parts.append(f"{len(rows) - MOST_ROWS} more rows stand in the file.\n")
    return "\n".join(parts)


def _lists_of_records(data: Record) -> Iterator[tuple[str, list[Record]]]:
    for key, value in data.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield key, value


def generic(data: Record) -> str:
    """Every list of records in a file as tables; where a file has sections, each with its own provenance."""
    parts = [f"`{key}`:\n\n{record_tables(records)}" for key, records in _lists_of_records(data)]
    for name, part in _sections(data).items():
        parts.append(f"### {name}\n\n{_described(part)}\n")
        parts += [record_tables(records) for _, records in _lists_of_records(part)]
    if not parts:
        shown = {k: v for k, v in _flat(data).items() if k not in ("format", "date", "command")}
        parts.append(table(("entry", "value"), shown.items()))
    return "\n".join(parts)


def _sections(data: Record) -> Mapping[str, Record]:
    found = data.get("sections")
    return found if isinstance(found, dict) and all(isinstance(part, dict) for part in found.values()) else {}


def _special(data: Record) -> tuple[str, Callable[[Record], str]] | None:
    if data.get("format") in TABLES:
        return TABLES[data["format"]]
    if "summary" in data and "comparisons" in data:  # the solver benchmark carries no format key
        return "Solvers", _solvers
    return None


def section(name: str, data: Record) -> str:
    """Heading, provenance and tables of one result file."""
    found = _special(data)
    title, content = (found[0], found[1](data)) if found else (name.removesuffix(".json"), generic(data))
    suffix = f" ({name.removesuffix('.json')})" if found else ""
    return f"## {title}{suffix}\n\n{provenance(name, data)}\n{content}"


def results_page() -> str:
    """Markdown of the page of measured results."""
    intro = (
        "# Measured results\n\n"
        "This page is generated from the files in `benchmarks/results/` with every build; nothing on it is written by "
        "hand. Each section names the file, the hardware, the versions, the date and the command that made it. "
        "[Limits and known failures](limits.md) says how to read the worse figures.\n"
    )
    return "\n".join([intro, *(section(name, data) for name, data in load_results().items())])
