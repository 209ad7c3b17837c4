"""How far does noise really reach? Gains of every operator's tensors, by differentiating the gradient once more.

Let u be a random vector of signs over all parameters and s = <u, gradient of the loss>. The derivative of s for
any tensor t of the forward or backward pass is J^T u, J being the Jacobian that turns noise on t into noise on the
gradient; the mean over u of its square is, element by element, the variance that one unit of noise there adds to the
whole gradient. One double backward pass per u yields it for all tensors of all operators at once: through every
nonlinearity, residual branch, normalization, shared weight and the loss itself, exact to first order.

The derivative of a rectifier jumps where its input crosses zero, which no derivative sees, yet flips of rectifiers are
what small noise mostly does in a network of them. The mask by which a rectifier multiplies its gradient is therefore a
tensor of its own: the square of its J^T u, element by element, times the chance that normal noise of some size pushes
that element over zero, is the variance that the flips of this rectifier add (`Probed.flips`). Noise is spread over
the elements as it was seen to arrive there (`noisy_passes`). Max-pooling is treated likewise: the share of a window's
gradient that goes to the second largest element is a tensor of its own, which noise changes from 0 to 1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_opt.errors import ModelError, first_line
from qsync_opt.graph import OpGraph, Role
from qsync_opt.rounding import Granularity
from qsync_opt.runtimes.torch.arriving_noise import KINKED, RECTIFIERS, Arriving, Seen, noisy_passes
from qsync_opt.runtimes.torch.interception import Interception, OperatorCall
from qsync_opt.runtimes.torch.max_pooling import MAX_POOLS, LastRectified, SwitchedPool, contest, pool_call
from qsync_opt.runtimes.torch.product_calls import ADJUSTABLE, operand_slots, replace_operands
from qsync_opt.runtimes.torch.random_signs import RandomSigns
from qsync_opt.runtimes.torch.reductions import total
from qsync_opt.runtimes.torch.rounding_error import stacked_errors
from qsync_opt.statistics import FLIP_RATIOS, GRADIENTS, OPERANDS, Gain

_MASK = "mask"
# Noise in the forward pass flips rectifiers; noise in gradients does not.
_QUANTIZED = ("first", "second", "output_gradient")
FORWARD_TENSORS = (*OPERANDS, "output")
"""The tensors of an operator's forward pass."""


class Probed(NamedTuple):
    """Gains per operator and tensor; per rectifier, what its flips add at the ratios of ``FLIP_RATIOS``.

    ``noise`` is the noise-to-signal ratio at the input of each rectifier when all products round operands to INT8, and
    ``shift`` the squared norm by which the mean gradient moves then, beyond what independent flips move it.
    """

    gains: dict[str, dict[str, Gain]]
    flips: dict[str, tuple[float, ...]]
    noise: Mapping[str, float]
    shift: float = 0.0


class MaskedRectifier(torch.autograd.Function):
    """A rectifier whose gradient is multiplied by a mask that can itself be differentiated by."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor) -> Tensor:
        """Rectify."""
        ctx.save_for_backward(mask)
        return z.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the mask alone."""
        (mask,) = ctx.saved_tensors
        return grad * mask, None


class Tapper:
    """Handler of an interception: keeps a node of the autograd graph for every tensor that can be noisy.

    ``wanted`` limits the operators (None: all adjustable ones); ``gradients`` also taps what the backward pass
    computes, and the masks of rectifiers; ``arriving`` says how noise is spread over these (evenly, if it does not).
    """

    def __init__(
        self,
        wanted: frozenset[str] | None,
        *,
        gradients: bool = True,
        arriving: Mapping[str, Arriving] | None = None,
    ) -> None:
        self._wanted = wanted
        self._gradients = gradients
        self._spread = {name: list(found.spread) for name, found in (arriving or {}).items()}
        self.ratios = {name: found.ratio for name, found in (arriving or {}).items()}
        """Noise-to-signal ratio at rectifiers when all products round."""
        self.open = True
        self.rectified: dict[int, Tensor] = {}
        """Distance of every element from its jump, over the size of noise as strong as the signal, by its mask's id."""
        self.last = LastRectified()
        self.taps: list[tuple[str, str, Tensor]] = []

    def __call__(self, call: OperatorCall) -> Any:
        """Run an operator on taps of its operands, and hand on a tap of its result."""
        if call.op_type in RECTIFIERS:
            return self._rectify(call)
        if call.op_type in MAX_POOLS:
            return self._pool(call)
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
        z: Tensor = call.args[0] if call.args else call.kwargs["input"]
        if not self._gradients or not z.requires_grad:
            return call.run()  # type: ignore[no-any-return]
        spreads = self._spread.get(call.traced_name)
        with torch.no_grad():
            mask, distance = (z > 0).to(z.dtype), _distance(z, spreads.pop(0) if spreads else None)
        mask.requires_grad_()
        self.rectified[id(mask)] = distance
        self.taps.append((call.traced_name, _MASK, mask))
        read = z.detach().clone() if call.writes else z
        result: Tensor = MaskedRectifier.apply(z, mask)  # type: ignore[no-untyped-call]
        result = z.copy_(result) if call.writes else result
        self.last.keep(result, read)
        return result

    def _pool(self, call: OperatorCall) -> Any:
        given = pool_call(call.op_type, call.args, call.kwargs)
        if given is None or not self._gradients or not given[0].requires_grad:
            return call.run()
        (x, window), name = given, call.traced_name
        known = contest(self.last.ranks(x), window)
        spreads, ratio = self._spread.get(name), self.ratios.get(name, 0.0)
        spread = spreads.pop(0) / ratio if spreads and ratio > 0 else 2 * x.detach().square().mean()
        share = torch.zeros_like(known.gap).requires_grad_()
        self.rectified[id(share)] = known.gap.div(spread.sqrt()).nan_to_num_(math.inf, math.inf)
        self.taps.append((name, _MASK, share))
        rows = x.reshape(len(share), -1)
        pooled: Tensor = SwitchedPool.apply(rows, share, known.first, known.second)  # type: ignore[no-untyped-call]
        return pooled.view(known.shape)


def _distance(z: Tensor, spread: Tensor | None) -> Tensor:
    """Distance of every element from zero over the size of the noise there, for noise as strong as the signal.

    Where no noise arrives, nothing flips however close it is.
    """
    tiny = torch.finfo(z.dtype).tiny
    strength = z.square().mean()
    if spread is None or any(few not in (1, many) for few, many in zip(spread.shape, z.shape, strict=True)):
        return z.abs().div_(strength.sqrt().clamp(min=tiny))
    size = (spread * (strength / spread.mean().clamp(min=tiny))).sqrt()
    return z.abs().div_(size).nan_to_num_(math.inf, math.inf)


def _chance(distance: Tensor, ratio: float) -> Tensor:
    """That normal noise pushes an element over zero."""
    return torch.special.ndtr(distance / -math.sqrt(ratio)) if ratio > 0 else torch.zeros_like(distance)


@contextlib.contextmanager
def tapped(model: nn.Module, handler: Tapper) -> Iterator[None]:
    """Within the block, the handler sees every operator, rectifier and max-pool of the model."""
    interception = Interception(model, handler, kinds=KINKED)
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
        held = values.to(torch.float32)  # of a model in FP64, too
        amax = torch.linalg.vector_norm(held, float("inf"))
        uniform = stacked_errors(held, ("INT8/tensor",), {Granularity.TENSOR: amax}).stochastic[0]
    return uniform, values.square()


def _weighted(squares: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of squares times weights of mean 1; weights that are all zero count as none."""
    plain = total(squares)
    if weights is None:
        return plain
    mean = total(weights) / weights.numel()
    weighted = total(squares * weights) / mean.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(mean > 0, weighted, plain)


def _adaptive_weights(gradients: Sequence[Tensor]) -> list[Tensor]:
    """By what each parameter's gradient is multiplied so that its variance is the share of Adam's progress it costs.

    The square of it is ``1 / (2 rms_p sum of (elements rms))`` over the parameters, see ``qsync_opt.expected_loss``;
    0 where all of a gradient is 0.
    """
    roots = [torch.linalg.vector_norm(g.detach()).double() / math.sqrt(g.numel()) for g in gradients]
    progress = torch.stack([root * g.numel() for root, g in zip(roots, gradients, strict=True)]).sum()
    weights = [torch.where(root > 0, (2 * root * progress).rsqrt(), 0.0) for root in roots]
    return [weight.to(g.dtype) for weight, g in zip(weights, gradients, strict=True)]


def _squares(
    loss_of: Callable[[], Tensor], model: nn.Module, tapper: Tapper, probes: int, seed: int, adaptive: bool = False
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
        weights = _adaptive_weights(used) if adaptive else []
        for probe in range(probes):
            signs = [random.like(g.detach()) for g in used]
            for u, weight in zip(signs, weights, strict=False):
                u.mul_(weight)
            projection = torch.stack([(g * u).sum() for g, u in zip(used, signs, strict=True)]).sum()
            derivatives = torch.autograd.grad(
                projection, [tap for *_, tap in tapper.taps], allow_unused=True, retain_graph=probe + 1 < probes
            )
            for (name, tensor, tap), derivative in zip(tapper.taps, derivatives, strict=True):
                if derivative is None:  # typed as if it never were
                    continue  # type: ignore[unreachable]
                squares = derivative.square()
                if tensor == _MASK:
                    distance = tapper.rectified[id(tap)]
                    chances = [_chance(distance, ratio) for ratio in FLIP_RATIOS]
                    sums = [total(squares * chance) for chance in chances]
                    sums.append(total(squares * _chance(distance, tapper.ratios.get(name, 0.0)).square_()))
                else:
                    sums = [_weighted(squares, shape) for shape in _noise_shapes(tensor, tap.detach())]
                found = torch.stack(sums) / probes
                totals[name, tensor] = totals.get((name, tensor), 0) + found
    except RuntimeError as error:
        raise ModelError(
            f"the model cannot be differentiated twice, which probing needs ({first_line(error)}): "
            "collect with probes=0"
        ) from error
    finally:
        # Hooks keep the tapper alive from inside the autograd graph; without its taps it does not keep the graph.
        tapper.taps.clear()
        tapper.rectified.clear()
        tapper.last.forget()
    return totals


def probe_gains(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    *,
    graph: OpGraph | None = None,
    probes: int,
    seed: int = 0,
    adaptive: bool = False,
) -> Probed:
    """Gains of every tensor of every adjustable operator for one batch, and what flips of rectifiers add.

    Needs the memory of a forward and backward pass that is differentiated again, several times that of a training step.
    Dropout draws anew in each pass.

    Args:
        model: The model.
        loss_of: Runs the model on the batch and returns the loss.
        graph: Limits the operators to its adjustable ones.
        probes: Random vectors; the relative error of a gain shrinks with their number and with the tensor's size.
        seed: Of the random vectors.
        adaptive: Count the variance of every parameter's gradient by the share of Adam's progress that it costs.

    Returns:
        Operator to tensor to gain; rectifier to flips.

    Raises:
        ModelError: Some operation of the model has no second derivative.

    Source:
        Ours; the estimator of a squared norm from random signs is Hutchinson's.
    """
    wanted = None if graph is None else frozenset(operator.name for operator in graph.by_role(Role.ADJUSTABLE))
    gains: dict[str, dict[str, Gain]] = {}
    flips: dict[str, tuple[float, ...]] = {}
    rectified = graph is None or any(operator.op_type in KINKED for operator in graph)
    seen = noisy_passes(model, loss_of, wanted, shift=not adaptive) if rectified else Seen({}, 0.0)
    tapper, shift = Tapper(wanted, arriving=seen.arriving), seen.shift
    for (name, tensor), values in _squares(loss_of, model, tapper, probes, seed, adaptive).items():
        if tensor == _MASK:
            *flipped, squared_means = values.tolist()
            flips[name] = tuple(flipped)
            shift -= squared_means  # flips that are independent move the mean too: by -P or P at an element
        else:
            uniform, floating = values.tolist()
            gains.setdefault(name, {})[tensor] = Gain(uniform=uniform, floating=floating)
    return Probed(gains, flips, tapper.ratios, max(0.0, shift))
