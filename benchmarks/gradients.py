"""Compressed all-reduce between two gloo ranks, beside plain FP32, DDP's BF16 hook and PowerSGD.

Each subject is a ``DistributedDataParallel`` model with one bucket of a size, or a small GPT; what is timed is its
backward pass with the reduction in it. That of a bucket adds a constant to it in place; ``nothing`` is this pass with
no reduction at all. Subjects take turns in every round, and a round counts with the slower rank.
Links of so many Gbit/s are pairs of network namespaces that this script makes (it needs root and ``tc``) and
removes; ``loopback`` is the machine itself.

    python benchmarks/gradients.py                        # writes benchmarks/results/gradients.json
    python benchmarks/gradients.py --links loopback --sizes 1 --rounds 2 --output /tmp/smoke.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from links import records_of_ranks
from results_head import asked_row, processors, results_head
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.gradients import scheme
from qsync_opt.io import write_json
from qsync_opt.kernels.gradients import CODES, Codec, Layout
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig

HERE = Path(__file__).parent
PEERS = ("nothing", "FP32", "BF16 hook", "PowerSGD")
OURS = ("sum8", "packed8", "sum4", "two8", "two-fp8", "BF16", "linear")
TWO_SHOT = {"two8": "int8", "two-fp8": "fp8", "BF16": "bf16"}
"""Forms of two-shot schemes."""
MODEL_SUBJECTS = ("FP32", "BF16 hook", "packed8", "two8")
CODEC_MB = 26


class Flat(nn.Module):
    """One parameter whose gradient costs next to nothing: ones."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements // 1024, 1024))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def no_reduction(state, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def bf16_on_gloo(state, bucket):  # DDP refuses the hook itself, by its name, where there is no NCCL
    return default_hooks.bf16_compress_hook(state, bucket)


def hooked(model: nn.Module, subject: str) -> DistributedDataParallel:
    """The model with a subject's hook."""
    # Gradients stay in their buckets: copies to them, and memory touched for the first time, would be timed too.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000, gradient_as_bucket_view=True)
    if subject == "nothing":
        wrapped.register_comm_hook(None, no_reduction)
    elif subject == "BF16 hook":
        wrapped.register_comm_hook(None, bf16_on_gloo)
    elif subject == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif subject != "FP32":
        qsync_opt.compress_gradients(wrapped, subject)
    return wrapped


def timed(subjects: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each subject by round, of the slower rank."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(rounds + 3):  # three rounds to settle buckets and compile
        for name, step in subjects.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            spent = torch.tensor([1e3 * (time.perf_counter() - began)])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if turn >= 3:
                times[name].append(round(float(spent), 3))
    return times


def flat_step(subject: str, elements: int, device: torch.device | str = "cpu") -> Any:
    model = hooked(Flat(elements).to(device), subject)

    def step() -> None:
        model().backward()

    return step


def processor_time(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of processor time of one rank, its gloo threads included, in all-reduces of as many elements."""
    elements = CODEC_MB * 1_000_000 // 4
    records = []
    for name, dtype in (("FP32", torch.float32), ("BF16", torch.bfloat16), ("INT8", torch.int8)):
        values, times = torch.zeros(elements, dtype=dtype), []
        for _ in range(rounds + 1):
            dist.barrier()
            began = time.process_time()
            dist.all_reduce(values)
            times.append(round(1e3 * (time.process_time() - began), 3))
        records.append({"what": "processor time", "megabytes": CODEC_MB, "subject": f"{name} sum", "ms": times[1:]})
    return records


def gpt_step(subject: str) -> Any:
    torch.manual_seed(0)
    config = GptConfig(vocabulary=512, context=64, width=256, heads=4, layers=4)
    model, tokens = hooked(Gpt(config).train(), subject), torch.randint(0, 512, (2, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(tokens, tokens).backward()
        optimizer.step()

    return step


def worker(rank: int, address: str, output: str, link: str, sizes: list[int], rounds: int) -> None:
    """One rank; rank 0 writes the records."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    records = []
    for size in sizes:
        elements = size * 1_000_000 // 4 // 1024 * 1024
        subjects = {name: flat_step(name, elements) for name in (*PEERS, *OURS)}
        for name, times in timed(subjects, rounds).items():
            records.append({"what": "bucket", "link": link, "megabytes": size, "subject": name, "ms": times})
        del subjects
    records += [{"link": link, **each} for each in processor_time(rounds)]
    subjects = {name: gpt_step(name) for name in MODEL_SUBJECTS}
    records += [
        {"what": "GPT step", "link": link, "subject": name, "ms": times}
        for name, times in timed(subjects, rounds).items()
    ]
    if rank == 0:
        Path(output).write_text(json.dumps(records))
    dist.barrier()
    os._exit(0)  # threads of hooks still hold groups


def codec(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of the codec of one process alone."""
    torch.set_num_threads(1)
    records, x = [], torch.randn(CODEC_MB * 1_000_000 // 4)
    for name in ("sum8", "packed8", *TWO_SHOT):
        each, own = scheme(name), Codec()
        layout = Layout(width=each.width, lanes=each.lanes, block=each.block)
        out, times = torch.empty_like(x), []
        form = TWO_SHOT.get(name)
        room = torch.empty(layout.words(len(x)), dtype=CODES.get(form, layout.dtype))  # as reductions keep one
        for _ in range(rounds + 1):
            began = time.perf_counter()
            if form is not None:
                part = own.encode(x, form, each.block or 4, 1, out=room)
                own.decode(part, form, each.block or 4, out=out)
            else:
                scales = own.sum_scales(x, layout.block)
                codes = own.encode_sum(x, scales, each.levels(2), layout, 1, out=room)
                own.decode_sum(codes, scales, each.levels(2), 2, layout, len(x), out=out)
            times.append(round(1e3 * (time.perf_counter() - began), 3))
        records.append({"what": "codec", "megabytes": CODEC_MB, "subject": name, "ms": times[1:]})
    copies, out = [], torch.empty_like(x)
    for _ in range(rounds + 1):
        began = time.perf_counter()
        out.copy_(x)
        copies.append(round(1e3 * (time.perf_counter() - began), 3))
    return [*records, {"what": "codec", "megabytes": CODEC_MB, "subject": "copy", "ms": copies[1:]}]


def measure(link: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Records of one link."""
    inside = [json.dumps(sizes), str(rounds)]
    gigabits = None if link == "loopback" else float(link)
    return records_of_ranks(__file__, link, inside, port=29555, gigabits=gigabits, timeout_s=1800)


def asked(records: list[dict[str, Any]], links: list[str]) -> list[dict[str, Any]]:
    """One row for each figure that was set as a target."""

    def median(**wanted: Any) -> float | None:
        kept = [r for r in records if all(r.get(key) == value for key, value in wanted.items())]
        return statistics.median(kept[0]["ms"]) if kept else None

    rows = []
    for link in links:
        ours = median(what="bucket", link=link, megabytes=CODEC_MB, subject="sum8")
        place = "loopback" if link == "loopback" else f"{link} Gbit/s"
        for peer, least in (("FP32", 2.5), ("BF16 hook", 1.8)):
            theirs = median(what="bucket", link=link, megabytes=CODEC_MB, subject=peer)
            ratio = None if ours is None or theirs is None else round(theirs / ours, 3)
            met = ratio is not None and ratio >= least
            rows.append(asked_row(f"sum8 against {peer}, 26 MB, two gloo ranks, {place}", f">= {least}", ratio, met))
    for name in ("sum8", "packed8"):
        spent = median(what="codec", subject=name)
        met = spent is not None and spent <= 25
        rows.append(asked_row(f"codec of {name}, 26 MB, one thread", "<= 25 ms", spent, met))
    return rows


def main() -> None:
    """Measure and write the file."""
    if sys.argv[1:2] == ["--worker"]:
        rank, address, output, link, sizes, rounds = sys.argv[2:]
        worker(int(rank), address, output, link, json.loads(sizes), int(rounds))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="loopback,1,10", help="Gbit/s, or loopback")
    parser.add_argument("--sizes", default="1,26,100", help="megabytes of FP32 gradients")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gradients.json")
    arguments = parser.parse_args()
    links, sizes = arguments.links.split(","), [int(size) for size in arguments.sizes.split(",")]
    records = codec(arguments.rounds)
    for link in links:
        records += measure(link, sizes, arguments.rounds)
    data = {
        **results_head(processors(), {"torch": torch.__version__}),
        "asked": asked(records, links),
        "records": records,
    }
    write_json(arguments.output, data)
    for each in data["asked"]:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']}")


if __name__ == "__main__":
    main()
