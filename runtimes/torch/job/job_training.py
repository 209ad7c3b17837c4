"""Can the job train at all, and by which loss? Asked once, before anything is measured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qsync_opt.errors import ModelError
from qsync_opt.runtimes.torch.job.measuring import Job
from qsync_opt.runtimes.torch.support.iteration import default_loss
from qsync_opt.runtimes.torch.support.outputs import own_loss
from qsync_opt.runtimes.torch.support.unchanged import model_unchanged

_LOGGER = logging.getLogger(__name__)


def check_training(job: Job) -> list[Tensor]:
    """Run the forward pass once; a loss that is guessed is told to the log.

    Args:
        job: Whose model, batch and loss are tried. Nothing of it changes.

    Returns:
        What gets a gradient besides the model's parameters: of a loss that has parameters of its own, say.

    Raises:
        ModelError: The loss is not one number, or no gradient flows from it.
    """
    example = job.example
    with model_unchanged(job.model):
        try:
            output = example.model(*example.args, **example.kwargs)
            loss = (example.loss or default_loss)(output)
        except torch.cuda.OutOfMemoryError:  # FP32 need not fit
            return []
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ModelError(f"the loss is {kind}, but one number is needed: let the loss function end with .mean()")
        if loss.grad_fn is None:
            raise ModelError(
                "no gradient flows from the loss: either every parameter is frozen (requires_grad=False), or the model "
                "or the loss detaches its result; there is nothing to train"
            )
        if example.loss is None and own_loss(output) is None:
            _LOGGER.warning(
                "the model returns no loss and none was given: the sum of its outputs stands in for it, which says "
                "little about what rounding costs; pass loss=, a function of the model's output"
            )
        own = {id(parameter) for parameter in job.model.parameters()}
        return [leaf for leaf in _leaves(loss) if id(leaf) not in own]


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[nn.Module]:
    """Compute gradients, in whatever mode the script is, and leave its random state as it was.

    What is drawn to measure differs between ranks, and between starts; what the script draws next must not.
    """
    cards = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(cards)), torch.inference_mode(False), torch.enable_grad():
        yield model


@contextlib.contextmanager
def gradients_put_back(tensors: list[Tensor]) -> Iterator[None]:
    """Leave the gradients of some tensors as they were, whatever passes run within the block."""
    gradients = [tensor.grad for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.grad = None
        yield
    finally:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient


def _leaves(loss: Tensor) -> list[Tensor]:
    """Tensors that a backward pass would give gradients to."""
    found, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found.append(leaf)
        waiting += [before for before, _ in node.next_functions]
    return found
