from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.cluster import Cluster, DeviceRole, Link, Network, load_cluster
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


LINKS = """links:
  - {from: A100, to: A100, latency: 1 us, bandwidth: 100 GB/s, source: data sheet}
  - {from: A100, to: T4, latency: 40 us, bandwidth: 2 GB/s, source: measured}
"""


def test_links_hold_both_ways_and_the_network_is_the_default(tmp_path: Path) -> None:
    cluster = _load(tmp_path, FILE + LINKS)
    assert cluster.link("A100", "A100") == Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11, source="data sheet")
    assert cluster.link("T4", "A100") is cluster.link("A100", "T4")
    assert cluster.link("T4", "T4") is cluster.network
    back = "  - {from: T4, to: A100, latency: 80 us, bandwidth: 1 GB/s, source: measured}\n"
    both = _load(tmp_path, FILE + LINKS + back)
    assert both.link("A100", "T4").latency_s == pytest.approx(40e-6)
    assert both.link("T4", "A100").latency_s == pytest.approx(80e-6)
    with pytest.raises(ProblemError, match="no device type 'V100'"):
        cluster.link("A100", "V100")


def test_an_all_reduce_takes_the_slowest_link_of_its_ring(tmp_path: Path) -> None:
    plain, linked = _load(tmp_path, FILE), _load(tmp_path, FILE + LINKS)
    for num_bytes in (1, 12_345_678, 25 * 2**20):
        assert plain.allreduce_ns(num_bytes) == plain.network.allreduce_ns(num_bytes, plain.num_workers)
    # 22 messages of a twelfth: between A100 and T4 40 us + 0.5 ms, among T4s 20 us + 0.8 ms.
    assert linked.allreduce_ns(12_000_000) == 22 * 820_000
    assert linked.allreduce_ns(12) == round(22 * (40_000 + 0.5))
    alone = replace(linked, devices=(replace(linked.devices[1], count=1),), links={})
    assert alone.allreduce_ns(10**6) == 0
    hash(linked)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("to: T4", "to: T44", "a link is for device type 'T44'; did you mean 'T4'?; the cluster has A100, T4"),
        ("to: T4", "to: A100", "links[1]: there is a link from 'A100' to 'A100' already; keep one"),
        ("40 us", "-40 us", "links[1]: latency is '-40 us'; write a number and a unit"),
        ("2 GB/s", "0 GB/s", "links[1]: bandwidth is '0 GB/s', but it must be above zero"),
        ("from: A100, to: T4, ", "from: A100, ", "links[1]: the key 'to' is missing"),
        (", source: measured", "", "links[1]: the key 'source' is missing"),
        ("source: measured", "source: measured, via: switch", "links[1]: unknown key 'via'"),
    ],
)
def test_unusable_links_are_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    with pytest.raises(ProblemError) as caught:
        _load(tmp_path, FILE + LINKS.replace(old, new))
    assert text in str(caught.value)


@pytest.mark.parametrize("field", ["latency_s", "bandwidth_bytes_per_s"])
def test_figures_below_zero_are_refused(field: str) -> None:
    with pytest.raises(ProblemError, match=r"link: .* is -1"):
        Link(**{"latency_s": 1.0, "bandwidth_bytes_per_s": 1.0, "source": "test", field: -1.0})


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
