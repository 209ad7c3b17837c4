"""What torch and the kernels can do on this machine, for ``qsync-opt doctor``."""

from __future__ import annotations

from typing import Any

import torch

from qsync_opt.kernels import backend
from qsync_opt.runtimes.torch.execution import capabilities


def describe_devices() -> list[dict[str, Any]]:
    """Each device with its precisions and, per kind of 8-bit operator, the kernel that runs it, as JSON data."""
    devices = [{"device": "cpu", "name": "CPU", **_described("cpu"), "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                **_described(f"cuda:{index}"),
                "memory_bytes": properties.total_memory,
                "compute_capability": f"{properties.major}.{properties.minor}",
            }
        )
    return devices


def _described(device: str) -> dict[str, Any]:
    return {"precisions": list(capabilities.device_formats(device)), "kernels": backend.explain(device)}


def describe_build() -> dict[str, Any]:
    """How this torch was built: CUDA version or None, and whether it sees a card."""
    return {"cuda": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
