"""Bytes from each worker to each other, all at once, with what was sent and received in one piece each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes under way; what is sent is kept until they are there."""

    works: tuple[Any, ...]
    sent: Tensor

    def wait(self) -> None:
        """Return when everything has been received and sent.

        Raises:
            RuntimeError: Another worker has stopped, or the link is broken.
        """
        for work in self.works:
            work.wait()


def transfer(
    received: Tensor, sent: Tensor, arrivals: Sequence[int], departures: Sequence[int], group: Any
) -> Transfer:
    """Begin to send and receive; all ranks call it in the same order.

    gloo is told of every receipt before anything is sent. Its own all-to-all begins to send first: a worker that comes
    later than its peer puts its readiness to receive behind its own bytes, so that the two directions of the link
    follow each other instead of running at once, and the exchange takes twice as long.

    Args:
        received: Bytes of all senders, by rank, uint8.
        sent: Bytes for all receivers, by rank, uint8.
        arrivals: Bytes of each sender.
        departures: Bytes for each receiver.
        group: Process group.
    """
    if dist.get_backend(group) != "gloo":
        work = dist.all_to_all_single(received, sent, list(arrivals), list(departures), group=group, async_op=True)
        return Transfer((work,), sent)
    rank = dist.get_rank(group)
    into, out = torch.split(received, list(arrivals)), torch.split(sent, list(departures))
    works = [
        dist.irecv(piece, group=group, group_src=peer)
        for peer, piece in enumerate(into)
        if peer != rank and piece.numel()
    ]
    works += [
        dist.isend(piece, group=group, group_dst=peer)
        for peer, piece in enumerate(out)
        if peer != rank and piece.numel()
    ]
    into[rank].copy_(out[rank])
    return Transfer(tuple(works), sent)
