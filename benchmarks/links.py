"""Two sides of a link of limited speed: network namespaces that are removed afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

ADDRESS = "10.78.0.1"
"""Of the first side."""


@contextlib.contextmanager
def namespaces(gigabits: float) -> Iterator[list[tuple[list[str], str]]]:
    """How to start a process on either side of a link, with the name of its interface; needs root and ``tc``."""
    names = [f"qsyncl{os.getpid()}{side}" for side in "ab"]
    ends = [f"qg{os.getpid() % 100000}{side}" for side in "ab"]

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)

    try:
        for name in names:
            run("ip", "netns", "add", name)
        peer = ("type", "veth", "peer", "name", ends[1], "netns", names[1])
        run("ip", "link", "add", ends[0], "netns", names[0], *peer)
        for k, (name, end) in enumerate(zip(names, ends, strict=True)):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"10.78.0.{k + 1}/24", "dev", end)
            run(*inside, "ip", "link", "set", end, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            # What a link sends in a millisecond: more would let whole messages pass at the speed of the machine.
            burst = max(64_000, int(gigabits * 1e9 / 8 / 1000))
            rate = ("rate", f"{int(gigabits * 1e9)}bit", "burst", str(burst), "latency", "50ms")
            run(*inside, "tc", "qdisc", "add", "dev", end, "root", "tbf", *rate)
        yield [(["ip", "netns", "exec", name], end) for name, end in zip(names, ends, strict=True)]
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)
