"""Made-up records of measured times, from a formula that a fitted model should find."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from qsync_opt.costs.learned import CostRecord, DeviceVector, LearnedModel, Phase, Sample, Workload, reference_ns
from qsync_opt.model import Role, TensorSpec

FACTORS = {"FP32": 1.0, "BF16": 1.6, "INT8": 3.0}
"""Precision to the factor on the reference."""


def make_device_vector(name: str = "device", scale: float = 1.0, **changes: object) -> DeviceVector:
    """A made-up cpu whose rates are ``scale`` times those of the plain one; ``changes`` replace fields."""
    figures: dict[str, object] = {
        "name": name,
        "kind": "cpu",
        "peak_flops": {"INT8": 4e11 * scale, "BF16": 2e11 * scale, "FP32": 1e11 * scale},
        "bandwidth_bytes_per_s": 2e10 * scale,
        "cache_bytes": 1e6,
        "cache_bytes_per_s": 1e11 * scale,
        "multiprocessors": 1,
        "launch_ns": 2000.0 / scale,
        "source": "made up",
    }
    return DeviceVector(**(figures | changes))  # type: ignore[arg-type]


def without_laws(model: LearnedModel) -> LearnedModel:
    """The model without its laws: everything is the roofline's."""
    return replace(
        model, names=(), weights_LT=model.weights_LT[:0], ends_LS2=model.ends_LS2[:0], most_LT=model.most_LT[:0]
    )


def linear_workload(rows: int, depth: int, columns: int) -> Workload:
    """A linear operator with a gradient into its input."""
    shapes = [(rows, depth), (columns, depth)]
    return Workload(
        kind="linear",
        role=Role.ADJUSTABLE,
        inputs=tuple(TensorSpec(shape=shape, dtype="float32") for shape in shapes),
        outputs=(TensorSpec(shape=(rows, columns), dtype="float32"),),
        weight_elements=depth * columns,
        gradients=1,
        flops=2 * rows * depth * columns,
    )


def pointwise_workload(kind: str, rows: int, columns: int) -> Workload:
    """An element-wise operator."""
    spec = TensorSpec(shape=(rows, columns), dtype="float32")
    return Workload(kind=kind, role=Role.DEPENDENT, inputs=(spec,), outputs=(spec,), gradients=1)


def make_cost_record(count: int = 30, devices: tuple[DeviceVector, ...] = (), seed: int = 0) -> CostRecord:
    """Times of linear and element-wise operators: the reference by a factor per precision and pass, and noise."""
    rng = random.Random(seed)
    devices = devices or (make_device_vector(),)
    works = [linear_workload(*(rng.choice((16, 48, 100, 256, 512)) for _ in range(3))) for _ in range(count)]
    works += [
        pointwise_workload(kind, rng.randrange(8, 400), 64) for kind in ("gelu", "relu") for _ in range(count // 3)
    ]
    works = list(dict.fromkeys(works))
    blank = CostRecord(devices=devices, half_formats=("BF16",) * len(devices), workloads=tuple(works), samples=())
    samples = []
    for d, device in enumerate(devices):
        for w, work in enumerate(works):
            for precision in FACTORS if work.kind == "linear" else ("BF16", "FP32"):
                for phase in (Phase.FORWARD, Phase.BACKWARD):
                    sample = Sample(device=d, workload=w, precision=precision, phase=phase, ns=1)
                    scale = reference_ns(blank.program(sample), device)
                    factor = FACTORS[precision] * (1.5 if phase is Phase.BACKWARD else 1.2)
                    noise = math.exp(rng.gauss(0, 0.03))
                    model = "small" if w % 5 == 0 else "sweep"
                    ns = round(scale * factor * noise)
                    samples.append(Sample(device=d, workload=w, precision=precision, phase=phase, ns=ns, model=model))
    return CostRecord(
        devices=devices,
        half_formats=("BF16",) * len(devices),
        workloads=tuple(works),
        samples=tuple(samples),
        note="made up",
    )
