"""The precision plan of a whole training job, made and kept up to date by the workers themselves.

`auto_plan` measures, plans, benchmarks candidates and agrees on one; `PlanAdapter` and `PlanRefresher` keep it current.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.job.adapting import PlanAdapter, PlanRefresher
    from qsync_opt.runtimes.torch.job.candidates import (
        FORMS,
        ExecutionMode,
        StepTime,
        fastest_plans,
        shortlist,
        uniform_times,
    )
    from qsync_opt.runtimes.torch.job.choosing import (
        choose_by_passes,
        choose_by_steps,
        expected_step_ns,
        least_sensitive,
        paired_times,
        undecided,
    )
    from qsync_opt.runtimes.torch.job.file import load_job, save_job, with_speed, with_workers
    from qsync_opt.runtimes.torch.job.measuring import (
        Job,
        divides_by_squares,
        example_of,
        job_indicator,
        noise_horizon,
        noise_of,
    )
    from qsync_opt.runtimes.torch.job.options import PlanningOptions, cache_folder
    from qsync_opt.runtimes.torch.job.passes import host_share, time_modes
    from qsync_opt.runtimes.torch.job.plan import Alternative, JobModel, JobPlan, host_bound_words, verdict
    from qsync_opt.runtimes.torch.job.planning import auto_plan, check_training, plan_job
    from qsync_opt.runtimes.torch.job.steps import parameters_put_back, profile_job_steps
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "FORMS",
    "Alternative",
    "ExecutionMode",
    "Job",
    "JobModel",
    "JobPlan",
    "PlanAdapter",
    "PlanRefresher",
    "PlanningOptions",
    "StepTime",
    "auto_plan",
    "cache_folder",
    "check_training",
    "choose_by_passes",
    "choose_by_steps",
    "divides_by_squares",
    "example_of",
    "expected_step_ns",
    "fastest_plans",
    "host_bound_words",
    "host_share",
    "job_indicator",
    "least_sensitive",
    "load_job",
    "noise_horizon",
    "noise_of",
    "paired_times",
    "parameters_put_back",
    "plan_job",
    "profile_job_steps",
    "save_job",
    "shortlist",
    "time_modes",
    "undecided",
    "uniform_times",
    "verdict",
    "with_speed",
    "with_workers",
]  # fmt: skip
