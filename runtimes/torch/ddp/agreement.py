"""Agreement between the workers of a job: JSON messages through the default process group, never pickled objects."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from qsync_opt.errors import ModelError, NotReadyError, first_line

T = TypeVar("T")


def world(group: Any = None) -> tuple[int, int]:
    """Rank and number of workers of a group, the default one unless given; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise an error that says what to do if the other ranks do not answer.

    Raises:
        NotReadyError: In place of what torch raises when a rank is gone, or after the process group's timeout.
    """
    try:
        yield
    except RuntimeError as failure:
        raise NotReadyError(
            f"the other ranks do not answer ({first_line(failure)[:200]}): one of them ended or hangs, and its log "
            "says why; start the job again, it goes on from its last checkpoint"
        ) from failure


def message_device(group: Any = None) -> torch.device:
    """Device of messages: NCCL moves only what is on a card."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def companion_group(group: Any = None, *, backend: str | None = None) -> Any:
    """A further process group of the same ranks, whose messages may cross those of the first; all of them call it.

    Left to itself, torch gives a new group a timeout of ten minutes (NCCL) or half an hour (gloo), so that a rank that
    hangs is noticed as late, however soon the job wants to know. This one has the timeout of the first.

    Args:
        group: The first process group; None: the default one.
        backend: As that of the first by default.
    """
    first: Any = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(first)
    try:
        timeout = first._get_backend(message_device(first)).options._timeout
    except (AttributeError, RuntimeError):  # a backend of another package that has no options
        timeout = None
    return dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend or dist.get_backend(first),
        use_local_synchronization=len(ranks) < dist.get_world_size(),  # others do not come here
    )


def _encoded(value: Any, group: Any = None) -> Tensor:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(message_device(group))


def _decoded(message: Tensor) -> Any:
    return json.loads(message.cpu().numpy().tobytes())


def broadcast_json(value: Any, source: int = 0) -> Any:
    """The value of rank ``source``, on every rank; the values of the others are ignored.

    Args:
        value: Anything that JSON can hold; numbers must be finite.
        source: Rank of the sender.

    Returns:
        The value as JSON gives it back (tuples become lists), on the sender too.
    """
    rank, size = world()
    if size == 1:
        return json.loads(json.dumps(value, allow_nan=False))
    message = _encoded(value) if rank == source else None
    length = torch.tensor([0 if message is None else message.numel()], dtype=torch.int64, device=message_device())
    with naming_lost_ranks():
        dist.broadcast(length, source)
        if message is None:
            message = torch.empty(int(length), dtype=torch.uint8, device=message_device())
        dist.broadcast(message, source)
    return _decoded(message)


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks in order, on every rank.

    Args:
        value: Anything that JSON can hold; numbers must be finite.
        group: Process group; None: the default one.
    """
    _, size = world(group)
    if size == 1:
        return [json.loads(json.dumps(value, allow_nan=False))]
    message = _encoded(value, group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=message_device(group)) for _ in range(size)]
    with naming_lost_ranks():
        dist.all_gather(
            lengths, torch.tensor([message.numel()], dtype=torch.int64, device=message_device(group)), group=group
        )
    sizes = [int(length) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=message_device(group))
    padded[: message.numel()] = message
    received = [torch.empty_like(padded) for _ in range(size)]
    with naming_lost_ranks():
        dist.all_gather(received, padded, group=group)
    return [_decoded(part[:length]) for part, length in zip(received, sizes, strict=True)]


def digest(value: Any) -> str:
    """A short fingerprint of JSON data, the same on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def require_agreement(what: str, value: Any, advice: str, group: Any = None) -> None:
    """Raise on all ranks if their values differ.

    Args:
        what: Names the value in the error's text.
        value: JSON data that must be equal on all ranks.
        advice: What to do about a difference, for the error's text.
        group: Process group; None: the default one.

    Raises:
        ModelError: Raised on every rank; the text names the ranks that differ from rank 0, with both values if short.
    """
    require_equal(what, gather_json(fingerprint(value), group), advice)


def fingerprint(value: Any) -> dict[str, Any]:
    """What `require_equal` compares: a digest of JSON data, and the data itself if it is short."""
    return {"digest": digest(value), "shown": value if len(json.dumps(value)) <= 80 else None}


def require_equal(what: str, fingerprints: Sequence[Mapping[str, Any]], advice: str) -> None:
    """Raise if the fingerprints of some ranks differ; arguments and errors as of `require_agreement`."""
    different = [rank for rank, other in enumerate(fingerprints) if other["digest"] != fingerprints[0]["digest"]]
    if different:
        ranks = ", ".join(map(str, different[:8])) + (", ..." if len(different) > 8 else "")
        first, other = (fingerprints[rank]["shown"] for rank in (0, different[0]))
        shown = "" if None in (first, other) else f" ({first!r} on rank 0, {other!r} on rank {different[0]})"
        raise ModelError(f"{what} differs between ranks: ranks {ranks} are not as rank 0{shown}; {advice}")


def fail_together(error: Exception | None, group: Any = None) -> None:
    """Raise on every rank if any rank failed, so that none waits for one that is gone.

    Args:
        error: This rank's failure, None if all went well here.
        group: Process group; None: the default one.

    Raises:
        Exception: ``error`` itself on the rank that failed.
        NotReadyError: On the others; the text names the first rank that failed and repeats its error.
    """
    _raise_together(error, gather_json(_shown(error), group))


def _shown(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _raise_together(error: Exception | None, failures: Sequence[str | None]) -> None:
    if error is not None:
        raise error
    for rank, text in enumerate(failures):
        if text is not None:
            raise NotReadyError(f"rank {rank} failed: {text}")


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What ``work`` returns, or its error."""
    try:
        return work(), None
    except Exception as failure:  # raised again once all ranks know
        return None, failure


def together(work: Callable[[], T], group: Any = None) -> T:
    """Run ``work`` on this rank; if it fails on any rank, raise on all (see `fail_together`)."""
    result, error = _attempt(work)
    fail_together(error, group)
    return result  # type: ignore[return-value]


def gather_together(work: Callable[[], Any], group: Any = None) -> list[Any]:
    """Run ``work`` on every rank and give all of them its JSON results; if it fails on any rank, raise on all.

    Args:
        work: Returns JSON data.
        group: Process group; None: the default one.

    Raises:
        Exception: As `fail_together` does.
    """
    text, error = _attempt(lambda: json.dumps(work(), allow_nan=False))
    answers = gather_json({"error": _shown(error), "value": text}, group)
    _raise_together(error, [answer["error"] for answer in answers])
    return [json.loads(answer["value"]) for answer in answers]
