"""Saving a model and its optimizer: this package's `Checkpoints` beside ``torch.save`` and ``torch.distributed``.

Every subject saves the same parameters and momenta, in turn, into the same folder. Of each save are recorded:

- ``call_s``: until the call returns;
- ``staged_s``: until the parameters may change, with nothing to hide the copy behind;
- ``durable_s``: until the checkpoint is complete and flushed to the disk, with no older one to remove (which takes
  the file system up to 0.3 s a gigabyte);
- ``host_bytes``: how much resident memory grew at most, from before the first save (None where the system tells not).

``disk`` is no checkpoint: as many bytes of memory written to one file and flushed, plainly and past the cache; the
faster way is the disk's own rate. ``torch.save`` is flushed by the benchmark, since it does not do so itself. Steps
beside a save are products on the same device and the optimizer's step of the saved parameters.

    python benchmarks/checkpoints.py                          # CPU; writes benchmarks/results/checkpoints.json
    python benchmarks/checkpoints.py --device cuda            # writes benchmarks/results/checkpoints-<card>.json
    python benchmarks/checkpoints.py --device cuda --sizes 1000,5000 --only background dcp.save --output peers.json
    python benchmarks/checkpoints.py --sizes 16 --rounds 1 --previous "" --output /tmp/smoke.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed.checkpoint as dcp
from results_head import asked_row, processors, results_head
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import qsync_opt
from qsync_opt.io import write_json

HERE = Path(__file__).parent
PREVIOUS = "5f7b86b"
"""The last commit whose checkpoints were of the first format."""
OURS = ("background", "save")
SIDES = {"cpu": 1024, "cuda": 2048}
CHUNK = 4 * 2**20
Record = dict[str, Any]


class Parameters(nn.Module):
    """Square matrices, half of the bytes that are saved; the other half are their momenta."""

    def __init__(self, megabytes: int, device: str) -> None:
        super().__init__()
        side = SIDES[device]
        count = max(1, round(megabytes * 1e6 / (8 * side * side)))
        self.weights = nn.ParameterList([torch.randn(side, side, device=device) for _ in range(count)])


class Job:
    """What is saved, and steps that take about as long as the copy of it."""

    def __init__(self, megabytes: int, device: str) -> None:
        self.device = device
        self.model = Parameters(megabytes, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.num_bytes = 2 * sum(p.numel() * p.element_size() for p in self.model.parameters())
        side = 8192 if device == "cuda" else 512
        self._factor = torch.randn(side, side, device=device, dtype=torch.bfloat16 if device == "cuda" else None)
        self._products = 1
        seconds = min(self._timed(self.passes) for _ in range(5))
        # Forward and backward passes of a real job last longer than a copy at the rate of PCIe or of memory.
        wanted = max(0.05, self.num_bytes / (30e9 if device == "cuda" else 3e9))
        self._products = max(1, round(wanted / seconds))

    def passes(self) -> None:
        """In place of the forward and backward passes."""
        for _ in range(self._products):
            torch.mm(self._factor, self._factor)

    def step(self) -> None:
        """One step of training."""
        self.passes()
        self.optimizer.step()

    def _timed(self, work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def step_seconds(self) -> float:
        """Of one step, until it is done."""
        return self._timed(self.step)

    def passes_seconds(self) -> float:
        """Of its passes alone."""
        return self._timed(self.passes)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def state(self) -> dict[str, Any]:
        """As other checkpoints take it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Subject:
    """One way of saving: ``save`` begins, ``stage`` waits until parameters may change, ``wait`` until it is on disk."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder

    def save(self, number: int) -> None:
        raise NotImplementedError

    def stage(self) -> None:
        """Nothing, if saving waited."""

    def wait(self) -> None:
        """Nothing, if saving waited."""

    def close(self) -> None:
        """Give threads and memory back."""


class Background(Subject):
    """`Checkpoints.save_in_background`."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        self.checkpoints = qsync_opt.Checkpoints(folder, job.model, job.optimizer, keep=1)

    def save(self, number: int) -> None:
        self.checkpoints.save_in_background(number)

    def stage(self) -> None:
        self.checkpoints.wait_for_copy()

    def wait(self) -> None:
        self.checkpoints.wait()


class Save(Subject):
    """`Checkpoints.save`."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        self.checkpoints = qsync_opt.Checkpoints(folder, job.model, job.optimizer, keep=1)

    def save(self, number: int) -> None:
        self.checkpoints.save(number)


class TorchSave(Subject):
    """``torch.save``, flushed."""

    def save(self, number: int) -> None:
        path = self.folder / f"{number}.pt"
        with open(path, "wb") as stream:
            torch.save(self.job.state(), stream)
            stream.flush()
            os.fsync(stream.fileno())


class DcpSave(Subject):
    """``torch.distributed.checkpoint.save``."""

    def save(self, number: int) -> None:
        dcp.save(self.job.state(), checkpoint_id=self.folder / str(number), no_dist=True)


class DcpAsync(Subject):
    """``torch.distributed.checkpoint.async_save`` with its default staging."""

    stager: Any = None

    def save(self, number: int) -> None:
        path = self.folder / str(number)
        self.response = dcp.async_save(
            self.job.state(), checkpoint_id=path, async_stager=self.stager, no_dist=True, use_collectives=False
        )

    def stage(self) -> None:
        if (staged := getattr(self.response, "staging_completion", None)) is not None:
            staged.result()

    def wait(self) -> None:
        getattr(self.response, "upload_completion", self.response).result()

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DcpStaged(DcpAsync):
    """The same with a stager that is kept: pinned and asynchronous on a card, shared memory on a CPU."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        card = job.device == "cuda"
        options = StagingOptions(
            use_pinned_memory=card, use_shared_memory=True, use_async_staging=card, use_non_blocking_copy=card
        )
        self.stager = DefaultStager(options)


class TorchCheckpointing(Subject):
    """The package ``torch_checkpointing``, if it is installed: asynchronous on a card, where alone it can be."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        from torch_checkpointing import CheckpointManager

        card = job.device == "cuda"
        self.manager = (CheckpointManager.Config if card else CheckpointManager.Config.with_sync_save)().build()

    def save(self, number: int) -> None:
        state = self.job.state()
        tensors = {f"model-{name}".replace(".", "-"): value for name, value in state["model"].items()}
        for key, values in state["optimizer"]["state"].items():
            tensors |= {f"optimizer-{key}-{name}": value for name, value in values.items()}
        self.response = self.manager.save(str(self.folder / str(number)), tensors)

    def stage(self) -> None:
        with self.manager.lock():
            pass

    def wait(self) -> None:
        if self.response is not None:
            self.response.result()

    def close(self) -> None:
        self.manager.close()


class Disk(Subject):
    """The disk's own rate: one file of so many bytes, from memory that is there."""

    direct = False

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        self.chunk = mmap.mmap(-1, CHUNK)
        self.chunk.write(os.urandom(CHUNK))

    def save(self, number: int) -> None:
        path = self.folder / str(number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if self.direct else 0), 0o600)
        chunks = range(-(-self.job.num_bytes // CHUNK))
        data = memoryview(self.chunk)
        try:
            if self.direct:
                os.posix_fallocate(descriptor, 0, len(chunks) * CHUNK)  # as checkpoints do: it is faster
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(lambda k: os.pwrite(descriptor, data, k * CHUNK), chunks))
            else:
                for _ in chunks:
                    os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class DiskDirect(Disk):
    """The same, past the system's cache."""

    direct = True


SUBJECTS: dict[str, type[Subject]] = {
    "background": Background,
    "save": Save,
    "disk": Disk,
    "disk, direct": DiskDirect,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, kept stager": DcpStaged,
    "torch_checkpointing": TorchCheckpointing,
}


def _resident(field: str) -> int | None:
    """``VmRSS`` or ``VmHWM`` of this process in bytes; None where the system tells not."""
    with contextlib.suppress(OSError), open("/proc/self/status") as stream:
        for line in stream:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def _restart_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _empty(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def measure(name: str, job: Job, folder: Path, rounds: int) -> Iterator[Record]:
    """A record of each save of a subject; the first one, marked so, allocates and pins."""
    gc.collect()
    before, told = _resident("VmRSS"), _restart_peak()
    subject = SUBJECTS[name](job, folder)
    try:
        for number in range(rounds + 1):
            os.sync()
            job.synchronize()
            began = time.perf_counter()
            subject.save(number)
            called = time.perf_counter() - began
            subject.stage()
            job.synchronize()
            staged = time.perf_counter() - began
            subject.wait()
            durable = time.perf_counter() - began
            peak = _resident("VmHWM")
            yield {
                "subject": name,
                "bytes": job.num_bytes,
                "first": number == 0,
                "call_s": round(called, 5),
                "staged_s": round(staged, 5),
                "durable_s": round(durable, 5),
                "host_bytes": peak - before if told and peak and before else None,
            }
            _empty(folder)
        if isinstance(subject, Background):
            yield _steps_beside(job, subject, folder, rounds)
    finally:
        subject.close()
        del subject
        _empty(folder)
        gc.collect()


def _steps_beside(job: Job, subject: Background, folder: Path, rounds: int) -> Record:
    """Seconds of steps without a save, and of those that end before one is durable."""
    for parameter in job.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        job.step_seconds()
    plain = [job.step_seconds() for _ in range(10)]
    passes = [job.passes_seconds() for _ in range(5)]
    beside: list[list[float]] = []
    calls = []
    for number in range(rounds):
        os.sync()
        began = time.perf_counter()
        subject.save(100 + number)
        calls.append(round(time.perf_counter() - began, 5))
        steps = []
        while subject.checkpoints.saving or not steps:
            steps.append(round(job.step_seconds(), 5))
        beside.append(steps)
        subject.wait()
        _empty(folder)
        plain += [job.step_seconds() for _ in range(5)]
    return {
        "what": "steps",
        "bytes": job.num_bytes,
        "call_s": calls,
        "passes_s": [round(each, 5) for each in passes],
        "plain_s": [round(each, 5) for each in plain],
        "beside_s": beside,
    }


def previous_save(commit: str, megabytes: int, folder: Path, rounds: int) -> list[Record]:
    """Records of `Checkpoints.save` of an older commit, from a worktree that is removed again."""
    tree = folder.parent / "previous"
    subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=HERE, check=True, capture_output=True)
    try:
        command = [sys.executable, str(Path(__file__).resolve()), "--sizes", str(megabytes), "--rounds", str(rounds)]
        command += ["--only", "save", "--print", "--folder", str(folder), "--threads", str(torch.get_num_threads())]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=HERE, check=True, capture_output=True)
    records: list[Record] = json.loads(done.stdout.splitlines()[-1])
    return [record | {"subject": f"save of {commit}"} for record in records]


def _median(records: list[Record], subject: str, num_bytes: int, key: str) -> float | None:
    values = [r[key] for r in records if r.get("subject") == subject and r["bytes"] == num_bytes and not r["first"]]
    return statistics.median(values) if values else None


def asked_of_cpu(records: list[Record]) -> list[Record]:
    """One row for each figure that was set as a target on two processors."""
    num_bytes = next((r["bytes"] for r in records if abs(r["bytes"] - 268e6) < 4e6), None)
    rows = []
    for what, key, most, limit in (
        ("stall, 268 MB, nothing to hide the copy behind", "staged_s", 0.12, 0.09),
        ("durable, 268 MB", "durable_s", 0.48, 0.42),
    ):
        measured = None if num_bytes is None else _median(records, "background", num_bytes, key)
        met = measured is not None and measured <= most
        note = f"limit {limit} s" if measured is not None else "268 MB was not measured"
        rows.append(asked_row(what, f"<= {most} s", measured, met, note))
    return rows + _memory_rows(records)


def _memory_rows(records: list[Record]) -> list[Record]:
    rows = []
    for num_bytes in sorted({r["bytes"] for r in records if r.get("subject") == "background"}):
        own = [r["host_bytes"] for r in records if r.get("subject") == "background" and r["bytes"] == num_bytes]
        most = None if None in own or not own else max(own)
        what = f"host memory beyond one copy, {num_bytes / 1e9:.3g} GB"
        beyond = None if most is None else round((most - num_bytes) / 2**20, 1)
        note = "" if beyond is not None else "the system does not tell peaks"
        rows.append(asked_row(what, "<= 64 MiB", beyond, beyond is not None and beyond <= 64, note))
    return rows


def asked_of_card(records: list[Record]) -> list[Record]:
    """One row for each figure that was set as a target on one card."""
    rows = []
    for steps in (r for r in records if r.get("what") == "steps"):
        num_bytes = steps["bytes"]
        size = f"{num_bytes / 1e9:.3g} GB"
        plain = statistics.median(steps["plain_s"])
        copy = _median(records, "background", num_bytes, "staged_s") or 0.0
        hidden = statistics.median(steps["passes_s"])
        stalls = [c + own[0] - plain for c, own in zip(steps["call_s"], steps["beside_s"], strict=True)]
        stall = round(statistics.median(stalls), 5)
        most = round(max(0.0, copy - hidden) + 0.005, 5)
        note = f"copy {copy:.3f} s, passes that hide it {hidden:.3f} s"
        rows.append(asked_row(f"stall, {size}", f"<= {most} s", stall, stall <= most, note))
        disks = [_median(records, name, num_bytes, "durable_s") for name in ("disk", "disk, direct")]
        own = min((seconds for seconds in disks if seconds is not None), default=None)
        durable = _median(records, "background", num_bytes, "durable_s")
        ratio = None if own is None or durable is None else round(durable / own, 3)
        note = "" if own is None else f"the disk alone {own:.3f} s"
        rows.append(
            asked_row(f"durable against the disk, {size}", "<= 1.1", ratio, ratio is not None and ratio <= 1.1, note)
        )
        later = [step for own_steps in steps["beside_s"] for step in own_steps]
        slower = round(100 * (statistics.fmean(later) / plain - 1), 2)
        note = f"{len(later)} steps beside saves, the first after each call included"
        rows.append(asked_row(f"steps beside a save, {size}", "<= 3 % slower", slower, slower <= 3, note))
    return rows + _memory_rows(records)


def _file_system(folder: Path) -> str:
    done = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _hardware(device: str) -> str:
    card = f"{torch.cuda.get_device_name()}, " if device == "cuda" else ""
    return f"{card}{processors()}"


def _order(only: list[str], sizes: list[int], device: str) -> list[tuple[int, str]]:
    """Size by size; where all subjects are measured on a card, peers come after the largest size of the others."""
    names = only or [*OURS, "disk", "disk, direct"]
    peers = [] if only else [name for name in SUBJECTS if name not in names]
    if device == "cpu":
        return [(size, name) for size in sizes for name in (*names, *peers)]
    return [(size, name) for some in (names, peers) for size in sizes for name in some]


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", help="megabytes; 64,268,1000 or, on a card, 1000,5000,10000")
    parser.add_argument("--rounds", type=int, help="saves of each subject after its first; 5 or, on a card, 2")
    parser.add_argument("--threads", type=int, default=2, help="of torch on a CPU")
    parser.add_argument("--budget", type=float, help="seconds after which no further subject begins; 130 on a card")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; the system's temporary folder")
    parser.add_argument("--previous", default=PREVIOUS, help="commit whose save is measured too, on a CPU")
    parser.add_argument("--only", nargs="+", default=[], choices=SUBJECTS, metavar="SUBJECT", help="these, in order")
    parser.add_argument("--print", action="store_true", help="print the records, write nothing")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers about missing process groups
    device, card = arguments.device, arguments.device == "cuda"
    sizes = [int(size) for size in (arguments.sizes or ("1000,5000,10000" if card else "64,268,1000")).split(",")]
    rounds = arguments.rounds or (2 if card else 5)
    budget = arguments.budget or (130.0 if card else 3600.0)
    if not card:
        torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    records: list[Record] = []
    skipped = []
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="checkpoints-") as name:
        folder = Path(name) / "run"
        folder.mkdir()
        kind = _file_system(folder)
        job, of_size = None, None
        for size, subject in _order(arguments.only, sizes, device):
            if time.monotonic() - began > budget:
                skipped.append(f"{subject} at {size} MB")
                continue
            if subject == "torch_checkpointing" and importlib.util.find_spec(subject) is None:
                skipped.append(f"{subject} at {size} MB: it is not installed")
                continue
            if of_size != size:
                job = None
                gc.collect()
                job, of_size = Job(size, device), size
            assert job is not None
            try:
                own = list(measure(subject, job, folder, rounds))
            except Exception as failure:  # a peer that cannot do it is a result, too
                if subject in OURS:
                    raise
                skipped.append(f"{subject} at {size} MB: {type(failure).__name__}: {failure}"[:300])
                continue
            records += own
            if not arguments.print:
                last = [record for record in own if "subject" in record][-1]
                print(f"{size} MB {subject}: " + ", ".join(f"{k} {last[k]}" for k in ("staged_s", "durable_s")))
        if not card and not arguments.print and arguments.previous:
            for size in sizes:
                records += previous_save(arguments.previous, size, folder, min(rounds, 3))
    if arguments.print:
        print(json.dumps(records))
        return
    short = "-".join(torch.cuda.get_device_name().lower().split()[1:2]) if card else ""
    output = arguments.output or HERE / "results" / f"checkpoints{'-' * bool(short)}{short}.json"
    data = {
        **results_head(_hardware(device), {"torch": torch.__version__}),
        "file_system": kind,
        "skipped": skipped,
        "asked": (asked_of_card if card else asked_of_cpu)(records),
        "records": records,
    }
    write_json(output, data)
    for each in data["asked"]:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} {each['note']}")


if __name__ == "__main__":
    main()
