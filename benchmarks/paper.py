"""QSync's experiments by simulation: its models, batches and clusters, its allocator and indicator beside ours.

No card is used: costs are roofline estimates from the data sheets of V100 and T4, sensitivities come from one small
random batch of models with random weights. What the paper's release recorded stands beside what is simulated here.
Writes ``benchmarks/results/paper.json`` and the page ``docs/background/paper.md``.

    python benchmarks/paper.py [--small] [--output PATH]
    python benchmarks/paper.py --page-only
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from example_models import Classifier, Example, resnet, vgg
from torch import nn

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.formulations.training import published_start
from qsync_opt.io import write_json
from qsync_opt.model import OpGraph, TensorSpec
from qsync_opt.training import Evaluation, Plan, Problem, memory_breakdown, uniform_plan

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "paper.json"
PAGE = ROOT / "docs" / "background" / "paper.md"
CLUSTERS = {name: ROOT / "benchmarks" / "paper_clusters" / f"cluster-{name.lower()}.yaml" for name in "AB"}
CAPTURED = 7
"""Samples that models are captured with, and statistics collected from; it divides no first dimension of a weight."""
BATCHES = {"ResNet-50": 128, "VGG16": 128, "VGG16-BN": 128, "BERT-base": 12, "RoBERTa-base": 16}
"""Local batches of the release's scripts."""
RELEASED_MS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "BERT-base": {"FP32": (502, 504), "FP16": (258, 261)},
    "RoBERTa-base": {"FP32": (1254, 1248), "FP16": (378, 371)},
    "ResNet-50": {"FP16": (188, 192), "INT8": (510, 517)},
    "VGG16": {"FP32": (3809, 3811), "FP16": (1088, 1089), "INT8": (1493, 1494)},
}
"""Milliseconds per iteration on a T4, predicted and measured: comments in ``Predictor/analyse.py`` of the release."""
RELEASED_BATCHES = {"ResNet-50": (144, 112), "BERT-base": (18, 6), "RoBERTa-base": (24, 8)}
"""Local batches of dynamic batch sizing in the release's scripts, on a V100 and a T4."""


class MultipleChoice(nn.Module):
    """Four texts per example, as in SWAG."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        import transformers

        self.model = transformers.RobertaForMultipleChoice(config)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss; ``tokens`` (batch, 4, length), ``labels`` (batch,)."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=labels).loss
        return loss


def _without_normalization(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.BatchNorm2d):
                    delattr(module, name)
    return model


def build(name: str, batch: int, *, small: bool) -> Example:
    """A model of the paper with random weights, and a random batch."""
    torch.manual_seed(0)
    if name in ("ResNet-50", "VGG16", "VGG16-BN"):
        size, classes = (32, 10) if small else (224, 1000)
        if name == "ResNet-50":
            network = resnet((1, 1), width=8, classes=classes) if small else resnet()
        else:
            network = vgg(((1, 8), (1, 16)), hidden=32, pooled=2, classes=classes) if small else vgg()
            network = _without_normalization(network) if name == "VGG16" else network
        kwargs = {"images": torch.randn(batch, 3, size, size), "labels": torch.randint(classes, (batch,))}
        return Example(model=Classifier(network).train(), kwargs=kwargs)
    import transformers

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    sizes = sizes | {"vocab_size": 99} if small else {}
    if name == "BERT-base":
        config = transformers.BertConfig(**sizes)
        tokens = torch.randint(5, config.vocab_size, (batch, 32 if small else 384))
        spans = {"start_positions": torch.zeros(batch, dtype=torch.long)}
        kwargs = {"input_ids": tokens, **spans, "end_positions": torch.ones(batch, dtype=torch.long)}
        return Example(model=transformers.BertForQuestionAnswering(config).train(), kwargs=kwargs)
    config = transformers.RobertaConfig(**{"max_position_embeddings": 514, **sizes})
    tokens = torch.randint(5, config.vocab_size, (batch, 4, 16 if small else 128))
    return Example(
        model=MultipleChoice(config).train(), kwargs={"tokens": tokens, "labels": torch.randint(4, (batch,))}
    )


def at_batch(graph: OpGraph, batch: int) -> OpGraph:
    """A graph that was captured with `CAPTURED` samples, as if with ``batch``.

    The samples are the first dimension of all activations, or a factor of it; weights have no such first dimension.
    """

    def scaled(spec: TensorSpec) -> TensorSpec:
        if not spec.shape or spec.shape[0] % CAPTURED:
            return spec
        return replace(spec, shape=(spec.shape[0] // CAPTURED * batch, *spec.shape[1:]))

    operators = []
    for operator in graph:
        inputs, outputs = (tuple(map(scaled, specs)) for specs in (operator.input_specs, operator.output_specs))
        grown = sum(spec.num_bytes for spec in (*inputs, *outputs))
        before = sum(spec.num_bytes for spec in (*operator.input_specs, *operator.output_specs))
        sizes = {"num_bytes": operator.num_bytes * grown // max(1, before), "flops": operator.flops * batch // CAPTURED}
        signature = f"{operator.signature} at {batch}"
        operators.append(replace(operator, input_specs=inputs, output_specs=outputs, signature=signature, **sizes))
    return replace(graph, operators=tuple(operators))


def _compute_ns(profile: Any) -> int:
    """Forward and backward of one worker in FP32, and the optimizer's step."""
    costs = [profile.cost(name)["FP32"] for name in profile.operators]
    device_ns = sum(cost.forward_ns + cost.backward_ns for cost in costs)
    host_ns = sum(cost.host_forward_ns + cost.host_backward_ns for cost in costs)
    return max(device_ns, host_ns) + profile.optimizer.step_ns


def _row(model: str, cluster: str, how: str, problem: Problem, plan: Plan | None, samples: int) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "cluster": cluster, "plan": how}
    if plan is None:
        return {**row, "fits": False}
    evaluation: Evaluation = qsync_opt.evaluate(problem, plan)
    used: dict[str, int] = {}
    for precision in plan.devices["T4"].values():
        used[precision] = used.get(precision, 0) + 1
    return {
        **row,
        "iteration_ms": evaluation.iteration_ns / 1e6,
        "samples_per_s": samples / (evaluation.iteration_ns / 1e9),
        "t4_mib": evaluation.memory_kib["T4"] / 1024,
        "fits": evaluation.memory_kib["T4"] <= problem.device("T4").memory_limit_kib,
        "sensitivity": evaluation.objective,
        "operators": ", ".join(f"{used[name]} {name}" for name in ("INT8", "FP16", "FP32") if name in used),
    }


def simulate(name: str, *, small: bool) -> dict[str, Any]:
    """Rows of one model: plans on both clusters, uniform plans on a T4 alone, and batches by speed."""
    batch = BATCHES[name]
    few = build(name, CAPTURED, small=small)
    captured = qsync_opt.capture(few.model, (), few.kwargs, name=name)
    graph = at_batch(captured, batch)
    statistics = qsync_opt.collect_statistics(few.model, [few.kwargs], graph=captured)
    profiles = {card: qsync_opt.roofline_profile(graph, qsync_opt.data_sheet(card)) for card in ("V100", "T4")}
    formats = profiles["T4"].formats
    tables = {kind: qsync_opt.sensitivities(captured, statistics, formats, kind=kind) for kind in _KINDS}
    rows, batches, alone = [], [], []
    for letter, path in CLUSTERS.items():
        cluster = qsync_opt.load_cluster(path)
        samples = batch * sum(device.count for device in cluster.devices)
        problems = {kind: qsync_opt.build_problem(graph, profiles, table, cluster) for kind, table in tables.items()}
        ours, theirs = problems["propagated"], problems["published"]
        rows += [
            _row(name, letter, f"uniform {precision}", ours, uniform_plan(ours, precision), samples)
            for precision in ("FP32", "FP16", "INT8")
        ]
        start = published_start(theirs, theirs.device("T4"), float("inf"))
        theirs = replace(theirs, latency_limit_ns=max(start.iteration_ns, theirs.latency_limit_ns))
        published = qsync_opt.solve(theirs, "qsync-published").plan
        rows.append(_row(name, letter, "QSync as published", ours, published, samples))
        # Ours may take as long as QSync's own plan starts with.
        ours = replace(ours, latency_limit_ns=theirs.latency_limit_ns)
        solution = qsync_opt.solve(ours)
        row = _row(name, letter, "this package", ours, solution.plan, samples)
        rows.append({**row, "gap": solution.gap})
        batches.append(_by_speed(name, letter, ours, profiles, batch, samples))
        if letter == "A":
            alone = _alone(name, graph, profiles["T4"], tables["propagated"])
    return {"plans": rows, "batches": batches, "alone": alone}


_KINDS = ("propagated", "published")


def _by_speed(
    name: str, letter: str, problem: Problem, profiles: Mapping[str, Any], batch: int, samples: int
) -> dict[str, Any]:
    """Dynamic batch sizing: FP32 everywhere, local batches in proportion to speed, the global batch as it was.

    Times grow with the batch; what communication adds to the slower card's pass stays.
    """
    evaluation = qsync_opt.evaluate(problem, uniform_plan(problem, "FP32"))
    compute_ns = {card: _compute_ns(profile) for card, profile in profiles.items()}
    speed = {card: 1 / ns for card, ns in compute_ns.items()}
    t4 = max(1, round(2 * batch * speed["T4"] / sum(speed.values())))
    sizes = {"T4": t4, "V100": 2 * batch - t4}
    exposed_ns = max(0, evaluation.iteration_ns - max(compute_ns.values()))
    iteration_ns = max(compute_ns[card] * sizes[card] / batch for card in sizes) + exposed_ns
    parts = memory_breakdown(problem, evaluation.devices["T4"])
    grows = parts.activations_bytes + parts.casts_bytes + parts.transient_bytes
    num_bytes = parts.total_bytes - grows + grows * sizes["T4"] / batch
    return {
        "model": name,
        "cluster": letter,
        "v100_batch": sizes["V100"],
        "t4_batch": sizes["T4"],
        "iteration_ms": iteration_ns / 1e6,
        "samples_per_s": samples / (iteration_ns / 1e9),
        "t4_mib": num_bytes / 2**20,
        "fits": num_bytes <= problem.device("T4").memory_limit_kib * 1024,
    }


def _alone(name: str, graph: Any, profile: Any, table: Any) -> list[dict[str, Any]]:
    """Uniform plans on one T4 without communication."""
    device = DeviceType(name="T4", count=1, memory_limit_bytes=2**60, precisions=tuple(profile.formats))
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=1e12, source="one worker")
    cluster = Cluster(name="one", devices=(device,), network=network)
    problem = qsync_opt.build_problem(graph, {"T4": profile}, table, cluster, latency_limit_ns=2**60)
    return [
        {
            "model": name,
            "precision": precision,
            "simulated_ms": qsync_opt.evaluate(problem, uniform_plan(problem, precision)).iteration_ns / 1e6,
            "released_predicted_ms": RELEASED_MS.get(name, {}).get(precision, (None, None))[0],
            "released_measured_ms": RELEASED_MS.get(name, {}).get(precision, (None, None))[1],
        }
        for precision in ("FP32", "FP16", "INT8")
    ]


def run(names: list[str], *, small: bool) -> dict[str, Any]:
    """The record of all models."""
    record: dict[str, Any] = {
        "format": "qsync-bench-paper/1",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": f"python benchmarks/paper.py{' --small' * small}",
        "hardware": "none: simulated from the data sheets of V100 and T4",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "plans": [],
        "batches": [],
        "alone": [],
    }
    for name in names:
        simulated = simulate(name, small=small)
        for part in ("plans", "batches", "alone"):
            record[part] += simulated[part]
        print(name, "done", flush=True)
    return record


Cell = Callable[[Mapping[str, Any]], str]


def _table(rows: list[dict[str, Any]], columns: Mapping[str, Cell]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def _number(key: str, form: str = ".1f") -> Cell:
    return lambda row: "–" if row.get(key) is None else f"{row[key]:{form}}"


def _text(key: str) -> Cell:
    return lambda row: str(row.get(key) or "–")


def _fits(row: Mapping[str, Any]) -> str:
    return "no plan" if "t4_mib" not in row else "yes" if row["fits"] else "**no**"


def page(record: Mapping[str, Any]) -> str:
    """The page of the documentation."""
    alone = _table(
        [row for row in record["alone"] if row["released_measured_ms"] is not None],
        {
            "model": _text("model"),
            "precision": _text("precision"),
            "simulated here (ms)": _number("simulated_ms", ".0f"),
            "release: predicted (ms)": _number("released_predicted_ms", ".0f"),
            "release: measured (ms)": _number("released_measured_ms", ".0f"),
        },
    )
    plans = _table(
        record["plans"],
        {
            "model": _text("model"),
            "cluster": _text("cluster"),
            "plan": _text("plan"),
            "iteration (ms)": _number("iteration_ms", ".0f"),
            "samples/s": _number("samples_per_s", ".0f"),
            "T4 (MiB)": _number("t4_mib", ".0f"),
            "fits": _fits,
            "variance": _number("sensitivity", ".3g"),
            "operators on T4": _text("operators"),
        },
    )
    batches = _table(
        record["batches"],
        {
            "model": _text("model"),
            "cluster": _text("cluster"),
            "V100 / T4 here": lambda row: f"{row['v100_batch']} / {row['t4_batch']}",
            "release": lambda row: " / ".join(map(str, RELEASED_BATCHES.get(row["model"], ("–",)))),
            "iteration (ms)": _number("iteration_ms", ".0f"),
            "samples/s": _number("samples_per_s", ".0f"),
            "T4 (MiB)": _number("t4_mib", ".0f"),
            "fits": _fits,
        },
    )
    models = dict.fromkeys(row["model"] for row in record["plans"])
    batch_sizes = ", ".join(f"{name} {BATCHES[name]}" for name in models)
    missing = [name for name in BATCHES if name not in models]
    lacking = f" Not simulated so far: {', '.join(missing)}." if missing else ""
    return f"""# The paper beside this package, by simulation

<!-- Written by `python benchmarks/paper.py`; the record is benchmarks/results/paper.json. -->

QSync (IPDPS 2024) compares its plans with uniform precision, with batches sized by speed, and with full precision, on
two clusters of 16 V100 and 16 T4. This page repeats the comparison **by simulation**: no card ran. Times are roofline
estimates from data sheets, variances come from one batch of 7 random samples and random weights, and accuracy cannot be
simulated at all ([quality](quality.md) has trained models). The paper's own tables could not be had when this was
written; what stands beside is what the code of its release records. Its claims are an accuracy 0.27 to 1.03 points
above uniform precision at equal throughput, and predicted iteration times within 5 %.

Local batches are those of the release: {batch_sizes}.{lacking}

The clusters are in `benchmarks/paper_clusters/`: in A a T4 gives all of its memory, in B 30 % of it (remembered of the
paper, not verified); the network is assumed.

## One T4

Iterations of uniform plans, without communication. In the release's backend INT8 is slower than FP16, because its
quantization kernels reach a fifth of the memory bandwidth; the roofline assumes kernels that reach it. The release does
not say which batches its traces have, so that the distance between the columns is no error of either.

{alone}

## Plans

*QSync as published* is its allocator (`qsync-published`: exhaustive plans of subgraphs, one pass of recovery) on its
indicator as released (`published`, with the mistakes that
[its module](../reference/qsync_opt.sensitivity.published.md) lists). *This package* is the default method on the
propagated variance, allowed the time of QSync's initial plan. The variance of every plan is ours, so that both are
measured alike; it is in squared gradient units. Where the table has no plan, no choice of precisions brings the local
batch into the memory. Batch normalization keeps FP32 copies of 16-bit results ([memory](memory.md)), so that low
precision does not save memory in networks whose every convolution is followed by one.

{plans}

## Batches sized by speed

FP32 everywhere, local batches in proportion to speed, the global batch as it was. Each card's gradient is then weighted
by its share of the samples, as a mean over samples needs (the release's scripts for transformers leave it at 1).

{batches}

Where FP32 does not fit, smaller batches help only as far as activations are what does not fit. Batch normalization sees
other batches then, which is the paper's reason against it.
"""


def main() -> None:
    """Run or only write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small relatives of the models, for a trial")
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--merge", type=Path, nargs="+", help="put the records of runs for single models together")
    parser.add_argument("--page-only", action="store_true", help="write the page from the record")
    options = parser.parse_args()
    if options.page_only:
        PAGE.write_text(page(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    if options.merge:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        parts = {part: [row for each in records for row in each[part]] for part in ("plans", "batches", "alone")}
        record = {**records[0], **parts}
        write_json(RESULT, record)
        PAGE.write_text(page(record), encoding="utf-8")
        return
    torch.set_num_threads(1)
    record = run(options.models, small=options.small)
    write_json(options.output, record)
    if options.output == RESULT:
        PAGE.write_text(page(record), encoding="utf-8")


if __name__ == "__main__":
    main()
