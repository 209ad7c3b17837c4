"""Options of planning a job from inside its script, with their defaults."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import Report, check_number, default_cache_folder
from qsync_opt.kernels import KernelOptions

COSTS = ("auto", "steps", "operators")
"""How costs of operators may be measured."""
INDICATORS = ("auto", "progress", "probed", "propagated")
"""Indicators that a job may be planned with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """How a job is planned.

    Attributes:
        method: As in `solve`.
        solver: As in `solve`.
        slack: How much longer than the fastest plan's an iteration may take (0.1: 10 %).
        least_gain: Least share of FP32's iteration time that a plan must save to be worth applying.
        precisions: Allowed on this rank's device, wherever an operator can run in them; None: those that are worth
            planning by default (`ops.default_precisions_of`).
        memory: Limit of this rank's device, such as ``"12 GiB"`` or bytes; None: what is free.
        device_type: Name of this rank's device type, where that of the hardware does not distinguish it from others.
        cache_dir: Folder of measurements; None: ``QSYNC_CACHE``, else beside this package's other caches.
        job_file: Where rank 0 writes everything that was measured. A later start with the same model, batch shapes,
            versions and device types plans from it, whatever the number of workers and their memory, and measures
            nothing; any other start measures and overwrites it. None: only single measurements are cached.
        kernels: Rounding and granularity of 8-bit operators.
        costs: ``"steps"`` records whole training steps of the model under a few plans (`profile_steps`) and
            ``"operators"`` measures operator by operator (`profile`); ``"auto"`` does the first on CUDA and the second
            on a CPU. Where steps cannot be recorded, operators are measured, and the plan says why.
        profile_seconds: With recorded steps, the time after which no plan beyond the uniform ones is started, and no
            part of one that does not fit into memory; operator by operator, the ``seconds`` of `profile`.
        indicator: What sensitivities are measured by, as in `sensitivities`: ``"progress"``, the share of every step's
            progress that noise costs Adam and those like it; ``"probed"``, the variance that it adds to the gradient;
            or ``"propagated"``, the same by formula. ``"auto"`` takes the first if the optimizer has ``betas`` (or none
            is given), and the second for others.
        probes: Random vectors of `collect_statistics`, of the kind that the indicator needs; 0: ``"propagated"``.
        trial: Run the plan once on every rank before it is returned.
        compare: Time whole passes of the model in FP32, under autocast, in one precision everywhere and under the
            plan, then whole training steps of the best candidates on all workers together, and return the least
            sensitive of those that are as fast as any by these times. ``"passes"`` leaves out the steps, False both.
        race_seconds: With ``compare``, the time after which no further round of whole steps starts. The first round
            times every candidate; rounds are added while noise leaves open which one to take.
        capture: With ``compare``, time the passes of every execution mode on a card also as CUDA graphs (`graphed`),
            and take those where nothing else is as fast. The first training pass after `apply` is then captured, and
            what holds for `graphed` holds for the model.
        compile: With ``compare``, also compile the fastest execution modes on a card, alone and in CUDA graphs if
            ``capture`` is set, and take those where nothing else is as fast. `apply` then compiles the model in place,
            from the compiler's cache, in the first pass.
        planning_seconds: The time from the beginning of `auto_plan` after which no further mode is compiled, and none
            that is expected to end later. Building 8-bit kernels, once per machine, does not count.
        compiled: The model will be compiled after `apply`, as one graph for each pass: steps are recorded and passes
            timed compiled, and whole steps are not compared. Every plan that is recorded or timed is compiled once,
            which takes minutes for large models; what this process has compiled before is compiled again.
        local_batches: ``"equal"`` on all workers, so that the slowest decides; ``"by speed"``: they will be sized so
            that no worker waits, as the plan's ``shares`` say, and the fastest execution modes are taken, among them
            the joint plan of local batches and precisions (`JobModel.shares_problem`) and the plan of every device type
            that is fastest by itself. The batch for planning is the same on all ranks in
            either case; where all its tensors share their first dimension, it is cut or repeated to train for a few
            steps with sized batches. Only ``compare`` uses it.
        noise_share: With ``auto_plan(compress=True)``, most variance of compressed gradients, as a share of the noise
            that the workers' batches give the averaged gradient.
        progress: As in `profile`.
    """

    method: Any = "greedy"
    solver: Any = None
    slack: float = 0.0
    least_gain: float = 0.02
    precisions: tuple[str, ...] | None = None
    memory: str | int | None = None
    device_type: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    job_file: str | os.PathLike[str] | None = None
    kernels: KernelOptions = dataclasses.field(default_factory=KernelOptions)
    costs: str = "auto"
    profile_seconds: float = 25.0
    indicator: str = "auto"
    probes: int = 1
    trial: bool = True
    compare: bool | str = True
    race_seconds: float = 16.0
    capture: bool = True
    compile: bool = True
    planning_seconds: float = 90.0
    compiled: bool = False
    local_batches: str = "equal"
    noise_share: float = 0.1
    progress: Report | bool | None = None

    def __post_init__(self) -> None:
        check_number(self.slack, "slack")
        check_number(self.noise_share, "noise_share")
        check_number(self.profile_seconds, "profile_seconds")
        check_number(self.race_seconds, "race_seconds")
        if self.costs not in COSTS:
            raise ProblemError(f"costs is {self.costs!r}, but allowed are {', '.join(map(repr, COSTS))}")
        if self.indicator not in INDICATORS:
            raise ProblemError(
                f"indicator is {self.indicator!r}, but allowed are {', '.join(map(repr, INDICATORS))}; with others, "
                "build the problem from qsync_opt.sensitivities(kind=...)"
            )
        if self.indicator in ("progress", "probed") and not self.probes:
            raise ProblemError(f"indicator is {self.indicator!r} and probes is 0, but it needs probes: 1 or more")
        if self.compare not in (True, False, "passes"):
            raise ProblemError(f"compare is {self.compare!r}, but allowed are True, False and 'passes'")
        check_number(self.least_gain, "least_gain")
        if self.least_gain >= 1:
            raise ProblemError(f"least_gain is {self.least_gain}: a share below 1 is needed, such as 0.02")
        check_number(self.planning_seconds, "planning_seconds")
        if self.local_batches not in ("equal", "by speed"):
            raise ProblemError(f"local_batches is {self.local_batches!r}: allowed are 'equal' and 'by speed'")

    def allows(self, form: str) -> bool:
        """Whether passes may be executed in this form: ``"launched"``, ``"captured"``, ``"compiled"`` or both."""
        if self.compiled:  # by the script, under whatever plan
            return form == "launched"
        return (self.capture or "captured" not in form) and (self.compile or "compiled" not in form)

    @property
    def sizes_batches(self) -> bool:
        """Whether local batches will be sized by speed."""
        return self.local_batches == "by speed"


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Folder of measurements: ``folder``, else ``QSYNC_CACHE``, else beside the other caches of this package."""
    folder = folder or os.environ.get("QSYNC_CACHE")
    return Path(folder) if folder else default_cache_folder() / "measurements"
