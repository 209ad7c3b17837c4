"""Do sensitivities add up? Predicted against measured increase of the whole gradient's variance, for mixed plans."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from estimates import standard_error
from noisy import added_parts, added_variance, exact_gradient
from rank_correlation import spearman
from subjects import subject_of, train_briefly
from work import Clock, significant

from qsync_opt.kernels import ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import ApplyOptions, device_formats
from qsync_opt.runtimes.torch.sensitivity import collect_statistics, full_precision
from qsync_opt.sensitivity import ModelStatistics, SensitivityTable, plan_variance, plan_variance_parts, sensitivities

PRECISIONS = ("INT8", "FP8", "BF16", "FP32")


SUM = "probed, sum"
"""The plain sum of sensitivities, which counts flips of rectifiers operator by operator."""
OTHERS = "probed, other batches"
DIVIDED = "probed, two quarters of the batch"
"""Statistics as they are collected unless whole batches are asked for."""
POOLLESS = "probed, max-pools left out"
WIDENED = "uniform BF16, additions between operators in FP32"
TRAINED = {"gpt": 300, "bert": 60, "resnet50": 60, "resnet50-adamw": 1000}
"""Steps before anything is measured."""


def mixed_plans(graph: OpGraph, device: torch.device, count: int) -> list[dict[str, str]]:
    """Random plans; every operator draws among the precisions it has, plan by plan more of the low ones."""
    source = random.Random(7)
    plans = []
    for number in range(count):
        weights = (1 + number, 1 + number, 2, 2)
        plan = {}
        for operator in graph.by_role(Role.ADJUSTABLE):
            choices = [
                (p, w) for p, w in zip(PRECISIONS, weights, strict=True) if ops.supports(operator.op_type, p, device)
            ]
            plan[operator.name] = source.choices([p for p, _ in choices], [w for _, w in choices])[0]
        plans.append(plan)
    return plans


def total(table: Mapping[str, Mapping[str, float]], plan: Mapping[str, str]) -> float:
    """Predicted increase of a plan."""
    return sum(table[name][precision] for name, precision in plan.items())


def without_pools(found: ModelStatistics) -> ModelStatistics:
    """As if max-pools never took another element."""
    signals = {
        name: dataclasses.replace(signal, flips=()) if "max_pool" in name else signal
        for name, signal in found.signals.items()
    }
    return dataclasses.replace(found, signals=signals)


def predicted(
    graph: OpGraph,
    found: ModelStatistics,
    others: ModelStatistics,
    divided: ModelStatistics,
    tables: Mapping[str, SensitivityTable],
    plan: Mapping[str, str],
) -> dict[str, float]:
    """Predicted increase of a plan in several ways."""
    return {
        POOLLESS: plan_variance(graph, without_pools(found), tables[POOLLESS], plan),
        DIVIDED: plan_variance(graph, divided, tables[DIVIDED], plan),
        "probed": plan_variance(graph, found, tables["probed"], plan),
        SUM: total(tables["probed"], plan),
        "propagated": total(tables["propagated"], plan),
        OTHERS: plan_variance(graph, others, tables[OTHERS], plan),
    }


def section(
    device: torch.device, scale: str, clock: Clock, subjects: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """One record per model; by default of all."""
    subjects = subjects or tuple(TRAINED)
    for position, name in enumerate(subjects):
        share = Clock(clock.left() / (len(subjects) - position))
        subject = subject_of(name, device, scale=scale)
        model = subject.model(0, device)
        train_briefly(subject, model, 3 if scale == "tiny" else TRAINED[name])
        _log(name, "trained")
        batch = subject.batch(10**6)
        graph = capture(model, batch, name=name)
        found = collect_statistics(model, [batch], graph=graph, probes=2 if scale == "tiny" else 16, whole_batches=True)
        others = collect_statistics(
            model, [subject.batch(10**6 + i) for i in (1, 2)], graph=graph, probes=2, whole_batches=True
        )
        divided = collect_statistics(model, [batch], graph=graph, probes=2 if scale == "tiny" else 16)
        formats = device_formats(device)
        tables = {
            "probed": sensitivities(graph, found, formats),
            POOLLESS: sensitivities(graph, without_pools(found), formats),
            DIVIDED: sensitivities(graph, divided, formats),
            "propagated": sensitivities(graph, found, formats, kind="propagated"),  # type: ignore[arg-type]
            OTHERS: sensitivities(graph, others, formats),
        }
        _log(name, "probed")
        exact, options = exact_gradient(model, batch), ApplyOptions()
        with full_precision(), torch.no_grad():
            loss = float(model(*batch))
        plans = {f"mixed {i}": plan for i, plan in enumerate(mixed_plans(graph, device, 2 if scale == "tiny" else 8))}
        plans |= {f"uniform {p}": _uniform(graph, p, device) for p in PRECISIONS[:3] if p in formats}
        plans[WIDENED] = plans["uniform BF16"]
        rows = []
        for label, plan in plans.items():
            draws = 1 if set(plan.values()) <= {"BF16", "FP32"} else 2 if scale == "tiny" else 24
            measured = added_variance(model, batch, exact, plan, graph, options, draws, widened=label == WIDENED)
            mean = statistics.fmean(measured)
            rows.append(
                {
                    "plan": label,
                    "measured": mean,
                    "standard_error": standard_error(measured) if draws > 1 else None,
                    "draws": draws,
                    "ratios": {
                        kind: value / mean
                        for kind, value in predicted(graph, found, others, divided, tables, plan).items()
                    },
                }
            )
        _log(name, "plans measured")
        for row in rows:
            if row["draws"] > 1 and not share.over():
                plan = plans[str(row["plan"])]
                seen = added_parts(model, batch, exact, plan, graph, options, 2 if scale == "tiny" else 12)
                told = plan_variance_parts(graph, found, tables["probed"], plan)
                row["parts"] = {"measured": seen, "predicted": told._asdict()}
        _log(name, "parts measured")
        singles: dict[str, dict[str, Any]] = {}
        for operator in graph.by_role(Role.ADJUSTABLE):
            for precision in PRECISIONS[:1]:
                if share.over() or not ops.supports(operator.op_type, precision, device):
                    continue
                alone = added_variance(model, batch, exact, {operator.name: precision}, graph, options, 4)
                entry = {"measured": statistics.fmean(alone)}
                entry |= {kind: table[operator.name].get(precision, 0.0) for kind, table in tables.items()}
                singles.setdefault(precision, {})[operator.name] = entry
        for row in rows:
            row["measured_alone_over_together"] = _alone(plans[str(row["plan"])], singles, float(row["measured"]))
        _log(name, "operators measured")
        noise = others.gradient_noise
        yield significant(
            {
                "model": subject.name,
                "what": subject.what,
                "trained_steps": 3 if scale == "tiny" else TRAINED[name],
                "loss": loss,
                "gradient_noise": None if noise is None else noise.variance,
                "plans": rows,
                "ranks": {
                    precision: {
                        kind: spearman([e[kind] for e in entries.values()], [e["measured"] for e in entries.values()])
                        for kind in tables
                    }
                    for precision, entries in singles.items()
                },
                "singles": singles,
            }
        )


def _log(name: str, stage: str) -> None:
    print(f"whole-model:{name}: {stage} after {time.process_time():.0f} s of the processor", flush=True)


def _uniform(graph: OpGraph, precision: str, device: torch.device) -> dict[str, str]:
    return {
        o.name: precision if ops.supports(o.op_type, precision, device) else "FP32"
        for o in graph.by_role(Role.ADJUSTABLE)
    }


def _alone(plan: Mapping[str, str], singles: Mapping[str, Mapping[str, Any]], together: float) -> float | None:
    """Sum of what was measured one operator at a time over what was measured of all together; None if any lacks."""
    low = [(name, precision) for name, precision in plan.items() if precision != "FP32"]
    if any(name not in singles.get(precision, {}) for name, precision in low):
        return None
    return float(sum(singles[precision][name]["measured"] for name, precision in low)) / together
