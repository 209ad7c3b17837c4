"""One run of the profiler: what there is to measure, measuring it through the cache, and putting it together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from qsync_opt.costs.costs import CostFit, MeasuredCost, fit_cost
from qsync_opt.costs.profile import DeviceIdentity, DeviceProfile, OptimizerCost
from qsync_opt.errors import ModelError, first_line
from qsync_opt.io.cache import MeasurementCache
from qsync_opt.io.codec import Fields
from qsync_opt.kernels import ops
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.model.graph import Operator, OpGraph, Role, TensorSpec
from qsync_opt.numerics.formats import PrecisionFormats, number_format
from qsync_opt.runtimes.edges import cast_pairs, edge_sizes
from qsync_opt.runtimes.torch.capture.calls import RecordedCall
from qsync_opt.runtimes.torch.profiling.extra_bench import measure_optimizer, time_cast, time_gradient_sum
from qsync_opt.runtimes.torch.profiling.operators import OperatorBench
from qsync_opt.runtimes.torch.support.optimizers import kind_of
from qsync_opt.runtimes.torch.support.timing import Stopwatch
from qsync_opt.training.pricing import problem_role


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
                return bench.measure(self.stopwatch, self.repeats).to_json()
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
            known = asdict(measure_optimizer(optimizer, self.device, self.stopwatch, self.repeats))
            self.cache.put(key, known)
        return OptimizerCost.from_fields(Fields(known, "measured optimizer"))

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

    def _known(self, key: str) -> Fields:
        known = self.cache.get(key)
        assert known is not None, f"{key} was not measured"
        return Fields(known, f"measured {key}")

    def _fit(self, what: str) -> CostFit:
        specs = edge_sizes(self.graph)
        return fit_cost((spec.elements, self._known(f"{what} {list(spec.shape)}").number("ns")) for spec in specs)

    def _cost(self, operator: Operator, precision: str, casts: Mapping[str, CostFit]) -> MeasuredCost:
        """Measured cost; what the quantization of inputs takes inside an 8-bit operator is taken off: edges have it."""
        cost = MeasuredCost.from_fields(self._known(_operator_key(operator, precision)))
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
