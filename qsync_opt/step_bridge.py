"""From observed steps to a profile, so that the problem that solvers see has the costs that were observed.

The problem format has one time per operator and precision and prices casts on edges. So each pair gets the case in
which its inputs arrive as its precision wants them; where only others were met, the casts are taken off. What cannot be
told so (which launches the device waits for, gradients that a neighbour's format makes cheaper) is the distance between
the problem's rows and the replay; `benchmarks/predictor.py` records both.
"""

from __future__ import annotations

from collections.abc import Mapping

from qsync_opt.costs import CostFit, MeasuredCost
from qsync_opt.device_profile import DeviceProfile, OptimizerCost
from qsync_opt.errors import ProblemError
from qsync_opt.graph import Operator, OpGraph, Role
from qsync_opt.precision import PrecisionFormats, number_format
from qsync_opt.pricing import problem_role
from qsync_opt.step_costs import CaseCost, StepCosts
from qsync_opt.step_predictor import StepPredictor


def profile_from_steps(
    graph: OpGraph, costs: StepCosts, formats: Mapping[str, PrecisionFormats], *, state_bytes: int
) -> DeviceProfile:
    """A device profile with observed costs.

    Args:
        graph: The model.
        costs: Observed on the device.
        formats: Precisions with their border formats.
        state_bytes: Of the optimizer.

    Raises:
        ProblemError: The costs are of another model, or an adjustable operator was met in none of the precisions.
    """
    predictor = StepPredictor(graph, costs)
    outputs = tuple(dict.fromkeys(borders.output for borders in formats.values()))
    measurements: dict[str, dict[str, MeasuredCost]] = {}
    operators: dict[str, str] = {}
    for i, operator in enumerate(graph):
        key = f"{predictor.signature(i)} {problem_role(operator)}"
        operators[operator.name] = key
        if key in measurements:
            continue
        table = {}
        for precision in _precisions(operator, predictor, formats, outputs):
            cost = _uniform_cost(predictor, i, operator, precision)
            table[precision] = _measured(graph, costs, operator, precision, cost)
        measurements[key] = table
    phases = predictor.costs.phases
    nothing = CostFit(base_ns=0, ns_per_mi_elements=0)
    step, clear = phases["optimizer"], phases["zero_grad"]
    return DeviceProfile(
        device=costs.device,
        model=graph.name,
        fingerprint=graph.fingerprint(),
        options={},
        formats=dict(formats),
        measurements=measurements,
        operators=operators,
        casts=_casts(costs, formats),
        gradient_sums=dict.fromkeys(outputs, nothing),
        optimizer=OptimizerCost(
            name="observed",
            step_ns=step.device,
            zero_grad_ns=clear.device,
            state_bytes=state_bytes,
            workspace_bytes=max(0, costs.phase_peaks["optimizer"]),
        ),
    )


def _precisions(
    operator: Operator, predictor: StepPredictor, formats: Mapping[str, PrecisionFormats], outputs: tuple[str, ...]
) -> tuple[str, ...]:
    role = problem_role(operator)
    if role is Role.FIXED:
        return ("FP32",)
    if role is Role.DEPENDENT:
        return outputs
    found = tuple(p for p in formats if p in predictor.precisions(operator.name))
    if not found:
        raise ProblemError(f"operator {operator.name!r} was recorded in none of {', '.join(formats)}")
    return found


def _uniform_cost(predictor: StepPredictor, position: int, operator: Operator, precision: str) -> CaseCost:
    """Cost in the case in which every input arrives in the format that the precision computes in."""
    arrival = {"TF32": "FP32", "INT8": predictor.costs.half_format, "FP8": predictor.costs.half_format}.get(
        precision, precision
    )
    return predictor.cost_at(position, precision if operator.role is Role.ADJUSTABLE else "", arrival)


def _measured(graph: OpGraph, costs: StepCosts, operator: Operator, precision: str, cost: CaseCost) -> MeasuredCost:
    """One entry of a profile; a cpu has no launches.

    What edges and the memory model account for is taken off: the quantization of the inputs of an 8-bit operator, and
    the gradients of its own parameters.
    """
    cuda = costs.device.kind == "cuda"
    sizes = {parameter.name: parameter.spec.num_bytes for parameter in graph.parameters}
    inside_ns = inside_host_ns = 0
    if operator.role is Role.ADJUSTABLE and number_format(precision).bits <= 8:
        fit = costs.casts.get(f"{costs.half_format}>{precision}")
        if fit is not None:
            inside_ns = sum(fit.ns(graph[source].output_elements) for source in operator.inputs)
            inside_host_ns = costs.cast_host_ns * len(operator.inputs)
    gradients = sum(sizes[name] for name in operator.parameters)
    return MeasuredCost(
        forward_ns=max(0, cost.forward.device - inside_ns),
        backward_ns=cost.backward.device,
        host_forward_ns=max(0, cost.forward.host - inside_host_ns) if cuda else 0,
        host_backward_ns=cost.backward.host if cuda else 0,
        saved_bytes=max(0, cost.forward_net_bytes - cost.result_bytes),
        saves_inputs=cost.saves_inputs,
        saves_output=cost.saves_output,
        alias_input=0 if cost.result_bytes == 0 and cost.output and cost.samples and operator.inputs else None,
        forward_workspace_bytes=max(0, cost.forward_peak_bytes - max(0, cost.forward_net_bytes)),
        backward_workspace_bytes=max(0, cost.backward_peak_bytes - gradients),
    )


def _casts(costs: StepCosts, formats: Mapping[str, PrecisionFormats]) -> dict[str, CostFit]:
    """Fitted casts; what stays in its element type (FP32 to TF32) costs nothing, 8 bits what the quantizer does."""
    names = tuple(formats)
    found: dict[str, CostFit] = {}
    for source in names:
        for target in names:
            if source == target:
                continue
            a, b = (name if name != "TF32" else "FP32" for name in (source, target))
            nothing = CostFit(base_ns=0, ns_per_mi_elements=0)
            if a == b or a in ("INT8", "FP8"):
                found[f"{source}>{target}"] = nothing
            else:
                found[f"{source}>{target}"] = costs.casts.get(f"{a}>{b}", nothing)
    return found
