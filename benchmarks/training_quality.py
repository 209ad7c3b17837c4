"""Does a plan by the indicator train better than others of the same time and memory? On a CPU, errors as they are.

    python benchmarks/training_quality.py --folder FOLDER --subject NAME [--subject NAME ...] [--seeds 5]
    python benchmarks/training_quality.py --merge FOLDER [--output PATH]

Small networks are trained to convergence on real data that comes with installed packages: handwritten digits
(scikit-learn) and the sources of Python's standard library. The arithmetic of the plans is executed by the package's
kernels, with the coarsest scales there are (one per tensor); time and memory of the plans are simulated
(``quality_bench/budgets.py``). All runs of a seed share weights, batches and their order.

Subjects: cnn, vit, gpt, with 8-bit operators whose backward pass is in 8 bits as the lowest precision; and where
rounding costs something, cnn-x32, the same CNN with 32 times the error of 8-bit operators with a 16-bit backward pass,
and gpt-x16, the GPT with 16 times the error in both passes. Runs of uniform lowest alone, by seeds from 100 on, chose
these factors: the CNN's held-out loss is that of full precision up to 16 times, the GPT's up to 4 times.
Every run is appended to a file of FOLDER when it ends, and is not made again. Writes
``benchmarks/results/training-quality.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "quality_bench"))

import budgets
import digits
from noisy import MagnifiedPlan, added_parts, added_variance, exact_gradient
from plans import magnified
from results_head import results_head
from subjects import Batch, Subject, gpt, train_briefly
from torch import nn
from work import significant

import qsync_opt
from qsync_opt.io import read_json, write_json
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.model import OpGraph, Role, load_graph, save_graph
from qsync_opt.numerics import FORMATS, formats_for
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.demo import GptConfig
from qsync_opt.runtimes.torch.execution import ApplyOptions
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import ModelStatistics, NoiseOptions, sensitivities

RESULTS = Path(__file__).resolve().parent / "results" / "training-quality.json"
PLANS, CHEAPEST = "qsync-bench-training-quality-plans/1", "qsync-bench-training-quality-cheapest/1"
INDICATORS = ("probed", "progress", "published", "fisher", "hessian", "random")
"""``published`` is QSync's own as it was released."""
FULL, HALF, LOWEST = "full precision", "uniform BF16", "uniform lowest"
LAST = 50
"""Steps at the end whose training loss is averaged."""
MEASURES = (
    "held_out_loss",
    "held_out_loss_recalibrated",
    "accuracy",
    "accuracy_recalibrated",
    "fit",
    "last_training_loss",
)
"""``fit`` is the loss of the final weights over training batches, evaluated as what is held out is."""
SEEDS, CONVERGED = 5, 0.02
"""Asked for: runs of each policy, and the most that the held-out loss may still change, as a share."""
PROBES, CURVATURE_PROBES = 3, 16
FIT_BATCHES = 32
DRAWS = 12
"""Of the rounding, for the gradient variance of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A subject as it is trained.

    Attributes:
        make: Its model and data.
        steps: Of every run.
        ours: The indicator that `auto_plan` takes for its optimizer.
        lowest: Precisions of the menu below BF16, the lowest first.
        factor: By which errors of 8-bit operators are multiplied; 1: as they are.
        random_plans: Trained per seed; each is drawn anew for every seed.
        decay: Power of the cosine by which the learning rate falls to 0.
    """

    make: Callable[[], Subject]
    steps: int
    ours: str
    lowest: tuple[str, ...] = ("INT8-BWD8", "INT8")
    factor: float = 1.0
    random_plans: int = 1
    decay: float = 1.0

    def rate_at(self, step: int) -> float:
        """Share of the learning rate: a short warm-up, then down to 0, so that runs end where they converge."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return (step + 1) / warm
        return float((0.5 + 0.5 * math.cos(math.pi * (step - warm) / (self.steps - warm))) ** self.decay)

    @property
    def policies(self) -> tuple[str, ...]:
        """What is trained, in this order."""
        more = tuple(f"random {i}" for i in range(2, self.random_plans + 1))
        others = tuple(kind for kind in INDICATORS if kind not in (self.ours, "random"))
        return (FULL, LOWEST, self.ours, "random", *others, *more, HALF if self.factor == 1.0 else "loss")


def _digits_cnn() -> Subject:
    words = "8 convolutions with batch normalization, rectifiers, shortcuts and max-pooling, 2 linear layers"
    return digits.digits("cnn", lambda: digits.Cnn(8, (4, 4, 0)), rows=32, adam=False, rate=0.01, words=words)


def _digits_vit() -> Subject:
    words = "vision transformer, 2 layers of width 32"
    return digits.digits("vit", lambda: digits.Vit(32, 2), rows=32, adam=True, rate=1e-2, words=words)


def _source_gpt() -> Subject:
    return gpt(torch.device("cpu"), GptConfig(width=48, heads=4, layers=2, context=32), 16, rate=6e-3)


# Steps, learning rates and decays were chosen on full precision alone, by seeds from 100 on, which are not used
# afterwards: of those tried, ones that end low with a held-out loss that the last fifth of the steps changes by at most
# 2 %.
CASES: Mapping[str, Case] = {
    "cnn": Case(make=_digits_cnn, steps=800, decay=2.0, ours="probed"),
    "vit": Case(make=_digits_vit, steps=800, ours="progress", decay=2.0),
    "gpt": Case(make=_source_gpt, steps=800, ours="progress"),
    "cnn-x32": Case(
        make=_digits_cnn, steps=800, decay=2.0, ours="probed", lowest=("INT8",), factor=32.0, random_plans=2
    ),
    "gpt-x16": Case(make=_source_gpt, steps=800, ours="progress", lowest=("INT8-BWD8",), factor=16.0, random_plans=2),
}


# -- plans -----------------------------------------------------------------------------------------------------------


class Planner:
    """Plans of a case by every policy, from the statistics of a network that has trained for a while."""

    def __init__(self, case: Case, subject: Subject) -> None:
        self.case = case
        self.model = subject.model(10**6, torch.device("cpu"))
        optimizer = train_briefly(subject, self.model, case.steps // 6, first=10**7)
        self.batches = [subject.batch(10**6 + i) for i in range(3)]
        self.graph = capture(self.model, self.batches[0], name=subject.name)
        self.statistics: ModelStatistics = collect_statistics(
            self.model,
            self.batches,
            graph=self.graph,
            probes=PROBES,
            adaptive_probes=PROBES,
            curvature_probes=CURVATURE_PROBES,
            whole_batches=True,
        )
        rates = [case.rate_at(step) ** 2 for step in range(case.steps)]
        self.horizon = qsync_opt.noise_horizon(
            optimizer,
            steps=case.steps,
            statistics=self.statistics,
            learning_rate=optimizer.param_groups[0]["lr"] * statistics.fmean(rates) ** 0.5,
        )
        adjustable = [o for o in self.graph.by_role(Role.ADJUSTABLE)]
        self._menu = {
            o.name: tuple(p for p in (*case.lowest, "BF16", "FP32") if ops.supports(o.op_type, p, "cpu"))
            for o in adjustable
        }
        self.sizes = {name: size for name, size in budgets.sizes(self.statistics).items() if len(self._menu[name]) > 2}

    def plan(self, policy: str, seed: int) -> dict[str, str]:
        """Precision of every operator; those without 8 bits run in BF16, but for full precision."""
        if policy == FULL:
            return dict.fromkeys(self._menu, "FP32")
        half = dict.fromkeys(self._menu, "BF16")
        if policy == HALF:
            return half
        if policy == LOWEST:
            return {**half, **{name: self._menu[name][0] for name in self.sizes}}
        kind, _, number = policy.partition(" ")
        table = sensitivities(
            self.graph,
            magnified(self.statistics, self.case.factor),
            formats_for([p for p in FORMATS if p in (*self.case.lowest, "BF16", "FP32")], "BF16"),
            options=NoiseOptions(weight_granularity="tensor"),  # type: ignore[arg-type]
            kind=kind,  # type: ignore[arg-type]
            seed=1000 * int(number or 1) + seed,
            horizon=self.horizon if kind == "loss" else 0.0,
        )
        return {**half, **budgets.plan(budgets.problem(self.sizes, table, self._menu))}

    def noise(self, plan: Mapping[str, str]) -> dict[str, float]:
        """Gradient variance that a plan adds on one batch, measured, and over that between batches.

        ``shift`` is the part of it that is no variance, since the mean gradient moves; only with rectifiers.
        """
        batch = self.batches[0]
        exact = exact_gradient(self.model, batch)
        draws = 1 if set(plan.values()) <= {"BF16", "FP32"} else DRAWS
        found = added_variance(self.model, batch, exact, plan, self.graph, options(0), draws, factor=self.case.factor)
        mean = statistics.fmean(found)
        own = self.statistics.gradient_noise
        if own is None:
            raise RuntimeError("no gradient noise was collected, although there are several batches")
        parts: dict[str, float] = {}
        if draws > 1:
            parts = added_parts(self.model, batch, exact, plan, self.graph, options(0), draws, factor=self.case.factor)
        return {
            "variance": mean,
            "over_batch_noise": mean / own.variance,
            **{f"{name}_over_batch_noise": part / own.variance for name, part in parts.items()},
        }


def cheapest_first(case: Case, subject: Subject, path: Path) -> dict[str, Any]:
    """Noise of uniform lowest as its operators go to BF16 one after the other, the cheapest first; kept in a file.

    This needs no indicator: what it saves, any choice of plans by cost saves.

    Returns:
        Per operator that goes, ``over_batch_noise`` from there on, and ``time`` and ``memory`` so far as shares of the
        way from uniform lowest to BF16.
    """
    if path.is_file():
        return read_json(path, (CHEAPEST,))
    planner = Planner(case, subject)
    lowest = planner.plan(LOWEST, 0)
    costs = {
        name: [budgets.operator_cost(size, precision, 0.0) for precision in (lowest[name], "BF16")]
        for name, size in planner.sizes.items()
    }
    way = {
        name: (
            high.forward_ns + high.backward_ns - low.forward_ns - low.backward_ns,
            high.memory_kib - low.memory_kib,
        )
        for name, (low, high) in costs.items()
    }
    whole = [sum(steps) for steps in zip(*way.values(), strict=True)]
    rows, plan, time, memory = [], lowest, 0, 0
    for name in sorted(way, key=way.__getitem__):
        plan = {**plan, name: "BF16"}
        time, memory = time + way[name][0], memory + way[name][1]
        noise = planner.noise(plan)["over_batch_noise"]
        rows.append({"operator": name, "over_batch_noise": noise, "time": time / whole[0], "memory": memory / whole[1]})
    record = {"format": CHEAPEST, "operators": [significant(row) for row in rows]}
    write_json(path, record)
    return record


def graph_path(plans: Path) -> Path:
    """Where the graph of a case is kept, beside its plans."""
    return plans.with_name(plans.name.replace("-plans", "-graph"))


def options(seed: int) -> ApplyOptions:
    """Rounding at the coarsest scales, evaluation in full precision."""
    return ApplyOptions(kernels=KernelOptions(weight_granularity="tensor", seed=seed), evaluate_in="FP32")


def planned(case: Case, subject: Subject, seeds: int, path: Path) -> dict[str, Any]:
    """Plans of all policies and seeds with the noise that they add; kept in a file, so that they are made once."""
    if path.is_file():
        found = read_json(path, (PLANS,))
        if found["seeds"] >= seeds:
            return found
    planner = Planner(case, subject)
    save_graph(planner.graph, graph_path(path))
    record: dict[str, Any] = {"format": PLANS, "seeds": seeds, "plans": {}}
    known: dict[str, dict[str, float]] = {}
    for policy in case.policies:
        for seed in range(seeds if policy.startswith("random") else 1):
            plan = planner.plan(policy, seed)
            words = json.dumps(plan, sort_keys=True)
            if words not in known:
                known[words] = planner.noise(plan) if policy != FULL else {"variance": 0.0, "over_batch_noise": 0.0}
            entry = {"plan": plan, **significant(known[words])}
            record["plans"].setdefault(policy, []).append(entry)
    write_json(path, record)
    return record


# -- runs ------------------------------------------------------------------------------------------------------------


def _score(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, float | None]:
    """Loss and share of right answers over batches, in full precision."""
    model.eval()
    with torch.no_grad():
        loss = statistics.fmean(float(model(*batch)) for batch in batches)
        right = None
        if isinstance(model, digits.Classifier):
            right = statistics.fmean(float((model.logits(x).argmax(1) == y).double().mean()) for x, y in batches)
    model.train()
    return loss, right


def _recalibrate(subject: Subject, model: nn.Module) -> None:
    """Collect the statistics of batch normalization anew, in full precision; nothing else changes."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
    with torch.no_grad():
        for i in range(20 if norms else 0):
            model(*subject.batch(10**8 + i))


def run(
    case: Case, subject: Subject, graph: OpGraph, plan: Mapping[str, str], policy: str, seed: int
) -> dict[str, Any]:
    """Train once from scratch."""
    begin = time.process_time()
    model = subject.model(seed, torch.device("cpu"))
    optimizer = subject.optimizer(model)
    rate = optimizer.param_groups[0]["lr"]
    applied = MagnifiedPlan(model, plan, graph, options(seed), factor=case.factor)
    held_out = subject.held_out(16)
    losses: list[float] = []
    curve: dict[str, float] = {}
    for step in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * case.rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss = model(*subject.batch(seed * 10**5 + step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step + 1 in (round(0.8 * case.steps), round(0.9 * case.steps)):
            curve[str(step + 1)] = _score(model, held_out)[0]
    loss_at_end, right = _score(model, held_out)
    fit = _score(model, [subject.batch(10**9 + i) for i in range(FIT_BATCHES)])[0]
    applied.interception.remove()
    _recalibrate(subject, model)
    again = _score(model, held_out)
    return significant(
        {
            "policy": policy,
            "seed": seed,
            "held_out_loss": loss_at_end,
            "held_out_loss_recalibrated": again[0],
            "accuracy": right,
            "accuracy_recalibrated": again[1],
            "fit": fit,
            "last_training_loss": statistics.fmean(losses[-LAST:]),
            "mean_training_loss": statistics.fmean(losses),
            "on_the_way": curve,
            "processor_seconds": time.process_time() - begin,
        },
        7,
    )


def runs_of(path: Path) -> list[dict[str, Any]]:
    """The runs that a file holds; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def missing(
    case: Case, plans: Mapping[str, Sequence[Mapping[str, Any]]], seeds: int, known: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int, Mapping[str, str], str | None]]:
    """Policy, seed and plan of every run that is not known yet, and the earlier policy of the very same plan."""
    done = {(run["policy"], run["seed"]) for run in known}
    for seed in range(seeds):
        before: dict[str, str] = {}
        for policy in case.policies:
            plan = plans[policy][seed % len(plans[policy])]["plan"]
            same = before.setdefault(json.dumps(plan, sort_keys=True), policy)
            if (policy, seed) not in done:
                yield policy, seed, plan, None if same == policy else same


def train(names: Sequence[str], folder: Path, seeds: int, *, only_plans: bool = False) -> None:
    """Make the runs that are missing, seed by seed over all subjects."""
    commit = results_head("")["commit"]  # before anything runs: the folder may move on to another one meanwhile
    cases = {name: (CASES[name], CASES[name].make()) for name in names}
    plans = {n: planned(case, subject, seeds, folder / f"{n}-plans.json") for n, (case, subject) in cases.items()}
    for name, (case, subject) in cases.items():
        cheapest_first(case, subject, folder / f"{name}-cheapest.json")
    # What is asked first over all seeds, then the other indicators.
    turns = [(count, first) for first in (True, False) for count in range(1, 1 if only_plans else seeds + 1)]
    for count, first in turns:
        for name, (case, subject) in cases.items():
            path = folder / f"{name}-runs.jsonl"
            graph = load_graph(graph_path(folder / f"{name}-plans.json"))
            for policy, seed, plan, same in missing(case, plans[name]["plans"], count, runs_of(path)):
                if first and policy not in (FULL, LOWEST, case.ours, "random"):
                    continue
                if same is None:
                    record = {**run(case, subject, graph, plan, policy, seed), "commit": commit}
                else:
                    twin = next(r for r in runs_of(path) if (r["policy"], r["seed"]) == (same, seed))
                    record = {**twin, "policy": policy, "same_plan_as": same}
                with path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{name} {policy} {seed}: {record['held_out_loss']:.4f}", flush=True)


# -- what comes of it ------------------------------------------------------------------------------------------------


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval by Student's distribution."""
    from scipy.stats import t

    count = len(differences)
    if count < 2:
        return statistics.fmean(differences), math.inf
    error = statistics.stdev(differences) / math.sqrt(count)
    return statistics.fmean(differences), float(t.ppf(0.975, count - 1)) * error


def differences(runs: Sequence[Mapping[str, Any]], policy: str, other: str, measure: str) -> list[float]:
    """Seed by seed, one policy's measure minus another's; plans by random tables are averaged within a seed."""

    def values(which: str) -> dict[int, float]:
        rows: dict[int, list[float]] = {}
        for r in runs:
            if (r["policy"].split(" ")[0] == "random") if which == "random" else r["policy"] == which:
                rows.setdefault(r["seed"], []).append(r[measure])
        return {seed: statistics.fmean(row) for seed, row in rows.items()}

    ours, theirs = values(policy), values(other)
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def summary(case: Case, runs: Sequence[Mapping[str, Any]], plans: Mapping[str, Any]) -> dict[str, Any]:
    """Per policy: noise of its plans, and every measure against full precision and against random plans."""
    policies = [p for p in case.policies if not p.startswith("random ")]
    measures = [m for m in MEASURES if runs and all(r[m] is not None for r in runs)]
    rows: dict[str, Any] = {}
    for policy in policies:
        noise = [
            entry["over_batch_noise"]
            for name, entries in plans.items()
            if name == policy or (policy == "random" and name.startswith("random"))
            for entry in entries
        ]
        rows[policy] = {"gradient_variance_over_batch_noise": statistics.fmean(noise)}
        for other, key in ((FULL, "minus_full_precision"), ("random", "minus_random")):
            for measure in measures:
                values = differences(runs, policy, other, measure)
                if policy != other and values:
                    mean, half = interval(values)
                    rows[policy].setdefault(key, {})[measure] = {
                        "seeds": len(values),
                        "mean": mean,
                        "half_width": half if math.isfinite(half) else None,
                    }
    return significant(rows)


def harm_of_noise(
    runs: Sequence[Mapping[str, Any]], plans: Mapping[str, Any], *, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Whether plans that add more variance to the gradient train worse, over all plans but some at once.

    Within every seed the measure is fitted by a line in the variance that plans add, over that between batches; the
    slopes of the seeds make the interval. Equal plans of a seed count once.

    Returns:
        Measure to the mean slope, in its unit per variance between batches, and half of its 95 % interval.
    """
    lines: dict[str, list[float]] = {}
    for seed in sorted({r["seed"] for r in runs}):
        own = [
            r
            for r in runs
            if r["seed"] == seed and r["policy"] not in without and r.get("same_plan_as") in (None, *without)
        ]
        x = [plans[r["policy"]][seed % len(plans[r["policy"]])]["over_batch_noise"] for r in own]
        if len(set(x)) < 3:
            continue
        for measure in MEASURES:
            y = [r[measure] for r in own]
            if None not in y:
                lines.setdefault(measure, []).append(statistics.linear_regression(x, y).slope)
    rows = {}
    for measure, slopes in lines.items():
        mean, half = interval(slopes)
        rows[measure] = {"seeds": len(slopes), "slope": mean, "half_width": half if math.isfinite(half) else None}
    return significant(rows)


def converged(runs: Sequence[Mapping[str, Any]], steps: int) -> float | None:
    """By what the held-out loss of full precision changed over the last fifth, as a share of what it ended at."""
    shares = [r["held_out_loss"] / r["on_the_way"][str(round(0.8 * steps))] - 1 for r in runs if r["policy"] == FULL]
    return significant(statistics.fmean(shares)) if shares else None


def asked(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each target: our plan beside random ones, full precision and the other indicators."""
    rows = []
    for record in records:
        if record["factor"] != 1.0:
            continue
        runs, ours = record["runs"], record["ours"]
        seeds = min(sum(r["policy"] == policy for r in runs) for policy in (FULL, LOWEST, ours, "random"))
        change = record["change_of_held_out_loss_in_last_fifth"]
        for what, target, measured, met in (
            (f"seeds of full precision, uniform lowest, {ours} and random", f">= {SEEDS}", seeds, seeds >= SEEDS),
            (
                "change of full precision's held-out loss in the last fifth",
                f"within {CONVERGED}",
                change,
                change is not None and abs(change) <= CONVERGED,
            ),
        ):
            row = {"what": f"{record['subject']}: {what}", "asked": target, "measured": measured, "met": met}
            rows.append({**row, "note": "" if runs else "no run yet"})
        for other in ("random", "fisher", "hessian", "published", LOWEST):
            values = differences(runs, ours, other, "held_out_loss")
            if not values:
                continue
            mean, half = interval(values)
            rows.append(
                {
                    "what": f"{record['subject']}: held-out loss of the plan by {ours} minus that of {other}",
                    "asked": "< 0, the 95 % interval below 0",
                    "measured": significant(mean),
                    "met": mean + half < 0,
                    "note": f"+- {half:.2g} over {len(values)} seeds; nats",
                }
            )
    return rows


def merge(folder: Path, output: Path) -> None:
    """One results file of all runs."""
    records, commits = [], set[str]()
    for name, case in CASES.items():
        runs = runs_of(folder / f"{name}-runs.jsonl")
        commits |= {str(r.pop("commit")) for r in runs}
        if not (folder / f"{name}-plans.json").is_file():
            continue
        plans = read_json(folder / f"{name}-plans.json", (PLANS,))["plans"]
        cheapest = read_json(folder / f"{name}-cheapest.json", (CHEAPEST,))["operators"]
        records.append(
            {
                "subject": name,
                "what": case.make().what,
                "steps": case.steps,
                "ours": case.ours,
                "factor": case.factor,
                "lowest": list(case.lowest),
                "cost_model": budgets.COST_MODEL,
                "scales": "one per tensor",
                "change_of_held_out_loss_in_last_fifth": converged(runs, case.steps),
                "summary": summary(case, runs, plans),
                "harm_of_noise": harm_of_noise(runs, plans),
                "harm_of_noise_at_one_cost": harm_of_noise(runs, plans, without=(FULL, LOWEST, HALF)),
                "cheapest_first": cheapest,
                "plans": plans,
                "runs": runs,
            }
        )
    head = results_head(_processor(), {"torch": torch.__version__})
    head["commit"] = ", ".join(sorted(commits))  # that ran, not this one
    head["command"] = "python benchmarks/training_quality.py --folder runs --subject NAME; --merge runs"
    write_json(output, {**head, "asked": asked(records), "records": records})


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, one thread"
    return "unknown processor"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", action="append", default=[], choices=CASES)
    parser.add_argument("--folder", type=Path, help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only-plans", action="store_true", help="make plans with the noise that they add; no runs")
    parser.add_argument("--merge", type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.merge is not None:
        merge(arguments.merge, arguments.output)
        return 0
    if not arguments.subject or arguments.folder is None:
        parser.error("give --subject and --folder, or --merge")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train(arguments.subject, arguments.folder, arguments.seeds, only_plans=arguments.only_plans)
    return 0


if __name__ == "__main__":
    sys.exit(main())
