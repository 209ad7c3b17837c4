"""Prediction by laws in numpy, with calibrated intervals, and the model's file (``.npz`` without pickle).

The roofline is a floor of every time.
"""

from __future__ import annotations

import enum
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.costs.learned.corrections import Correction, fit_correction
from qsync_opt.costs.learned.devices import CHANGED, DeviceVector
from qsync_opt.costs.learned.intervals import COVERAGE
from qsync_opt.costs.learned.laws import class_name, class_of, kernel_of
from qsync_opt.costs.learned.programs import Program
from qsync_opt.costs.learned.terms import FEATURE_VERSION, TERMS, Matrix, terms_of
from qsync_opt.errors import NotReadyError, ProblemError, reason_of
from qsync_opt.io import Name, check_fields, check_number, decode, encode, freeze, parse_json, read_bounded, write_bytes

MODEL_FORMAT = "qsync-learned-costs/3"
LARGEST_MODEL_BYTES = 64 * 2**20
SHIPPED = "laws.npz"
_OUTSIDE = 1.5
"""How far a term may exceed the largest in the training data, as a factor."""
SIZES = (4.0, 32.0)
"""Times in launches at which the sizes of programs are parted: each size has an interval of its own."""
_NO_TIME = 1e-3
"""Share of a launch that a term may have where the training data had nothing of it."""
_Z = NormalDist().inv_cdf((1 + COVERAGE) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """A predicted time in nanoseconds, with an interval that holds 90 % of such times.

    ``in_domain`` is False where the program or the device is unlike the training data; ``reason`` then says in what,
    and the interval is that of devices or families that were held out of the fit.
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


class Level(enum.StrEnum):
    """How widely a law is valid, the narrowest first, which is also the order in which laws are looked for."""

    DEVICE_KERNEL = "device kernel"
    """One kernel on one device."""
    KERNEL = "kernel"
    """One kernel on every device of a kind."""
    DEVICE_CLASS = "device class"
    """All kernels of a class on one device."""
    CLASS = "class"
    """All kernels of a class on every device of a kind."""

    @property
    def of_device(self) -> bool:
        """Whether the law is of one device."""
        return self in (Level.DEVICE_KERNEL, Level.DEVICE_CLASS)

    @staticmethod
    def of(name: str) -> Level:
        """The level of the law with this name."""
        return Level(name.partition(": ")[0])


def law_name(level: Level, program: Program, device: DeviceVector) -> str:
    """The name of the law of a program on a device, by its level."""
    kernel = kernel_of(program) if level in (Level.DEVICE_KERNEL, Level.KERNEL) else class_name(program)
    return f"{level}: {kernel} on {device.name if level.of_device else device.kind}"


def size_of(ns_Q: Matrix, device: DeviceVector) -> NDArray[np.int64]:
    """Of which size a time predicted by a law is: launches alone, launches and work, or work."""
    return np.searchsorted(SIZES, ns_Q / device.launch_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedModel:
    """L laws with their intervals.

    Attributes:
        card: What they were fitted to.
        names: Of the laws; see `law_name`.
        weights_LT: Weights of the T terms, not negative.
        ends_LS2: Logarithms of the ends of the intervals over the prediction, by size; see `size_of`.
        most_LT: Largest value of each term in the training data, as a multiple of the device's launch time.
        corrections: What a device was found to differ by, in turn, see `corrected`; not written into the file.
        places: Of the laws, by name.
    """

    card: ModelCard
    names: tuple[str, ...]
    weights_LT: Matrix
    ends_LS2: Matrix
    most_LT: Matrix
    corrections: Mapping[str, tuple[Correction, ...]] = field(default_factory=dict)
    places: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {name: i for i, name in enumerate(self.names)})

    def predict(self, programs: Sequence[Program], device: DeviceVector) -> tuple[TimeEstimate, ...]:
        """Times of programs on one device.

        A program without leaves takes no time. No time is below the roofline of `DeviceVector.floor_ns`, and none falls
        when a size of a program grows.

        Raises:
            ProblemError: The device has no peak for a precision of the programs, or there is no law for a program.
        """
        busy = [program for program in programs if program.leaves]
        if not busy:
            return tuple(_NOTHING for _ in programs)
        unlike = self._unlike(device)
        places = self._places(busy, device, known=not unlike)
        terms_QT = terms_of(busy, self._with_known_cache(device))
        floor_Q = np.array([device.floor_ns(program) for program in busy])
        raw_Q = (terms_QT * self.weights_LT[places]).sum(axis=1)
        size_Q = size_of(raw_Q, device)
        ends_Q2 = self.ends_LS2[places, size_Q]
        outside_QT = np.greater(terms_QT / device.launch_ns, _OUTSIDE * self.most_LT[places] + _NO_TIME)
        # Sizes that were not measured are as uncertain as a device that was not.
        far = np.flatnonzero(outside_QT.any(axis=1)) if not unlike else np.empty(0, dtype=np.int64)
        if len(far):
            far_F2 = self.ends_LS2[self._places([busy[i] for i in far], device, known=False), size_Q[far]]
            ends_Q2[far, 0] = np.minimum(ends_Q2[far, 0], far_F2[:, 0])
            ends_Q2[far, 1] = np.maximum(ends_Q2[far, 1], far_F2[:, 1])
        reasons = self._reasons(busy, places, outside_QT, unlike)
        for correction in self.corrections.get(device.name, ()):
            raw_Q = np.maximum(floor_Q, raw_Q)
            logs = [correction.log(program, ns) for program, ns in zip(busy, raw_Q.tolist(), strict=True)]
            raw_Q = raw_Q * np.exp(logs)
            if correction.ends and unlike:
                ends_Q2 = np.broadcast_to(np.array(correction.ends), ends_Q2.shape)
        middle_Q = np.maximum(floor_Q, raw_Q)
        low_Q = np.maximum(floor_Q, middle_Q * np.exp(ends_Q2[:, 0]))
        rows = zip(middle_Q.tolist(), low_Q.tolist(), (middle_Q * np.exp(ends_Q2[:, 1])).tolist(), reasons, strict=True)
        estimates = (
            TimeEstimate(ns=ns, low_ns=low, high_ns=high, in_domain=not reason, reason=reason)
            for ns, low, high, reason in rows
        )
        return tuple(next(estimates) if program.leaves else _NOTHING for program in programs)

    def knows(self, program: Program, device: DeviceVector) -> bool:
        """Whether there is a law for a program: its kernel or class occurs on devices of this kind (cpu or card)."""
        return not program.leaves or any(law_name(level, program, device) in self.places for level in Level)

    def corrected(
        self, device: DeviceVector, programs: Sequence[Program], measured_ns: Sequence[float]
    ) -> LearnedModel:
        """The model with what some measured times on a device tell about its other kernels.

        Factors are found for all times, then for each class and kernel in turn, each from what the factors before it
        leave, and nearer to one the fewer times there are; those of classes are powers of the time. The intervals on a
        device that the model was not fitted to then come from these times, each left out in turn.

        Source: ours; the shrinkage is that of a random effect.
        """
        known = [i for i, program in enumerate(programs) if program.leaves and self.knows(program, device)]
        if not known:
            return self
        estimates = self.predict([programs[i] for i in known], device)
        predicted = [max(1.0, estimate.ns) for estimate in estimates]
        new = fit_correction([programs[i] for i in known], predicted, [max(1.0, measured_ns[i]) for i in known])
        earlier = self.corrections.get(device.name, ())
        return replace(self, corrections={**self.corrections, device.name: (*earlier, new)})

    def _with_known_cache(self, device: DeviceVector) -> DeviceVector:
        """The device with a cache no smaller or larger than those of the training data of its kind.

        What bytes beyond a cache cost was learned with these sizes alone: beyond the 4 MB of a T4 it would be as if all
        that an H200's 60 MB hold were too large for it.
        """
        known = [vector.cache_bytes for vector in self.card.vectors if vector.kind == device.kind]
        if not known:
            return device
        return replace(device, cache_bytes=min(max(device.cache_bytes, min(known)), max(known)))

    def _unlike(self, device: DeviceVector) -> str:
        """Why a device is none of the training data's; empty if it is one."""
        for vector in self.card.vectors:
            if vector.name == device.name:
                name, distance = vector.unlike(device)
                return f"device {device.name}, whose {name} has changed" if distance > CHANGED else ""
        return f"device {device.name}"

    def _places(self, programs: Sequence[Program], device: DeviceVector, *, known: bool) -> NDArray[np.int64]:
        levels = [level for level in Level if known or not level.of_device]
        found: dict[tuple[str, str], int] = {}
        places = []
        for program in programs:
            key = kernel_of(program), class_of(program)
            if key not in found:
                names = [law_name(level, program, device) for level in levels]
                place = next((self.places[name] for name in names if name in self.places), None)
                if place is None:
                    raise ProblemError(
                        f"no law for {names[0]!r}: neither this kernel nor one of its class was measured on a "
                        f"{device.kind}; collect costs on one, or use costs 'roofline'"
                    )
                found[key] = place
            places.append(found[key])
        return np.array(places)

    def _reasons(
        self,
        programs: Sequence[Program],
        places: NDArray[np.int64],
        outside_QT: NDArray[np.bool_],
        unlike: str,
    ) -> list[str]:
        reasons = []
        for program, place, row in zip(programs, places.tolist(), outside_QT, strict=True):
            parts = [unlike] if unlike else []
            if Level.of(self.names[place]) in (Level.DEVICE_CLASS, Level.CLASS):
                parts.append(f"family {program.family}")
            if row.any():
                parts += [TERMS[k] for k in np.flatnonzero(row)[:3]]
            reasons.append(f"unlike the training data in {', '.join(parts)}" if parts else "")
        return reasons

    def label(self, kind: str | None = None) -> str:
        """One line that names the model, for the sources of a plan's costs; of one kind of device, if it is given."""
        names = "; ".join(vector.name for vector in self.card.vectors if kind in (None, vector.kind))
        return f"learned from times on {names}" if kind else f"learned from {self.card.samples} times on {names}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model and its card, whole or not at all."""
        arrays = self._arrays()
        card = {**encode(self.card, version=MODEL_FORMAT), "laws": list(self.names), "arrays": _digest(arrays)}
        text = json.dumps(card, allow_nan=False)
        stream = io.BytesIO()
        np.savez_compressed(stream, card=np.frombuffer(text.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        write_bytes(path, stream.getvalue())

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in _ARRAYS}


_NOTHING = TimeEstimate(ns=0.0, low_ns=0.0, high_ns=0.0, in_domain=True)
_ARRAYS = ("weights_LT", "ends_LS2", "most_LT")


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
    digest, names = fields.pop("arrays", None), fields.pop("laws", None)
    if set(arrays) != set(_ARRAYS) or digest != _digest(arrays):
        raise ProblemError(f"{where}: the arrays are not those that were written; fit the model again")
    card = decode(ModelCard, fields, where, version=MODEL_FORMAT)
    _check_arrays(arrays, names, where)
    return LearnedModel(card=card, names=tuple(names), **arrays)


def _check_arrays(arrays: Mapping[str, NDArray[Any]], names: Any, where: str) -> None:
    """Refuse arrays that prediction could not follow: a digest can be written anew with them."""
    levels = {str(level) for level in Level}
    named = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    count = len(names) if named else 0
    shapes = {"weights_LT": (count, len(TERMS)), "ends_LS2": (count, len(SIZES) + 1, 2), "most_LT": (count, len(TERMS))}
    fits = (
        named
        and all(name.partition(": ")[0] in levels for name in names)
        and all(arrays[name].dtype == np.float64 and arrays[name].shape == shapes[name] for name in _ARRAYS)
        and all(np.isfinite(array).all() for array in arrays.values())
        and all((arrays[name] >= 0).all() for name in _ARRAYS if name != "ends_LS2")
        and (arrays["ends_LS2"][..., 0] <= 0).all()
        and (arrays["ends_LS2"][..., 1] >= 0).all()
    )
    if not fits:
        raise ProblemError(f"{where}: the arrays do not fit each other or the terms; fit the model again")


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
