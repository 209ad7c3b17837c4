"""Harm of weight schemes by group: how far rounding moves the next token's distribution, to second order.

With p the distribution of the token after each position, and d what rounding a group's weights adds to its outputs,
the Kullback-Leibler divergence is half of E[(g . d)^2], where g is the gradient of log p(y) with respect to these
outputs for tokens y that are drawn from p: the outputs' Fisher information, through all that follows. All schemes
share g, and d takes one pass through the rounded group, on the inputs that the whole model gives it. What rounding adds
to the outputs alone, tr(dW S dW^T) with second moments S of the inputs, says nothing of what the rest makes of it.

`output_divergence` measures the same without the second order: passes through the model with one group rounded.

Source: ours; the Fisher information in place of a Hessian is that of Martens and Grosse (ICML 2015). LLM-PQ (2024)
takes the squared step times the variance of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.config import DecoderConfig
from qsync_opt.runtimes.torch.serving.groups import Attention, Mlp, Residual
from qsync_opt.runtimes.torch.serving.stage import StageModel, check_prompts, group_names
from qsync_opt.runtimes.torch.serving.steps import GREEDY, Layout, Step, pages_of
from qsync_opt.runtimes.torch.serving.weights import WeightSource, open_model
from qsync_opt.serving import Harm, Stage

_DRAWS = 8
"""Draws of the tokens after a piece of text."""
_WHOLE = "W32"
Progress = Callable[[int, int, str], None]


def measure_harm(
    model: str | Path | tuple[DecoderConfig, WeightSource],
    prompts: Sequence[Sequence[int]],
    schemes: Sequence[str] = ("W4", "W8"),
    *,
    name: str | None = None,
    draws: int = _DRAWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Harm:
    """The indicator of every group and scheme of a model, in nats for each token.

    It holds the model in 32 bits and in every scheme, and takes one pass forward and ``draws`` backward for each piece.

    Args:
        model: A model folder, a ``.gguf`` file, or a configuration with weights.
        prompts: Token numbers of text, a few hundred in all, in pieces of one length.
        schemes: Weight schemes; ``"W32"`` has the harm 0.
        name: Of the model.
        draws: Draws of the tokens that follow; the relative error is about sqrt(2 / (draws * pieces)).
        seed: Of the draws.
        progress: Called before every piece of text.

    Raises:
        ProblemError: The prompts are empty, of unlike lengths, or not this model's tokens; or an output is no number.
        UnsupportedError: The runtime has no such scheme.

    Source: ours; see the module.
    """
    if draws < 1:
        raise ProblemError(f"draws is {draws}, but it must be at least 1")
    config, source = model if isinstance(model, tuple) else open_model(model)
    label = name or (Path(model).name if isinstance(model, str | Path) else config.kind)
    _check(config, prompts)
    names = group_names(config.layers)
    whole = _stage(config, source, _WHOLE)
    rounded = {s: _stage(config, source, s).groups for s in schemes}
    _reserve([whole.groups, *rounded.values()], len(prompts[0]))
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(len(names), len(schemes), dtype=torch.float64)
    for k, prompt in enumerate(prompts):
        if progress is not None:
            progress(k, len(prompts), f"piece {k}")
        layout = _layout(prompt)
        hidden, scores = _forward(whole, layout)
        with torch.no_grad():
            # Against the group in 32 bits without a gradient too: code that has none rounds otherwise.
            changes = [
                torch.stack([_after(rounded[s][g], x, layout) for s in schemes]) - _after(group, x, layout)
                for g, (group, x) in enumerate(zip(whole.groups, hidden, strict=False))
            ]
            probabilities = scores.detach().softmax(-1)
        for _ in range(draws):
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            score = torch.zeros_like(probabilities).scatter_(1, drawn, 1.0) - probabilities
            gradients = torch.autograd.grad(scores, hidden[1:], score, retain_graph=True)
            slopes = [(change * g).flatten(1).double().sum(1) for change, g in zip(changes, gradients, strict=True)]
            total += torch.stack(slopes).square()
    harms = total / (2 * draws * sum(map(len, prompts)))
    result: dict[str, dict[str, float]] = {}
    for group, values in zip(names, harms.tolist(), strict=True):
        result[group] = dict(zip(schemes, values, strict=True))
        for scheme, harm in result[group].items():
            if not math.isfinite(harm):
                raise ProblemError(
                    f"the harm of group {group!r} in scheme {scheme!r} is {harm}: the model's outputs are no numbers; "
                    "check its weights"
                )
    return Harm(model=label, measure="divergence to second order", tokens=sum(map(len, prompts)), groups=result)


def output_divergence(
    model: str | Path | tuple[DecoderConfig, WeightSource],
    prompts: Sequence[Sequence[int]],
    scheme: str,
    *,
    progress: Progress | None = None,
) -> dict[str, float]:
    """By group: the mean Kullback-Leibler divergence, in nats, of the token after each position if it is rounded.

    Args:
        model: A model folder, a ``.gguf`` file, or a configuration with weights.
        prompts: Token numbers of text, in pieces of one length; more tokens, less noise.
        scheme: Of the one group; all others are in 32 bits.
        progress: Called before every piece of text.

    Raises:
        ProblemError: The prompts are empty, of unlike lengths, or not this model's tokens.
        UnsupportedError: The runtime has no such scheme.

    Source: ours.
    """
    config, source = model if isinstance(model, tuple) else open_model(model)
    _check(config, prompts)
    names = group_names(config.layers)
    whole, rounded = _stage(config, source, _WHOLE), _stage(config, source, scheme).groups
    _reserve([whole.groups, rounded], len(prompts[0]))
    total = dict.fromkeys(names, 0.0)
    for k, prompt in enumerate(prompts):
        if progress is not None:
            progress(k, len(prompts), f"piece {k}")
        layout = _layout(prompt)
        with torch.no_grad():
            inputs = list(_hidden(whole, layout))
            expected = whole.scores(inputs[-1]).double().log_softmax(-1)
            for g, name in enumerate(names):
                x = _after(rounded[g], inputs[g], layout)
                for group in whole.groups[g + 1 :]:
                    x = _after(group, x, layout)
                actual = whole.scores(x).double().log_softmax(-1)
                total[name] += float((expected.exp() * (expected - actual)).sum().clamp_min(0))
    return {name: value / sum(map(len, prompts)) for name, value in total.items()}


def _check(config: DecoderConfig, prompts: Sequence[Sequence[int]]) -> None:
    if not prompts or len({len(prompt) for prompt in prompts}) != 1:
        raise ProblemError("prompts must be pieces of text of one length, at least one")
    check_prompts(prompts, config.vocabulary)


def _stage(config: DecoderConfig, source: WeightSource, scheme: str) -> StageModel:
    names = group_names(config.layers)
    return StageModel(config, source, Stage(device="here", groups=names), dict.fromkeys(names, scheme))


def _reserve(stages: Sequence[Sequence[Attention | Mlp]], tokens: int) -> None:
    for groups in stages:
        for group in groups:
            group.reserve(1 + pages_of(tokens))


def _layout(prompt: Sequence[int]) -> Layout:
    pages = tuple(range(1, 1 + pages_of(len(prompt))))
    step = Step(number=0, tokens=(tuple(prompt),), starts=(0,), pages=(pages,), choices=(GREEDY,))
    return Layout.of(step, torch.device("cpu"))


def _after(group: Attention | Mlp, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    return group(Residual(x), layout).whole()


def _hidden(stage: StageModel, layout: Layout) -> Iterator[torch.Tensor]:
    """The hidden states (N, H) before the first group and after each."""
    x = stage.embed(layout.tokens_N)
    yield x
    for group in stage.groups:
        x = _after(group, x, layout)
        yield x


def _forward(stage: StageModel, layout: Layout) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The hidden states, and the scores (N, vocabulary) that gradients lead back from."""
    stage.reserve(1 + int(layout.table_SP.shape[1]))  # the cache of the last piece is part of its graph
    x = stage.embed(layout.tokens_N).detach().requires_grad_()
    hidden = [x]
    for group in stage.groups:
        x = _after(group, x, layout)
        hidden.append(x)
    return hidden, stage.scores(x)
