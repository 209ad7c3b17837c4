"""Settings of the demo and the JSON file that hands them to its workers; importing this does not load torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qsync_opt.io import Fields, Json, decode, encode, read_json, write_json

SPEC_FORMAT = "qsync-demo-worker/2"
TRAINER = "trainer"
INFERENCE = "inference"
WORKERS = (TRAINER, INFERENCE)
"""Device type of each rank."""
PHASES = ("capture", "measure", "train")
"""What workers do, in this order; training any number of times."""
_OWN_KEYS = ("format", "phase", "folder", "label", "plan")
"""Keys of a worker's file that stand beside those of `DemoOptions`."""
_Positive = Annotated[int, Json(minimum=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Sizes of the model: entries of the vocabulary, tokens of a sequence, width, attention heads, blocks."""

    vocabulary: _Positive = 256
    context: _Positive = 128
    width: _Positive = 256
    heads: _Positive = 4
    layers: _Positive = 4


DEMO_MODEL = GptConfig(context=64, width=128, heads=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Sizes of the demo; by default, three runs train visibly in less than a minute with one core per worker.

    ``batch`` is per worker; ``memory_share`` places the memory budget of the inference device between what its most
    frugal plan needs (0) and what FP32 needs (1).
    """

    steps: _Positive = 80
    batch: _Positive = 8
    learning_rate: float = 1e-3
    seed: int = 0
    memory_share: float = 0.2
    model: GptConfig = DEMO_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Work of both workers: ``phase`` is one of `PHASES`; ``plan``, for training, a plan file or None (FP32)."""

    phase: str
    folder: Path
    label: str
    options: DemoOptions
    plan: Path | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that the workers read."""
        data = {
            "format": SPEC_FORMAT,
            "phase": self.phase,
            "folder": str(self.folder),
            "label": self.label,
            "plan": None if self.plan is None else str(self.plan),
        }
        write_json(path, data | encode(self.options))


def load_spec(path: str | os.PathLike[str]) -> WorkerSpec:
    """Read a worker's file.

    Raises:
        ProblemError: The file is missing or holds anything but a worker's settings.
    """
    data = read_json(path, (SPEC_FORMAT,))
    fields = Fields({name: data.pop(name) for name in _OWN_KEYS if name in data}, "demo worker")
    fields.text("format")
    phase, folder, label = fields.text("phase"), fields.text("folder"), fields.text("label")
    if phase not in PHASES:
        fields.fail(f"phase is {phase!r}, but allowed are {', '.join(PHASES)}")
    plan = None if fields.take_or("plan", None) is None else Path(fields.text("plan"))
    options = decode(DemoOptions, data, "demo worker")
    return WorkerSpec(phase=phase, folder=Path(folder), label=label, options=options, plan=plan)
