"""Recorded training steps: traces, memory events and costs for the step predictor.

`profile_steps` records a model under several plans and fits their costs.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.steps.compiled import compiled_inside, compiled_plan_peak
    from qsync_opt.runtimes.torch.steps.profile import StepRecords, profile_steps, record_plan, record_steps
    from qsync_opt.runtimes.torch.steps.recording import (
        RecordingOptions,
        Stepper,
        phase,
        read_events,
        step_labels,
        trace_steps,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "RecordingOptions", "StepRecords", "Stepper", "compiled_inside", "compiled_plan_peak", "phase", "profile_steps",
    "read_events", "record_plan", "record_steps", "step_labels", "trace_steps",
]  # fmt: skip
