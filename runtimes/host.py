"""The processor's name and free TCP ports of this host, without loading torch: a launcher starts workers at once."""

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

_FIRST_PORT = 20000
_PORT_TRIES = 100
_MAX_KEPT = 32
_KEPT: collections.deque[int] = collections.deque()
"""Descriptors of bound sockets."""
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def processor_name() -> str:
    """Model name of the processor; the kind of machine where the system does not name it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def free_port() -> int:
    """A free TCP port of this host, outside the range that the system assigns to connections.

    Before a worker binds the port, another process may bind it: any connection could be assigned a port of the system's
    range, and another call of this function could return any other one. On Linux the latter cannot happen: this process
    reserves the last ports that it returned, for itself and for its workers.

    Raises:
        NotReadyError: A hundred random ports are all in use.
    """
    for _ in range(_PORT_TRIES):
        port = _FIRST_PORT + secrets.randbelow(_first_ephemeral_port() - _FIRST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            if sys.platform == "linux":
                # A bound socket that does not listen keeps others from binding the port, except those that ask to share
                # it, as torch's stores do.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if len(_KEPT) == _MAX_KEPT:
                    os.close(_KEPT.popleft())
                _KEPT.append(probe.detach())
            return port
    raise NotReadyError(
        f"{_PORT_TRIES} ports between {_FIRST_PORT} and {_first_ephemeral_port()} are in use: stop other jobs first"
    )


def _first_ephemeral_port() -> int:
    """First port that the system assigns to connections; RFC 6335's where that is unknown or leaves none below it."""
    with contextlib.suppress(OSError, ValueError):
        first = int(_EPHEMERAL_PORTS.read_text().split()[0])
        if first > _FIRST_PORT + _PORT_TRIES:
            return first
    return 49152
