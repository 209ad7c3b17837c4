"""The precision plan of a whole training job, made and kept by the workers themselves.

`auto_plan` measures, plans, times candidates and agrees on one; `PlanAdapter` and `PlanRefresher` keep it current.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.job.adapting import PlanAdapter, PlanRefresher
    from qsync_opt.runtimes.torch.job.candidates import (
        OWN,
        OWN_UNSCALED,
        SIZED_NOISE,
        StepTime,
        Way,
        choose,
        everywhere,
        least_sensitive_as_fast,
        own_plans,
        paired_medians,
        paired_times,
        shown,
        step_ns,
        times_of_race,
        undecided,
    )
    from qsync_opt.runtimes.torch.job.choosing import best_step, finalists, predicted_step_ns, rounds_of, timed_together
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
    from qsync_opt.runtimes.torch.job.plan import Alternative, JobModel, JobPlan, host_bound_words, verdict
    from qsync_opt.runtimes.torch.job.planning import auto_plan, check_training, plan_job
    from qsync_opt.runtimes.torch.job.racing import batch_size, sized, split
    from qsync_opt.runtimes.torch.job.steps import parameters_put_back, profile_job_steps
    from qsync_opt.runtimes.torch.job.timing import host_share, own_ways, time_ways, ways_of
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "OWN",
    "OWN_UNSCALED",
    "SIZED_NOISE",
    "Alternative",
    "Job",
    "JobModel",
    "JobPlan",
    "PlanAdapter",
    "PlanRefresher",
    "PlanningOptions",
    "StepTime",
    "Way",
    "auto_plan",
    "batch_size",
    "best_step",
    "cache_folder",
    "check_training",
    "choose",
    "divides_by_squares",
    "everywhere",
    "example_of",
    "finalists",
    "host_bound_words",
    "host_share",
    "job_indicator",
    "least_sensitive_as_fast",
    "load_job",
    "noise_horizon",
    "noise_of",
    "own_plans",
    "own_ways",
    "paired_medians",
    "paired_times",
    "parameters_put_back",
    "plan_job",
    "predicted_step_ns",
    "profile_job_steps",
    "rounds_of",
    "save_job",
    "shown",
    "sized",
    "split",
    "step_ns",
    "time_ways",
    "timed_together",
    "times_of_race",
    "undecided",
    "verdict",
    "ways_of",
    "with_speed",
    "with_workers",
]
