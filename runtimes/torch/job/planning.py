"""Plan a training job from inside its own script: every device type profiles itself, rank 0 solves, all ranks agree.

The stages, each of which ends with all ranks knowing whether any of them failed: capture, profile, network, statistics,
problem and plan, trial. Nothing of the model is changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from qsync_opt.errors import ModelError, ProblemError, SolverError
from qsync_opt.runtimes.torch.capture import CapturedModel, capture_model
from qsync_opt.runtimes.torch.ddp import broadcast_json, digest, gather_json, require_agreement, together, world
from qsync_opt.runtimes.torch.job.choosing import decide
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
from qsync_opt.runtimes.torch.job.plan import Alternative, JobModel, JobPlan, alternatives, how_measured
from qsync_opt.runtimes.torch.job.racing import measure_steps
from qsync_opt.runtimes.torch.job.timing import has_captured, measure_ways, with_host_shares
from qsync_opt.runtimes.torch.profiling import Trial, try_plan
from qsync_opt.runtimes.torch.steps import compiled_inside
from qsync_opt.runtimes.torch.support import Loss, bare_model, default_loss, model_unchanged, own_loss, single
from qsync_opt.training import Plan, plan_from_json, solve

_LOGGER = logging.getLogger(__name__)


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
    """Run the forward pass once; a loss that is guessed is told to the log.

    Args:
        job: Whose model, batch and loss are tried. Nothing of it changes.

    Returns:
        What gets a gradient besides the model's parameters: of a loss that has parameters of its own, say.

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
        if example.loss is None and own_loss(output) is None:
            _LOGGER.warning(
                "the model returns no loss and none was given: the sum of its outputs stands in for it, which says "
                "little about what rounding costs; pass loss=, a function of the model's output"
            )
        own = {id(parameter) for parameter in job.model.parameters()}
        return [leaf for leaf in _leaves(loss) if id(leaf) not in own]


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[nn.Module]:
    """Compute gradients, in whatever mode the script is, and leave its random state as it was.

    What is drawn to measure differs between ranks, and between starts; what the script draws next must not.
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
    """Tensors that a backward pass would give gradients to."""
    found, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found.append(leaf)
        waiting += [before for before, _ in node.next_functions]
    return found


_TIGHTENED = 0.9
_TRIALS = 6


def auto_plan(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    batches: Iterable[Any] | None = None,
    options: PlanningOptions | None = None,
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
        optimizer: The one that will be used, or a list of several, whose steps are timed on copies, and which decide on
            the indicator. None: AdamW.
        batches: For the statistics; None: ``batch`` alone. Two or more also tell how noisy the gradient is anyway.
        options: Everything else.

    Returns:
        The plan, equal on all ranks but for ``device_type``.

    Raises:
        ModelError: The model cannot be captured, cannot be trained, differs between ranks, or is not in FP32.
        UnsupportedError: Ranks run different versions; the device lacks a precision; the memory limit cannot be; the
            optimizer cannot be copied, or its step needs an argument.
        ProblemError: No plan fits into the memory of some device type.
        NotReadyError: A plan is applied already; or another rank failed, with what it said.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> plan = auto_plan(model, torch.zeros(4, 8), options=PlanningOptions(precisions=("FP32",)))
        >>> plan.worthwhile
        False

    Source:
        The steps are QSync's (IPDPS 2024); ranks there are planned offline from files.
    """
    with measuring(bare_model(model)) as bare:
        return _auto_plan(bare, batch, loss, optimizer, batches, options or PlanningOptions())


def _auto_plan(
    bare: nn.Module,
    batch: Any,
    loss: Loss | None,
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    batches: Iterable[Any] | None,
    options: PlanningOptions,
) -> JobPlan:
    stages = Stages()
    job = together(lambda: Job(bare, example_of(bare, batch, loss), options, single(given)))
    together(job.check)
    require_agreement(
        "the version of qsync_opt or torch",
        {"qsync_opt": qsync_opt.__version__, "torch": torch.__version__},
        "install the same versions everywhere",
    )
    for name, value in steering(options).items():
        require_agreement(f"the option {name} of auto_plan", value, "give the same PlanningOptions on all ranks")
    found = _from_file(job, stages)
    if found is not None:
        return replace(found, stages_s=stages.seconds)
    with stages("capture"):
        captured = together(lambda: capture_model(bare, job.example.args, job.example.kwargs))
        require_one_model(captured)
        others = together(lambda: check_training(job))
    with gradients_put_back(others):
        return _measured(job, captured, batches, stages)


def _measured(job: Job, captured: CapturedModel, batches: Iterable[Any] | None, stages: Stages) -> JobPlan:
    """The plan of a job of which nothing is known yet."""
    types = find_device_types(job.example.device, job.options)
    with stages("profile"):
        profiles = measure_profiles(job, captured, types, job.optimizer)
    with stages("network"):
        network = measure_network(job.example.device)
    with stages("sensitivities"):
        tables = measure_sensitivities(job, captured, types, profiles, batches)
    made = JobModel(
        graph=captured.graph,
        profiles=profiles,
        sensitivities=tables,
        cluster=job_cluster(types, profiles, network),
    )
    plan = _planned(job, made, types, stages)
    if not job.options.compiled:  # there the host launches far less
        with stages("host"):
            plan = with_host_shares(job, plan, made.graph, types)
    keep_job(job, plan, types)
    return replace(plan, stages_s=stages.seconds)


def _from_file(job: Job, stages: Stages) -> JobPlan | None:
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
        made, facts = load_job(path)
        different = [name for name, fact in job_facts(job).items() if facts.get(name) != fact]
        different += [f"device type {name!r}" for name in types.ranks if name not in made.profiles]
        if different:
            return None, f"{os.fspath(path)!r} is of a job with other {', '.join(different)}: measuring anew"
        # What the trials of the earlier start took off its memory is taken off now too.
        usable = {d.name: d.memory_limit_bytes / facts["memory_bytes"][d.name] for d in made.cluster.devices}
        made = with_workers(made, {name: len(ranks) for name, ranks in types.ranks.items()})
        return made.with_memory({name: int(b * min(1.0, usable[name])) for name, b in types.memory_bytes.items()}), ""

    made, reason = together(read)
    if reason:
        _LOGGER.warning("%s", reason)
    if not broadcast_json(made is not None):
        return None
    with stages("plan"):
        found = shared_plan(made, types.mine, job.options)
    if broadcast_json(made is not None and bool(made.ways) and (not job.options.capture or has_captured(made.ways))):
        # Where the earlier start trained with equal batches, on as many workers, sized ones are tried now.
        unsized = made is not None and bool(made.steps) and not any(step.batches for step in made.steps)
        if not broadcast_json(unsized and job.options.sizes_batches and _takes_steps(job)):
            return found
        with gradients_put_back(together(lambda: check_training(job))):
            found = _trained(job, *_timed(job, made, found, types, stages), types, stages)
    elif broadcast_json(bool(job.options.compare)):
        with gradients_put_back(together(lambda: check_training(job))):
            found = _compared(job, made, types, found, stages)
    keep_job(job, found, types)
    return found


def _takes_steps(job: Job) -> bool:
    """Whether whole steps are to be timed, which is done as the model stands and not as a compiled job trains."""
    return job.options.compare is True and not job.options.compiled


def _planned(job: Job, made: JobModel, types: DeviceTypes, stages: Stages) -> JobPlan:
    """Solve, try, and solve again with less memory wherever the trial ran out of it."""
    for attempt in range(_TRIALS):
        with stages("plan"):
            found = shared_plan(made, types.mine, job.options)
        with stages("trial"):
            short = _short_of_memory(job, made, types, found) if job.options.trial and found.worthwhile else []
        if not short:
            return _compared(job, made, types, found, stages)
        limits = {name: int(_TIGHTENED * made.cluster.device(name).memory_limit_bytes) for name in short}
        _LOGGER.warning(
            "trial %d: the plan needs more memory than predicted on %s; planning with %s",
            attempt + 1,
            ", ".join(short),
            ", ".join(f"{limit / 2**20:.0f} MiB on {name}" for name, limit in sorted(limits.items())),
        )
        made = made.with_memory(limits)
    raise ProblemError(
        f"after {_TRIALS} plans, each with less memory than the one before, the device type "
        f"{', '.join(sorted(short))} still runs out of it: use a smaller batch there"
    )


def _compared(job: Job, made: JobModel | None, types: DeviceTypes, found: JobPlan, stages: Stages) -> JobPlan:
    """The plan again, when passes and then whole steps were timed in the ways that the job could compute in."""
    several = made is not None and any(set(device.precisions) - {"FP32"} for device in made.cluster.devices)
    if not broadcast_json(bool(job.options.compare) and several):
        return found
    made, found = _timed(job, made, found, types, stages)
    return _trained(job, made, found, types, stages) if broadcast_json(_takes_steps(job)) else found


def _timed(
    job: Job, made: JobModel | None, found: JobPlan, types: DeviceTypes, stages: Stages
) -> tuple[JobModel | None, JobPlan]:
    """The job and the plan again, when passes of the ways were timed that had not been."""
    with stages("passes"):
        made = measure_ways(job, made, found, types)
    with stages("plan"):
        return made, shared_plan(made, types.mine, job.options)


def _trained(job: Job, made: JobModel | None, found: JobPlan, types: DeviceTypes, stages: Stages) -> JobPlan:
    """The plan again, when whole steps of a few ways were timed."""
    with stages("steps"):
        made = measure_steps(job, made, found, types)
    with stages("plan"):
        return shared_plan(made, types.mine, job.options)


def _short_of_memory(job: Job, made: JobModel, types: DeviceTypes, found: JobPlan) -> list[str]:
    """Device types on which one iteration under the plan needs more than their limit, all ranks having tried."""
    tried = together(lambda: _tried(job, made, found))
    trials = [Trial.from_json(data) for data in gather_json(tried.to_json())]
    # The trial runs neither the optimizer, whose state stays, nor DistributedDataParallel, whose buckets do.
    _, size = world()
    parameters = sum(p.numel() * p.element_size() for p in job.model.parameters() if p.requires_grad)
    buckets_bytes = parameters if size > 1 else 0
    return [
        name
        for name, ranks in types.ranks.items()
        if any(
            trials[rank].exceeds(types.memory_bytes[name] - made.profiles[name].optimizer.state_bytes - buckets_bytes)
            for rank in ranks
        )
    ]


def _tried(job: Job, made: JobModel, found: JobPlan) -> Trial:
    with compiled_inside(job.model) if job.options.compiled else contextlib.nullcontext():
        return try_plan(job.model, job.example, found, made.graph, job.options.kernels)


def shared_plan(
    made: JobModel | None, device_type: str, options: PlanningOptions, present: JobPlan | None = None
) -> JobPlan:
    """The plan, solved on rank 0 and checked to be the same everywhere; every rank must call it.

    Args:
        made: What was measured, on rank 0; the others' is not used.
        device_type: This rank's.
        options: As in `plan_job`, on rank 0.
        present: As in `plan_job`, on rank 0.

    Raises:
        ProblemError: No plan keeps the memory limits, on rank 0.
        NotReadyError: On the others then.
        SolverError: Ranks received different plans.
    """
    rank, _ = world()
    local: JobPlan | None = None

    def work() -> Any:
        nonlocal local
        if rank or made is None:
            return None
        local = plan_job(made, device_type, options, present)
        return _shared(local)

    told = broadcast_json(together(work))
    received = JobPlan(
        plan=plan_from_json(told["plan"]),
        device_type=device_type,
        alternatives=tuple(Alternative.from_json(entry) for entry in told["alternatives"]),
        **{name: told[name] for name in _SHARED},
    )
    if _digest(received.plan, received.autocast, received.captured) != received.digest:
        raise SolverError("the plan that arrived is not the one that was sent: its digest differs")
    require_agreement("the plan", received.digest, "report this: it is a fault of this package")
    return received if local is None else local


_SHARED = (
    "iteration_ns", "memory_bytes", "sensitivity", "bound", "worthwhile", "reason", "digest", "expected_ns", "taken",
    "autocast", "captured", "shares", "measured", "sensitivity_unit", "lifted_kinds",
)  # fmt: skip


def _digest(plan: Plan, autocast: Mapping[str, str], captured: Sequence[str]) -> str:
    """Of what the workers are to do."""
    how = [*([dict(autocast)] if autocast else []), *([list(captured)] if captured else [])]
    return digest([plan.to_json(), *how] if how else plan.to_json())


def _shared(plan: JobPlan) -> dict[str, Any]:
    return {
        "plan": plan.plan.to_json(),
        "alternatives": [dataclasses.asdict(other) for other in plan.alternatives],
        **{name: dict(x) if isinstance(x := getattr(plan, name), Mapping) else x for name in _SHARED},
    }


def plan_job(
    made: JobModel, device_type: str, options: PlanningOptions | None = None, present: JobPlan | None = None
) -> JobPlan:
    """Solve a job that was measured before; takes no measurement and no other rank.

    Args:
        made: What was measured, with the limits as they are now.
        device_type: This worker's.
        options: Method, slack, least gain and local batches; the rest is not used.
        present: What the job runs under now, which stays where it fits and nothing is clearly better; None: nothing.

    Raises:
        ProblemError: No plan keeps the memory limits; the text names those that clash.
        SolverError: No plan was found in time.
    """
    options = options or PlanningOptions()
    problem = made.problem(slack=options.slack)
    solution = solve(problem, options.method, solver=options.solver)
    if solution.plan is None or solution.evaluation is None:
        raise ProblemError(f"there is no plan for this job: {solution.reason}")
    # The slowest worker sets the pace: of several shares the largest is safe.
    shares = [float(profile.options.get(FP32_SHARE_OPTION, 1.0)) for profile in made.profiles.values()]
    others = alternatives(problem, fp32_share=max(shares))
    decision = decide(made, problem, solution.plan, solution.evaluation, others, options, present)
    return JobPlan(
        device_type=device_type,
        bound=solution.bound,
        alternatives=others,
        digest=_digest(decision.plan, decision.autocast, decision.captured),
        measured={name: how_measured(profile) for name, profile in made.profiles.items()},
        sensitivity_unit=next(iter(made.sensitivities.values())).unit,
        lifted_kinds=made.graph.lifted_kinds(),
        problem=problem,
        solution=solution,
        model=made,
        **decision.fields(),
    )
