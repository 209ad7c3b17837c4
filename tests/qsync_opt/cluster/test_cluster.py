from pathlib import Path

import pytest

from qsync_opt.cluster import Cluster, DeviceRole, Network, load_cluster
from qsync_opt.errors import ProblemError

FILE = """
name: two-kinds
devices:
  - {name: A100, count: 8, role: fixed, memory: 40 GiB, precisions: [FP32], profile: a100.json}
  - {name: T4, count: 4, memory: 15.5 GiB, precisions: [INT8, FP16, FP32]}
network: {latency: 20 us, bandwidth: 10 Gbit/s, source: data sheet}
"""


def _load(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    cluster = _load(tmp_path, FILE)
    a100, t4 = cluster.devices
    assert (a100.role, a100.count, a100.memory_limit_bytes) == (DeviceRole.FIXED, 8, 40 * 2**30)
    assert a100.profile == tmp_path / "a100.json"
    assert (t4.role, t4.profile, t4.memory_limit_bytes) == (DeviceRole.PLANNED, None, 15 * 2**30 + 2**29)
    assert cluster.network.latency_s == pytest.approx(20e-6)
    assert (cluster.network.bandwidth_bytes_per_s, cluster.network.source) == (1.25e9, "data sheet")
    assert cluster.num_workers == 12
    assert cluster.device("T4") is t4


def test_ring_all_reduce() -> None:
    network = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9, source="test")
    # 2 (N - 1) messages, each of a quarter: 6 * (10 us + 250 us).
    assert network.allreduce_ns(1_000_000, 4) == 6 * 260_000
    assert network.allreduce_ns(1_000_000, 1) == 0


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("memory: 15.5 GiB, ", "", "'T4': there is no memory limit; add one"),
        ("15.5 GiB", "15.5", "memory is 15.5; write a number and a unit"),
        ("15.5 GiB", "15.5 GiBi", "unknown unit 'GiBi'"),
        ("15.5 GiB", "0 GiB", "above zero"),
        ("15.5 GiB", "1e300 TiB", "above zero and finite"),
        ("name: two-kinds", "name: 2026-13-45", "not usable YAML (month must be in 1..12); put the value in quotes"),
        ("name: two-kinds", "name: two-kinds\n3: 4", "unknown key 3"),
        ("name: two-kinds", "name: two-kinds\n? [a]\n: 3", "a key is no plain text (line 3)"),
        ("name: two-kinds", "name: two-kinds\nloop: &a [*a]", "nested too deeply or holds itself"),
        ("name: T4", "name: A100", "device type 'A100' is named twice"),
        ("[INT8, FP16, FP32]", "[INT8, fp16]", "unknown precision 'fp16'"),
        ("[INT8, FP16, FP32]", "[]", "name at least one"),
        ("[FP32], profile", "[FP16, FP32], profile", "its role is fixed, but precisions lists FP16, FP32"),
        ("role: fixed", "role: resting", "role is 'resting', but allowed are planned, fixed"),
        ("count: 4", "count: 0", "count is 0"),
        ("count: 4", "cuont: 4", "'count' is missing"),
        ("count: 4", "count: 4, colour: red", "unknown key 'colour'"),
        ("count: 4", "count: 4, count: 5", "the key 'count' stands twice in one mapping"),
        ("10 Gbit/s", "10 Gbit", "unknown unit 'Gbit'"),
        (", source: data sheet", "", "'source' is missing"),
        ("network:", "net:", "'network' is missing"),
        ("name: two-kinds", "name: [", "not valid YAML"),
    ],
)
def test_unusable_files_are_refused_with_one_line(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert old in FILE
    with pytest.raises(ProblemError) as caught:
        _load(tmp_path, FILE.replace(old, new))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_to_plan_is_refused(tmp_path: Path) -> None:
    only_fixed = "\n".join(line for line in FILE.splitlines() if "T4" not in line)
    with pytest.raises(ProblemError, match="nothing to plan"):
        _load(tmp_path, only_fixed)


def test_unknown_device_type_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"no device type 'T44'; did you mean 'T4'\?"):
        _load(tmp_path, FILE).device("T44")
    with pytest.raises(ProblemError, match="cannot read"):
        load_cluster(tmp_path / "missing.yaml")


def test_arbitrary_objects_are_not_made(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="not valid YAML"):
        _load(tmp_path, "name: !!python/object/apply:os.getcwd []")


@pytest.mark.parametrize(("text", "held"), [("", "nothing"), ("# a note\n", "nothing"), ("- 1", "[1]"), ("5", "5")])
def test_a_cluster_file_holds_a_mapping(tmp_path: Path, text: str, held: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ProblemError) as caught:
        load_cluster(path)
    assert str(caught.value) == (
        f"{path}: the file holds {held}, but a mapping is needed; give name, devices and network"
    )
