"""The commands evaluate, explain, diff, report and audit: what a plan costs and why, and whether predictions hold."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qsync_opt.cli.console import (
    EXIT_DIFFERENT,
    EXIT_INFEASIBLE,
    EXIT_OK,
    Cache,
    Json,
    NoCache,
    PlanFile,
    ProblemFile,
    Quiet,
    Verbose,
    check_outputs,
    front_cache,
    mebibytes,
    milliseconds,
    option,
    print_estimates,
    print_json,
    print_table,
    signed,
)
from qsync_opt.errors import ProblemError, first_few
from qsync_opt.io import encode, format_memory, format_sensitivity, format_time, near_match, write_json

if TYPE_CHECKING:
    from qsync_opt.steps import AuditedWorker
    from qsync_opt.training import Alternative, Evaluation, Explanation, Overview, PlanDifference, Problem

Recorded = Annotated[str | None, option("FILE", "recorded reductions, to show beside those predicted of the buckets")]

_LOGGER = logging.getLogger(__name__)
_KB = 1000
_LEAST_SHARE = 0.005
"""A smaller share of the sensitivity would be rounded to none."""
_SHOWN_CHANGES = 40
_SHOWN_OPERATORS = 15


def evaluate(problem: ProblemFile, plan: PlanFile, json: Json = False, verbose: Verbose = False) -> int:
    """Time, memory and sensitivity of a plan, by code that trusts no solver."""
    from qsync_opt import training

    loaded = training.load_problem(problem)
    evaluation = training.evaluate(loaded, training.load_plan(plan))
    if json:
        print_json(evaluation.to_json())
    else:
        limit = milliseconds(loaded.latency_limit_ns)
        print(f"objective       {evaluation.objective:.9g}")
        print(f"iteration time  {milliseconds(evaluation.iteration_ns)} (limit {limit})")
        for device in evaluation.devices.values():
            print(
                f"{device.name:<15} {mebibytes(device.memory_kib)} of {mebibytes(device.memory_limit_kib)}, "
                f"sensitivity {device.sensitivity:.9g}"
            )
        if evaluation.feasible:
            print("feasible")
        _print_violations(evaluation)
        print_estimates(loaded.extras)
    return EXIT_OK if evaluation.feasible else EXIT_INFEASIBLE


def _print_violations(evaluation: Evaluation) -> None:
    for text in evaluation.violations:
        print(f"violated: {text}")


def explain(
    problem: ProblemFile,
    plan: PlanFile,
    operator: Annotated[
        str | None,
        typer.Argument(
            metavar="OPERATOR",
            help="name of an operator, or a part that only one name has; without it the operators are listed that cost "
            "most sensitivity or could save most time",
        ),
    ] = None,
    device: Annotated[str | None, option("NAME", "only this device type; all by default")] = None,
    recorded: Recorded = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Say why an operator has its precision, and what raising or lowering it would cost; likewise buckets' schemes."""
    from qsync_opt.cli.joint import load_with_schemes, print_buckets, print_measured
    from qsync_opt.training import Explainer, overview

    loaded, chosen, buckets, measured = load_with_schemes(problem, plan, recorded)
    explainer = Explainer(loaded, chosen)
    names = [each.name for each in loaded.devices] if device is None else [loaded.device(device).name]
    name = None if operator is None else _operator(loaded, operator)
    results: list[Any] = [
        overview(explainer, each) if name is None else explainer.explain(name, each) for each in names
    ]
    if json:
        schemes = {"buckets": [encode(each) for each in buckets]} if buckets else {}
        if measured:
            schemes["measured"] = [encode(each) for each in measured]
        print_json({"operator": name, "devices": {each.device: each.to_json() for each in results}, **schemes})
        return EXIT_OK
    for each in results:
        (_print_overview if name is None else _print_explanation)(each)
    if buckets and name is None:
        print_buckets(buckets)
        if measured:
            print_measured(buckets, measured)
    if name is None:
        print("all of one operator: qsync-opt explain PROBLEM PLAN OPERATOR")
    print_estimates(loaded.extras)
    return EXIT_OK


def _operator(problem: Problem, text: str) -> str:
    """The operator called ``text``, or the only one whose name holds it."""
    names = [operator.name for operator in problem.operators]
    if text in names:
        return text
    matches = [name for name in names if text in name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        candidates = first_few([*map(repr, matches)], most=5)
        raise ProblemError(f"operator {text!r} could be {candidates}; give the whole name of one")
    if not near_match(text, names):
        adjustable = first_few([repr(operator.name) for operator in problem.adjustable])
        raise ProblemError(
            f"problem {problem.name!r} has no operator {text!r}; adjustable are {adjustable}; "
            "give a name or a part of one"
        )
    return problem.operators[problem.index(text)].name  # raises, with the nearest name


def _print_overview(overview: Overview) -> None:
    total = format_sensitivity(overview.sensitivity)
    print(f"{overview.device}: {overview.adjustable} adjustable operators, sensitivity {total}")
    if overview.sensitive:
        print("most sensitivity, and what the next higher precision would change")
        header = ("  operator", "precision", "sensitivity", "share", "raised to", "iteration", "memory", "limits")
        print_table(header, [_sensitive_row(each, overview.sensitivity) for each in overview.sensitive])
    if overview.savings:
        print("most computing time to save")
        header = ("  operator", "precision", "instead", "computing", "iteration", "sensitivity", "memory", "limits")
        names = ("computing", "iteration", "sensitivity", "memory", "limits")
        rows = []
        for saving in overview.savings:
            instead = saving.fastest
            assert instead is not None, "what saves time is another precision"
            rows.append((f"  {saving.operator}", saving.precision, instead.precision, *_changes(instead, *names)))
        print_table(header, rows)
    if not overview.sensitive and not overview.savings:
        print("no operator adds sensitivity, and no other precision would save time")


def _sensitive_row(explanation: Explanation, total: float) -> tuple[str, ...]:
    higher, share = explanation.next_higher, explanation.sensitivity / total
    return (
        f"  {explanation.operator}",
        explanation.precision,
        format_sensitivity(explanation.sensitivity),
        f"{100 * share:.0f} %" if share >= _LEAST_SHARE else "under 1 %",
        *(("-",) * 4 if higher is None else (higher.precision, *_changes(higher, "iteration", "memory", "limits"))),
    )


def _changes(alternative: Alternative, *names: str) -> list[str]:
    texts = {
        "sensitivity": signed(format_sensitivity, alternative.sensitivity_change),
        "iteration": signed(format_time, alternative.iteration_change_ns),
        "computing": signed(format_time, alternative.compute_change_ns),
        "memory": signed(format_memory, alternative.memory_change_kib),
        "limits": "; ".join(f"breaks {limit.text}" for limit in alternative.broken) or "kept",
    }
    return [texts[name] for name in names]


def _print_explanation(explanation: Explanation) -> None:
    print(f"{explanation.operator} ({explanation.type}, {explanation.role}) on {explanation.device}: "
          f"{explanation.precision}")  # fmt: skip
    print(f"  {explanation.reason}")
    casts = [*explanation.forward_casts, *explanation.backward_casts]
    print(
        f"  forward {format_time(explanation.forward_ns)}, backward {format_time(explanation.backward_ns)}, "
        f"{len(casts)} casts {format_time(sum(cast.duration_ns for cast in casts))}, "
        f"memory {format_memory(explanation.memory_kib)}, sensitivity {format_sensitivity(explanation.sensitivity)}"
    )
    if explanation.alternatives:
        header = ("  precision", "sensitivity", "iteration", "own compute", "memory", "casts", "limits")
        rows = []
        for alternative in explanation.alternatives:
            changed_casts = f"+{len(alternative.added_casts)} -{len(alternative.removed_casts)}"
            *changes, limits = _changes(alternative, "sensitivity", "iteration", "computing", "memory", "limits")
            rows.append((f"  {alternative.precision}", *changes, changed_casts, limits))
        print_table(header, rows)
    for alternative in explanation.alternatives:
        for pushed in alternative.pushed:
            print(f"  {alternative.precision} would push {pushed.operator} from {pushed.before} to {pushed.after}")


def diff(
    first: Annotated[str, typer.Argument(metavar="PLAN", help="plan file before")],
    second: Annotated[str, typer.Argument(metavar="PLAN", help="plan file after")],
    problem: Annotated[str | None, option("PROBLEM", "their problem: also shows what the change costs")] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help=f"list every operator, not the first {_SHOWN_CHANGES} of a device")
    ] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help=f"exit with {EXIT_DIFFERENT} if the plans differ")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Show what changed between two plans, per device and operator."""
    from qsync_opt.training import compare_plans, load_plan, load_problem

    loaded = None if problem is None else load_problem(problem)
    difference = compare_plans(load_plan(first), load_plan(second), loaded)
    if json:
        print_json(difference.to_json())
    else:
        _print_difference(difference, None if show_all else _SHOWN_CHANGES)
        if loaded is not None:
            print_estimates(loaded.extras)
    return EXIT_DIFFERENT if exit_code and not difference.equal else EXIT_OK


def _print_difference(difference: PlanDifference, shown: int | None) -> None:
    if difference.first.problem != difference.second.problem:
        print(f"note: the plans are for {difference.first.problem!r} and {difference.second.problem!r}")
    if not difference.shared:
        print("note: the plans have no operator in common, so they are of different models")
    elif difference.one_sided:
        print(
            f"note: {difference.one_sided} of the operators are in one plan only: the plans may be of different models"
        )
    for device, changes in difference.changes.items():
        if not changes:
            print(f"{device}: no change")
            continue
        counts = ", ".join(
            f"{n} {before or '-'} > {after or '-'}" for (before, after), n in difference.counts(device).items()
        )
        following = sum(not change.decided for change in changes)
        print(f"{device}: {counts or 'no decision'}" + (f"; {following} operators follow" if following else ""))
        print_table(
            ("  operator", "before", "after"),
            [
                (f"  {c.operator}", c.before or "-", (c.after or "-") + ("" if c.decided else " (follows)"))
                for c in changes[:shown]
            ],
        )
        if shown is not None and len(changes) > shown:
            print(f"  ... and {len(changes) - shown} more (--all shows them)")
    if difference.before is not None and difference.after is not None:
        _print_cost(difference.before, difference.after)


def _print_cost(before: Evaluation, after: Evaluation) -> None:
    def row(name: str, show: Any, old: float, new: float) -> tuple[str, ...]:
        return name, show(old), show(new), signed(show, new - old)

    rows = [
        row("iteration time", format_time, before.iteration_ns, after.iteration_ns),
        row("sensitivity", format_sensitivity, before.objective, after.objective),
    ]
    for device, old in before.devices.items():
        rows.append(row(f"memory of {device}", format_memory, old.memory_kib, after.devices[device].memory_kib))
    broken = [f"{len(each.violations)} broken" if each.violations else "kept" for each in (before, after)]
    rows.append(("limits", *broken, ""))
    print_table(("", "before", "after", "change"), rows)


def report(
    problem: ProblemFile,
    plan: PlanFile,
    output: Annotated[str, option("FILE", "page to write", "--output", "--out")] = "report.html",
    front: Annotated[str, option("METHOD", "greedy, exact (every point proved; may take long) or none")] = "greedy",
    measured: Annotated[
        str | None, option("FILE", "measurements of the plan, to show beside what is predicted")
    ] = None,
    recorded: Recorded = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Write a page that shows and explains a plan."""
    from qsync_opt.cli.joint import load_with_schemes
    from qsync_opt.io import reporting
    from qsync_opt.report import check_front, load_measured, make_report, write_report

    check_outputs([output], [problem, plan, measured, recorded])
    check_front(front)
    loaded, loaded_plan, _, reductions = load_with_schemes(problem, plan, recorded)
    measurements = None if measured is None else load_measured(measured)
    started = time.monotonic()
    _LOGGER.info("explaining %s operators, front %s", len(loaded.operators), front)
    with reporting(False if quiet else None, "report") as progress:
        contents = make_report(
            loaded, loaded_plan, front=front, measured=measurements, cache=front_cache(cache, no_cache),
            progress=progress, reductions=reductions,
        )  # fmt: skip
    today = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    size = write_report(contents, output, note=f"From {problem} and {plan}, {today}.")
    seconds = time.monotonic() - started
    if json:
        print_json(
            {
                "report": output,
                "bytes": size,
                "operators": len(loaded.operators),
                "front": front,
                "feasible": contents.evaluation.feasible,
                "seconds": seconds,
            }
        )
    else:
        print(f"{output}: {len(loaded.operators)} operators, {size / _KB:.0f} kB, {seconds:.1f} s")
        print_estimates(loaded.extras)
        _print_violations(contents.evaluation)
    return EXIT_OK if contents.evaluation.feasible else EXIT_INFEASIBLE


def audit(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="traces of torch.profiler, one per worker")],
    graph: Annotated[str, option("GRAPH", "captured graph of the model")],
    plan: Annotated[str, option("PLAN", "plan file that the workers ran under")],
    costs: Annotated[list[str], option("COSTS...", "step costs, one file per worker")],
    device: Annotated[
        list[str] | None, option("TYPE...", "device type of each worker, if the plan has several")
    ] = None,
    top: Annotated[int, option("N", "operators to list")] = _SHOWN_OPERATORS,
    overlay: Annotated[str | None, option("FILE", "also write both as one trace for Perfetto")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Compare recorded steps with predicted ones, per worker and operator, the largest differences first."""
    from qsync_opt.model import load_graph
    from qsync_opt.steps import (
        StepPredictor,
        audit_worker,
        load_step_costs,
        overlay_json,
        predicted_timeline,
        read_chrome_trace,
    )
    from qsync_opt.training import load_plan

    if top < 0:
        raise ProblemError(f"--top is {top}, but at least 0 operators can be listed")
    read = map(os.path.realpath, (*traces, graph, plan, *costs))
    if overlay and os.path.realpath(overlay) in read:
        raise ProblemError(f"--overlay would write over {overlay!r}, which is read; give another file")
    operators, choices = load_graph(graph), load_plan(plan).devices
    types = device or [next(iter(choices))] * len(traces)
    if len(choices) > 1 and not device:
        raise ProblemError(f"the plan has several device types ({', '.join(choices)}); say --device for each trace")
    for flag, values in (("--costs", costs), ("--device", types)):
        if len(values) != len(traces):
            raise ProblemError(f"{len(traces)} traces but {len(values)} times {flag}; one of each per worker is needed")
    workers: list[AuditedWorker] = []
    timelines, measured = [], {}
    for trace, costs_file, kind in zip(traces, costs, types, strict=True):
        if kind not in choices:
            raise ProblemError(f"the plan has no device type {kind!r}; it has {', '.join(choices)}")
        unknown = next((operator for operator in choices[kind] if operator not in operators), None)
        if unknown is not None:
            raise ProblemError(
                f"the plan of {kind!r} names operator {unknown!r}, which model {operators.name!r} lacks"
                f"{near_match(unknown, [operator.name for operator in operators])}; give a plan for this model"
            )
        predictor = StepPredictor(operators, load_step_costs(costs_file))
        step = predictor.plan(choices[kind])
        name = f"{len(workers)}: {kind}"
        events = read_chrome_trace(trace)
        workers.append(audit_worker(name, predictor, step, events))
        timelines.append(predicted_timeline(f"{name} (predicted)", predictor, step))
        measured[name] = events
    if overlay:
        write_json(overlay, overlay_json(timelines, measured))
    if json:
        print_json({"workers": [worker.to_json() for worker in workers]})
    else:
        for worker in sorted(workers, key=lambda worker: -abs(worker.total[0] - worker.total[1])):
            _print_worker(worker, top)
    return EXIT_OK


def _print_worker(worker: AuditedWorker, top: int) -> None:
    note = "" if worker.where == "device" else ", which a profiler lengthens"
    print(f"worker {worker.name}: times on the {worker.where}{note}")
    print_table(
        ("  phase", "predicted", "measured", "difference"),
        [
            (f"  {name}", *_times(predicted, measured))
            for name, (predicted, measured) in (*worker.phases.items(), ("all of them", worker.total))
        ],
    )
    rows = [
        (f"  {row.operator}", row.phase, row.precision or "-", *_times(row.predicted_ns, row.measured_ns))
        for row in worker.operators[:top]
    ]
    print_table(("  operator", "phase", "precision", "predicted", "measured", "difference"), rows)


def _times(predicted_ns: int, measured_ns: int) -> tuple[str, str, str]:
    share = f" ({predicted_ns / measured_ns - 1:+.1%})" if measured_ns else ""
    difference = f"{(predicted_ns - measured_ns) / 1e6:+.3f} ms{share}"
    return f"{predicted_ns / 1e6:.3f} ms", f"{measured_ns / 1e6:.3f} ms", difference
