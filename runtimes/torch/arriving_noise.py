"""Where does noise arrive at rectifiers, and how much of it? Seen in forward passes whose operands are rounded.

How often an element flips depends on the noise *there*: a batch normalization enlarges the channels of small variance,
and their noise with them; an image with large activations is noisier than others; what a residual branch brings lands
on its own channels. With one size of noise for a whole tensor, flips of ResNet-50 are a third too few. So the step's
forward pass is run once as it is and a few times with both operands of every product rounded to INT8, stochastically,
and what differs at the input of each rectifier is kept: its mean square per image and channel, and altogether.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qsync_opt.kernels.arguments import CONVOLUTIONS
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import dequantize, quantize_int8
from qsync_opt.runtimes.torch.interception import Interception, OperatorCall
from qsync_opt.runtimes.torch.product_calls import BILINEAR, operand_slots, replace_operands
from qsync_opt.runtimes.torch.reductions import square_sum

RECTIFIERS = ("relu", "relu_")
"""Operators whose derivative jumps at zero."""
PASSES = 4
"""Passes with noise: with two, the root of a mean square of few elements comes out a tenth too small."""


class Arriving(NamedTuple):
    """Noise at the input of a rectifier.

    Attributes:
        ratio: Its energy over that of the signal, all calls together.
        spread: Mean square, per call, broadcasting against the input: per sample and channel where there are
            positions, else per element, over the batch.
    """

    ratio: float
    spread: tuple[Tensor, ...]


class _Watch:
    """Handler of an interception: rounds operands in all passes but the first, and compares what rectifiers read."""

    def __init__(self, wanted: frozenset[str] | None) -> None:
        self._wanted = wanted
        self.draw = -1
        self.exact: dict[str, list[Tensor]] = {}
        self.spread: dict[str, list[Tensor]] = {}
        self.noise: dict[str, list[Tensor]] = {}
        self._met: dict[str, int] = {}
        self._products = 0

    def begin(self, draw: int) -> None:
        """A new pass; -1 is the one without noise."""
        self.draw, self._met, self._products = draw, {}, 0

    def __call__(self, call: OperatorCall) -> Any:
        if call.op_type in RECTIFIERS:
            self._compare(call.name, call.args[0] if call.args else call.kwargs["input"])
            return call.run()
        if self.draw < 0 or call.op_type not in BILINEAR or not (self._wanted is None or call.name in self._wanted):
            return call.run()
        slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
        options = KernelOptions(seed=self._products, offset=self.draw)
        self._products += 1
        rounded = []
        for stream, slot in enumerate(slots):
            dims = _weight_slices(call.op_type, slot.tensor) if stream == 1 else None
            rounded.append(dequantize(quantize_int8(slot.tensor, dims, options, stream), slot.tensor.dtype))
        args, kwargs = replace_operands(call.args, call.kwargs, slots, rounded)
        return call.run(*args, **kwargs)

    def _compare(self, name: str, z: Tensor) -> None:
        number = self._met.get(name, 0)
        self._met[name] = number + 1
        if self.draw < 0:
            self.exact.setdefault(name, []).append(z.clone())
            return
        known = self.exact.get(name, [])
        if number >= len(known) or known[number].shape != z.shape:
            return  # the step took another way
        squares = (z - known[number]).square_()
        spread = squares.mean(tuple(range(2, z.dim())) if z.dim() > 3 else 0, keepdim=True)
        spreads, noises = self.spread.setdefault(name, []), self.noise.setdefault(name, [])
        if number == len(spreads):
            spreads.append(torch.zeros_like(spread))
            noises.append(torch.zeros((), dtype=torch.float64, device=z.device))
        spreads[number] += spread
        noises[number] += squares.mean(dtype=torch.float64) * z.numel()


def _weight_slices(op_type: str, tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions of a second operand that share a scale, one per output channel where it is a weight."""
    if op_type in CONVOLUTIONS or op_type == "linear":
        return tuple(range(1, tensor.dim()))
    return (0,) if tensor.dim() == 2 and op_type != "einsum" else None


def arriving_noise(
    model: nn.Module, loss_of: Callable[[], Tensor], wanted: frozenset[str] | None = None
) -> Mapping[str, Arriving]:
    """Noise at the input of every rectifier when all products round their operands to INT8.

    Takes one forward pass and ``PASSES`` with rounding, without gradients; what rectifiers read is kept meanwhile.
    Every pass draws the same random numbers for the model's own use, and leaves the generators as they were.

    Args:
        model: The model.
        loss_of: Runs the model on the batch.
        wanted: Limits the operators that round; None is all.

    Returns:
        By rectifier; empty if the step has none.

    Source:
        Ours.
    """
    watch = _Watch(wanted)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    interception = Interception(model, watch, kinds=RECTIFIERS)
    forked = functools.partial(torch.random.fork_rng, devices=devices)
    try:
        with torch.no_grad():
            for draw in range(-1, PASSES):
                watch.begin(draw)
                with forked():
                    loss_of()
                if not watch.exact:
                    return {}
    finally:
        interception.remove()
    found = {}
    for name, spreads in watch.spread.items():
        signal = torch.stack([square_sum(z) for z in watch.exact[name]]).sum()
        ratio = torch.stack(watch.noise[name]).sum() / PASSES / signal
        found[name] = Arriving(float(ratio.nan_to_num_(0.0, 0.0)), tuple(s / PASSES for s in spreads))
    return found
