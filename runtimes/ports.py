"""Ports of this host for the workers of a job. Does not load torch, so that a launcher can start workers at once."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

from qsync_opt.errors import NotReadyError

_FIRST_PORT = 20000
_PORT_TRIES = 100
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port of this host that is free now, of those that the system does not give to connections by itself.

    Between this call and a worker's use of the port some time passes, in which any connection that some process opens
    may be given a port of the system's own range.

    Raises:
        NotReadyError: A hundred ports, taken at random, are all in use.
    """
    for _ in range(_PORT_TRIES):
        port = _FIRST_PORT + secrets.randbelow(_first_ephemeral_port() - _FIRST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
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
