"""How a job's sensitivities are measured: by which indicator, on which rank, for the kernels that the job will use."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt.costs.profile import DeviceProfile
from qsync_opt.errors import ModelError, first_line
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.numerics.rounding import Granularity, Rounding
from qsync_opt.runtimes.torch.capture.model import CapturedModel
from qsync_opt.runtimes.torch.ddp.agreement import broadcast_json, together, world
from qsync_opt.runtimes.torch.job.horizon import divides_by_squares
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job, example_of
from qsync_opt.runtimes.torch.sensitivity.statistics import collect_statistics
from qsync_opt.runtimes.torch.support.iteration import default_loss
from qsync_opt.sensitivity.scores import sensitivities
from qsync_opt.sensitivity.sensitivity_values import SensitivityValues
from qsync_opt.sensitivity.statistics import ModelStatistics
from qsync_opt.sensitivity.table import IndicatorKind
from qsync_opt.sensitivity.variances import NoiseOptions

_LOGGER = logging.getLogger(__name__)


def job_indicator(job: Job) -> IndicatorKind:
    """The indicator of a job: the one that was asked for, or by the optimizer that will train it.

    Source:
        Ours; what the two are and how they compare: ``docs/background/indicator.md`` and ``quality.md``.
    """
    asked, probes = job.options.indicator, job.options.probes
    if asked != "auto":
        return IndicatorKind(asked)
    if not probes:
        return IndicatorKind.PROPAGATED
    # Without an optimizer the job is planned for AdamW, as its step is timed.
    adaptive = job.optimizer is None or divides_by_squares(job.optimizer)
    return IndicatorKind.PROGRESS if adaptive else IndicatorKind.PROBED


def noise_of(kernels: KernelOptions) -> NoiseOptions:
    """How kernels of these options round, as the indicator wants to know it."""
    return NoiseOptions(
        rounding=Rounding(kernels.rounding),
        activation_granularity=Granularity(kernels.activation_granularity),
        weight_granularity=Granularity(kernels.weight_granularity),
        backward=kernels.backward,
    )


def measure_sensitivities(
    job: Job,
    captured: CapturedModel,
    types: DeviceTypes,
    profiles: Mapping[str, DeviceProfile],
    batches: Iterable[Any] | None,
) -> dict[str, SensitivityValues]:
    """Sensitivities for the formats of every type, from statistics of one rank: that with the most memory."""
    rank, _ = world()
    source = max(types.ranks, key=lambda name: (types.memory_bytes[name], -types.ranks[name][0]))
    collector = types.ranks[source][0]

    def collect() -> Any:
        if rank != collector:
            return None
        found, kind = _statistics(job, captured, batches)
        noise = noise_of(job.options.kernels)
        tables = {
            name: sensitivities(captured.graph, found, measured.formats, options=noise, kind=kind)
            for name, measured in profiles.items()
        }
        return {name: table.values_only().to_json() for name, table in tables.items()}

    told = broadcast_json(together(collect), collector)
    return {name: SensitivityValues.from_json(told[name], f"sensitivities of {name!r}") for name in profiles}


def _statistics(
    job: Job, captured: CapturedModel, batches: Iterable[Any] | None
) -> tuple[ModelStatistics, IndicatorKind]:
    """Statistics of what the indicator needs, and the indicator; another one where the model cannot be probed."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        example = example_of(model, batch, job.example.loss)
        output = model(*example.args, **example.kwargs)
        return (job.example.loss or default_loss)(output)

    own = [job.example.kwargs or job.example.args]
    seen = own if batches is None else list(batches)
    kind = job_indicator(job)

    def collect(**probes: int) -> ModelStatistics:
        return collect_statistics(job.model, seen, step=step, graph=captured.graph, **probes)  # type: ignore[arg-type]

    try:
        if kind is IndicatorKind.PROGRESS:
            return collect(adaptive_probes=job.options.probes), kind
        return collect(probes=job.options.probes if kind is IndicatorKind.PROBED else 0), kind
    except (ModelError, torch.cuda.OutOfMemoryError) as failure:
        if kind is IndicatorKind.PROPAGATED:
            raise
        # Without gains the noise is swept through the graph by formula instead: coarser, and the log says so.
        _LOGGER.warning("sensitivities are propagated by formula and not probed: %s", first_line(failure)[:400])
    # Outside of the handler: the exception's frames would keep all that the probes had computed.
    gc.collect()
    if job.example.device.type == "cuda":
        torch.cuda.empty_cache()
    return collect(), IndicatorKind.PROPAGATED
