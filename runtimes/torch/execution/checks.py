"""Checks that a plan can be applied to a model and belongs to it."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import ModelError, UnsupportedError, first_few
from qsync_opt.io import near_match
from qsync_opt.kernels import ops
from qsync_opt.model import ROLE_TABLE, OpGraph, Role, base_kind
from qsync_opt.numerics import number_format


def some_names(names: list[str]) -> str:
    """The first few names, for an error's text."""
    return first_few([repr(name) for name in names])


def operator_kind(name: str) -> str | None:
    """Kind of an adjustable operator by its name, None for the name of another."""
    kind = _kind_among(name, ops.ADJUSTABLE)
    return kind if kind in ops.ADJUSTABLE else None


def _kind_among(name: str, kinds: Container[str]) -> str:
    """The kind in an operator's name, without the number of its occurrence unless it is one of ``kinds`` with it."""
    last = name.rpartition("/")[2]
    return last if last in kinds else re.sub(r"_\d+$", "", last)


def _is_operator(name: str, precision: str, paths: Container[str]) -> bool:
    """Whether a model with these module paths may have an operator of this name."""
    if name.startswith("input/"):
        return True
    kind = _kind_among(name, ROLE_TABLE)
    base = base_kind(kind)
    # Capitals are kinds of ONNX nodes; products that write into an operand, and kinds of other libraries, which have a
    # namespace, run in FP32.
    listed = base.islower() and base in ROLE_TABLE and (base == kind or base not in ops.ADJUSTABLE)
    full = precision == "FP32" and ("." in kind or base in ops.ADJUSTABLE)
    return name.rpartition("/")[0] in paths and (listed or full)


def model_device(model: nn.Module) -> torch.device:
    """The device of all parameters and buffers of a model.

    Raises:
        ModelError: There are several.
    """
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ModelError(f"the model is on several devices ({', '.join(devices)}): a plan is for a model on one")
    return torch.device(devices[0]) if devices else torch.device("cpu")


def check_master_weights(model: nn.Module) -> None:
    """Refuse parameters that are not FP32."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise ModelError(
                f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: a plan needs FP32 master "
                "weights; call model.float() before, or undo(model) to do without the plan"
            )


def _fsdp() -> Any:
    """Torch's package of sharding wrappers if it is loaded, else None: loading it takes seconds."""
    return sys.modules.get("torch.distributed.fsdp")


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` or ``FullyShardedDataParallel`` holds some of the model's parameters."""
    fsdp = _fsdp()
    kinds = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    return any(isinstance(module, kinds) for module in model.modules())


def check_sharding(model: nn.Module, weights: str = "call") -> None:
    """Refuse wrappers that hand operators other weights than the FP32 ones; ``weights`` as in `KernelOptions`."""
    fsdp = _fsdp()
    if fsdp is None:
        return
    for path, module in model.named_modules():
        name = path or "the root"
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise UnsupportedError(
                f"module {name!r} is wrapped in FullyShardedDataParallel, which flattens parameters: operators have no "
                "names there; use fully_shard (FSDP2) instead"
            )
        if isinstance(module, fsdp.FSDPModule):
            policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
            dtype = getattr(policy, "param_dtype", None)
            if dtype not in (None, torch.float32):
                raise UnsupportedError(
                    f"module {name!r} is sharded with param_dtype={dtype}: a plan decides each operator's precision "
                    "and needs the FP32 weights; leave param_dtype out of MixedPrecisionPolicy (reduce_dtype may stay)"
                )
            if weights == "step":
                raise UnsupportedError(
                    f"module {name!r} is sharded and kernel option weights='step': gathering fills a weight without "
                    "marking it as written, so that old codes would be used; use weights='call'"
                )


def check_names(model: nn.Module, plan: Mapping[str, str], graph: OpGraph | None) -> None:
    """Refuse a plan in which an entry names no operator, naming the first ones and what they may stand for."""
    paths = {path for path, _ in model.named_modules()}
    if graph is None:
        unknown = [name for name, precision in plan.items() if not _is_operator(name, precision, paths)]
    else:
        unknown = [name for name in plan if name not in graph]
    if unknown:
        where = "graph" if graph is not None else "model"
        whose = "is for another model" if len(unknown) == len(plan) else "does not fit"
        raise ModelError(
            f"the plan {whose}: it names {some_names(unknown)}, which this {where} does not have; an operator is named "
            "by module and kind, as 'layers.0/linear', and capture(model, ...) lists those of a model"
            f"{_nearest(unknown[0], paths, graph)}"
        )
    if graph is None:
        return
    planned = [parameter.name for parameter in graph.parameters]
    names = {name for name, _ in model.named_parameters()}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # A graph has trained parameters only; some may have been frozen since.
    different = [a for a in planned if a not in names] or [a for a in trained if a not in set(planned)]
    if planned and different:
        raise ModelError(f"the graph is of another model: parameters differ, first {some_names(different)}")


def _nearest(name: str, paths: Collection[str], graph: OpGraph | None) -> str:
    """The operator that a wrong name is nearest to, as a question, or an empty text."""
    if graph is not None:
        return near_match(name, (operator.name for operator in graph))
    path, _, last = name.rpartition("/")
    if path in paths:
        return near_match(name, [f"{path}/{kind}" if path else kind for kind in sorted(ops.ADJUSTABLE)])
    return near_match(name, [f"{known}/{last}" for known in paths if known])


def check_precisions(plan: Mapping[str, str], graph: OpGraph | None, device: torch.device) -> dict[str, str]:
    """Precision of each adjustable operator of the plan, checked against the device.

    Raises:
        UnsupportedError: The device lacks a planned precision, or an operator cannot run at it.
    """
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


def check_autocast(adjustable: Mapping[str, str], autocast: str, device: torch.device) -> None:
    """Refuse that torch itself computes in a precision, for a plan that this would not carry out."""
    for name, precision in adjustable.items():
        kind = operator_kind(name)
        possible = kind is not None and ops.supports(kind, autocast, device)
        if precision != autocast and (possible or precision != "FP32"):
            raise UnsupportedError(
                f"operator {name!r} is planned in {precision}, but the option autocast runs all in {autocast}: leave "
                "it out for a plan that mixes precisions"
            )


NO_SECOND_DERIVATIVE = (
    "the gradient of a captured pass cannot be differentiated again: do without graphed(), or capture, for a loss that "
    "holds gradients, such as a gradient penalty"
)
"""Error of differentiating captured passes twice."""


def check_capturable(model: nn.Module) -> None:
    """Refuse models that are known not to be capturable.

    Raises:
        UnsupportedError: The model is not on a card, is sharded, or has SyncBatchNorm.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"graphed: {name or 'the model'!r} is a SyncBatchNorm, whose passes wait for the other workers, but "
                "capturing runs passes that the others do not: use BatchNorm, or run this model operator by operator"
            )
    if is_sharded(model):
        raise UnsupportedError("graphed: the model is sharded (FSDP): its weights move, which a captured pass cannot")
    device = model_device(model)
    if device.type != "cuda":
        raise UnsupportedError(f"graphed: the model is on {device}: CUDA graphs need a model on a card")
