"""What is this machine's processor called?"""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Model name of the processor; the kind of machine where the system does not tell it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
