"""The loss of Hugging Face's causal language models without the logits of all tokens at once.

Recognised is a model whose ``forward`` hands what its output layer returns to ``loss_function`` and to the output, and
to nothing else, with the common loss of causal language models. In a training pass with labels the output layer then
returns its input, the loss is `linear_cross_entropy` of that and the layer's weight, and the model's output has no
logits. All other passes are as before.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsync_opt.kernels import KernelOptions, layers
from qsync_opt.runtimes.torch.interception import operator_name

_COMMON_LOSS = "ForCausalLMLoss"
_LOGITS = "logits"

Choice = Callable[[], tuple[str | None, KernelOptions | None]]
"""Precision and kernel options of the output layer in the present pass; None: as torch's settings say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """A causal language model inside a model, and the path of its output layer."""

    model: nn.Module
    layer: nn.Linear
    layer_path: str


def loss_heads(model: nn.Module) -> list[LossHead]:
    """The causal language models in a model whose output layer and loss are recognised."""
    heads = []
    for path, module in model.named_modules():
        name = _output_layer(module)
        if name is not None:
            heads.append(LossHead(model=module, layer=getattr(module, name), layer_path=f"{path}.{name}".lstrip(".")))
    return heads


def loss_layers(model: nn.Module) -> tuple[str, ...]:
    """Names of the linear operators whose loss a plan computes in chunks."""
    own = [path for path, module in model.named_modules() if isinstance(module, layers.LinearCrossEntropy)]
    return tuple(operator_name(path, "linear", 0) for path in (*own, *(head.layer_path for head in loss_heads(model))))


def _output_layer(module: nn.Module) -> str | None:
    loss, config = getattr(module, "loss_function", None), getattr(module, "config", None)
    common = getattr(loss, "__name__", "") == _COMMON_LOSS and loss.__module__.startswith("transformers.")
    if not common or "forward" in module.__dict__:
        return None
    kind: Any = type(module)
    name = _logits_from(kind)
    layer = None if name is None else getattr(module, name, None)
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return None
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return None if hooks or layer.out_features != getattr(config, "vocab_size", None) else name


@functools.cache
def _logits_from(kind: type[nn.Module]) -> str | None:
    """Attribute of the layer that a class computes its logits by, None if it does anything else with them."""
    function = inspect.unwrap(kind.forward)
    if "labels" not in inspect.signature(function).parameters:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None
    layers = [_called_attribute(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) and _sets(node)]
    stores = sum(_is_logits(node, ast.Store) for node in ast.walk(tree))
    handed_on = sum(_is_logits(node, ast.Load) for use in ast.walk(tree) for node in _handed_on(use))
    loads = sum(_is_logits(node, ast.Load) for node in ast.walk(tree))
    return layers[0] if len(layers) == stores == 1 and loads == handed_on else None


def _is_logits(node: ast.AST, context: type[ast.expr_context]) -> bool:
    return isinstance(node, ast.Name) and node.id == _LOGITS and isinstance(node.ctx, context)


def _sets(node: ast.Assign) -> bool:
    return any(_is_logits(target, ast.Store) for target in node.targets)


def _called_attribute(node: ast.AST) -> str | None:
    """``name`` of ``self.name(one argument)``."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    function = node.func
    own = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"
    return function.attr if own and isinstance(function, ast.Attribute) else None


def _handed_on(node: ast.AST) -> list[ast.AST]:
    """What an expression hands on as it is: to the loss function, to an output class, or as part of a tuple."""
    if isinstance(node, ast.Tuple):
        return list(node.elts)
    if not isinstance(node, ast.Call):
        return []
    if _called_name(node) == "loss_function" or _called_name(node)[:1].isupper():
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    return []


def _called_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


class ChunkedLoss:
    """Replaces the loss of one head, until it is removed.

    It is placed before a model's operators are intercepted and removed after that has ended. ``active`` is True while
    a training pass with labels runs.
    """

    def __init__(self, head: LossHead, choose: Choice) -> None:
        self.head, self._choose = head, choose
        self.active = False
        model: Any = head.model
        layer: Any = head.layer
        forward, project = model.forward, layer.forward
        self._loss: Callable[..., Tensor] = model.loss_function
        self._own_loss = model.__dict__.get("_loss_function")
        names = list(inspect.signature(forward).parameters)
        place = names.index("labels")

        @functools.wraps(forward)
        def with_chunks(*args: Any, **kwargs: Any) -> Any:
            labels = args[place] if len(args) > place else kwargs.get("labels")
            if labels is None or not (model.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            self.active = True
            try:
                return _without_logits(forward(*args, **kwargs))
            finally:
                self.active = False

        @functools.wraps(project)
        def as_it_is(x: Tensor) -> Tensor:
            result: Tensor = x if self.active else project(x)
            return result

        model.forward, layer.forward = with_chunks, as_it_is
        model.loss_function = self._chunked

    def _chunked(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The common loss; ``logits`` are the layer's input."""
        if not self.active:
            arguments = (logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
            return self._loss(*arguments, **kwargs)
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        precision, options = self._choose()
        with contextlib.nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction():
            loss = layers.linear_cross_entropy(
                logits,
                self.head.layer.weight,
                shift_labels.reshape(logits.shape[:-1]).to(logits.device),
                self.head.layer.bias,
                ignore_index=ignore_index,
                reduction="mean" if num_items_in_batch is None else "sum",
                precision=precision,
                options=options,
            )
        if num_items_in_batch is None:
            return loss
        return loss / (
            num_items_in_batch.to(loss.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch
        )

    def remove(self) -> None:
        """Give the model its loss back."""
        model: Any = self.head.model
        for module in (model, self.head.layer):
            module.__dict__.pop("forward", None)
        if self._own_loss is None:
            model.__dict__.pop("_loss_function", None)
        else:
            model.loss_function = self._own_loss


def _without_logits(output: Any) -> Any:
    """An output whose logits are None: what stands there is the input of the output layer."""
    if isinstance(output, tuple):
        return (output[0], None, *output[2:])
    return type(output)(**{name: value for name, value in output.items() if name != _LOGITS})
