"""Several cards of one host: gradients, messages and checkpoints over NCCL, and what happens when a worker dies.

python benchmarks/cards.py [--device cuda|cpu] [--cards N] [--parts gradients,messages,checkpoints,lost] [--output FILE]

One process for each card. In ``gradients`` a bucket and a GPT are trained plainly, with DDP's BF16 hook, under single
schemes, and under the plan that recorded steps give: with the links that the cards have, and through sockets
(``NCCL_P2P_DISABLE``, ``NCCL_SHM_DISABLE``), which are slow. ``messages`` trains a GCN on a
stochastic block model in FP32, in uniform widths and in planned ones. ``checkpoints`` saves a GPT that FSDP2 shards
behind its training and loads it into other numbers of cards; every tensor is compared by its bits. In ``lost`` the last
worker kills itself, and the others must end with an error. For hybrid training see ``hybrid_step.py``. On a CPU
everything is small and runs over gloo.
Writes ``benchmarks/results/cards-<number>.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from gradients import bf16_on_gloo, flat_step
from results_head import asked_row, processors, results_head
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.gradients import Plan, fit_reductions, plan_reductions
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.ddp import broadcast_json, free_port, gather_json, process_group
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig

HERE = Path(__file__).parent
PARTS = ("gradients", "messages", "checkpoints", "lost")
SINGLE = ("FP32", "BF16", "two8", "sum8", "packed8")
SOCKETS = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip
SILENCE_S = 15.0
"""After which a worker gives another one up, where ``lost`` kills one."""
ENDED_S = 90.0
"""After the death of one worker, until when the others must have ended: NCCL takes some time to write what it saw."""
LIMIT_S = 150.0
"""Of any other part."""
SAVES = 4
"""Of ``checkpoints``; the first allocates."""
WAYS = {"gradients": ("links", "sockets"), "lost": ("gradients", "messages", "checkpoints")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each part computes."""

    buckets_mb: tuple[int, ...]
    gpt: GptConfig
    batch: int
    nodes: int
    hidden: int
    epochs: int
    rounds: int


SIZES = {
    "cuda": Sizes(
        buckets_mb=(1, 26, 100),
        gpt=GptConfig(vocabulary=8192, context=256, width=1024, heads=16, layers=12),
        batch=8,
        nodes=200_000,
        hidden=256,
        epochs=30,
        rounds=5,
    ),
    "cpu": Sizes(
        buckets_mb=(1,),
        gpt=GptConfig(vocabulary=64, context=16, width=64, heads=2, layers=2),
        batch=2,
        nodes=600,
        hidden=16,
        epochs=8,
        rounds=3,
    ),
}


class Worker:
    """One process: its rank, its device and what it reports."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        self.rank, self.world = rank, arguments.cards
        self.device = torch.device("cpu")
        self.sizes: Sizes = SIZES[arguments.device]
        if arguments.device == "cuda":
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(
        self, subjects: dict[str, Callable[[], None]], before: Callable[[str], None] = lambda name: None, steps: int = 3
    ) -> dict[str, list[float]]:
        """Milliseconds of a step by subject and round, of the slowest rank; they take turns, each after ``before``."""
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for turn in range(self.sizes.rounds + 2):  # two rounds settle buckets and compile
            for name, step in subjects.items():
                before(name)
                step()
                self.wait()
                dist.barrier()
                began = time.perf_counter()
                for _ in range(steps):
                    step()
                self.wait()
                spent = max(gather_json(1e3 * (time.perf_counter() - began) / steps))
                if turn > 1:
                    times[name].append(round(spent, 4))
        return times

    def gpt(self) -> nn.Module:
        """The same model on all ranks."""
        torch.manual_seed(0)
        return Gpt(self.sizes.gpt).to(self.device)

    def tokens(self, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of this rank, tokens and labels."""
        generator = torch.Generator().manual_seed(1 + self.rank + 100 * step)
        shape = (self.sizes.batch, self.sizes.gpt.context)
        tokens = torch.randint(0, self.sizes.gpt.vocabulary, shape, generator=generator).to(self.device)
        return tokens, tokens


def gradients(worker: Worker, link: str, folder: Path) -> list[dict[str, Any]]:
    """Buckets of some sizes, and steps of a GPT."""
    records = []
    subjects = ("FP32", "BF16 hook", *SINGLE[1:])
    for size in worker.sizes.buckets_mb:
        times = worker.timed({name: flat_step(name, size * 250_000 // 1024 * 1024, worker.device) for name in subjects})
        records += [
            {"part": "gradients", "what": "bucket", "link": link, "megabytes": size, "subject": name, "ms": ms}
            for name, ms in times.items()
        ]
    model, hooked, compressed = (DistributedDataParallel(worker.gpt()) for _ in range(3))
    hooked.register_comm_hook(None, bf16_compress_hook if worker.device.type == "cuda" else bf16_on_gloo)
    compression = qsync_opt.compress_gradients(compressed, "FP32")
    plain, halved, planned = (bf16_step(worker, each) for each in (model, hooked, compressed))
    plan, predicted_ms = recorded_plan(worker, compression, planned)
    plans: dict[str, Any] = {**{name: name for name in SINGLE[1:]}, "planned": plan}

    def use(name: str) -> None:
        if name in plans:
            compression.use(plans[name])

    times = worker.timed({"plain": plain, "BF16 hook": halved, **dict.fromkeys(plans, planned)}, use)
    facts = {"schemes": sorted(set(plan.schemes.values())), "predicted_ms": round(predicted_ms, 4)}
    records += [
        {"part": "gradients", "what": "GPT step", "link": link, "subject": name, "ms": ms}
        | (facts if name == "planned" else {})
        for name, ms in times.items()
    ]
    return records


def bf16_step(worker: Worker, parallel: DistributedDataParallel) -> Callable[[], None]:
    """A training step in BF16 autocast."""
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    batch = worker.tokens()

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(worker.device.type, torch.bfloat16):
            loss = parallel(*batch)
        loss.backward()
        optimizer.step()

    return run


def recorded_plan(worker: Worker, compression: Any, step: Callable[[], None]) -> tuple[Plan, float]:
    """The plan of a step as `auto_plan` makes it, from steps under every scheme, recorded twice; its step in ms."""

    def steps(count: int) -> None:
        for _ in range(count):
            step()
        worker.wait()

    steps(3)
    with compression.sampling():
        steps(2)
    records = []
    for name in (*SINGLE, *SINGLE):
        compression.use(name)
        steps(1)
        with compression.recording():
            steps(4)
        records.append(compression.recorded())
    sent: dict[str, Any] = {}
    if worker.rank == 0:
        fitted = fit_reductions(records)
        plan = plan_reductions(fitted, compression.statistics())
        sent = {"plan": plan.to_json(), "predicted_ms": fitted.predict(plan)[-1].end_ns / 1e6}
    sent = broadcast_json(sent)
    return Plan.from_json(sent["plan"]), float(sent["predicted_ms"])


def messages(worker: Worker, way: str, folder: Path) -> list[dict[str, Any]]:
    """Full-graph training in several widths."""
    from qsync_opt.messages import Plan as WidthPlan
    from qsync_opt.messages import Problem
    from qsync_opt.runtimes.torch.messages import TrainingOptions, block_graph, partition_graph, train

    sizes = worker.sizes
    part = partition_graph(block_graph(sizes.nodes, degree=10, mixing=0.3, dim=64), worker.world)[worker.rank]
    part = part.to(worker.device)
    options = TrainingOptions(hidden=sizes.hidden, epochs=sizes.epochs)

    def fixed(bits: int) -> TrainingOptions:
        return replace(options, messages=replace(options.messages, initial_bits=bits, replan_steps=0))

    records = []
    for name, bits in (("FP32", 32), ("BF16", 16), ("uniform 8", 8), ("uniform 4", 4)):
        trained, problem = train(part, fixed(bits), with_problem=bits == 4)
        records.append({"part": "messages", "subject": name, **trained.to_json()})
    shared = Problem.from_json(broadcast_json(problem))
    plan = WidthPlan.from_json(broadcast_json(qsync_opt.solve(shared).plan.to_json() if worker.rank == 0 else None))
    records.append({"part": "messages", "subject": "planned", **train(part, fixed(8), plan)[0].to_json()})
    return [{k: v for k, v in each.items() if k != "losses"} | {"loss": each["losses"][-1]} for each in records]


def sharded(worker: Worker) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT that FSDP2 shards over all cards."""
    model = worker.gpt()
    mesh = init_device_mesh(worker.device.type, (worker.world,))
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=mesh)
        elif name == "head":
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def trained_step(worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """The loss of one step."""
    optimizer.zero_grad()
    loss = model(*worker.tokens(step))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A hash of every tensor of a model and its optimizer, gathered whole."""
    values = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        values |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    result = {}
    for name, value in sorted(values.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        result[name] = hashlib.sha256(data).hexdigest()[:16]
    return result


def checkpoints(worker: Worker, way: str, folder: Path) -> list[dict[str, Any]]:
    """Save behind training; or load what another number of cards saved, as ``way`` says: "save", or "load"."""
    model, optimizer = sharded(worker)
    kept = qsync_opt.Checkpoints(folder / "kept", model, optimizer, keep=SAVES)
    facts: dict[str, Any] = {"part": "checkpoints", "what": way, "cards": worker.world}
    if way == "load":
        began = time.perf_counter()
        kept.load()
        worker.wait()
        facts["load_s"] = max(gather_json(time.perf_counter() - began))
        saved = json.loads((folder / "bits.json").read_text())
        present = bits_of(model, optimizer)
        different = [name for name in saved.keys() | present.keys() if saved.get(name) != present.get(name)]
        return [facts | {"tensors": len(saved), "different": len(different)}]
    for step in range(3):
        trained_step(worker, model, optimizer, step)
    bits: dict[str, str] = {}
    calls, durable, beside, plain = [], [], [], []
    for number in range(SAVES):
        worker.wait()
        dist.barrier()
        bits = bits_of(model, optimizer) if number == SAVES - 1 else {}
        began = time.perf_counter()
        kept.save_in_background(number)
        calls.append(max(gather_json(time.perf_counter() - began)))
        step_began = time.perf_counter()
        trained_step(worker, model, optimizer, number)
        worker.wait()
        beside.append(max(gather_json(time.perf_counter() - step_began)))
        kept.wait()
        durable.append(max(gather_json(time.perf_counter() - began)))
        for _ in range(3):
            step_began = time.perf_counter()
            trained_step(worker, model, optimizer, number)
            worker.wait()
            plain.append(max(gather_json(time.perf_counter() - step_began)))
    if worker.rank == 0:
        (folder / "bits.json").write_text(json.dumps(bits))
    size = sum(path.stat().st_size for path in (folder / "kept").rglob("*.safetensors")) // SAVES
    times = {"call_s": calls[1:], "step_beside_s": beside[1:], "plain_step_s": plain, "durable_s": durable[1:]}
    return [facts | {"bytes": size, **{name: [round(x, 5) for x in own] for name, own in times.items()}}]


def lost(worker: Worker, way: str, folder: Path) -> list[dict[str, Any]]:
    """The last worker kills itself in the middle of training; the others go on until they learn of it."""

    def die(step: int) -> None:
        if step == 5 and worker.rank == worker.world - 1:
            worker.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    if way == "messages":
        from qsync_opt.runtimes.torch.messages import TrainingOptions, block_graph, partition_graph, train

        part = partition_graph(block_graph(500, degree=8, dim=16), worker.world)[worker.rank].to(worker.device)
        train(part, TrainingOptions(hidden=16, epochs=200), on_epoch=die)
        return []
    if way == "checkpoints":
        model, optimizer = sharded(worker)
        kept = qsync_opt.Checkpoints(folder / "lost", model, optimizer)
        for step in range(200):
            trained_step(worker, model, optimizer, step)
            kept.save_in_background(step)
            die(step)
        return []
    model = DistributedDataParallel(worker.gpt())
    qsync_opt.compress_gradients(model, "packed8")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(200):
        trained_step(worker, model, optimizer, step)
        die(step)
    return []


def work(rank: int, port: int, part: str, way: str, arguments: argparse.Namespace, folder: Path) -> None:
    """One worker of one part; rank 0 writes the records."""
    worker = Worker(rank, arguments)
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    silence = SILENCE_S if part == "lost" else LIMIT_S
    with process_group(rank, worker.world, port, backend=backend, timeout_s=silence):
        records = globals()[part](worker, way, folder)
        if rank == 0:
            (folder / "records.json").write_text(json.dumps(records))
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # threads of hooks still hold groups


def run(part: str, way: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Records of one part."""
    (folder / "records.json").unlink(missing_ok=True)
    environment = os.environ | (SOCKETS if way == "sockets" else {}) | {"NCCL_NVLS_ENABLE": "0"}
    port, began = free_port(), time.monotonic()
    options = ("--device", arguments.device, "--cards", str(arguments.cards))
    base = [sys.executable, str(Path(__file__).resolve()), *options]
    logs = [folder / f"log-{rank}.txt" for rank in range(arguments.cards)]
    workers = []
    for rank, log in enumerate(logs):
        command = [*base, "--worker", f"{rank},{port},{part},{way},{folder}"]
        with log.open("w") as stream:
            workers.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, cwd=HERE))
    ended: list[float | None] = [None] * len(workers)
    while None in ended:
        now = time.monotonic() - began
        killed = ended[-1] if part == "lost" else None
        if now > (LIMIT_S if killed is None else killed + ENDED_S):
            break
        time.sleep(0.05)
        for rank, process in enumerate(workers):
            if ended[rank] is None and process.poll() is not None:
                ended[rank] = time.monotonic() - began
    statuses = [process.poll() for process in workers]
    for process in workers:
        process.kill()
        process.wait()
    if part == "lost":
        return [_lost(way, ended, statuses, logs)]
    if any(statuses) or None in statuses:
        last = "\n".join(log.read_text()[-1500:] for log in logs)
        print(f"{part} {way}: the workers ended with {statuses}\n{last}", flush=True)
        return [{"part": part, "what": way, "failure": f"the workers ended with {statuses}"}]
    records: list[dict[str, Any]] = json.loads((folder / "records.json").read_text())
    return records


def of_part(part: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Records of all ways of one part."""
    if part == "checkpoints":
        records = run(part, "save", arguments, folder)
        if "failure" not in records[-1]:
            for cards in sorted({1, max(1, arguments.cards // 2), arguments.cards}):
                records += run(part, "load", argparse.Namespace(device=arguments.device, cards=cards), folder)
        return records
    ways = [way for way in WAYS.get(part, ("",)) if way != "sockets" or arguments.device == "cuda"]
    if part != "lost":
        return [record for way in ways for record in run(part, way, arguments, folder)]
    places = [folder / way for way in ways]
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(len(ways)) as pool:  # nothing is timed but how long workers wait
        futures = [pool.submit(run, part, way, arguments, place) for way, place in zip(ways, places, strict=True)]
    return [record for future in futures for record in future.result()]


def _lost(
    way: str, ended: Sequence[float | None], statuses: Sequence[int | None], logs: Sequence[Path]
) -> dict[str, Any]:
    killed = ended[-1]
    others = [None if end is None or killed is None else round(end - killed, 2) for end in ended[:-1]]
    lines = logs[0].read_text().splitlines()
    named = [line for line in lines if "Error: " in line or "timeout" in line]
    return {
        "part": "lost",
        "what": way,
        "others_ended_after_s": others,
        "statuses": list(statuses),
        "message": next(reversed([line for line in named or lines if line.strip()]), "")[:400],
    }


def asked(records: Sequence[dict[str, Any]], cards: int) -> list[dict[str, Any]]:
    """One row for each figure that was set as a target."""
    rows = [
        asked_row(f"{record['part']} {record['what']}", "runs", None, False, record["failure"])
        for record in records
        if "failure" in record
    ]
    for link in WAYS["gradients"]:
        steps = {
            r["subject"]: statistics.median(r["ms"])
            for r in records
            if r["part"] == "gradients" and r["what"] == "GPT step" and r.get("link") == link
        }
        plan = [r for r in records if r.get("link") == link and r.get("subject") == "planned"]
        if not plan:
            continue
        note = ", ".join(f"{name} {ms:.2f} ms" for name, ms in steps.items()) + f"; planned: {plan[0]['schemes']}"
        ratio = steps["planned"] / min(steps.values())
        rows.append(
            asked_row(
                f"gradients over {link}: planned step over the fastest", "<= 1.02", round(ratio, 3), ratio <= 1.02, note
            )
        )
        error = plan[0]["predicted_ms"] / steps["planned"] - 1
        what = f"gradients over {link}: predicted over measured step under the plan"
        rows.append(asked_row(what, "within 10 %", round(error, 3), abs(error) <= 0.1))
    trained = {r["subject"]: r for r in records if r["part"] == "messages" and "subject" in r}
    if trained:
        best = min(trained, key=lambda name: trained[name]["epoch_s"])
        ratio = trained["planned"]["epoch_s"] / trained[best]["epoch_s"]
        note = ", ".join(f"{name} {1e3 * each['epoch_s']:.2f} ms" for name, each in trained.items())
        rows.append(
            asked_row("messages: planned epoch over the fastest", "<= 1.02", round(ratio, 3), ratio <= 1.02, note)
        )
    for record in records:
        if record["part"] == "checkpoints" and record["what"] == "save" and "call_s" in record:
            plain, call = statistics.median(record["plain_step_s"]), statistics.median(record["call_s"])
            stall = statistics.median(
                c + s - plain for c, s in zip(record["call_s"], record["step_beside_s"], strict=True)
            )
            note = (
                f"{record['bytes'] / 1e9:.2f} GB, the call {1e3 * call:.1f} ms, a step {1e3 * plain:.1f} ms, durable "
            )
            note += f"{statistics.median(record['durable_s']):.2f} s"
            rows.append(asked_row(f"FSDP2 on {cards}: stall", "<= 5 ms", round(1e3 * stall, 2), stall <= 5e-3, note))
        if record["part"] == "checkpoints" and record["what"] == "load" and "different" in record:
            what = f"FSDP2, {cards} to {record['cards']} cards: tensors that differ of {record['tensors']}"
            rows.append(
                asked_row(what, "0", record["different"], record["different"] == 0, f"{record['load_s']:.2f} s")
            )
    for record in records:
        if record["part"] == "lost":
            most = None if None in record["others_ended_after_s"] else max(record["others_ended_after_s"])
            *others, last = record["statuses"]
            met = most is not None and last == -signal.SIGKILL and not {0, None} & {*others}
            what = f"{record['what']}: seconds until all others end once a worker was killed"
            rows.append(asked_row(what, f"<= {ENDED_S:.0f}, with an error", most, met, record["message"]))
    return rows


def main() -> None:
    """Run all parts and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cards", type=int, help="all that there are; 2 processes on a CPU")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.cards = arguments.cards or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    if arguments.worker:
        rank, port, part, way, folder = arguments.worker.split(",", 4)
        work(int(rank), int(port), part, way, arguments, Path(folder))
        return
    parts = arguments.parts.split(",")
    if unknown := sorted({*parts} - {*PARTS}):
        parser.error(f"parts has {', '.join(unknown)}; allowed are {', '.join(PARTS)}")
    records: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    card = f"{arguments.cards} x {torch.cuda.get_device_name()}, " if arguments.device == "cuda" else ""
    head = results_head(f"{card}{processors()}", {"torch": torch.__version__})
    output = arguments.output or HERE / "results" / f"cards-{arguments.cards}.json"
    with tempfile.TemporaryDirectory() as name:
        for part in parts:
            records += of_part(part, arguments, Path(name))
            rows = asked(records, arguments.cards)
            write_json(output, {**head, "asked": rows, "records": records})  # what is there if a later part fails
            print(f"{part} ended", flush=True)
    for row in rows:
        print(f"{row['what']}: asked {row['asked']}, measured {row['measured']} {row['note']}")


if __name__ == "__main__":
    main()
