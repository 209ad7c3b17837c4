"""Identity of a device: hardware and software versions that measurements depend on; partitions of a card."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from typing import Any

import torch

import qsync_opt
from qsync_opt.costs import DeviceIdentity
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.host import processor_name


def device_identity(device: torch.device, name: str | None = None) -> DeviceIdentity:
    """The identity of a device, with the versions that its times depend on.

    ``name`` replaces the hardware's own, for a partition of a card.
    """
    versions = {"torch": torch.__version__, "python": platform.python_version(), "qsync_opt": qsync_opt.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        versions["cuda"] = str(torch.version.cuda)
        hardware = f"{properties.name} ({properties.multi_processor_count} SMs)"
    else:
        hardware = processor_name()
    return DeviceIdentity(name=name or hardware, kind=device.type, threads=torch.get_num_threads(), versions=versions)


@contextlib.contextmanager
def partition(device: torch.device, multiprocessors: int | None) -> Iterator[None]:
    """Run everything inside on a number of a card's multiprocessors (a green context); None: on all of them.

    Raises:
        ProblemError: The device is no card, or has fewer.
    """
    if multiprocessors is None:
        yield
        return
    if device.type != "cuda":
        raise ProblemError(
            f"{multiprocessors} multiprocessors of {str(device)!r}: only a card is divided; leave it out"
        )
    most = torch.cuda.get_device_properties(device).multi_processor_count
    if not 1 <= multiprocessors <= most:
        raise ProblemError(f"multiprocessors is {multiprocessors}, but the card has {most}; give 1 to {most}")
    context: Any = torch.cuda.GreenContext.create(num_sms=multiprocessors, device_id=device.index or 0)
    stream = context.Stream()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        yield
        torch.cuda.synchronize(device)
