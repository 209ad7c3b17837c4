"""Profiles of a model from its own training steps: recordings under some plans, and costs fitted to them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qsync_opt.costs import CostFit, DeviceIdentity, fit_cost
from qsync_opt.errors import NotReadyError, ProblemError, UnsupportedError, first_line
from qsync_opt.io import Report, reporting
from qsync_opt.kernels import KernelOptions, backend, ops
from qsync_opt.model import OpGraph
from qsync_opt.numerics import is_eight_bit
from qsync_opt.runtimes.torch.execution import under_plan
from qsync_opt.runtimes.torch.interception import Interception, interception_of
from qsync_opt.runtimes.torch.profiling import DTYPES, operator_menu, selected_formats
from qsync_opt.runtimes.torch.steps.compiled import record_compiled_plan
from qsync_opt.runtimes.torch.steps.recording import (
    RecordingOptions,
    Stepper,
    step_labels,
    traced_spans,
    watch_tensors,
)
from qsync_opt.runtimes.torch.support import TrainingExample, bare_model, device_identity, intervals_ns, time_mark
from qsync_opt.steps import (
    MIXED,
    StepCosts,
    StepFlow,
    StepPredictor,
    StepSample,
    covering_plans,
    fit_step_costs,
    kernel_paces,
    scaled_costs,
    with_residuals,
)

_ELEMENTS = (1 << 16, 1 << 20, 1 << 23)
_RUNS = 10


_FAR_ABOVE = 2.0
"""A step that takes this many times its host time is not bound by the host."""
_FAR_SMALLER = 16
"""Operators this many times smaller than the largest are not what memory runs out for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecords:
    """Data that `profile_steps` fits costs to: recorded steps by plan, and separately timed casts."""

    device: DeviceIdentity
    half_format: str
    samples: tuple[StepSample, ...]
    casts: Mapping[str, CostFit] = field(default_factory=dict)
    cast_host_ns: int = 0
    available: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def fit(self, graph: OpGraph) -> StepCosts:
        """The costs of all cases, with the residual of every recorded plan.

        Cases that could not be recorded for lack of memory are scaled (`qsync_opt.steps.cases`).
        """
        costs, predicted = self._fit(graph, None)
        paces = kernel_paces(self.samples, {name: time_ns for name, (time_ns, _) in predicted.items()})
        if paces and self.device.kind != "cpu":
            costs, predicted = self._fit(graph, paces)
        return scaled_costs(graph, with_residuals(costs, predicted, self.samples), self.available)

    def _fit(self, graph: OpGraph, paces: Mapping[str, float] | None) -> tuple[StepCosts, dict[str, tuple[int, int]]]:
        costs = fit_step_costs(
            graph,
            self.samples,
            self.device,
            half_format=self.half_format,
            casts=self.casts,
            cast_host_ns=self.cast_host_ns,
            paces=paces,
        )
        predictor, predicted = StepPredictor(graph, costs), {}
        for sample in self.samples:
            step = predictor.plan(sample.precisions)
            predicted[sample.name] = (predictor.steady_ns(step), predictor.memory(step).peak_bytes)
        return costs, predicted


def record_steps(
    example: TrainingExample,
    graph: OpGraph,
    optimizer: torch.optim.Optimizer,
    *,
    precisions: Sequence[str] | None = None,
    by_name: bool = True,
    mixed: int = 2,
    options: RecordingOptions | None = None,
    kernels: KernelOptions | None = None,
    progress: Report | bool | None = None,
    name: str | None = None,
    budget_s: float | None = None,
    compiled: bool = False,
) -> StepRecords:
    """Record a model's training steps under a few plans.

    Args:
        example: The model (``DistributedDataParallel`` may be around it) with a batch. Steps are trained: parameters
            and the optimizer's state change. A batch in the host's memory is copied to the device in every step.
        graph: Of the model.
        optimizer: Of the steps.
        precisions: Those that plans may use; None: those of the default menu (`operator_menu`). FP32 is always among
            them.
        by_name: Whether somebody asked for these precisions, so that every operator that can run in one gets it; False:
            of the default menu, those of the default that are among them.
        mixed: Number of plans to record beside the uniform ones.
        options: Number of steps of each.
        kernels: Options of the 8-bit kernels, as in training.
        progress: As in `profile`.
        name: Of the device, instead of the hardware's, for a partition of a card.
        budget_s: Seconds after which no further mixed plan is begun, and no part of one that does not fit; None: all
            are recorded.
        compiled: Compile the model under every plan, as one graph for the forward and one for the backward pass, inside
            ``DistributedDataParallel``, for the costs of a model that is compiled so after `apply`. Earlier
            compilations of this process are dropped.

    Returns:
        The recordings; their ``fit`` gives the costs.

    Raises:
        UnsupportedError: The device lacks a precision; or the model is compiled already, so that its steps cannot be
            charged to operators; or it cannot be compiled as one graph per pass.
        ProblemError: No compiled step could be charged to operators. A single such plan is left out with a warning, and
            cases that only it has are scaled as below.
        NotReadyError: No plan fits into the device's memory. A uniform plan that does not is recorded in parts, a few
            operators at a time; cases that do not fit even so, or for which the time does not suffice, are scaled from
            another precision and marked (`CaseCost.scaled_from`). A warning names both.

    Source: QSync and dPRO profile whole runs as well (IPDPS 2024, MLSys 2022) and match kernels by name and order;
        charging by autograd's numbers, cases, and the two queues are ours.
    """
    _refuse_compiled(example.model)
    device = example.device
    formats = selected_formats(device, precisions)
    kernels = dataclasses.replace(kernels or KernelOptions(), half_format=backend.half_format(device))
    available = operator_menu(graph, device, formats, everything=by_name and precisions is not None)
    plans = covering_plans(graph, available, mixed=mixed, half_format=kernels.half_format)
    clip_norm = None if options is None else options.clip_norm
    # Copies of the batch are not part of compiled graphs.
    stepper = Stepper(example.moved() if compiled else example, optimizer, clip_norm)
    recorder = _Recorder(stepper, graph, options, kernels, compiled)
    deadline = math.inf if budget_s is None else time.perf_counter() + budget_s
    with reporting(progress, "steps") as report:
        for done, (label, plan) in enumerate(plans.items()):
            report(done, len(plans) + 1, label)
            if not (label.startswith(MIXED) and time.perf_counter() > deadline):
                recorder.record(label, plan)
        recorder.record_lost_in_parts(available, deadline)
        if not compiled:
            recorder.time_hosts_again(deadline, lambda label: report(len(plans), len(plans) + 1, label))
        report(len(plans), len(plans) + 1, "casts")
        # A compiler fuses casts: those that were not recorded cost next to nothing.
        casts, cast_host_ns = ({}, 0) if compiled else _time_casts(device, tuple(formats), kernels)
        report(len(plans) + 1, len(plans) + 1, "done")
    return StepRecords(
        device=device_identity(device, name),
        half_format=kernels.half_format,
        samples=tuple(recorder.samples),
        casts=casts,
        cast_host_ns=cast_host_ns,
        available=available,
    )


def profile_steps(
    example: TrainingExample, graph: OpGraph, optimizer: torch.optim.Optimizer, **options: Any
) -> StepCosts:
    """Record a model's training steps under a few plans and fit the costs of all cases.

    Arguments and errors are those of `record_steps`.

    Returns:
        The costs, with the residual of every recorded plan in ``checks``.
    """
    return record_steps(example, graph, optimizer, **options).fit(graph)


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise UnsupportedError(
                f"module {name or type(module).__name__!r} is compiled: its operators are fused, so that no step can "
                "be charged to them; give the model as it is before torch.compile, and compiled=True for the costs of "
                "compiled steps"
            )


class _Recorder:
    """Records plans; uniform ones that run out of memory in parts."""

    def __init__(
        self,
        stepper: Stepper,
        graph: OpGraph,
        options: RecordingOptions | None,
        kernels: KernelOptions,
        compiled: bool,
    ) -> None:
        self._stepper, self._graph, self._options, self._kernels = stepper, graph, options, kernels
        self._compiled = compiled
        self._record = record_compiled_plan if compiled else record_plan
        flow = StepFlow(graph, kernels.half_format)
        self._signature = {operator.name: flow.signature(i) for i, operator in enumerate(graph)}
        self._met: set[tuple[str, str]] = set()
        self.samples: list[StepSample] = []
        self._lost: dict[str, Mapping[str, str]] = {}

    def record(self, label: str, plan: Mapping[str, str]) -> bool:
        """Record a plan; False if memory runs out, or if a compiled step cannot be charged to operators."""
        sample = None
        try:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                sample = self._record(self._stepper, self._graph, label, plan, self._options, self._kernels)
        except ProblemError as error:
            if not self._compiled:
                raise
            warnings.warn(f"plan {label!r} is left out: {first_line(error)}", stacklevel=2)
            self._stepper.optimizer.zero_grad()
            return False
        if sample is None:  # outside the handler: the exception's frames would keep the step's tensors
            self._stepper.optimizer.zero_grad()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._lost.setdefault(label, plan)
            return False
        self.samples.append(sample)
        self._met |= {(self._signature[name], precision) for name, precision in plan.items()}
        return True

    def time_hosts_again(self, deadline: float, report: Callable[[str], None]) -> None:
        """Time the host under every plan in further rounds; the median of all rounds counts."""
        options = self._options or RecordingOptions()
        rounds = {sample.name: [(sample.host_ns, sample.iteration_ns)] for sample in self.samples}
        for _ in range(options.rounds - 1):
            for sample in self.samples:
                if time.perf_counter() > deadline:
                    break
                if sample.iteration_ns < _FAR_ABOVE * sum(sample.host_ns.values()):
                    report(f"{sample.name}, host")
                    rounds[sample.name].append(_time_host(self._stepper, self._graph, sample, options, self._kernels))
        self.samples = [_over_rounds(sample, rounds[sample.name]) for sample in self.samples]

    def record_lost_in_parts(self, available: Mapping[str, Sequence[str]], deadline: float) -> None:
        """Record the uniform plans that ran out of memory a few operators at a time, on top of the smallest plan.

        No part is begun that would end after ``deadline`` on ``time.perf_counter``'s clock, except until one in FP32
        and one in the 16-bit format fit, from which costs of others are scaled.

        Raises:
            NotReadyError: Nothing was recorded at all.
        """
        if not self._lost:
            return
        lost = dict(self._lost)
        text = f"not enough memory on {self._stepper.device} to record {', '.join(lost)}"
        if not self.samples:
            raise NotReadyError(f"{text}, so nothing was recorded; use a smaller batch")
        base = min(self.samples, key=lambda sample: sample.memory.peak_bytes).precisions
        uniform = {label: plan for label, plan in lost.items() if not label.startswith(MIXED)}
        needed = [label for label, plan in uniform.items() if set(plan.values()) <= {"FP32", self._kernels.half_format}]
        for label in dict.fromkeys([*needed, *uniform]):
            self._record_parts(label, uniform[label], base, deadline, one=label in needed)
        missing = {
            f"{name} in {precision}"
            for name, precisions in available.items()
            for precision in precisions
            if (self._signature[name], precision) not in self._met
        }
        parts = sum(", part " in sample.name for sample in self.samples)
        if parts:
            text += f"; {parts} parts of them were recorded instead"
        if missing:
            shown = sorted(missing)[:3] + ["..."] * (len(missing) > 3)
            text += f"; {len(missing)} costs are scaled from other precisions ({', '.join(shown)})"
        warnings.warn(text, stacklevel=4)

    def _record_parts(
        self, label: str, plan: Mapping[str, str], base: Mapping[str, str], deadline: float, *, one: bool
    ) -> None:
        """Record parts of a plan until the deadline; ``one``: in any case until one fits."""
        size = {name: self._elements(name) for name in plan}
        least = max(size.values()) / _FAR_SMALLER
        small, large = [n for n in plan if size[n] < least], [n for n in plan if size[n] >= least]
        # The whole does not fit: begin with what is not to blame, else with halves.
        waiting = [part for part in (small, large[: len(large) // 2], large[len(large) // 2 :]) if part]
        number, took_s = 0, 0.0
        while waiting and (time.perf_counter() + took_s <= deadline or one):
            part, began = waiting.pop(0), time.perf_counter()
            if all((self._signature[name], plan[name]) in self._met for name in part):
                continue
            number += 1
            if self.record(f"{label}, part {number}", {**base, **{name: plan[name] for name in part}}):
                one, took_s = False, time.perf_counter() - began
            else:
                half = len(part) // 2
                waiting[:0] = [part[:half], part[half:]] if half else []

    def _elements(self, name: str) -> int:
        """Elements of an operator's inputs and result."""
        operator = self._graph[name]
        return sum(self._graph[tensor].output_elements for tensor in (name, *operator.inputs))


def record_plan(
    stepper: Stepper,
    graph: OpGraph,
    label: str,
    plan: Mapping[str, str],
    options: RecordingOptions | None = None,
    kernels: KernelOptions | None = None,
) -> StepSample:
    """Record steps under one plan, which is applied for that time; they train the model."""
    model, options = stepper.example.model, options or RecordingOptions()
    with _applied(model, graph, plan, kernels) as interception:
        may_rest, interception.may_rest = interception.may_rest, None
        for _ in range(options.warm_up - 1):
            stepper.step()
        outputs, kept = watch_tensors(stepper, graph)  # warms up too
        measured = stepper.measure(options.repeats)
        with step_labels(model, graph):
            spans = traced_spans(stepper, options.traced, memory=False)
            memory = traced_spans(stepper, 1, memory=True)
        sample = StepSample(
            name=label,
            precisions=dict(plan),
            outputs=outputs,
            spans=spans,
            memory=memory,
            kept=kept,
            **measured,
        )
        waits_for_device = sample.iteration_ns >= _FAR_ABOVE * sum(sample.host_ns.values())
        if set(plan.values()) != {"FP32"} or waits_for_device:  # a step at rest takes as long
            return sample
        interception.may_rest = may_rest
        stepper.step()
        stepper.step()
        phases, _ = stepper.host_ns(options.repeats)
        iteration_ns = statistics.median(stepper.paced_ns(options.repeats))
        return dataclasses.replace(sample, resting_ns=sum(phases.values()), iteration_ns=iteration_ns)


def _time_host(
    stepper: Stepper, graph: OpGraph, sample: StepSample, options: RecordingOptions, kernels: KernelOptions
) -> tuple[dict[str, float], float]:
    """Nanoseconds on the host by phase under a plan that was recorded before, and of consecutive steps."""
    with _applied(stepper.example.model, graph, sample.precisions, kernels) as interception:
        interception.may_rest = None
        for _ in range(options.warm_up):
            stepper.step()
        phases, _ = stepper.host_ns(options.repeats)
        return phases, statistics.median(stepper.paced_ns(options.repeats))


@contextlib.contextmanager
def _applied(
    model: nn.Module, graph: OpGraph, plan: Mapping[str, str], kernels: KernelOptions | None
) -> Iterator[Interception]:
    """Apply a plan within the block.

    A plan of FP32 alone may rest. For its costs within other plans, the block sets ``may_rest`` to None.
    """
    with under_plan(model, dict(plan), graph, kernels, chunked_loss=False):
        interception = interception_of(bare_model(model))
        assert interception is not None
        yield interception


def _over_rounds(sample: StepSample, rounds: Sequence[tuple[Mapping[str, float], float]]) -> StepSample:
    return dataclasses.replace(
        sample,
        host_ns={phase: statistics.median(host[phase] for host, _ in rounds) for phase in sample.host_ns},
        host_rounds_ns=tuple(sum(host.values()) for host, _ in rounds),
        # The steps of a plan of FP32 alone were timed at rest, unlike these rounds.
        iteration_ns=sample.iteration_ns if sample.resting_ns else statistics.median(pace for _, pace in rounds),
    )


def _time_casts(device: torch.device, formats: Sequence[str], kernels: KernelOptions) -> tuple[dict[str, CostFit], int]:
    sources = [name for name in ("BF16", "FP16", "FP32") if name in formats]
    targets = [*sources, *filter(is_eight_bit, formats)]
    pairs = [(a, b) for a, b in itertools.product(sources, targets) if a != b]
    fits = {}
    host: list[float] = []
    for source, target in pairs:
        samples = []
        for elements in _ELEMENTS:
            x = torch.randn(elements // 256, 256, device=device).to(DTYPES[source])
            device_ns, host_ns = _run_often(lambda x=x, target=target: ops.cast(x, target, kernels), device)  # type: ignore[misc]
            samples.append((elements, max(1.0, device_ns)))
            if elements == _ELEMENTS[0]:
                host.append(host_ns)
        fits[f"{source}>{target}"] = fit_cost(samples)
    return fits, round(statistics.median(host)) if host and device.type != "cpu" else 0


def _run_often(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Time of one run on the device with a full queue, and on the host."""
    work()
    if device.type != "cuda":
        start = time.perf_counter_ns()
        for _ in range(_RUNS):
            work()
        return (time.perf_counter_ns() - start) / _RUNS, 0.0
    torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # a head start for the host
    first = time_mark(device)
    for _ in range(_RUNS):
        work()
    last = time_mark(device)
    host_ns = (time.perf_counter_ns() - start) / _RUNS
    torch.cuda.synchronize(device)
    return intervals_ns((first, last))[0] / _RUNS, host_ns
