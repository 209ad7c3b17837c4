"""Time forward and backward passes of the whole model in every execution mode that the job could use, on all ranks."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from qsync_opt.errors import ProblemError, SolverError, UnsupportedError, first_line
from qsync_opt.io import decode, encode, format_time
from qsync_opt.kernels import KernelOptions
from qsync_opt.kernels.autograd import float_modes
from qsync_opt.kernels.quantize import clear_weights
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.plans import DevicePlans
from qsync_opt.runtimes.timing import warn_if_busy
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json, together, world
from qsync_opt.runtimes.torch.execution import FORM_OPTIONS, image_weights, under_plan
from qsync_opt.runtimes.torch.interception import interception_of, share_to_compile
from qsync_opt.runtimes.torch.job.candidates import (
    CAPTURED,
    COMPILED,
    FORMS,
    JOINT,
    LAUNCHED,
    NEAR,
    PLANNED,
    ExecutionMode,
    Modes,
    fastest_modes,
    joint_modes,
    possible_modes,
)
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job, batch_size
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan
from qsync_opt.runtimes.torch.steps import compiled_inside
from qsync_opt.runtimes.torch.support import (
    TrainingExample,
    allocation_of,
    cpu_clock,
    model_unchanged,
    resident_bytes,
    synchronize,
)
from qsync_opt.systems import solve
from qsync_opt.training import Problem

_LOGGER = logging.getLogger(__name__)
_ROUNDS, _CAPTURED_ROUNDS, _HOST_PASSES = 7, 3, 3
_BLOCK_NS = 60e6
"""How long the passes take that are timed together, as far as `_MOST_PASSES` allows."""
_MOST_PASSES = 20
_FAR_SLOWER = 3.0
"""Modes that take so many times the fastest one's time are not captured."""
_NEAR_FASTEST, _MOST_COMPILED = 1.2, 3
"""Modes are compiled whose passes, captured where they can be, take at most so many times the fastest one's time, and
as many modes at most: what compiling saves differs little between precisions."""
_MORE_SAVED = 1.5
"""How many times the nanoseconds that capturing saved at most so far it is thought to save of a slower mode: the host
launches as many operators, and the device keeps it waiting for longer."""
_BACKLOG = 0.1
"""Share of a pass that a device still has to compute when the host has launched timed passes, if it never waits."""
_FURTHER_SAVED = 0.05
"""Share of a mode's time that compiling is thought to save beyond what it saved of another mode of its kind."""
_CAPTURING_PAYS = 0.015
"""Share of the time that capturing must save of launched passes, or it is not tried on compiled ones too, which wait
less for the host."""
_OPERATOR_BY_OPERATOR = 3.0
"""How many times as long it takes to compile a mode that torch does not carry out by itself."""
_MOSTLY_REPEATED = 0.15
"""Share of a model that is left to compile once for its repeated blocks at most, for it to be compiled by blocks first.
With six to eight blocks (a share of 0.2) that took as long as the whole, 18 and 21 s, whose steps were 6 % shorter."""
_FORMAT_PAYS = 0.01
"""Share of the time of launched passes that channels last must save, so that weights are laid out anew."""
_FORMAT_GAINS = 1.5
"""Modes that take so many times the fastest one's time are not tried channels last: none gained so much."""
_STEPS_SHARE = 0.15
"""Share of ``planning_seconds`` that is left for whole steps."""
_MODE_NS = 0.8e9
"""After a mode has taken so long in total, it is not timed again."""


def measure_passes(job: Job, measured: JobModel | None, plan: JobPlan, types: DeviceTypes) -> JobModel | None:
    """Time the passes of every execution mode; every rank must call it.

    With local batches by speed, the joint plan of batches and precisions and the fastest plan of every device type by
    itself are among them; of a job whose modes were timed before, such plans alone are timed.

    Args:
        job: Whose model and batch are used; the model is left as it was.
        measured: What is known of the job, on rank 0.
        plan: The solver's plan.
        types: Device types and their ranks.

    Returns:
        ``measured`` with ``modes``, where it was given.
    """
    rank, size = world()
    untimed = together(lambda: {} if rank or measured is None else _untimed_modes(job, measured, plan))
    # What is timed runs neither the optimizer, whose state stays, nor DistributedDataParallel, whose buckets do.
    buckets = sum(p.numel() * p.element_size() for p in job.model.parameters() if p.requires_grad) if size > 1 else 0
    states = {} if measured is None else {name: measured.profiles[name].optimizer.state_bytes for name in untimed}
    sent = broadcast_json({name: [states[name], [encode(mode) for mode in own]] for name, own in untimed.items()})
    if not any(entries for _, entries in sent.values()):
        return measured
    state_bytes, entries = sent[types.mine]
    modes = [decode(ExecutionMode, entry, "an execution mode") for entry in entries]
    timed = together(
        lambda: time_modes(
            job.example,
            modes,
            None if measured is None else measured.graph,
            job.options.kernels,
            kept_bytes=state_bytes + buckets,
            state_bytes=0 if job.optimizer is not None and job.optimizer.state else state_bytes,
            compiled=job.options.compiled,
            until=job.began + (1 - _STEPS_SHARE) * job.options.planning_seconds,
            limit_bytes=types.memory_bytes[types.mine],
            # With several device types, what is slow on the fastest may be the least sensitive that is fast enough.
            slack=job.options.slack if len(types.ranks) == 1 else None,
        )
    )
    results = gather_json([[mode.pass_ns, mode.needed_bytes, mode.regional, mode.channels_last] for mode in timed])
    if measured is None or rank:
        return measured
    known = dict(measured.modes)
    for name, ranks in types.ranks.items():
        by_mode = zip(untimed[name], *(results[number] for number in ranks), strict=True)
        known[name] = (*known.get(name, ()), *(_slowest(mode, rows) for mode, *rows in by_mode))
    return replace(measured, modes=known)


def _untimed_modes(job: Job, measured: JobModel, plan: JobPlan) -> dict[str, list[ExecutionMode]]:
    if plan.problem is None:
        return {}
    modes = {} if measured.modes else possible_modes(plan.problem, plan.plan.devices)
    if job.options.sizes_batches and not job.options.compiled:  # compiling each would take longer than it is worth
        own = fastest_modes(plan.problem, measured.modes or modes, slack=job.options.slack)
        modes = {name: [*modes.get(name, ()), *mine] for name, mine in own.items()}
        for name, mine in _joint_modes(job, measured, plan.problem).items():
            modes[name] += mine
    forms = [form for form in FORMS if job.options.allows(form)]
    return {name: in_forms(mine, forms) for name, mine in modes.items()}


_JOINT_S = 10.0
"""Seconds for the fastest joint plan, and for the joint plan."""


def _joint_modes(job: Job, measured: JobModel, problem: Problem) -> dict[str, list[ExecutionMode]]:
    """The modes of the joint plan of local batches and precisions, where there are several device types."""
    samples = batch_size(job.example)
    known = any(mode.name == JOINT for own in measured.modes.values() for mode in own)
    if samples is None or len(measured.workers) == 1 or known:
        return {}
    try:
        shares = measured.shares_problem(samples, slack=job.options.slack, time_limit_s=_JOINT_S)
        solution = solve(shares, time_limit_s=_JOINT_S)
    except (ProblemError, SolverError) as failure:
        _LOGGER.warning("local batches and precisions are not planned together: %s", first_line(failure))
        return {}
    if solution.plan is None or solution.evaluation is None:
        _LOGGER.warning("local batches and precisions are not planned together: %s", solution.reason)
        return {}
    _LOGGER.info(
        "joint plan: local batches %s, a step of %s, sensitivity %.4g, none below %.4g",
        dict(solution.plan.batches),
        format_time(solution.evaluation.iteration_ns),
        solution.objective,
        solution.bound,
    )
    return joint_modes(problem, solution.plan)


def in_forms(modes: Sequence[ExecutionMode], forms: Sequence[str]) -> list[ExecutionMode]:
    """Launched modes in each of some forms."""
    return [replace(mode, captured=CAPTURED in form, compiled=COMPILED in form) for form in forms for mode in modes]


def has_form(modes: Modes, form: str) -> bool:
    """Whether passes were to be timed in a form."""
    return any(mode.form == form for own in modes.values() for mode in own)


def _slowest(mode: ExecutionMode, results: Sequence[Sequence[int | None]]) -> ExecutionMode:
    """A mode with the time of its slowest worker and the memory of the one that needs most.

    Args:
        mode: As it was before.
        results: Of each worker: nanoseconds, bytes, and whether it was compiled by blocks and laid out channels last,
            in which all follow the slowest.
    """
    needs = [needed for _, needed, *_ in results if needed is not None]
    needed_bytes = max(needs) if len(needs) == len(results) else None
    pass_ns, _, regional, channels_last = max(results, key=lambda result: result[0] or 0)
    return replace(
        mode,
        pass_ns=int(pass_ns or 0),
        needed_bytes=needed_bytes,
        regional=bool(regional),
        channels_last=bool(channels_last),
    )


def time_modes(
    example: TrainingExample,
    modes: Sequence[ExecutionMode],
    graph: OpGraph | None,
    kernels: KernelOptions,
    *,
    kept_bytes: int = 0,
    state_bytes: int = 0,
    compiled: bool = False,
    until: float = math.inf,
    limit_bytes: float = math.inf,
    slack: float | None = None,
) -> list[ExecutionMode]:
    """The modes with the median time of a forward and backward pass on this rank, and on a card the peak memory.

    Several passes are timed together, as they follow each other in training: on a card the host runs ahead. Launched
    modes take turns, so that a disturbance affects all of them. Parameters, gradients, buffers and random state are put
    back.

    Args:
        example: A model without a plan, with a batch.
        modes: To be timed.
        graph: The captured graph, if it is known here.
        kernels: Rounding and granularity.
        kept_bytes: What training keeps beside parameters, gradients and activations.
        state_bytes: Of it the optimizer's state, unless that exists already: compiled passes must run beside it.
        compiled: Compile the model under every mode, one after the other.
        until: Time of ``time.perf_counter`` after which no mode is captured, and none should still be compiled.
        limit_bytes: Where no other mode keeps this, those that need least are compiled instead of the fastest.
        slack: How much longer than the fastest a pass may take that could still be chosen (0.1: 10 %). Forms of modes
            that cannot be as fast, as those timed before say, are not tried. None: all forms are.

    Returns:
        In the same order. ``needed_bytes`` is None where memory ran out, an operation of the model refused the
        precisions, or passes could not be captured or compiled, or would be too slow to try; on a CPU, which keeps no
        account of memory, it stays what it was.
    """
    timing = _Timing(example, graph, kernels, kept_bytes, compiled, state_bytes)
    with model_unchanged(example.model):
        if compiled:
            return [timing.once_prepared(mode) for mode in modes]
        return timing.in_other_forms(timing.in_best_format(timing.in_turn(modes)), until, slack, limit_bytes)


def _could_be_chosen_ns(fastest_ns: float, slack: float) -> float:
    """The longest passes with which a mode is still shortlisted beside the fastest ones."""
    return (1 + slack) * (1 + NEAR) * fastest_ns


def builds_of(model: nn.Module) -> list[bool]:
    """How a model is to be compiled, in the order to try: by blocks where that saves most of the work, as a whole."""
    return [True, False] if share_to_compile(model) <= _MOSTLY_REPEATED else [False]


def _frugal(modes: Sequence[ExecutionMode]) -> list[str]:
    """Names of modes to compile where memory is short: autocast, which compiles fastest, what needs least, the plan.

    Args:
        modes: Not timed, with predicted memory.
    """
    unscaled = sorted((mode for mode in modes if not mode.needs_scaling), key=lambda mode: mode.needed_bytes or 0)
    carried = [mode.name for mode in unscaled if mode.carrier is not None]
    others = [mode.name for mode in unscaled if mode.carrier is None]
    planned = [name for name in others[1:] if name == PLANNED]
    return [*carried[:1], *others[:1], *planned]


def _waiting_for_host(modes: Sequence[ExecutionMode]) -> set[str]:
    """Names of modes whose launched passes waited for their host."""
    return {mode.name for mode in modes if mode.form == LAUNCHED and mode.waits_for_host}


def _not_timed(mode: ExecutionMode) -> ExecutionMode:
    return replace(mode, pass_ns=0, needed_bytes=None)


@dataclass(slots=True)
class _Compiling:
    """What is known of compiling a model.

    Attributes:
        builds: By blocks (True), as a whole, or both: from the first mode that was timed in both on, the faster one.
        share: As `share_to_compile` says.
        took_s: Longest so far, by blocks and as a whole, for a mode that torch carries out by itself.
    """

    builds: list[bool]
    share: float
    took_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})


@dataclass(frozen=True, slots=True)
class _Timing:
    """What all modes are timed with, the arguments of `time_modes`; and the names of those that do not run."""

    example: TrainingExample
    graph: OpGraph | None
    kernels: KernelOptions
    kept_bytes: int
    compiled: bool
    state_bytes: int = 0
    refused: set[str] = field(default_factory=set)

    def in_turn(self, modes: Sequence[ExecutionMode]) -> list[ExecutionMode]:
        """The launched modes timed in rounds; captured ones are left as they are."""
        model = self.example.model
        times_ns: list[list[float]] = [[] for _ in modes]
        spent_ns = [0.0 for _ in modes]
        passes = [0 for _ in modes]
        needs = [mode.needed_bytes for mode in modes]
        waits = [False for _ in modes]
        for turn in range(_ROUNDS):
            for index, mode in enumerate(modes):
                if mode.form != LAUNCHED or needs[index] is None or spent_ns[index] > _MODE_NS:
                    continue
                began = time.perf_counter()
                with carried_out(model, mode, self.graph, self.kernels):
                    try:
                        if not turn and self.example.device.type == "cuda":
                            needs[index] = self._peak_bytes()
                        passes[index], pass_ns, backlog = self._pass_ns(passes[index], scaled=mode.needs_scaling)
                        times_ns[index].append(pass_ns)
                        waits[index] = backlog < _BACKLOG and not mode.needs_scaling  # looking for overflows waits too
                    except RuntimeError as failure:
                        needs[index] = None
                        model.zero_grad()
                        if isinstance(failure, torch.cuda.OutOfMemoryError):
                            torch.cuda.empty_cache()
                        elif mode.is_plain:
                            raise
                        else:
                            self.refused.add(mode.name)
                            _LOGGER.warning("%s does not run and is left out: %s", mode.name, first_line(failure))
                spent_ns[index] += 1e9 * (time.perf_counter() - began)
        lowest = {mode.label: sorted(own)[:2] for mode, own in zip(modes, times_ns, strict=True) if len(own) > 1}
        warn_if_busy({f"passes of {label}": 1 - low / high for label, (low, high) in lowest.items()}, len(lowest))
        return [
            replace(
                mode,
                pass_ns=round(statistics.median(own)) if own else 0,
                needed_bytes=needed,
                waits_for_host=waited and self.example.device.type == "cuda",
            )
            for mode, own, needed, waited in zip(modes, times_ns, needs, waits, strict=True)
        ]

    def in_best_format(self, modes: Sequence[ExecutionMode]) -> list[ExecutionMode]:
        """The modes, channels last where that makes launched passes faster; other forms of them then too.

        The model as it is, in FP32 and launched, stays as it is. Where the fastest of the others gains nothing, no
        further one is tried: it is the same convolutions that gain. Nor are those that are far slower.

        Args:
            modes: In all forms; launched ones are timed already.
        """
        before = {mode.name: mode for mode in modes if mode.form == LAUNCHED and mode.pass_ns and not mode.is_plain}
        if not (before and image_weights(self.example.model)):
            return [*modes]
        faster: dict[str, ExecutionMode] = {}
        first, *rest = sorted(before.values(), key=lambda mode: mode.pass_ns)
        rest = [mode for mode in rest if mode.pass_ns <= _FORMAT_GAINS * first.pass_ns]
        for tried in ([first], rest):
            after = self.in_turn([replace(mode, channels_last=True) for mode in tried])
            faster |= {m.name: m for m in after if 0 < m.pass_ns < (1 - _FORMAT_PAYS) * before[m.name].pass_ns}
            if not faster:
                break

        def best(mode: ExecutionMode) -> ExecutionMode:
            if mode.name not in faster:
                return mode
            return faster[mode.name] if mode.form == LAUNCHED else replace(mode, channels_last=True)

        return [best(mode) for mode in modes]

    def in_other_forms(
        self,
        modes: Sequence[ExecutionMode],
        until: float = math.inf,
        slack: float | None = None,
        limit_bytes: float = math.inf,
    ) -> list[ExecutionMode]:
        """The modes with times of captured and compiled passes; launched ones are timed already.

        Arguments are those of `time_modes`.
        """
        results, compiles = [*modes], any(mode.compiled for mode in modes)
        compiling = _Compiling(builds_of(self.example.model), share_to_compile(self.example.model))
        # What torch carries out by itself first: it compiles faster, and says what others have to reach.
        for carried in (True, False):
            results = self.captured_modes(results, carried, slack, until)
            if carried:
                results = self.captured_in_best_format(results, until)
            if compiles:
                results = self.compiled_modes(results, carried, compiling, until, slack, limit_bytes)
        if compiles:
            results = self.compiled_and_launched(results, compiling, until)
            torch.compiler.reset()
        return results

    def captured_modes(
        self, modes: Sequence[ExecutionMode], carried: bool, slack: float | None, until: float = math.inf
    ) -> list[ExecutionMode]:
        """The modes with times of captured passes of one kind that could be chosen; launched ones are timed already.

        Capturing saves what a device waits for its host. What torch carries out by itself and waits for its host is
        captured in any case: casts may make it launch far more than another mode of its kind, and compute far less. Of
        others of a kind the host launches about as many operators each: a mode whose passes take longer waits no longer
        than the fastest one.
        """
        launched_ns = {mode.name: mode.pass_ns for mode in modes if mode.form == LAUNCHED and mode.pass_ns}
        waiting = _waiting_for_host(modes)
        fastest_ns = min((mode.pass_ns for mode in modes if mode.pass_ns), default=0)
        saved_ns: int | None = None
        results = {mode.label: mode for mode in modes}
        for mode in sorted(modes, key=lambda mode: launched_ns.get(mode.name, 0)):
            if mode.form != CAPTURED or (mode.carrier is not None) is not carried:
                continue
            own_ns = launched_ns.get(mode.name)
            bound_ns = 0.0
            if own_ns is not None and saved_ns is not None and not (carried and mode.name in waiting):
                bound_ns = own_ns - _MORE_SAVED * saved_ns
            if launched_ns and (own_ns is None or own_ns >= _FAR_SLOWER * min(launched_ns.values())):
                results[mode.label] = _not_timed(mode)  # the host is not what it waits for
            elif time.perf_counter() > until:
                _LOGGER.info("%s is not timed: planning_seconds are over", mode.label)
                results[mode.label] = _not_timed(mode)
            elif slack is not None and bound_ns > _could_be_chosen_ns(fastest_ns, slack):
                results[mode.label] = _not_timed(mode)
            else:
                captured = results[mode.label] = self.once_prepared(mode)
                if captured.pass_ns and own_ns is not None:
                    saved_ns = max(saved_ns or 0, own_ns - captured.pass_ns)
                    fastest_ns = min(fastest_ns, captured.pass_ns)
        return [results[mode.label] for mode in modes]

    def captured_in_best_format(self, modes: Sequence[ExecutionMode], until: float = math.inf) -> list[ExecutionMode]:
        """The modes, the fastest captured one channels last if that is faster; its compiled forms then too.

        For passes that wait for their host: launched, they take as long in either format.

        Args:
            modes: In all forms; launched and captured ones are timed already.
            until: As in `time_modes`.
        """
        waiting = _waiting_for_host(modes)
        captured = [mode for mode in modes if mode.form == CAPTURED and mode.pass_ns]
        best = min(captured, key=lambda mode: mode.pass_ns, default=None)
        if best is None or best.channels_last or best.name not in waiting or not image_weights(self.example.model):
            return [*modes]
        if time.perf_counter() > until:
            return [*modes]
        channels_last = self.once_prepared(replace(best, channels_last=True))
        if not 0 < channels_last.pass_ns < (1 - _FORMAT_PAYS) * best.pass_ns:
            return [*modes]

        def in_format(mode: ExecutionMode) -> ExecutionMode:
            if mode is best:
                return channels_last
            return replace(mode, channels_last=True) if mode.compiled and mode.name == best.name else mode

        return [in_format(mode) for mode in modes]

    def compiled_modes(
        self,
        modes: Sequence[ExecutionMode],
        carried: bool,
        compiling: _Compiling,
        until: float,
        slack: float | None = None,
        limit_bytes: float = math.inf,
    ) -> list[ExecutionMode]:
        """The modes with times of compiled passes of those of one kind that are fastest otherwise, as time allows.

        Where none of the others keeps the memory limit: of those that are likely to need least, whatever their kind.
        Where none that torch carries out by itself is near the fastest, because all ran out of memory: autocast.

        Args:
            modes: In all forms; launched ones are timed already, and captured ones of this kind.
            carried: Whether of those that torch carries out by itself; they come first.
            compiling: What is known of compiling this model.
            until: As in `time_modes`.
            slack: As in `time_modes`.
            limit_bytes: As in `time_modes`.
        """
        of_form = {form: {m.name: m.pass_ns for m in modes if m.form == form and m.pass_ns} for form in FORMS}
        fastest_ns: dict[str, int] = {}
        kinds = {mode.name: mode.carrier is not None for mode in modes}
        for mode in modes:
            if mode.pass_ns and mode.needed_bytes is not None and not mode.compiled:
                fastest_ns[mode.name] = min(mode.pass_ns, fastest_ns.get(mode.name, mode.pass_ns))
        near_ns = _NEAR_FASTEST * min(fastest_ns.values(), default=0)
        near = sorted((n for n, ns in fastest_ns.items() if ns <= near_ns), key=lambda n: (not kinds[n], fastest_ns[n]))
        chosen = [name for name in near[:_MOST_COMPILED] if kinds[name] is carried]
        tight = not any(mode.pass_ns and mode.fits(limit_bytes) for mode in modes if not mode.compiled)
        frugal = _frugal([mode for mode in modes if mode.form == COMPILED]) if carried else []
        if tight:
            chosen, slack = frugal, None
        elif not chosen and frugal and kinds[frugal[0]] and frugal[0] not in {*fastest_ns, *self.refused}:
            chosen = frugal[:1]  # compiled, what ran out of memory as launched passes may fit
        results = {mode.label: mode for mode in modes}

        def capturing_pays(name: str) -> bool:
            launched, captured = of_form[LAUNCHED].get(name), of_form[CAPTURED].get(name)
            if not launched and of_form[LAUNCHED]:  # memory ran out: as of the others
                return bool(_waiting_for_host(modes))
            # Captured passes that take longer are not the same: a model that reads values does without while captured.
            return not (launched and captured) or abs(1 - captured / launched) >= _CAPTURING_PAYS

        compiled = {(mode.name, mode.captured): mode for mode in modes if mode.compiled}
        ready = [mode for mode in modes if mode.compiled and mode.pass_ns and mode.fits(limit_bytes)]
        left: float | None = None
        """Least share of the time that compiling left."""
        for name in chosen:
            if slack is not None and left is not None and name in fastest_ns:
                least_ns = (left - _FURTHER_SAVED) * fastest_ns[name]
                if least_ns > _could_be_chosen_ns(min(mode.pass_ns for mode in ready), slack):
                    continue
            # Launched passes are seldom faster than captured ones: they are for where no graph can be captured.
            # Graphs keep their memory for themselves.
            for captured in (True, False) if not tight and (slack is None or capturing_pays(name)) else (False,):
                wanted = compiled.get((name, captured))
                if wanted is None or any(other.name == name for other in ready):
                    continue
                timed = results[wanted.label] = self.compiled_and_timed(wanted, compiling, until, limit_bytes)
                if timed.pass_ns and timed.fits(limit_bytes):
                    ready.append(timed)
                    if not tight and name in fastest_ns:
                        left = min(timed.pass_ns / fastest_ns[name], 1.0 if left is None else left)
        return [results[mode.label] for mode in modes]

    def compiled_and_timed(
        self, mode: ExecutionMode, compiling: _Compiling, until: float, limit_bytes: float = math.inf
    ) -> ExecutionMode:
        """A compiled mode with its time, by blocks or as a whole, whichever is faster; not timed for lack of time."""

        def order(mode: ExecutionMode) -> tuple[bool, int]:
            return not mode.fits(limit_bytes), mode.pass_ns

        best = _not_timed(mode)
        factor, timed_in = 1.0 if mode.carrier is not None else _OPERATOR_BY_OPERATOR, 0
        for regional in (*compiling.builds,):
            own = replace(mode, regional=regional)
            # At most: what does not depend on a model's size is in the time of its blocks too.
            expected_s = factor * (compiling.took_s[regional] or compiling.took_s[True] / compiling.share)
            if time.perf_counter() + expected_s > until:
                _LOGGER.info("%s is not timed: planning_seconds would not suffice", own.label)
                continue
            began = time.perf_counter()
            timed = self.once_prepared(own)
            refused = regional and not timed.regional and timed.pass_ns > 0  # as torch does for other modes
            kind = regional and not refused
            compiling.took_s[kind] = max(compiling.took_s[kind], (time.perf_counter() - began) / factor)
            if refused:
                compiling.builds[:] = [False]
                return timed
            timed_in += timed.pass_ns > 0
            if timed.pass_ns and not (best.pass_ns and order(best) <= order(timed)):
                best = timed
        if timed_in == 2:
            compiling.builds[:] = [best.regional]
        return best

    def compiled_and_launched(
        self, modes: Sequence[ExecutionMode], compiling: _Compiling, until: float
    ) -> list[ExecutionMode]:
        """The modes with the time of launched passes of the fastest compiled one too, from the compiler's cache.

        They need less memory than captured ones, and shapes may change. What is compiled and has no time is not chosen.
        """
        fastest = min((mode for mode in modes if mode.compiled and mode.pass_ns), key=lambda m: m.pass_ns, default=None)
        name = fastest.name if fastest is not None and fastest.captured else None
        results = []
        for mode in modes:
            if mode.compiled and not mode.pass_ns:
                is_its_launched_form = mode.name == name and mode.form == COMPILED
                mode = self.compiled_and_timed(mode, compiling, until) if is_its_launched_form else _not_timed(mode)
            results.append(mode)
        return results

    def once_prepared(self, mode: ExecutionMode) -> ExecutionMode:
        """A mode timed with compiled passes, or captured ones: prepared once, which takes far longer than a pass.

        It is not ``regional`` any more if its model was compiled as a whole, because torch refused its blocks.
        """
        model, device, needed = self.example.model, self.example.device, mode.needed_bytes
        on_card, regional = device.type == "cuda", mode.regional
        times_ns: list[float] = []
        if not (self.compiled or on_card):
            return replace(mode, pass_ns=0, needed_bytes=None)
        before = _reserved_bytes(device) if mode.captured else 0
        state: list[torch.Tensor] = []
        try:
            with (
                warnings.catch_warnings(),
                carried_out(model, mode, self.graph, self.kernels),
                compiled_inside(model) if self.compiled else contextlib.nullcontext(),
            ):
                # The compiler advises TF32, which is a mode of its own here.
                warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
                self._pass()  # compiles; or captures, and replays for the first time
                watching = interception_of(model)
                regional = mode.regional and watching is not None and watching.regional
                if not mode.captured:
                    # A first step makes it in memory that activations have left, which breaks large blocks.
                    state += self._like_state() if on_card else []
                    self._pass()  # with cached guards
                if on_card and not mode.captured:
                    needed = self._peak_bytes()
                began, passes = time.perf_counter(), 0
                while len(times_ns) < (_ROUNDS if self.compiled else _CAPTURED_ROUNDS):
                    passes, pass_ns, _ = self._pass_ns(passes, scaled=mode.needs_scaling)
                    times_ns.append(pass_ns)
                    if 1e9 * (time.perf_counter() - began) > _MODE_NS:
                        break
                if mode.captured:  # graphs keep their memory, which steps do not allocate
                    reserved = torch.cuda.max_memory_reserved(device) - before
                    needed = resident_bytes(model) + reserved + self.kept_bytes
        except (torch.cuda.OutOfMemoryError, UnsupportedError, TorchDynamoException) as failure:
            reason = "memory ran out" if isinstance(failure, torch.cuda.OutOfMemoryError) else first_line(failure)
            prepared = "compiled" if self.compiled else mode.form
            _LOGGER.warning("%s is not timed %s: %s", mode.name, prepared, reason)
            model.zero_grad()
            times_ns, needed = [0.0], None
        state.clear()
        if on_card:
            _reserved_bytes(device)
        return replace(mode, pass_ns=round(statistics.median(times_ns)), needed_bytes=needed, regional=regional)

    def _like_state(self) -> list[torch.Tensor]:
        """Tensors as large as the optimizer's state, as many for each parameter."""
        trained = [p for p in self.example.model.parameters() if p.requires_grad]
        each = self.state_bytes // max(1, sum(p.numel() * p.element_size() for p in trained))
        return [torch.empty_like(p) for p in trained for _ in range(each)]

    def _pass(self, *, scaled: bool = False) -> None:
        self.example.run()
        if scaled:
            unscale_gradients(self.example.model)
        self.example.model.zero_grad()
        clear_weights()  # a step would change the weights

    def _peak_bytes(self) -> int:
        _, allocation = allocation_of(self._pass, self.example.device)
        return resident_bytes(self.example.model) + allocation.peak_bytes + self.kept_bytes

    def _pass_ns(self, passes: int, *, scaled: bool) -> tuple[int, float, float]:
        """Nanoseconds of a pass, the mean of ``passes`` that follow each other; one before them does not count.

        With loss scaling, ``scaled``, the gradients are looked through and divided too, and the host waits for them.

        Args:
            passes: 0: as many as `_BLOCK_NS` allows.
            scaled: Whether there is loss scaling.

        Returns:
            How many passes were timed, the time of one, and the share of it that the device still computed when the
            last one was launched.
        """
        first, _ = self._block_ns(1, scaled=scaled)
        if not passes:
            if first <= _BLOCK_NS:  # else one pass more is as good as any
                first, _ = self._block_ns(1, scaled=scaled)
            passes = max(1, min(_MOST_PASSES, int(_BLOCK_NS / max(1.0, first))))
        block_ns, left_ns = self._block_ns(passes, scaled=scaled)
        return passes, block_ns / passes, left_ns * passes / max(1.0, block_ns)

    def _block_ns(self, passes: int, *, scaled: bool) -> tuple[float, float]:
        """Nanoseconds of passes that follow each other, and how much of it came after the last one was launched."""
        device = self.example.device
        clock: Callable[[], int] = time.perf_counter_ns if device.type == "cuda" else cpu_clock()
        began = clock()
        for _ in range(passes):
            self._pass(scaled=scaled)
        launched = clock()
        synchronize(device)
        ended = clock()
        return float(ended - began), float(ended - launched)


def unscale_gradients(model: nn.Module) -> bool:
    """What a loss scaler does before a step, with the scale 1: divide all gradients; returns whether one overflowed."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    if not gradients:
        return False
    overflow, scale = (torch.full((), value, device=gradients[0].device) for value in (0.0, 1.0))
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, scale)
    return bool(overflow.item())


def carried_out(
    model: nn.Module, mode: ExecutionMode, graph: OpGraph | None, kernels: KernelOptions
) -> contextlib.AbstractContextManager[None]:
    """A block in which the model runs in a mode."""
    if mode.is_plain:
        return _ieee()
    how = {name: getattr(mode, name) for name in FORM_OPTIONS}
    return under_plan(model, mode.precisions, graph, kernels, autocast=mode.carrier, **how)


@contextlib.contextmanager
def _ieee() -> Iterator[None]:
    """FP32 without TF32 within the block, whatever torch's settings are."""
    before = float_modes.set_fp32_modes("ieee")
    try:
        yield
    finally:
        float_modes.set_fp32_modes(before)


def _reserved_bytes(device: torch.device) -> int:
    """Memory of a card that torch holds after it has given back all it can; the peak is counted from here on."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)


def host_share(
    example: TrainingExample, plan: Mapping[str, str] | DevicePlans, graph: OpGraph | None, kernels: KernelOptions
) -> float | None:
    """Share of a forward and backward pass under a plan in which the host still launches.

    None without a card, and where memory runs out, which is for trials to say.

    Near 1 the device has done everything by the time that the host has launched it: it waits for the host. Parameters,
    gradients, buffers and random state are put back.
    """
    if example.device.type != "cuda":
        return None
    shares = []
    with (
        contextlib.suppress(torch.cuda.OutOfMemoryError),
        model_unchanged(example.model),
        under_plan(example.model, plan, graph, kernels),
    ):
        for _ in range(1 + _HOST_PASSES):
            synchronize(example.device)
            begin = time.perf_counter()
            example.run()
            launched = time.perf_counter()
            synchronize(example.device)
            shares.append((launched - begin) / (time.perf_counter() - begin))
            example.model.zero_grad()
    return statistics.median(shares[1:]) if len(shares) > _HOST_PASSES else None


def with_host_shares(job: Job, plan: JobPlan, graph: OpGraph | None, types: DeviceTypes) -> JobPlan:
    """The plan with the largest `host_share` of each device type's workers; every rank must call it.

    A plan that is not worth applying, and one that was not tried, stays as it is; so does one whose passes are captured
    or compiled, for which the host launches far less: it would be prepared once more.
    """
    if not (job.options.trial and plan.worthwhile) or plan.captured or plan.compiled:
        return plan
    by_rank = gather_json(together(lambda: host_share(job.example, plan, graph, job.options.kernels)))
    shares = {
        name: [by_rank[rank] for rank in ranks if by_rank[rank] is not None] for name, ranks in types.ranks.items()
    }
    return replace(plan, host_shares={name: max(own) for name, own in shares.items() if own})
