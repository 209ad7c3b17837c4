"""Made-up step costs for a graph: every case that can occur, for tests and for measuring speed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from qsync_opt.costs.costs import CostFit
from qsync_opt.costs.profile import DeviceIdentity
from qsync_opt.model.graph import OpGraph, Role
from qsync_opt.steps.cases import StepFlow, delivered
from qsync_opt.steps.costs import Case, CaseCost, StepCosts
from qsync_opt.steps.fitting import PHASE_LABELS
from qsync_opt.steps.queues import Work

_FORMATS = ("BF16", "FP16", "FP32")
_MOST_INPUTS = 3
"""Operators with more inputs get only cases in which all arrive alike."""


def random_step_costs(graph: OpGraph, precisions: Sequence[str], *, seed: int = 0) -> StepCosts:
    """Step costs with random times and sizes, the same for the same arguments.

    Args:
        graph: The model.
        precisions: Of every adjustable operator.
        seed: Of the random numbers.
    """
    generator = random.Random(seed)
    flow = StepFlow(graph, "BF16")

    def work() -> Work:
        host, device = generator.randrange(2_000, 60_000), generator.randrange(0, 200_000)
        return Work(host, device, device + generator.randrange(0, host))

    cases: dict[Case, CaseCost] = {}
    for i, operator in enumerate(graph):
        count = len(flow.inputs[i])
        arrivals = (
            itertools.product(_FORMATS, repeat=count) if count <= _MOST_INPUTS else ((f,) * count for f in _FORMATS)
        )
        chosen = tuple(precisions) if operator.role is Role.ADJUSTABLE else ("",)
        for inputs, precision in itertools.product(tuple(arrivals), chosen):
            case = Case(flow.signature(i), precision, inputs)
            if case in cases:
                continue
            size = 512 * generator.randrange(0, 64)
            cases[case] = CaseCost(
                output=delivered(operator, precision, inputs, "BF16"),
                samples=1,
                forward=work(),
                backward=work(),
                saves_inputs=tuple(k for k in range(count) if generator.random() < 0.5),
                saves_output=generator.random() < 0.3,
                result_bytes=size,
                forward_net_bytes=size + 512 * generator.randrange(0, 8),
                forward_peak_bytes=size + 512 * generator.randrange(8, 64),
                backward_net_bytes=-512 * generator.randrange(0, 8),
                backward_peak_bytes=512 * generator.randrange(0, 64),
                kernel_ns=generator.randrange(0, 100_000),
            )
    names = [operator.name for operator in graph]
    return StepCosts(
        device=DeviceIdentity(name=f"made up {seed}", kind="cuda", threads=1, versions={}),
        model=graph.name,
        fingerprint=graph.fingerprint(),
        half_format="BF16",
        cases=cases,
        phases={label: work() for label in PHASE_LABELS},
        phase_peaks=dict.fromkeys(PHASE_LABELS, 0),
        roots={},
        held={name: names[min(i + 1, len(names) - 1)] for i, name in enumerate(names)},
        resident_bytes=1 << 20,
        casts={
            f"{a}>{b}": CostFit(base_ns=1000, ns_per_mi_elements=2000) for a in _FORMATS for b in _FORMATS if a != b
        },
        cast_host_ns=5000,
    )
