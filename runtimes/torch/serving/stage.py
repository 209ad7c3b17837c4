"""One stage of a serving plan: its groups with their weights and caches, and the ends that it holds."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.runtimes.torch.serving.config import DecoderConfig
from qsync_opt.runtimes.torch.serving.groups import Attention, Embedding, Head, Mlp, Rows
from qsync_opt.runtimes.torch.serving.weights import WeightSource
from qsync_opt.serving import Plan, Stage

_LOGGER = logging.getLogger(__name__)


def group_names(layers: int) -> tuple[str, ...]:
    """The groups of a decoder in order: ``0.attn``, ``0.mlp``, ``1.attn``, ..."""
    return tuple(f"{layer}.{kind}" for layer in range(layers) for kind in ("attn", "mlp"))


def check_plan(plan: Plan, config: DecoderConfig) -> None:
    """Refuse a plan of another model.

    Raises:
        ProblemError: Its groups are not this model's, each once, in order.
    """
    actual = tuple(name for stage in plan.stages for name in stage.groups)
    expected = group_names(config.layers)
    if actual != expected:
        differ = next((a for a, b in zip(actual, expected, strict=False) if a != b), "their number")
        raise ProblemError(
            f"the plan has {len(actual)} groups and the model {len(expected)} ({expected[0]} to {expected[-1]}); they "
            f"differ first at {differ!r}; make a plan for this model"
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, padded on the left to one length."""

    tokens_BT: torch.Tensor
    padding_B: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], vocabulary: int) -> Batch:
        """The batch of some prompts.

        Raises:
            ProblemError: There is none, one is empty, or a token is not in the vocabulary.
        """
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ProblemError("prompts must be at least one, each with at least one token")
        for k, prompt in enumerate(prompts):
            for token in prompt:
                if not 0 <= token < vocabulary:
                    raise ProblemError(
                        f"prompt {k} has the token {token}, but the model knows 0 to {vocabulary - 1}; "
                        "use the tokenizer of this model"
                    )
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        tokens = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        return cls(torch.tensor(tokens), torch.tensor(padding))


class StageModel:
    """A stage that runs: hidden states or tokens in, hidden states or next tokens out."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        stage: Stage,
        schemes: Mapping[str, str],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        names = group_names(config.layers)
        self.config, self.dtype = config, dtype
        self.first, self.last = stage.groups[0] == names[0], stage.groups[-1] == names[-1]
        self.groups: list[Attention | Mlp] = []
        for name in stage.groups:
            layer, _, kind = name.partition(".")
            if name not in names:
                raise ModelError(f"the model has no group {name!r}; it has {names[0]} to {names[-1]}")
            build = Attention if kind == "attn" else Mlp
            self.groups.append(build(config, source, int(layer), schemes[name], dtype))
            _LOGGER.info("loaded %s in %s", name, schemes[name])
        self._embedding = Embedding(config, source, dtype) if self.first else None
        self._head = Head(config, source, dtype, self._embedding) if self.last else None

    @property
    def bytes(self) -> int:
        """Memory of the weights, ends included."""
        total = sum(group.bytes for group in self.groups)
        weights = [end.weight for end in (self._embedding, self._head) if end is not None]
        return total + sum({w.data_ptr(): w.numel() * w.element_size() for w in weights}.values())

    def reserve(self, sequences: int, positions: int) -> None:
        """Make empty caches for so many sequences and positions."""
        for group in self.groups:
            group.reserve(sequences, positions)

    @torch.inference_mode()
    def hidden(self, x: torch.Tensor, at: Rows) -> torch.Tensor:
        """The hidden states after this stage; the first stage takes tokens (B, T)."""
        if self._embedding is not None:
            x = self._embedding(x)
        for group in self.groups:
            x = group(x, at)
        return x

    @torch.inference_mode()
    def scores(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """The scores of the next token (B, vocabulary), on the last stage."""
        assert self._head is not None, "only the last stage has a head"
        return self._head(x_BTH[:, -1])

    def next_tokens(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """The most likely next token of each row."""
        return self.scores(x_BTH).argmax(-1)


def microbatch_rows(sequences: int, parts: int) -> list[slice]:
    """The rows of each of ``parts`` micro-batches, as equal as they can be; fewer where there are fewer rows."""
    parts = min(parts, sequences)
    borders = [sequences * k // parts for k in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(borders)]
