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
from collections.abc import Iterable, Mapping
from dataclasses import replace

from qsync_opt.costs import CostFit, DeviceProfile, MeasuredCost, OptimizerCost
from qsync_opt.errors import ProblemError
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import PrecisionFormats, border_format, is_eight_bit
from qsync_opt.steps.costs import Case, CaseCost, StepCosts
from qsync_opt.steps.plans import nearest_available
from qsync_opt.steps.predictor import StepPredictor
from qsync_opt.training import problem_role


def profile_from_steps(
    graph: OpGraph, costs: StepCosts, formats: Mapping[str, PrecisionFormats], *, state_bytes: int
) -> DeviceProfile:
    """A device profile with the costs of a model that were observed on the device.

    ``formats`` are the precisions with their border formats, ``state_bytes`` those of the optimizer.

    Raises:
        ProblemError: The costs are of another model, or an adjustable operator was recorded in none of the precisions.
    """
    predictor = StepPredictor(graph, costs)
    outputs = tuple(dict.fromkeys(borders.output for borders in formats.values()))
    steps = _uniform_steps(graph, predictor, formats)

    def is_host_bound(plans: Iterable[str]) -> bool:
        """Whether the fastest of some uniform plans waits for the host."""
        return min((steps[p] for p in plans if p in steps), default=(0, False))[1]

    any_host_bound = is_host_bound(formats)
    casts = _casts(costs, formats, any_host_bound)
    measurements: dict[str, dict[str, MeasuredCost]] = {}
    operators: dict[str, str] = {}
    for i, operator in enumerate(graph):
        key = f"{predictor.signature(i)} {problem_role(operator)}"
        operators[operator.name] = key
        if key in measurements:
            continue
        table = measurements[key] = {}
        for precision, plans in _precisions(operator, predictor, formats).items():
            # Every input arrives in the format of the precision.
            inputs = (border_format(precision, costs.half_format),) * len(operator.inputs)
            own = precision if operator.role is Role.ADJUSTABLE else ""
            cost = predictor.cost(i, Case(predictor.signature(i), own, inputs))
            inside = casts.get(f"{costs.half_format}>{precision}") if is_eight_bit(precision) else None
            table[precision] = _measured(graph, operator, cost, inside, is_host_bound(plans))
    clear = costs.phases["zero_grad"]
    outside = [work for label, work in costs.phases.items() if label != "zero_grad"]
    # Of compiled steps the peak of the optimizer's phase includes the gradients, which the memory model adds by itself.
    gradients = sum(parameter.spec.num_bytes for parameter in graph.parameters) if costs.graphs else 0
    step_ns = sum(work.device for work in outside)
    if any_host_bound:
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


def _uniform_steps(
    graph: OpGraph, predictor: StepPredictor, formats: Mapping[str, PrecisionFormats]
) -> dict[str, tuple[int, bool]]:
    adjustable = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    available = {name: [p for p in formats if p in predictor.precisions(name)] for name in adjustable}
    if not all(available.values()):
        return {}  # `_precisions` reports the operator that was recorded in none
    passes = ("forward", "forward|end", "backward")
    after = [work for label, work in predictor.costs.phases.items() if label not in passes]
    steps = {}
    for precision in formats:
        step = predictor.plan({name: nearest_available(available[name], precision) for name in adjustable})
        host = step.host_ns + sum(work.host for work in after)
        device = sum(step.device_ns) + sum(work.device for work in after)
        steps[precision] = (max(host, device), host > device)
    return steps


def _precisions(
    operator: Operator, predictor: StepPredictor, formats: Mapping[str, PrecisionFormats]
) -> dict[str, list[str]]:
    """Precisions of an operator, each with the uniform plans (precisions) under which it runs in it."""
    role = problem_role(operator)
    if role is Role.FIXED:
        return {"FP32": list(formats)}
    if role is Role.DEPENDENT:
        outputs = dict.fromkeys(borders.output for borders in formats.values())
        return {output: [p for p, borders in formats.items() if borders.output == output] for output in outputs}
    precisions = [p for p in formats if p in predictor.precisions(operator.name)]
    if not precisions:
        raise ProblemError(f"operator {operator.name!r} was recorded in none of {', '.join(formats)}")
    return {precision: [precision] for precision in precisions}


def _measured(
    graph: OpGraph, operator: Operator, cost: CaseCost, inside: CostFit | None, host_bound: bool
) -> MeasuredCost:
    """One entry of a profile.

    Costs that edges and the memory model account for are subtracted: the quantization of an 8-bit operator's inputs
    (``inside``), and the gradients of its own parameters.
    """
    queue = "host" if host_bound else "device"
    sizes = {parameter.name: parameter.spec.num_bytes for parameter in graph.parameters}
    inside_ns = 0
    if operator.role is Role.ADJUSTABLE and inside is not None:
        inside_ns = sum(inside.ns(graph[source].output_elements) for source in operator.inputs)
    gradients = sum(sizes[name] for name in operator.parameters)
    return MeasuredCost(
        forward_ns=max(0, getattr(cost.forward, queue) - inside_ns),
        backward_ns=getattr(cost.backward, queue),
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
            fit = nothing if a == b or is_eight_bit(a) else costs.casts.get(f"{a}>{b}", nothing)
            if fit is not nothing and host_bound:
                fit = replace(fit, base_ns=max(fit.base_ns, costs.cast_host_ns))
            casts[f"{source}>{target}"] = fit
    return casts
