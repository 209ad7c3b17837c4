"""The probes of one batch: its step differentiated twice, over some of its samples where possible."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from qsync_opt.errors import QSyncError, first_line
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.sensitivity.probes.curvature import probe_curvatures
from qsync_opt.runtimes.torch.sensitivity.probes.gradient import (
    Pair,
    Probe,
    Probed,
    ProbeMemoryError,
    ProbeSums,
    adjustable_names,
    gain_of,
    has_kinks,
    probed,
)
from qsync_opt.runtimes.torch.sensitivity.probes.parts import Part, add_up, parts_of
from qsync_opt.runtimes.torch.sensitivity.probes.rectifiers import NO_NOISE, PASSES, NoiseMeasurement, noisy_passes
from qsync_opt.runtimes.torch.sensitivity.probes.taps import Key
from qsync_opt.runtimes.torch.sensitivity.reductions import to_host
from qsync_opt.sensitivity import Curvature, ModelStatistics

PASSES_OF_PARTS = 3
"""Noisy forward passes, over the whole batch, as the scale of its numbers is that of the largest of all samples."""


def _elements(whole: ModelStatistics, key: Key) -> int:
    operator = whole.find(key[0])
    tensor = None if operator is None else getattr(operator, key[1])
    return 0 if tensor is None else int(tensor.elements)


def _averages(a: ProbeSums, b: ProbeSums, whole: ModelStatistics) -> bool:
    """Whether the loss is a mean over samples rather than a sum.

    The sum of a gradient's squares over samples is then larger in a part than in the batch; for a sum it is smaller.
    """
    logs = []
    for key, sums in a.sums.items():
        if key[1] == "output_gradient" and sums.elements < _elements(whole, key):
            square_sum = whole[key[0]].output_gradient.square_sum
            squares = (sums.values + b.sums[key].values) / 2
            if square_sum > 0 and squares > 0:
                logs.append(math.log(squares / square_sum))
    return not logs or statistics.median(logs) > 0


def _common(a: ProbeSums, b: ProbeSums) -> dict[Key, Pair]:
    """Gains of tensors that all samples share, from products of the two parts' derivatives instead of squares."""
    keys = [key for key, sums in a.sums.items() if sums.kept]
    ours, theirs = (to_host([x for key in keys for x in part.sums[key].kept]) for part in (a, b))
    products = map(_products, ours, theirs)
    gains = {}
    for key in keys:
        sums = a.sums[key]
        rows = [next(products) for _ in sums.kept]
        scale = sums.scale * sums.elements / sums.kept[0].shape[1] / len(rows)
        changes = [scale * sum(column) for column in zip(*rows, strict=True)]
        gains[key] = np.fmax(0.0, gain_of(sums, changes))
    return gains


def _products(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    both = (a[0] * b[0]).double()
    fixed = float(both @ a[2].double()) if len(a) > 2 else 0.0
    return float(both.sum()), fixed, float(both @ a[1].double().square())


_LOGGER = logging.getLogger(__name__)


class Prober:
    """Probes one batch; the noise at rectifiers is measured once for all kinds of gains."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        batch_statistics: ModelStatistics,
        graph: OpGraph | None,
        seed: int,
        *,
        divide: bool = True,
    ) -> None:
        """Divide the batch into parts, if it may be and can be.

        Args:
            model: The model.
            run: From the model and a batch to the loss.
            batch: The batch to probe.
            batch_statistics: Statistics of the batch.
            graph: Limits the operators to its adjustable ones.
            seed: Seed of the random vectors.
            divide: Whether some samples may represent all.
        """
        self._model, self._graph, self._seed = model, graph, seed
        self._operators = adjustable_names(graph)
        self._whole = functools.partial(run, model, batch)
        self._batch_statistics = batch_statistics
        self._run = run
        parts = parts_of(model, batch) if divide else None
        if parts is not None and not add_up(model, run, batch, parts):
            parts = None
        self._parts = None if parts is None else parts[:2]
        self._noise_by_passes: dict[tuple[int, bool], NoiseMeasurement] = {}

    def gains(self, probes: int, *, roots: Mapping[int, Tensor] | None = None) -> Probed:
        """Gains from random vectors, none with 0 probes.

        Args:
            probes: Number of random vectors.
            roots: As in `Probe`.

        Raises:
            ModelError: As `Probe.run`.
        """
        if not probes:
            return Probed({}, {}, {})
        probe = Probe(operators=self._operators, probes=probes, seed=self._seed, roots=roots)
        if self._parts is not None:
            try:
                return self._gains_of_parts(probe, self._parts)
            except ProbeMemoryError:
                raise  # the whole batch would need even more
            except (QSyncError, RuntimeError, ValueError, TypeError, LookupError) as error:
                _LOGGER.info("the batch is probed as a whole: %s", first_line(error)[:400])
            self._parts = None
        noise = self._noise(PASSES, shift=roots is None)
        sums = probe.run(self._model, self._whole, noise)
        return probed({key: gain_of(value) for key, value in sums.sums.items()}, sums.flips, noise, [sums])

    def _gains_of_parts(self, probe: Probe, parts: tuple[Part, ...]) -> Probed:
        """Gains of the batch, estimated from two parts of it.

        Raises:
            ValueError: Tensors are neither as large as in the batch nor smaller by the share of the part.
            ModelError: As `Probe.run`.

        Source:
            Ours.
        """
        whole, share = self._batch_statistics, parts[0].share
        noise = self._noise(PASSES_OF_PARTS, shift=False)

        def shared(key: Key, elements: int) -> bool:
            return not key[1].endswith("gradient") and elements == _elements(whole, key)

        probe = dataclasses.replace(probe, keep=shared)
        a, b = (
            probe.run(
                self._model,
                functools.partial(self._run, self._model, part.batch),
                noise.of_some(part.chosen, part.share),
            )
            for part in parts
        )
        if a.sums.keys() != b.sums.keys() or a.flips.keys() != b.flips.keys():
            raise ValueError("the parts took different paths through the model")
        common = _common(a, b)
        unscaled = 1.0 if _averages(a, b, whole) else share**-2
        gains: dict[Key, Pair] = {}
        for key, sums in a.sums.items():
            gain = (gain_of(sums) + gain_of(b.sums[key])) * 0.5
            backward = key[1].endswith("gradient")
            factor = 1.0 if backward else unscaled
            elements, whole_elements = sums.elements, _elements(whole, key)
            if elements == whole_elements and backward:
                gains[key] = gain  # shared by all samples: the same in every part
            elif elements == whole_elements:
                gains[key] = (gain * share + common[key] * (1 - share)) * factor
            elif elements == round(whole_elements * share):
                gains[key] = gain * ((1 / share if backward else share) * factor)
            else:
                raise ValueError(f"{key[1]} of {key[0]!r} has {elements} of {whole_elements} elements in a part")
        flips = {}
        for name, row in a.flips.items():
            signal = whole.signals.get(name)
            # What all samples share counts once, from one part: an upper bound.
            counted = 1.0 if signal is not None and signal.elements == a.rectified[name] else share
            flips[name] = [unscaled * counted * (x + y) / 2 for x, y in zip(row, b.flips[name], strict=True)]
        return probed(gains, flips, noise, [a, b])

    @property
    def divides(self) -> bool:
        """Whether some samples represent all."""
        return self._parts is not None

    def curvatures(self, probes: int) -> dict[str, dict[str, Curvature]]:
        """Traces from random vectors, none with 0 probes; raises as `probe_curvatures`."""
        if not probes:
            return {}
        return probe_curvatures(self._model, self._whole, graph=self._graph, probes=probes, seed=self._seed)

    def _noise(self, passes: int, *, shift: bool) -> NoiseMeasurement:
        if not has_kinks(self._graph):
            return NO_NOISE
        noise = self._noise_by_passes.get((passes, shift)) or self._noise_by_passes.get((passes, True))
        if noise is None:
            noise = noisy_passes(self._model, self._whole, self._operators, shift=shift, passes=passes)
            self._noise_by_passes[passes, shift] = noise
        return noise
