"""Device profiles from observed steps, so that solvers plan with observed costs.

The problem format has one time per operator and precision and prices casts on edges. Each pair therefore gets the case
in which its inputs arrive in the format of its precision; where only others were observed, the casts are removed.

The slower of the two queues decides the time of steps that follow one another, so that the one time per operator must
be taken from the right queue: an operator in a precision is charged its time on the host if the uniform plan of that
precision waits for the host, otherwise its time on the device. Work that occurs under several uniform plans (fixed and
dependent operators, the optimizer, work outside of all operators) is charged as in the fastest of them, near which
solvers search. The rows add up to the replay for that plan, and come close elsewhere; plans that are bound by the host
in one part and by the device in another are overestimated. `benchmarks/predictor.py` records the distance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from qsync_opt.costs import CostFit, DeviceProfile, MeasuredCost, OptimizerCost
from qsync_opt.errors import ProblemError
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import PrecisionFormats, number_format
from qsync_opt.steps.cases import border_format
from qsync_opt.steps.costs import CaseCost, StepCosts
from qsync_opt.steps.plans import nearest_available
from qsync_opt.steps.predictor import StepPredictor
from qsync_opt.steps.queues import Work
from qsync_opt.training import problem_role


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
        ProblemError: The costs are of another model, or an adjustable operator was recorded in none of the precisions.
    """
    predictor = StepPredictor(graph, costs)
    outputs = tuple(dict.fromkeys(borders.output for borders in formats.values()))
    queues = _Queues(graph, predictor, formats)
    casts = _casts(costs, formats, queues.host_bound(tuple(formats)))
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
            inside = casts.get(f"{costs.half_format}>{precision}") if number_format(precision).bits <= 8 else None
            host_bound = queues.host_bound(queues.plans_with(operator, precision))
            table[precision] = _measured(graph, operator, cost, inside, host_bound)
        measurements[key] = table
    clear = costs.phases["zero_grad"]
    outside = [work for label, work in costs.phases.items() if label != "zero_grad"]
    # Of compiled steps the peak of the optimizer's phase includes the gradients, which the memory model adds by itself.
    gradients = sum(parameter.spec.num_bytes for parameter in graph.parameters) if costs.graphs else 0
    step_ns = sum(work.device for work in outside)
    if queues.host_bound(tuple(formats)):
        waiting_ns = max(0, sum(work.host - work.device for work in (*outside, clear)))
        if not _charge_one_operator(measurements, operators, waiting_ns):
            step_ns += waiting_ns
    return DeviceProfile(
        device=costs.device,
        model=graph.name,
        fingerprint=graph.fingerprint(),
        options={},
        formats=dict(formats),
        measurements=measurements,
        operators=operators,
        casts=casts,
        gradient_sums=dict.fromkeys(outputs, CostFit(base_ns=0, ns_per_mi_elements=0)),
        optimizer=OptimizerCost(
            name="observed",
            step_ns=step_ns,
            zero_grad_ns=clear.device,
            state_bytes=state_bytes,
            workspace_bytes=max(0, costs.phase_peaks["optimizer"] - gradients),
        ),
    )


def _charge_one_operator(
    measurements: dict[str, dict[str, MeasuredCost]], operators: Mapping[str, str], waiting_ns: int
) -> bool:
    """Charge the host's time outside of operators to an operator with a measurement of its own; False if none has.

    The optimizer is not charged: it follows the last all-reduce, where nothing waits for a host that runs ahead.
    """
    count = Counter(operators.values())
    key = next((key for key in operators.values() if count[key] == 1), None)
    if key is None:
        return False
    table = measurements[key]
    measurements[key] = {
        precision: replace(cost, forward_ns=cost.forward_ns + waiting_ns) for precision, cost in table.items()
    }
    return True


def _time(work: Work, host_bound: bool) -> int:
    return work.host if host_bound else work.device


class _Queues:
    """The queue that decides the time of a step, under each uniform plan."""

    def __init__(self, graph: OpGraph, predictor: StepPredictor, formats: Mapping[str, PrecisionFormats]) -> None:
        self._formats = formats
        self._steps: dict[str, tuple[int, bool]] = {}
        adjustable = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
        available = {name: [p for p in formats if p in predictor.precisions(name)] for name in adjustable}
        if not all(available.values()):
            return  # the caller reports the operator that was recorded in no precision
        phases = predictor.costs.phases
        passes = ("forward", "forward|end", "backward")
        after = [work for label, work in phases.items() if label not in passes]
        for precision in formats:
            step = predictor.plan({name: nearest_available(available[name], precision) for name in adjustable})
            host = step.host_ns + sum(work.host for work in after)
            device = sum(step.device_ns) + sum(work.device for work in after)
            self._steps[precision] = (max(host, device), host > device)

    def plans_with(self, operator: Operator, precision: str) -> tuple[str, ...]:
        """Uniform plans (precisions) under which an operator runs in a precision."""
        role = problem_role(operator)
        if role is Role.ADJUSTABLE:
            return (precision,)
        if role is Role.FIXED:
            return tuple(self._formats)
        return tuple(p for p, borders in self._formats.items() if borders.output == precision)

    def host_bound(self, precisions: tuple[str, ...]) -> bool:
        """Whether the fastest of some uniform plans waits for the host."""
        steps = [self._steps[p] for p in precisions if p in self._steps]
        return min(steps)[1] if steps else False


def _precisions(
    operator: Operator, predictor: StepPredictor, formats: Mapping[str, PrecisionFormats], outputs: tuple[str, ...]
) -> tuple[str, ...]:
    role = problem_role(operator)
    if role is Role.FIXED:
        return ("FP32",)
    if role is Role.DEPENDENT:
        return outputs
    precisions = tuple(p for p in formats if p in predictor.precisions(operator.name))
    if not precisions:
        raise ProblemError(f"operator {operator.name!r} was recorded in none of {', '.join(formats)}")
    return precisions


def _uniform_cost(predictor: StepPredictor, position: int, operator: Operator, precision: str) -> CaseCost:
    """Cost in the case in which every input arrives in the format of the precision."""
    arrival = border_format(precision, predictor.costs.half_format)
    return predictor.cost_at(position, precision if operator.role is Role.ADJUSTABLE else "", arrival)


def _measured(
    graph: OpGraph, operator: Operator, cost: CaseCost, inside: CostFit | None, host_bound: bool
) -> MeasuredCost:
    """One entry of a profile.

    Costs that edges and the memory model account for are subtracted: the quantization of an 8-bit operator's inputs
    (``inside``), and the gradients of its own parameters.
    """
    sizes = {parameter.name: parameter.spec.num_bytes for parameter in graph.parameters}
    inside_ns = 0
    if operator.role is Role.ADJUSTABLE and inside is not None:
        inside_ns = sum(inside.ns(graph[source].output_elements) for source in operator.inputs)
    gradients = sum(sizes[name] for name in operator.parameters)
    return MeasuredCost(
        forward_ns=max(0, _time(cost.forward, host_bound) - inside_ns),
        backward_ns=_time(cost.backward, host_bound),
        saved_bytes=max(0, cost.forward_net_bytes - cost.result_bytes),
        saves_inputs=cost.saves_inputs,
        saves_output=cost.saves_output,
        alias_input=0 if cost.result_bytes == 0 and cost.output and cost.samples and operator.inputs else None,
        forward_workspace_bytes=max(0, cost.forward_peak_bytes - max(0, cost.forward_net_bytes)),
        backward_workspace_bytes=max(0, cost.backward_peak_bytes - gradients),
        scaled_from=cost.scaled_from,
    )


def _casts(costs: StepCosts, formats: Mapping[str, PrecisionFormats], host_bound: bool) -> dict[str, CostFit]:
    """Fitted casts; one within an element type (FP32 to TF32) costs nothing, one to 8 bits the quantizer.

    Where steps wait for the host, a cast takes at least its time there.
    """
    nothing = CostFit(base_ns=0, ns_per_mi_elements=0)
    casts: dict[str, CostFit] = {}
    for source in formats:
        for target in formats:
            if source == target:
                continue
            a, b = (name if name != "TF32" else "FP32" for name in (source, target))
            fit = nothing if a == b or a in ("INT8", "FP8") else costs.casts.get(f"{a}>{b}", nothing)
            if fit is not nothing and host_bound:
                fit = replace(fit, base_ns=max(fit.base_ns, costs.cast_host_ns))
            casts[f"{source}>{target}"] = fit
    return casts
