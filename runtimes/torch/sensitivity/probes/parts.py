"""Parts of a batch that may stand for all of it: how they are taken, and whether they say what the whole batch says.

A loss over pairs of samples (contrastive, with negatives from the batch) is another one in a part of the batch, as are
losses of sorted, ranked or clustered samples; nothing of a part can then be scaled to the batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from qsync_opt.errors import QSyncError, first_line
from qsync_opt.runtimes.torch.sensitivity.probes.gradient import ProbeMemoryError, twice_differentiable
from qsync_opt.runtimes.torch.sensitivity.reductions import as_real, strided

PARTS = 4
"""Number of parts of a batch: a step that is differentiated twice needs several times the memory."""
_NORMALIZED = 8
"""Smallest part for a model that normalizes over samples: means over fewer would differ too much."""
_TOLERANCE = 0.1
"""Share of the batch's gradient, at most, that is no mean or sum of those of its parts."""
_SAMPLE = 1 << 12
"""Elements of each parameter's gradient that are compared."""

_LOGGER = logging.getLogger(__name__)
Step = Callable[[nn.Module, Any], Tensor]


class Part(NamedTuple):
    """Some samples of a batch, their share of it, and their indices."""

    batch: Any
    share: float
    chosen: range


def parts_of(model: nn.Module, batch: Any) -> tuple[Part, ...] | None:
    """Equal parts of a batch, two or more, of interleaved samples; None if the batch cannot be divided.

    Samples are the first dimension of all tensors of a batch, of one size.
    """
    leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
    sizes = {int(x.shape[0]) for x in leaves}
    if len(sizes) != 1:
        return None
    (samples,) = sizes
    size = max(samples // PARTS, _NORMALIZED if _normalizes_samples(model) else 1)
    if 2 * size > samples:
        return None
    step = samples // size
    return tuple(_part(batch, range(start, start + size * step, step), samples) for start in range(step))


def _part(batch: Any, chosen: range, samples: int) -> Part:
    def some(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim():
            return x
        part = x.detach()[torch.tensor(chosen, device=x.device)]
        return part.requires_grad_(x.requires_grad)

    return Part(tree_map(some, batch), len(chosen) / samples, chosen)


def _normalizes_samples(model: nn.Module) -> bool:
    normalization = nn.modules.batchnorm._NormBase
    return any(
        isinstance(module, normalization) and (module.training or not module.track_running_stats)
        for module in model.modules()
    )


def add_up(model: nn.Module, run: Step, batch: Any, parts: tuple[Part, ...]) -> bool:
    """Whether loss and gradient of a batch are a mean or sum of those of its parts.

    The parts may have unlike weights, as where a loss is a mean over the tokens that count. Dropout is left out, and
    batch normalization, which couples samples a little, normalizes as in evaluation.

    Raises:
        ProbeMemoryError: There is not enough memory.

    Source:
        Ours.
    """
    (whole,) = {len(part.chosen) * len(parts) for part in parts}
    samples = round(len(parts[0].chosen) / parts[0].share)
    together = batch if whole == samples else _part(batch, range(whole), samples).batch
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cards = {parameter.device for parameter in parameters if parameter.is_cuda}
    try:
        with twice_differentiable("probes"), torch.random.fork_rng(devices=list(cards)), _Deterministic():
            rows = [_loss_and_gradient(run(model, some), parameters) for some in (together, *(p.batch for p in parts))]
    except ProbeMemoryError:
        raise
    except (QSyncError, RuntimeError, ValueError, TypeError, LookupError) as error:
        _LOGGER.info("the batch is probed as a whole: %s", first_line(error)[:400])
        return False
    loss, gradient = rows[0]
    losses, gradients = [row[0] for row in rows[1:]], torch.stack([row[1] for row in rows[1:]], 1)
    weights = torch.linalg.lstsq(gradients, gradient[:, None], driver="gelsd").solution[:, 0]
    scale = 1.0 if bool(weights.sum() < len(parts) ** 0.5) else float(len(parts))
    rest = float((gradients @ weights - gradient).norm() / gradient.norm().clamp(min=torch.finfo(torch.float64).tiny))
    drift = abs(float(weights @ torch.tensor(losses, dtype=torch.float64)) - loss)
    off = max(rest, abs(float(weights.sum()) / scale - 1), drift / max(abs(loss), *map(abs, losses), 1e-30))
    if off <= _TOLERANCE:
        return True
    _LOGGER.info(
        "the batch is probed as a whole: loss and gradient are not the mean of those of its parts (%.0f %% apart), so "
        "that the loss couples samples, as losses over pairs do",
        100 * min(off, 10.0),
    )
    return False


def _loss_and_gradient(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[float, Tensor]:
    """A loss, and some elements of its gradient in FP64 on the host."""
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(loss, parameters, allow_unused=True)
    some = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None:
            gradient = parameter.new_zeros(1).expand(parameter.shape)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        some.append(strided(as_real(gradient), _SAMPLE).detach().cpu().double())
    flat = torch.cat(some)
    value = float(loss.detach())
    if not (math.isfinite(value) and bool(torch.isfinite(flat).all())):
        raise ValueError("the loss or its gradient is not finite without dropout")
    return value, flat


_DROPOUTS = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
        torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
    }
)  # fmt: skip


class _Deterministic(TorchFunctionMode):
    """Runs without dropout and without means over samples in batch normalization."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4], {**kwargs, **_attention_options(args), "dropout_p": 0.0}
        elif func is F.batch_norm:
            return _normalized(*args, **kwargs)
        return func(*args, **kwargs)


def _attention_options(args: tuple[Any, ...]) -> dict[str, Any]:
    return {"is_causal": args[5]} if len(args) > 5 else {}


def _normalized(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    mean = x.new_zeros(x.shape[1]) if running_mean is None else running_mean
    variance = x.new_ones(x.shape[1]) if running_var is None else running_var
    return F.batch_norm(x, mean, variance, weight, bias, False, momentum, eps)
