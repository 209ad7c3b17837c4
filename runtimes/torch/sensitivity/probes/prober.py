"""The probes of one batch: its step differentiated twice, over some of its samples where possible."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qsync_opt.errors import QSyncError, first_line
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.sensitivity.probes.batch_parts import parts_of
from qsync_opt.runtimes.torch.sensitivity.probes.curvature import probe_curvatures
from qsync_opt.runtimes.torch.sensitivity.probes.gradient import (
    LossOf,
    Probe,
    Probed,
    ProbeMemoryError,
    ProbeSums,
    add_gains,
    adjustable_names,
    gain_of,
    has_kinks,
    merge_calls,
    normalized_sum,
    probe_whole,
    scale_gain,
)
from qsync_opt.runtimes.torch.sensitivity.probes.rectifiers import (
    NO_NOISE,
    PASSES,
    InputNoise,
    NoiseMeasurement,
    noisy_passes,
)
from qsync_opt.runtimes.torch.sensitivity.probes.taps import Key
from qsync_opt.runtimes.torch.sensitivity.reductions import by_place
from qsync_opt.sensitivity import Curvature, Gain, ModelStatistics

PASSES_OF_PARTS = 3
"""Noisy forward passes, over the whole batch, as the scale of its numbers is that of the largest of all samples."""


class NotDivisibleError(Exception):
    """The parts of a batch do not represent the whole."""


class PartLoss(NamedTuple):
    """The loss of some samples of a batch, their share of it, and their indices."""

    loss_of: LossOf
    share: float
    chosen: range


def probe_parts(
    model: nn.Module, parts: Sequence[PartLoss], whole: ModelStatistics, probe: Probe, noise: NoiseMeasurement
) -> Probed:
    """The result of `probe_whole` for a batch, estimated from two parts of it of one size.

    Args:
        model: The model.
        parts: Two of them.
        whole: Statistics of the whole batch.
        probe: How each of the parts is probed.
        noise: Noise at rectifiers in the whole batch.

    Raises:
        NotDivisibleError: Tensors are neither as large as in the batch nor smaller by the share of the part.
        ModelError: As `probe_gains`.

    Source:
        Ours.
    """

    def shared(key: Key, elements: int) -> bool:
        return not key[1].endswith("gradient") and elements == _elements(whole, key)

    probe = dataclasses.replace(probe, keep=shared)
    a, b = (probe.run(model, part.loss_of, noise.of_some(part.chosen, part.share)) for part in parts)
    share = parts[0].share
    if a.sums.keys() != b.sums.keys() or a.flips.keys() != b.flips.keys():
        raise NotDivisibleError("the parts took different paths through the model")
    common = _common(a, b)
    averaged = _averages(a, b, share, whole)
    gains: dict[Key, Gain] = {}
    for key, sums in a.sums.items():
        gain = scale_gain(add_gains(gain_of(sums), gain_of(b.sums[key])), 0.5)
        backward = key[1].endswith("gradient")
        factor = 1.0 if averaged or backward else share**-2
        elements, whole_elements = sums.elements, _elements(whole, key)
        if elements == whole_elements and backward:
            gains[key] = gain  # shared by all samples: the same in every part
        elif elements == whole_elements:
            gains[key] = scale_gain(add_gains(scale_gain(gain, share), scale_gain(common[key], 1 - share)), factor)
        elif elements == round(whole_elements * share):
            gains[key] = scale_gain(gain, (1 / share if backward else share) * factor)
        else:
            raise NotDivisibleError(f"{key[1]} of {key[0]!r} has {elements} of {whole_elements} elements in a part")
    factor = 1.0 if averaged else share**-2
    flips = {}
    for name, row in a.flips.items():
        signal = whole.signals.get(name)
        # What all samples share counts once, from one part: an upper bound.
        part = 1.0 if signal is not None and signal.elements == a.rectified[name] else share
        flips[name] = [factor * part * (x + y) / 2 for x, y in zip(row, b.flips[name], strict=True)]
    input_noise = {name: InputNoise(x.ratio, ()) for name, x in noise.input_noise.items()}
    return merge_calls(gains, flips, NoiseMeasurement(input_noise, 0.0), [a, b])


def _elements(whole: ModelStatistics, key: Key) -> int:
    operator = whole.find(key[0])
    tensor = None if operator is None else getattr(operator, key[1])
    return 0 if tensor is None else int(tensor.elements)


def _averages(a: ProbeSums, b: ProbeSums, share: float, whole: ModelStatistics) -> bool:
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


def _common(a: ProbeSums, b: ProbeSums) -> dict[Key, Gain]:
    """Gains of tensors that all samples share, from products of the two parts' derivatives instead of squares."""
    keys = [key for key, sums in a.sums.items() if sums.kept]
    ours, theirs = (_on_host([x for key in keys for x in part.sums[key].kept]) for part in (a, b))
    products = map(_products, ours, theirs)
    gains = {}
    for key in keys:
        sums = a.sums[key]
        rows = [next(products) for _ in sums.kept]
        scale = sums.scale * sums.elements / sums.kept[0].shape[1] / len(rows)
        plain, fixed, floating = (scale * sum(column) for column in zip(*rows, strict=True))
        uniform = normalized_sum(plain, fixed, sums.fixed_weight, sums.elements)
        floating = normalized_sum(plain, floating, sums.values, sums.elements)
        gains[key] = Gain(uniform=max(0.0, uniform), floating=max(0.0, floating))
    return gains


def _on_host(samples: Sequence[Tensor]) -> list[Tensor]:
    """The samples on the host; one transfer per type and device."""
    parts = {
        place: iter(torch.split(torch.cat([x.flatten() for x in some]).cpu(), [x.numel() for x in some]))
        for place, some in by_place(samples, lambda x: x).items()
    }
    return [next(parts[x.dtype, x.device]).view(x.shape) for x in samples]


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
        parts = (parts_of(model, batch) if divide else None) or ()
        self._parts = [PartLoss(functools.partial(run, model, part.batch), part.share, part.chosen) for part in parts]
        self._noise_by_passes: dict[tuple[int, bool], NoiseMeasurement] = {}

    def gains(self, probes: int, *, adaptive: Mapping[int, Tensor] | None = None) -> Probed:
        """Gains from random vectors, none with 0 probes.

        Args:
            probes: Number of random vectors.
            adaptive: Root mean squares of the batch's gradients, for adaptive probes.

        Raises:
            ModelError: As `probe_gains`.
        """
        if not probes:
            return Probed({}, {}, {})
        plain = adaptive is None
        probe = Probe(operators=self._operators, probes=probes, seed=self._seed, adaptive=not plain, roots=adaptive)
        if self._parts:
            try:
                noise = self._noise(PASSES_OF_PARTS, shift=False)
                return probe_parts(self._model, self._parts, self._batch_statistics, probe, noise)
            except ProbeMemoryError:
                raise  # the whole batch would need even more
            except (NotDivisibleError, QSyncError, RuntimeError, ValueError, TypeError, LookupError) as error:
                _LOGGER.info("the batch is probed as a whole: %s", first_line(error)[:400])
            self._parts = []
        return probe_whole(self._model, self._whole, probe, self._noise(PASSES, shift=plain))

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
