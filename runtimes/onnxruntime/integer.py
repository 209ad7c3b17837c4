"""Products and convolutions on 8-bit integers, in ONNX's own operators.

The input is quantized as it comes (``DynamicQuantizeLinear``: unsigned, asymmetric, one scale per tensor), a weight
once and for all (signed, symmetric, one scale per column or channel). ``MatMulInteger`` and ``ConvInteger`` sum
exactly; the result is the sum times both scales, in FP32. No calibration data is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.onnxruntime.number_types import tensor_of, weight_codes
from qsync_opt.runtimes.onnxruntime.prepared import Array

INTEGER_KINDS = frozenset({"MatMul", "Gemm", "Conv"})
"""Kinds of nodes that have an integer form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Names of the values that stand for a quantized tensor: codes, scale, zero point ("" where it is zero)."""

    codes: str
    scale: str
    zero: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What an integer form is made with.

    ``fresh`` makes a name that nothing has yet, ``add`` appends a node, ``store`` an initializer and returns its name,
    ``quantized`` gives an input in codes, ``in_fp32`` an input in FP32, ``constant`` the values of an input that never
    changes, None for others.
    """

    fresh: Callable[[str], str]
    add: Callable[[onnx.NodeProto], None]
    store: Callable[[onnx.TensorProto], str]
    quantized: Callable[[str], Quantized]
    in_fp32: Callable[[str], str]
    constant: Callable[[str], Array | None]


def integer_form(node: onnx.NodeProto, output: str, shop: Workshop) -> None:
    """Add the nodes that compute ``node`` on 8-bit integers and put its result, in FP32, into ``output``.

    Raises:
        UnsupportedError: This node has no integer form; the text says why.
    """
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    form = _Form(node, output, shop)
    match node.op_type:
        case "MatMul":
            form.product(form.left(False), form.right(False), 1.0, None, 1.0)
        case "Gemm":
            bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
            left, right = form.left(bool(attributes.get("transA", 0))), form.right(bool(attributes.get("transB", 0)))
            form.product(left, right, float(attributes.get("alpha", 1.0)), bias, float(attributes.get("beta", 1.0)))
        case "Conv":
            form.convolution()
        case _:
            raise UnsupportedError(
                f"node {form.name!r} is {node.op_type}, which has no integer form: allowed are "
                f"{', '.join(sorted(INTEGER_KINDS))}"
            )


class _Form:
    def __init__(self, node: onnx.NodeProto, output: str, shop: Workshop) -> None:
        self.name = node.name or node.output[0]
        self._node = node
        self._output = output
        self._shop = shop

    def _inner(self, what: str) -> str:
        return f"{self._output}__{what}"

    def _add(self, kind: str, inputs: list[str], what: str, **attributes: Any) -> str:
        """Add a node with one result; ``what`` names it, "" is the result of the whole form."""
        output = self._shop.fresh(self._inner(what)) if what else self._output
        name = f"{self.name}__{what or 'result'}"
        self._shop.add(helper.make_node(kind, inputs, [output], name=name, **attributes))
        return output

    def _weight(self, values: Array, axis: int | None) -> tuple[str, str]:
        """Store a weight's codes and scales; the scales have one entry, or one per index of ``axis``."""
        if not values.size:
            raise UnsupportedError(f"node {self.name!r} has an empty weight: keep it in FP32")
        codes, scales = weight_codes(values, axis)
        stored = self._shop.store(tensor_of(codes, self._inner("weight")))
        return stored, self._shop.store(tensor_of(scales, self._inner("weight_scale")))

    def left(self, transposed: bool) -> Quantized:
        """The first operand."""
        return self._dynamic(self._node.input[0], transposed, "left")

    def right(self, transposed: bool) -> Quantized:
        """The second operand: a weight, or computed like the first."""
        value = self._node.input[1]
        weight = self._shop.constant(value)
        if weight is None:
            return self._dynamic(value, transposed, "right")
        weight = np.ascontiguousarray(weight.T) if transposed else weight
        # Scales per column have no place in the result of a product of a vector or of a stack of matrices.
        codes, scale = self._weight(weight, 1 if weight.ndim == 2 else None)
        return Quantized(codes=codes, scale=scale, zero="")

    def _dynamic(self, value: str, transposed: bool, side: str) -> Quantized:
        q = self._shop.quantized(value)
        if not transposed:
            return q
        codes = self._add("Transpose", [q.codes], f"{side}_transposed", perm=[1, 0])
        return Quantized(codes=codes, scale=q.scale, zero=q.zero)

    def product(self, left: Quantized, right: Quantized, alpha: float, bias: str | None, beta: float) -> None:
        """``alpha * left @ right + beta * bias``."""
        zeros = [left.zero, right.zero] if right.zero else [left.zero]
        sums = self._add("MatMulInteger", [left.codes, right.codes, *zeros], "sums")
        scale = self._add("Mul", [left.scale, right.scale], "scale")
        self._finish(sums, self._times(scale, alpha, "alpha"), self._bias(bias, beta))

    def convolution(self) -> None:
        """A convolution whose weight never changes."""
        weight = self._shop.constant(self._node.input[1])
        if weight is None:
            raise UnsupportedError(f"node {self.name!r} convolves with a computed weight, which has no integer form")
        x = self._shop.quantized(self._node.input[0])
        codes, scales = self._weight(weight, 0)
        sums = self._shop.fresh(self._inner("sums"))
        node = helper.make_node("ConvInteger", [x.codes, codes, x.zero], [sums], name=f"{self.name}__sums")
        node.attribute.extend(self._node.attribute)
        self._shop.add(node)
        shape = [-1, *[1] * (weight.ndim - 2)]
        per_channel = self._reshaped(scales, shape, "weight_scale")
        scale = self._add("Mul", [x.scale, per_channel], "scale")
        bias = self._node.input[2] if len(self._node.input) > 2 and self._node.input[2] else None
        if bias is not None:
            bias = self._reshaped(self._shop.in_fp32(bias), shape, "bias")
        self._finish(sums, scale, bias)

    def _reshaped(self, value: str, shape: list[int], what: str) -> str:
        sizes = self._shop.store(tensor_of(np.array(shape, dtype=np.int64), self._inner(f"{what}_shape")))
        return self._add("Reshape", [value, sizes], f"{what}_reshaped")

    def _times(self, value: str, factor: float, what: str) -> str:
        if factor == 1.0:
            return value
        stored = self._shop.store(tensor_of(np.array(factor, dtype=np.float32), self._inner(what)))
        return self._add("Mul", [value, stored], f"{what}_times")

    def _bias(self, value: str | None, beta: float) -> str | None:
        return None if value is None else self._times(self._shop.in_fp32(value), beta, "beta")

    def _finish(self, sums: str, scale: str, bias: str | None) -> None:
        wide = self._add("Cast", [sums], "wide", to=onnx.TensorProto.FLOAT)
        result = self._add("Mul", [wide, scale], "scaled" if bias is not None else "")
        if bias is not None:
            self._add("Add", [result, bias], "")
