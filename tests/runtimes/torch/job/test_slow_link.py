"""Two workers in network namespaces of their own, a slow link between them: is their step predicted?"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).resolve().parents[1] / "workers" / "namespace_worker.py"
BITS_PER_S = 40e6


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def namespaces():
    """Names of two network namespaces that are joined by a link of 40 Mbit/s."""
    names = [f"qsync{os.getpid()}{side}" for side in "ab"]
    ends = [f"qs{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                run("ip", "netns", "add", name)
            run(
                "ip",
                "link",
                "add",
                ends[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                ends[1],
                "netns",
                names[1],
            )
            for k, (name, end) in enumerate(zip(names, ends, strict=True)):
                inside = ("ip", "netns", "exec", name)
                run(*inside, "ip", "addr", "add", f"10.77.0.{k + 1}/24", "dev", end)
                run(*inside, "ip", "link", "set", end, "up")
                run(*inside, "ip", "link", "set", "lo", "up")
                rate = ("rate", f"{int(BITS_PER_S)}bit", "burst", "16kb", "latency", "400ms")
                run(*inside, "tc", "qdisc", "add", "dev", end, "root", "tbf", *rate)
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"network namespaces with traffic control cannot be made here: {detail.strip()}")
        yield list(zip(names, ends, strict=True))
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


@pytest.mark.slow
def test_a_step_over_a_slow_link_is_predicted(namespaces, tmp_path):
    """Compared with what the same run predicts without the link: times alone are also those of the machine's load."""
    output = tmp_path / "found.json"
    workers = []
    for rank, (name, end) in enumerate(namespaces):
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-P",
            str(WORKER),
            str(rank),
            "10.77.0.1:29555",
            str(output),
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + 240
    try:
        texts = [worker.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], b"\n".join(texts).decode()[-3000:]
    found = json.loads(output.read_text())
    # Buckets are deterministic.
    assert found["predicted_buckets"] == found["actual_buckets"]
    assert sum(found["actual_buckets"]) == found["parameter_bytes"]
    # Every byte crosses the link once in each direction, and only a burst faster than at its rate. A busy machine can
    # make this take longer and never shorter.
    link_ns = found["parameter_bytes"] * 8 / BITS_PER_S * 1e9
    assert found["network_ns"] > 0.8 * link_ns
    assert found["measured_ns"] > 0.8 * link_ns
    # With the link the prediction is what was measured, as far as chance on a busy machine goes; without it, it is not.
    error = abs(math.log(found["predicted_ns"] / found["measured_ns"]))
    without = abs(math.log(found["predicted_without_network_ns"] / found["measured_ns"]))
    assert error < without / 2, found
