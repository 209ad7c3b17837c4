"""The stages that measure a job; each runs on all ranks, and fails on all if it fails on one."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import MEASURED_OPTION, DeviceProfile
from qsync_opt.errors import ModelError, NotReadyError, ProblemError, QSyncError, UnsupportedError, first_line
from qsync_opt.io import encode
from qsync_opt.kernels import KernelOptions
from qsync_opt.numerics import Granularity, Rounding
from qsync_opt.runtimes.torch.capture import CapturedModel
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json, measure_all_reduce, together, world
from qsync_opt.runtimes.torch.execution import is_sharded
from qsync_opt.runtimes.torch.interception import check_not_scripted, interception_of
from qsync_opt.runtimes.torch.job.options import PlanningOptions, cache_folder
from qsync_opt.runtimes.torch.job.steps import profile_job_steps
from qsync_opt.runtimes.torch.profiling import profile
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.support import (
    Loss,
    TrainingExample,
    call_arguments,
    default_loss,
    device_identity,
    memory_budget,
    wanted_bytes,
)
from qsync_opt.sensitivity import (
    IndicatorKind,
    ModelStatistics,
    NoiseOptions,
    SensitivityValues,
    sensitivities,
    variance_weight,
)


def divides_by_squares(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer divides its steps by the root of the mean squared gradient, as Adam does."""
    return all("betas" in group for group in optimizer.param_groups)


def noise_horizon(
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    statistics: ModelStatistics | None = None,
    learning_rate: float | None = None,
) -> float:
    """The ``horizon`` of ``sensitivities(kind="loss")`` for the coming steps of an optimizer.

    Args:
        optimizer: Adam or one like it (with ``betas``), or SGD (with ``momentum``).
        steps: Number of coming steps.
        statistics: Of two batches or more, for SGD, whose steps grow with the gradient.
        learning_rate: Root mean square over the steps; by default the present rate of the optimizer's first group.

    Returns:
        The factor by which the gradient's variance counts.

    Raises:
        UnsupportedError: Another kind of optimizer; steps or rate out of range.
        ProblemError: SGD without the gradient noise of statistics.

    Source:
        Ours; see ``qsync_opt.sensitivity.scores``.
    """
    group = optimizer.param_groups[0]
    rate = float(group["lr"] if learning_rate is None else learning_rate)
    if divides_by_squares(optimizer):
        return variance_weight(learning_rate=rate, steps=steps)
    if "momentum" not in group:
        raise UnsupportedError(
            f"the optimizer is {type(optimizer).__name__}: a horizon is known for Adam and those like it, and for SGD; "
            "for another pass sensitivities(horizon=...) yourself"
        )
    noise = None if statistics is None else statistics.gradient_noise
    if noise is None:
        raise ProblemError(
            "the horizon of SGD needs the mean square of the gradient: pass statistics= of two batches or more"
        )
    elements = sum(p.numel() for g in optimizer.param_groups for p in g["params"] if p.requires_grad)
    return variance_weight(
        learning_rate=rate,
        steps=steps,
        momentum=float(group["momentum"]),
        mean_square_gradient=noise.mean_square_norm / elements,
    )


_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What is planned, on this rank. ``optimizer`` itself takes no step; None: AdamW. ``began`` is a clock's time."""

    model: nn.Module
    example: TrainingExample
    options: PlanningOptions
    optimizer: torch.optim.Optimizer | None = None
    began: float = field(default_factory=time.perf_counter)

    def check(self) -> None:
        """Refuse a model that has a plan applied, or that no rank can run by itself.

        Raises:
            NotReadyError: A plan is applied.
            UnsupportedError: A module is scripted, or parameters are sharded; the memory limit is not above 0.
            ProblemError: The memory limit is no quantity.
        """
        if self.options.memory is not None:
            wanted_bytes(self.options.memory)
        if interception_of(self.model) is not None:
            raise NotReadyError("a plan is applied to this model already: undo(model) before planning anew")
        for path, module in self.model.named_modules():
            check_not_scripted(path, module)
        if is_sharded(self.model):
            raise UnsupportedError(
                "the model is sharded, but each kind of device is measured by one of its workers alone: call auto_plan "
                "with the whole model, then fully_shard, then apply"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTypes:
    """Device types of the job: name to the ranks that have it, and this rank's."""

    ranks: Mapping[str, tuple[int, ...]]
    memory_bytes: Mapping[str, int]
    mine: str


def example_of(model: nn.Module, batch: Any, loss: Loss | None) -> TrainingExample:
    """An example from a batch as users pass it: a mapping, a tuple or list of arguments, or a single argument."""
    args, kwargs = call_arguments(batch)
    return TrainingExample(model=model, args=args, kwargs=kwargs, loss=loss)


def require_one_model(captured: CapturedModel) -> None:
    """Refuse ranks that hold different models, naming the first operators that differ."""
    prints = gather_json(captured.graph.fingerprint())
    if len(set(prints)) == 1:
        return
    names = gather_json([f"{operator.name} {operator.signature}" for operator in captured.graph])
    other = next(rank for rank, value in enumerate(prints) if value != prints[0])
    pairs = [(a, b) for a, b in zip(names[0], names[other], strict=False) if a != b]
    shown = "; ".join(f"{a!r} on rank 0, {b!r} on rank {other}" for a, b in pairs[:3])
    lengths = f"{len(names[0])} operators on rank 0, {len(names[other])} on rank {other}"
    raise ModelError(f"the ranks hold different models or batch shapes: {shown or lengths}; build the same on all")


def find_device_types(device: torch.device, options: PlanningOptions) -> DeviceTypes:
    """Group the ranks by device; ranks are of one type if hardware, threads and versions are equal.

    Args:
        device: This rank's.
        options: May give its name and memory.

    Returns:
        The types; the memory limit of each is the smallest of its ranks.

    Raises:
        UnsupportedError: The device has less memory than the requested limit.
    """
    rank, size = world()

    def describe() -> dict[str, Any]:
        identity = device_identity(device, options.device_type)
        return {"identity": encode(identity), "memory": memory_budget(device, options.memory)}

    devices = gather_json(together(describe))
    ranks: dict[str, list[int]] = {}
    seen: dict[str, Any] = {}
    for number, entry in enumerate(devices):
        identity = entry["identity"]
        base = name = identity["name"]
        suffix = 2
        while name in seen and seen[name] != identity:  # the same name for other hardware or threads
            name, suffix = f"{base} #{suffix}", suffix + 1
        seen[name] = identity
        ranks.setdefault(name, []).append(number)
    memory = {name: min(devices[number]["memory"] for number in members) for name, members in ranks.items()}
    mine = next(name for name, members in ranks.items() if rank in members)
    if rank == 0:
        _LOGGER.info("%d workers of %d device types: %s", size, len(ranks), ", ".join(ranks))
    return DeviceTypes(ranks={name: tuple(members) for name, members in ranks.items()}, memory_bytes=memory, mine=mine)


def measure_profiles(
    job: Job, captured: CapturedModel, types: DeviceTypes, optimizer: torch.optim.Optimizer | None
) -> dict[str, DeviceProfile]:
    """Profile of each type, measured by its first rank; all types at the same time."""
    rank, size = world()
    recorded = job.options.compiled or job.example.device.type == "cuda"
    steps = job.options.costs == "steps" or (job.options.costs == "auto" and recorded)
    group = _own_group() if size > 1 and any(gather_json(steps)) else None

    def measure() -> Any:
        if rank != types.ranks[types.mine][0]:
            return None
        if steps:
            return _by_steps(job, captured, optimizer, group).to_json()
        return _by_operator(job, captured, optimizer).to_json()

    try:
        profiles = gather_json(together(measure))
    finally:
        if group is not None:
            dist.destroy_process_group(group)
    return {
        name: DeviceProfile.from_json(profiles[ranks[0]], f"profile of {name!r}") for name, ranks in types.ranks.items()
    }


def _own_group() -> Any:
    """A process group of this rank alone; every rank must call it."""
    rank, size = world()
    groups = [dist.new_group([member]) for member in range(size)]
    return groups[rank]


def _by_operator(job: Job, captured: CapturedModel, optimizer: torch.optim.Optimizer | None) -> DeviceProfile:
    return profile(
        captured,
        job.example.device,
        precisions=job.options.precisions,
        options=job.options.kernels,
        optimizer=optimizer,
        example=job.example,
        cache_dir=cache_folder(job.options.cache_dir),
        progress=job.options.progress,
        seconds=job.options.profile_seconds,
        name=job.options.device_type,
    )


def _by_steps(job: Job, captured: CapturedModel, optimizer: torch.optim.Optimizer | None, group: Any) -> DeviceProfile:
    """From recorded steps, or operator by operator if none can be recorded, as the profile then says."""
    try:
        return profile_job_steps(job.example, captured.graph, optimizer, job.options, group=group)
    except (QSyncError, RuntimeError) as failure:
        reason = first_line(failure)
    _LOGGER.warning("operators are measured one by one, because no training steps were recorded: %s", reason)
    profile = _by_operator(job, captured, optimizer)
    text = f"operator by operator, because no training steps could be recorded: {reason}"
    return replace(profile, options={**profile.options, MEASURED_OPTION: text})


def measure_network(device: torch.device) -> Network:
    """Time all-reduces on the real process group."""
    _, size = world()
    if size == 1:
        return Network(latency_s=0.0, bandwidth_bytes_per_s=1e12, source="a single worker communicates with nobody")
    fit = together(lambda: measure_all_reduce(device=device))
    # The fit is of whole all-reduces; a ring sends 2 (N - 1) messages of 1 / N of the bytes each.
    messages = 2 * (size - 1)
    return Network(
        latency_s=fit.latency_s / messages,
        bandwidth_bytes_per_s=fit.bandwidth_bytes_per_s * messages / size,
        source=f"measured on {size} workers, relative residual {fit.relative_residual:.2f}",
    )


def job_cluster(types: DeviceTypes, profiles: Mapping[str, DeviceProfile], network: Network) -> Cluster:
    """The job's workers as a cluster of planned device types."""
    return Cluster(
        name="job",
        devices=tuple(
            DeviceType(
                name=name,
                count=len(ranks),
                memory_limit_bytes=types.memory_bytes[name],
                precisions=tuple(profiles[name].formats),
            )
            for name, ranks in types.ranks.items()
        ),
        network=network,
    )


def job_indicator(job: Job) -> IndicatorKind:
    """The indicator of a job: the requested one, else by the optimizer that will train it.

    Source:
        Ours; what the two are and how they compare: ``docs/background/indicator.md`` and ``quality.md``.
    """
    if job.options.indicator != "auto":
        return IndicatorKind(job.options.indicator)
    if not job.options.probes:
        return IndicatorKind.PROPAGATED
    # Without an optimizer the job is planned for AdamW, as its step is timed.
    adaptive = job.optimizer is None or divides_by_squares(job.optimizer)
    return IndicatorKind.PROGRESS if adaptive else IndicatorKind.PROBED


def noise_of(kernels: KernelOptions) -> NoiseOptions:
    """How kernels with these options round, for the indicator."""
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
    """Sensitivities for the formats of every type, from statistics of the rank with the most memory."""
    rank, _ = world()
    source = max(types.ranks, key=lambda name: (types.memory_bytes[name], -types.ranks[name][0]))
    collector = types.ranks[source][0]

    def collect() -> Any:
        if rank != collector:
            return None
        statistics, kind = _statistics(job, captured, batches)
        noise = noise_of(job.options.kernels)
        return {
            name: sensitivities(captured.graph, statistics, profile.formats, options=noise, kind=kind)
            .values_only()
            .to_json()
            for name, profile in profiles.items()
        }

    tables = broadcast_json(together(collect), collector)
    return {name: SensitivityValues.from_json(tables[name], f"sensitivities of {name!r}") for name in profiles}


def _statistics(
    job: Job, captured: CapturedModel, batches: Iterable[Any] | None
) -> tuple[ModelStatistics, IndicatorKind]:
    """The statistics that the job's indicator needs, and the indicator; by formula if the model cannot be probed."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        example = example_of(model, batch, job.example.loss)
        output = model(*example.args, **example.kwargs)
        return (job.example.loss or default_loss)(output)

    whole = [job.example.kwargs or job.example.args] if batches is None else list(batches)
    kind = job_indicator(job)

    def collect(kind: IndicatorKind, seen: list[Any]) -> ModelStatistics:
        wanted = {IndicatorKind.PROGRESS: "adaptive_probes", IndicatorKind.PROBED: "probes"}.get(kind)
        probes = {wanted: job.options.probes} if wanted else {}
        return collect_statistics(job.model, seen, step=step, graph=captured.graph, **probes)  # type: ignore[arg-type]

    # Statistics are of full precision, which need not fit where a plan does: then of a part of every batch.
    for parts in _PARTS:
        seen = whole if parts == 1 else [_part(job, batch, parts) for batch in whole]
        if None in seen:
            continue
        for each in dict.fromkeys((kind, IndicatorKind.PROPAGATED)):
            try:
                return collect(each, seen), each
            except torch.cuda.OutOfMemoryError as failure:
                reason = first_line(failure)
            except ModelError as failure:
                if each is IndicatorKind.PROPAGATED:
                    raise
                reason = first_line(failure)
            instead = "a smaller part" if each is IndicatorKind.PROPAGATED else "what is propagated by formula"
            _LOGGER.warning(
                "no statistics for the indicator %r of 1/%d of a batch, so those of %s are tried: %s",
                each.value,
                parts,
                instead,
                reason[:400],
            )
            # Outside of the handler: the exception's frames would keep all tensors of the probes.
            gc.collect()
            if job.example.device.type == "cuda":
                torch.cuda.empty_cache()
    raise ModelError(
        f"there is not enough memory for the statistics of one pass in full precision ({reason}): pass smaller batches "
        "(batches=), or leave more memory while planning"
    )


_PARTS = (1, 2, 4, 8)
"""Statistics are of whole batches or, where memory does not suffice, of 1/2, 1/4 or 1/8 of each."""


def _part(job: Job, batch: Any, parts: int) -> Any:
    """The first of so many equal parts of a batch; None where it has no samples to divide."""
    example = example_of(job.model, batch, job.example.loss)
    samples = batch_size(example)
    if samples is None or samples < parts:
        return None
    part = sized(example, samples // parts)
    return part.kwargs or part.args


def batch_size(example: TrainingExample) -> int | None:
    """Samples of a batch: the first dimension that all its tensors share; None if they do not share one."""
    leaves = tree_leaves((example.args, dict(example.kwargs)))
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return int(sizes.pop()) if len(sizes) == 1 else None


def sized(example: TrainingExample, count: int) -> TrainingExample:
    """The example with ``count`` samples, the first ones, repeated where there are too few."""

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] == count:
            return leaf
        chosen = leaf.detach()[torch.arange(count, device=leaf.device) % leaf.shape[0]]
        return chosen.requires_grad_(leaf.requires_grad)

    return replace(example, args=tree_map(rows, example.args), kwargs=tree_map(rows, dict(example.kwargs)))
