"""Gains from noise on every operator's tensors to the gradient, by differentiating the gradient once more.

Let u be a random vector of signs over all parameters and s = <u, gradient of the loss>. The derivative of s for
any tensor t of the forward or backward pass is J^T u, J being the Jacobian that turns noise on t into noise on the
gradient; the mean over u of its square is, element by element, the variance that one unit of noise there adds to the
whole gradient. One double backward pass per u yields it for all tensors of all operators at once: through every
nonlinearity, residual branch, normalization, shared weight and the loss itself, exact to first order.

The derivative of a rectifier jumps where its input crosses zero, which no derivative shows, yet sign changes at
rectifiers are the main effect of small noise. The mask by which a rectifier multiplies its gradient is therefore a
tensor of its own: the square of its J^T u, element by element, times the probability that normal noise pushes that
element over zero, is the variance that sign changes add (`Probed.flips`). The noise is distributed over the elements as
`noisy_passes` measures it. Max-pooling is treated likewise: the share of a window's gradient that goes to the second
largest element is a tensor of its own, which noise changes from 0 to 1.

A step that is differentiated twice needs three to seven times the memory of a training step. Where a batch can be
divided, only some of its samples are therefore probed; see `Prober`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_opt.errors import ModelError, first_line
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.interception import Handler, OperatorCall, intercept
from qsync_opt.runtimes.torch.sensitivity.hooks import gradient_hooks
from qsync_opt.runtimes.torch.sensitivity.probes.derivatives import embedding_bag_twice, leaves_before
from qsync_opt.runtimes.torch.sensitivity.probes.rectifiers import KINKED, NoiseMeasurement
from qsync_opt.runtimes.torch.sensitivity.probes.taps import GainTapper, Key, Sums, expanded_zeros
from qsync_opt.runtimes.torch.sensitivity.products import dense_lookup
from qsync_opt.runtimes.torch.sensitivity.reductions import as_real, by_place, norm
from qsync_opt.runtimes.torch.sensitivity.signs import signs_like
from qsync_opt.sensitivity import Gain

LossOf = Callable[[], Tensor]
_SMALL = 1 << 16
"""Size at most of a parameter whose random signs are stored."""


class Probed(NamedTuple):
    """What the probes of a batch measure.

    Attributes:
        gains: By operator and tensor.
        flips: By rectifier, the variance that sign changes add at the noise ratios of ``SIGN_CHANGE_RATIOS``.
        noise: Noise-to-signal ratio at the input of each rectifier when all products round operands to INT8.
        shift: Squared norm by which the mean gradient then moves, beyond the effect of independent sign changes.
    """

    gains: dict[str, dict[str, Gain]]
    flips: dict[str, tuple[float, ...]]
    noise: Mapping[str, float]
    shift: float = 0.0


@contextlib.contextmanager
def tapped(model: nn.Module, handler: Handler) -> Iterator[None]:
    """Pass every operator, rectifier and max-pool of the model to the handler within the block."""

    def watched(call: OperatorCall) -> Any:
        if call.op_type == "embedding":
            call.args, call.kwargs = dense_lookup(call.function, call.args, call.kwargs)
        elif call.op_type == "embedding_bag" and (bags := embedding_bag_twice(call)) is not None:
            return bags
        return handler(call)

    with intercept(model, watched, (*KINKED, "embedding_bag")):
        yield


class ProbeMemoryError(ModelError):
    """There is not enough memory to differentiate a step twice."""


@contextlib.contextmanager
def twice_differentiable(option: str) -> Iterator[None]:
    """Turn errors of differentiating twice within the block into errors that name the option.

    Raises:
        ModelError: Some operation has no second derivative.
        ProbeMemoryError: There is not enough memory.
    """
    try:
        yield
    except RuntimeError as error:
        message = first_line(error)
        if isinstance(error, torch.cuda.OutOfMemoryError) or "allocate memory" in message:
            raise ProbeMemoryError(
                f"there is not enough memory to differentiate the model twice, which probing needs ({message}): "
                f"collect with smaller batches, or with {option}=0"
            ) from error
        raise ModelError(
            f"the model cannot be differentiated twice, which probing needs ({message}): collect with {option}=0"
        ) from error


class _Projection(torch.autograd.Function):
    """Sum of a gradient times random signs, of which only the derivative is used: the signs, drawn when needed.

    The sum itself is not computed; the result is 0.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, signs: Callable[[], Tensor], weighted: bool) -> Tensor:
        ctx.signs, ctx.weighted = signs, weighted
        return expanded_zeros(gradient.new_empty(()))

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        signs: Tensor = ctx.signs()
        return signs * factor if ctx.weighted else signs, None, None


class _Signs:
    """Random signs for all parameters: stored for small ones, drawn when needed for the others."""

    def __init__(self, parameters: Sequence[Tensor], key: tuple[int, ...]) -> None:
        self._parameters = parameters = [as_real(parameter.detach()) for parameter in parameters]
        self._key = key
        self._kept: dict[int, Tensor] = {}
        small = [i for i, p in enumerate(parameters) if p.numel() <= _SMALL]
        for some in by_place(small, lambda i: parameters[i]).values():
            sizes = [parameters[i].numel() for i in some]
            drawn = signs_like(parameters[some[0]], (*key, -1), sum(sizes))
            for i, part in zip(some, torch.split(drawn, sizes), strict=True):
                self._kept[i] = part.view(parameters[i].shape)

    def of(self, index: int) -> Tensor:
        """The signs of a parameter; not to be written into."""
        kept = self._kept.get(index)
        return signs_like(self._parameters[index], (*self._key, index)) if kept is None else kept


@dataclass
class _Projected:
    """Projections of the gradient onto random signs, one for each probe, computed by hooks of the parameters."""

    signs: Sequence[_Signs]
    roots: Mapping[int, Tensor] | None
    first: bool = True
    sums: list[list[Tensor]] = field(default_factory=list)
    progress: list[Tensor] = field(default_factory=list)
    weights: dict[int, Tensor] = field(default_factory=dict)

    def hook(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """Project the gradient of one parameter, and keep nothing of its size."""
        if gradient is None:  # in the second differentiation, where nothing depends on the parameter
            return None
        if self.first and gradient.requires_grad:
            self.sums.append([self._project(index, as_real(gradient), signs) for signs in self.signs])
        return expanded_zeros(gradient)

    def _project(self, index: int, gradient: Tensor, signs: _Signs) -> Tensor:
        projection: Tensor = _Projection.apply(  # type: ignore[no-untyped-call]
            gradient, functools.partial(signs.of, index), self.roots is not None
        )
        return projection if self.roots is None else projection * self._weight(self.roots.get(index), index, gradient)

    def _weight(self, root: Tensor | None, index: int, gradient: Tensor) -> Tensor:
        """The factor of a parameter's gradient that makes its variance the share of Adam's progress that it costs.

        Its square is ``1 / (2 rms_p sum of (elements rms))`` over the parameters, see
        `qsync_opt.sensitivity.scores`; 0 where a whole gradient is 0. `_per_progress` divides by the sum.
        """
        with torch.no_grad():
            if root is None:
                root = norm(gradient.detach()).double() / gradient.numel() ** 0.5
            self.progress.append(root * gradient.numel())
            weight = torch.where(root > 0, (2 * root).rsqrt(), 0.0).to(gradient.dtype)
            self.weights[index] = weight
            return weight


class ProbeSums(NamedTuple):
    """Of one probed loss: sums by operator, tensor and call, sums by rectifier, and elements that rectifiers read."""

    sums: dict[Key, Sums]
    flips: dict[str, list[float]]
    rectified: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How losses are probed.

    Attributes:
        operators: Names of the operators to probe; None for all adjustable ones.
        probes: Number of random vectors; the relative error of a gain shrinks with their number and the tensor's size.
        seed: Seed of the random vectors.
        roots: To count the variance of every parameter's gradient by the share of Adam's progress that it costs: root
            mean squares of the gradients by the number of the trained parameter, by default those of the loss.
        keep: From a tensor and its number of elements to whether to keep a sample of its derivative.
    """

    operators: frozenset[str] | None
    probes: int
    seed: int = 0
    roots: Mapping[int, Tensor] | None = None
    keep: Callable[[Key, int], bool] | None = None

    def run(self, model: nn.Module, loss_of: LossOf, noise: NoiseMeasurement) -> ProbeSums:
        """Sums of squared derivatives of one loss, given the noise at its rectifiers. Dropout draws anew in each pass.

        Raises:
            ModelError: Some operation of the model has no second derivative; there is not enough memory; with
                ``roots``, every gradient is zero.

        Source:
            Ours; the estimator of a squared norm from random signs is Hutchinson's.
        """
        copied: frozenset[str] = frozenset()
        while True:
            tapper = GainTapper(self.operators, noise.input_noise, keep=self.keep, copied=copied)
            try:
                with twice_differentiable("probes"):
                    progress = self._differentiate(model, loss_of, tapper)
                if tapper.written <= copied:
                    sums, flips = tapper.results(self.probes)
                    if self.roots is not None:
                        total = float(torch.stack(progress).sum()) / self.probes if progress else 0.0
                        _per_progress(sums, flips, total)
                    return ProbeSums(sums, flips, dict(tapper.rectified))
                copied |= tapper.written
            finally:
                tapper.clear()

    def _differentiate(self, model: nn.Module, loss_of: LossOf, tapper: GainTapper) -> list[Tensor]:
        """Pass derivatives to the tapper; returns the terms of Adam's progress, by parameter and probe."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        signs = [_Signs(parameters, (self.seed, probe)) for probe in range(self.probes)]
        projected = _Projected(signs, self.roots)
        with gradient_hooks(parameters, projected.hook):
            with tapped(model, tapper), sdpa_kernel(SDPBackend.MATH):
                loss = loss_of()
                # Functions that are differentiable once say so only if their incoming gradient requires a gradient.
                start = torch.ones_like(loss, requires_grad=True)
                torch.autograd.grad(loss, parameters, start, create_graph=True, allow_unused=True)
            del loss
            tapper.first = projected.first = False
            tapper.weights = {id(parameters[i]): weight for i, weight in projected.weights.items()}
            projections = [torch.stack(row).sum() for row in zip(*projected.sums, strict=True)]
            projected.sums.clear()
            if not projections:
                raise RuntimeError("its gradient does not depend on anything")
            leaves = leaves_before(projections)
            while projections:
                tapper.last = len(projections) == 1
                torch.autograd.grad(projections.pop(), leaves, allow_unused=True, retain_graph=not tapper.last)
                tapper.settle()
        return projected.progress


def _per_progress(sums: Mapping[Key, Sums], flips: Mapping[str, list[float]], progress: float) -> None:
    if progress <= 0:
        raise ModelError(
            "every gradient of the batch is zero, so that there is no progress of which noise could cost a share: pass "
            "a batch and a loss that the model learns from, or collect with adaptive_probes=0"
        )
    for tensor_sums in sums.values():
        for name in ("plain", "fixed", "floating", "scale"):
            setattr(tensor_sums, name, getattr(tensor_sums, name) / progress)
    for row in flips.values():
        row[:] = [value / progress for value in row]


Pair = NDArray[np.float64]
"""A gain or curvature: for uniform noise, and for noise in proportion to the elements."""


def gain_of(sums: Sums, changes: Sequence[float] | None = None) -> Pair:
    """Gains from the sums over a tensor, or from other sums ``plain``, ``fixed`` and ``floating``.

    Weights are scaled to mean 1; weights that are all zero count as 1.
    """
    plain, *weighted = (sums.plain, sums.fixed, sums.floating) if changes is None else changes
    totals = sums.fixed_weight, sums.values
    pairs = zip(weighted, totals, strict=True)
    return np.array([x * sums.elements / total if total > 0 else plain for x, total in pairs])


def adjustable_names(graph: OpGraph | None) -> frozenset[str] | None:
    """Names of the graph's adjustable operators; None for all operators without a graph."""
    return None if graph is None else frozenset(operator.name for operator in graph.by_role(Role.ADJUSTABLE))


def has_kinks(graph: OpGraph | None) -> bool:
    """Whether there may be rectifiers or max-pools."""
    return graph is None or any(operator.op_type in KINKED for operator in graph)


def sum_calls(pairs: Mapping[Key, Pair], squares: Mapping[Key, float]) -> dict[str, dict[str, Pair]]:
    """Sums over the calls of each operator, by operator and tensor.

    Statistics hold means over the calls of an operator. A call with a larger tensor is noisier, so it counts by the
    tensor's mean square (``squares``) over the mean of all calls.
    """
    calls: dict[tuple[str, str], list[float]] = {}
    for (name, tensor, _), square in squares.items():
        calls.setdefault((name, tensor), []).append(square)
    together: dict[str, dict[str, Pair]] = {}
    for key, pair in pairs.items():
        name, tensor, _ = key
        mean = sum(calls[name, tensor]) / len(calls[name, tensor])
        sums = together.setdefault(name, {})
        sums[tensor] = sums.get(tensor, 0.0) + pair * (squares[key] / mean if mean > 0 else 1.0)
    return together


def probed(
    gains: Mapping[Key, Pair], flips: Mapping[str, Sequence[float]], noise: NoiseMeasurement, parts: Sequence[ProbeSums]
) -> Probed:
    """The result of probing parts of a batch; ``flips`` end with the squared shift of the mean gradient."""
    squares = {key: sum(part.sums[key].values / max(1, part.sums[key].elements) for part in parts) for key in gains}
    # Independent sign changes move the mean too: by -P or P at an element.
    shift = noise.shift - sum(row[-1] for row in flips.values())
    return Probed(
        {
            name: {tensor: Gain(uniform=float(pair[0]), floating=float(pair[1])) for tensor, pair in tensors.items()}
            for name, tensors in sum_calls(gains, squares).items()
        },
        {name: tuple(row[:-1]) for name, row in flips.items()},
        {name: input_noise.ratio for name, input_noise in noise.input_noise.items()},
        max(0.0, shift),
    )
