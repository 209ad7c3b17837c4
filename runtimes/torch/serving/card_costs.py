"""What a model's layers take on a card: time by differences between passes, and memory of a stage's process.

A clock on the host cannot see the layers of a pass that a card replays as one graph, and events between them would
change it. So whole passes are timed that differ in how many layers of one kind they have, or in the head.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qsync_opt.runtimes.torch.serving.allocator import memory_beside_torch
from qsync_opt.runtimes.torch.serving.config import DecoderConfig
from qsync_opt.runtimes.torch.serving.pipeline import generate
from qsync_opt.runtimes.torch.serving.stage import StageModel, group_names
from qsync_opt.runtimes.torch.serving.steps import Step
from qsync_opt.runtimes.torch.serving.weights import StateSource
from qsync_opt.runtimes.torch.serving.workers import LocalWorkers
from qsync_opt.serving import ServeWorkload, Stage, Table

_KIB = 1024
_TURNS = 4
"""Turns that a pass of up to `_FEW_TOKENS` tokens takes through the groups; one of more takes one."""
_FEW_TOKENS = 1024
_ROUNDS = 3
"""Batches that are served for each size of micro-batches, so that memory that is kept between them counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """What a stage's process holds beside weights, caches and ends, in KiB.

    Attributes:
        base_kib: While it serves the smallest micro-batches.
        load_kib: What it has more than that for a moment while it loads.
        workspace: What it has more with larger micro-batches, by rows and length.
    """

    base_kib: int
    load_kib: int
    workspace: Table


class PassDifferences:
    """Seconds of the parts of a stage's passes, from passes through some of its groups.

    A pass of few tokens takes its groups in several turns, because a group may take less than what the clock is off
    by. MLPs are told from passes through them, attention from passes through both: alone it could stay in the cache.

    Args:
        stage: A whole model with its pages; attention and MLP take turns, at least two of each.
    """

    def __init__(self, stage: StageModel) -> None:
        every = range(len(stage.groups))
        self._count = len(every) // 2
        self._least, self._headless = stage.part([0, 1]), stage.part([0, 1], head=False)
        self._longer = {
            turns: {"mlp": stage.part([0, *[*every[1::2]] * turns]), "both": stage.part([*every] * turns)}
            for turns in (1, _TURNS)
        }

    def seconds(self, step: Step) -> dict[str, float]:
        """Seconds of one group of each kind, of the head, and of all that a pass needs besides ("rest")."""
        turns = _TURNS if sum(step.counts) <= _FEW_TOKENS else 1
        parts = {"least": self._least, "headless": self._headless, **self._longer[turns]}
        took = {}
        for name, part in parts.items():
            began = time.perf_counter()
            part.run(step)[:1].cpu()  # waits for all of it
            took[name] = time.perf_counter() - began
        more = self._count * turns - 1
        mlp, both = ((took[name] - took["least"]) / more for name in ("mlp", "both"))
        return {
            "attn": both - mlp,
            "mlp": mlp,
            "head": took["least"] - took["headless"],
            "rest": took["headless"] - both,
        }


def card_memory(
    config: DecoderConfig,
    state: Mapping[str, torch.Tensor],
    workload: ServeWorkload,
    parts: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ProcessMemory:
    """What this process holds on a card beside weights, caches and ends.

    A model serves batches of a workload in micro-batches of more and more rows. What the card's memory holds beside
    torch's is taken for this process's: its context, and the code of kernels.

    Args:
        config: Of a model of few layers.
        state: Its weights.
        workload: Prompts and new tokens.
        parts: Numbers of micro-batches of the prompts, falling.
        dtype: Of hidden states and caches.
        device: The card, which nothing else uses.
    """
    names = group_names(config.layers)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    stage = StageModel(
        config,
        StateSource(state),
        Stage(device="here", groups=names),
        dict.fromkeys(names, "W8"),
        dtype=dtype,
        device=device,
    )
    load_peak, weights = torch.cuda.max_memory_reserved(device), stage.bytes
    new_tokens = min(workload.new_tokens, 8)
    prompts = [[1] * workload.prompt_tokens] * workload.prompts
    peaks = []
    for count in parts:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(_ROUNDS):
            generate(LocalWorkers([stage]), prompts, new_tokens, prefill=count, decode=1)
        peaks.append(torch.cuda.max_memory_reserved(device))
    least = peaks[0] - weights - stage.cache_bytes
    lengths = tuple(sorted({1, workload.prompt_tokens}))
    more = tuple((0, max(peak - peaks[0], 0) // _KIB)[-len(lengths) :] for peak in peaks)
    rows = tuple(-(-workload.prompts // count) for count in parts)
    return ProcessMemory(
        base_kib=-(-(memory_beside_torch(device) + least) // _KIB),
        load_kib=max(load_peak - weights - least, 0) // _KIB,
        workspace=Table(rows=rows, lengths=lengths, values=more),
    )
