"""Measure whole iterations of a model under uniform plans, and leave the model as it was."""

from __future__ import annotations

from qsync_opt.costs.profile import DeviceProfile
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.model.graph import OpGraph, Role
from qsync_opt.runtimes.torch.execution.plans import ApplyOptions, apply, undo
from qsync_opt.runtimes.torch.support.iteration import TrainingExample, time_passes
from qsync_opt.runtimes.torch.support.unchanged import model_unchanged
from qsync_opt.training.calibration import MeasuredPasses, uniform_choices


def measure_uniform(
    example: TrainingExample, profile: DeviceProfile, graph: OpGraph, options: KernelOptions, repeats: int
) -> dict[str, MeasuredPasses]:
    """Forward and backward time of whole iterations in each precision of a profile.

    Each precision is applied as a plan, so that interception is in the times; on a device that has FP32 alone nothing
    is applied, because nothing would be in training. No optimizer runs.

    Args:
        example: The model and a batch; parameters, gradients, buffers and random state are put back.
        profile: Says which precisions there are.
        graph: The captured model.
        options: Of the 8-bit kernels.
        repeats: Iterations per precision that count.
    """
    measured = {}
    with model_unchanged(example.model):
        for precision in profile.formats:
            if len(profile.formats) == 1:
                measured[precision] = MeasuredPasses(**time_passes(example, repeats))
                continue
            choices = uniform_choices(graph, profile, precision)
            plan = {operator.name: choices[operator.name] for operator in graph.by_role(Role.ADJUSTABLE)}
            apply(example.model, plan, graph=graph, options=ApplyOptions(kernels=options))
            try:
                measured[precision] = MeasuredPasses(**time_passes(example, repeats))
            finally:
                undo(example.model)
    return measured
