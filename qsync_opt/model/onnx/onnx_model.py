"""What does this package need to know of an ONNX model? Plain records, and the FLOPs of single nodes; no onnx here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from qsync_opt.errors import ModelError
from qsync_opt.model.graph import TensorSpec

AttributeValue = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxNode:
    """One node. ``kind`` is its type, with the domain in front unless it is ONNX's own; an absent input is ""."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxModel:
    """A model without its weights' data.

    ``specs`` describes values by name: graph inputs, initializers and results of nodes; None stands for what is no
    single tensor (a sequence). ``unfixed`` has those whose shape is not fixed: what is known of it, as text.
    ``states`` are the initializers, ``parameters`` those of them that training changes.
    """

    name: str
    nodes: tuple[OnnxNode, ...]
    specs: Mapping[str, TensorSpec | None]
    unfixed: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: frozenset[str]
    parameters: tuple[str, ...]
    metadata: Mapping[str, str]

    def spec(self, value: str, node: OnnxNode) -> TensorSpec | None:
        """Describe a value that ``node`` reads or writes; None for a sequence.

        Raises:
            ModelError: Its shape is not known.
        """
        try:
            return self.specs[value]
        except KeyError:
            shape = self.unfixed.get(value, "unknown")
            raise ModelError(
                f"tensor {value!r} of ONNX node {node.name!r} ({node.kind}) has shape {shape}: "
                "export with fixed shapes, or add the shape to the file's value_info"
            ) from None


def node_flops(node: OnnxNode, model: OnnxModel) -> int:
    """Return the forward floating-point operations of a node that multiplies or convolves, 0 for all others.

    A multiply-add is two operations.

    Raises:
        ModelError: A shape that is needed is not known, or operands do not fit together.

    Source:
        Ours, by the operators' definitions in the ONNX specification; same convention as torch.utils.flop_counter.
    """
    if node.kind not in _FLOP_KINDS:
        return 0
    try:
        return _product_flops(node, model)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"ONNX node {node.name!r} ({node.kind}) has operands or attributes that do not fit together ({error}): "
            "export the model again"
        ) from error


def _product_flops(node: OnnxNode, model: OnnxModel) -> int:
    # Bias, state and length, which come last, cost no products.
    operands = node.inputs if node.kind == "Einsum" else node.inputs[:3] if node.kind in _THREE else node.inputs[:2]
    shapes = [spec.shape if (spec := model.spec(value, node)) else () for value in operands]
    first = model.spec(node.outputs[0], node)
    result = first.shape if first else ()
    match node.kind:
        case "MatMul" | "MatMulInteger":
            return 2 * math.prod(result) * shapes[0][-1]
        case "Gemm":
            inner = shapes[0][0] if node.attributes.get("transA") else shapes[0][1]
            return 2 * math.prod(result) * inner
        case "Conv" | "ConvInteger" | "DeformConv":
            return 2 * math.prod(result) * math.prod(shapes[1][1:])
        case "ConvTranspose":
            return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
        case "Einsum":
            return _einsum_flops(str(node.attributes["equation"]), shapes)
        case "Attention":
            return _attention_flops(node, shapes)
    # Recurrent kinds: every step multiplies the input by W and the state by R.
    return 2 * shapes[0][0] * shapes[0][1] * (math.prod(shapes[1]) + math.prod(shapes[2]))


_THREE = frozenset({"Attention", "LSTM", "GRU", "RNN"})
_TWO = frozenset({"MatMul", "MatMulInteger", "Gemm", "Conv", "ConvInteger", "DeformConv", "ConvTranspose"})
_FLOP_KINDS = _TWO | _THREE | {"Einsum"}


def _einsum_flops(equation: str, shapes: list[tuple[int, ...]]) -> int:
    """FLOPs of contracting the operands from left to right; a step that sums over nothing is no product."""
    terms, _, result = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if "..." in equation:
        raise ModelError(f"einsum {equation!r} in the ONNX file has an ellipsis: write its dimensions out")
    sizes = {
        label: n for term, shape in zip(operands, shapes, strict=True) for label, n in zip(term, shape, strict=True)
    }
    if "->" not in equation:
        result = "".join(sorted(label for label in sizes if terms.count(label) == 1))
    total, left = 0, set(operands[0])
    for position, term in enumerate(operands[1:], start=1):
        later = set(result).union(*operands[position + 1 :])
        right = set(term)
        # A label that only one side has and nobody needs later is summed up before the product.
        left, right = left & (right | later), right & (left | later)
        if (left & right) - later:
            total += 2 * math.prod(sizes[label] for label in left | right)
        left = (left | right) & later
    return total


def _attention_flops(node: OnnxNode, shapes: list[tuple[int, ...]]) -> int:
    query, key, value = shapes[:3]
    if len(query) == 4:
        batch, heads, length, width = query
        return 2 * batch * heads * length * key[2] * (width + value[3])
    # Three dimensions: (batch, length, heads * width); V has its own number of heads.
    repeats = int(str(node.attributes["q_num_heads"])) // int(str(node.attributes["kv_num_heads"]))
    batch, length, widths = query
    return 2 * batch * length * key[1] * (widths + value[2] * repeats)
