"""Ranks on links of limited speed: network namespaces that are removed afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qsync_opt.runtimes.torch.ddp import free_port

ADDRESS = "10.78.0.1"
"""Of the first side."""
MTU = 9000
"""Bytes of a packet: headers are less than 1 % of it."""
_PROBE = """
import socket, sys, time
side, address, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
if side == "send":
    with socket.create_connection((address, 5001)) as connection:
        connection.sendall(bytes(size))
        connection.recv(1)
else:
    with socket.create_server((address, 5001)) as server:
        print("ready", flush=True)
        connection = server.accept()[0]
        buffer = bytearray(1 << 20)
        first = connection.recv_into(buffer)
        received, began = first, time.perf_counter()
        while received < size:
            received += connection.recv_into(buffer)
        print((received - first) / (time.perf_counter() - began), flush=True)
        connection.sendall(b"1")
"""


@contextlib.contextmanager
def namespaces(gigabits: float, count: int = 2) -> Iterator[list[tuple[list[str], str]]]:
    """How to start a process at each of ``count`` ends, with the name of its interface; needs root and ``tc``.

    Two ends are joined directly, more by a bridge in a namespace of its own. Each sends at the link's speed.
    """
    names = [f"qsyncl{os.getpid()}{k}" for k in range(count)]
    ends = [f"qg{os.getpid() % 100000}{k}" for k in range(count)]
    bridge = f"qsyncl{os.getpid()}b"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)

    try:
        for name in [*names, bridge]:
            run("ip", "netns", "add", name)
        if count == 2:
            peer = ("type", "veth", "peer", "name", ends[1], "netns", names[1])
            run("ip", "link", "add", ends[0], "netns", names[0], *peer)
        else:
            inside = ("ip", "netns", "exec", bridge)
            run(*inside, "ip", "link", "add", "bridge", "type", "bridge")
            run(*inside, "ip", "link", "set", "bridge", "up")
            for name, end in zip(names, ends, strict=True):
                peer = ("type", "veth", "peer", "name", end, "netns", bridge)
                run("ip", "link", "add", end, "netns", name, *peer)
                # A port takes no packets that are larger than its own.
                run(*inside, "ip", "link", "set", end, "mtu", str(MTU), "master", "bridge", "up")
        for k, (name, end) in enumerate(zip(names, ends, strict=True)):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"10.78.0.{k + 1}/24", "dev", end)
            run(*inside, "ip", "link", "set", end, "mtu", str(MTU), "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            # A link lets its burst pass at the speed of the machine: two packets, or what it sends in 0.2 ms.
            burst = max(2 * MTU + 500, int(gigabits * 1e9 / 8 / 5000))
            rate = ("rate", f"{int(gigabits * 1e9)}bit", "burst", str(burst), "latency", "50ms")
            run(*inside, "tc", "qdisc", "add", "dev", end, "root", "tbf", *rate)
        yield [(["ip", "netns", "exec", name], end) for name, end in zip(names, ends, strict=True)]
    finally:
        for name in [*names, bridge]:
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


def plain_bytes_s(gigabits: float) -> float:
    """Bytes per second that one TCP connection carries over a link of so many Gbit/s: the best of three seconds."""
    return max(_plain_bytes_s(gigabits) for _ in range(3))


def _plain_bytes_s(gigabits: float) -> float:
    size = str(int(gigabits * 1e9 / 8))
    with namespaces(gigabits) as ((first, _), (second, _)):
        script = [sys.executable, "-P", "-c", _PROBE]
        receiver = subprocess.Popen([*first, *script, "receive", ADDRESS, size], stdout=subprocess.PIPE, text=True)
        try:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            subprocess.run([*second, *script, "send", ADDRESS, size], check=True, timeout=60)
            return float(receiver.stdout.readline())
        finally:
            receiver.kill()


def records_of_ranks(
    script: str,
    link: str,
    arguments: Sequence[str],
    *,
    port: int,
    gigabits: float | None,
    timeout_s: float,
    ranks: int = 2,
) -> list[dict[str, Any]]:
    """What the first rank of a benchmark writes; all run ``SCRIPT --worker RANK ADDRESS OUTPUT LINK ...``.

    Args:
        script: The benchmark's file.
        link: Its name.
        arguments: After the link.
        port: Between namespaces.
        gigabits: Speed of the link; None: the loopback of this machine.
        timeout_s: For each rank.
        ranks: How many.
    """
    with contextlib.ExitStack() as stack:
        sides: list[tuple[list[str], str]] = [([], "lo")] * ranks
        address = f"127.0.0.1:{free_port()}"
        if gigabits is not None:
            sides, address = stack.enter_context(namespaces(gigabits, ranks)), f"{ADDRESS}:{port}"
        output = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "records.json"
        processes = []
        for rank, (prefix, interface) in enumerate(sides):
            inside = ["--worker", str(rank), address, str(output), link, *arguments]
            command = [*prefix, sys.executable, "-P", str(Path(script).resolve()), *inside]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, env=environment))
        try:
            statuses = [process.wait(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(statuses):
            raise SystemExit(f"a rank of link {link} ended with status {statuses}")
        records: list[dict[str, Any]] = json.loads(output.read_text())
        return records
