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
from qsync_opt.gradients import GradientScheme, Plan, Scheme, Transport, scheme
from qsync_opt.kernels.gradients import Codec, Encoded
from qsync_opt.kernels.quantize import stream_key
from qsync_opt.runtimes.torch.ddp import naming_lost_ranks
from qsync_opt.runtimes.torch.gradients.planned import PlannedReductions
from qsync_opt.runtimes.torch.gradients.statistics import bucket_statistics
from qsync_opt.runtimes.torch.gradients.transports import FORMS
from qsync_opt.runtimes.torch.support import time_mark


class ShardedCompression(PlannedReductions):
    """Reduce-scatters that send codes; `compress_sharded_gradients` puts them into a model.

    ``calls`` counts reductions and is part of the random key; it is kept in `state_dict`. The k-th reduction of a
    backward pass is bucket k, of as many elements as are sent: those of a group of parameters that are sharded
    together, padded. ``elements`` are these sizes, once a second backward pass has begun.
    """

    what = "sharded gradients"
    layout = "this model (fully_shard decides them)"

    def __init__(
        self, plan: Plan | GradientScheme | str, *, workers: int, seed: int = 0, backend: str = "auto"
    ) -> None:
        super().__init__(workers=workers, seed=seed)
        self.calls = 0
        self._codec = Codec(backend)
        self._units: list[int] = []
        self._sizes: list[int] = []
        self.use(plan)

    def _check_scheme(self, each: GradientScheme) -> None:
        super()._check_scheme(each)
        plain = each.transport is Transport.PLAIN
        if not plain and not (isinstance(each, Scheme) and each.transport is Transport.TWO_SHOT and each.code in FORMS):
            raise UnsupportedError(
                f"scheme {each.name!r} cannot be scattered: shards are sent by all-to-all; allowed are the "
                "two-shot schemes, such as two8, two-fp8 and BF16, and FP32"
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

    def reduce(self, unit: int, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any) -> None:
        """Reduce ``input_tensor`` (workers x shard, flat) of one sharded module to this rank's shard.

        Raises:
            UnsupportedError: The reduction is neither a sum nor a mean.
            ModelError: The plan was made for other buckets.
            NotReadyError: A rank does not answer.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(f"FSDP reduces by {op}, but compressed shards are summed or averaged; leave it so")
        index = self._index(unit, input_tensor.numel())
        sample = self._records.sampling
        chosen = scheme("FP32") if sample else self._scheme_of(index, input_tensor.numel())
        record = self._records.step_at(index) if self._records.recording else None
        self.calls += 1
        began = time_mark(input_tensor.device) if record is not None else None  # at once: FSDP waits for it
        with naming_lost_ranks():
            if sample:
                self._records.add_sample(index, bucket_statistics(input_tensor, group=group))
            if not isinstance(chosen, Scheme) or chosen.transport is Transport.PLAIN:
                _reduce_scatter(output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=group)
                if op == dist.ReduceOp.AVG:
                    output_tensor /= dist.get_world_size(group)
            else:
                self._scatter(chosen, output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)
        if record is not None:
            record.append((chosen.name, began, began, time_mark(input_tensor.device)))

    def _index(self, unit: int, elements: int) -> int:
        """Number of a reduction in its backward pass: another one begins with a module that was reduced already."""
        if unit in self._units:
            self.elements = tuple(self._sizes)
            self._units, self._sizes = [], []
        self._units.append(unit)
        self._sizes.append(elements)
        return len(self._units) - 1

    def _scatter(self, chosen: Scheme, output: Tensor, sent_by_all: Tensor, group: Any, *, mean: bool) -> None:
        workers, rank, shard = dist.get_world_size(group), dist.get_rank(group), output.numel()
        if not shard:
            return
        form, block = FORMS[chosen.code], chosen.block or 4
        parts_NS = sent_by_all.to(torch.float32).view(workers, shard)
        padded_NP = torch.nn.functional.pad(parts_NS, (0, -shard % block))
        sent = self._codec.encode(padded_NP.flatten(), form, block, stream_key(self._seed, self.calls, rank))
        codes_NP, scales_NB = (_exchanged(values, workers, group) for values in sent)
        total = torch.zeros(padded_NP.shape[1], device=sent_by_all.device)
        for codes, scales in zip(codes_NP, scales_NB, strict=True):  # in the order of ranks
            total += self._codec.decode(Encoded(codes, scales), form, block)
        if mean:
            total /= workers
        output.copy_(total[:shard])


_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Of torch, which has renamed it."""


class _ReduceScatter:
    """What FSDP calls for one sharded module."""

    def __init__(self, state: ShardedCompression, unit: int) -> None:
        self._state, self._unit = state, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer, as FSDP asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce as `ShardedCompression.reduce`; nothing is left to wait for."""
        self._state.reduce(self._unit, output_tensor, input_tensor, group, op)
        return None


def _exchanged(values: Tensor, workers: int, group: Any) -> Tensor:
    """Every worker's values for this one, shape (workers, len(values) / workers)."""
    sent = values.view(torch.uint8)
    received = torch.empty_like(sent)
    if len(sent):
        dist.all_to_all_single(received, sent, group=group)
    return received.view(values.dtype).view(workers, -1)


def compress_sharded_gradients(
    model: nn.Module, plan: Plan | GradientScheme | str = "two8", *, seed: int = 0, backend: str = "auto"
) -> ShardedCompression:
    """Reduce the gradients of a model of ``fully_shard`` under a plan; every rank must call it.

    Args:
        model: To which ``fully_shard`` was applied, with its submodules.
        plan: Whose k-th scheme is that of the k-th reduction of a backward pass, or one scheme for all, by name or as
            an object: a two-shot scheme, or ``FP32``.
        seed: Of the random rounding, the same on all ranks.
        backend: Of the codec: ``"auto"``, ``"compiled"`` or ``"reference"``.

    Returns:
        The state; save its ``state_dict()`` in checkpoints, change plans by ``use``, sample statistics, record steps.

    Raises:
        UnsupportedError: Nothing in the model is sharded, or a scheme cannot be scattered.
        ProblemError: The plan was made for another number of workers.
        ModelError: The ranks were given different plans or seeds. In training: the buckets are not those of the plan.
        NotReadyError: On the ranks whose plan is right, if that of another is not; or a rank does not answer.

    Source: ``FSDPModule.set_custom_reduce_scatter`` of torch.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not sharded or not meshes:
        raise UnsupportedError(
            f"the model is a {type(model).__name__} that nothing shards: apply fully_shard first; for "
            "DistributedDataParallel use compress_gradients"
        )
    workers = meshes[0].size(meshes[0].ndim - 1)  # before it may stand one of replicas
    state = ShardedCompression(plan, workers=workers, seed=seed, backend=backend)
    for unit, module in enumerate(sharded):
        module.set_custom_reduce_scatter(_ReduceScatter(state, unit))  # type: ignore[arg-type]
    return state
