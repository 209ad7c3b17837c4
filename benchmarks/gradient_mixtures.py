"""Planned mixtures of schemes, beside every single scheme: predicted first, then measured.

A combination is a link, a model and a number of workers (processes of this machine with one thread each). For each,
steps under every scheme of the menu are recorded and fitted (`qsync_opt.gradients.fit_reductions`), and
`plan_reductions` plans the mixture of least variance that is as fast as the fastest scheme, or that scheme where the
mixture gains less than the model errs. A mixture is then recorded in turn with that scheme, which is taken where it was
faster; what is predicted of a mixture that is kept is what it took there. Links of so many Gbit/s are network
namespaces that this script makes (it needs root and ``tc``) and removes.

    python benchmarks/gradient_mixtures.py --predict     # plans and predictions, to be committed before
    python benchmarks/gradient_mixtures.py               # writes benchmarks/results/gradient-mixtures.json
    python benchmarks/gradient_mixtures.py --workers 2 --output A.json     # a part, as time allows
    python benchmarks/gradient_mixtures.py --merge A.json B.json           # parts become the whole
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
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
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.gradients import (
    Computation,
    Plan,
    RecordedReductions,
    fastest_scheme,
    fit_reductions,
    is_as_fast,
    plan_reductions,
    scheme,
)
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.ddp import broadcast_json
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig

HERE = Path(__file__).parent
PREDICTIONS = HERE / "records" / "gradient-mixtures-predictions.json"
MENU = ("FP32", "BF16", "two8", "sum8", "packed8", "sum16")
LINKS = ("loopback", "10", "1")
COMBINATIONS = [
    *((link, workers, model) for workers in (2, 3, 4) for link in LINKS for model in ("GPT", "MLP")),
    *((link, 2, "CNN") for link in ("10", "1")),
]
CAP_MB = 1.0
SETTLING, SAMPLED, RECORDED = 3, 2, 5
ROUNDS = 4
"""Records of each scheme."""
TURNS = 6
"""Records of a mixture and of the fastest scheme, in turn."""
BLOCK_STEPS = 3
MIXTURE = "mixture"


class Cnn(nn.Module):
    """Convolutions whose last ones hold most parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256, 256)
        layers: list[nn.Module] = []
        for k in range(len(widths) - 1):
            layers += [nn.Conv2d(widths[k], widths[k + 1], 3, stride=2 if k else 1, padding=1), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(256 * 4, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).flatten(1)).square().mean()


class Mlp(nn.Module):
    """Wide layers on a small batch: much to reduce for what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Job:
    """A model in training on this rank, whose gradients are compressed."""

    def __init__(self, model: str) -> None:
        torch.manual_seed(0)
        own = torch.Generator().manual_seed(1 + dist.get_rank())
        self.arguments: tuple[torch.Tensor, ...]
        if model == "GPT":
            bare: nn.Module = Gpt(GptConfig(vocabulary=512, context=64, width=192, heads=4, layers=4)).train()
            tokens = torch.randint(0, 512, (2, 64), generator=own)
            self.arguments = (tokens, tokens)
        elif model == "MLP":
            bare, self.arguments = Mlp(), (torch.randn(64, 768, generator=own),)
        else:
            bare, self.arguments = Cnn(), (torch.randn(4, 3, 32, 32, generator=own),)
        self.model = DistributedDataParallel(bare, bucket_cap_mb=CAP_MB)
        self.compression = qsync_opt.compress_gradients(self.model, "FP32")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def run(self, steps: int) -> None:
        """Train for some steps."""
        for _ in range(steps):
            self.model(*self.arguments).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

    def computation(self) -> Computation:
        """Steps whose gradients are not reduced."""
        return self.compression.computation(lambda: self.run(1), ROUNDS * RECORDED)

    def recorded(self) -> dict[str, list[RecordedReductions]]:
        """Steps under every scheme, a few at a time in turn, so that a busy moment does not fall on one of them."""
        records: dict[str, list[RecordedReductions]] = {name: [] for name in MENU}
        for _ in range(ROUNDS):
            for name in MENU:
                records[name].append(self.record(name))
        return records

    def record(self, plan: Plan | str) -> RecordedReductions:
        """Some steps under a plan."""
        self.compression.use(plan)
        self.run(2)
        with self.compression.recording():
            self.run(1 + RECORDED)
        return self.compression.recorded()


def predicted(model: str) -> dict[str, Any]:
    """The plan of one combination and what is predicted of it and of every single scheme, on all ranks."""
    job = Job(model)
    job.run(SETTLING)
    with job.compression.sampling():
        job.run(SAMPLED)
    records = job.recorded()
    computation = job.computation()
    record, plans = None, []
    if dist.get_rank() == 0:
        fitted = fit_reductions(itertools.chain.from_iterable(records.values()), computation)
        own = job.compression.statistics()
        plans = [plan_reductions(fitted, own), fastest_scheme(fitted, own)]
    mixture, single = (Plan.from_json(each) for each in broadcast_json([each.to_json() for each in plans] or None))
    turns = [] if mixture == single else [(job.record(mixture), job.record(single)) for _ in range(TURNS)]
    if dist.get_rank() == 0:
        plan = mixture if turns and is_as_fast(turns) else single
        iteration_ns = {name: fitted.predict(fitted.single(name))[-1].end_ns for name in MENU}
        iteration_ns[MIXTURE] = fitted.predict(plan)[-1].end_ns
        if plan is mixture:
            iteration_ns[MIXTURE] = statistics.median(each.iteration_ns for each, _ in turns)
        record = {
            "proposed": mixture.to_json(),
            "turns_ms": [[round(each.iteration_ns / 1e6, 3) for each in pair] for pair in turns],
            "plan": plan.to_json(),
            "predicted_ms": {name: round(ns / 1e6, 3) for name, ns in iteration_ns.items()},
            "recorded_ms": {
                name: [round(each.iteration_ns / 1e6, 3) for each in steps] for name, steps in records.items()
            },
            "variance": {
                MIXTURE: sum(
                    scheme(name).mean_variance(bucket, fitted.workers)
                    for name, bucket in zip(plan.schemes.values(), own, strict=True)
                ),
                **{name: sum(scheme(name).mean_variance(bucket, fitted.workers) for bucket in own) for name in MENU},
            },
            "error": round(fitted.error, 4),
            "slowdowns": {name: round(share, 4) for name, share in fitted.slowdowns.items()},
        }
    result: dict[str, Any] = broadcast_json(record)
    return result


def measured(model: str, plan: Plan, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step by subject and round, of the slowest rank; subjects take turns."""
    job = Job(model)
    job.run(SETTLING)
    single = next((name for name in MENU if set(plan.schemes.values()) == {name}), None)
    subjects: dict[str, Plan | str] = {name: name for name in MENU}
    if single is None:
        subjects[MIXTURE] = plan
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(rounds + 1):  # the first round warms up
        for name, each in [*subjects.items()][:: 1 if turn % 2 else -1]:
            job.compression.use(each)
            job.run(1)
            dist.barrier()
            began = time.perf_counter()
            job.run(BLOCK_STEPS)
            spent = torch.tensor([1e3 * (time.perf_counter() - began) / BLOCK_STEPS])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if turn:
                times[name].append(round(float(spent), 3))
    if single is not None:
        times[MIXTURE] = times[single]  # the plan is that scheme everywhere
    return times


def worker(rank: int, address: str, output: str, link: str, workers: int, models: list[str], rounds: int) -> None:
    """One rank; rank 0 writes the records. No rounds: predict."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=workers)
    written = [] if rounds == 0 else json.loads(PREDICTIONS.read_text())["records"]
    records = []
    for model in models:
        key = {"link": link, "workers": workers, "model": model}
        if rounds == 0:
            records.append({**key, **predicted(model)})
        else:
            before = next(r for r in written if {name: r[name] for name in key} == key)
            times = measured(model, Plan.from_json(before["plan"]), rounds)
            records.append({**before, "ms": times})
    if rank == 0:
        Path(output).write_text(json.dumps(records))
    dist.barrier()
    os._exit(0)  # threads of hooks still hold groups


def of_link(link: str, workers: int, rounds: int) -> list[dict[str, Any]]:
    """Records of all models on one link."""
    models = [model for a, b, model in COMBINATIONS if (a, b) == (link, workers)]
    inside = [str(workers), json.dumps(models), str(rounds)]
    gigabits = None if link == "loopback" else float(link)
    return records_of_ranks(__file__, link, inside, port=29556, gigabits=gigabits, timeout_s=600, ranks=workers)


def judged(record: dict[str, Any]) -> dict[str, Any]:
    """What a combination shows: error of the prediction, time against the best scheme, and variance."""
    usual = {name: statistics.median(times) for name, times in record["ms"].items()}
    mixture = usual.pop(MIXTURE)
    best = min(usual, key=usual.__getitem__)
    own = record["variance"][MIXTURE]
    return {
        "error": record["predicted_ms"][MIXTURE] / mixture - 1,
        "behind": mixture / usual[best] - 1,
        "noisier": [
            name for name, value in usual.items() if value <= mixture and record["variance"][name] < own * (1 - 1e-9)
        ],
    }


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each figure that was set as a target."""
    verdicts = [judged(record) for record in records]
    count = len(COMBINATIONS)
    part = "" if len(records) == count else f"{len(records)} were measured; "

    def row(what: str, kept: int, note: str) -> dict[str, Any]:
        return asked_row(what, f"{count} of {count}", kept, kept == count, note)

    within = sum(abs(each["error"]) <= 0.1 for each in verdicts)
    fast = sum(each["behind"] <= 0.02 for each in verdicts)
    quiet = sum(not each["noisier"] for each in verdicts)
    errors = sorted(abs(each["error"]) for each in verdicts)
    return [
        row(
            "combinations whose mixture takes within 10 % of its predicted step", within,
            f"{part}median error {100 * statistics.median(errors):.1f} %, largest {100 * errors[-1]:.1f} %",
        ),
        row(
            "combinations whose mixture is at most 2 % slower than the fastest scheme", fast,
            f"{part}largest {100 * max(each['behind'] for each in verdicts):.1f} %",
        ),
        row(
            "combinations in which no scheme as fast has less variance", quiet,
            f"{part}variances are bounds from sampled gradients",
        ),
    ]  # fmt: skip


def main() -> None:
    """Predict, or measure, or merge, and write the file."""
    if sys.argv[1:2] == ["--worker"]:
        rank, address, output, link, workers, models, rounds = sys.argv[2:]
        worker(int(rank), address, output, link, int(workers), json.loads(models), int(rounds))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--workers", default="2,3,4")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--merge", type=Path, nargs="+", default=[])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    for part in arguments.merge:
        records += json.loads(part.read_text())["records"]
    if not arguments.merge:
        for workers in map(int, arguments.workers.split(",")):
            for link in arguments.links.split(","):
                records += of_link(link, workers, 0 if arguments.predict else arguments.rounds)
                print(workers, link, flush=True)
    head = results_head(processors(), {"torch": torch.__version__})
    only_predicted = "ms" not in records[0]
    path = arguments.output or (PREDICTIONS if only_predicted else HERE / "results" / "gradient-mixtures.json")
    if only_predicted:
        write_json(path, {**head, "asked": [], "records": records})
        return
    log = ("git", "log", "-1", "--format=%h", "--", str(PREDICTIONS))
    commit = subprocess.run(log, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    rows = asked(records)
    write_json(path, {**head, "asked": rows, "records": [{**each, "predictions_commit": commit} for each in records]})
    for each in rows:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} ({each['note']})")


if __name__ == "__main__":
    main()
