"""Tokens per second of a batch in both phases, and the memory of the stages while they serve."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

from qsync_opt.runtimes.torch.serving.pipeline import generate
from qsync_opt.runtimes.torch.serving.workers import StageProcesses

_SAMPLE_S = 0.5


def measure_batches(
    stages: StageProcesses,
    *,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int = 3,
    prefill: int | None = None,
    decode: int | None = None,
) -> dict[str, float]:
    """Seconds and tokens per second of both phases, the fastest of some batches of random prompts.

    Args:
        stages: They run nothing else.
        prompts: Of a batch.
        prompt_tokens: Of each prompt.
        new_tokens: Of each prompt, at least 2.
        rounds: Batches; one more warms up.
        prefill: Micro-batches of the prompts; by default one row each.
        decode: Micro-batches while decoding; by default as many as stages.
    """
    draw = random.Random(0)
    batch = [[draw.randrange(stages.config.vocabulary) for _ in range(prompt_tokens)] for _ in range(prompts)]
    prefill, decode = prefill or prompts, decode or len(stages.plan.stages)
    generate(stages, batch, min(new_tokens, 3), prefill=prefill, decode=decode)
    runs = [generate(stages, batch, new_tokens, prefill=prefill, decode=decode) for _ in range(rounds)]
    prefill_s, decode_s = min(run.prefill_s for run in runs), min(run.decode_s for run in runs)
    return {
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "prefill_microbatches": prefill,
        "decode_microbatches": decode,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "prefill_tokens_per_s": prompts * prompt_tokens / prefill_s,
        "decode_tokens_per_s": prompts * (new_tokens - 1) / decode_s,
    }


class MemorySamples:
    """Anonymous memory of processes in all, sampled from ``/proc``; a context manager. Empty where there is none."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        self._ended = threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._watch, name="memory samples", daemon=True)

    def __enter__(self) -> MemorySamples:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def summary(self) -> dict[str, float] | None:
        """MiB after a tenth of the time, at the end, and at most."""
        if not self._samples:
            return None
        return {
            "begin": self._samples[len(self._samples) // 10],
            "end": self._samples[-1],
            "most": max(self._samples),
        }

    def _watch(self) -> None:
        while True:
            try:
                self._samples.append(sum(_anonymous_mib(pid) for pid in self._pids))
            except (OSError, StopIteration):  # no such file system, or a process has ended
                return
            if self._ended.wait(_SAMPLE_S):
                return


def _anonymous_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))
