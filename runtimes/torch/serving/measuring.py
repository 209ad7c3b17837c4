"""Tokens per second of a batch in both phases, and the memory of the stages while they serve."""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

from qsync_opt.runtimes.torch.serving.pipeline import generate
from qsync_opt.runtimes.torch.serving.workers import StageProcesses


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
    """Seconds and tokens per second of both phases, the median of some batches of random prompts.

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
    prefill_s = statistics.median(run.prefill_s for run in runs)
    decode_s = statistics.median(run.decode_s for run in runs)
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


class MemoryWatch:
    """Memory of their own that processes have, sampled from ``/proc``; a context manager.

    Pages of files, which the system takes back at will, do not count. Where there is no ``/proc``, nothing is sampled.

    Attributes:
        peaks_kib: The most that each process had at a time.
    """

    def __init__(self, pids: Sequence[int] = (), every_s: float = 0.01) -> None:
        self.peaks_kib = dict.fromkeys(pids, 0)
        self._every_s = every_s
        self._totals_kib: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def add(self, pid: int) -> None:
        """Watch one more process."""
        self.peaks_kib[pid] = 0

    def summary(self) -> dict[str, float] | None:
        """MiB of all processes after a tenth of the time, at the end, and at most; None without samples."""
        if not self._totals_kib:
            return None
        totals = [kib / 1024 for kib in self._totals_kib]
        return {"begin": totals[len(totals) // 10], "end": totals[-1], "most": max(totals)}

    def _watch(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # no such file system, or a process has ended
                total_kib = 0
                for pid, peak_kib in [*self.peaks_kib.items()]:
                    own_kib = anonymous_kib(pid)
                    self.peaks_kib[pid] = max(peak_kib, own_kib)
                    total_kib += own_kib
                self._totals_kib.append(total_kib)
            if self._ended.wait(self._every_s):
                return


def anonymous_kib(pid: int) -> int:
    """Memory of its own that a process has now."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)
