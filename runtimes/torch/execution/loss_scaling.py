"""Loss scaling across ranks: if one overflows, all skip the step and lower the scale together.

A rank whose plan computes in FP16 loses small gradients unless the loss is scaled; the others must scale too, because
gradients are averaged. Agreeing on overflows matters if ranks do not end up with equal gradients: sharded ones,
parameters that ``DistributedDataParallel`` ignores, compressing hooks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.ddp import gather_json, naming_lost_ranks, world
from qsync_opt.runtimes.torch.execution.plans import applied_plan
from qsync_opt.runtimes.torch.support import first_device


class LossScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose overflows are known to all ranks of the default process group.

    Use it in the same way on every rank: ``scaler.scale(loss).backward()``, ``scaler.unscale_(optimizer)`` before
    clipping, ``scaler.step(optimizer)``, ``scaler.update()``. With gradient accumulation scale every part, and unscale,
    step and update once.
    """

    def __init__(self, model: nn.Module, *, enabled: bool | None = None, **settings: Any) -> None:
        """Decide whether scaling is needed; every rank must call it, after `apply`.

        Args:
            model: With its plan.
            enabled: None: on all ranks if gradients pass through FP16 on any of them now; pass True if a later plan
                may use FP16.
            settings: As for ``torch.amp.GradScaler``: ``init_scale``, ``growth_factor``, ``backoff_factor``,
                ``growth_interval``.
        """
        if enabled is None:
            applied = applied_plan(model)
            enabled = any(gather_json(applied is not None and "FP16" in applied.half_formats))
        compiled = getattr(model, "_orig_mod", model)
        self._wrapper = compiled if isinstance(compiled, DistributedDataParallel) else None
        super().__init__(device=first_device(model).type, enabled=enabled, **settings)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale; an overflow on any rank counts on all.

        Raises:
            RuntimeError: As in ``torch.amp.GradScaler``: called twice, or after ``step``.
            UnsupportedError: Inside ``join()``, where workers without further inputs take no part.
        """
        _, size = world()
        # Whether DistributedDataParallel is inside its join(), or Join, as far as is known.
        if self.is_enabled() and size > 1 and self._wrapper is not None and self._wrapper._join_config.enable:
            raise UnsupportedError(
                "loss scaling inside of join(): workers that are through with their inputs take no part in agreeing on "
                "overflows; give all workers as many batches (DistributedSampler does), or plan without FP16"
            )
        super().unscale_(optimizer)
        if not self.is_enabled() or size == 1:
            return
        overflows: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for overflow in overflows.values():
            with naming_lost_ranks():
                dist.all_reduce(overflow, op=dist.ReduceOp.MAX)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step unless a rank has an overflow; see ``torch.amp.GradScaler.step``.

        Returns:
            What the optimizer's step returns, None if it was skipped.
        """
        # Fused optimizers would check for overflows themselves, on this rank alone.
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)
