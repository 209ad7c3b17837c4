"""Profiles of devices that were measured in part or not at all: measured, else scaled, else learned, else roofline."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from qsync_opt.cluster import DATA_SHEETS, DataSheet, DeviceType, data_sheet
from qsync_opt.costs.learned.devices import DeviceVector, sheet_vector
from qsync_opt.costs.learned.model import LearnedModel, TimeEstimate, interval_quantile, shipped_model
from qsync_opt.costs.learned.programs import Program, cast_program, programs_of, sum_program, workload_of
from qsync_opt.costs.profile import (
    ESTIMATE_OPTION,
    CostFit,
    DeviceIdentity,
    DeviceProfile,
    MeasuredCost,
    estimated_by,
    fit_cost,
    load_profile,
)
from qsync_opt.costs.roofline import Assumptions, roofline_profile
from qsync_opt.costs.uncertainty import CostSource
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import near_match
from qsync_opt.model import Operator, OpGraph, Role, base_kind
from qsync_opt.numerics import number_format

MODEL_VERSION = "3"
"""Changes with what is predicted from the same model."""
_CAST_SIZES = (2**12, 2**16, 2**20, 2**23)
_Table = dict[str, MeasuredCost]


def learned_profile(
    graph: OpGraph,
    vector: DeviceVector,
    model: LearnedModel | None = None,
    *,
    measured: DeviceProfile | None = None,
    assumptions: Assumptions | None = None,
) -> DeviceProfile:
    """The profile of a model on a device that was measured in part or not at all.

    Each operator and precision has the best source there is: a measurement of an operator with the same signature; one
    in another precision, scaled as operators of its kind that were measured in both; the learned model, if it has a law
    for kernels of this kind or class; the roofline. `operator_cost` says which, and has the interval of learned times.
    What is kept for the backward pass follows from the kind of operator, as in `roofline_profile`. What was measured
    also corrects learned times of other operators on the device (`LearnedModel.corrected`).

    Args:
        graph: The model that is planned.
        vector: The device.
        model: None: the one that comes with the package.
        measured: A profile on the same device, of this model or of another.
        assumptions: Of the roofline.

    Returns:
        A profile whose option ``estimated_by`` counts the sources, unless every cost was measured.

    Raises:
        NotReadyError: The package has no model.
        ProblemError: ``measured`` is itself an estimate.
    """
    model = model or shipped_model()
    base = _base(graph, vector, assumptions)
    known = _measurements(measured)
    ratios = _ratios(known)
    casts = _cast_fits(base, vector, model, measured)
    sums = _sum_fits(base, vector, model)
    if measured is not None:
        sums |= measured.gradient_sums
    kinds: dict[str, str] = {}
    programs: list[Program] = []
    of_pair: dict[tuple[str, str], int] = {}
    signatures = {operator.signature: operator for operator in graph}
    for signature, operator in signatures.items():
        kinds[signature] = base_kind(operator.op_type)
        work = workload_of(graph, operator)
        empty = any(spec.elements == 0 for spec in (*work.inputs, *work.outputs))
        if operator.op_type in ("input", "getitem") or empty:
            continue
        for precision in base.cost(operator.name):
            pair = programs_of(work, precision, base.formats[precision])
            if vector.kind == "cuda":  # where views and gradients that are handed on launch nothing
                forward, backward = (p if p.moves_data else replace(p, leaves=()) for p in pair)
                pair = forward, backward
            if all(model.knows(program, vector) for program in pair if program.leaves):
                of_pair[signature, precision] = len(programs)
                programs += pair
    model = _corrected(model, vector, programs, of_pair, known, signatures, graph, base, casts)
    estimates = model.predict(programs, vector)
    measurements: dict[str, _Table] = {}
    count: Counter[CostSource] = Counter()
    unlike = 0
    for signature, operator in signatures.items():
        table = measurements[signature] = {}
        for precision, cost in base.cost(operator.name).items():
            own = known.get(signature, {})
            place = of_pair.get((signature, precision))
            if precision in own:
                table[precision], source = own[precision], CostSource.MEASURED
            elif (scaled := _scaled(own, ratios, kinds[signature], precision)) is not None:
                table[precision], source = scaled, CostSource.SCALED
            elif place is not None:
                inside = _inside_ns(graph, operator, precision, base, casts)
                both = (estimates[place], estimates[place + 1])
                floor_ns = vector.floor_ns(_without_quantization(programs[place])) if inside else 0.0
                table[precision] = _learned(cost, both, inside, math.ceil(floor_ns), vector)
                source = CostSource.LEARNED
                unlike += not all(estimate.in_domain for estimate in both)
            else:
                table[precision], source = replace(cost, source="roofline"), CostSource.ROOFLINE
            count[source] += 1
    counted = ", ".join(f"{count[source]} {source}" for source in CostSource if count[source])
    if unlike:
        counted += f"; {unlike} learned ones unlike the training data"
    options = dict(base.options) if measured is None else dict(measured.options)
    if set(count) != {CostSource.MEASURED}:
        options[ESTIMATE_OPTION] = f"{model.label(vector.kind)} ({counted})"
    return replace(
        base,
        options=options,
        measurements=measurements,
        operators={operator.name: operator.signature for operator in graph},
        casts=casts,
        gradient_sums=sums,
        optimizer=base.optimizer if measured is None else measured.optimizer,
        device=replace(base.device, versions={"learned costs": MODEL_VERSION}),
    )


class LearnedCosts:
    """Costs of device types that were measured in part or not at all.

    The device is that of the data sheet of the type's ``hardware`` (or name), or one of the model's training data.
    A ``profile`` in the cluster file is used for the operators that it has.

    Attributes:
        model: None: the one that comes with the package.
        vectors: Device type to its vector, where neither a data sheet nor the training data has it.
    """

    def __init__(self, model: LearnedModel | None = None, vectors: Mapping[str, DeviceVector] | None = None) -> None:
        self._model = model
        self._vectors = dict(vectors or {})

    def profile(self, graph: OpGraph, device: DeviceType) -> DeviceProfile:
        """Estimate the profile; see `CostModel.profile`."""
        model = self._model or shipped_model()
        measured = None if device.profile is None else load_profile(device.profile)
        vector = self._vectors.get(device.name) or known_device(device.hardware or device.name, model)
        return learned_profile(graph, vector, model, measured=measured)


def known_device(name: str, model: LearnedModel | None = None) -> DeviceVector:
    """The vector of a device of the model's training data, or of a GPU with a data sheet.

    Args:
        name: Of the device; of a card the word that data sheets have for it, such as ``H200``, or torch's whole name.
        model: None: the one that comes with the package.

    Raises:
        UnsupportedError: There is neither; the text lists what is known.
    """
    model = model or shipped_model()
    trained = {vector.name: vector for vector in model.card.vectors}
    if name in trained:
        return trained[name]
    words = _words(name)
    sheets = [sheet for sheet in DATA_SHEETS if sheet.upper() in words]
    # What was probed is better than the sheet; a card without one is known by any word of its name.
    named = {sheets[0].upper()} if sheets else words if len(words) == 1 else set()
    cards = [v for v in model.card.vectors if v.kind == "cuda" and named and named <= _words(v.name)]
    if cards:
        return max(cards, key=lambda vector: vector.multiprocessors)
    if not sheets:
        names = (*DATA_SHEETS, *trained)
        raise UnsupportedError(
            f"there is neither a data sheet nor a learned device {name!r}{near_match(name, names)}; known are "
            f"{', '.join(names)}; name one of them (hardware: NAME in a cluster file), or collect costs on the device"
        )
    return sheet_vector(data_sheet(sheets[0]))


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split())


def at_quantile(profile: DeviceProfile, quantile: float) -> DeviceProfile:
    """The profile with every time that has an interval at a quantile of it; times without one stay as they are.

    Operators are taken one by one, so the sum is not exceeded with at least that probability if errors are
    independent and ``quantile`` is above one half.

    Raises:
        ProblemError: ``quantile`` is not above 0 and below 1.
    """
    interval_quantile(1.0, 1.0, 1.0, quantile)  # refuses one that is out of range
    return with_times(profile, quantile)


def with_times(profile: DeviceProfile, quantile: float) -> DeviceProfile:
    """See `at_quantile`; 0 and 1 are the ends of the 90 % intervals."""

    def moved(cost: MeasuredCost) -> MeasuredCost:
        if not cost.interval_ns:
            return cost
        times = []
        for middle, low, high in (
            (cost.forward_ns, *cost.interval_ns[:2]),
            (cost.backward_ns, *cost.interval_ns[2:]),
        ):
            ends = {0.0: low, 1.0: high}
            value = ends[quantile] if quantile in ends else interval_quantile(middle, low, high, quantile)
            times.append(round(value))
        return replace(cost, forward_ns=times[0], backward_ns=times[1], interval_ns=())

    measurements = {
        key: {precision: moved(cost) for precision, cost in table.items()}
        for key, table in profile.measurements.items()
    }
    return replace(profile, measurements=measurements)


def has_intervals(profile: DeviceProfile) -> bool:
    """Whether any cost of a profile has an interval."""
    return any(cost.interval_ns for table in profile.measurements.values() for cost in table.values())


def _base(graph: OpGraph, vector: DeviceVector, assumptions: Assumptions | None) -> DeviceProfile:
    half = "BF16" if "BF16" in vector.peak_flops else "FP16"
    peaks = dict(vector.peak_flops)
    peaks.setdefault(half, peaks["FP32"])  # 8-bit operators deliver it, whether or not products run in it
    sheet = DataSheet(
        name=vector.name,
        peak_flops=peaks,
        bandwidth_bytes_per_s=vector.bandwidth_bytes_per_s,
        half_format=half,
        source=vector.source,
    )
    profile = roofline_profile(graph, sheet, assumptions=assumptions)
    if vector.kind == "cuda":
        return profile
    measurements = {
        key: {p: replace(cost, host_forward_ns=0, host_backward_ns=0) for p, cost in table.items()}
        for key, table in profile.measurements.items()
    }
    identity = DeviceIdentity(
        name=vector.name, kind="cpu", threads=vector.multiprocessors, versions=profile.device.versions
    )
    return replace(profile, measurements=measurements, device=identity)


def _corrected(
    model: LearnedModel,
    vector: DeviceVector,
    programs: list[Program],
    of_pair: Mapping[tuple[str, str], int],
    known: Mapping[str, Mapping[str, MeasuredCost]],
    signatures: Mapping[str, Operator],
    graph: OpGraph,
    base: DeviceProfile,
    casts: Mapping[str, CostFit],
) -> LearnedModel:
    """The model with what the measured operators of the graph tell about the others on this device."""
    measured: list[tuple[Program, float]] = []
    for (signature, precision), place in of_pair.items():
        cost = known.get(signature, {}).get(precision)
        if cost is None:
            continue
        inside = _inside_ns(graph, signatures[signature], precision, base, casts)
        times = (cost.forward_ns + inside, cost.backward_ns)
        measured += [(programs[place + i], float(ns)) for i, ns in enumerate(times) if ns > 0]
    return model.corrected(vector, [program for program, _ in measured], [ns for _, ns in measured])


def _measurements(measured: DeviceProfile | None) -> dict[str, Mapping[str, MeasuredCost]]:
    """Measured costs by the operators' signatures, which keys of measurements begin with."""
    if measured is None:
        return {}
    if estimated_by(measured) is not None:
        raise ProblemError(
            f"the profile of {measured.device.name!r} is itself an estimate ({estimated_by(measured)}); give one that "
            "was measured, or none"
        )
    return {key.partition(" ")[0]: table for key, table in measured.measurements.items()}


def _ratios(known: Mapping[str, Mapping[str, MeasuredCost]]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Kind, measured precision and other precision to the median ratios of forward and backward times."""
    pairs: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for signature, table in known.items():
        kind = base_kind(signature.partition(":")[0])
        for a, first in table.items():
            for b, second in table.items():
                if a != b and min(first.forward_ns, first.backward_ns) > 0:
                    ratio = second.forward_ns / first.forward_ns, second.backward_ns / first.backward_ns
                    pairs.setdefault((kind, a, b), []).append(ratio)
    return {
        key: (statistics.median(r[0] for r in values), statistics.median(r[1] for r in values))
        for key, values in pairs.items()
    }


def _scaled(
    own: Mapping[str, MeasuredCost], ratios: Mapping[tuple[str, str, str], tuple[float, float]], kind: str, target: str
) -> MeasuredCost | None:
    """A measured cost in another precision, scaled to ``target``; None if no operator was measured in both."""
    for precision in sorted(own, key=lambda name: abs(number_format(name).rank - number_format(target).rank)):
        if (ratio := ratios.get((kind, precision, target))) is not None:
            cost = own[precision]
            return replace(
                cost,
                forward_ns=round(cost.forward_ns * ratio[0]),
                backward_ns=round(cost.backward_ns * ratio[1]),
                scaled_from=precision,
            )
    return None


def _learned(
    cost: MeasuredCost,
    estimates: tuple[TimeEstimate, TimeEstimate],
    inside_ns: int,
    floor_ns: int,
    vector: DeviceVector,
) -> MeasuredCost:
    """A cost with learned times.

    Of an 8-bit operator's forward pass the quantization of its inputs (``inside_ns``) is subtracted, because it is a
    cost of the edges, down to the roofline of the rest.
    """
    if vector.kind == "cuda" and cost.alias_input is not None:
        return replace(cost, source="learned")  # a view takes no time on a card
    ends: list[int] = []
    times = []
    for estimate, less, least in zip(estimates, (inside_ns, 0), (floor_ns, 0), strict=True):
        low, middle, high = (max(least, round(x) - less) for x in (estimate.low_ns, estimate.ns, estimate.high_ns))
        times.append(middle)
        ends += [low, high]
    return replace(cost, forward_ns=times[0], backward_ns=times[1], source="learned", interval_ns=tuple(ends))


def _without_quantization(program: Program) -> Program:
    """The program of an 8-bit operator without the quantization of its activations, which is its first leaf."""
    return replace(program, leaves=program.leaves[1:])


def _inside_ns(
    graph: OpGraph, operator: Operator, precision: str, base: DeviceProfile, casts: Mapping[str, CostFit]
) -> int:
    if operator.role is not Role.ADJUSTABLE or number_format(precision).bits > 8:
        return 0
    fit = casts.get(f"{base.formats[precision].output}>{precision}")
    return 0 if fit is None else sum(fit.ns(graph[source].output_elements) for source in operator.inputs)


def _cast_fits(
    base: DeviceProfile, vector: DeviceVector, model: LearnedModel, measured: DeviceProfile | None
) -> dict[str, CostFit]:
    casts = dict(base.casts)
    for pair in casts:
        source, _, target = pair.partition(">")
        programs = [cast_program(source, target, n) for n in _CAST_SIZES]
        measured_kind = all(program.family in model.card.families for program in programs)
        if {source, target} != {"FP32", "TF32"} and measured_kind and all(model.knows(p, vector) for p in programs):
            casts[pair] = _learned_fit(model, vector, programs)
    if measured is not None:
        casts |= {pair: fit for pair, fit in measured.casts.items() if pair in casts}
    return casts


def _sum_fits(base: DeviceProfile, vector: DeviceVector, model: LearnedModel) -> dict[str, CostFit]:
    sums = dict(base.gradient_sums)
    for name in sums:
        programs = [sum_program(name, n) for n in _CAST_SIZES]
        if all(p.family in model.card.families and model.knows(p, vector) for p in programs):
            sums[name] = _learned_fit(model, vector, programs)
    return sums


def _learned_fit(model: LearnedModel, vector: DeviceVector, programs: list[Program]) -> CostFit:
    times = model.predict(programs, vector)
    fit = fit_cost((program.elements, max(1.0, t.ns)) for program, t in zip(programs, times, strict=True))
    return replace(fit, worst_error=0.0, samples=0)
