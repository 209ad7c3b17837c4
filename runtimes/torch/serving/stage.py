"""One stage of a serving plan: its groups with their weights and caches, and the ends that it holds."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.kernels import weight_only
from qsync_opt.runtimes.torch.serving.choosing import choose
from qsync_opt.runtimes.torch.serving.config import DecoderConfig
from qsync_opt.runtimes.torch.serving.graphs import DecodeGraphs, rounded_up
from qsync_opt.runtimes.torch.serving.groups import Attention, Embedding, Head, Mlp, Residual
from qsync_opt.runtimes.torch.serving.packing import SCHEMES, PackedWeight
from qsync_opt.runtimes.torch.serving.steps import SELF_DRAFTS, Layout, Step, drafted
from qsync_opt.runtimes.torch.serving.weights import WeightSource
from qsync_opt.serving import Plan, Stage

_LOGGER = logging.getLogger(__name__)
_MOST_JUDGED = 16
"""New tokens of a sequence, up to which passes that judge drafts are captured."""
_MOST_FILLED = 64
"""Tokens of a captured pass, whatever share of them only fills it up; else no more than half do."""
Progress = Callable[[int, int, str], None]
"""Called with the number of loaded groups, their total, and the name of the last one."""


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


def check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Refuse prompts that a model cannot read.

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


class StageModel:
    """A stage that runs: hidden states or tokens in, hidden states or next tokens out.

    Args:
        config: Of the model.
        source: Where weights are read, some rows at a time.
        stage: The groups to hold.
        schemes: Weight scheme by group.
        dtype: Type of hidden states, norms and ends.
        device: Where it runs.
        kv_bits: 8 for caches of 8 bits; None: as ``dtype``.
        head: Weight scheme of the head; None: as ``dtype``, and one copy with a tied embedding.
        capture: Replay decoding, and the judging of drafts, from CUDA graphs; on a card only.
        reproducible: A token's scores have the same bits whatever else is in a pass, and however many tokens it judges;
            nothing is captured.
        progress: Told of every loaded group.

    Raises:
        ModelError: The weights lack a tensor, or the model has no such group.
        UnsupportedError: A scheme is unknown.
    """

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        stage: Stage,
        schemes: Mapping[str, str],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_bits: int | None = None,
        head: str | None = None,
        capture: bool = True,
        reproducible: bool = False,
        progress: Progress | None = None,
    ) -> None:
        names = group_names(config.layers)
        self.config, self.dtype, self.device, self._kv_bits = config, dtype, torch.device(device), kv_bits
        self.first, self.last = stage.groups[0] == names[0], stage.groups[-1] == names[-1]
        self.groups: list[Attention | Mlp] = []
        for done, name in enumerate(stage.groups, 1):
            layer, _, kind = name.partition(".")
            if name not in names:
                raise ModelError(f"the model has no group {name!r}; it has {names[0]} to {names[-1]}")
            build = Attention if kind == "attn" else Mlp
            self.groups.append(build(config, source, int(layer), schemes[name], dtype, self.device))
            _LOGGER.info("loaded %s in %s", name, schemes[name])
            if progress is not None:
                progress(done, len(stage.groups), name)
        self._embedding = Embedding(config, source, dtype, self.device) if self.first else None
        self._head = Head(config, source, dtype, self._embedding, self.device, head) if self.last else None
        self._pages = 0
        self._reproducible = reproducible
        captured = capture and not reproducible and self.device.type == "cuda"
        self._graphs = DecodeGraphs(self._decode) if captured else None

    def part(self, groups: Sequence[int], *, head: bool = True) -> StageModel:
        """A stage of some of the groups, by number, that shares weights and the pages that there are now.

        Without its head the last stage gives hidden states.
        """
        part = copy.copy(self)
        part.groups = [self.groups[k] for k in groups]
        part.last = self.last and head
        part._graphs = None if self._graphs is None else DecodeGraphs(part._decode)
        return part

    @property
    def bytes(self) -> int:
        """Memory of the weights, ends included."""
        total = sum(group.bytes for group in self.groups)
        weights = [end.weight for end in (self._embedding, self._head) if end is not None]
        total += sum(weight.bytes for weight in weights if isinstance(weight, PackedWeight))
        return total + sum({w.data_ptr(): w.nbytes for w in weights if isinstance(w, torch.Tensor)}.values())

    @property
    def cache_bytes(self) -> int:
        """Memory of all pages."""
        caches = (group.cache for group in self.groups if isinstance(group, Attention))
        return sum(cache.bytes for cache in caches if cache is not None)

    @property
    def draft_refusals(self) -> dict[str, str]:
        """Why drafts at a lower precision cannot be cheaper here than what they draft for, by draft; others can."""
        packed = [w.scheme for group in self.groups for w in group.weights if w.packed is not None]
        activations = weight_only.explain(self.device)
        if not any(SCHEMES[scheme].activations == weight_only.WIDE for scheme in packed):
            activations = (
                "no weight has 4 or 8 bits and activations of 16, so that drafts would compute as the model does"
            )
        caches = "" if self._kv_bits == 8 else "caches do not have 8 bits, of which drafts read the upper four"
        reasons = {
            draft: (activations if precision.activations != weight_only.WIDE else "")
            or (caches if precision.high_halves else "")
            for draft, precision in SELF_DRAFTS.items()
        }
        return {draft: reason for draft, reason in reasons.items() if reason}

    def reserve(self, pages: int) -> None:
        """Have at least so many pages, page 0 included, of which as many are empty; they never become fewer."""
        if pages <= self._pages:  # captured passes know where they are
            for group in self.groups:
                group.wipe(range(pages))
            return
        for group in self.groups:  # all earlier pages go before new ones come
            if isinstance(group, Attention):
                group.cache = None
        for group in self.groups:
            group.reserve(pages, self._kv_bits)
        self._pages = pages
        if self._graphs is not None:
            self._graphs.clear()

    @torch.inference_mode()
    def hidden(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The hidden states (N, H) after this stage; the first stage takes tokens (N,)."""
        if self._embedding is not None:
            x = self.embed(x)
        stream = Residual(x)
        for group in self.groups:
            stream = group(stream, layout)
        return stream.whole()

    def embed(self, tokens_N: torch.Tensor) -> torch.Tensor:
        """The hidden states (N, H) of tokens, on the first stage."""
        assert self._embedding is not None, "only the first stage has an embedding"
        return self._embedding(tokens_N)

    def scores(self, x_SH: torch.Tensor) -> torch.Tensor:
        """The scores (S, vocabulary) from the last hidden state of each sequence; on the last stage."""
        assert self._head is not None, "only the last stage has a head"
        if self._reproducible and len(x_SH) > 1:
            return torch.cat([self._head(row[None]) for row in x_SH])
        return self._head(x_SH)

    def _decode(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        x = self.hidden(layout.tokens_N if self.first else x, layout)
        return self.scores(x) if self.last else x

    @torch.inference_mode()
    def run(self, step: Step, x: torch.Tensor | None = None) -> torch.Tensor:
        """One pass: hidden states (N, H), or the chosen next tokens (S,), or (N,) for `Step.every`, on the last stage.

        ``x`` holds the hidden states of the stage before; none on the first. What a step drafts is drafted before, by
        `draft`.
        """
        assert step.draft is None, "draft() comes before run()"
        if step.wipe:
            for group in self.groups:
                group.wipe(step.wipe)
        if self._graphs is not None and self._is_captured(step):
            result = self._graphs.run(step, x, self.device)
        else:
            layout = Layout.of(step, self.device, reproducible=self._reproducible)
            result = self.hidden(layout.tokens_N if x is None else x, layout)
            if self.last:
                result = self.scores(result if step.every else result[layout.last_S])
        if not self.last:
            return result
        return choose(result, step.choices)

    def _is_captured(self, step: Step) -> bool:
        """Whether a pass decodes, or judges drafts, a kernel reads the caches for that, and few tokens fill it up."""
        if step.decodes:
            return True
        groups = (group for group in self.groups if isinstance(group, Attention))
        rows, tokens = rounded_up(len(step.tokens)) * max(step.counts), sum(step.counts)
        is_small = max(step.counts) <= _MOST_JUDGED and rows <= max(_MOST_FILLED, 2 * tokens)
        return step.every and is_small and all(group.has_kernel for group in groups)

    @torch.inference_mode()
    def draft(self, step: Step) -> Step:
        """The pass that judges what a step drafts, see `drafting`; on a stage that is the whole model."""
        assert self.first and self.last, "a model drafts by itself where it is whole"
        return drafted(step, lambda ahead: self.run(ahead).tolist())
