"""Plan a training job from inside its own script: every device type profiles itself, rank 0 solves, all ranks agree.

The stages are kernels (on a card), capture, profile, network, sensitivities, plan, trial, passes, steps and host; each
ends with all ranks knowing whether any of them failed. Nothing of the model is changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import qsync_opt
from qsync_opt.costs import FP32_SHARE_OPTION
from qsync_opt.errors import ModelError, NotReadyError, ProblemError, SolverError, UnsupportedError, first_line
from qsync_opt.io import decode, encode
from qsync_opt.kernels.compilation import library
from qsync_opt.runtimes.torch.capture import CapturedModel, capture_model
from qsync_opt.runtimes.torch.ddp import broadcast_json, digest, gather_json, require_agreement, together, world
from qsync_opt.runtimes.torch.execution import AUTOCAST_TYPES, FORM_OPTIONS, loss_layers
from qsync_opt.runtimes.torch.job.benchmark import measure_steps
from qsync_opt.runtimes.torch.job.candidates import COMPILED, FORMS, PLANNED, Candidate, labels
from qsync_opt.runtimes.torch.job.choosing import decide, shares
from qsync_opt.runtimes.torch.job.compressing import with_compression
from qsync_opt.runtimes.torch.job.file import job_facts, keep_job, load_job, steering, with_workers
from qsync_opt.runtimes.torch.job.measuring import (
    DeviceTypes,
    Job,
    example_of,
    find_device_types,
    job_cluster,
    measure_network,
    measure_profiles,
    measure_sensitivities,
    require_one_model,
)
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.passes import builds_of, has_form, measure_passes, with_host_shares
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan, alternatives, how_measured
from qsync_opt.runtimes.torch.profiling import try_plan
from qsync_opt.runtimes.torch.steps import compiled_inside
from qsync_opt.runtimes.torch.support import (
    Loss,
    bare_model,
    check_batches,
    default_loss,
    model_loss,
    model_unchanged,
    single,
)
from qsync_opt.training import Evaluation, Plan, Problem, Solution, evaluate, solve, uniform_plan

_LOGGER = logging.getLogger(__name__)
_ROOMY_BYTES = 2**50
_TIGHTENED, _TRIALS = 0.9, 6
"""Share of a memory limit that is planned with after a trial ran out of memory, and trials at most."""


def auto_plan(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    batches: Iterable[Any] | None = None,
    options: PlanningOptions | None = None,
    compress: bool = False,
) -> JobPlan:
    """Plan the precisions of a training job; every rank of the default process group must call it.

    Without a process group the job is this process alone. The result goes to `apply`, before or after the model is
    wrapped in ``DistributedDataParallel``.

    Args:
        model: In FP32, on the device that it will train on, before anything was applied to it.
        batch: One batch as in training: keyword arguments as a mapping, positional ones as a tuple or list, or the
            single argument. All ranks pass the same shapes.
        loss: Function of the model's output that returns the loss; None: the model returns it (as its output, as
            ``loss`` in it, or as the first of a tuple). If it does not, the sum of its outputs stands in for the loss.
        optimizer: The one or several that will be used; their steps are timed on copies, and they decide on the
            indicator. None: AdamW.
        batches: For the statistics; None: ``batch`` alone. Two or more also tell how noisy the gradient is anyway.
        options: Everything else.
        compress: Choose a compression for every gradient bucket too, given the precisions: the plan's ``compression``,
            which goes to `compress_gradients`. The ranks' batches must then differ, as in training.

    Returns:
        The plan, equal on all ranks but for ``device_type``.

    Raises:
        ModelError: The model cannot be captured, cannot be trained, differs between ranks, or is not in FP32.
        UnsupportedError: The device lacks a precision or has less memory than the limit; the optimizer cannot be
            copied, or its step needs an argument.
        ProblemError: No plan fits into the memory of some device type.
        NotReadyError: A plan is applied already; or another rank failed, and the text repeats its error.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> plan = auto_plan(model, torch.zeros(4, 8), options=PlanningOptions(precisions=("FP32",)))
        >>> plan.worthwhile
        False

    Source:
        The steps are QSync's (IPDPS 2024); ranks there are planned offline from files.
    """
    with measuring(bare_model(model)) as bare:
        return _auto_plan(bare, batch, loss, optimizer, batches, options or PlanningOptions(), compress)


def _auto_plan(
    bare: nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    batches: Iterable[Any] | None,
    options: PlanningOptions,
    compress: bool,
) -> JobPlan:
    stages = Stages()
    if batches is not None:
        together(lambda: check_batches(batches))
    job = together(lambda: Job(bare, example_of(bare, batch, loss), options, single(optimizer)))
    together(job.check)
    if not any(gather_json(job.example.device.type == "cuda")):
        job = replace(job, options=replace(job.options, capture=False, compile=False))
    require_agreement(
        "the version of qsync_opt or torch",
        {"qsync_opt": qsync_opt.__version__, "torch": torch.__version__},
        "install the same versions everywhere",
    )
    require_agreement("compress of auto_plan", compress, "give the same on all ranks")
    for name, value in steering(job.options).items():
        require_agreement(f"the option {name} of auto_plan", value, "give the same PlanningOptions on all ranks")
    plan = _plan_from_file(job, stages)
    if plan is None:
        job = _with_kernels(job, stages)
        with stages("capture"):
            captured = together(lambda: capture_model(bare, job.example.args, job.example.kwargs))
            require_one_model(captured)
            others = together(lambda: check_training(job))
        with gradients_put_back(others):
            plan = _plan_from_measurements(job, captured, batches, stages)
    if compress:
        with stages("compression"), gradients_put_back(together(lambda: check_training(job))):
            plan = with_compression(job, plan)
    return replace(plan, stages_s=stages.seconds)


_EIGHT_BIT_UNITS = ("quantize", "matmul", "convolution")


def _with_kernels(job: Job, stages: Stages) -> Job:
    """The job, on a card after its 8-bit kernels were built; that happens once and does not count as planning."""
    wanted = job.options.precisions is None or not {"INT8", "FP8"}.isdisjoint(job.options.precisions)
    if not any(gather_json(wanted and job.example.device.type == "cuda")):
        return job

    def build() -> None:
        if job.example.device.type == "cuda":
            built = library.build_missing(_EIGHT_BIT_UNITS)
            if built:
                _LOGGER.info("kernels were built for %s, as on every first use", ", ".join(built))

    with stages("kernels"):
        together(build)
    return replace(job, began=time.perf_counter())


def _plan_from_measurements(
    job: Job, captured: CapturedModel, batches: Iterable[Any] | None, stages: Stages
) -> JobPlan:
    """The plan of a job of which nothing is known yet."""
    types = find_device_types(job.example.device, job.options)
    with stages("profile"):
        profiles = measure_profiles(job, captured, types, job.optimizer)
    with stages("network"):
        network = measure_network(job.example.device)
    with stages("sensitivities"):
        tables = measure_sensitivities(job, captured, types, profiles, batches)
    measured = JobModel(
        graph=captured.graph,
        profiles=profiles,
        sensitivities=tables,
        cluster=job_cluster(types, profiles, network),
        loss_layers=loss_layers(job.model),
    )
    measured, plan, is_open = _plan_with_trials(job, measured, types, stages)
    plan = _compare(job, measured, types, plan, stages)
    if is_open:
        together(lambda: _require_timed(plan))
    if not job.options.compiled:  # there the host launches far less
        with stages("host"):
            plan = with_host_shares(job, plan, captured.graph, types)
    keep_job(job, plan, types)
    return plan


def _plan_from_file(job: Job, stages: Stages) -> JobPlan | None:
    """The plan from what an earlier start measured, None if there is no such file or it is of another job."""
    path = job.options.job_file
    rank, _ = world()
    if not broadcast_json(path is not None and os.path.exists(path)) or path is None:
        return None
    types = find_device_types(job.example.device, job.options)
    require_agreement("the model or the batch", job_facts(job), "build the same on all ranks")

    def read() -> tuple[JobModel | None, str]:
        if rank:
            return None, ""
        measured, facts = load_job(path)
        different = [name for name, fact in job_facts(job).items() if facts.get(name) != fact]
        different += [f"device type {name!r}" for name in types.ranks if name not in measured.profiles]
        if different:
            return None, f"{os.fspath(path)!r} is of a job with other {', '.join(different)}: measuring anew"
        # What the trials of the earlier start took off its memory is taken off now too.
        usable = {name: limit / facts["memory_bytes"][name] for name, limit in measured.limits_bytes.items()}
        measured = with_workers(measured, {name: len(ranks) for name, ranks in types.ranks.items()})
        limits = {name: int(total * min(1.0, usable[name])) for name, total in types.memory_bytes.items()}
        return measured.with_memory(limits), ""

    measured, reason = together(read)
    if reason:
        _LOGGER.warning("%s", reason)
    if not broadcast_json(measured is not None):
        return None
    with stages("plan"):
        plan = shared_plan(measured, types.mine, job.options)
    if broadcast_json(measured is not None and _is_compared(job, measured)):
        return plan
    with gradients_put_back(together(lambda: check_training(job))):
        plan = _compare(job, measured, types, plan, stages)
    keep_job(job, plan, types)
    return plan


def _is_compared(job: Job, measured: JobModel) -> bool:
    if not measured.modes or not all(has_form(measured.modes, form) for form in FORMS if job.options.allows(form)):
        return not job.options.compare
    # Where the earlier start trained with equal batches, on as many workers, sized ones are tried now.
    unsized = bool(measured.steps) and not any(step.batches for step in measured.steps)
    return not (unsized and job.options.sizes_batches and _takes_steps(job))


def _takes_steps(job: Job) -> bool:
    return job.options.compare is True and not job.options.compiled


def _plan_with_trials(
    job: Job, measured: JobModel, types: DeviceTypes, stages: Stages
) -> tuple[JobModel, JobPlan, bool]:
    """Solve, try the plan, and solve again with less memory wherever the trial ran out of it.

    Returns:
        The job with what trials said of its memory, the plan, and whether it is still open that any passes fit:
        launched ones do not, but compiled ones, which keep less for the backward pass, may.
    """
    is_open = False
    needed_bytes: dict[str, int] = {}
    """Of a plan that fits by measurement, which no tighter limit is to forbid."""
    for attempt in range(_TRIALS):
        try:
            with stages("plan"):
                plan = shared_plan(measured, types.mine, job.options)
        except (ProblemError, NotReadyError):  # rank 0 found no plan, and the others hear of it
            with stages("trial"):
                first = job.options.trial and not attempt
                excess_bytes, needed_bytes = _memory_excess(job, measured, types) if first else ({}, {})
                if first and not excess_bytes and job.options.compare and job.options.allows(COMPILED):
                    excess_bytes, needed_bytes = _memory_excess(job, measured, types, compiled=True)
                    is_open = bool(excess_bytes)
            if not excess_bytes:
                raise
            measured = replace(measured, memory_excess_bytes=excess_bytes)
            continue
        if is_open:
            return measured, plan, True
        with stages("trial"):
            short = _short_of_memory(job, measured, types, plan) if job.options.trial and plan.worthwhile else []
        if not short:
            return measured, plan, False
        limits = {name: max(int(_TIGHTENED * measured.limits_bytes[name]), needed_bytes.get(name, 0)) for name in short}
        _LOGGER.warning(
            "trial %d: the plan needs more memory than predicted on %s; planning with %s",
            attempt + 1,
            ", ".join(short),
            ", ".join(f"{limit / 2**20:.0f} MiB on {name}" for name, limit in sorted(limits.items())),
        )
        measured = measured.with_memory(limits)
    raise ProblemError(
        f"after {_TRIALS} plans, each with less memory than the one before, the device type "
        f"{', '.join(sorted(short))} still runs out of it: use a smaller batch there"
    )


def _require_timed(plan: JobPlan) -> None:
    """Refuse a plan of which nothing was timed that keeps the memory limit.

    Raises:
        ProblemError: There are no such passes.
    """
    if not plan.taken:
        raise ProblemError(
            "there is no plan for this job: no launched one keeps the memory limit; compiled passes may, and none were "
            "timed that do: give more planning_seconds, or use a smaller batch"
        )


def _memory_excess(
    job: Job, measured: JobModel, types: DeviceTypes, *, compiled: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """By device type, how far the sum of memory over operators is above a measured peak, and what is needed then.

    That of the most frugal uniform plan; compiled, of autocast, which is compiled in a fraction of the time. Empty
    where that does not fit either, all ranks having tried.
    """

    def uniform() -> tuple[Plan, dict[str, int]] | None:
        if world()[0]:
            return None
        problem = measured.with_memory(dict.fromkeys(measured.workers, _ROOMY_BYTES)).problem()
        carried = [precision for precision in AUTOCAST_TYPES if precision in problem.formats]
        if compiled and not carried:
            return None
        devices: dict[str, Mapping[str, str]] = {}
        sums_bytes: dict[str, int] = {}
        for precision in carried[:1] if compiled else problem.formats:
            plan = uniform_plan(problem, precision)
            for name, num_bytes in evaluate(problem, plan).memory_bytes.items():
                if num_bytes < sums_bytes.get(name, _ROOMY_BYTES):
                    devices[name], sums_bytes[name] = plan.devices[name], num_bytes
        return Plan(problem=problem.name, devices=devices), sums_bytes

    proposed = together(uniform)
    sent = broadcast_json(None if proposed is None else [dict(proposed[0].devices[name]) for name in types.ranks])
    if sent is None:
        return {}, {}
    mine = sent[[*types.ranks].index(types.mine)]
    kept_bytes = _kept_bytes(job, measured)
    room_bytes = measured.limits_bytes[types.mine] - kept_bytes[types.mine]

    def try_it() -> int | None:
        if compiled:
            return _compiled_autocast_bytes(job, mine, measured, room_bytes)
        return _peak_bytes(job, mine, measured)

    peaks_bytes = gather_json(together(try_it))
    excess_bytes: dict[str, int] = {}
    needed_bytes: dict[str, int] = {}
    if proposed is not None:
        for name, ranks in types.ranks.items():
            own = [peaks_bytes[rank] for rank in ranks]
            if None not in own:
                excess_bytes[name] = max(0, proposed[1][name] - max(own) - kept_bytes[name])
                needed_bytes[name] = proposed[1][name] - excess_bytes[name]
        if not all(needed_bytes.get(name, limit + 1) <= limit for name, limit in measured.limits_bytes.items()):
            excess_bytes = needed_bytes = {}
    excess_bytes, needed_bytes = broadcast_json([excess_bytes, needed_bytes])
    return excess_bytes, needed_bytes


def _kept_bytes(job: Job, measured: JobModel) -> dict[str, int]:
    """What a trial leaves out by device type: the optimizer's state, and the buckets of DistributedDataParallel."""
    _, size = world()
    parameters = sum(p.numel() * p.element_size() for p in job.model.parameters() if p.requires_grad)
    buckets = parameters if size > 1 else 0
    return {name: profile.optimizer.state_bytes + buckets for name, profile in measured.profiles.items()}


def _peak_bytes(job: Job, plan: Mapping[str, str] | JobPlan, measured: JobModel) -> int | None:
    """Peak of a trial, as `try_plan` counts it."""
    with compiled_inside(job.model) if job.options.compiled else contextlib.nullcontext():
        return try_plan(job.example, plan, measured.graph, job.options.kernels)


def _compiled_autocast_bytes(
    job: Job, precisions: Mapping[str, str], measured: JobModel, room_bytes: int
) -> int | None:
    """The peak of autocast compiled by blocks or as a whole: of the first that has room, or else the lower.

    None if memory ran out or neither compiles.
    """
    carrier = next(precision for precision in AUTOCAST_TYPES if precision in precisions.values())
    peaks_bytes: list[int] = []
    for regional in builds_of(job.model):
        how = {"autocast": carrier, "compiled": True, "regional": regional}
        try:
            peak_bytes = try_plan(job.example, precisions, measured.graph, job.options.kernels, **how)
        except UnsupportedError as failure:
            _LOGGER.warning("compiled passes were not tried: %s", first_line(failure))
            continue
        finally:
            torch.compiler.reset()
        if peak_bytes is not None:
            peaks_bytes.append(peak_bytes)
            if peak_bytes <= room_bytes:
                break
    return min(peaks_bytes, default=None)


def _short_of_memory(job: Job, measured: JobModel, types: DeviceTypes, plan: JobPlan) -> list[str]:
    """Device types on which one iteration under the plan needs more than their limit, all ranks having tried.

    A plan that the model refuses is none's: where passes of others are compared with it, it is left out there.
    """

    def peak_bytes() -> int | None:
        try:
            return _peak_bytes(job, plan, measured)
        except UnsupportedError as failure:
            if not job.options.compare or job.options.compiled:
                raise
            _LOGGER.warning("%s", first_line(failure))
            return 0

    peaks_bytes = gather_json(together(peak_bytes))
    kept_bytes = _kept_bytes(job, measured)
    short = []
    for name, ranks in types.ranks.items():
        limit = types.memory_bytes[name] - kept_bytes[name]
        if any(peaks_bytes[rank] is None or peaks_bytes[rank] > limit for rank in ranks):
            short.append(name)
    return short


def _compare(job: Job, measured: JobModel | None, types: DeviceTypes, plan: JobPlan, stages: Stages) -> JobPlan:
    several = measured is not None and any(set(device.precisions) - {"FP32"} for device in measured.cluster.devices)
    if not broadcast_json(bool(job.options.compare) and several):
        return plan
    with stages("passes"):
        measured = measure_passes(job, measured, plan, types)
    if _takes_steps(job):
        with stages("steps"):
            measured = measure_steps(job, measured, plan, types)
    with stages("plan"):
        return shared_plan(measured, types.mine, job.options, solved=plan)


def shared_plan(
    measured: JobModel | None,
    device_type: str,
    options: PlanningOptions,
    present: JobPlan | None = None,
    *,
    solved: JobPlan | None = None,
) -> JobPlan:
    """The plan, made on rank 0 and checked to be the same everywhere; every rank must call it.

    Args:
        measured: The job, on rank 0; the others' is not used.
        device_type: This rank's.
        options: As in `plan_job`, on rank 0.
        present: As in `plan_job`, on rank 0.
        solved: A plan for the same memory limits, whose solution is used again; None: the problem is solved.

    Raises:
        ProblemError: No plan keeps the memory limits, on rank 0.
        NotReadyError: On the others then.
        SolverError: Ranks received different plans.
    """
    rank, _ = world()

    def work() -> JobPlan | None:
        if rank or measured is None:
            return None
        if solved is None or solved.problem is None or solved.solution is None:
            return plan_job(measured, device_type, options, present)
        return _job_plan(measured, solved.problem, solved.solution, device_type, options, present)

    local = together(work)
    sent = broadcast_json(None if local is None else encode(local))
    received = decode(JobPlan, sent, "the plan of rank 0", device_type=device_type)
    forms = {form: getattr(received, form) for form in FORM_OPTIONS}
    if _digest(received.plan, received.autocast, forms) != received.digest:
        raise SolverError("the plan that arrived is not the one that was sent: its digest differs")
    require_agreement("the plan", received.digest, "report this: it is a fault of this package")
    return received if local is None else local


def _digest(plan: Plan, autocast: Mapping[str, str], forms: Mapping[str, Sequence[str]]) -> str:
    parts: list[Mapping[str, Any]] = [autocast, *({form: [*names]} for form, names in forms.items() if names)]
    how = [dict(part) for part in parts if part]
    return digest([plan.to_json(), *how] if how else plan.to_json())


def plan_job(
    measured: JobModel, device_type: str, options: PlanningOptions | None = None, present: JobPlan | None = None
) -> JobPlan:
    """Solve a job that was measured before; takes no measurement and no other rank.

    Args:
        measured: The job, with the memory limits as they are now.
        device_type: This worker's.
        options: Method, slack, least gain and local batches; the rest is not used.
        present: What the job runs under now, which stays where it fits and nothing is clearly better; None: nothing.

    Raises:
        ProblemError: No plan keeps the memory limits; the text names those that clash.
        SolverError: No plan was found in time.
    """
    options = options or PlanningOptions()
    problem = measured.problem(slack=options.slack)
    solution = solve(problem, options.method, solver=options.solver)
    if solution.plan is None:
        raise ProblemError(f"there is no plan for this job: {solution.reason}")
    return _job_plan(measured, problem, solution, device_type, options, present)


def _job_plan(
    measured: JobModel,
    problem: Problem,
    solution: Solution,
    device_type: str,
    options: PlanningOptions,
    present: JobPlan | None,
) -> JobPlan:
    """The plan that solver and measured times lead to."""
    assert solution.plan is not None
    # The slowest worker sets the pace: of several shares the largest is safe.
    fp32_share = max(float(profile.options.get(FP32_SHARE_OPTION, 1.0)) for profile in measured.profiles.values())
    others = alternatives(problem, fp32_share=fp32_share)
    decision = decide(measured, problem, solution, others, options, present)
    plan, modes = solution.plan, decision.candidate or {}
    if any(mode.name != PLANNED for mode in modes.values()):
        plan = Plan(problem=plan.problem, devices={name: mode.precisions for name, mode in modes.items()})
    evaluation = evaluate(problem, plan)
    autocast = {name: mode.carrier for name, mode in modes.items() if mode.carrier is not None and not mode.is_plain}
    forms = {form: tuple(name for name, mode in modes.items() if getattr(mode, form)) for form in FORM_OPTIONS}
    return JobPlan(
        plan=plan,
        device_type=device_type,
        iteration_ns=evaluation.iteration_ns,
        memory_bytes=evaluation.memory_bytes,
        sensitivity=evaluation.objective,
        bound=solution.bound,
        worthwhile=decision.worthwhile,
        reason=decision.reason,
        alternatives=others,
        digest=_digest(plan, autocast, forms),
        expected_ns=decision.expected_ns,
        peak_bytes=_peaks_bytes(evaluation, modes),
        taken=labels(modes),
        autocast=autocast,
        captured=forms["captured"],
        compiled=forms["compiled"],
        regional=forms["regional"],
        channels_last=forms["channels_last"],
        shares=shares(measured, decision.candidate if options.sizes_batches else None),
        measured={name: how_measured(profile) for name, profile in measured.profiles.items()},
        sensitivity_unit=next(iter(measured.sensitivities.values())).unit,
        lifted_kinds=measured.graph.lifted_kinds(),
        opaque_modules=measured.graph.opaque_modules(),
        problem=problem,
        solution=solution,
        model=measured,
    )


def _peaks_bytes(evaluation: Evaluation, modes: Candidate) -> dict[str, int]:
    """Expected peak of a worker of every type: that of the measured mode, else the problem's bound."""
    measured = {name: mode.needed_bytes for name, mode in modes.items() if mode.needed_bytes}
    return {**evaluation.memory_bytes, **measured}


class Stages:
    """Seconds by stage on this rank; stages end together on all ranks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's time to a stage."""
        began = time.perf_counter()
        _LOGGER.info("%s begins", name)
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            _LOGGER.info("%s took %.1f s", name, spent)


def check_training(job: Job) -> list[Tensor]:
    """Run the forward pass once; the log says where a loss is guessed.

    Args:
        job: Whose model, batch and loss are tried; the model is left as it was.

    Returns:
        What gets a gradient besides the model's parameters, such as parameters of the loss.

    Raises:
        ModelError: The loss is not one number, or no gradient flows from it.
    """
    example = job.example
    with model_unchanged(job.model):
        try:
            output = example.model(*example.args, **example.kwargs)
            loss = (example.loss or default_loss)(output)
        except torch.cuda.OutOfMemoryError:  # FP32 need not fit
            return []
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ModelError(f"the loss is {kind}, but one number is needed: let the loss function end with .mean()")
        if loss.grad_fn is None:
            raise ModelError(
                "no gradient flows from the loss: either every parameter is frozen (requires_grad=False), or the model "
                "or the loss detaches its result; there is nothing to train"
            )
        if example.loss is None and model_loss(output) is None:
            _LOGGER.warning(
                "the model returns no loss and none was given: the sum of its outputs stands in for it, which says "
                "little about what rounding costs; pass loss=, a function of the model's output"
            )
        own = {id(parameter) for parameter in job.model.parameters()}
        return [leaf for leaf in _leaves(loss) if id(leaf) not in own]


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[nn.Module]:
    """Enable gradients, whatever mode the script is in, and put its random state back.

    What measuring draws differs between ranks and between starts; what the script draws next must not.
    """
    cards = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(cards)), torch.inference_mode(False), torch.enable_grad():
        yield model


@contextlib.contextmanager
def gradients_put_back(tensors: list[Tensor]) -> Iterator[None]:
    """Leave the gradients of some tensors as they were, whatever passes run within the block."""
    gradients = [tensor.grad for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.grad = None
        yield
    finally:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient


def _leaves(loss: Tensor) -> list[Tensor]:
    leaves, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        waiting += [before for before, _ in node.next_functions]
    return leaves
