"""Recorded training steps: labels, traces and memory events for the step predictor.

`profile_steps` records a model under several plans and fits their costs.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.steps.compiled import call_of, compiled_inside, outermost, record_compiled_plan
    from qsync_opt.runtimes.torch.steps.compiled_peak import compiled_plan_peak
    from qsync_opt.runtimes.torch.steps.compiled_schedule import annotated_operators, read_schedules, running_nodes
    from qsync_opt.runtimes.torch.steps.profile import (
        StepRecords,
        fit_samples,
        profile_steps,
        record_plan,
        record_steps,
    )
    from qsync_opt.runtimes.torch.steps.recording import (
        RecordingOptions,
        Stepper,
        read_events,
        step_labels,
        trace_steps,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "RecordingOptions",
    "StepRecords",
    "Stepper",
    "annotated_operators",
    "call_of",
    "compiled_inside",
    "compiled_plan_peak",
    "fit_samples",
    "outermost",
    "profile_steps",
    "read_events",
    "read_schedules",
    "record_compiled_plan",
    "record_plan",
    "record_steps",
    "running_nodes",
    "step_labels",
    "trace_steps",
]
