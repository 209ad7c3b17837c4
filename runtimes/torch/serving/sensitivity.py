"""Harm of weight schemes by group: what rounding changes in the outputs of a group's products, on a few hundred tokens.

For a matrix W that becomes W + dW, and inputs x with second moments S = E[x x^T], the outputs change by
E[|dW x|^2] = tr(dW S dW^T). That is divided by E[|W x|^2], and weighed by what the group adds to the hidden states: the
mean of |added|^2 / |after|^2 over tokens, but for the first of each piece, on which outliers gather.

`output_divergence` measures what the indicator stands for: the Kullback-Leibler divergence of the next token's
distribution with one group rounded.

Source: ours; LLM-PQ (PPoPP 2024) takes the variance of x for S, without the mean and the correlations. The second
moments are those of GPTQ (ICLR 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.config import DecoderConfig
from qsync_opt.runtimes.torch.serving.groups import Attention, Mlp
from qsync_opt.runtimes.torch.serving.packing import unpack
from qsync_opt.runtimes.torch.serving.pipeline import generate_here
from qsync_opt.runtimes.torch.serving.stage import StageModel, group_names
from qsync_opt.runtimes.torch.serving.weights import WeightSource, open_model
from qsync_opt.serving import Harm, Stage

_MATRICES = {"attn": ("qkv", "out"), "mlp": ("gate_up", "down")}
Progress = Callable[[int, int, str], None]


class _Products(torch.overrides.TorchFunctionMode):
    """Calls a function with the input and the output of every ``F.linear`` within, in turn."""

    def __init__(self, seen: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._seen, self._count = seen, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            self._seen(self._count, args[0], result)
            self._count += 1
        return result


def measure_harm(
    model: str | Path | tuple[DecoderConfig, WeightSource],
    prompts: Sequence[Sequence[int]],
    schemes: Sequence[str] = ("W4", "W8"),
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> Harm:
    """The indicator of every group and scheme of a model.

    Args:
        model: A model folder, a ``.gguf`` file, or a configuration with weights.
        prompts: Token numbers of text, a few hundred in all, in pieces of one length.
        schemes: Weight schemes; ``"W32"`` has the harm 0.
        name: Of the model.
        progress: Called before every group.

    Raises:
        ProblemError: The prompts are empty, of unlike lengths, or not this model's tokens; or an output is no number.
        UnsupportedError: The runtime has no such scheme.

    Source: ours; see the module.
    """
    config, source = model if isinstance(model, tuple) else open_model(model)
    label = name or (Path(model).name if isinstance(model, str | Path) else config.kind)
    _check(prompts)
    whole = _stage(config, source, {})
    names = group_names(config.layers)
    moments, shares = _moments(whole, prompts, 2 * len(names))
    result: dict[str, dict[str, float]] = {}
    for k, group in enumerate(names):
        if progress is not None:
            progress(k, len(names), group)
        kind = group.partition(".")[2]
        plain = _weights(whole.groups[k], kind)
        result[group] = {}
        for scheme in schemes:
            rounded = StageModel(config, source, Stage(device="here", groups=(group,)), {group: scheme}).groups[0]
            harm = 0.0
            for number, (before, after) in enumerate(zip(plain, _weights(rounded, kind), strict=True)):
                second = moments[2 * k + number]
                change = after - before
                harm += float(((change @ second) * change).sum() / ((before @ second) * before).sum().clamp_min(1e-30))
            harm *= shares[k]
            if not math.isfinite(harm):
                raise ProblemError(
                    f"the harm of group {group!r} in scheme {scheme!r} is {harm}: the model's outputs are no numbers; "
                    "check its weights"
                )
            result[group][scheme] = harm
    return Harm(model=label, measure="output error", tokens=sum(map(len, prompts)), groups=result)


def output_divergence(
    model: str | Path | tuple[DecoderConfig, WeightSource],
    prompts: Sequence[Sequence[int]],
    scheme: str,
    *,
    progress: Progress | None = None,
) -> dict[str, float]:
    """By group: the mean Kullback-Leibler divergence, in nats, of the token after each prompt, with that group rounded.

    Args:
        model: A model folder, a ``.gguf`` file, or a configuration with weights.
        prompts: Token numbers of text, in pieces of one length; more pieces, less noise.
        scheme: Of the one group; all others are in 32 bits.
        progress: Called before every group.

    Raises:
        ProblemError: The prompts are empty, of unlike lengths, or not this model's tokens.
        UnsupportedError: The runtime has no such scheme.

    Source: ours.
    """
    config, source = model if isinstance(model, tuple) else open_model(model)
    _check(prompts)
    whole = _stage(config, source, {})
    expected = _log_probabilities(whole, prompts)
    result = {}
    names = group_names(config.layers)
    for k, group in enumerate(names):
        if progress is not None:
            progress(k, len(names), group)
        kept = whole.groups[k]
        whole.groups[k] = StageModel(config, source, Stage(device="here", groups=(group,)), {group: scheme}).groups[0]
        actual = _log_probabilities(whole, prompts)
        whole.groups[k] = kept
        result[group] = float((expected.exp() * (expected - actual)).sum(-1).mean().clamp_min(0))
    return result


def _check(prompts: Sequence[Sequence[int]]) -> None:
    if not prompts or len({len(prompt) for prompt in prompts}) != 1:
        raise ProblemError("prompts must be pieces of text of one length, at least one")


def _stage(config: DecoderConfig, source: WeightSource, schemes: dict[str, str]) -> StageModel:
    names = group_names(config.layers)
    every = {**dict.fromkeys(names, "W32"), **schemes}
    return StageModel(config, source, Stage(device="here", groups=names), every)


def _weights(group: Attention | Mlp, kind: str) -> list[torch.Tensor]:
    return [unpack(getattr(group, name), torch.float32) for name in _MATRICES[kind]]


class _Tap:
    """A group that notes which share of the hidden states it adds."""

    def __init__(self, group: Attention | Mlp, length: int, shares: list[float]) -> None:
        self._group, self._length, self._shares = group, length, shares

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __call__(self, x: torch.Tensor, layout: Any) -> torch.Tensor:
        y = self._group(x, layout)
        after = y.float().reshape(-1, self._length, y.shape[-1])
        added = after - x.float().reshape(after.shape)
        share = added.pow(2).sum(-1) / after.pow(2).sum(-1).clamp_min(1e-30)
        self._shares.append(float((share[:, 1:] if self._length > 1 else share).mean()))
        return y


def _moments(
    stage: StageModel, prompts: Sequence[Sequence[int]], products: int
) -> tuple[list[torch.Tensor], list[float]]:
    """The second moments of the inputs of every product, and the share that every group adds, in order."""
    moments: list[torch.Tensor] = []
    shares: list[float] = []

    def seen(number: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if number < products:
            flat = x.reshape(-1, x.shape[-1]).float()
            moments.append(flat.T @ flat / len(flat))

    groups: Any = stage.groups
    plain = list(groups)
    groups[:] = [_Tap(group, len(prompts[0]), shares) for group in plain]
    try:
        with _Products(seen):
            generate_here([stage], prompts, 1)
    finally:
        groups[:] = plain
    return moments, shares


def _log_probabilities(stage: StageModel, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Log-probabilities (prompts, vocabulary) of the token after each prompt."""
    scores: list[torch.Tensor] = []
    with _Products(lambda number, x, y: scores.append(y)):
        generate_here([stage], prompts, 1)
    last = scores[-1]
    return last.reshape(len(prompts), -1).double().log_softmax(-1)
