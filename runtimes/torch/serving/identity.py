"""A short name for what is served, so that times and acceptances of other weights are not taken for these."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from qsync_opt.errors import ModelError
from qsync_opt.runtimes.torch.serving.workers import StageOptions
from qsync_opt.serving import Plan

_SAMPLES, _SAMPLE_BYTES = 256, 4096


def fingerprint(model: str | Path, plan: Plan, options: StageOptions) -> str:
    """A digest of the weights' files and of how they are served.

    Of each file its name, its size and samples over its whole length count, so that large models take no time; a change
    of a few numbers may go unnoticed.

    Raises:
        ModelError: A file cannot be read.

    Source: ours.
    """
    path = Path(model)
    files = sorted((*path.glob("*.safetensors"), *path.glob("*config.json"))) if path.is_dir() else [path]
    digest = hashlib.sha256()
    try:
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
            with file.open("rb") as opened:
                for begin in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                    opened.seek(begin)
                    digest.update(opened.read(_SAMPLE_BYTES))
    except OSError as failure:
        raise ModelError(f"{path} cannot be read: {failure}") from failure
    how = [dict(plan.schemes), len(plan.stages), str(options.dtype), options.kv_bits, options.head]
    digest.update(json.dumps(how, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()[:32]}"
