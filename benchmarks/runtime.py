"""What a plan costs and gains in training: beside plain DistributedDataParallel, over many steps, on a hybrid cluster.

Three parts, each of one or two workers that this script starts:

* ``overhead``: a plan of FP32 or BF16 alone beside what plain DDP does in that precision, steps of both in turn.
* ``soak``: thousands of steps, planned again every hundred: memory and time per step, block by block.
* ``throughput``: samples per second of the plan, of every uniform precision, of autocast, of local batches sized by
  speed, and of both together. On CUDA the second worker is a partition of its card there, with a memory limit of its
  own; in the other parts workers have whole cards.

With ``--device cuda`` the workers talk through NCCL, on the CPU through gloo. With one card there is one worker, and
throughput is that of the whole card and of its partition one after the other. Writes
``benchmarks/results/runtime.json`` after every part and model, keeping what other hardware measured.

    python benchmarks/runtime.py [--device cpu|cuda] [--parts overhead soak throughput] [--models bert-base ...]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.ddp import free_port

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "runtime.json"
FORMAT = "qsync-bench-runtime/1"
PARTS = ("overhead", "soak", "throughput")
RESTARTS = 5
"""How often workers are started for one model, when one of them ends in an error."""
MODELS = ("bert-base", "gpt2", "resnet50", "vit-base")
MORE_MODELS = (*MODELS, "gpt-small")


def hardware_of(part: str, arguments: argparse.Namespace) -> str:
    if arguments.device == "cpu":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores, a thread per worker"
        return platform.machine()
    cards = min(arguments.workers, torch.cuda.device_count())
    name = f"{torch.cuda.get_device_name()} x {cards}"
    if part != "throughput":
        return name
    if arguments.workers == 1:
        return f"{name}, in turn also a worker on {arguments.multiprocessors[0]} SMs"
    sizes = [f"{count} SMs" if count else "a whole card" for count in arguments.multiprocessors]
    how = " (by the Multi-Process Service)" if arguments.partition == "mps" else ""
    if arguments.workers > cards:
        how += f" ({-(-arguments.workers // cards)} to a card, gloo)"
    return f"{name}, {arguments.workers} workers on {', '.join(sizes)}{how}"


def with_facts(records: list[dict[str, Any]], hardware: str) -> list[dict[str, Any]]:
    """Records with where and when they were measured."""
    facts = {
        "hardware": hardware,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host_load": round(os.getloadavg()[0], 1),
    }
    return [{**record, **facts} for record in records]


def merged(data: dict[str, Any], part: str, new: list[dict[str, Any]]) -> dict[str, Any]:
    """The result file with these records in place of what the same hardware measured before."""
    keys = {(record["hardware"], record["model"]) for record in new}
    kept = [record for record in data.get(part, []) if (record["hardware"], record["model"]) not in keys]
    found = {**data, "format": FORMAT, part: [*kept, *new]}
    records = [record for name in PARTS for record in found.get(name, [])]

    def different(fact: str) -> str:
        return ", ".join(sorted({record[fact] for record in records}))

    return {
        **found,
        "date": max(record["date"] for record in records),
        "hardware": "; ".join(dict.fromkeys(record["hardware"] for record in records)),
        "versions": {"python": different("python"), "torch": different("torch")},
        "command": "python benchmarks/runtime.py --device cpu|cuda --workers N --sms ... --parts ... --models ...",
    }


def known_results(path: Path) -> dict[str, Any]:
    """A result file, empty where there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def join(files: list[Path], output: Path) -> None:
    """Take over what was measured elsewhere; later files win."""
    data = known_results(output)
    for file in files:
        other = known_results(file)
        for part in PARTS:
            if other.get(part):
                data = merged(data, part, other[part])
    write_json(output, data)


def with_plans(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of throughput, each with its sensitivity and the plan's with its prediction, from the one about it."""
    told = next((record for record in records if "sensitivities" in record), None)
    others = [record for record in records if "sensitivities" not in record]
    if told is None:
        return others
    for record in others:
        computed = record["configuration"].removeprefix("local batches by speed, ")
        name = computed.removesuffix(", captured").removeprefix("uniform ").removesuffix(" autocast")
        record.setdefault("sensitivity", told["sensitivities"].get(name))
        if record["configuration"] == "plan":
            record.update({name: fact for name, fact in told.items() if name not in ("model", "sensitivities")})
    return others


def run_workers(part: str, model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the workers of one part; what rank 0 wrote, also where they took too long.

    Where a worker fails, that is the record of the configuration it was in, and new workers go on with the next one.
    """
    deadline = time.monotonic() + arguments.timeout
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "records.jsonl"
        for _ in range(RESTARTS if part == "throughput" else 1):
            failure = _run_once(part, model, arguments, output, deadline)
            if failure is None:
                break
            print(f"{part} {model}: {failure}", flush=True)
            begun = output.with_suffix(".begun")
            if time.monotonic() > deadline or not begun.exists():
                break
            record = {"model": model, "configuration": begun.read_text(encoding="utf-8"), "failure": failure}
            with open(output, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
        if not output.exists():
            return []
        records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        if part == "overhead":
            return with_peaks(records, arguments, Path(folder), deadline)
        # A soak writes anew what it has seen so far.
        return records[-1:] if part == "soak" else with_plans(latest(records))


def latest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what was measured again later, in turn with others."""
    last = {record.get("configuration", ""): record for record in records}
    return [record for record in records if last[record.get("configuration", "")] is record]


def with_peaks(
    records: list[dict[str, Any]], arguments: argparse.Namespace, folder: Path, deadline: float
) -> list[dict[str, Any]]:
    """Records of overhead with peaks of memory, each of which is of workers that do nothing else."""
    if arguments.device == "cpu":  # the resident set is no measure
        return records

    def peak(case: str) -> int | None:
        output = folder / case / "peak.jsonl"
        output.parent.mkdir()
        failure = _run_once("peak", case, arguments, output, deadline)
        if failure is not None:
            print(f"peak of {case}: {failure}", flush=True)
        return json.loads(output.read_text(encoding="utf-8"))["peak_bytes"] if output.exists() else None

    labels = ("plain", "plan")
    cases = [f"{number}{label}" for number in range(len(records)) for label in labels]
    with ThreadPoolExecutor(len(cases) or 1) as pool:  # side by side: nothing is timed
        peaks = dict(zip(cases, pool.map(peak, cases), strict=True))
    for number, record in enumerate(records):
        for label in labels:
            record[f"{label}_peak_bytes"] = peaks[f"{number}{label}"]
        both = record["plain_peak_bytes"], record["plan_peak_bytes"]
        record["more_memory"] = both[1] / both[0] - 1 if all(both) else None
    return records


def _run_once(part: str, model: str, arguments: argparse.Namespace, output: Path, deadline: float) -> str | None:
    """Start workers and wait for them; why they did not end well, None if they did."""
    task = {
        "part": part,
        "model": model,
        "device": arguments.device,
        "multiprocessors": arguments.multiprocessors,
        "memory": arguments.memory,
        "steps": arguments.steps,
        "port": free_port(),
        "started": time.time(),
        "output": str(output),
        "cache": str(arguments.cache),
        "by_service": arguments.partition == "mps",
        "precisions": arguments.precisions,
    }
    threads = "1" if arguments.device == "cpu" else str(max(1, len(os.sched_getaffinity(0)) // arguments.workers))
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": threads}
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    where = output if arguments.logs is None else arguments.logs / f"{part}-{model}"
    logs = [where.with_name(f"{where.stem}-worker-{rank}.log") for rank in range(arguments.workers)]
    workers = []
    try:
        for rank, log in enumerate(logs):
            if arguments.partition == "mps":
                whole = torch.cuda.get_device_properties(0).multi_processor_count
                share = 100 * (arguments.multiprocessors[rank] or whole) / whole
                environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{share:.1f}"
            command = [sys.executable, "-P", str(HERE / "runtime_worker.py"), json.dumps(task), str(rank)]
            with open(log, "ab") as stream:
                workers.append(subprocess.Popen(command, env=environment, stderr=stream))
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() not in (None, 0) for worker in workers):
                break
            if time.monotonic() > deadline:
                for worker in workers:
                    worker.send_signal(signal.SIGUSR1)  # says where it is
                time.sleep(1.0)
                for rank, log in enumerate(logs):
                    print(f"worker {rank}:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}", flush=True)
                return "took too long"
            time.sleep(0.1)
        failed = [rank for rank, worker in enumerate(workers) if worker.poll() not in (None, 0)]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if not failed:
        return None
    text = logs[failed[0]].read_text(encoding="utf-8", errors="replace")
    print(text[-3000:], flush=True)
    said = [line.strip() for line in text.splitlines() if "Error" in line] or ["it said nothing"]
    return f"worker {failed[0]} ended with status {workers[failed[0]].returncode}: {said[-1][:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MORE_MODELS, default=list(MODELS), help="of throughput")
    parser.add_argument("--workers", type=int, help="two; where there is one card alone, one")
    parser.add_argument(
        "--sms", type=int, nargs="+", help="multiprocessors of every worker, 0 for the whole card; one worker: 16"
    )
    parser.add_argument(
        "--partition",
        choices=("context", "mps"),
        default="context",
        help="what makes parts of cards: contexts with few multiprocessors, or CUDA's Multi-Process Service",
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        help="that plans may use, where others cannot be: convolutions in 8 bits meet kernels that a context with few "
        "multiprocessors refuses",
    )
    parser.add_argument("--memory", default="16 GiB", help="limit of workers on a part of a card")
    parser.add_argument("--steps", type=int, default=2000, help="of the soak")
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds for one part and model")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "qsync-runtime", help="measurements"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--logs", type=Path, help="folder that keeps what workers said")
    parser.add_argument("--join", type=Path, nargs="+", help="result files to take over; nothing is measured then")
    arguments = parser.parse_args()
    if arguments.join:
        join(arguments.join, arguments.output)
        return
    if arguments.workers is None:
        arguments.workers = 2 if arguments.device == "cpu" or torch.cuda.device_count() > 1 else 1
    parts_of_cards = arguments.sms or [0, 16][-arguments.workers :]
    if len(parts_of_cards) != arguments.workers:
        parser.error(f"--sms names {len(parts_of_cards)} parts of cards, but there are {arguments.workers} workers")
    arguments.multiprocessors = parts_of_cards
    with contextlib.ExitStack() as stack:
        if arguments.partition == "mps":
            os.environ.update(stack.enter_context(service()))
        _measure(arguments)


@contextlib.contextmanager
def service() -> Iterator[dict[str, str]]:
    """A control daemon of the Multi-Process Service for this run alone; the variables that its clients need."""
    torch.cuda.init()  # this process is none of its clients, for which it would wait at its end
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in own.values():
            os.mkdir(path)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **own}, check=True, timeout=20)
        try:
            # Clients see the daemon's cards, numbered from 0.
            yield {**own, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(torch.cuda.device_count())))}
        finally:
            command = ["nvidia-cuda-mps-control"]
            subprocess.run(command, input="quit\n", text=True, env={**os.environ, **own}, timeout=30)


def _measure(arguments: argparse.Namespace) -> None:
    for part in arguments.parts:
        for model in arguments.models if part == "throughput" else ("gpt",):
            began = time.monotonic()
            records = run_workers(part, model, arguments)
            if records:
                new = with_facts(records, hardware_of(part, arguments))
                write_json(arguments.output, merged(known_results(arguments.output), part, new))
            print(f"{part} {model}: {len(records)} records in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
