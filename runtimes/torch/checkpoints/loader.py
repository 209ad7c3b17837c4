"""A data loader whose position is that of all ranks together, so that any number of ranks goes on from it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.io import Fields, check_integer
from qsync_opt.runtimes.torch.ddp import world

LOADER_FORMAT = "qsync-loader/1"


class ResumableLoader:
    """Batches of a dataset for this rank, one epoch per iteration, from a position that checkpoints keep.

    In each step the ranks take the next ``batch_size`` samples each of one order of all samples, which follows from
    the seed and the epoch. Give it to `Checkpoints` by a name: after a load, on any number of ranks, the next iteration
    goes on behind the last sample that was used. Samples at an epoch's end that are too few for a batch of every rank
    are left out.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, *, seed: int = 0, shuffle: bool = True, **options: Any
    ) -> None:
        """Take a dataset with a length.

        Args:
            dataset: Indexed by integers.
            batch_size: Samples per rank and step.
            seed: Of the order; the same on all ranks.
            shuffle: Another order in each epoch; False: ascending.
            options: Further ones of ``torch.utils.data.DataLoader``, such as ``num_workers``.

        Raises:
            ModelError: The dataset has no length.
        """
        if not isinstance(dataset, Sized):
            raise ModelError(f"{type(dataset).__name__} has no length: a position needs a dataset that is indexed")
        check_integer(batch_size, "batch_size", minimum=1)
        self._dataset, self._batch_size, self._seed, self._shuffle = dataset, batch_size, seed, shuffle
        self._options = options
        self.epoch = 0
        self._position = 0

    def __iter__(self) -> Iterator[Any]:
        """The rest of this epoch; the next iteration is of the next one."""
        batches = list(self._batches())
        loader: DataLoader[Any] = DataLoader(self._dataset, batch_sampler=batches, **self._options)
        step = self._batch_size * world()[1]
        for batch in loader:
            self._position += step
            yield batch
        self.epoch, self._position = self.epoch + 1, 0

    def __len__(self) -> int:
        """Batches that are left of this epoch."""
        return (len(self._dataset) - self._position) // (self._batch_size * world()[1])

    def _batches(self) -> Iterator[list[int]]:
        count = len(self._dataset)
        order = torch.arange(count)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
            order = torch.randperm(count, generator=generator)
        rank, size = world()
        step = self._batch_size * size
        for begin in range(self._position, count - step + 1, step):
            mine = begin + rank * self._batch_size
            yield order[mine : mine + self._batch_size].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Epoch, samples of it that all ranks used, and what the order follows from."""
        return {
            "format": LOADER_FORMAT,
            "epoch": self.epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": len(self._dataset),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ProblemError: It is no such state.
            ModelError: It is of another order or number of samples.
        """
        fields = Fields(dict(state_dict), "state of a loader")
        fields.version(LOADER_FORMAT)
        epoch, position = fields.integer("epoch"), fields.integer("position")
        rest = {name: state_dict.get(name) for name in ("seed", "shuffle", "samples")}
        now = self.state_dict()
        for name, before in rest.items():
            if before != now[name]:
                raise ModelError(f"the loader's {name} was {before!r} and is {now[name]!r}: make it as before")
        if position > now["samples"]:
            raise ProblemError(f"state of a loader: position is {position}, but there are {now['samples']} samples")
        self.epoch, self._position = epoch, position


def require_reshardable(others: dict[str, Any], before: int) -> None:
    """Refuse states that hold for their own number of ranks only, if that has changed.

    Raises:
        ModelError: The text names the object.
    """
    size = world()[1]
    for name, other in others.items():
        kind = type(other)
        if before != size and kind.__module__.split(".")[0] == "torchdata":
            raise ModelError(
                f"the state of {name!r} ({kind.__name__}) is one of {before} ranks, and this job has {size}: use "
                "ResumableLoader, whose position is that of all ranks, or load with as many ranks"
            )
