"""Disks that are full, processes killed while they write, files that were damaged, caches that jobs share."""

import contextlib
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

import qsync_opt
from qsync_opt.cluster import data_sheet
from qsync_opt.costs import load_profile, roofline_profile
from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.io import MeasurementCache, encode
from qsync_opt.testing import chain, diamond, sample_graph
from qsync_opt.training import FrontCache, Plan, load_plan, load_problem, solve

ENVIRONMENT = {"device": "here"}


def profile():
    return roofline_profile(sample_graph(), data_sheet("T4"))


def large_plan(precision, operators=3000):
    return Plan(problem="large", devices={"T4": {f"operator {i}": precision for i in range(operators)}})


def python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=250, **options
    )


# A full disk ---------------------------------------------------------------------------------------------------------

WRITERS = """
import json, sys
import qsync_opt
from qsync_opt.cli import main
from qsync_opt.testing import sample_graph
from qsync_opt.cluster import data_sheet
from qsync_opt.errors import QSyncError
from qsync_opt.io import MeasurementCache
from qsync_opt.training import Plan
from qsync_opt.training import replay
from qsync_opt.costs import roofline_profile
from qsync_opt.testing import stacked_problem

what, path, limit, source = sys.argv[1:]
problem = stacked_problem(20)
plan = qsync_opt.uniform_plan(problem, "FP32")
if int(limit):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    match what:
        case "plan":
            Plan(problem="p", devices={"T4": {f"o{i}": "FP16" for i in range(9000)}}).save(path)
        case "profile":
            names = {f"o{i}": "m" for i in range(9000)}
            base = roofline_profile(sample_graph(), data_sheet("T4"))
            data = base.to_json()
            data["operators"] = {**data["operators"], **dict.fromkeys(names, next(iter(data["measurements"])))}
            type(base).from_json(data).save(path)
        case "problem":
            stacked_problem(60).save(path)
        case "report":
            qsync_opt.write_report(qsync_opt.make_report(problem, plan, front="none"), path)
        case "trace":
            qsync_opt.write_trace(path, replay(problem, plan))
        case "command line":
            stacked_problem(5).save(source)
            sys.exit(main(["solve", source, "--output", path]))
except QSyncError as error:
    print(error)
    sys.exit(7)
"""


@contextlib.contextmanager
def small_disk(folder):
    """A file system of 64 KiB in memory, where mounting is allowed."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture(params=["a full disk", "a limit on file sizes"])
def full(request, tmp_path):
    """A folder in which a small file lies and no larger one fits, and the limit to set."""
    folder = tmp_path / "full"
    folder.mkdir()
    if request.param == "a limit on file sizes":
        yield folder, 20_000
    else:
        with small_disk(folder):
            yield folder, 0


@pytest.mark.parametrize("what", ["plan", "profile", "problem", "report", "trace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(what, full, tmp_path):
    folder, limit = full
    path = folder / "file"
    path.write_text("what was there")
    result = python(WRITERS, what, path, limit, tmp_path / "source.json")
    assert result.returncode == 7, result.stderr
    assert f"cannot write {str(path)!r}" in result.stdout
    assert "No space left" in result.stdout or "File too large" in result.stdout
    assert path.read_text() == "what was there"
    assert [entry.name for entry in folder.iterdir()] == ["file"]


def test_the_command_line_says_in_one_line_that_the_disk_is_full(tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    chain().problem.save(tmp_path / "problem.json")
    with small_disk(folder):
        (folder / "filler").write_bytes(bytes(64 * 1024))
        command = ["solve", str(tmp_path / "problem.json"), "--output", str(folder / "plan.json")]
        result = python("import sys; from qsync_opt.cli import main; sys.exit(main(sys.argv[1:]))", *command)
        assert result.returncode == 2 and result.stderr.count("\n") == 1
        assert "plan.json" in result.stderr and "No space left" in result.stderr
        assert [entry.name for entry in folder.iterdir()] == ["filler"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_results_that_cannot_be_printed_are_an_error(tmp_path):
    chain().problem.save(tmp_path / "problem.json")
    code = "import sys; from qsync_opt.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", code, "solve", str(tmp_path / "problem.json"), "--json"]
    with open("/dev/full", "w") as full_device:
        result = subprocess.run(command, stdout=full_device, stderr=subprocess.PIPE, text=True, timeout=250)
    assert result.returncode == 2 and "No space left" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_full_cache_costs_the_measurement_and_not_the_job(tmp_path, caplog):
    folder = tmp_path / "cache"
    folder.mkdir()
    with small_disk(folder), caplog.at_level(logging.WARNING):
        cache = MeasurementCache(folder, ENVIRONMENT)
        (folder / "filler").write_bytes(bytes(60 * 1024))
        with contextlib.suppress(OSError), (folder / "rest").open("wb") as stream:
            stream.write(bytes(64 * 1024))
        for i in range(5):
            cache.put(f"operator {i}", {"ns": i})
        assert cache.get("operator 3") == {"ns": 3}
        assert MeasurementCache(folder, ENVIRONMENT).get("operator 3") is None
        assert not list(folder.rglob("*.tmp"))
    assert caplog.text.count("not kept for other runs") == 1 and "No space left" in caplog.text


# Killed while writing ------------------------------------------------------------------------------------------------

WRITE_FOREVER = """
import itertools, sys
from pathlib import Path
from qsync_opt.training import Plan
plans = [
    Plan(problem="large", devices={"T4": {f"operator {i}": p for i in range(3000)}}) for p in ("FP16", "INT8")
]
print("ready", flush=True)
for plan in itertools.cycle(plans):
    plan.save(sys.argv[1])
"""


def test_a_kill_while_writing_leaves_a_whole_file(tmp_path):
    path = tmp_path / "plan.json"
    large_plan("FP16").save(path)
    source = random.Random(0)
    whole = [large_plan("FP16"), large_plan("INT8")]
    for _ in range(8):
        command = [sys.executable, "-P", "-c", WRITE_FOREVER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(source.uniform(0.01, 0.1))
            process.send_signal(signal.SIGKILL)
        assert load_plan(path) in whole
        left = [entry for entry in tmp_path.iterdir() if entry != path]
        assert all(entry.name.startswith(".plan.json.") and entry.name.endswith(".tmp") for entry in left)
        for entry in left:
            entry.unlink()
    large_plan("FP32").save(path)  # what the killed ones left is in nobody's way
    assert load_plan(path) == large_plan("FP32")


# Damaged files -------------------------------------------------------------------------------------------------------


def files(folder):
    """Name -> file, what loads it, and what it must give."""
    problem = diamond().problem
    solution = solve(problem)
    solution.plan.save(folder / "plan.json")
    profile().save(folder / "profile.json")
    return {
        "plan": (folder / "plan.json", load_plan, solution.plan),
        "profile": (folder / "profile.json", load_profile, profile()),
    }


@pytest.mark.parametrize("name", ["plan", "profile"])
def test_no_bit_turns_over_unnoticed(name, tmp_path):
    path, load, expected = files(tmp_path)[name]
    data = path.read_bytes()
    source = random.Random(1)
    refused = 0
    for _ in range(400):
        at, bit = source.randrange(len(data)), source.randrange(8)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            found = load(path)
        except QSyncError:
            refused += 1
            continue
        # Taken: then it was a blank, or the name of the digest's own key.
        assert replace(found, **({"extras": {}} if name == "plan" else {})) == expected
    assert refused > 200


@pytest.mark.parametrize("name", ["plan", "profile"])
def test_truncated_files_are_refused_at_every_length(name, tmp_path):
    path, load, expected = files(tmp_path)[name]
    data = path.read_bytes().rstrip()
    for length in sorted({0, 1, len(data) - 1, *random.Random(2).sample(range(len(data)), 60)}):
        path.write_bytes(data[:length])
        with pytest.raises(ProblemError, match="truncated"):
            load(path)
    path.write_bytes(data)
    assert load(path) == expected


def test_a_changed_number_is_told_from_a_meant_change(tmp_path):
    path = files(tmp_path)["plan"][0]
    data = json.loads(path.read_text())
    operator = next(iter(data["devices"]["T4"]))
    data["devices"]["T4"][operator] = "INT8" if data["devices"]["T4"][operator] != "INT8" else "FP16"
    path.write_text(json.dumps(data))
    with pytest.raises(ProblemError, match=r"damaged or changed.*remove x-digest"):
        load_plan(path)
    del data["x-digest"]
    path.write_text(json.dumps(data))
    plan = load_plan(path)
    plan.save(path)
    assert load_plan(path) == plan and ("x-digest",) not in plan.extras


# Shared caches -------------------------------------------------------------------------------------------------------

HAMMER = """
import logging, random, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
from qsync_opt.io import MeasurementCache
folder, seed = sys.argv[1], int(sys.argv[2])
source = random.Random(seed)
print("ready", flush=True)
sys.stdin.readline()
for round in range(150):
    cache = MeasurementCache(folder, {"device": "here"})
    key = f"operator {source.randrange(6)}"
    known = cache.get(key)
    if known is not None:
        assert known["key"] == key and known["values"] == [known["by"]] * 2000, known
    if source.random() < 0.6:
        cache.put(key, {"key": key, "by": seed, "values": [seed] * 2000})
"""


def test_jobs_that_share_a_cache_read_whole_measurements_only(tmp_path):
    command = [sys.executable, "-P", "-c", HAMMER, str(tmp_path)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    jobs = [subprocess.Popen([*command, str(seed)], text=True, **pipes) for seed in range(3)]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    for job in jobs:
        _, errors = job.communicate(timeout=250)
        assert job.returncode == 0 and errors == "", errors[-2000:]
    cache = MeasurementCache(tmp_path, ENVIRONMENT)
    assert all(cache.get(f"operator {i}") is not None for i in range(6))
    assert not list(tmp_path.rglob("*.tmp"))


READ_ONLY = """
import logging, os, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
from qsync_opt.io import MeasurementCache
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # to root, no folder is read-only
try:
    open(sys.argv[1] + "/probe", "w")
    sys.exit("the folder can be written")
except PermissionError:
    pass
for environment in ({"device": "here"}, {"device": "there"}):
    cache = MeasurementCache(sys.argv[1], environment)
    print(cache.get("known"))
    cache.put("new", {"ns": 2})
    cache.put("newer", {"ns": 3})
    print(cache.get("new"))
"""


@pytest.fixture
def open_folder():
    """One that other users get to: pytest's own lie in a private one, which all its processes share."""
    with tempfile.TemporaryDirectory(prefix="qsync-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_cache_that_cannot_be_written_is_read(open_folder):
    folder = open_folder / "cache"
    MeasurementCache(folder, ENVIRONMENT).put("known", {"ns": 1})
    inside = [folder, *folder.iterdir()]
    try:
        for path in inside:
            path.chmod(0o555)
        result = python(READ_ONLY, folder)
    finally:
        for path in inside:
            path.chmod(0o755)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:4] == ["{'ns': 1}", "{'ns': 2}", "None", "{'ns': 2}"]
    assert result.stderr.count("not kept for other runs") == 2  # once for each cache


CLOSED = """
import os, sys
from qsync_opt.io import MeasurementCache
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # root looks into every folder
cache = MeasurementCache(sys.argv[1], {"device": "here"})
print(cache.get("known"))
cache.put("known", {"ns": 2})
print(cache.get("known"))
"""


def test_a_cache_of_another_user_is_measured_again(open_folder):
    folder = open_folder / "cache"
    MeasurementCache(folder, ENVIRONMENT).put("known", {"ns": 1})
    (inside,) = folder.iterdir()
    try:
        inside.chmod(0o644)  # seen, and not to be looked into
        result = python(CLOSED, folder)
    finally:
        inside.chmod(0o755)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["None", "{'ns':", "2}"]


OVER_READ_ONLY = """
import os, sys
from qsync_opt.errors import ProblemError
from qsync_opt.io import write_text
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # root may write to every file
for name in sys.argv[1:]:
    try:
        write_text(name, "new")
        print("written")
    except ProblemError as refusal:
        print(refusal)
"""


def test_a_file_that_is_read_only_is_not_replaced(open_folder):
    kept, free = open_folder / "kept", open_folder / "free"
    for path, mode in ((kept, 0o444), (free, 0o666)):
        path.write_text("old")
        path.chmod(mode)
    open_folder.chmod(0o777)
    result = python(OVER_READ_ONLY, kept, free)
    assert result.returncode == 0, result.stderr
    refusal, written = result.stdout.splitlines()
    assert refusal.startswith(f"cannot write {str(kept)!r}; give a file")
    assert (written, kept.read_text(), free.read_text()) == ("written", "old", "new")
    assert sorted(path.name for path in open_folder.iterdir()) == ["free", "kept"]


def test_versions_do_not_read_each_others_measurements(tmp_path, monkeypatch):
    problem = chain().problem
    limits = {device.name: device.memory_limit_kib for device in problem.devices}
    front = FrontCache(tmp_path, problem, 0.0, None)
    front.put(7, limits, None)
    assert FrontCache(tmp_path, problem, 0.0, None).get(7, limits) == (None,)
    monkeypatch.setattr("qsync_opt.training.pareto.__version__", "99.0")
    assert FrontCache(tmp_path, problem, 0.0, None).get(7, limits) is None

    # A profile's measurements name the version in the device's identity, with those of the libraries.
    torch = pytest.importorskip("torch")
    from qsync_opt.runtimes.torch.support import device_identity

    here = {"device": encode(device_identity(torch.device("cpu")))}
    MeasurementCache(tmp_path, here).put("fc", {"ns": 1})
    monkeypatch.setattr(qsync_opt, "__version__", "99.0")
    there = {"device": encode(device_identity(torch.device("cpu")))}
    assert MeasurementCache(tmp_path, there).get("fc") is None
    MeasurementCache(tmp_path, there).put("fc", {"ns": 2})
    assert MeasurementCache(tmp_path, here).get("fc") == {"ns": 1}


def test_a_measurement_in_a_format_of_the_future_is_measured_again(tmp_path, caplog):
    MeasurementCache(tmp_path, ENVIRONMENT).put("fc", {"ns": 1})
    (path,) = tmp_path.rglob("*.json")
    data = json.loads(path.read_text())
    del data["x-digest"]
    path.write_text(json.dumps({**data, "format": "qsync-measurement/2"}))
    with caplog.at_level(logging.WARNING):
        assert MeasurementCache(tmp_path, ENVIRONMENT).get("fc") is None
    assert "qsync-measurement/2" in caplog.text


def test_problems_have_no_digest_and_stay_as_the_format_says(tmp_path):
    chain().problem.save(tmp_path / "problem.json")
    assert "x-digest" not in json.loads((tmp_path / "problem.json").read_text())
    assert load_problem(tmp_path / "problem.json") == chain().problem
