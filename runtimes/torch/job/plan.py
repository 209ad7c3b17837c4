"""What was measured and planned for a running job: `JobModel`, from which it is planned again, and `JobPlan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated

from qsync_opt.cluster import Cluster
from qsync_opt.costs import MEASURED_OPTION, DeviceProfile, estimated_by
from qsync_opt.errors import ProblemError
from qsync_opt.gradients import GradientCosts
from qsync_opt.gradients import Plan as CompressionPlan
from qsync_opt.io import Json, freeze
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.ddp import gather_json, split_samples
from qsync_opt.runtimes.torch.execution import ApplySettings
from qsync_opt.runtimes.torch.job.candidates import ExecutionMode, StepTime
from qsync_opt.runtimes.torch.job.chunking import without_logits
from qsync_opt.sensitivity import SensitivityValues
from qsync_opt.training import (
    Plan,
    Problem,
    SharesProblem,
    Solution,
    at_batch,
    build_problem,
    build_shares_problem,
    evaluate,
    uniform_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """Everything that was measured about a job; from it a problem is built without measuring again.

    ``sensitivities`` are by device type. ``cluster`` has the memory limits as they are now. ``modes`` have the times of
    the whole model's passes by device type, empty if none were taken, and ``steps`` those of whole training steps.
    ``loss_layers`` are output layers whose loss `apply` computes in chunks; profiles are measured with all logits.
    """

    graph: OpGraph
    profiles: Mapping[str, DeviceProfile]
    sensitivities: Mapping[str, SensitivityValues]
    cluster: Cluster
    modes: Mapping[str, tuple[ExecutionMode, ...]] = field(default_factory=dict)
    steps: tuple[StepTime, ...] = ()
    memory_excess_bytes: Mapping[str, int] = field(default_factory=dict)
    """By device type, how far the sum of memory over operators was above a measured peak; as in `build_problem`."""
    loss_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        freeze(self, "profiles", "sensitivities", "modes", "memory_excess_bytes")

    @property
    def limits_bytes(self) -> dict[str, int]:
        """Memory limit of every device type."""
        return {device.name: device.memory_limit_bytes for device in self.cluster.devices}

    @property
    def workers(self) -> dict[str, int]:
        """Number of workers of every device type."""
        return {device.name: device.count for device in self.cluster.devices}

    def problem(self, *, slack: float = 0.0) -> Problem:
        """The problem as things are now.

        Args:
            slack: As in `build_problem`.

        Raises:
            ProblemError: As in `build_problem`.
        """
        first = next(iter(self.sensitivities.values()))
        graph, profiles = self.graph, self.profiles
        for name in self.loss_layers:
            graph, profiles = without_logits(graph, profiles, name)
        return build_problem(
            graph,
            profiles,
            first,
            self.cluster,
            slack=slack,
            by_device=self.sensitivities,
            memory_excess_bytes=self.memory_excess_bytes,
        )

    def shares_problem(
        self,
        batch: int,
        global_batch: int | None = None,
        *,
        multiple_of: int = 1,
        slack: float = 0.0,
        time_limit_s: float | None = None,
    ) -> SharesProblem:
        """The problem of choosing local batches and precisions together, as things are now.

        Costs at other local batches than the measured one are estimates, see `qsync_opt.training.at_batch`.

        Args:
            batch: The local batch that was measured.
            global_batch: Samples of a step of all workers; None: as many as with equal batches.
            multiple_of: As in `build_shares_problem`.
            slack: As in `build_shares_problem`.
            time_limit_s: As in `build_shares_problem`.

        Raises:
            ProblemError: As in `build_problem` and `build_shares_problem`.
        """
        problem = self.problem(slack=slack)
        total = batch * sum(self.workers.values()) if global_batch is None else global_batch
        return build_shares_problem(
            {batch: problem, 2 * batch: at_batch(problem, batch, 2 * batch)},
            total,
            multiple_of=multiple_of,
            slack=slack,
            time_limit_s=time_limit_s,
        )

    def with_memory(self, limits_bytes: Mapping[str, int]) -> JobModel:
        """The same job with other memory limits for some device types.

        Raises:
            ProblemError: No such device type, or a limit below 1 byte.
        """
        for name in limits_bytes:
            self.cluster.device(name)
        devices = tuple(
            replace(device, memory_limit_bytes=limits_bytes.get(device.name, device.memory_limit_bytes))
            for device in self.cluster.devices
        )
        return replace(self, cluster=replace(self.cluster, devices=devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that needs no solver, to compare with: one precision everywhere.

    Iteration time in nanoseconds, total sensitivity, and whether it keeps the memory limits.
    """

    name: str
    iteration_ns: int
    sensitivity: float
    fits: bool


def alternatives(problem: Problem, *, fp32_share: float = 1.0) -> tuple[Alternative, ...]:
    """Every uniform plan of a problem, from the finest precision to the coarsest.

    Args:
        problem: Its costs are those of a model that a plan is applied to.
        fp32_share: Share of such an iteration in FP32 that remains where no plan is applied.

    Source:
        The baselines of QSync (IPDPS 2024).
    """
    available = {precision for device in problem.devices for table in device.operators.values() for precision in table}
    plans = []
    for precision in reversed([name for name in problem.formats if name in available]):
        evaluation = evaluate(problem, uniform_plan(problem, precision))
        plans.append(
            Alternative(
                name=precision,
                iteration_ns=round((fp32_share if precision == "FP32" else 1.0) * evaluation.iteration_ns),
                sensitivity=evaluation.objective,
                fits=all(d.memory_kib <= d.memory_limit_kib for d in evaluation.devices.values()),
            )
        )
    return tuple(plans)


_LOCAL = Json(stored=False)
"""Of the fields of a `JobPlan` that are this rank's own; all others are the same on every rank, and sent as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The plan of a job as one worker holds it; `apply` takes it as it is.

    ``device_type`` is this worker's. ``worthwhile`` is False if training in FP32 is as good; `apply` then leaves the
    model alone. ``reason`` says so in words, ``alternatives`` are what it was compared with. ``iteration_ns`` is
    predicted from the costs of operators; ``expected_ns`` from times of the whole model, None if they were not taken.
    ``memory_bytes`` bounds the peak of a worker of each type as the problem does; ``peak_bytes`` is the peak that is
    expected: of a measured pass in the chosen mode, with the optimizer's state and the all-reduce buckets, else the
    bound.
    ``taken`` names the execution mode of every device type where such times decided, ``autocast`` has the format of
    those that torch itself carries out, ``captured`` names those whose passes are replayed as CUDA graphs,
    ``compiled`` those whose model is compiled, ``regional`` those whose repeated blocks are then compiled once, and
    ``channels_last`` those whose convolutions have their weights channels last;
    ``shares`` the share of the global batch for one worker of each type. ``measured`` says per device type how its
    costs were measured, and what of them was not; ``sensitivity_unit`` is the unit of sensitivities. ``problem``,
    ``solution`` and ``model`` are on rank 0 only, None elsewhere. ``lifted_kinds`` and ``opaque_modules`` are the
    captured graph's.
    """

    plan: Annotated[Plan, Json(read=Plan.from_json, write=Plan.to_json)]
    device_type: Annotated[str, _LOCAL]
    iteration_ns: int
    memory_bytes: Mapping[str, int]
    sensitivity: float
    bound: Annotated[float | None, Json(read=lambda value, _: value)]
    worthwhile: bool
    reason: str
    alternatives: tuple[Alternative, ...]
    digest: str
    expected_ns: int | None = None
    peak_bytes: Annotated[Mapping[str, int], Json(omitted=True)] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)
    autocast: Mapping[str, str] = field(default_factory=dict)
    captured: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    regional: Annotated[tuple[str, ...], Json(omitted=True)] = ()
    channels_last: Annotated[tuple[str, ...], Json(omitted=True)] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, str] = field(default_factory=dict)
    problem: Annotated[Problem | None, _LOCAL] = None
    solution: Annotated[Solution | None, _LOCAL] = None
    model: Annotated[JobModel | None, _LOCAL] = None
    host_shares: Mapping[str, float] = field(default_factory=dict)
    """Per device type with a card, the share of a pass under the plan in which the host still launches."""
    sensitivity_unit: str = "squared gradient"
    lifted_kinds: tuple[str, ...] = ()
    opaque_modules: tuple[str, ...] = ()
    compression: Annotated[
        CompressionPlan | None,
        Json(
            omitted=True,
            read=lambda value, place: None if value is None else CompressionPlan.from_json(value, place),
            write=lambda plan: None if plan is None else plan.to_json(),
        ),
    ] = None
    """Schemes of the gradient buckets, where `auto_plan` was asked for them; it goes to `compress_gradients`."""
    compression_note: Annotated[str, Json(omitted=True, empty=True)] = ""
    gradient_costs: Annotated[GradientCosts | None, _LOCAL] = None
    """What compression was planned from, on rank 0; saved, it is what ``qsync-opt plan --compress`` reads."""
    stages_s: Annotated[Mapping[str, float], _LOCAL] = field(default_factory=dict)
    """Seconds that `auto_plan` took on this rank, by stage."""

    def __post_init__(self) -> None:
        if self.device_type not in self.plan.devices:
            raise ProblemError(
                f"the plan has no device type {self.device_type!r}: it has {', '.join(self.plan.devices)}"
            )
        freeze(self, "memory_bytes", "peak_bytes", "taken", "autocast", "shares", "measured", "host_shares", "stages_s")

    @property
    def devices(self) -> Mapping[str, Mapping[str, str]]:
        """This worker's device type, operator and precision: what `apply` carries out here."""
        return MappingProxyType({self.device_type: self.plan.devices[self.device_type]})

    def local_batches(self, global_batch: int) -> tuple[int, ...]:
        """Samples of every rank in a step of ``global_batch`` samples, by `shares`; every rank must call it.

        They add up exactly, and go to `qsync_opt.ShareSampler`.

        Raises:
            ProblemError: Fewer samples than ranks.
        """
        return split_samples(global_batch, gather_json(self.shares.get(self.device_type, 1.0)))

    def apply_settings(self) -> ApplySettings:
        """What `apply` does with this worker's part beside the precisions."""
        captured = self.device_type in self.captured
        # The memory of graphs is not allocated in steps, and batches by speed are not the one that was planned with.
        like_planned = not (captured or self.device_type in self.compiled) and len(set(self.shares.values())) <= 1
        return ApplySettings(
            worthwhile=self.worthwhile,
            autocast=self.autocast.get(self.device_type),
            captured=captured,
            compiled=self.device_type in self.compiled,
            regional=self.device_type in self.regional,
            channels_last=self.device_type in self.channels_last,
            lifted_kinds=self.lifted_kinds,
            opaque_modules=self.opaque_modules,
            expected_ns=self.expected_ns or self.iteration_ns,
            expected_bytes=(self.peak_bytes or self.memory_bytes).get(self.device_type) if like_planned else None,
        )

    def describe(self) -> str:
        """A few lines for people: what was decided and what it was compared with."""
        rows = [self.reason, *host_bound_words(self.host_shares)]
        for other in self.alternatives:
            fits = "" if other.fits else ", does not fit into memory"
            rows.append(
                f"  all {other.name}: {other.iteration_ns / 1e6:.2f} ms, sensitivity {other.sensitivity:.4g}{fits}"
            )
        rows.append(
            f"  plan: {self.iteration_ns / 1e6:.2f} ms, sensitivity {self.sensitivity:.4g} ({self.sensitivity_unit})"
        )
        rows += [f"  costs on {name}: {text}" for name, text in self.measured.items()]
        rows += [f"  {name}: {mode}" for name, mode in self.taken.items()]
        if self.expected_ns is not None:
            rows.append(f"  a step is expected to take {self.expected_ns / 1e6:.2f} ms")
        if self.compression_note:
            rows.append(f"  gradients: {self.compression_note}")
        if self.stages_s:
            stages = ", ".join(f"{name} {spent:.1f}" for name, spent in self.stages_s.items() if spent >= 0.05)
            rows.append(f"  planned in {sum(self.stages_s.values()):.1f} s{f': {stages}' if stages else ''}")
        return "\n".join(rows)


def how_measured(profile: DeviceProfile) -> str:
    """How the costs of a profile were measured, and what of them is an estimate, in words."""
    how = str(profile.options.get(MEASURED_OPTION, "operator by operator"))
    estimate = estimated_by(profile)
    return how if estimate is None else f"{how}; {estimate}"


HOST_BOUND = 0.9
"""Share of a pass that the host launches in, from which on a device waits for it."""


def host_bound_words(shares: Mapping[str, float]) -> list[str]:
    """A line for each device type that waits for its host, with what avoids that.

    Args:
        shares: Per device type, as `JobPlan` has them.
    """
    return [
        f"  {name} waits for its host, which launches operators for {share:.0%} of a pass: capture the passes after "
        "apply (qsync_opt.graphed(model, batch)), or let auto_plan time them captured and compiled "
        "(PlanningOptions(capture=True, compile=True))"
        for name, share in shares.items()
        if share >= HOST_BOUND
    ]


def verdict(
    iteration_ns: int, sensitivity: float, others: tuple[Alternative, ...], least_gain: float
) -> tuple[bool, str]:
    """Whether a plan is worth applying, by predictions, and why.

    FP32 is left alone if it fits and the plan is not faster by ``least_gain`` (a share of FP32's iteration time):
    predictions are no better than a few percent, and a plan that runs nothing differently costs its interception.

    Source:
        Ours.
    """
    full = next((other for other in others if other.name == "FP32"), None)
    if full is None:
        return True, "a plan was found; FP32 is not possible on every device"
    if not full.fits:
        return True, "a plan was found; training in FP32 would not fit into memory"
    gain = 1 - iteration_ns / max(1, full.iteration_ns)  # times of a device that is said to be endlessly fast are 0
    if gain >= least_gain:
        return True, f"the plan is predicted to be {gain:.1%} faster per iteration than FP32"
    return False, (
        f"no plan is predicted to be faster than FP32 by {least_gain:.0%} (the best by {max(gain, 0.0):.1%}, at a "
        f"sensitivity of {sensitivity:.3g}): the model is left alone"
    )
