"""Identity of a device: hardware and software versions that measurements depend on."""

from __future__ import annotations

import platform

import torch

import qsync_opt
from qsync_opt.costs import DeviceIdentity
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
