"""What the demo does, in one place, as a checked JSON file that its workers read."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qsync_opt.io import Fields, read_json, write_json
from qsync_opt.runtimes.torch.demo.sizes import GptConfig

SPEC_FORMAT = "qsync-demo-worker/2"
TRAINER = "trainer"
INFERENCE = "inference"
WORKERS = (TRAINER, INFERENCE)
"""Device type of each rank."""
PHASES = ("capture", "measure", "train")
"""What workers do, in this order; training any number of times."""
DEMO_MODEL = GptConfig(context=64, width=128, heads=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Sizes of the demo; by default, three runs train visibly in less than a minute with one core per worker.

    ``batch`` is per worker; ``memory_share`` places the memory budget of the inference device between what its most
    frugal plan needs (0) and what FP32 needs (1).
    """

    steps: int = 80
    batch: int = 8
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
        data: dict[str, Any] = {
            "format": SPEC_FORMAT,
            "phase": self.phase,
            "folder": str(self.folder),
            "label": self.label,
            "plan": None if self.plan is None else str(self.plan),
            **asdict(self.options),
        }
        write_json(path, data)


def load_spec(path: str | os.PathLike[str]) -> WorkerSpec:
    """Read a worker's file.

    Raises:
        ProblemError: The file is missing or holds anything but a worker's settings.
    """
    fields = Fields(read_json(path, (SPEC_FORMAT,)), "demo worker")
    fields.text("format")
    phase, folder, label = fields.text("phase"), fields.text("folder"), fields.text("label")
    if phase not in PHASES:
        fields.fail(f"phase is {phase!r}, but allowed are {', '.join(PHASES)}")
    plan = None if fields.take_or("plan", None) is None else fields.text("plan")
    model = Fields(fields.mapping("model"), "demo worker: model")
    sizes = GptConfig(**{name: model.integer(name, minimum=1) for name in GptConfig.__dataclass_fields__})
    model.finish()
    options = DemoOptions(
        steps=fields.integer("steps", minimum=1),
        batch=fields.integer("batch", minimum=1),
        learning_rate=fields.number("learning_rate"),
        seed=fields.integer("seed"),
        memory_share=fields.number("memory_share"),
        model=sizes,
    )
    fields.finish()
    return WorkerSpec(
        phase=phase,
        folder=Path(folder),
        label=label,
        options=options,
        plan=None if plan is None else Path(plan),
    )
