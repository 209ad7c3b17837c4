"""llama.cpp as a peer, by its program ``llama-batched-bench``: see `serving_peers` for where that comes from."""

from __future__ import annotations

import json
import subprocess
from typing import Any


def timed_batch(
    model: str, program: str, *, prompts: int, prompt_tokens: int, new_tokens: int, threads: int
) -> dict[str, Any]:
    """What the program says of one batch (``t_pp`` and ``t_tg`` in seconds, ``speed_pp`` and ``speed_tg`` in tokens/s).

    The first of two batches warms up.

    Args:
        model: A ``.gguf`` file.
        program: Its path.
        prompts: Of the batch.
        prompt_tokens: Of each prompt.
        new_tokens: Of each prompt.
        threads: Of both phases.

    Raises:
        subprocess.CalledProcessError: The program failed.
    """
    sizes = ["-npp", str(prompt_tokens), "-ntg", str(new_tokens), "-npl", f"{prompts},{prompts}", "-c", "2048"]
    command = [program, "-m", model, *sizes, "-t", str(threads), "-tb", str(threads), "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    last: dict[str, Any] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")][-1]
    return last
