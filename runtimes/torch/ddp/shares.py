"""Unequal local batches: a sampler that deals them out, and the loss by which every sample counts the same.

``DistributedDataParallel`` averages gradients over W workers. Where worker r has the mean over n_r of N items, the mean
over all items is sum_r (n_r / N) g_r, which its average gives if each loss is multiplied by W n_r / N.

Source: ours; the weights are those of LB-BSP (SoCC 2020).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from qsync_opt.errors import ProblemError
from qsync_opt.io import check_integer
from qsync_opt.runtimes.torch.ddp.agreement import message_device, naming_lost_ranks, world


def split_samples(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers that add up to ``total``, in proportion to ``shares`` as nearly as may be and 1 at least.

    Args:
        total: Samples.
        shares: One number above 0 for each worker; their sum is of no account.

    Raises:
        ProblemError: Fewer samples than workers, or a share that is not above 0.
    """
    check_integer(total, "samples", minimum=1)
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise ProblemError(f"shares are {list(shares)}, but every worker needs a number above 0")
    if total < len(shares):
        raise ProblemError(f"there are {total} samples for {len(shares)} workers, but each needs one or more")
    whole = sum(shares)
    wanted = [total * share / whole for share in shares]
    counts = [max(1, int(want)) for want in wanted]
    while (left := total - sum(counts)) > 0:
        for index in sorted(range(len(counts)), key=lambda i: counts[i] - wanted[i])[:left]:
            counts[index] += 1
    while sum(counts) > total:
        counts[max((i for i in range(len(counts)) if counts[i] > 1), key=lambda i: counts[i] - wanted[i])] -= 1
    return tuple(counts)


class ShareSampler(Sampler[list[int]]):
    """A batch sampler that gives each rank its own number of samples of every global batch.

    It goes to ``DataLoader(dataset, batch_sampler=...)``. A step takes the next ``sum(batches)`` samples of an order
    that is the same on all ranks, so that the samples of a step do not depend on how they are shared. All ranks take
    equally many steps: the last, incomplete one is dropped, or shared in the same proportions with a sample for every
    rank at least (the first samples of the epoch are repeated where it has fewer samples than ranks).

    Args:
        dataset: With a length, or that length.
        batches: Local batch of every rank, in the order of ranks.
        rank: This one; None: that of the process group.
        shuffle: Another order in every epoch (`set_epoch`), from ``seed`` and the epoch; False: that of the dataset.
        seed: The same on all ranks.
        drop_last: Whether the incomplete step is dropped.

    Raises:
        ProblemError: A local batch or the length is below 1, there are no full steps to take, or the rank has no batch.

    Examples:
        >>> [batch for batch in ShareSampler(10, [3, 1], rank=0, shuffle=False)]
        [[0, 1, 2], [4, 5, 6], [8]]
    """

    def __init__(
        self,
        dataset: Sized | int,
        batches: Sequence[int],
        *,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.samples = check_integer(dataset if isinstance(dataset, int) else len(dataset), "samples", minimum=1)
        self.batches = tuple(check_integer(n, f"batch of rank {i}", minimum=1) for i, n in enumerate(batches))
        own, size = world()
        if rank is None and len(self.batches) != size:
            raise ProblemError(f"batches are given for {len(self.batches)} ranks, but there are {size}; give one each")
        self.rank = own if rank is None else rank
        if not 0 <= self.rank < len(self.batches):
            raise ProblemError(f"rank is {self.rank}, but batches are given for ranks 0 to {len(self.batches) - 1}")
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0
        if drop_last and self.samples < self.global_batch:
            raise ProblemError(
                f"{self.samples} samples make no global batch of {self.global_batch}, and drop_last drops what is left"
            )

    @property
    def global_batch(self) -> int:
        """Samples of a full step on all ranks."""
        return sum(self.batches)

    def __len__(self) -> int:
        full, rest = divmod(self.samples, self.global_batch)
        return full + bool(rest and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it on all ranks before every epoch."""
        self.epoch = check_integer(epoch, "epoch")

    def sizes(self, step: int) -> tuple[int, ...]:
        """Local batches of all ranks in a step of an epoch: ``batches``, but for an incomplete last one."""
        if not 0 <= step < len(self):
            raise ProblemError(f"step is {step}, but an epoch has steps 0 to {len(self) - 1}")
        if step < self.samples // self.global_batch:
            return self.batches
        return split_samples(max(self.samples % self.global_batch, len(self.batches)), self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.samples)
        if self.shuffle:
            # One stream per seed and epoch: seed + epoch would repeat the orders of neighbouring seeds.
            generator = torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(f"{self.seed} {self.epoch}".encode()).digest()[:8], "little") >> 1
            )
            order = torch.randperm(self.samples, generator=generator)
        begin = 0
        for step in range(len(self)):
            sizes = self.sizes(step)
            first = begin + sum(sizes[: self.rank])
            positions = torch.arange(first, first + sizes[self.rank]) % self.samples
            yield order[positions].tolist()
            begin += sum(sizes)


def global_count(count: int | Tensor, group: Any = None) -> Tensor:
    """Sum of every rank's ``count`` over the process group, without waiting for the device; every rank must call it.

    Args:
        count: Samples, or tokens that are not ignored, of this rank.
        group: Process group; None: the default one.

    Raises:
        NotReadyError: A rank does not answer.
    """
    where = count.device if isinstance(count, Tensor) else None
    total = torch.as_tensor(count).detach().to(message_device(group) if world(group)[1] > 1 else where, torch.float64)
    total = total.clone()
    if world(group)[1] > 1:
        with naming_lost_ranks():
            dist.all_reduce(total, group=group)
    return total if where is None else total.to(where)


def global_mean(
    loss: Tensor,
    count: int | Tensor,
    *,
    total: int | Tensor | None = None,
    summed: bool = False,
    group: Any = None,
) -> Tensor:
    """The loss by whose gradients ``DistributedDataParallel`` gets that of the mean over all ranks' items, exactly.

    It is the local loss times W count / total, for W ranks. The average of the results over ranks is the mean loss of
    the global batch. It composes with anything after it: loss scaling, ``no_sync``, compressed gradients.

    Args:
        loss: The mean over ``count`` items of this rank; with ``summed`` their sum.
        count: Items that this rank's loss is a mean of: samples, or tokens that are not ignored, such as
            ``(labels != -100).sum()``.
        total: Items of the optimizer's step on all ranks. None: the sum of ``count``, from one small all-reduce, in
            which all ranks must take part. With gradient accumulation, `global_count` of the items of all
            micro-batches.
        summed: Where a rank may have no item at all, a mean is not a number; a sum is.
        group: Process group of the model; None: the default one.

    Returns:
        A scalar on the loss's device.

    Raises:
        ProblemError: The loss is not one number, or ``count`` or ``total`` is a number out of range.
        NotReadyError: A rank does not answer.
    """
    if loss.numel() != 1:
        raise ProblemError(f"the loss has shape {tuple(loss.shape)}, but one number is needed: a mean or a sum")
    if not isinstance(count, Tensor):
        check_integer(count, "count", minimum=0 if summed else 1)
    if total is None:
        total = global_count(count, group)
    elif not isinstance(total, Tensor):
        check_integer(total, "total", minimum=1)
    workers = world(group)[1]
    if isinstance(count, Tensor) or isinstance(total, Tensor):
        whole = torch.as_tensor(total, device=loss.device).double()
        own = torch.ones((), device=loss.device) if summed else torch.as_tensor(count, device=loss.device).double()
        weight: Any = (workers * own / whole).to(loss.dtype)
    else:
        weight = workers * (1 if summed else count) / total
    result: Tensor = loss * weight
    return result
