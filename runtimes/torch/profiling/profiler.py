"""Profiles of captured models on a device: every operator in every precision, casts, optimizer, whole iterations."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from qsync_opt.costs import CostFit, DeviceIdentity, DeviceProfile, MeasuredCost, OptimizerCost, fit_cost
from qsync_opt.errors import ModelError, UnsupportedError, first_line
from qsync_opt.io import Fields, MeasurementCache, Report, check_integer, decode, encode, reporting
from qsync_opt.kernels import KernelOptions, backend, ops
from qsync_opt.model import Operator, OpGraph, Role, TensorSpec
from qsync_opt.numerics import PrecisionFormats, formats_for, is_eight_bit
from qsync_opt.runtimes.timing import cast_pairs, edge_sizes
from qsync_opt.runtimes.torch.capture import CapturedModel, RecordedCall
from qsync_opt.runtimes.torch.execution import device_formats, under_plan
from qsync_opt.runtimes.torch.profiling.operators import OperatorBench, measure_optimizer, time_cast, time_gradient_sum
from qsync_opt.runtimes.torch.support import (
    Stopwatch,
    TrainingExample,
    device_identity,
    make_stopwatch,
    model_unchanged,
    optimizer_key,
    time_passes,
)
from qsync_opt.training import MeasuredPasses, calibrate, problem_role, uniform_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One measurement: its key in the cache, its label, and the work."""

    key: str
    label: str
    measure: Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """The measurements of one profile; `profile` describes the fields."""

    graph: OpGraph
    calls: Mapping[str, RecordedCall]
    device: torch.device
    formats: Mapping[str, PrecisionFormats]
    menu: Mapping[str, Sequence[str]]
    options: KernelOptions
    stopwatch: Stopwatch
    repeats: int
    cache: MeasurementCache

    def tasks(self) -> list[Task]:
        """All distinct measurements: operators in execution order, then casts and sums."""
        tasks: dict[str, Task] = {}

        def add(key: str, label: str, work: Callable[..., dict[str, Any]], *args: Any) -> None:
            tasks.setdefault(key, Task(key=key, label=label, measure=functools.partial(work, *args)))

        for operator in self.graph:
            for precision in self._precisions(operator):
                key = _operator_key(operator, precision)
                add(key, f"{operator.name} {precision}", self._measure_operator, operator, precision)
        for spec in edge_sizes(self.graph):
            shape = list(spec.shape)
            for source, target in cast_pairs(self.formats):
                label = f"cast {source}>{target}"
                add(f"{label} {shape}", label, self._measure_cast, source, target, spec)
            for name in self._sum_formats():
                label = f"gradient sum {name}"
                add(f"{label} {shape}", label, self._measure_gradient_sum, name, spec)
        return list(tasks.values())

    def do(self, task: Task) -> None:
        """Measure what the cache lacks."""
        if self.cache.get(task.key) is None:
            self.cache.put(task.key, task.measure())

    def _measure_operator(self, operator: Operator, precision: str) -> dict[str, Any]:
        bench = OperatorBench(operator, self.calls[operator.name], precision, self.device, self.options)
        try:
            return encode(bench.measure(self.stopwatch, self.repeats))
        except (RuntimeError, NotImplementedError) as failure:
            raise ModelError(
                f"operator {operator.name!r} cannot run by itself in {precision} on {self.device}: "
                f"{first_line(failure)}; give it the role fixed (RoleTable) to keep it in FP32"
            ) from failure

    def _measure_cast(self, source: str, target: str, spec: TensorSpec) -> dict[str, Any]:
        return {"ns": time_cast(source, target, spec, self.device, self.options, self.stopwatch, self.repeats)}

    def _measure_gradient_sum(self, name: str, spec: TensorSpec) -> dict[str, Any]:
        return {"ns": time_gradient_sum(name, spec, self.device, self.stopwatch, self.repeats)}

    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> OptimizerCost:
        """Cost of an optimizer's step; None: of AdamW over the graph's parameters."""
        if optimizer is None:
            parameters = [nn.Parameter(torch.zeros(p.spec.shape)) for p in self.graph.parameters]
            optimizer = torch.optim.AdamW(parameters or [nn.Parameter(torch.zeros(1))])
        key = f"optimizer {optimizer_key(optimizer)}"
        if (known := self.cache.get(key)) is None:
            known = encode(measure_optimizer(optimizer, self.device, self.stopwatch, self.repeats))
            self.cache.put(key, known)
        return decode(OptimizerCost, known, "measured optimizer")

    def assemble(self, identity: DeviceIdentity, optimizer: OptimizerCost) -> DeviceProfile:
        """The profile, from the cache; every task must be done."""
        casts = {f"{a}>{b}": self._fit(f"cast {a}>{b}") for a, b in cast_pairs(self.formats)}
        operators = {o.name: f"{o.signature} {problem_role(o)}" for o in self.graph}
        return DeviceProfile(
            device=identity,
            model=self.graph.name,
            fingerprint=self.graph.fingerprint(),
            options=option_values(self.options),
            formats=dict(self.formats),
            measurements={
                operators[o.name]: {p: self._cost(o, p, casts) for p in self._precisions(o)} for o in self.graph
            },
            operators=operators,
            casts=casts,
            gradient_sums={name: self._fit(f"gradient sum {name}") for name in self._sum_formats()},
            optimizer=optimizer,
        )

    def _known(self, key: str) -> dict[str, Any]:
        known = self.cache.get(key)
        assert known is not None, f"{key} was not measured"
        return known

    def _fit(self, what: str) -> CostFit:
        specs = edge_sizes(self.graph)
        keys = {f"{what} {list(spec.shape)}": spec.elements for spec in specs}
        return fit_cost((size, Fields(self._known(key), f"measured {key}").number("ns")) for key, size in keys.items())

    def _cost(self, operator: Operator, precision: str, casts: Mapping[str, CostFit]) -> MeasuredCost:
        """Measured cost, less the quantization of inputs inside an 8-bit operator, which is a cost of the edges."""
        key = _operator_key(operator, precision)
        cost = decode(MeasuredCost, self._known(key), f"measured {key}")
        if operator.role is not Role.ADJUSTABLE or not is_eight_bit(precision):
            return cost
        fit = casts[f"{self.formats[precision].output}>{precision}"]
        inside_ns = sum(fit.ns(self.graph[source].output_elements) for source in operator.inputs)
        return replace(
            cost,
            forward_ns=max(0, cost.forward_ns - inside_ns),
            host_forward_ns=max(0, cost.host_forward_ns - inside_ns),
        )

    def _precisions(self, operator: Operator) -> list[str]:
        role = problem_role(operator)
        if role is Role.FIXED:
            return ["FP32"]
        if role is Role.DEPENDENT:
            return list(self._sum_formats())
        return list(self.menu[operator.name])

    def _sum_formats(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(borders.output for borders in self.formats.values()))


def option_values(options: KernelOptions) -> dict[str, str | int | float | bool]:
    """Options that affect times, as plain values."""
    return {name: value for name, value in asdict(options).items() if name not in ("seed", "offset")}


def _operator_key(operator: Operator, precision: str) -> str:
    return f"operator {operator.signature} {problem_role(operator)} {precision}"


def measure_uniform(
    example: TrainingExample, profile: DeviceProfile, graph: OpGraph, options: KernelOptions, repeats: int
) -> dict[str, MeasuredPasses]:
    """Forward and backward time of whole iterations in each precision of a profile.

    Each precision is applied as a plan, so that the times include the interception; on a device with FP32 alone no plan
    is applied, as in training. No optimizer runs, and the model is left unchanged.
    """
    measured = {}
    with model_unchanged(example.model):
        for precision in profile.formats:
            if len(profile.formats) == 1:
                measured[precision] = MeasuredPasses(**time_passes(example, repeats))
                continue
            choices = uniform_choices(graph, profile, precision)
            plan = {operator.name: choices[operator.name] for operator in graph.by_role(Role.ADJUSTABLE)}
            with under_plan(example.model, plan, graph, options, chunked_loss=False):
                measured[precision] = MeasuredPasses(**time_passes(example, repeats))
    return measured


METHOD = 1
"""Version of the measuring method; cached measurements of other versions are not used."""


def profile(
    captured: CapturedModel,
    device: torch.device | str = "cpu",
    *,
    precisions: Sequence[str] | None = None,
    options: KernelOptions | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    example: TrainingExample | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Report | bool | None = None,
    repeats: int = 6,
    name: str | None = None,
) -> DeviceProfile:
    """Measure a captured model on a device.

    Operators of equal signature are measured once. With a cache folder, measurements of any process on an equal device
    are reused; an interrupted run continues where it stopped.

    Args:
        captured: The model, by `capture`.
        device: ``cpu`` or a CUDA device. Set the number of threads before (`torch.set_num_threads`).
        precisions: Those that plans may use; None: those of the default menu (`operator_menu`). FP32 is always among
            them.
        options: Of the 8-bit kernels, as in training.
        optimizer: Its step is timed, on a copy, over the model's parameters. None: AdamW.
        example: The model with a batch, to run whole iterations in each precision and fit the overhead of an iteration
            beyond its operators (`qsync_opt.training.calibration`). Parameters and buffers are not changed. Without it
            the overhead is zero.
        cache_dir: Folder of measurements; None keeps none.
        progress: True shows a bar on standard error, None does so if that is a terminal, False shows nothing; or a
            function that is called with (done, total, next task).
        repeats: Runs per round; rounds continue until two agree (`qsync_opt.runtimes.timing`).
        name: Of the device, instead of the hardware's, for a partition of a card.

    Returns:
        The profile; ``profile.save(path)`` writes it.

    Raises:
        UnsupportedError: The device lacks a precision, is neither cpu nor cuda, or is not there.
        ModelError: ``captured`` is no captured model, or an operator cannot run by itself.
        ProblemError: The cache folder cannot be used.

    Source: QSync profiles whole runs per precision and matches names (IPDPS 2024); measuring operators and casts
        separately, with a fitted overhead, is ours.
    """
    if not hasattr(captured, "calls"):
        raise ModelError(
            f"captured is a {type(captured).__name__}, but the calls of all operators are needed: give what "
            "capture_model returns"
        )
    device = backend.known_device(device)
    formats = selected_formats(device, precisions)
    check_integer(repeats, "repeats", minimum=1)
    options = dataclasses.replace(options or KernelOptions(), half_format=backend.half_format(device))
    identity = device_identity(device, name)
    environment = {
        "device": encode(identity),
        "options": option_values(options),
        "method": METHOD,
        "repeats": repeats,
    }
    run = ProfileRun(
        graph=captured.graph,
        calls=captured.calls,
        device=device,
        formats=formats,
        menu=operator_menu(captured.graph, device, formats, everything=precisions is not None),
        options=options,
        stopwatch=make_stopwatch(device),
        repeats=repeats,
        cache=MeasurementCache(cache_dir, environment),
    )
    tasks = run.tasks()
    total = len(tasks) + 1 + (example is not None)
    with reporting(progress, "profile") as report:
        for done, task in enumerate(tasks):
            report(done, total, task.label)
            run.do(task)
        report(len(tasks), total, "optimizer")
        result = run.assemble(identity, run.optimizer(optimizer))
        if example is not None:
            report(len(tasks) + 1, total, "whole iterations")
            measured = measure_uniform(example, result, captured.graph, options, repeats)
            result = calibrate(captured.graph, result, measured)
        report(total, total, "done")
    return result


def selected_formats(device: torch.device, precisions: Sequence[str] | None) -> dict[str, PrecisionFormats]:
    """Formats to profile: the given precisions (None: the default ones), FP32, and output formats of 8-bit operators.

    Raises:
        UnsupportedError: The device lacks a precision.
    """
    if precisions is None:
        return device_formats(device)
    available = formats_for(backend.device_precisions(device), backend.half_format(device))
    for precision in precisions:
        if precision not in available:
            raise UnsupportedError(f"{device} cannot run in {precision!r}: allowed are {', '.join(available)}")
    needed = {*precisions, "FP32"}
    needed |= {available[precision].output for precision in needed}
    return {precision: borders for precision, borders in available.items() if precision in needed}


def operator_menu(
    graph: OpGraph, device: torch.device, formats: Collection[str], *, everything: bool
) -> dict[str, tuple[str, ...]]:
    """Precisions of every adjustable operator among ``formats``, coarsest first.

    ``everything``: all that it can run in, for precisions that somebody asked for by name; else those of the default
    menu, which leaves out what was slower wherever it was measured (`ops.default_precisions_of`).
    """
    of_kind = ops.precisions_of if everything else ops.default_precisions_of
    return {
        operator.name: tuple(name for name in of_kind(operator.op_type, device) if name in formats)
        for operator in graph.by_role(Role.ADJUSTABLE)
    }
