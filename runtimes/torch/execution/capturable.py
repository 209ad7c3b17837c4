"""Which models' passes cannot be captured as CUDA graphs?"""

from __future__ import annotations

from torch import nn

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.execution.checks import is_sharded, model_device

NO_SECOND_DERIVATIVE = (
    "the gradient of a captured pass cannot be differentiated again: do without graphed(), or capture, for a loss that "
    "holds gradients, such as a gradient penalty"
)
"""What a second differentiation of captured passes ends in."""


def check_capturable(model: nn.Module) -> None:
    """Refuse models whose passes cannot be captured, as far as that is known beforehand.

    Raises:
        UnsupportedError: The model is not on a card, is sharded, has recurrent layers, or layers whose passes wait for
            other workers.
    """
    waiting = next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
    if waiting is not None:
        raise UnsupportedError(
            f"graphed: {waiting or 'the model'!r} is a SyncBatchNorm, whose passes wait for the other workers, but "
            "capturing runs passes that the others do not: use BatchNorm, or run this model operator by operator"
        )
    if is_sharded(model):
        raise UnsupportedError("graphed: the model is sharded (FSDP): its weights move, which a captured pass cannot")
    recurrent = next((name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)), None)
    if recurrent is not None:
        raise UnsupportedError(
            f"graphed: {recurrent or 'the model'!r} is a recurrent layer, which keeps its parameters in a place of its "
            "own besides, so that a captured pass would lose their gradients: run this model operator by operator"
        )
    device = model_device(model)
    if device.type != "cuda":
        raise UnsupportedError(f"graphed: the model is on {device}: CUDA graphs need a model on a card")
