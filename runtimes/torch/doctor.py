"""Capabilities of torch and the kernels on this machine, for ``qsync-opt doctor``."""

from __future__ import annotations

from typing import Any

import torch

from qsync_opt.kernels import backend
from qsync_opt.runtimes.torch.execution import device_formats


def describe_devices() -> list[dict[str, Any]]:
    """Each device with its precisions and, per kind of 8-bit operator, the kernel that runs it, as JSON data."""

    def describe(device: str) -> dict[str, Any]:
        return {"precisions": list(device_formats(device)), "kernels": backend.explain(device)}

    devices = [{"device": "cpu", "name": "CPU", **describe("cpu"), "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                **describe(f"cuda:{index}"),
                "memory_bytes": properties.total_memory,
                "compute_capability": f"{properties.major}.{properties.minor}",
            }
        )
    return devices


def describe_build() -> dict[str, Any]:
    """CUDA version of this torch or None, and whether it sees a card."""
    return {"cuda": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
