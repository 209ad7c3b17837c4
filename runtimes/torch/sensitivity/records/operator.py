"""The record of one call of an operator: scalars on the device, and small vectors until its gradient arrives.

It keeps nothing of an activation's size beyond what autograd keeps. All scalars of a batch go to the host together.
Moments and reductions take all elements; rounding errors are computed for a sample of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from qsync_opt.numerics import GRADIENT_KINDS, Granularity, Rounding, noise_kinds
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.errors import (
    AttentionCall,
    attention_call,
    attention_errors,
    rounding_errors,
    weight_gradient_errors,
)
from qsync_opt.runtimes.torch.sensitivity.products import ProductForm, operand_slots
from qsync_opt.runtimes.torch.sensitivity.reductions import Queue, largest, mean, norm, norms, strided, total
from qsync_opt.runtimes.torch.sensitivity.replays import Replays
from qsync_opt.runtimes.torch.sensitivity.samples import SizedRuns, even_runs, runs_by_size
from qsync_opt.sensitivity import GRADIENTS, OPERANDS, OperatorKind, ProductSizes

SCALED_KINDS = noise_kinds(scaled=True)
CAST_KINDS = noise_kinds(scaled=False)
OUTPUT_GRADIENT_KINDS = tuple(GRADIENT_KINDS.values())
INTEGER_KINDS = tuple(kind for kind in SCALED_KINDS if kind.startswith("INT8/"))
"""Fixed-point rounding of an operand, by granularity."""
RESULT_KINDS = (*CAST_KINDS, *OUTPUT_GRADIENT_KINDS)
"""Rounding of the gradient of a result."""

_SAMPLE = 1 << 15
"""Sample size, at most, of a tensor that is no operand."""
_TOGETHER = 1 << 21
"""Elements of the gradients, at most, that wait for their moments."""

Receiver = Callable[[Tensor, Tensor | None], None]
"""Takes a largest magnitude, and the norm if it was requested."""


class MomentQueue(Queue[tuple[Receiver, bool]]):
    """Gradients whose largest magnitudes and norms are computed for many at once."""

    def __init__(self) -> None:
        super().__init__(_TOGETHER)

    def add(self, x: Tensor, receive: Receiver, *, root: bool = True) -> None:
        """Pass the largest magnitude of a tensor, and its norm with ``root``, to a receiver by the next ``flush``."""
        self.wait(x, (receive, root))

    def reduce(self, some: list[tuple[Tensor, tuple[Receiver, bool]]]) -> None:
        """Pass moments to their receivers."""
        rooted = [x for x, (_, root) in some if root]
        roots = iter(norms(rooted) if rooted else ())
        for (_, (receive, root)), amax in zip(some, largest([x for x, _ in some]), strict=True):
            receive(amax, next(roots) if root else None)


@dataclass(slots=True, kw_only=True)
class OperatorRecord:
    """The measurements of one call; a subclass for each kind of operator.

    Attributes:
        sample: Bounds the elements whose rounding errors are computed.
        parameters: Names of the parameters that the operands are.
        loss_scale: Factor of gradients while they are rounded to 16 bits.
        differentiated: Whether autograd records the call.
        replays: Shared by the records of a collection.
        queue: Shared by the records of a batch.
        factor: Constant factor of the result.
        needs_gradient: Elements of each operand that gets a gradient, by the gradient's name.
        elements: Elements of each tensor.
        numbers: Names and values, on the device until ``finish_batch``.
        pending: Samples of tensors that are no operands, until `cast_pending`.
    """

    kind: ClassVar[OperatorKind] = OperatorKind.PRODUCT
    name: str
    op_type: str
    sample: int
    parameters: tuple[str | None, ...]
    loss_scale: float
    differentiated: bool
    replays: Replays
    queue: MomentQueue
    products: tuple[ProductSizes, ...] = ()
    factor: float = 1.0
    needs_gradient: dict[str, int] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    numbers: list[tuple[tuple[str, ...], Tensor]] = field(default_factory=list)
    pending: list[tuple[str, Tensor | SizedRuns]] = field(default_factory=list)

    def measure(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure the operands of a call; its arguments are FP32 and cut off from autograd."""
        raise NotImplementedError

    def output_gradient(self, g: Tensor) -> None:
        """Measure the gradient of the result, and complete what needs it."""
        raise NotImplementedError

    def settled(self, values: dict[str, float]) -> dict[str, float]:
        """The numbers by name, from those on the host."""
        return values

    def put(self, name: str, value: Tensor) -> None:
        """Record one number."""
        self.numbers.append(((name,), value.reshape(1)))

    def moments(self, tensor: str, x: Tensor, root: Tensor | None = None) -> None:
        """Record largest magnitude and norm; ``root`` is the norm if it is known."""
        self.elements[tensor] = x.numel()

        def receive(amax: Tensor, root: Tensor | None) -> None:
            self.put(f"{tensor}.greatest", amax)
            if root is not None:
                self.put(f"{tensor}.norm", root)

        if tensor in GRADIENTS:
            self.queue.add(x, receive)
        else:
            receive(torch.linalg.vector_norm(x, float("inf")), norm(x) if root is None else root)

    def add_tensor(self, tensor: str, x: Tensor, root: Tensor | None = None) -> None:
        """Record moments of a tensor that is no operand, and sample elements for its cast errors.

        Gradients of a convolution concentrate on few positions, so their elements are sampled by size.
        """
        some = min(self.sample, _SAMPLE)
        convolution = self.op_type.startswith("conv") and tensor != "second_gradient"
        if convolution and tensor != "output" and x.numel() > some:
            runs = runs_by_size(x, some)
            self.elements[tensor] = x.numel()
            self.queue.add(x, lambda amax, _: self.put(f"{tensor}.greatest", amax), root=False)
            self.put(f"{tensor}.square_sum", runs.total)
            self.pending.append((tensor, runs))
            return
        self.moments(tensor, x, root)
        self.pending.append((tensor, even_runs(x, some) if convolution else strided(x, some).clone()))

    def add_errors(self, tensor: str, kinds: tuple[str, ...], errors: Tensor, part: Tensor) -> None:
        """Record mean errors of a part of a tensor, and its mean square.

        Errors of floating formats grow with the square of the element, so a few large ones may hold most of the error:
        the part's error is scaled from its mean square to that of the tensor.
        """
        for rounding, values in zip(Rounding, errors, strict=True):
            names = tuple(f"{tensor}.{kind}.{rounding}" for kind in kinds)
            self.numbers.append((names, values.flatten(1).mean(1)))
        if part.numel() < self.elements[tensor]:
            self.put(f"{tensor}.sample.square", mean(part.square()))

    def amaxes(self, tensor: str, x: Tensor, *, channel: int, row: int) -> dict[Granularity, Tensor]:
        """Record and return the largest magnitude of every slice, per granularity: along ``channel`` and ``row``."""
        amaxes = {
            g: torch.linalg.vector_norm(x, float("inf"), (dim,), keepdim=True)
            for g, dim in ((Granularity.CHANNEL, channel), (Granularity.ROW, row))
        }
        rows = amaxes[Granularity.ROW]
        amaxes[Granularity.TENSOR] = rows.amax(tuple(range(rows.dim())), keepdim=True)
        self.elements[tensor] = x.numel()
        self.put(f"{tensor}.greatest", amaxes[Granularity.TENSOR])
        for granularity, amax in amaxes.items():
            self.put(f"{tensor}.amax.{granularity}", mean(amax.square()))
        return amaxes

    @property
    def trains_weight(self) -> bool:
        """Whether the second operand is a parameter that gets a gradient."""
        return self.parameters[1] is not None and "second_gradient" in self.needs_gradient

    def add_nearest(self, form: ProductForm, g: Tensor) -> None:
        """Error of a weight's gradient from rounding to nearest."""
        for name, value in weight_gradient_errors(form, g, self.loss_scale).items():
            self.put(f"nearest.{name}", value)

    @property
    def lacks_gradient(self) -> bool:
        """True if a gradient was expected and none came."""
        return self.differentiated and bool(self.needs_gradient) and "output_gradient" not in self.elements


@dataclass(slots=True, kw_only=True)
class AttentionRecord(OperatorRecord):
    """The measurements of one call of attention, whose operands are kept until its gradient arrives."""

    kind: ClassVar[OperatorKind] = OperatorKind.ATTENTION
    attention: AttentionCall | None = None

    def measure(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record moments of the operands."""
        self.attention = attention = attention_call(args, kwargs)
        self.products = attention.sizes()
        for name, x in zip(OPERANDS, (attention.query, attention.key, attention.value), strict=True):
            self.moments(name, x)

    def output_gradient(self, g: Tensor) -> None:
        """Measure errors of the result and of all gradients."""
        self.add_tensor("output_gradient", g)
        attention, self.attention = self.attention, None
        if attention is None:
            return

        def errors(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, g: Tensor) -> dict[str, Tensor]:
            return attention_errors(dataclasses.replace(attention, query=q, key=k, value=v, mask=mask), g)

        key = ("attention", attention.is_causal, attention.scale, attention.repeats)
        operands = attention.query, attention.key, attention.value, attention.mask
        for name, measured in self.replays(key, errors, *operands, g * self.loss_scale).items():
            if self.loss_scale != 1.0:  # of the gradients' errors, not of the output's
                measured[1:] /= self.loss_scale**2
            self.numbers.append((tuple(f"measured.{name}.{target}" for target in ("output", *GRADIENTS)), measured))


@dataclass(slots=True, kw_only=True)
class LookupRecord(OperatorRecord):
    """The measurements of one lookup: a product with a one-hot first operand.

    Attributes:
        counted: Which rows of the result count in the gradient of the table: all but those of padding.
    """

    kind: ClassVar[OperatorKind] = OperatorKind.LOOKUP
    counted: Tensor | None = None

    def measure(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure the table, and the rows that are read."""
        (slot,) = operand_slots(call.name, call.op_type, call.function, args, kwargs)
        table, swapped = slot.tensor, call.function is torch.embedding
        indices = args[1] if swapped else (args[0] if args else kwargs["input"])
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        if padding is not None and padding < 0:
            padding = None if swapped else padding + table.shape[0]
        size = ProductSizes(products=1, rows=indices.numel(), contraction=table.shape[0], columns=table.shape[1])
        self.products = (size,)
        one = torch.ones((), dtype=torch.float64, device=table.device)
        self.elements["first"] = size.rows * size.contraction
        self.put("first.greatest", one)
        self.put("first.square_sum", one * size.rows)
        for granularity in Granularity:
            self.put(f"first.amax.{granularity}", one)
        for rounding in Rounding:  # zeros and ones are exact in every format
            names = tuple(f"first.{kind}.{rounding}" for kind in SCALED_KINDS)
            self.numbers.append((names, one.new_zeros(len(names))))
        used = indices.reshape(-1)
        rows = table[used]
        self.put("xw/floating", total(rows.square()))
        self.put("second.norm", norm(table))
        amaxes = self.amaxes("second", table, channel=0, row=1)
        step = max(1, min(table.shape[0] // 8, table.numel() // self.sample))
        row_amax = amaxes[Granularity.ROW]
        some = amaxes | {Granularity.ROW: row_amax[::step]}
        self.add_errors("second", SCALED_KINDS, rounding_errors(table[::step], SCALED_KINDS, some), table[::step])
        if step > 1:
            self.put("second.sample.row", mean(some[Granularity.ROW].square()))
        step = max(1, rows.numel() // self.sample)
        used_amaxes = amaxes | {Granularity.ROW: row_amax[used[::step]]}
        errors = rounding_errors(rows[::step], INTEGER_KINDS, used_amaxes)[0]
        totals = errors.flatten(1).sum(1, dtype=torch.float64) * (used.numel() / len(rows[::step]))
        self.numbers.append((tuple(f"xw/second/{kind.partition('/')[2]}" for kind in INTEGER_KINDS), totals))
        self.counted = None if padding is None else used != padding

    def output_gradient(self, g: Tensor) -> None:
        """Measure the gradient of the result."""
        self.add_tensor("output_gradient", g)
        rows = g.square().reshape(-1, g.shape[-1]).sum(1)
        self.put("xg/floating", total(rows if self.counted is None else rows[self.counted]))
