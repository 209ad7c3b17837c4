"""Fitting of laws to a record, calibration of their intervals on held-out parts, and honest held-out errors.

Whoever splits a record into parts splits it by workload, family, model or device, never by rows: two precisions, two
passes or two devices of one workload are nearly the same row.
"""

from __future__ import annotations

import enum
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qsync_opt.costs.learned.devices import DeviceVector
from qsync_opt.costs.learned.intervals import conformal_ends
from qsync_opt.costs.learned.laws import fit_law
from qsync_opt.costs.learned.model import SIZES, LearnedModel, Level, ModelCard, TimeEstimate, law_name, size_of
from qsync_opt.costs.learned.programs import Program
from qsync_opt.costs.learned.records import CostRecord, check_times
from qsync_opt.costs.learned.terms import FEATURE_VERSION, TERMS, Matrix, terms_of
from qsync_opt.errors import ProblemError

FOLDS = 4
MIN_SCORES = 39
"""Held-out times of a law and size from which on their interval is their own; otherwise it is that of the kind of
operator in all its precisions and passes, or of the level."""
_ONE_BY_ONE = 997
"""Folds that part families, which are few, one from another."""
_NOTHING_KNOWN = math.log(10.0)
"""Logarithm of the factor by which a time may differ where nothing was held out."""
_CLASSES = (Level.DEVICE_CLASS, Level.CLASS)
_Scores = dict[tuple[str, int], list[NDArray[np.float64]]]


class Split(enum.StrEnum):
    """What parts of a record are kept apart."""

    WORKLOAD = "workload"
    """Shapes of operators: all precisions, passes and devices of one stay together."""
    FAMILY = "family"
    """Kinds of operators."""
    MODEL = "model"
    """Captured models; random shapes are always trained on."""
    DEVICE = "device"


def group_keys(record: CostRecord, split: Split) -> list[str]:
    """The part that each sample belongs to."""
    keys = []
    for sample in record.samples:
        work = record.workloads[sample.workload]
        if split is Split.WORKLOAD:
            keys.append(f"{work.kind} {[(s.shape, s.dtype) for s in work.inputs]} {work.outputs[0].shape}")
        elif split is Split.FAMILY:
            keys.append(work.kind)
        else:
            keys.append(sample.model if split is Split.MODEL else record.devices[sample.device].name)
    return keys


def parts(record: CostRecord, split: Split, folds: int = FOLDS) -> Iterator[tuple[str, list[int], list[int]]]:
    """Pairs of training and test samples without a common part, with the name of what is held out.

    Workloads and families are dealt into ``folds`` by a hash of their names, models and devices are held out one by
    one. Of a captured model that is held out, the workloads that also occur elsewhere are not trained on either.
    """
    keys = group_keys(record, split)
    shapes = group_keys(record, Split.WORKLOAD)
    dealt = split in (Split.WORKLOAD, Split.FAMILY)
    names = [str(zlib.crc32(key.encode()) % folds) for key in keys] if dealt else keys
    for name in sorted(set(names)):
        if split is Split.MODEL and name in ("sweep", "edges"):
            continue
        test = [i for i, key in enumerate(names) if key == name]
        held_shapes = {shapes[i] for i in test} if split is Split.MODEL else set()
        train = [i for i, key in enumerate(names) if key != name and shapes[i] not in held_shapes]
        if train and test:
            yield name, train, test


def fit_laws(record: CostRecord, *, errors: bool = True, rounds: int = FOLDS) -> LearnedModel:
    """Fit a model to a record; equal records give equal models, and nothing is drawn at random.

    The interval of a law of one device is calibrated on workloads that were held out, that of a kernel on any device on
    held-out devices, and that of a class of kernels on held-out families, each in turn (cross-conformal), all of them
    by the size of the predicted time.

    Args:
        record: Measured times.
        errors: Compute the held-out errors of the card, which takes more fits.
        rounds: Of the `FOLDS` folds of calibration, and of the devices of a kind, how many are held out in turn.

    Raises:
        NotInstalledError: scipy is missing.
        ProblemError: Too few samples, or all times are equal.

    Source: ours; intervals as in Barber et al., "Predictive inference with the jackknife+" (2021), per group of
        kernels (Mondrian conformal prediction, Vovk et al. 2005).
    """
    check_times(record)
    rows = Rows(record)
    everything = np.arange(len(record))
    laws = _laws(rows, everything)
    scores: _Scores = {}
    for _, train, test in itertools.islice(parts(record, Split.WORKLOAD), rounds):
        _add_scores(scores, rows, test, _laws(rows, np.array(train)), None)
    folds_of: Counter[str] = Counter()
    for _, train, test in parts(record, Split.DEVICE):
        kind = rows.devices[test[0]].kind
        folds_of[kind] += 1
        if folds_of[kind] <= rounds:
            others = [i for i in train if rows.devices[i].kind == kind]
            without = _laws(rows, np.array(others, dtype=int))
            _add_scores(scores, rows, test, without, {rows.devices[i].name for i in others})
    for _, train, test in parts(record, Split.FAMILY, _ONE_BY_ONE):
        classes = {rows.names[i][-1] for i in test}
        near = [i for i in train if rows.names[i][-1] in classes]
        _add_scores(scores, rows, test, _laws(rows, np.array(near, dtype=int), _CLASSES), None)
    names = tuple(sorted(laws))
    kinds = {place: device.kind for device in record.devices for place in (device.name, device.kind)}
    launches = rows.terms / np.array([[device.launch_ns] for device in rows.devices])
    most = {name: launches[places].max(axis=0) for name, places in _groups(rows, everything).items()}
    card = ModelCard(
        feature_version=FEATURE_VERSION,
        families=tuple(sorted({program.family for program in rows.programs})),
        precisions=tuple(sorted({program.precision for program in rows.programs})),
        vectors=tuple(device for i, device in enumerate(record.devices) if i in {s.device for s in record.samples}),
        training_digest=record.digest(),
        samples=len(record),
        note=record.note,
        errors=held_out_errors(record) if errors else {},
    )
    return LearnedModel(
        card=card,
        names=names,
        weights_LT=np.array([laws[name] for name in names]),
        ends_LS2=_intervals(names, {key: np.concatenate(logs) for key, logs in scores.items()}, kinds),
        most_LT=np.array([most[name] for name in names]),
    )


class Rows:
    """A record as arrays: terms (N, T) and times (N,) in nanoseconds; programs, devices and names of laws by row."""

    def __init__(self, record: CostRecord) -> None:
        triples = list(record.programs())
        self.programs: list[Program] = [program for program, _, _ in triples]
        self.devices: list[DeviceVector] = [device for _, device, _ in triples]
        self.names = [[law_name(level, program, device) for level in Level] for program, device, _ in triples]
        self.terms: Matrix = np.zeros((len(triples), len(TERMS)))
        self.floor: Matrix = np.array([device.floor_ns(program) for program, device, _ in triples])
        for device in record.devices:
            places = [i for i, other in enumerate(self.devices) if other is device]
            self.terms[places] = terms_of([self.programs[i] for i in places], device)
        # A time below the roofline is an error of measurement.
        self.ns: Matrix = np.maximum(self.floor, [float(sample.ns) for _, _, sample in triples])


def _groups(rows: Rows, places: NDArray[np.int64], levels: Sequence[Level] = tuple(Level)) -> dict[str, list[int]]:
    """Name of each law to the rows that it is fitted to, among ``places``; the widest laws first."""
    groups: dict[str, list[int]] = {}
    for number, level in reversed(list(enumerate(Level))):
        for i in places.tolist() if level in levels else ():
            groups.setdefault(rows.names[i][number], []).append(i)
    return groups


def _laws(rows: Rows, places: NDArray[np.int64], levels: Sequence[Level] = tuple(Level)) -> dict[str, Matrix]:
    """The weights of every law of some levels; each is held near the next wider one."""
    laws: dict[str, Matrix] = {}
    groups = _groups(rows, places, levels)
    for name, members in groups.items():
        names = rows.names[members[0]]
        wider = names[names.index(name) + 1 :]
        if wider and groups[wider[0]] == members:
            laws[name] = laws[wider[0]]  # there is no other device, or no other family
        else:
            laws[name] = fit_law(rows.terms[members], rows.ns[members], laws[wider[0]] if wider else None)
    return laws


def _add_scores(
    scores: _Scores, rows: Rows, places: Sequence[int], laws: dict[str, Matrix], known: set[str] | None
) -> None:
    """Add logarithms of measured over predicted times by the law that predicts, and size.

    ``known`` devices, or all, have their own laws.
    """
    groups: dict[str, list[int]] = {}
    for i in places:
        own = known is None or rows.devices[i].name in known
        names = (name for level, name in zip(Level, rows.names[i], strict=True) if own or not level.of_device)
        if (name := next((name for name in names if name in laws), None)) is not None:
            groups.setdefault(name, []).append(i)
    for name, members in groups.items():
        raw = rows.terms[members] @ laws[name]
        logs = np.log(rows.ns[members] / np.maximum(raw, np.maximum(rows.floor[members], 1.0)))
        sizes = np.array([size_of(ns, rows.devices[i]) for ns, i in zip(raw, members, strict=True)])
        for size in np.unique(sizes).tolist():
            scores.setdefault((name, size), []).append(logs[sizes == size])


def _intervals(
    names: Sequence[str], scores: dict[tuple[str, int], NDArray[np.float64]], kinds: Mapping[str, str]
) -> Matrix:
    """Logarithms of both ends over the prediction, shape (L, S, 2), per law and size.

    Errors on processors tell nothing about cards: ``kinds`` are those of the devices, by name (and by kind).
    """
    pools: dict[tuple[str, ...], list[NDArray[np.float64]]] = {}
    for (name, size), logs in scores.items():
        for key in _pools(name, size, kinds):
            pools.setdefault(key, []).append(logs)
    pooled = {key: np.concatenate(logs) for key, logs in pools.items()}
    widest = {}
    for kind in set(kinds.values()):
        wide = ((kind, level) for level in Level if level != Level.DEVICE_KERNEL)
        beyond = [conformal_ends(pooled[key]) for key in wide if key in pooled]
        ends = min((a for a, _ in beyond), default=-_NOTHING_KNOWN), max((b for _, b in beyond), default=_NOTHING_KNOWN)
        widest[kind] = ends
    ends_LS2 = np.empty((len(names), len(SIZES) + 1, 2))
    for (i, name), size in itertools.product(enumerate(names), range(len(SIZES) + 1)):
        *narrow, last = (pooled.get(key, ()) for key in _pools(name, size, kinds))
        enough = next((logs for logs in narrow if len(logs) >= MIN_SCORES), last)
        ends_LS2[i, size] = conformal_ends(enough) if len(enough) else widest[kinds[_place(name)]]
    return ends_LS2


def _pools(name: str, size: int, kinds: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Keys of the pools of scores for a law and a size, the narrowest first.

    What is exchangeable are workloads, devices and families: many for a kernel on a device, few for wider laws.
    """
    level, kind = Level.of(name), kinds[_place(name)]
    wide = (kind, level, str(size)), (kind, level)
    if level != Level.DEVICE_KERNEL:
        return wide
    family = name.partition(": ")[2].partition(" ")[0]
    return (name, str(size)), (kind, level, str(size), family), *wide


def _place(name: str) -> str:
    """The device or the kind of device that a law is of."""
    return name.partition(" on ")[2]


def predict_samples(model: LearnedModel, record: CostRecord) -> tuple[TimeEstimate, ...]:
    """The model's estimate of every sample of a record."""
    triples = list(record.programs())
    result: list[TimeEstimate | None] = [None] * len(triples)
    for device in record.devices:
        places = [i for i, (_, of_sample, _) in enumerate(triples) if of_sample is device]
        for i, estimate in zip(places, model.predict([triples[i][0] for i in places], device), strict=True):
            result[i] = estimate
    return tuple(estimate for estimate in result if estimate is not None)


def summary(actual_ns: Sequence[float], estimates: Sequence[TimeEstimate]) -> dict[str, float]:
    """Median and 90th percentile of the relative error in seconds, the share inside the interval, and the number."""
    if not estimates:
        raise ProblemError("no time to compare with; give a record with samples")
    actual = np.array(actual_ns)
    errors = np.abs(np.array([e.ns for e in estimates]) - actual) / actual
    inside = [e.low_ns <= ns <= e.high_ns for e, ns in zip(estimates, actual, strict=True)]
    return {
        "median": round(float(np.median(errors)), 4),
        "p90": round(float(np.quantile(errors, 0.9)), 4),
        "coverage": round(float(np.mean(inside)), 4),
        "in_domain": round(float(np.mean([e.in_domain for e in estimates])), 4),
        "samples": len(estimates),
    }


def held_out_errors(
    record: CostRecord, fit: Callable[[CostRecord], LearnedModel] | None = None
) -> dict[str, dict[str, float]]:
    """`summary` of each split over all its parts; a split of which the record has one part only is left out.

    Of a record of processors and cards the summaries are by kind: ``workload, cpu``. Times without a law, which a model
    refuses, do not count.
    """
    fit = fit or (lambda part: fit_laws(part, errors=False, rounds=2))
    kinds = sorted({record.devices[sample.device].kind for sample in record.samples})
    result = {}
    for split in Split:
        of_kind: dict[str, tuple[list[float], list[TimeEstimate]]] = {kind: ([], []) for kind in kinds}
        for _, train, test in parts(record, split):
            if len(train) < len(test) // 4 or len(train) < 40:
                continue
            model, held = fit(record.select(train)), record.select(test)
            known = [i for i, (program, device, _) in enumerate(held.programs()) if model.knows(program, device)]
            for i, estimate in zip(known, predict_samples(model, held.select(known)), strict=True):
                actual, estimates = of_kind[held.devices[held.samples[i].device].kind]
                actual.append(held.samples[i].ns)
                estimates.append(estimate)
        for kind, (actual, estimates) in of_kind.items():
            if estimates:
                result[str(split) if len(kinds) == 1 else f"{split}, {kind}"] = summary(actual, estimates)
    return result
