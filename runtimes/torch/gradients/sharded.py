"""Compressed reduce-scatter for models of ``fully_shard`` (FSDP2), by its interface for custom collectives.

Each rank encodes what it sends with scales of its own; the receiver decodes and adds in FP32. There is one rounding,
and no number of workers overflows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.gradients import GradientScheme, Scheme, Transport, scheme
from qsync_opt.kernels.gradients import Codec, Encoded
from qsync_opt.kernels.quantize import stream_key
from qsync_opt.runtimes.torch.ddp import naming_lost_ranks, require_agreement
from qsync_opt.runtimes.torch.gradients.transports import FORMS


class ShardedCompression:
    """A reduce-scatter that sends codes; `compress_sharded_gradients` puts it into a model.

    ``calls`` counts reductions and is part of the random key; it is kept in `state_dict`.
    """

    def __init__(self, chosen: GradientScheme | str, *, seed: int = 0, backend: str = "auto") -> None:
        self.scheme = scheme(chosen)
        self.calls = 0
        self._seed, self._codec = seed, Codec(backend)
        own = self.scheme if isinstance(self.scheme, Scheme) else None
        if own is None or own.transport is not Transport.TWO_SHOT or own.code not in FORMS:
            raise UnsupportedError(
                f"scheme {self.scheme.name!r} cannot be scattered: shards are sent by all-to-all; allowed are the "
                "two-shot schemes, such as two8, two-fp8 and BF16"
            )

    def state_dict(self) -> dict[str, int]:
        """What decides the random keys of the next reductions."""
        return {"seed": self._seed, "calls": self.calls}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ProblemError: Other keys or values than those of `state_dict`.
        """
        if set(state) != {"seed", "calls"} or not all(type(value) is int for value in state.values()):
            raise ProblemError(f"the state of sharded compression is {dict(state)!r}, but seed and calls are needed")
        self._seed, self.calls = state["seed"], state["calls"]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer, as FSDP asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (workers x shard, flat) to this rank's shard, ``output_tensor``.

        Raises:
            UnsupportedError: The reduction is neither a sum nor a mean.
            NotReadyError: A rank does not answer.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(f"FSDP reduces by {op}, but compressed shards are summed or averaged; leave it so")
        self.calls += 1
        workers, rank = dist.get_world_size(group), dist.get_rank(group)
        assert isinstance(self.scheme, Scheme)
        form, block = FORMS[self.scheme.code], self.scheme.block or 4
        shard = output_tensor.numel()
        if not shard:
            return None
        parts_NS = input_tensor.to(torch.float32).view(workers, shard)
        padded_NP = torch.nn.functional.pad(parts_NS, (0, -shard % block))
        sent = self._codec.encode(padded_NP.flatten(), form, block, stream_key(self._seed, self.calls, rank))
        with naming_lost_ranks():
            codes_NP, scales_NB = (_exchanged(values, workers, group) for values in sent)
        total = torch.zeros(padded_NP.shape[1], device=input_tensor.device)
        for codes, scales in zip(codes_NP, scales_NB, strict=True):  # in the order of ranks
            total += self._codec.decode(Encoded(codes, scales), form, block)
        if op == dist.ReduceOp.AVG:
            total /= workers
        output_tensor.copy_(total[:shard])
        return None


def _exchanged(values: Tensor, workers: int, group: Any) -> Tensor:
    """Every worker's values for this one, shape (workers, len(values) / workers)."""
    sent = values.view(torch.uint8)
    received = torch.empty_like(sent)
    if len(sent):
        dist.all_to_all_single(received, sent, group=group)
    return received.view(values.dtype).view(workers, -1)


def compress_sharded_gradients(
    model: nn.Module, chosen: GradientScheme | str = "two8", *, seed: int = 0, backend: str = "auto"
) -> ShardedCompression:
    """Reduce the gradients of a model of ``fully_shard`` under one scheme; every rank must call it.

    Args:
        model: To which ``fully_shard`` was applied, with its submodules.
        chosen: A two-shot scheme, by name or as an object.
        seed: Of the random rounding, the same on all ranks.
        backend: Of the codec: ``"auto"``, ``"compiled"`` or ``"reference"``.

    Returns:
        The state; save its ``state_dict()`` in checkpoints.

    Raises:
        UnsupportedError: Nothing in the model is sharded, or the scheme cannot be scattered.
        ModelError: The ranks were given different schemes or seeds.

    Source: ``FSDPModule.set_custom_reduce_scatter`` of torch.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise UnsupportedError(
            f"the model is a {type(model).__name__} that nothing shards: apply fully_shard first; for "
            "DistributedDataParallel use compress_gradients"
        )
    state = ShardedCompression(chosen, seed=seed, backend=backend)
    require_agreement(
        "the compression of sharded gradients", [state.scheme.name, seed], "give all ranks the same scheme and seed"
    )
    for module in sharded:
        module.set_custom_reduce_scatter(state)  # type: ignore[arg-type]
    return state
