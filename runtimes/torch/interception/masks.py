"""Masks of attention in compiled models: left out where they say nothing that the kernel does not know.

Libraries leave a mask out by looking at values, which they cannot while a model is traced: transformers then gives a
decoder its lower triangle, and up to 5.17 an encoder a mask that hides nothing, expanded along the keys. Fused kernels
take up to twice as long with a mask, and none takes one of that layout: torch then computes attention product by
product, in FP32.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from qsync_opt.errors import first_line
from qsync_opt.runtimes.torch.interception.randomness import WithoutRandomness

_LOGGER = logging.getLogger(__name__)
_ATTENTION: Any = F.scaled_dot_product_attention
_CALLS = (torch.ops.higher_order.invoke_subgraph, torch.ops.higher_order.tag_activation_checkpoint)
_OPERANDS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_IN_PLACE = {getattr(operator, f"i{name}") for name in ("add", "and", "floordiv", "mod", "mul", "or", "sub", "xor")}
_IN_PLACE |= {operator.ipow, operator.itruediv, operator.ilshift, operator.irshift, operator.setitem}


def simplify_masks(root: fx.GraphModule) -> None:
    """Have attention do without masks that are constants, and lay those out that no fused kernel takes.

    A mask is a constant if it follows from no input of the model, as the lower triangle does that is made of positions.
    One that hides nothing is left out, and the lower triangle becomes ``is_causal``. Any other mask on a card that is
    expanded along the keys is copied.

    Args:
        root: As torch.compile traces it, with its regions; changed in place.
    """
    constants = _Constants(root)
    for part in constants.parts:
        changed = False
        for node in part.graph.find_nodes(op="call_function", target=_ATTENTION):
            given = dict(zip(_OPERANDS, node.args, strict=False)) | node.kwargs
            mask = given.get("attn_mask")
            if isinstance(mask, fx.Node):
                changed |= _left_out(node, given, constants.value(mask)) or _laid_out(node, mask)
        if changed:
            part.recompile()


def _left_out(node: fx.Node, given: dict[str, Any], mask: Tensor | None) -> bool:
    """Whether attention does without its mask, whose value is given if it is a constant."""
    try:
        kind = None if mask is None else _kind(mask)
    except torch.OutOfMemoryError as failure:
        _LOGGER.debug("a mask is kept: %s", first_line(failure))
        return False
    if kind is None:
        return False
    given |= {"attn_mask": None, "is_causal": kind == _CAUSAL}
    node.args, node.kwargs = tuple(given.pop(name) for name in _OPERANDS[:3]), given
    return True


_NOTHING, _CAUSAL = "hides nothing", "is the lower triangle"


def _kind(mask: Tensor) -> str | None:
    """Which of the masks it is that a kernel does without."""
    mask = mask[tuple(slice(0, 1 if stride == 0 else None) for stride in mask.stride()[:-2])]  # expanded: all the same
    visible = mask if mask.dtype is torch.bool else mask == 0
    if visible.all():
        return _NOTHING
    if visible.dim() < 2 or visible.shape[-2] != visible.shape[-1]:
        return None
    if not (visible == torch.ones_like(visible).tril()).all():
        return None
    if mask.dtype is not torch.bool and not (mask[~visible] <= torch.finfo(mask.dtype).min).all():
        return None  # a bias, which hides nothing
    return _CAUSAL


def _laid_out(node: fx.Node, mask: fx.Node) -> bool:
    """Whether the mask is copied for attention, because it is expanded along the keys of attention on a card."""
    value = mask.meta.get("example_value")
    if not isinstance(value, Tensor) or not value.is_cuda or value.dim() == 0 or value.stride(-1) == 1:
        return False
    with node.graph.inserting_before(node):
        copy = node.graph.call_method("contiguous", (mask,))
    node.replace_input_with(mask, copy)
    return True


class _Constants:
    """Values of the nodes of a traced graph and its regions that follow from no input.

    Attributes:
        parts: The graph and its regions, each once.
    """

    def __init__(self, root: fx.GraphModule) -> None:
        self.parts = [part for part in root.modules() if isinstance(part, fx.GraphModule)]
        self._calls: dict[fx.Graph, list[fx.Node | None]] = defaultdict(list)
        """Regions' graphs to the nodes that call them; None: in a way of which nothing is known."""
        for part in self.parts:
            for node in part.graph.find_nodes(op="get_attr"):
                region = getattr(part, str(node.target), None)
                if isinstance(region, fx.GraphModule):
                    self._calls[region.graph] += [user if user.target in _CALLS else None for user in node.users]
        self._values: dict[fx.Node, Tensor | None] = {}

    def value(self, node: fx.Node) -> Tensor | None:
        """The value of a tensor; None if it depends on an input, or on random numbers."""
        if node not in self._values:
            self._values[node] = self._passed(node) if node.op == "placeholder" else self._computed(node)
        return self._values[node]

    def _passed(self, placeholder: fx.Node) -> Tensor | None:
        """What every call of a region passes, if all pass the same constant."""
        inputs = placeholder.graph.find_nodes(op="placeholder")
        index = inputs.index(placeholder) - len(inputs)  # they come last among the arguments of a call
        operands = dict.fromkeys(None if call is None else call.args[index] for call in self._calls[placeholder.graph])
        values = [self.value(node) if isinstance(node, fx.Node) else None for node in operands]
        first = values[0] if values else None
        if first is None or any(other is None or not torch.equal(first, other) for other in values[1:]):
            return None
        return first

    def _computed(self, result: fx.Node) -> Tensor | None:
        needed, values, found = set[fx.Node](), dict[fx.Node, Any](), [result]
        while found:
            node = found.pop()
            if node in needed or node in values:
                continue
            if node.op == "placeholder" and (passed := self.value(node)) is not None:
                values[node] = passed
            elif node.op in ("call_function", "call_method"):
                needed.add(node)
                found += node.all_input_nodes
            else:
                return None
        if any(user not in needed and _writes(user) for node in (*needed, *values) for user in node.users):
            return None
        if values and any(map(_writes, needed)):  # into what other calls are passed
            return None
        try:
            with unset_fake_temporarily(), torch.no_grad(), WithoutRandomness():
                for node in result.graph.nodes:
                    if node in needed:
                        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                        function = node.target
                        values[node] = (
                            function(*args, **kwargs)
                            if callable(function)
                            else getattr(args[0], function)(*args[1:], **kwargs)
                        )
        except Exception as failure:
            _LOGGER.debug("a mask is kept, because it is not computed ahead: %s", first_line(failure))
            return None
        value = values[result]
        return value if isinstance(value, Tensor) else None


def _writes(node: fx.Node) -> bool:
    """Whether a node may write into a tensor that it is given."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.target in _IN_PLACE or "out" in node.kwargs or (name.endswith("_") and not name.endswith("__"))
