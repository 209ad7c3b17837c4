"""Problem files of real models: BERT-base, ResNet-50 and GPT-2 captured at full size, priced by a roofline.

The graphs are what the package's capture finds (every operator, its role, inputs and elements); only the costs are
made up: times from public peaks of a T4 with 15 % log-normal noise for each operator and precision, sensitivities
log-normal, INT8 about 500 times FP16. Writes ``benchmarks/problems/<model>.json`` for ``benchmarks/solvers.py``.

    python -P benchmarks/capture_problems.py [--small] [--output FOLDER] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from example_models import example

from qsync_opt import evaluate
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import CostFit, DeviceIdentity, DeviceProfile, MeasuredCost, OptimizerCost
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import formats_for, number_format
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.training import Problem, build_problem, problem_role, uniform_plan

FOLDER = Path(__file__).parent / "problems"
MODELS = ("bert-base", "resnet50", "gpt2")
PRECISIONS = ("INT8", "FP16", "FP32")
PEAKS = {"INT8": 130e12, "FP16": 65e12, "FP32": 8.1e12}
"""Operations per second of a T4 by its data sheet."""
BYTES_PER_S = 300e9
LAUNCH_S = 5e-6
COMPUTE_SHARE, MEMORY_SHARE = 0.5, 0.8
"""Share of the peaks that is reached."""
NOISE = 0.15
SENSITIVITY = {"INT8": 1.0, "FP16": 2e-3, "FP32": 0.0}
SPREAD = 2.0
"""Standard deviation of the logarithm of sensitivities."""
LATENCY, MEMORY = 0.3, 0.4
"""Where the limits lie between the uniform plans of lowest and of highest precision."""


def _seconds(operator: Operator, precision: str) -> float:
    """Roofline time of one pass."""
    num_bytes = number_format(precision).bits / 8 * 3 * operator.output_elements
    compute = operator.flops / (COMPUTE_SHARE * PEAKS[precision])
    return LAUNCH_S + max(compute, num_bytes / (MEMORY_SHARE * BYTES_PER_S))


def _cost(operator: Operator, precision: str, noise: np.ndarray) -> MeasuredCost:
    backward = "FP16" if precision == "INT8" else precision
    keeps = tuple(range(len(operator.inputs))) if problem_role(operator) is Role.ADJUSTABLE else ()
    quantized = precision == "INT8"
    return MeasuredCost(
        forward_ns=int(_seconds(operator, precision) * noise[0] * 1e9),
        backward_ns=int(2 * _seconds(operator, backward) * noise[1] * 1e9),
        saves_inputs=() if quantized else keeps,
        saved_bytes=sum(spec.elements for spec in operator.input_specs) if quantized and keeps else 0,
    )


def roofline_profile(graph: OpGraph, rng: np.random.Generator) -> DeviceProfile:
    """A made-up profile of a T4; every operator has a measurement of its own, because of the noise."""
    measurements = {}
    for operator in graph:
        allowed = {Role.ADJUSTABLE: PRECISIONS, Role.DEPENDENT: PRECISIONS[1:], Role.FIXED: PRECISIONS[2:]}
        names = allowed[problem_role(operator)]
        measurements[operator.name] = {
            name: _cost(operator, name, np.exp(NOISE * rng.standard_normal(2))) for name in names
        }
    casts = {}
    for source in PRECISIONS:
        for target in PRECISIONS:
            if source != target:
                passes = 2 if target == "INT8" else 1  # the largest value is looked for first
                moved = (passes * number_format(source).bits + number_format(target).bits) / 8
                casts[f"{source}>{target}"] = CostFit(
                    base_ns=4000, ns_per_mi_elements=int(2**20 * moved / (MEMORY_SHARE * BYTES_PER_S) * 1e9)
                )
    weights = sum(parameter.spec.elements for parameter in graph.parameters)
    return DeviceProfile(
        device=DeviceIdentity(name="T4 by its data sheet", kind="cuda", threads=1, versions={"roofline": "1"}),
        model=graph.name,
        fingerprint=graph.fingerprint(),
        options={},
        formats=formats_for(PRECISIONS, "FP16"),
        measurements=measurements,
        operators={operator.name: operator.name for operator in graph},
        casts=casts,
        gradient_sums={name: CostFit(base_ns=4000, ns_per_mi_elements=50_000) for name in PRECISIONS[1:]},
        optimizer=OptimizerCost(
            name="Adam",
            step_ns=int(weights * 28 / (MEMORY_SHARE * BYTES_PER_S) * 1e9),
            zero_grad_ns=0,
            state_bytes=8 * weights,
            workspace_bytes=0,
        ),
    )


def captured_problem(name: str, *, small: bool = False, seed: int = 0) -> Problem:
    """The problem of one model on eight T4 behind a network of 100 Gbit/s, both limits binding."""
    torch.manual_seed(0)
    chosen = example(name, small=small)
    graph = capture(chosen.model, (), chosen.kwargs, name=name)
    rng = np.random.default_rng(seed)
    sensitivities = {}
    for operator in graph.by_role(Role.ADJUSTABLE):
        scale = math.exp(SPREAD * rng.standard_normal())
        sensitivities[operator.name] = {precision: SENSITIVITY[precision] * scale for precision in PRECISIONS}
    cluster = Cluster(
        name="eight T4",
        devices=(DeviceType(name="T4", count=8, memory_limit_bytes=2**50, precisions=PRECISIONS),),
        network=Network(latency_s=2e-5, bandwidth_bytes_per_s=1.25e10, source="made up: 100 Gbit/s"),
    )
    profile = roofline_profile(graph, rng)
    loose = build_problem(graph, {"T4": profile}, sensitivities, cluster, latency_limit_ns=2**50)
    low, high = (evaluate(loose, uniform_plan(loose, precision)) for precision in (None, "FP32"))
    limit_kib = low.memory_kib["T4"] + MEMORY * (high.memory_kib["T4"] - low.memory_kib["T4"])
    limit_ns = low.iteration_ns + LATENCY * (high.iteration_ns - low.iteration_ns)
    device = replace(loose.devices[0], memory_limit_kib=int(limit_kib))
    return replace(loose, latency_limit_ns=int(limit_ns), devices=(device,))


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--small", action="store_true", help="two layers of a few channels")
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        problem = captured_problem(name, small=arguments.small)
        path = arguments.output / f"{name}.json"
        path.write_text(json.dumps(problem.to_json(), separators=(",", ":")) + "\n")
        print(
            f"{path}: {len(problem.operators)} operators, {len(problem.adjustable)} adjustable, {path.stat().st_size} B"
        )


if __name__ == "__main__":
    main()
