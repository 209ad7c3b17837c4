"""Several optimizers as one, and copies of optimizers that can be stepped without changing a job."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import ModelError, UnsupportedError, first_line

_INSTEAD = "leave optimizer out: then the job is planned for AdamW"


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers of one job behind the interface of one; its groups are theirs, in order."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:  # the base class would build groups of its own
        self.parts = tuple(parts)
        self.defaults: dict[str, Any] = {}
        self.param_groups: list[dict[str, Any]] = [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """Of all of them."""
        # States are defaultdicts: looking up another's parameter would create an empty entry.
        return {key: entry for part in self.parts for key, entry in part.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for part in self.parts:
            part.step(*([] if closure is None else [closure]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of each of them."""
        for part in self.parts:
            part.zero_grad(set_to_none)


def single(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> torch.optim.Optimizer | None:
    """One optimizer from what a user passes.

    Raises:
        ModelError: It is neither an optimizer nor a list or tuple of optimizers.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    parts = list(optimizer) if isinstance(optimizer, list | tuple) else []
    if not parts or not all(isinstance(part, torch.optim.Optimizer) for part in parts):
        kind = type(optimizer).__name__
        raise ModelError(f"optimizer is a {kind}: an optimizer of torch is needed, or a list of several; or {_INSTEAD}")
    return parts[0] if len(parts) == 1 else SeveralOptimizers(parts)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Name of an optimizer's class, or of those of several."""
    if isinstance(optimizer, SeveralOptimizers):
        return " and ".join(optimizer_name(part) for part in optimizer.parts)
    return type(optimizer).__name__


def optimizer_key(optimizer: torch.optim.Optimizer) -> str:
    """Name of an optimizer with a digest of its settings and of its parameters' shapes, for caches."""
    groups = [
        [[list(p.shape) for p in group["params"]], {k: repr(v) for k, v in group.items() if k != "params"}]
        for group in optimizer.param_groups
    ]
    return f"{optimizer_name(optimizer)} {hashlib.sha256(json.dumps(groups, sort_keys=True).encode()).hexdigest()[:24]}"


def rebuild_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings, without state, over other groups of parameters.

    If it stands for several optimizers and the number of groups differs, the first takes all groups.

    Raises:
        UnsupportedError: Its class cannot be built from groups and settings.
    """
    if isinstance(optimizer, SeveralOptimizers):
        if len(groups) != len(optimizer.param_groups):
            return rebuild_optimizer(optimizer.parts[0], groups)
        rest = iter(groups)
        return SeveralOptimizers(
            [rebuild_optimizer(part, [next(rest) for _ in part.param_groups]) for part in optimizer.parts]
        )
    # Some optimizers have defaults that their constructor does not take; those are in the groups.
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    try:
        copy: torch.optim.Optimizer = type(optimizer)(groups, **settings)
    except Exception as failure:  # of a user's class
        raise UnsupportedError(
            f"an optimizer of the class {type(optimizer).__name__} cannot be built anew from its groups and defaults, "
            f"to be timed ({first_line(failure)}): {_INSTEAD}"
        ) from failure
    return copy


def check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step needs arguments.

    Raises:
        UnsupportedError: Its step needs a closure (LBFGS), or something else.
    """
    for part in optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,):
        _, *parameters = inspect.signature(type(part).step).parameters.values()
        needed = [
            parameter.name
            for parameter in parameters
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
        if needed:
            raise UnsupportedError(
                f"the step of {type(part).__name__} needs {', '.join(needed)}, but steps are timed that take no "
                f"argument: {_INSTEAD}"
            )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that an optimizer keeps."""
    entries: Any = optimizer.state.values()
    return sum(v.numel() * v.element_size() for entry in entries for v in entry.values() if isinstance(v, Tensor))
