"""Prediction by boosted trees in numpy, with calibrated intervals, and the model's file (``.npz`` without pickle).

Three ensembles predict quantiles of log(time / reference), where the reference is the roofline plus a launch per leaf.
The roofline is a floor. The interval is widened by what calibration found (conformalized quantile regression).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.costs.learned.devices import DeviceVector
from qsync_opt.costs.learned.features import FEATURE_VERSION, Matrix, feature_names, features_of
from qsync_opt.costs.learned.programs import Program
from qsync_opt.errors import NotReadyError, ProblemError, reason_of
from qsync_opt.io import Name, check_fields, check_number, decode, encode, freeze, parse_json, read_bounded, write_bytes

MODEL_FORMAT = "qsync-learned-costs/1"
LARGEST_MODEL_BYTES = 64 * 2**20
QUANTILES = (0.05, 0.5, 0.95)
"""Of the three ensembles: the ends of the interval, and the median."""
SHIPPED = "trees.npz"
_OUTSIDE = 0.25
"""How far, as a share of its range, a feature may leave the range of the training data."""
_Z = NormalDist().inv_cdf(QUANTILES[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """A predicted time in nanoseconds, with an interval that holds 90 % of such times.

    ``in_domain`` is False where the program or the device is unlike the training data; ``reason`` then says in what,
    and the interval is that of operator families that were held out of the fit.
    """

    ns: float
    low_ns: float
    high_ns: float
    in_domain: bool
    reason: str = ""


def interval_quantile(middle: float, low: float, high: float, quantile: float) -> float:
    """A quantile of a positive quantity of which the 5 %, 50 % and 95 % quantiles are known, log-normal on each side.

    Raises:
        ProblemError: ``quantile`` is not above 0 and below 1.
    """
    if not 0 < check_number(quantile, "quantile") < 1:
        raise ProblemError(f"quantile is {quantile!r}, but it must be above 0 and below 1, such as 0.9")
    z = NormalDist().inv_cdf(quantile) / _Z
    end = high if z > 0 else low
    if middle <= 0 or end <= 0 or not math.isfinite(end):
        return middle if not math.isinf(end) or z == 0 else math.inf
    return float(middle * (end / middle) ** abs(z))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a model was fitted to, and how well it predicts what it has not seen.

    Attributes:
        feature_version: Of the features.
        families: Kinds of operators in the training data.
        precisions: Formats in it.
        vectors: The devices in it.
        training_digest: Of the record.
        samples: Number of times.
        seed: Of the fit.
        note: How the times were measured.
        errors: Held-out errors, by what was held out: medians and 90th percentiles of the relative error in seconds,
            and the share of times inside the interval.
    """

    feature_version: int
    families: tuple[Name, ...]
    precisions: tuple[Name, ...]
    vectors: tuple[DeviceVector, ...]
    training_digest: Name
    samples: int
    seed: int
    note: str
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "model card")
        freeze(self, "errors", depth=2)
        if self.feature_version != FEATURE_VERSION:
            raise ProblemError(
                f"the model was fitted to features of version {self.feature_version}, but this package computes "
                f"version {FEATURE_VERSION}; fit it again with 'qsync-opt costs fit'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Ensembles of regression trees as flat arrays over all M nodes of all trees.

    Children are positions in these arrays. A leaf is its own child on both sides, so that all trees are followed for
    ``depth`` steps. ``roots_T`` are the first nodes of the T trees, of which ``counts_H`` belong to each of the H
    ensembles in turn; ``offset_H`` is what an ensemble adds to the sum over its trees.
    """

    feature_M: NDArray[np.int32]
    threshold_M: Matrix
    left_M: NDArray[np.int32]
    right_M: NDArray[np.int32]
    value_M: Matrix
    roots_T: NDArray[np.int32]
    counts_H: NDArray[np.int32]
    offset_H: Matrix
    depth: int

    def __call__(self, matrix_QF: Matrix) -> Matrix:
        """Predictions of Q queries, shape (H, Q), smallest first in each column."""
        queries, width = matrix_QF.shape
        flat = np.ascontiguousarray(matrix_QF).ravel()
        rows = np.arange(0, queries * width, max(1, width), dtype=np.int32)[:queries]
        place = np.repeat(self.roots_T[:, None], queries, axis=1)
        for _ in range(self.depth):
            value = flat.take(self.feature_M.take(place) + rows)
            goes_left = value <= self.threshold_M.take(place)
            place = np.where(goes_left, self.left_M.take(place), self.right_M.take(place))
        ends = np.cumsum(self.counts_H)
        reached = self.value_M.take(place)
        sums = [reached[end - count : end].sum(axis=0) for end, count in zip(ends, self.counts_H, strict=True)]
        result: Matrix = np.sort(np.array(sums) + self.offset_H[:, None], axis=0)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedModel:
    """Trees with their calibration.

    Attributes:
        card: What it was fitted to.
        trees: Ensembles of `QUANTILES`.
        low_F: Smallest value of each feature in the training data.
        high_F: Largest.
        radius: Added to both ends of the interval in the logarithm, where the data is like the training data.
        radius_beyond: The same elsewhere, from families held out.
    """

    card: ModelCard
    trees: Trees
    low_F: Matrix
    high_F: Matrix
    radius: float
    radius_beyond: float

    def predict(self, programs: Sequence[Program], device: DeviceVector) -> tuple[TimeEstimate, ...]:
        """Times of programs on one device.

        A program without leaves takes no time. No time is below the roofline of `DeviceVector.floor_ns`.

        Raises:
            ProblemError: The device has no peak for a precision of the programs.
        """
        busy = [program for program in programs if program.leaves]
        if not busy:
            return tuple(_NOTHING for _ in programs)
        matrix, scale, floor = features_of(busy, [device] * len(busy), self.card.families)
        reasons = self._reasons(busy, matrix)
        radius = np.array([self.radius_beyond if reason else self.radius for reason in reasons])
        low, middle, high = self.trees(matrix)
        middle_ns = np.maximum(floor, scale * np.exp(middle))
        # A negative radius narrows the interval, but never past its middle.
        low_ns = np.minimum(middle_ns, np.maximum(floor, scale * np.exp(low - radius)))
        high_ns = np.maximum(middle_ns, scale * np.exp(high + radius))
        rows = zip(middle_ns.tolist(), low_ns.tolist(), high_ns.tolist(), reasons, strict=True)
        estimates = (
            TimeEstimate(ns=ns, low_ns=low, high_ns=high, in_domain=not reason, reason=reason)
            for ns, low, high, reason in rows
        )
        return tuple(next(estimates) if program.leaves else _NOTHING for program in programs)

    def knows(self, program: Program, device: DeviceVector) -> bool:
        """Whether kind of operator, precision, and kind of device (cpu or card) occur in the training data."""
        kinds = {vector.kind for vector in self.card.vectors}
        known = program.family in self.card.families and program.precision in self.card.precisions
        return known and device.kind in kinds

    def _reasons(self, programs: Sequence[Program], matrix: Matrix) -> list[str]:
        margin = _OUTSIDE * np.maximum(self.high_F - self.low_F, 0.1)
        outside = (matrix < self.low_F - margin) | (matrix > self.high_F + margin)
        names = feature_names(self.card.families)
        families = set(self.card.families)
        reasons = [""] * len(programs)
        unlike = outside.any(axis=1) | np.array([program.family not in families for program in programs])
        for i in np.flatnonzero(unlike).tolist():
            unknown = [] if programs[i].family in families else [f"family {programs[i].family}"]
            unknown += [names[k] for k in np.flatnonzero(outside[i])[:3]]
            reasons[i] = f"unlike the training data in {', '.join(unknown)}"
        return reasons

    def label(self) -> str:
        """One line that names the model, for the sources of a plan's costs."""
        return f"learned from {self.card.samples} times on {'; '.join(vector.name for vector in self.card.vectors)}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model and its card, whole or not at all."""
        arrays = self._arrays()
        card = {**encode(self.card, version=MODEL_FORMAT), "arrays": _digest(arrays)}
        text = json.dumps(card, allow_nan=False)
        stream = io.BytesIO()
        np.savez_compressed(stream, card=np.frombuffer(text.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        write_bytes(path, stream.getvalue())

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = {name: getattr(self.trees, name) for name in _TREE_ARRAYS}
        scalars = np.array([self.radius, self.radius_beyond, self.trees.depth], dtype=np.float64)
        return {**arrays, "low_F": self.low_F, "high_F": self.high_F, "scalars": scalars}


_NOTHING = TimeEstimate(ns=0.0, low_ns=0.0, high_ns=0.0, in_domain=True)
_NODE_ARRAYS = ("feature_M", "threshold_M", "left_M", "right_M", "value_M")
_TREE_ARRAYS = (*_NODE_ARRAYS, "roots_T", "counts_H", "offset_H")


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return f"sha256:{digest.hexdigest()}"


def load_model(path: str | os.PathLike[str]) -> LearnedModel:
    """Read a model.

    Raises:
        ProblemError: Missing or damaged file, another format or feature version, arrays that do not fit each other.
    """
    where = os.fspath(path)
    try:
        data = read_bounded(path, LARGEST_MODEL_BYTES)
    except (OSError, ValueError) as failure:
        raise ProblemError(f"cannot read {where!r}: {reason_of(failure)}; give a model of costs (.npz)") from failure
    if data is None:
        raise ProblemError(f"{where}: the file has more than {LARGEST_MODEL_BYTES} bytes; fit the model again")
    return _parse_model(data, where)


def _parse_model(data: bytes, where: str) -> LearnedModel:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            if sum(member.file_size for member in members.infolist()) > LARGEST_MODEL_BYTES:
                raise ProblemError(f"{where}: the file unpacks to more than {LARGEST_MODEL_BYTES} bytes")
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        text = arrays.pop("card").tobytes().decode("utf-8")
    except (ValueError, KeyError, OSError, zipfile.BadZipFile, EOFError, NotImplementedError, TypeError) as failure:
        raise ProblemError(f"{where}: no model of costs ({failure}); fit it with 'qsync-opt costs fit'") from failure
    fields = parse_json(text, [MODEL_FORMAT], where=where, again="fit the model again")
    digest = fields.pop("arrays", None)
    if not {*_TREE_ARRAYS, "low_F", "high_F", "scalars"} == set(arrays) or digest != _digest(arrays):
        raise ProblemError(f"{where}: the arrays are not those that were written; fit the model again")
    card = decode(ModelCard, fields, where, version=MODEL_FORMAT)
    _check_arrays(arrays, card, where)
    radius, beyond, depth = (float(x) for x in arrays["scalars"])
    trees = Trees(**{name: arrays[name] for name in _TREE_ARRAYS}, depth=int(depth))
    return LearnedModel(
        card=card, trees=trees, low_F=arrays["low_F"], high_F=arrays["high_F"], radius=radius, radius_beyond=beyond
    )


def _check_arrays(arrays: Mapping[str, NDArray[Any]], card: ModelCard, where: str) -> None:
    """Refuse arrays that prediction could not follow: a digest can be written anew with them."""
    count = len(feature_names(card.families))
    nodes = arrays["feature_M"].shape
    numbers = all(a.dtype.kind in "if" and (a.dtype.kind == "i" or not np.isnan(a).any()) for a in arrays.values())
    places = {"feature_M": count, "left_M": nodes[0], "right_M": nodes[0], "roots_T": nodes[0]} if nodes else {}
    fits = (
        numbers
        and len(nodes) == 1
        and all(arrays[name].shape == nodes for name in _NODE_ARRAYS)
        and all(
            arrays[name].dtype == np.int32 and arrays[name].min(initial=0) >= 0 and arrays[name].max(initial=0) < size
            for name, size in places.items()
        )
        and arrays["offset_H"].shape == arrays["counts_H"].shape == (len(QUANTILES),)
        and arrays["counts_H"].dtype == np.int32
        and arrays["counts_H"].min() >= 0
        and arrays["roots_T"].shape == (arrays["counts_H"].sum(),)
        and arrays["low_F"].shape == arrays["high_F"].shape == (count,)
        and arrays["scalars"].shape == (3,)
        and 0 <= arrays["scalars"][2] <= 64
    )
    if not fits:
        raise ProblemError(f"{where}: the arrays do not fit each other or the features; fit the model again")


@cache
def shipped_model() -> LearnedModel:
    """The model that comes with the package.

    Raises:
        NotReadyError: This installation has none.
    """
    file = resources.files("qsync_opt.costs.learned") / SHIPPED
    if not file.is_file():
        raise NotReadyError("the package has no learned model of costs; fit one with 'qsync-opt costs fit'")
    return _parse_model(file.read_bytes(), SHIPPED)
