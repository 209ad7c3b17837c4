"""Does the indicator rank operators by the harm they do? One operator at a time in INT8.

Harm is measured in three ways:

- ``after_steps``: from one state of model and optimizer, some training steps are taken with the operator in INT8, over
  the same batches as a run that is in full precision throughout; the difference of the losses on held-out batches.
  Rounding adds a part to the loss that is odd in the error and zero in the mean; it is taken out by running every
  operator twice, with the same random numbers, once with the error as it is and once with it reversed, and averaging.
  Either the errors are each run's own, which cease to be each other's reverse as the runs part, or (``shared``) those
  that the kernel makes in the run in full precision, added in both.
  The error is magnified by a factor, the same for all operators, so that its effect stands clear of that of another
  order of summation, which training magnifies as well.
- ``at_once``: the change of the training loss when the operator runs in INT8, weights as they are; the same way.
- ``gradient``: the variance that is added to the gradient, magnified by nothing.

Each repeat has batches and random numbers of its own; the reliability says how well as many fresh repeats would agree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from estimates import ceiling, reliability, resampled, standard_error
from noisy import added_variance, exact_gradient, planned
from plans import magnified
from rank_correlation import spearman
from subjects import Batch, Subject, subject_of, train_briefly
from trials import Trials, evaluated
from work import Clock, significant

import qsync_opt
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import ApplyOptions, device_formats
from qsync_opt.runtimes.torch.sensitivity import collect_statistics, full_precision
from qsync_opt.sensitivity import IndicatorKind, NoiseOptions, sensitivities

PRECISION = "INT8"
SGD_RATE = 0.1
OPTIMIZERS = {"own": "the one it was trained by", "sgd": f"SGD at rate {SGD_RATE}"}
BACKWARD = {"half": "backward pass in 16 bits", "eight": "backward pass in 8 bits too"}
CLEAR = 2.0
"""Standard errors from zero at which the harm of one operator counts as seen."""
MEASURES = ("after_steps", "at_once", "gradient")
RATES = {"constant": 10, "falling": 30}
"""How the learning rate goes over the steps of a repeat, to the steps between two evaluations of the held-out loss."""
ERRORS = {
    "own": "its kernel's at its own operands",
    "shared": "its kernel's at the operands of the run in full precision",
}
"""Which errors a run with an operator in INT8 makes, and those of the run with reversed errors are the reverse of."""
_SHARED = ("hardware", "model", "what", "factor", "steps", "evaluated", "optimizer", "backward", "indicators")
_DEFAULTS = {"rate": "constant", "errors": ERRORS["own"]}
_BATCHES, _HARM_BATCHES = 4, 10**6


def options(offset: int, backward: str = "half") -> ApplyOptions:
    """Scales per tensor, and a place in the random stream."""
    return ApplyOptions(kernels=KernelOptions(weight_granularity="tensor", offset=offset, backward=backward))


class Bench:
    """A trained model whose state can be put back, and the losses that follow from it."""

    def __init__(self, subject: Subject, device: torch.device, train_steps: int, optimizer: str, backward: str) -> None:
        self.subject, self.backward = subject, backward
        self.model = subject.model(0, device)
        self.optimizer = train_briefly(subject, self.model, train_steps)
        if optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=SGD_RATE)
        self.graph: OpGraph = capture(self.model, subject.batch(_HARM_BATCHES), name=subject.name)
        held_out = subject.held_out(8)
        self.held_out: Batch = tuple(torch.cat(parts) for parts in zip(*held_out, strict=True))

    def batches(self, repeat: int, steps: int) -> list[Batch]:
        """Of one repeat, seen by no one else."""
        return [self.subject.batch(2 * 10**6 + repeat * steps + i) for i in range(steps)]

    def at_once(self, batch: Batch, operator: str | None, repeat: int, factor: float) -> float:
        """Training loss with an operator in INT8, weights as they are (put back before)."""
        with full_precision(), torch.no_grad():
            if operator is None:
                return float(self.model(*batch).double())
            chosen = options(repeat * 1000, self.backward)
            with planned(self.model, {operator: PRECISION}, self.graph, chosen, factor=factor):
                return float(self.model(*batch).double())


def even_part(losses: Sequence[float], clean: float) -> float:
    """Mean of the losses with error and with the reversed error, less the one without."""
    return statistics.fmean(losses) - clean


def measured_operators(graph: OpGraph, device: torch.device) -> list[str]:
    """Those that can run in INT8."""
    return [o.name for o in graph.by_role(Role.ADJUSTABLE) if ops.supports(o.op_type, PRECISION, device)]


def tables(bench: Bench, device: torch.device, scale: str, factor: float, steps: int) -> dict[str, dict[str, float]]:
    """Sensitivity of every operator at INT8 by every indicator, at the magnified error."""
    batches = [bench.subject.batch(_HARM_BATCHES + i) for i in range(_BATCHES)]
    few = scale == "tiny"
    found = collect_statistics(
        bench.model,
        batches,
        graph=bench.graph,
        probes=2 if few else 8,
        adaptive_probes=2 if few else 8,
        curvature_probes=2 if few else 16,
        whole_batches=True,
    )
    larger = magnified(found, factor)
    rounding = NoiseOptions(weight_granularity="tensor", backward=bench.backward)  # type: ignore[arg-type]
    result = {}
    horizon = qsync_opt.noise_horizon(bench.optimizer, steps=steps, statistics=found)
    for kind in IndicatorKind:
        table = sensitivities(bench.graph, larger, device_formats(device), options=rounding, kind=kind, horizon=horizon)
        result[str(kind)] = {name: table[name][PRECISION] for name in measured_operators(bench.graph, device)}
    return result


def section(
    device: torch.device,
    scale: str,
    clock: Clock,
    *,
    name: str,
    shard: int,
    factor: float,
    steps: int,
    optimizer: str = "own",
    backward: str = "half",
    rate: str = "constant",
    errors: str = "own",
    captured: bool = True,
) -> Iterator[dict[str, Any]]:
    """One record: what was measured per operator and repeat, with the indicators. A shard has repeats of its own.

    Args:
        device: Where.
        scale: Of the subject.
        clock: When to end.
        name: Of the subject.
        shard: Number of the shard; the first has the indicators.
        factor: By which errors are magnified.
        steps: Training steps of one repeat.
        optimizer: ``own`` or ``sgd``.
        backward: ``half`` or ``eight``.
        rate: ``constant`` or ``falling``.
        errors: ``own`` or ``shared``.
        captured: Whether steps run as CUDA graphs on a card.
    """
    subject = subject_of(name, device, scale=scale)
    bench = Bench(subject, device, 5 if scale == "tiny" else 300, optimizer, backward)
    names = measured_operators(bench.graph, device)
    record: dict[str, Any] = {
        "model": name,
        "shard": shard,
        "what": subject.what,
        "factor": factor,
        "steps": steps,
        "optimizer": OPTIMIZERS[optimizer],
        "rate": rate,
        "errors": ERRORS[errors],
        "backward": BACKWARD[backward],
        "evaluated": evaluated(steps, RATES[rate]),
        "indicators": tables(bench, device, scale, factor, steps) if shard == 0 else {},
        **{measure: {operator: [] for operator in names} for measure in MEASURES},
    }
    first = shard * 10**4
    for repeat in range(first, first + (2 if scale == "tiny" else 6 if shard == 0 else 1)):
        batch = bench.batches(repeat, steps)[0]
        clean = bench.at_once(batch, None, repeat, 1.0)
        exact = exact_gradient(bench.model, batch)
        for operator in names:
            both = [bench.at_once(batch, operator, repeat, sign * factor) for sign in (1, -1)]
            record["at_once"][operator].append(even_part(both, clean))
            chosen = options(repeat, backward)
            added = added_variance(bench.model, batch, exact, {operator: PRECISION}, bench.graph, chosen, 1)
            record["gradient"][operator].extend(added)
    some = bench.batches(first, steps)[0]
    trials = Trials(
        bench.model,
        bench.optimizer,
        bench.graph,
        names,
        PRECISION,
        options(first * 1000, backward),
        factor,
        (some, bench.held_out),
        captured,
        errors == "shared",
    )
    shares = [falling(step, steps) if rate == "falling" else 1.0 for step in range(steps)]
    for repeat in range(first, first + (2 if scale == "tiny" else 10**4)):
        started = clock.left()
        for operator, harm in trials.harms(bench.batches(repeat, steps), RATES[rate], shares).items():
            record["after_steps"][operator].append(harm)
        yield record
        if clock.left() < 1.05 * (started - clock.left()):
            break


def falling(step: int, steps: int) -> float:
    """Share of the learning rate in a step: in a straight line from all of it to nothing after the last one."""
    return 1.0 - step / steps


def merged(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All shards of one model as one record, with ranks and reliabilities.

    The loss after steps is the mean over the evaluations where the rate is constant, so that the loss jumps about from
    step to step, and the last one where the rate falls to zero; every evaluation is also given by itself.

    Raises:
        SystemExit: Two shards have the same number, and with it the same repeats.
    """
    numbers = [n for shard in shards for n in (shard["shards"] if "shards" in shard else [shard["shard"]])]
    if len(set(numbers)) < len(numbers):
        raise SystemExit(f"two parts are of the same shard: {sorted(numbers)}; leave one out")
    head = next(shard for shard in shards if shard["indicators"])
    names = list(head["after_steps"])
    found: dict[str, Any] = {key: head[key] for key in _SHARED}
    found |= {key: head.get(key, default) for key, default in _DEFAULTS.items()} | {"shards": sorted(numbers)}
    last_counts = found["rate"] == "falling"
    indicators = {kind: [values[name] for name in names] for kind, values in head["indicators"].items()}
    for measure in MEASURES:
        rows = [[v for shard in shards for v in shard[measure][name]] for name in names]
        repeats = [[_of_curve(v, last_counts) for v in row] for row in rows]
        found[measure] = {**_ranked(names, repeats, indicators), "values": dict(zip(names, rows, strict=True))}
        if measure == "after_steps":
            found[measure]["ahead"] = _ahead(resampled(repeats, indicators))
            found[measure]["by_step"] = {
                str(stop): _ranked(names, [[v[i] for v in row] for row in rows], indicators)
                for i, stop in enumerate(head["evaluated"])
            }
    return significant(found)  # type: ignore[no-any-return]


def _of_curve(values: float | Sequence[float], last_counts: bool) -> float:
    if isinstance(values, float):
        return values
    return values[-1] if last_counts else statistics.fmean(values)


def as_shard(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A merged record as one shard more, to be merged with new ones; None if it has no repeats of its own."""
    if any("values" not in record[measure] for measure in MEASURES):
        return None
    return {**record, **{measure: record[measure]["values"] for measure in MEASURES}}


def _ahead(drawn: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Share of the draws of repeats in which an indicator ranks better than another."""
    return {
        kind: {
            other: statistics.fmean(a > b for a, b in zip(ranks, theirs, strict=True))
            for other, theirs in drawn.items()
            if other != kind and len(theirs) == len(ranks) > 0
        }
        for kind, ranks in drawn.items()
    }


def _ranked(
    names: Sequence[str], repeats: Sequence[Sequence[float]], indicators: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Means, reliability, and how every indicator ranks them; of the operators whose harm is clear, too."""
    means = [statistics.fmean(row) for row in repeats]
    errors = [standard_error(row) for row in repeats]
    clear = [i for i in range(len(names)) if abs(means[i]) > CLEAR * errors[i]]
    certain = reliability(repeats)
    drawn = resampled(repeats, indicators)
    return {
        "repeats": len(repeats[0]),
        "mean": dict(zip(names, means, strict=True)),
        "standard_error": {n: e if math.isfinite(e) else None for n, e in zip(names, errors, strict=True)},
        "reliability": certain,
        "ceiling": ceiling(certain),
        "spearman": {kind: spearman(values, means) for kind, values in indicators.items()},
        "spearman_error": {kind: statistics.stdev(ranks) if len(ranks) > 1 else None for kind, ranks in drawn.items()},
        "clear": {
            "operators": len(clear),
            "spearman": {
                kind: spearman([values[i] for i in clear], [means[i] for i in clear])
                for kind, values in indicators.items()
            },
        },
    }
