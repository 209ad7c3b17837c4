"""Put a plan on a model for one device type, and take it off again.

The model keeps its class, FP32 parameters and ``state_dict``; only the calls inside its forward pass obey the plan, so
that ``DistributedDataParallel`` and optimizers work unchanged. Gradients reach the parameters, and with them the
all-reduce, in FP32 on every rank.

What runs how: a planned operator runs at its precision. An adjustable operator that the plan does not name runs in FP32
and is named once in a warning. A fixed operator (normalisation, softmax, losses and such) gets its 16-bit inputs cast
up to FP32. Everything else follows its inputs by torch's type promotion. In-place operations keep the type of the
tensor they write to, as in plain torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import ModelError, NotReadyError, UnsupportedError
from qsync_opt.graph import OpGraph, Role
from qsync_opt.kernels import backend, ops
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.precision import number_format
from qsync_opt.runtimes.torch.fixed_operators import lifted, run_fixed
from qsync_opt.runtimes.torch.interception import Interception, OperatorCall, interception_of
from qsync_opt.runtimes.torch.job_plan import JobPlan
from qsync_opt.runtimes.torch.step_audit import StepAudit

_SHOWN = 3


@runtime_checkable
class DevicePlans(Protocol):
    """Anything that holds, per device type, the precision of each operator (a ``Plan`` does)."""

    @property
    def devices(self) -> Mapping[str, Mapping[str, str]]:
        """Device type to operator to precision."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """How a plan is carried out.

    Attributes:
        kernels: Rounding, granularity and backend of 8-bit operators. Seed and offset in it are starting points: every
            operator, pass and rank has its own stream. ``half_format`` is replaced by the device's.
        evaluate_in: ``"plan"``: a model in evaluation mode obeys the plan too, rounding to nearest, so that equal
            inputs give equal results. ``"FP32"``: it runs in FP32, as the plain model would.
        rank: Which stream of random bits this worker uses; None: the rank in the default process group, 0 without
            one. Workers with different streams make independent rounding errors, which average out.

    Raises:
        UnsupportedError: ``evaluate_in`` is neither.
    """

    kernels: KernelOptions = field(default_factory=KernelOptions)
    evaluate_in: str = "plan"
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.evaluate_in not in ("plan", "FP32"):
            raise UnsupportedError(f"option evaluate_in={self.evaluate_in!r}: allowed are plan, FP32")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


def operator_kind(name: str) -> str | None:
    """Kind of an adjustable operator from its name, None if the name is not of one."""
    last = name.rsplit("/", 1)[-1]
    if last in ops.ADJUSTABLE:
        return last
    kind = re.sub(r"_\d+$", "", last)
    return kind if kind in ops.ADJUSTABLE else None


def _of_device_type(plan: Mapping[str, str] | DevicePlans, device_type: str | None) -> dict[str, str]:
    if not isinstance(plan, DevicePlans):
        if not isinstance(plan, Mapping) or not all(isinstance(text, str) for entry in plan.items() for text in entry):
            raise ModelError(
                f"the plan is a {type(plan).__name__}: a Plan is needed, or a mapping of texts, operator to precision"
            )
        return dict(plan)
    known = ", ".join(plan.devices)
    if device_type is None:
        if len(plan.devices) != 1:
            raise ModelError(f"the plan has several device types ({known}): say which one with device_type")
        return dict(next(iter(plan.devices.values())))
    if device_type not in plan.devices:
        raise ModelError(f"the plan has no device type {device_type!r}: it has {known}")
    return dict(plan.devices[device_type])


def _model_device(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ModelError(f"the model lies on several devices ({', '.join(devices)}): a plan is for a model on one")
    return torch.device(devices[0]) if devices else torch.device("cpu")


def _check_master_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise ModelError(
                f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: a plan needs FP32 master "
                "weights; call model.float() before"
            )


def _check_names(model: nn.Module, plan: Mapping[str, str], graph: OpGraph | None) -> None:
    """Refuse a plan for another model, naming the first operators that differ."""
    paths = {path for path, _ in model.named_modules()}
    unknown = [name for name in plan if (name.rsplit("/", 1)[0] if "/" in name else "") not in paths]
    if graph is not None:
        unknown = [name for name in plan if name not in graph]
    if unknown:
        where = "graph" if graph is not None else "model"
        raise ModelError(f"the plan is for another model: it names {_some(unknown)}, which this {where} does not have")
    if graph is None:
        return
    planned = [parameter.name for parameter in graph.parameters]
    names = [name for name, _ in model.named_parameters()]
    different = [a for a in planned if a not in set(names)] or [a for a in names if a not in set(planned)]
    if planned and different:
        raise ModelError(f"the graph is of another model: parameters differ, first {_some(different)}")


def _check_precisions(plan: Mapping[str, str], graph: OpGraph | None, device: torch.device) -> dict[str, str]:
    """Precision of each adjustable operator of the plan, every one possible on the device."""
    adjustable = {}
    for name, precision in plan.items():
        number_format(precision)
        kind = operator_kind(name)
        role = Role.ADJUSTABLE if graph is None else graph[name].role
        if kind is None or role is not Role.ADJUSTABLE:
            if role is Role.FIXED and precision != "FP32":
                raise UnsupportedError(
                    f"operator {name!r} cannot run in {precision}: its role is fixed, it runs in FP32"
                )
            continue
        if not ops.supports(kind, precision, device):
            allowed = ", ".join(ops.precisions_of(kind, device))
            raise UnsupportedError(f"operator {name!r} cannot run in {precision} on {device}: allowed are {allowed}")
        adjustable[name] = precision
    return adjustable


def _seed(name: str, seed: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{rank}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _lifted_kinds(graph: OpGraph) -> tuple[str, ...]:
    """Kinds of fixed operators whose inputs must be cast to FP32.

    Not those of which only some are fixed: these read FP32 weights, so that torch delivers FP32 by itself, and the
    others of the kind must be left alone. What yields integers (positions, masks, sizes) needs no cast at all.
    """
    fixed = {operator.op_type for operator in graph.by_role(Role.FIXED) if operator.is_floating}
    return tuple(sorted(fixed - {operator.op_type for operator in graph.by_role(Role.DEPENDENT)}))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_compiled(name: str) -> bool:
    """Say while a model is compiled, not while it runs, that an operator is in no plan."""
    warnings.warn(f"adjustable operator {name!r} is not in the plan and runs in FP32", stacklevel=2)
    return True


class AppliedPlan:
    """A plan at work on a model: decides for every operator call how it runs.

    ``audit`` compares the first steps with the prediction, if the plan came with one.
    """

    def __init__(
        self, model: nn.Module, precisions: Mapping[str, str], graph: OpGraph | None, options: ApplyOptions
    ) -> None:
        device = _model_device(model)
        rank = options.rank
        if rank is None:
            initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if initialized else 0
        self.precisions = dict(precisions)
        self._options = options
        self._device_type = device.type
        self._fixed = frozenset() if graph is None else frozenset(o.name for o in graph.by_role(Role.FIXED))
        self._kernels = self._stream_options(device, rank)
        # Traced passes are counted on the device, by what was traced; a caller's own counter is the caller's to raise.
        own = options.kernels.step is None
        self._traced_passes = torch.zeros(1, dtype=torch.int64, device=device) if own else None
        self._traced_kernels = {
            name: replace(kernels, step=self._traced_passes) if own else kernels
            for name, kernels in self._kernels.items()
        }
        self.audit: StepAudit | None = None
        self._unplanned: list[str] = []
        self._checked = False
        kinds = () if graph is None else _lifted_kinds(graph)
        self.interception = Interception(model, self, kinds=kinds, on_pass_end=self._end_pass, recurrent_inputs=lifted)

    @property
    def options(self) -> ApplyOptions:
        """As given to `apply`, with the random stream where the next forward pass will be.

        A plan that takes over goes on from here.
        """
        kernels = self._options.kernels
        passes = self.interception.passes + (0 if self._traced_passes is None else int(self._traced_passes.item()))
        return replace(self._options, kernels=kernels.at(seed=kernels.seed, offset=kernels.offset + passes))

    def _stream_options(self, device: torch.device, rank: int) -> dict[str, KernelOptions]:
        """Kernel options of each 8-bit operator, with a seed of its own."""
        base = self._options.kernels
        result = {}
        for name, precision in self.precisions.items():
            if precision in ("INT8", "FP8"):
                half, seed = backend.half_format(device), _seed(name, base.seed, rank)
                result[name] = dataclasses.replace(base, half_format=half, seed=seed)
        return result

    def __call__(self, call: OperatorCall) -> Any:
        """Run one operator as the plan wants."""
        precision = self.precisions.get(call.name)
        if precision is None:
            if call.op_type not in ops.ADJUSTABLE:
                return run_fixed(call)
            precision = "FP32"
            if call.name not in self._fixed:
                if torch.compiler.is_compiling():
                    _warn_compiled(call.name)
                elif call.name not in self._unplanned:
                    self._unplanned.append(call.name)
        elif not self.interception.training and self._options.evaluate_in == "FP32":
            precision = "FP32"
        kernels = self._kernels.get(call.name)
        if kernels is not None:
            if not self.interception.training:
                kernels = kernels.nearest()
            elif self.interception.traced:
                kernels = self._traced_kernels[call.name]
            else:
                kernels = kernels.at(seed=kernels.seed, offset=kernels.offset + self.interception.pass_index)
        if torch.is_autocast_enabled(self._device_type):
            raise NotReadyError(
                f"operator {call.name!r} runs under torch.autocast, which would override its precision "
                f"{precision}: leave autocast while a plan is applied"
            )
        return ops.execute(call.op_type, precision, call.function, call.args, call.kwargs, kernels)

    def _end_pass(self, path: str) -> None:
        """Count a traced pass; after the first whole pass: was every planned operator met, every one met planned?"""
        if self.interception.traced and self.interception.training and self._traced_passes is not None:
            self._traced_passes.add_(1)
        # While a pass is compiled, nothing that changes between passes may be looked at: it would be compiled again.
        tracing = torch.compiler.is_compiling()
        if path or (not tracing and self._checked):
            return
        seen = set(self.interception.seen)
        missing = [name for name in self.precisions if name not in seen]
        if missing:
            raise ModelError(
                f"the plan is for another model: a forward pass did not meet {_some(missing)}; "
                "undo it and capture this model again"
            )
        if tracing:
            return
        self._checked = True
        if self._unplanned:
            warnings.warn(
                f"{len(self._unplanned)} adjustable operators are not in the plan and run in FP32: "
                f"{_some(self._unplanned)}",
                stacklevel=2,
            )


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def apply(
    model: nn.Module,
    plan: Mapping[str, str] | DevicePlans,
    device_type: str | None = None,
    *,
    graph: OpGraph | None = None,
    options: ApplyOptions | None = None,
) -> nn.Module:
    """Make a model run under a plan, until :func:`undo`.

    Args:
        model: FP32 model on the device that it will run on; also one that ``DistributedDataParallel`` wraps already.
        plan: Operator to precision, or a plan with such a mapping per device type. A `JobPlan` that is not worthwhile
            changes nothing.
        device_type: Which entry of the plan; may be left out if there is one only.
        graph: The captured graph; with it the plan is compared to the model name by name at once, without it module
            paths are compared now and operators after the first forward pass.
        options: Kernels and evaluation.

    Returns:
        The same model, changed in place.

    Raises:
        ModelError: The plan or graph is of another model (the first differing operators are named), the plan lacks
            the device type, parameters are not FP32, or what is given is no model or no plan. Raised also by the first
            forward pass, if it does not meet an operator of the plan.
        UnsupportedError: The device lacks a planned precision, or an operator cannot run at it.
        NotReadyError: A plan is applied already. Raised also by a forward pass under ``torch.autocast``, and by an
            attempt to copy or pickle the model before ``undo``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = apply(model, {"0/linear": "BF16", "2/linear": "INT8"})
        >>> model(torch.zeros(3, 4)).dtype
        torch.bfloat16
        >>> undo(model)(torch.zeros(3, 4)).dtype
        torch.float32
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"cannot apply a plan to a {type(model).__name__}: a torch.nn.Module is needed")
    if isinstance(plan, JobPlan) and not plan.worthwhile:
        return model
    bare = _bare(model)
    if interception_of(bare) is not None:
        raise NotReadyError("a plan is applied to this model already: undo(model) before applying another")
    precisions = _of_device_type(plan, device_type)
    _check_master_weights(bare)
    _check_names(bare, precisions, graph)
    adjustable = _check_precisions(precisions, graph, _model_device(bare))
    applied = AppliedPlan(bare, adjustable, graph, options or ApplyOptions())
    if isinstance(plan, JobPlan):
        applied.audit = StepAudit(
            bare, predicted_ns=plan.iteration_ns, predicted_bytes=plan.memory_bytes[plan.device_type]
        )
    return model


def applied_plan(model: nn.Module) -> AppliedPlan | None:
    """The plan at work on a model (also inside ``DistributedDataParallel``), None if there is none."""
    interception = interception_of(_bare(model))
    handler = None if interception is None else interception.handler
    return handler if isinstance(handler, AppliedPlan) else None


def undo(model: nn.Module) -> nn.Module:
    """Take the plan off: the model runs as before :func:`apply`.

    Returns:
        The same model.

    Raises:
        NotReadyError: No plan is applied, or the model is in the middle of a forward pass.
    """
    applied = applied_plan(model)
    if applied is None:
        raise NotReadyError("no plan is applied to this model: apply(model, plan) comes first")
    applied.interception.remove()
    if applied.audit is not None:
        applied.audit.stop()
    return model
