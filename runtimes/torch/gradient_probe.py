"""How far does noise really reach? Gains of every operator's tensors, by differentiating the gradient once more.

Let u be a random vector of signs over all parameters and s = <u, gradient of the loss>. The derivative of s for
any tensor t of the forward or backward pass is J^T u, J being the Jacobian that turns noise on t into noise on the
gradient; the mean over u of its square is, element by element, the variance that one unit of noise there adds to the
whole gradient. One double backward pass per u yields it for all tensors of all operators at once: through every
nonlinearity, residual branch, normalization, shared weight and the loss itself, exact to first order.

The derivative of a rectifier jumps where its input crosses zero, which no derivative sees, yet flips of rectifiers are
what small noise mostly does in a network of them. In a second pass the jump is smoothed over a width proportional to a
nominal noise, chosen so that the energy of the smoothed change equals that of the flips; it grows with the square root
of the noise-to-signal ratio, which is how ``Gain.kink`` is applied. Ties of max-pooling are not treated so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_opt.errors import ModelError
from qsync_opt.graph import OpGraph, Role
from qsync_opt.rounding import Granularity
from qsync_opt.runtimes.torch.interception import Interception, OperatorCall
from qsync_opt.runtimes.torch.product_calls import ADJUSTABLE, operand_slots, replace_operands
from qsync_opt.runtimes.torch.random_signs import RandomSigns
from qsync_opt.runtimes.torch.rounding_error import stacked_errors
from qsync_opt.statistics import GRADIENTS, OPERANDS, Gain

_NOMINAL_RATIO = 1e-3
# With a normal window of width h = c * sigma the squared change has the energy p(0) * sigma / (2 sqrt(pi) c), the flips
# have p(0) * E|noise| = p(0) * sigma * sqrt(2 / pi); they agree for c = 1 / (2 sqrt(2)).
_WIDTH = 1.0 / (2.0 * math.sqrt(2.0))
_RECTIFIERS = ("relu",)
# Noise in the forward pass flips rectifiers; noise in gradients does not.
_QUANTIZED = ("first", "second", "output_gradient")
FORWARD_TENSORS = (*OPERANDS, "output")
"""The tensors of an operator's forward pass."""


class _SmoothStep(torch.autograd.Function):
    """1 where the input is positive, with the derivative of a step smoothed by a normal window."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, width: Tensor) -> Tensor:
        ctx.save_for_backward(z, width)
        return (z > 0).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, width = ctx.saved_tensors
        return grad * torch.exp(-0.5 * (z / width).square()) / (width * math.sqrt(2 * math.pi)), None


class _SmoothRectifier(torch.autograd.Function):
    """A rectifier, exact in value and first derivative, whose second derivative is that of the smoothed step."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, width: Tensor) -> Tensor:
        ctx.save_for_backward(z, width)
        return z.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, width = ctx.saved_tensors
        return grad * _SmoothStep.apply(z, width), None  # type: ignore[no-untyped-call]


class Tapper:
    """Handler of an interception: keeps a node of the autograd graph for every tensor that can be noisy.

    ``wanted`` limits the operators (None: all adjustable ones); ``smooth`` replaces rectifiers by smoothed ones;
    ``gradients`` also taps what the backward pass computes.
    """

    def __init__(self, wanted: frozenset[str] | None, *, smooth: bool, gradients: bool = True) -> None:
        self._wanted = wanted
        self._smooth = smooth
        self._gradients = gradients
        self.rectifiers = 0
        self.open = True
        self.taps: list[tuple[str, str, Tensor]] = []

    def __call__(self, call: OperatorCall) -> Any:
        """Run an operator on taps of its operands, and hand on a tap of its result."""
        if call.op_type in _RECTIFIERS:
            return self._rectify(call)
        if call.op_type not in ADJUSTABLE or (self._wanted is not None and call.name not in self._wanted):
            return call.run()
        slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
        lead = int(call.op_type == "embedding")
        operands = []
        for operand, gradient, slot in zip(OPERANDS[lead:], GRADIENTS[lead:], slots, strict=False):
            needed = slot.tensor.requires_grad
            tap = slot.tensor.view_as(slot.tensor) if needed else slot.tensor.detach().requires_grad_()
            if needed and self._gradients:
                self._tap_gradient(call.name, gradient, tap)
            self.taps.append((call.name, operand, tap))
            operands.append(tap)
        args, kwargs = replace_operands(call.args, call.kwargs, slots, operands)
        output = call.run(*args, **kwargs)
        output = output.view_as(output)
        if self._gradients:
            self._tap_gradient(call.name, "output_gradient", output)
        self.taps.append((call.name, "output", output))
        return output.clone()  # what follows may write into it

    def _tap_gradient(self, name: str, tensor: str, node: Tensor) -> None:
        def hook(gradient: Tensor) -> Tensor | None:
            if not self.open:  # the second differentiation passes here again
                return None
            known = gradient.requires_grad
            tap = gradient.view_as(gradient) if known else gradient.detach().requires_grad_()
            self.taps.append((name, tensor, tap))
            return tap

        node.register_hook(hook)  # type: ignore[no-untyped-call]

    def _rectify(self, call: OperatorCall) -> Tensor:
        self.rectifiers += 1
        z: Tensor = call.args[0] if call.args else call.kwargs["input"]
        if not self._smooth:
            return torch.relu(z)
        spread = z.detach().square().mean().sqrt()
        width = (_WIDTH * math.sqrt(_NOMINAL_RATIO) * spread).clamp(min=torch.finfo(z.dtype).tiny)
        return _SmoothRectifier.apply(z, width)  # type: ignore[no-untyped-call,no-any-return]


@contextlib.contextmanager
def tapped(model: nn.Module, handler: Tapper) -> Iterator[None]:
    """Within the block, the handler sees every operator and rectifier of the model."""
    interception = Interception(model, handler, kinds=_RECTIFIERS)
    try:
        yield
    finally:
        interception.remove()


def refuse_dead_ends(gradients: Sequence[Tensor | None]) -> None:
    """Raise if a gradient came through a function marked as differentiable once.

    Autograd itself would raise only if the derivative had to pass there; taps before it would silently get none.
    """
    nodes = [gradient.grad_fn for gradient in gradients if gradient is not None]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("a function is marked with once_differentiable")
        nodes.extend(following for following, _ in node.next_functions)


def _noise_shapes(tensor: str, values: Tensor) -> tuple[Tensor | None, Tensor]:
    """How fixed-point and floating noise spread over the elements of a tensor; None is evenly.

    With one scale per tensor, zeros and numbers on the grid do not err, and numbers below a step err in proportion.
    """
    uniform = None
    if tensor in _QUANTIZED:
        amax = torch.linalg.vector_norm(values, float("inf"))
        uniform = stacked_errors(values, ("INT8/tensor",), {Granularity.TENSOR: amax}).stochastic[0]
    return uniform, values.square()


def _weighted(squares: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of squares times weights of mean 1; weights that are all zero count as none."""
    plain = squares.sum(dtype=torch.float64)
    if weights is None:
        return plain
    mean = weights.mean(dtype=torch.float64)
    weighted = (squares * weights).sum(dtype=torch.float64) / mean.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(mean > 0, weighted, plain)


def _metric(gradient: Tensor, exponent: float) -> Tensor:
    """By what a parameter's gradient is multiplied before its variance counts; 0 where all of it is 0."""
    mean_square = gradient.detach().square().mean(dtype=torch.float64)
    found = mean_square.pow(-0.5 * exponent)
    return torch.where(mean_square > 0, found, torch.zeros_like(found)).to(gradient.dtype)


def _squares(
    loss_of: Callable[[], Tensor], model: nn.Module, tapper: Tapper, probes: int, seed: int, exponent: float = 0.0
) -> dict[tuple[str, str], Tensor]:
    """Per operator and tensor: mean over probes of the squared derivatives, summed over elements with two weights.

    Weights are those of `_noise_shapes`, over their mean.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    random = RandomSigns(seed)
    totals: dict[tuple[str, str], Tensor] = {}
    try:
        with tapped(model, tapper), sdpa_kernel(SDPBackend.MATH):
            loss = loss_of()
            # What can be differentiated only once is marked as such only if what arrives at it requires a gradient.
            start = torch.ones_like(loss, requires_grad=True)
            gradients = torch.autograd.grad(loss, parameters, start, create_graph=True, allow_unused=True)
        tapper.open = False
        refuse_dead_ends(gradients)
        used = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
        metrics = [_metric(g, exponent) if exponent else None for g in used]
        for probe in range(probes):
            signs = [random.like(g.detach()) for g in used]
            signs = [u if m is None else u.mul_(m) for u, m in zip(signs, metrics, strict=True)]
            projection = torch.stack([(g * u).sum() for g, u in zip(used, signs, strict=True)]).sum()
            derivatives = torch.autograd.grad(
                projection, [tap for *_, tap in tapper.taps], allow_unused=True, retain_graph=probe + 1 < probes
            )
            for (name, tensor, tap), derivative in zip(tapper.taps, derivatives, strict=True):
                if derivative is None:  # typed as if it never were
                    continue  # type: ignore[unreachable]
                squares = derivative.square()
                sums = [_weighted(squares, shape) for shape in _noise_shapes(tensor, tap.detach())]
                found = torch.stack(sums) / probes
                totals[name, tensor] = totals.get((name, tensor), 0) + found
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"the model cannot be differentiated twice, which probing needs ({reason}): collect with probes=0"
        ) from error
    finally:
        # Hooks keep the tapper alive from inside the autograd graph; without its taps it does not keep the graph.
        tapper.taps.clear()
    return totals


def probe_gains(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    *,
    graph: OpGraph | None = None,
    probes: int,
    seed: int = 0,
    exponent: float = 0.0,
) -> dict[str, dict[str, Gain]]:
    """Gains of every tensor of every adjustable operator for one batch.

    Needs the memory of a forward and backward pass that is differentiated again, several times that of a training step.
    Dropout draws anew in each pass.

    Args:
        model: The model.
        loss_of: Runs the model on the batch and returns the loss.
        graph: Limits the operators to its adjustable ones.
        probes: Random vectors; the relative error of a gain shrinks with their number and with the tensor's size.
        seed: Of the random vectors.
        exponent: The variance of every parameter's gradient counts divided by this power of its mean square: 0 for
            plain variance, 1/2 for the progress that Adam loses, 1 for the size of what Adam adds to its steps.

    Returns:
        Operator to tensor to gain.

    Raises:
        ModelError: Some operation of the model has no second derivative.

    Source:
        Ours; the estimator of a squared norm from random signs is Hutchinson's.
    """
    wanted = None if graph is None else frozenset(operator.name for operator in graph.by_role(Role.ADJUSTABLE))
    tapper = Tapper(wanted, smooth=False)
    plain = _squares(loss_of, model, tapper, probes, seed, exponent)
    smoothed = plain
    if tapper.rectifiers:
        smoothed = _squares(loss_of, model, Tapper(wanted, smooth=True), probes, seed, exponent)
    root = math.sqrt(_NOMINAL_RATIO)
    gains: dict[str, dict[str, Gain]] = {}
    for (name, tensor), values in plain.items():
        uniform, floating = values.tolist()
        kinks = [0.0, 0.0]
        if tensor in FORWARD_TENSORS:
            kinks = ((smoothed[name, tensor] - values).clamp(min=0) * root).tolist()
        gains.setdefault(name, {})[tensor] = Gain(
            uniform=uniform, floating=floating, kink_uniform=kinks[0], kink_floating=kinks[1]
        )
    for (name, tensor), values in smoothed.items():
        if (name, tensor) not in plain and tensor in FORWARD_TENSORS:
            kinks = (values * root).tolist()
            gains.setdefault(name, {})[tensor] = Gain(
                uniform=0.0, floating=0.0, kink_uniform=kinks[0], kink_floating=kinks[1]
            )
    return gains
