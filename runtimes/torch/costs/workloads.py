"""Operators to measure: random shapes of every family, and the operators of some captured models."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt.costs.learned import Workload, workload_of
from qsync_opt.model import ATEN_PRODUCTS, Operator, Role, RoleTable, TensorSpec
from qsync_opt.runtimes.torch.capture import RecordedCall, TensorArgument, capture_model, count_flops

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One operator that can be timed by itself, with the model that it is from (``sweep``: a random shape)."""

    operator: Operator
    call: RecordedCall
    workload: Workload
    model: str = "sweep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest operators of a sweep: operations and elements of one tensor."""

    flops: float
    elements: int


_SIDES = (7, 8, 14, 16, 28, 32, 56)
"""Sides of images inside networks for images of 224 and of 256, or of 32, pixels."""
LIMITS = {"cpu": Limits(flops=6e8, elements=2**21), "cuda": Limits(flops=6e11, elements=2**26)}


def sweep(limits: Limits, seed: int) -> Iterator[Candidate]:
    """Operators of random shapes without end, each family in turn; equal seeds give equal operators."""
    rng = random.Random(seed)
    while True:
        for family, make in FAMILIES.items():
            for _ in range(100):
                call = make(rng, limits)
                candidate = _candidate(family, call)
                sizes = [spec.elements for spec in (*candidate.workload.inputs, *candidate.workload.outputs)]
                if max(sizes) <= limits.elements and candidate.workload.flops <= limits.flops:
                    yield candidate
                    break


def captured(name: str, model: nn.Module, args: tuple[Any, ...]) -> list[Candidate]:
    """The distinct operators of a model that move data."""
    result = capture_model(model, args)
    distinct = {operator.signature: operator for operator in result.graph if operator.num_bytes}
    return [
        Candidate(
            operator=operator,
            call=result.calls[operator.name],
            workload=workload_of(result.graph, operator),
            model=name,
        )
        for operator in distinct.values()
    ]


def _candidate(kind: str, call: RecordedCall) -> Candidate:
    args, kwargs = call.build(TensorArgument.meta, "meta")
    result = call.target(*args, **kwargs)
    tensors = [t for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, Tensor)]
    outputs = tuple(TensorSpec(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for t in tensors)
    inputs = tuple(argument.spec for argument in call.tensors())
    role = RoleTable().lookup(kind, kind) or Role.FIXED
    activations = [a for a in call.tensors() if a.state is None and a.spec.is_floating]
    weights = sum(a.spec.elements for a in call.tensors() if a.is_parameter)
    flops = count_flops(kind, call) if kind in ATEN_PRODUCTS else 0
    operator = Operator(
        name=kind,
        op_type=kind,
        role=role,
        inputs=tuple(f"x{i}" for i in range(len(activations))),
        input_specs=inputs,
        output_specs=outputs,
        flops=flops,
        num_bytes=sum(spec.num_bytes for spec in (*inputs, *outputs)),
        signature=call.signature(kind),
    )
    workload = Workload(
        kind=kind,
        role=role,
        inputs=inputs,
        outputs=outputs,
        weight_elements=weights,
        gradients=sum(a.requires_gradient for a in activations),
        flops=flops,
    )
    return Candidate(operator=operator, call=call, workload=workload)


def _x(*shape: int, gradient: bool = True) -> TensorArgument:
    return TensorArgument(spec=_spec(shape), stride=_strides(shape), requires_gradient=gradient)


def _w(name: str, *shape: int) -> TensorArgument:
    return TensorArgument(
        spec=_spec(shape), stride=_strides(shape), state=name, is_parameter=True, requires_gradient=True
    )


def _i(upper: int, *shape: int) -> TensorArgument:
    return TensorArgument(spec=_spec(shape, "int64"), stride=_strides(shape), upper=upper)


def _spec(shape: tuple[int, ...], dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _size(rng: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """A size between two others, uniform in its logarithm; mostly a multiple of ``multiple``, as in real models."""
    value = math.exp(rng.uniform(math.log(low), math.log(high)))
    if multiple > 1 and rng.random() < 0.9:
        return max(multiple, round(value / multiple) * multiple)
    return max(1, round(value))


def _scale(limits: Limits) -> int:
    """How much larger than on a cpu the sizes of a dimension are."""
    return max(1, round(math.sqrt(_more(limits))))


def _more(limits: Limits) -> int:
    """How much larger than on a cpu tensors are, and batches with them."""
    return max(1, limits.elements // LIMITS["cpu"].elements)


def _linear(rng: random.Random, limits: Limits) -> RecordedCall:
    s = _scale(limits)
    rows = _size(rng, 8, 1024 * _more(limits), 8)
    depth, columns = _size(rng, 16, 1024 * s, 16), _size(rng, 16, 1024 * s, 16)
    lead = (rows,) if rng.random() < 0.5 or rows < 16 else (4, rows // 4)
    bias = _w("b", columns) if rng.random() < 0.7 else None
    return RecordedCall(target=aten.linear.default, args=(_x(*lead, depth), _w("w", columns, depth), bias))


def _conv2d(rng: random.Random, limits: Limits) -> RecordedCall:
    s = _scale(limits)
    channels, width = _size(rng, 3, 128 * s, 8), _size(rng, 8, 128 * s, 8)
    kernel, side, batch = rng.choice((1, 3, 3, 5)), rng.choice(_SIDES), _size(rng, 1, 8 * _more(limits))
    stride, groups = rng.choice((1, 1, 2)), 1
    if rng.random() < 0.15:
        groups = width = channels
    weight = _w("w", width, channels // groups, kernel, kernel)
    args = (_x(batch, channels, side, side), weight, None, [stride] * 2, [kernel // 2] * 2, [1, 1], groups)
    return RecordedCall(target=aten.conv2d.default, args=args)


def _matmul(rng: random.Random, limits: Limits) -> RecordedCall:
    s = _scale(limits)
    batch, m, n, k = _size(rng, 1, 16 * s), _size(rng, 16, 256 * s, 8), _size(rng, 16, 256 * s, 8), _size(rng, 16, 256)
    return RecordedCall(target=aten.matmul.default, args=(_x(2, batch, m, k), _x(2, batch, k, n)))


def _attention(rng: random.Random, limits: Limits) -> RecordedCall:
    s = _scale(limits)
    batch, heads = _size(rng, 1, 4 * _more(limits)), rng.choice((2, 4, 8, 12))
    length = _size(rng, 32, 256 * s, 16)
    x = _x(batch, heads, length, rng.choice((32, 64, 128)))
    return RecordedCall(
        target=aten.scaled_dot_product_attention.default, args=(x, x, x), kwargs={"is_causal": rng.random() < 0.5}
    )


def _embedding(rng: random.Random, limits: Limits) -> RecordedCall:
    s = _scale(limits)
    rows, width = _size(rng, 100, 8000 * s), _size(rng, 32, 512 * s, 16)
    read = _i(rows, 4, _size(rng, 8, 512 * _more(limits)))
    return RecordedCall(target=aten.embedding.default, args=(_w("w", rows, width), read))


def _shape(rng: random.Random, limits: Limits) -> tuple[int, int, int]:
    s = _scale(limits)
    return _size(rng, 1, 16 * s), _size(rng, 8, 256 * s, 8), _size(rng, 32, 1024 * s, 16)


def _unary(target: Any, *more: Any) -> Callable[[random.Random, Limits], RecordedCall]:
    return lambda rng, limits: RecordedCall(target=target, args=(_x(*_shape(rng, limits)), *more))


def _binary(target: Any) -> Callable[[random.Random, Limits], RecordedCall]:
    def make(rng: random.Random, limits: Limits) -> RecordedCall:
        shape = _shape(rng, limits)
        return RecordedCall(target=target, args=(_x(*shape), _x(*shape)))

    return make


def _layer_norm(rng: random.Random, limits: Limits) -> RecordedCall:
    shape = _shape(rng, limits)
    args = (_x(*shape), [shape[-1]], _w("w", shape[-1]), _w("b", shape[-1]))
    return RecordedCall(target=aten.layer_norm.default, args=args)


def _images(rng: random.Random, limits: Limits) -> tuple[int, int, int, int]:
    side = rng.choice(_SIDES)
    return _size(rng, 1, 8 * _more(limits)), _size(rng, 8, 128 * _scale(limits), 8), side, side


def _max_pool(rng: random.Random, limits: Limits) -> RecordedCall:
    return RecordedCall(target=aten.max_pool2d.default, args=(_x(*_images(rng, limits)), [2, 2], [2, 2]))


def _average_pool(rng: random.Random, limits: Limits) -> RecordedCall:
    return RecordedCall(target=aten.adaptive_avg_pool2d.default, args=(_x(*_images(rng, limits)), (1, 1)))


def _batch_norm(rng: random.Random, limits: Limits) -> RecordedCall:
    shape = _images(rng, limits)
    means, variances = (TensorArgument(spec=_spec(shape[1:2]), stride=(1,), state=name) for name in ("m", "v"))
    args = (_x(*shape), _w("w", shape[1]), _w("b", shape[1]), means, variances, True, 0.1, 1e-5, False)
    return RecordedCall(target=aten.batch_norm.default, args=args)


def _cross_entropy(rng: random.Random, limits: Limits) -> RecordedCall:
    rows, classes = _size(rng, 8, 256 * _more(limits), 8), _size(rng, 10, 4096)
    return RecordedCall(target=aten.cross_entropy_loss.default, args=(_x(rows, classes), _i(classes, rows)))


def _cat(rng: random.Random, limits: Limits) -> RecordedCall:
    shape = _shape(rng, limits)
    return RecordedCall(target=aten.cat.default, args=([_x(*shape), _x(*shape)], -1))


FAMILIES: dict[str, Callable[[random.Random, Limits], RecordedCall]] = {
    "linear": _linear,
    "conv2d": _conv2d,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "softmax": _unary(aten.softmax.int, -1),
    "gelu": _unary(aten.gelu.default),
    "relu": _unary(aten.relu.default),
    "silu": _unary(aten.silu.default),
    "tanh": _unary(aten.tanh.default),
    "dropout": _unary(aten.dropout.default, 0.1, True),
    "add": _binary(aten.add.Tensor),
    "mul": _binary(aten.mul.Tensor),
    "cat": _cat,
    "mean": _unary(aten.mean.dim, [-1]),
    "max_pool2d": _max_pool,
    "adaptive_avg_pool2d": _average_pool,
    "batch_norm": _batch_norm,
    "cross_entropy_loss": _cross_entropy,
}
"""Kind of operator to what makes a random call of it."""
