"""What one batch of training steps told, put together: numbers of operators and signals, and what probes found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from qsync_opt.model.graph import OpGraph
from qsync_opt.runtimes.torch.sensitivity.probes.gradient import Probed
from qsync_opt.runtimes.torch.sensitivity.records.batch import finish_batch
from qsync_opt.runtimes.torch.sensitivity.records.operator import OperatorRecord
from qsync_opt.runtimes.torch.sensitivity.records.signals import SignalTensors, signals_on_host
from qsync_opt.sensitivity.merging import merge_operators
from qsync_opt.sensitivity.statistics import Curvature, ModelStatistics, OperatorStatistics, Signal


def statistics_of_batch(
    recorded: Mapping[str, list[OperatorRecord]],
    watched: Mapping[str, list[SignalTensors]],
    batch: int,
    graph: OpGraph | None,
) -> ModelStatistics:
    """Statistics of one batch: what operators and signals were seen to do."""
    operators: list[OperatorStatistics] = []
    finished = iter(finish_batch([record for records in recorded.values() for record in records], batch))
    for records in recorded.values():
        calls = [next(finished) for _ in records]
        operators.append(calls[0] if len(calls) == 1 else merge_operators(calls, [1] * len(calls), calls=len(calls)))
    signals = {}
    for name, (elements, seen) in signals_on_host(watched).items():
        entering, leaving, curvature, spread = (sum(values) / len(seen) for values in zip(*seen, strict=True))
        signals[name] = Signal(
            elements=elements,
            input_square_sum=entering,
            output_square_sum=leaving,
            curvature=curvature,
            noise_weight=spread * entering / leaving if leaving and spread != 1.0 else 1.0,
        )
    return ModelStatistics(
        batches=1,
        operators=tuple(operators),
        signals=signals,
        model_fingerprint=None if graph is None else graph.fingerprint(),
    )


def with_probes(
    found: ModelStatistics, plain: Probed, adaptive: Probed, curvatures: Mapping[str, Mapping[str, Curvature]]
) -> ModelStatistics:
    """Statistics of one batch, and what probes found beside them."""
    operators = []
    for operator in found.operators:
        probed: dict[str, Any] = {
            "gains": plain.gains.get(operator.name, {}),
            "adaptive_gains": adaptive.gains.get(operator.name, {}),
            "curvatures": curvatures.get(operator.name, {}),
        }
        operators.append(dataclasses.replace(operator, **probed) if any(probed.values()) else operator)
    signals = {
        name: dataclasses.replace(
            signal,
            flips=plain.flips.get(name, ()),
            adaptive_flips=adaptive.flips.get(name, ()),
            noise_ratio=plain.noise.get(name) or adaptive.noise.get(name, 0.0),
        )
        for name, signal in found.signals.items()
    }
    return dataclasses.replace(found, operators=tuple(operators), signals=signals, shift=plain.shift)
