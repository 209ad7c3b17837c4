"""The commands ``qsync-opt costs ...``: measured times, the model that is fitted to them, and what to profile next."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qsync_opt.cli.console import (
    EXIT_DIFFERENT,
    EXIT_OK,
    Json,
    ProblemFile,
    Quiet,
    Verbose,
    check_outputs,
    choice,
    option,
    print_json,
    print_table,
)
from qsync_opt.errors import NotInstalledError, ProblemError

if TYPE_CHECKING:
    from qsync_opt.costs.learned import LearnedModel

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)
COVERED = 0.8
"""Share of times inside the 90 % intervals below which ``check`` calls a model unfit for a record."""
_METHODS = ("bounds", "kmeans", "facility", "random", "exact")

ModelFile = Annotated[
    Path | None, option("MODEL.npz", "fitted model (default: the one that comes with the package)", "--model")
]


@app.command()
def collect(
    output: Annotated[Path, typer.Argument(metavar="RECORD.json.gz", help="file to write")],
    device: Annotated[str, option("NAME", "cpu, cuda or cuda:1")] = "cpu",
    budget: Annotated[str, option("TIME", "how long to measure")] = "240 s",
    name: Annotated[str | None, option("NAME", "of the device, for a partition of a card")] = None,
    threads: Annotated[int | None, option("N", "threads of a cpu (default: as many as torch takes)")] = None,
    multiprocessors: Annotated[
        str | None, option("N,N", "partitions of a card to measure after the whole card, as devices of their own")
    ] = None,
    seed: Annotated[int, option("N", "of the random shapes")] = 0,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Measure operators of many shapes on a device, in each of its precisions."""
    from qsync_opt.costs.learned import merge_records
    from qsync_opt.io import TIME_S, check_integer, parse_quantity, reporting

    check_outputs([output], [])
    budget_s = parse_quantity(budget, TIME_S, "--budget")
    sizes = [None, *_sizes(multiprocessors)]
    if name is not None and len(sizes) > 1:
        raise ProblemError(f"--name is {name!r}, but partitions have names of their own; leave out one of the two")
    if find_spec("torch") is None:
        raise NotInstalledError("collecting costs needs torch: pip install 'qsync-opt[torch]'")
    if threads is not None:
        import_module("torch").set_num_threads(check_integer(threads, "--threads", minimum=1))
    # Runtimes are reached by name: the core does not depend on them.
    runtime = import_module("qsync_opt.runtimes.torch.costs")
    with reporting(False if quiet else None, "collect") as report:
        found = [
            runtime.collect(
                device, budget_s=budget_s / len(sizes), name=name, seed=seed, multiprocessors=size, progress=report
            )
            for size in sizes
        ]
    record = merge_records(found)
    record.save(output)
    names = " and ".join(vector.name for vector in record.devices)
    print(f"{len(record)} times of {len(record.workloads)} operators on {names}: {output}")
    print(record.note)
    return EXIT_OK


@app.command()
def fit(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD.json.gz...", help="records of measured times")],
    output: Annotated[Path, option("MODEL.npz", "file to write")],
    errors: Annotated[bool, typer.Option(help="compute held-out errors, which takes longer")] = True,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Fit a model to records, with held-out errors by operator, family, model and device."""
    from qsync_opt.costs.learned import fit_laws, load_record, merge_records
    from qsync_opt.io import encode

    check_outputs([output], records)
    model = fit_laws(merge_records([load_record(path) for path in records]), errors=errors)
    model.save(output)
    if json:
        print_json({"model": str(output), **encode(model.card)})
        return EXIT_OK
    print(f"{model.label()}: {output}")
    _print_errors("held out", model.card.errors)
    return EXIT_OK


@app.command()
def predict(
    model: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="model file, with fixed shapes")],
    device: Annotated[str, option("NAME", "a GPU with a data sheet, or a device that the model of costs knows")],
    learned: ModelFile = None,
    quantile: Annotated[float | None, option("Q", "show this quantile instead of the median, such as 0.9")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Predict the time of every operator of a model on a device, with interval and source."""
    from qsync_opt.cluster import DeviceType
    from qsync_opt.costs import operator_cost
    from qsync_opt.costs.learned import LearnedCosts, interval_quantile
    from qsync_opt.model.onnx import read_onnx

    graph = read_onnx(model)
    source = LearnedCosts(_model(learned))
    where = DeviceType(name=device, count=1, memory_limit_bytes=1, precisions=("FP32",))
    profile = source.profile(graph, where)
    rows: list[dict[str, Any]] = []
    for operator in graph:
        for precision in profile.cost(operator.name):
            for direction in ("forward", "backward"):
                estimate = operator_cost(profile, operator.name, precision, direction)
                if estimate.time_s == 0:
                    continue
                time_s = estimate.time_s
                if quantile is not None:
                    time_s = interval_quantile(time_s, estimate.low_s, estimate.high_s, quantile)
                row = {"operator": operator.name, "precision": precision, "pass": direction, "time_s": time_s}
                # Where no error was recorded the interval is open, and JSON has no infinity.
                ends = {"low_s": estimate.low_s, "high_s": estimate.high_s if estimate.high_s < float("inf") else None}
                rows.append({**row, **ends, "source": str(estimate.source)})
    if json:
        print_json({"device": profile.device.name, "costs": profile.options.get("estimated_by"), "times": rows})
        return EXIT_OK
    print(f"{profile.device.name}: {profile.options.get('estimated_by', 'measured')}")
    header = ("operator", "precision", "pass", "time", "low", "high", "source")
    print_table(
        header,
        [
            (row["operator"], row["precision"], row["pass"], *(_micro(row[k]) for k in ("time_s", "low_s", "high_s")),
             row["source"])
            for row in rows
        ],
    )  # fmt: skip
    return EXIT_OK


@app.command()
def check(
    record: Annotated[Path, typer.Argument(metavar="RECORD.json.gz", help="record of measured times")],
    learned: ModelFile = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Compare a model with measured times: errors in seconds, and the share inside the intervals.

    Exit status: 0 if at least 80 % of the times are inside their 90 % intervals, 1 if not.
    """
    from qsync_opt.costs.learned import check_same_devices, load_record, predict_samples, summary

    model, measured = _model(learned), load_record(record)
    check_same_devices([*model.card.vectors, *measured.devices])
    estimates = predict_samples(model, measured)
    kinds = [measured.program(sample).family for sample in measured.samples]
    groups = {"all": range(len(kinds)), **{k: [i for i, x in enumerate(kinds) if x == k] for k in sorted(set(kinds))}}
    table = {
        name: summary([measured.samples[i].ns for i in places], [estimates[i] for i in places])
        for name, places in groups.items()
    }
    trained = measured.digest() == model.card.training_digest
    if json:
        print_json({"model": model.label(), "trained_on_this_record": trained, "errors": table})
    else:
        print(model.label())
        if trained:
            print("the model was fitted to this very record: these are no errors of prediction")
        _print_errors("kind", table)
    return EXIT_OK if table["all"]["coverage"] >= COVERED else EXIT_DIFFERENT


@app.command()
def choose(
    problem: ProblemFile,
    budget: Annotated[int, option("N", "number of measurements")] = 30,
    method: Annotated[str, option("NAME", ", ".join(_METHODS), **choice(*_METHODS))] = "bounds",
    seed: Annotated[int, option("N", "of kmeans and random")] = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Choose the operators to profile: those whose uncertain times can change the plan."""
    from qsync_opt.training import choose_profiles, load_problem

    result = choose_profiles(load_problem(problem), budget, method=method, seed=seed)
    if json:
        rows = [{"device": m.device, "operators": list(m.operators), "regret": m.regret} for m in result.measurements]
        counted = {"groups": result.groups, "complete": result.complete}
        print_json({"method": str(result.method), **counted, "measurements": rows})
        return EXIT_OK
    rows_of = [
        (m.device, m.operators[0], str(len(m.operators)), f"{100 * m.regret:.2f} %") for m in result.measurements
    ]
    print_table(("device", "operator", "shared by", "regret"), rows_of)
    print(f"{len(result.measurements)} of {result.groups} measurements")
    if result.complete:
        print("no other operator can change the plan by itself")
    return EXIT_OK


def _model(path: Path | None) -> LearnedModel:
    from qsync_opt.costs.learned import load_model, shipped_model

    return shipped_model() if path is None else load_model(path)


def _sizes(text: str | None) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(set(parts)) != len(parts):
        raise ProblemError(f"--multiprocessors is {text!r}; give different numbers above zero, such as 16,66")
    return [int(part) for part in parts]


def _micro(value_s: float | None) -> str:
    return "-" if value_s is None else f"{1e6 * value_s:.1f} us"


def _print_errors(title: str, errors: Any) -> None:
    shares = ("median", "p90", "coverage")
    rows = [
        (name, *(f"{100 * e[share]:.1f} %" for share in shares), f"{e['samples']:.0f}") for name, e in errors.items()
    ]
    print_table((title, "median error", "90th percentile", "in interval", "times"), rows)
