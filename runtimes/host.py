"""Ports of this host for the workers of a job. Does not load torch, so that a launcher can start workers at once."""

from __future__ import annotations

import collections
import contextlib
import os
import platform
import secrets
import socket
import sys
from pathlib import Path

from qsync_opt.errors import NotReadyError


def processor_name() -> str:
    """Model name of the processor; the kind of machine where the system does not tell it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_FIRST_PORT = 20000
_PORT_TRIES = 100
_MOST_KEPT = 32
_KEPT: collections.deque[int] = collections.deque()
"""Descriptors of bound sockets."""
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port of this host that is free now, of those that the system does not give to connections by itself.

    Between this call and a worker's use of the port some time passes, in which any connection that some process opens
    may be given a port of the system's own range, and another call of this function, in any process, any other one. On
    Linux the latter cannot happen: this process keeps the last ports that it gave for itself and for its workers.

    Raises:
        NotReadyError: A hundred ports, taken at random, are all in use.
    """
    for _ in range(_PORT_TRIES):
        port = _FIRST_PORT + secrets.randbelow(_first_ephemeral_port() - _FIRST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            if sys.platform == "linux":
                # A socket that is bound and does not listen keeps others from binding the port, but for those that ask
                # to share it, as torch's stores do.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if len(_KEPT) == _MOST_KEPT:
                    os.close(_KEPT.popleft())
                _KEPT.append(probe.detach())
            return port
    raise NotReadyError(
        f"{_PORT_TRIES} ports between {_FIRST_PORT} and {_first_ephemeral_port()} are in use: stop other jobs first"
    )


def _first_ephemeral_port() -> int:
    """First port that the system gives to connections; RFC 6335's where it does not say, or leaves nothing below."""
    with contextlib.suppress(OSError, ValueError):
        first = int(_EPHEMERAL_PORTS.read_text().split()[0])
        if first > _FIRST_PORT + _PORT_TRIES:
            return first
    return 49152
