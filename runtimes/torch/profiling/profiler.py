"""Profile a captured model on a device: every operator in every precision, casts, optimizer, whole iterations."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from qsync_opt.costs import CostFit, DeviceIdentity, DeviceProfile, MeasuredCost, OptimizerCost, fit_cost
from qsync_opt.errors import ModelError, UnsupportedError, first_line
from qsync_opt.io import Fields, MeasurementCache, Report, check_integer, decode, encode, reporting
from qsync_opt.kernels import KernelOptions, backend, ops
from qsync_opt.model import Operator, OpGraph, Role, TensorSpec
from qsync_opt.numerics import PrecisionFormats, number_format
from qsync_opt.runtimes.timing import cast_pairs, edge_sizes
from qsync_opt.runtimes.torch.capture import RecordedCall
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, device_formats, undo
from qsync_opt.runtimes.torch.profiling.operators import OperatorBench, measure_optimizer, time_cast, time_gradient_sum
from qsync_opt.runtimes.torch.support import (
    Stopwatch,
    TrainingExample,
    identify,
    kind_of,
    make_stopwatch,
    model_unchanged,
    time_passes,
)
from qsync_opt.training import MeasuredPasses, calibrate, problem_role, uniform_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One measurement: an operator in a precision, a cast, or a sum of gradients in a format."""

    key: str
    label: str
    operator: Operator | None = None
    precision: str = ""
    pair: tuple[str, str] | None = None
    spec: TensorSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """What a profile is measured with; `profiler.profile` describes the fields."""

    graph: OpGraph
    calls: Mapping[str, RecordedCall]
    device: torch.device
    formats: Mapping[str, PrecisionFormats]
    options: KernelOptions
    stopwatch: Stopwatch
    repeats: int
    cache: MeasurementCache

    def tasks(self) -> list[Task]:
        """All measurements that differ: operators in execution order, then casts and sums."""
        tasks: dict[str, Task] = {}
        for operator in self.graph:
            for precision in self._precisions(operator):
                key = _operator_key(operator, precision)
                label = f"{operator.name} {precision}"
                tasks.setdefault(key, Task(key=key, label=label, operator=operator, precision=precision))
        for spec in edge_sizes(self.graph):
            for pair in cast_pairs(self.formats):
                key = f"cast {pair[0]}>{pair[1]} {list(spec.shape)}"
                tasks[key] = Task(key=key, label=f"cast {pair[0]}>{pair[1]}", pair=pair, spec=spec)
            for name in self._sum_formats():
                key = f"gradient sum {name} {list(spec.shape)}"
                tasks[key] = Task(key=key, label=f"gradient sum {name}", precision=name, spec=spec)
        return list(tasks.values())

    def do(self, task: Task) -> None:
        """Measure unless the cache has it."""
        if self.cache.get(task.key) is None:
            self.cache.put(task.key, self._measure(task))

    def _measure(self, task: Task) -> dict[str, Any]:
        if task.operator is not None:
            call = self.calls[task.operator.name]
            bench = OperatorBench(task.operator, call, task.precision, self.device, self.options)
            try:
                return encode(bench.measure(self.stopwatch, self.repeats))
            except (RuntimeError, NotImplementedError) as failure:
                raise ModelError(
                    f"operator {task.operator.name!r} cannot run by itself in {task.precision} on {self.device}: "
                    f"{first_line(failure)}; give it the role fixed (RoleTable) to keep it in FP32"
                ) from failure
        assert task.spec is not None
        if task.pair is not None:
            source, target = task.pair
            time_ns = time_cast(source, target, task.spec, self.device, self.options, self.stopwatch, self.repeats)
        else:
            time_ns = time_gradient_sum(task.precision, task.spec, self.device, self.stopwatch, self.repeats)
        return {"ns": time_ns}

    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> OptimizerCost:
        """Cost of an optimizer's step; of AdamW over the graph's parameters if there is none."""
        if optimizer is None:
            parameters = [nn.Parameter(torch.zeros(p.spec.shape)) for p in self.graph.parameters]
            optimizer = torch.optim.AdamW(parameters or [nn.Parameter(torch.zeros(1))])
        groups = [
            [[list(p.shape) for p in group["params"]], {k: repr(v) for k, v in group.items() if k != "params"}]
            for group in optimizer.param_groups
        ]
        digest = hashlib.sha256(json.dumps(groups, sort_keys=True).encode()).hexdigest()[:24]
        key = f"optimizer {kind_of(optimizer)} {digest}"
        if (known := self.cache.get(key)) is None:
            known = encode(measure_optimizer(optimizer, self.device, self.stopwatch, self.repeats))
            self.cache.put(key, known)
        return decode(OptimizerCost, known, "measured optimizer")

    def assemble(self, identity: DeviceIdentity, optimizer: OptimizerCost) -> DeviceProfile:
        """Put the profile together from the cache; every task must be done."""
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
        """Measured cost; what the quantization of inputs takes inside an 8-bit operator is taken off: edges have it."""
        key = _operator_key(operator, precision)
        cost = decode(MeasuredCost, self._known(key), f"measured {key}")
        if operator.role is not Role.ADJUSTABLE or number_format(precision).bits > 8:
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
        return [name for name in self.formats if ops.supports(operator.op_type, name, self.device)]

    def _sum_formats(self) -> tuple[str, ...]:
        """Formats that results, and gradients of results, can have."""
        return tuple(dict.fromkeys(borders.output for borders in self.formats.values()))


def option_values(options: KernelOptions) -> dict[str, str | int | float | bool]:
    """Options that times depend on, as plain values."""
    return {name: value for name, value in asdict(options).items() if name not in ("seed", "offset")}


def _operator_key(operator: Operator, precision: str) -> str:
    return f"operator {operator.signature} {problem_role(operator)} {precision}"


def measure_uniform(
    example: TrainingExample, profile: DeviceProfile, graph: OpGraph, options: KernelOptions, repeats: int
) -> dict[str, MeasuredPasses]:
    """Forward and backward time of whole iterations in each precision of a profile.

    Each precision is applied as a plan, so that interception is in the times; on a device that has FP32 alone nothing
    is applied, because nothing would be in training. No optimizer runs.

    Args:
        example: The model and a batch; parameters, gradients, buffers and random state are put back.
        profile: Says which precisions there are.
        graph: The captured model.
        options: Of the 8-bit kernels.
        repeats: Iterations per precision that count.
    """
    measured = {}
    with model_unchanged(example.model):
        for precision in profile.formats:
            if len(profile.formats) == 1:
                measured[precision] = MeasuredPasses(**time_passes(example, repeats))
                continue
            choices = uniform_choices(graph, profile, precision)
            plan = {operator.name: choices[operator.name] for operator in graph.by_role(Role.ADJUSTABLE)}
            apply(example.model, plan, graph=graph, options=ApplyOptions(kernels=options))
            try:
                measured[precision] = MeasuredPasses(**time_passes(example, repeats))
            finally:
                undo(example.model)
    return measured


class Captured(Protocol):
    """What is profiled: a graph, and the call of each of its operators (a ``CapturedModel`` has both)."""

    @property
    def graph(self) -> OpGraph:
        """The operators."""

    @property
    def calls(self) -> Mapping[str, RecordedCall]:
        """Operator to recorded call."""


METHOD = 1
"""Version of the way of measuring; measurements made in another way are not taken from the cache."""


def profile(
    captured: Captured,
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

    Operators of equal signature are measured once. With a cache folder, what was measured before on an equal device,
    by this or any other process, is not measured again; a run that was interrupted goes on where it stopped.

    Args:
        captured: The model, by `capture`.
        device: ``cpu`` or a CUDA device. Set the number of threads before (`torch.set_num_threads`).
        precisions: Those that plans may use; None: all of the device. FP32 is always among them.
        options: Of the 8-bit kernels; as they will be used in training.
        optimizer: Whose step to time, over the model's parameters; a copy is stepped. None: AdamW.
        example: The model with a batch. With it whole iterations are run in each precision, and what an iteration
            costs beyond its operators is fitted to them (`qsync_opt.training.calibration`). Parameters and buffers are
            not changed. Without it that overhead is left at zero.
        cache_dir: Folder of measurements; None keeps none.
        progress: True shows a bar on standard error, None does so if that is a terminal, False shows nothing; or a
            function that is called with (done, total, what comes next).
        repeats: Runs per round; there are rounds until two agree (`qsync_opt.runtimes.timing`).
        name: Of the device, where that of the hardware does not tell it from others (a partition of a card).

    Returns:
        The profile; ``profile.save(path)`` writes it.

    Raises:
        UnsupportedError: The device has no such precision, is neither cpu nor cuda, or is not there.
        ModelError: What is given is no captured model, or an operator cannot run by itself.
        ProblemError: The cache folder cannot be used.

    Source: QSync profiles whole runs per precision and matches names (IPDPS 2024); measuring each operator by itself,
        with casts apart and a fitted overhead, is ours.
    """
    if not hasattr(captured, "calls"):
        raise ModelError(
            f"captured is a {type(captured).__name__}, but the calls of all operators are needed: give what "
            "capture_model returns"
        )
    device = backend.known_device(device)
    formats = wanted_formats(device, precisions)
    check_integer(repeats, "repeats", minimum=1)
    options = dataclasses.replace(options or KernelOptions(), half_format=backend.half_format(device))
    identity = identify(device, name)
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


def wanted_formats(device: torch.device, precisions: Sequence[str] | None) -> dict[str, PrecisionFormats]:
    """Formats to profile: those asked for (None: all of the device), FP32, and what 8-bit operators answer in.

    Raises:
        UnsupportedError: The device lacks a precision.
    """
    available = device_formats(device)
    if precisions is None:
        return available
    for precision in precisions:
        if precision not in available:
            raise UnsupportedError(f"{device} cannot run in {precision!r}: allowed are {', '.join(available)}")
    needed = {*precisions, "FP32"}
    needed |= {available[precision].output for precision in needed}
    return {precision: borders for precision, borders in available.items() if precision in needed}
