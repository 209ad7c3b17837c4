"""The command ``qsync-opt audit``: a recorded training step beside the predicted one."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from qsync_opt.cli.app import EXIT_OK, Runner, print_json
from qsync_opt.cli.console import print_table

if TYPE_CHECKING:
    from qsync_opt.steps import AuditedWorker

_SHOWN = 15


def add_audit(parser: argparse.ArgumentParser) -> Runner:
    """Compare recorded steps with predicted ones, per worker and operator, the largest differences first."""
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="trace of torch.profiler, one per worker")
    parser.add_argument("--graph", metavar="GRAPH", required=True, help="captured graph of the model")
    parser.add_argument("--plan", metavar="PLAN", required=True, help="plan file that the workers ran under")
    parser.add_argument("--costs", metavar="COSTS", nargs="+", required=True, help="step costs, one file per worker")
    parser.add_argument(
        "--device", metavar="TYPE", nargs="+", help="device type of each worker, if the plan has several"
    )
    parser.add_argument("--top", metavar="N", type=int, default=_SHOWN, help=f"operators to list (default {_SHOWN})")
    parser.add_argument("--overlay", metavar="FILE", help="also write both as one trace for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _audit


def _audit(options: argparse.Namespace) -> int:
    from qsync_opt.errors import ProblemError
    from qsync_opt.io import near_match, write_json
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

    if options.top < 0:
        raise ProblemError(f"--top is {options.top}, but at least 0 operators can be listed")
    _check_overlay(options)
    graph, plan = load_graph(options.graph), load_plan(options.plan)
    count = len(options.traces)
    devices = options.device or [next(iter(plan.devices))] * count
    if len(plan.devices) > 1 and not options.device:
        raise ProblemError(
            f"the plan has several device types ({', '.join(plan.devices)}); say --device for each trace"
        )
    for what, given in (("--costs", options.costs), ("--device", devices)):
        if len(given) != count:
            raise ProblemError(f"{count} traces but {len(given)} times {what}; one of each per worker is needed")
    workers: list[AuditedWorker] = []
    timelines, measured = [], {}
    for trace, costs, device in zip(options.traces, options.costs, devices, strict=True):
        if device not in plan.devices:
            raise ProblemError(f"the plan has no device type {device!r}; it has {', '.join(plan.devices)}")
        unknown = [operator for operator in plan.devices[device] if operator not in graph]
        if unknown:
            raise ProblemError(
                f"the plan of {device!r} names operator {unknown[0]!r}, which model {graph.name!r} lacks"
                f"{near_match(unknown[0], [operator.name for operator in graph])}; give a plan for this model"
            )
        predictor = StepPredictor(graph, load_step_costs(costs))
        step = predictor.plan(plan.devices[device])
        name = f"{len(workers)}: {device}"
        events = read_chrome_trace(trace)
        workers.append(audit_worker(name, predictor, step, events))
        timelines.append(predicted_timeline(f"{name} (predicted)", predictor, step))
        measured[name] = events
    if options.overlay:
        write_json(options.overlay, overlay_json(timelines, measured))
    if options.json:
        print_json({"workers": [worker.to_json() for worker in workers]})
    else:
        for worker in sorted(workers, key=lambda worker: -abs(worker.total[0] - worker.total[1])):
            _print(worker, options.top)
    return EXIT_OK


def _check_overlay(options: argparse.Namespace) -> None:
    """Refuse to write over what is read."""
    from qsync_opt.errors import ProblemError

    read = (*options.traces, options.graph, options.plan, *options.costs)
    if options.overlay and os.path.realpath(options.overlay) in map(os.path.realpath, read):
        raise ProblemError(f"--overlay would write over {options.overlay!r}, which is read; give another file")


def _print(worker: AuditedWorker, top: int) -> None:
    note = "" if worker.where == "device" else ", which a profiler lengthens"
    print(f"worker {worker.name}: times on the {worker.where}{note}")
    print_table(
        ("  phase", "predicted", "measured", "difference"),
        [
            (f"  {name}", *_shown(predicted, measured))
            for name, (predicted, measured) in (*worker.phases.items(), ("all of them", worker.total))
        ],
    )
    rows = [
        (f"  {row.operator}", row.phase, row.precision or "-", *_shown(row.predicted_ns, row.measured_ns))
        for row in worker.operators[:top]
    ]
    print_table(("  operator", "phase", "precision", "predicted", "measured", "difference"), rows)


def _shown(predicted_ns: int, measured_ns: int) -> tuple[str, str, str]:
    share = f" ({predicted_ns / measured_ns - 1:+.1%})" if measured_ns else ""
    difference = f"{(predicted_ns - measured_ns) / 1e6:+.3f} ms{share}"
    return f"{predicted_ns / 1e6:.3f} ms", f"{measured_ns / 1e6:.3f} ms", difference
