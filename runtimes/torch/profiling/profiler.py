"""Profiles of captured models on a device: every operator in every precision, casts, optimizer, whole iterations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from qsync_opt.costs import (
    MEASURED_OPTION,
    CostFit,
    DeviceIdentity,
    DeviceProfile,
    MeasuredCost,
    OptimizerCost,
    fit_cost,
    scale_costs,
)
from qsync_opt.errors import ModelError, NotReadyError, ProblemError, UnsupportedError, first_line
from qsync_opt.io import Fields, MeasurementCache, Report, check_integer, check_number, decode, encode, reporting
from qsync_opt.kernels import KernelOptions, backend, ops
from qsync_opt.model import Operator, OpGraph, Role, TensorSpec
from qsync_opt.numerics import PrecisionFormats, formats_for, is_eight_bit
from qsync_opt.runtimes.timing import Rounds, cast_pairs, edge_sizes, warn_if_busy
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
    synchronize,
    time_passes,
)
from qsync_opt.training import MeasuredPasses, calibrate, problem_role, uniform_choices

_LOGGER = logging.getLogger(__name__)
_PASSES_SHARE = 0.5
"""Most of a time limit that is reserved for whole iterations."""
_LEAST_RUNS = 6
"""Runs that the shortest measurement of an operator takes: memory, one to warm up, and one that counts."""


_LEAST_ITERATIONS = 2
"""Whole iterations that the shortest measurement takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One measurement: its key in the cache, its label, and the work.

    ``share`` is the expected part of an iteration, in units of its own; ``needed`` tasks are never left out.
    """

    key: str
    label: str
    measure: Callable[[Rounds], dict[str, Any]]
    share: float
    needed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """The measurements of one profile; `profile` describes the fields.

    Attributes:
        results: Measurement by key.
        disagreements: Label to the distance between the rounds of measurements that did not settle.
        left_out: Keys for which time or memory did not suffice.
        cut: Labels of those that had fewer rounds than they would have had.
    """

    graph: OpGraph
    calls: Mapping[str, RecordedCall]
    device: torch.device
    formats: Mapping[str, PrecisionFormats]
    menu: Mapping[str, Sequence[str]]
    options: KernelOptions
    stopwatch: Stopwatch
    repeats: int
    cache: MeasurementCache
    operators: tuple[Operator, ...]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    disagreements: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)

    def tasks(self) -> list[Task]:
        """All distinct measurements: operators in execution order, then casts and sums, then the optimizer's step."""
        tasks: dict[str, Task] = {}
        counts = Counter(operator.signature for operator in self.graph)
        speed = _operations_per_byte(self.device)

        def add(
            key: str, label: str, share: float, work: Callable[..., dict[str, Any]], *args: Any, needed: bool
        ) -> None:
            measure = functools.partial(work, *args)
            tasks.setdefault(key, Task(key=key, label=label, measure=measure, share=share, needed=needed))

        for operator in self.operators:
            share = counts[operator.signature] * max(operator.num_bytes, operator.flops / speed)
            for precision in self._precisions(operator):
                key = _operator_key(operator, precision)
                add(
                    key,
                    f"{operator.name} {precision}",
                    share,
                    self._measure_operator,
                    operator,
                    precision,
                    needed=False,
                )
        specs = edge_sizes(self.graph)
        moved = 4 * sum(operator.output_elements for operator in self.graph) / max(1, len(specs))
        for spec in specs:
            needed = spec in (specs[0], specs[-1])
            shape = list(spec.shape)
            for source, target in cast_pairs(self.formats):
                label = f"cast {source}>{target}"
                add(f"{label} {shape}", label, moved, self._measure_cast, source, target, spec, needed=needed)
            for name in self._sum_formats():
                label = f"gradient sum {name}"
                add(f"{label} {shape}", label, moved, self._measure_gradient_sum, name, spec, needed=needed)
        return list(tasks.values())

    def optimizer_task(self, optimizer: torch.optim.Optimizer | None) -> Task:
        """The step of an optimizer; None: of AdamW over the graph's parameters."""
        if optimizer is None:
            parameters = [nn.Parameter(torch.zeros(p.spec.shape)) for p in self.graph.parameters]
            optimizer = torch.optim.AdamW(parameters or [nn.Parameter(torch.zeros(1))])

        def measure(rounds: Rounds) -> dict[str, Any]:
            return encode(measure_optimizer(optimizer, self.device, self.stopwatch, self.repeats, rounds))

        moved = sum(4 * p.numel() for group in optimizer.param_groups for p in group["params"])
        key = f"optimizer {optimizer_key(optimizer)}"
        return Task(key=key, label="optimizer", measure=measure, share=moved, needed=True)

    def do(self, task: Task, deadline: float = math.inf) -> Rounds:
        """Measure what the cache lacks; what a deadline cut short does not go into the cache.

        What memory does not suffice for is left out.
        """
        rounds = Rounds(deadline=deadline)
        known = self.cache.get(task.key)
        if known is None:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                known = task.measure(rounds)
            if known is None:  # outside of the handler, whose frames would keep the tensors
                self.left_out.append(task.key)
                torch.cuda.empty_cache()
                return rounds
            if not rounds.was_cut:
                self.cache.put(task.key, known)
        if rounds.disagreement:
            self.disagreements[task.label] = rounds.disagreement
        if rounds.was_cut:
            self.cut.append(task.label)
        self.results[task.key] = known
        return rounds

    def do_until(self, tasks: Sequence[Task], deadline: float, report: Callable[[str], None]) -> None:
        """Do the tasks that are needed, then those that an iteration spends most on, as long as the time suffices.

        Time that is left is shared out, half of it evenly and half in proportion to the tasks' shares.
        """
        ordered = sorted(tasks, key=lambda task: (not task.needed, -task.share))
        largest = next((task for task in ordered if task.key.startswith("operator ")), None)
        left = sum(task.share for task in ordered)
        slowest = 0.0  # seconds of a run per unit of share
        for done, task in enumerate(ordered):
            report(task.label)
            now = time.monotonic()
            expected_s = _LEAST_RUNS * slowest * task.share
            free = task.needed or task is largest or self.cache.get(task.key) is not None
            if not free and now + expected_s > deadline:
                self.left_out.append(task.key)
            else:
                own_part = 0.5 / (len(ordered) - done) + 0.5 * task.share / max(left, 1e-9)
                own_s = max(0.0, deadline - now) * own_part
                rounds = self.do(task, now + own_s)
                if not task.needed:
                    slowest = max(slowest, rounds.run_s / max(1.0, task.share))
            left -= task.share

    def _measure_operator(self, operator: Operator, precision: str, rounds: Rounds) -> dict[str, Any]:
        bench = OperatorBench(operator, self.calls[operator.name], precision, self.device, self.options)
        try:
            return encode(bench.measure(self.stopwatch, self.repeats, rounds))
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as failure:
            raise ModelError(
                f"operator {operator.name!r} cannot run by itself in {precision} on {self.device}: "
                f"{first_line(failure)}; give it the role fixed (RoleTable) to keep it in FP32"
            ) from failure

    def _measure_cast(self, source: str, target: str, spec: TensorSpec, rounds: Rounds) -> dict[str, Any]:
        return {"ns": time_cast(source, target, spec, self.device, self.options, self.stopwatch, self.repeats, rounds)}

    def _measure_gradient_sum(self, name: str, spec: TensorSpec, rounds: Rounds) -> dict[str, Any]:
        return {"ns": time_gradient_sum(name, spec, self.device, self.stopwatch, self.repeats, rounds)}

    def assemble(self, identity: DeviceIdentity, optimizer: Task) -> DeviceProfile:
        """The profile; costs of operators that were left out are scaled from the others.

        Raises:
            NotReadyError: Memory did not suffice for a step of the optimizer.
        """
        if optimizer.key not in self.results:
            raise NotReadyError(
                f"not enough memory on {self.device} for a step of the optimizer, so that the model cannot be trained "
                "there; free memory, or use an optimizer with less state"
            )
        casts = {f"{a}>{b}": self._fit(f"cast {a}>{b}") for a, b in cast_pairs(self.formats)}
        pairs = [(operator, precision) for operator in self.operators for precision in self._precisions(operator)]
        measured = {(o.name, p): self._cost(o, p, casts) for o, p in pairs if _operator_key(o, p) in self.results}
        missing = [(o.name, p) for o, p in pairs if (o.name, p) not in measured]
        costs = measured | (scale_costs(self.graph, missing, measured) if missing else {})
        operators = {o.name: f"{o.signature} {problem_role(o)}" for o in self.operators}
        return DeviceProfile(
            device=identity,
            model=self.graph.name,
            fingerprint=self.graph.fingerprint(),
            options=option_values(self.options),
            formats=dict(self.formats),
            measurements={
                operators[o.name]: {p: costs[o.name, p] for p in self._precisions(o)} for o in self.operators
            },
            operators=operators,
            casts=casts,
            gradient_sums={name: self._fit(f"gradient sum {name}") for name in self._sum_formats()},
            optimizer=decode(OptimizerCost, self.results[optimizer.key], "measured optimizer"),
        )

    def _fit(self, what: str) -> CostFit:
        keys = {f"{what} {list(spec.shape)}": spec.elements for spec in edge_sizes(self.graph)}
        done = {key: size for key, size in keys.items() if key in self.results}
        return fit_cost((size, Fields(self.results[key], f"measured {key}").number("ns")) for key, size in done.items())

    def _cost(self, operator: Operator, precision: str, casts: Mapping[str, CostFit]) -> MeasuredCost:
        """Measured cost, less the quantization of inputs inside an 8-bit operator, which is a cost of the edges."""
        key = _operator_key(operator, precision)
        cost = decode(MeasuredCost, self.results[key], f"measured {key}")
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
    example: TrainingExample,
    profile: DeviceProfile,
    graph: OpGraph,
    options: KernelOptions,
    repeats: int,
    deadline: float = math.inf,
) -> tuple[dict[str, MeasuredPasses], dict[str, float]]:
    """Forward and backward time of whole iterations in each precision of a profile, FP32 first.

    A precision for which memory, or the time until ``deadline``, does not suffice is left out. Beside the times, those
    that did not settle: precision to the distance between rounds.

    Each precision is applied as a plan, so that the times include the interception; on a device with FP32 alone no plan
    is applied, as in training. No optimizer runs, and the model is left unchanged.
    """
    measured: dict[str, MeasuredPasses] = {}
    disagreements: dict[str, float] = {}
    slowest_s = 0.0
    finest_first = sorted(profile.formats, key=lambda precision: precision != "FP32")
    with model_unchanged(example.model):
        for done, precision in enumerate(finest_first):
            now = time.monotonic()
            if now + _LEAST_ITERATIONS * slowest_s > deadline:
                continue
            rounds = Rounds(deadline=now + (deadline - now) / (len(finest_first) - done))
            choices = uniform_choices(graph, profile, precision)
            plan = {operator.name: choices[operator.name] for operator in graph.by_role(Role.ADJUSTABLE)}
            applied = under_plan(example.model, plan, graph, options, chunked_loss=False)
            with applied if len(profile.formats) > 1 else contextlib.nullcontext():
                passes = _passes_that_fit(example, repeats, rounds)
            if passes is None:
                _LOGGER.warning("memory does not suffice for whole iterations in %s, which are left out", precision)
                continue
            measured[precision] = MeasuredPasses(**passes)
            slowest_s = max(slowest_s, rounds.run_s)
            if rounds.disagreement:
                disagreements[f"whole iterations in {precision}"] = rounds.disagreement
    return {precision: measured[precision] for precision in profile.formats if precision in measured}, disagreements


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
    seconds: float | None = None,
    name: str | None = None,
    operators: Collection[str] | None = None,
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
        seconds: Time for all of it; None: as long as it takes. What takes the largest part of an iteration is measured
            first, with fewer rounds if need be; costs of operators for which the time does not suffice are scaled from
            measured ones (`qsync_opt.costs.scale_costs`), and the profile says so. One run of the largest operator,
            two casts of each kind and two steps of the optimizer are measured in any case.
        name: Of the device, instead of the hardware's, for a partition of a card.
        operators: Those to measure, such as `qsync_opt.training.choose_profiles` names; None: all. The profile then has
            no others, and `qsync_opt.costs.learned.learned_profile` fills the holes.

    Returns:
        The profile; ``profile.save(path)`` writes it. Its option ``measured`` says what a limit left out. A warning is
        logged if rounds disagree because the machine is busy.

    Raises:
        UnsupportedError: The device lacks a precision, is neither cpu nor cuda, or is not there.
        ModelError: ``captured`` is no captured model, or an operator cannot run by itself.
        ProblemError: The cache folder cannot be used, or both ``operators`` and ``example`` are given.
        NotReadyError: Memory does not suffice for a step of the optimizer. What else it does not suffice for is scaled
            as above.

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
    if seconds is not None:
        check_number(seconds, "seconds")
    end = math.inf if seconds is None else time.monotonic() + seconds
    options = dataclasses.replace(options or KernelOptions(), half_format=backend.half_format(device))
    identity = device_identity(device, name)
    environment = {
        "device": encode(identity),
        "options": option_values(options),
        "method": METHOD,
        "repeats": repeats,
    }
    if operators is not None and example is not None:
        raise ProblemError("whole iterations need all operators: give example or operators, not both")
    chosen = tuple(captured.graph) if operators is None else tuple(captured.graph[o] for o in dict.fromkeys(operators))
    run = ProfileRun(
        operators=chosen,
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
    step = run.optimizer_task(optimizer)
    tasks = [*run.tasks(), step]
    total = len(tasks) + (example is not None)
    busy: dict[str, float] = {}
    with reporting(progress, "profile") as report:
        if seconds is None:
            for done, task in enumerate(tasks):
                report(done, total, task.label)
                run.do(task)
        else:
            numbers = iter(range(total))
            reserve_s = 0.0 if example is None else _passes_s(example, len(formats), repeats, seconds)
            run.do_until(tasks, end - reserve_s, lambda label: report(next(numbers), total, label))
        result = run.assemble(identity, step)
        measured: dict[str, MeasuredPasses] = {}
        if example is not None:
            report(total - 1, total, "whole iterations")
            measured, busy = measure_uniform(example, result, captured.graph, options, repeats, end)
            result = calibrate(captured.graph, result, measured)
        report(total, total, "done")
    warn_if_busy({**run.disagreements, **busy}, total)
    if not (run.left_out or run.cut or (example is not None and len(measured) < len(formats))):
        return result
    note = _limited(run, tasks, seconds, None if example is None else tuple(measured), len(formats))
    _LOGGER.info("%s", note)
    return replace(result, options={**result.options, MEASURED_OPTION: note})


def _passes_s(example: TrainingExample, precisions: int, repeats: int, seconds: float) -> float:
    """Seconds to reserve for whole iterations, from one of them."""
    began = time.monotonic()
    with model_unchanged(example.model):
        if _passes_that_fit(example, 1, Rounds(deadline=began)) is None:
            return _PASSES_SHARE * seconds
    pass_s = (time.monotonic() - began) / _LEAST_ITERATIONS
    return min(_PASSES_SHARE * seconds, 3 * repeats * precisions * pass_s)


def _passes_that_fit(example: TrainingExample, repeats: int, rounds: Rounds) -> dict[str, int] | None:
    """What `time_passes` returns; None where memory ran out."""
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        return time_passes(example, repeats, rounds)
    # Outside of the handler, whose frames would keep the tensors of the pass.
    example.model.zero_grad()
    if example.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _limited(
    run: ProfileRun, tasks: Sequence[Task], seconds: float | None, passes: tuple[str, ...] | None, precisions: int
) -> str:
    """What a limit of time or memory left out, in words."""
    shares = {task.key: task.share for task in tasks}
    part = 1.0 - sum(shares[key] for key in run.left_out) / max(1e-9, sum(shares.values()))
    within = "" if seconds is None else f", in {seconds:g} s"
    text = f"operator by operator{within}: {len(tasks) - len(run.left_out)} of {len(tasks)} measurements"
    if run.left_out:
        text += f", about {part:.0%} of the time"
        if any(key.startswith("operator ") for key in run.left_out):
            text += "; other operators are scaled from a measured one of like kind and size"
    if run.cut:
        text += f"; {len(run.cut)} with fewer rounds than without a limit"
    if passes is not None and len(passes) < precisions:
        text += f"; whole iterations in {', '.join(passes)} only" if passes else "; no whole iterations"
    return text


def _operations_per_byte(device: torch.device) -> float:
    """FP32 operations that the device does in the time in which it moves a byte, from one product and one copy."""
    size = 512
    matrix = torch.randn(size, size, device=device)
    numbers = torch.randn(2**22, device=device)

    def seconds(work: Callable[[], Any]) -> float:
        times_s = []
        for _ in range(3):
            synchronize(device)
            began = time.perf_counter()
            work()
            synchronize(device)
            times_s.append(time.perf_counter() - began)
        return min(times_s)

    operations = 2 * size**3 / seconds(lambda: matrix @ matrix)
    moved = 2 * 4 * numbers.numel() / seconds(numbers.clone)
    return operations / moved


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
