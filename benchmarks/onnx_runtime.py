"""ONNX Runtime under plans: which formats a device runs, how fast each is, and the default plan, predicted and run.

python benchmarks/onnx_runtime.py [--device cuda|cpu] [--size full|small] [--output FILE]

Three models that were exported from torch are profiled operator by operator. Each format that the device has, alone,
and the default plan are then run as whole models, and compared with FP32. An operator that a format is refused for has
the next finer one. Writes ``benchmarks/results/onnx-runtime.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from results_head import asked_row, processors, results_head
from torch import nn
from unlike_models import subject

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.io import write_json
from qsync_opt.model import Role
from qsync_opt.model.onnx import read_weights
from qsync_opt.numerics import closest_precision
from qsync_opt.registry import Kind, create
from qsync_opt.runtimes.onnxruntime import OnnxRuntime, RunnableModel, compare
from qsync_opt.sensitivity import ModelKnowledge

MODELS = ("encoder", "convolutional", "u-net")
SAMPLES, RUNS = 8, 20
NEAR = 0.1
"""Of the measured time, what a prediction may be off by."""


class Scores(nn.Module):
    """What a model computes of its input, without a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores, whatever else the model returns."""
        output = self.model(x)
        return output if isinstance(output, torch.Tensor) else output.logits


def run_s(model: RunnableModel, feeds: Mapping[str, np.ndarray]) -> float:
    """Median seconds of a run of the graph that runs now, with inputs and results on the device."""
    kind = model.device.kind
    provider = {"cpu": "CPUExecutionProvider", "cuda": ("CUDAExecutionProvider", {"use_tf32": "0"})}[kind]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.proto.SerializeToString(), options, providers=[provider])
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value, kind, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, kind, 0)
    seconds = []
    for _ in range(RUNS + 3):
        began = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def measure(name: str, size: str, device: str) -> list[dict[str, Any]]:
    """One model: its profile, each format alone, and the default plan, from the first run to the last."""
    source = subject(f"{name} {size}")
    x = next(iter(source.batch.values()))[:SAMPLES]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        qsync_opt.capture_model(Scores(source.model).eval(), (x,), onnx_path=path)
        runtime, inputs = OnnxRuntime(), (x.numpy(),)
        model = runtime.load(path, device)
        began = time.perf_counter()
        profile = runtime.profile(model, inputs, device=device, repeats=2, name="here")
        profiled_s = time.perf_counter() - began
        knowledge = ModelKnowledge(weights=read_weights(path))
    worker = DeviceType(name="here", count=1, memory_limit_bytes=1 << 37, precisions=tuple(profile.formats))
    network = Network(latency_s=20e-6, bandwidth_bytes_per_s=1e9, source="not used by one worker")
    cluster = Cluster(name="one", devices=(worker,), network=network)
    indicator = create(Kind.INDICATOR, "weights")
    sensitivities = indicator.sensitivities(model.graph, knowledge, profile.formats)
    problem = qsync_opt.build_problem(model.graph, {"here": profile}, sensitivities, cluster, cast_sharing="producer")
    planned = qsync_opt.solve(problem).plan
    assert planned is not None
    adjustable = model.graph.by_role(Role.ADJUSTABLE)
    plans = {
        format_name: {o.name: closest_precision(model.support.precisions(o), format_name) for o in adjustable}
        for format_name in profile.formats
    }
    plans["default plan"] = dict(planned.devices["here"])
    records = []
    for label, precisions in plans.items():
        expected = qsync_opt.evaluate(problem, dataclasses.replace(planned, devices={"here": precisions}))
        runtime.apply(model, precisions)
        comparison = compare(model, inputs)
        records.append(
            {
                "model": name,
                "plan": label,
                "operators": dict(Counter(precisions[o.name] for o in adjustable)),
                "run_ms": round(1e3 * run_s(model, model.feeds(inputs)), 4),
                "predicted_ms": round(expected.iteration_ns / 1e6, 4),
                "relative_error": max(comparison.results.values()),
                "profiled_s": round(profiled_s, 1),
            }
        )
        runtime.undo(model)
        print(records[-1], flush=True)
    return records


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A model's plan beside the best single format, and the furthest prediction."""
    rows = []
    for name in dict.fromkeys(record["model"] for record in records):
        own = {record["plan"]: record for record in records if record["model"] == name}
        plan, *single = own.pop("default plan"), *own.values()
        best = min(single, key=lambda record: record["run_ms"])
        ratio = plan["run_ms"] / best["run_ms"]
        rows.append(
            asked_row(f"{name}: run under the default plan over that in the best single format", "<= 1.02",
                      round(ratio, 3), ratio <= 1.02, f"best: {best['plan']}, {best['run_ms']} ms")
        )  # fmt: skip
        errors = {record["plan"]: record["predicted_ms"] / record["run_ms"] - 1 for record in (plan, *single)}
        worst = max(errors, key=lambda label: abs(errors[label]))
        rows.append(
            asked_row(f"{name}: predicted over measured run, furthest", "within 10 %", round(errors[worst], 3),
                      abs(errors[worst]) <= NEAR, worst)
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure all models and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "onnx-runtime.json")
    arguments = parser.parse_args()
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else processors()
    head = results_head(hardware, {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__})
    records: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        records += measure(name, arguments.size, arguments.device)
        write_json(arguments.output, {**head, "asked": asked(records), "records": records})


if __name__ == "__main__":
    main()
