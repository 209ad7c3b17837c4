"""Fitting of boosted trees to a record with scikit-learn, cross-conformal calibration, and honest held-out errors.

Whoever splits a record into parts splits it by workload, family, model or device, never by rows: two precisions, two
passes or two devices of one workload are nearly the same row.
"""

from __future__ import annotations

import enum
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.costs.learned.features import FEATURE_VERSION, Matrix, features_of
from qsync_opt.costs.learned.model import QUANTILES, LearnedModel, ModelCard, TimeEstimate, Trees
from qsync_opt.costs.learned.programs import Program
from qsync_opt.costs.learned.records import CostRecord, check_times
from qsync_opt.errors import NotInstalledError, ProblemError

ITERATIONS = (50, 160, 50)
"""Trees of each of the three ensembles."""
LEAF_NODES = 24
LEARNING_RATE = (0.12, 0.1, 0.12)
FOLDS = 4
COVERAGE = QUANTILES[2] - QUANTILES[0]
_DEPTH = 8


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


def fit_trees(record: CostRecord, *, seed: int = 0, errors: bool = True, rounds: int = FOLDS) -> LearnedModel:
    """Fit a model to a record; equal records and seeds give equal models.

    Quantile ensembles are fitted to all samples. Their interval is widened by conformal scores of `FOLDS` folds of
    workloads (cross-conformal); beyond the training data, by those of folds of families. The error is minimised in the
    logarithm.

    Args:
        record: Measured times.
        seed: Of the trees.
        errors: Compute the held-out errors of the card, which takes three more fits per part.
        rounds: Of the `FOLDS` folds of calibration, how many are held out in turn.

    Raises:
        NotInstalledError: scikit-learn is missing.
        ProblemError: Too few samples, or all times are equal.

    Source: conformalized quantile regression, Romano, Patterson and Candes (NeurIPS 2019); folds as in Barber et al.,
        "Predictive inference with the jackknife+" (2021).
    """
    check_times(record)
    rows = Rows(record)
    families, matrix = rows.families, rows.matrix
    scores: dict[Split, NDArray[np.float64]] = {}
    for split in (Split.WORKLOAD, Split.FAMILY):
        of_split = np.full(len(record), np.nan)
        for _, train, test in itertools.islice(parts(record, split), rounds):
            logs_HQ = fit_heads(matrix[train], rows.target[train], seed)(matrix[test])
            of_split[test] = np.maximum(logs_HQ[0] - rows.target[test], rows.target[test] - logs_HQ[2])
        scores[split] = of_split[np.isfinite(of_split)]
    card = ModelCard(
        feature_version=FEATURE_VERSION,
        families=families,
        precisions=tuple(sorted({program.precision for program in rows.programs})),
        vectors=record.devices,
        training_digest=record.digest(),
        samples=len(record),
        seed=seed,
        note=record.note,
        errors=held_out_errors(record, seed) if errors else {},
    )
    radius = _conformal_radius(scores[Split.WORKLOAD])
    return LearnedModel(
        card=card,
        trees=fit_heads(matrix, rows.target, seed),
        low_F=matrix.min(axis=0),
        high_F=matrix.max(axis=0),
        radius=radius,
        radius_beyond=max(radius, _conformal_radius(scores[Split.FAMILY])),
    )


class Rows:
    """A record as arrays: features (N, F), times (N,) in nanoseconds, and targets log(time / reference)."""

    def __init__(self, record: CostRecord, families: Sequence[str] | None = None) -> None:
        triples = list(record.programs())
        self.programs: list[Program] = [program for program, _, _ in triples]
        self.families = tuple(families or sorted({program.family for program in self.programs}))
        features = features_of(self.programs, [device for _, device, _ in triples], self.families)
        self.matrix = features.matrix_NF
        # A time below the roofline is an error of measurement.
        self.ns: Matrix = np.maximum(features.floor_N, [float(sample.ns) for _, _, sample in triples])
        self.reference = features.reference_N
        self.target: Matrix = np.log(self.ns / self.reference)


def _conformal_radius(scores: NDArray[np.float64]) -> float:
    if not len(scores):
        return math.log(10.0)  # nothing could be held out: an interval of a factor of ten
    rank = min(1.0, math.ceil((len(scores) + 1) * COVERAGE) / len(scores))
    return float(np.quantile(scores, rank, method="higher"))


def fit_heads(matrix: Matrix, target: Matrix, seed: int) -> Trees:
    """Fit the ensembles of all quantiles to a feature matrix (N, F) and targets (N,)."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError as failure:
        raise NotInstalledError(
            "fitting learned costs needs the package 'scikit-learn'; install it: pip install 'qsync-opt[learned]'"
        ) from failure
    ensembles = []
    for quantile, iterations, rate in zip(QUANTILES, ITERATIONS, LEARNING_RATE, strict=True):
        regressor = HistGradientBoostingRegressor(
            loss="quantile",
            quantile=quantile,
            max_iter=iterations,
            learning_rate=rate,
            max_leaf_nodes=LEAF_NODES,
            max_depth=_DEPTH,
            min_samples_leaf=8,
            l2_regularization=1e-3,
            early_stopping=False,
            random_state=seed,
        )
        regressor.fit(matrix, target)
        ensembles.append(regressor)
    return _flat(ensembles)


def _flat(ensembles: Sequence[Any]) -> Trees:
    """The arrays of fitted ensembles."""
    trees = [trees[0].nodes for ensemble in ensembles for trees in ensemble._predictors]
    roots = np.cumsum([0, *(len(tree) for tree in trees)])
    columns: dict[str, list[NDArray[Any]]] = {"feature": [], "threshold": [], "left": [], "right": [], "value": []}
    for tree, root in zip(trees, roots, strict=False):
        inner, own = tree["is_leaf"] == 0, root + np.arange(len(tree))
        columns["feature"].append(np.where(inner, tree["feature_idx"], 0))
        columns["threshold"].append(np.where(inner, tree["num_threshold"], np.inf))
        columns["left"].append(np.where(inner, root + tree["left"], own))
        columns["right"].append(np.where(inner, root + tree["right"], own))
        columns["value"].append(np.where(inner, 0.0, tree["value"]))
    flat = {name: np.concatenate(values) for name, values in columns.items()}
    return Trees(
        feature_M=flat["feature"].astype(np.int32),
        threshold_M=flat["threshold"].astype(np.float64),
        left_M=flat["left"].astype(np.int32),
        right_M=flat["right"].astype(np.int32),
        value_M=flat["value"],
        roots_T=roots[:-1].astype(np.int32),
        counts_H=np.array([len(ensemble._predictors) for ensemble in ensembles], dtype=np.int32),
        offset_H=np.array([float(np.ravel(ensemble._baseline_prediction)[0]) for ensemble in ensembles]),
        depth=max(int(tree["depth"].max()) for tree in trees),
    )


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
    record: CostRecord, seed: int = 0, fit: Callable[[CostRecord, int], LearnedModel] | None = None
) -> dict[str, dict[str, float]]:
    """`summary` of each split over all its parts; a split of which the record has one part only is left out."""
    fit = fit or (lambda part, seed: fit_trees(part, seed=seed, errors=False, rounds=1))
    result = {}
    for split in Split:
        actual: list[float] = []
        estimates: list[TimeEstimate] = []
        for _, train, test in parts(record, split):
            if len(train) < len(test) // 4 or len(train) < 40:
                continue
            test_record = record.select(test)
            estimates += predict_samples(fit(record.select(train), seed), test_record)
            actual += [sample.ns for sample in test_record.samples]
        if estimates:
            result[str(split)] = summary(actual, estimates)
    return result
