"""Which clusters, models and plans the predictor is tried on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from predictor_models import LARGE, MEDIUM, SMALL, Subject

from qsync_opt.model import OpGraph, Role
from qsync_opt.steps import nearest_available

FIXED = "TF32"
"""Precision of the whole GPU in a hybrid cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A model on a cluster; ``multiprocessors`` of rank 1, None for a whole GPU.

    ``solve`` asks for a solver's plan. ``precisions`` are those that plans may use beside FP32; None: all. ``compiled``
    has every plan compiled.
    """

    subject: Subject
    multiprocessors: int | None
    uniform: tuple[str, ...]
    mixed: int
    solve: bool = False
    precisions: tuple[str, ...] | None = None
    compiled: bool = False

    @property
    def captured(self) -> tuple[str, ...]:
        """Labels of plans that are measured as CUDA graphs too."""
        return () if self.subject.model == "gpt-tiny" or self.compiled else ("uniform BF16", "uniform INT8", "random 0")

    @property
    def planned(self) -> str:
        """The worker under a plan."""
        return "whole" if self.multiprocessors is None else f"{self.multiprocessors} SMs"

    @property
    def cluster(self) -> str:
        """Rank 0 and rank 1."""
        return f"whole + {self.planned}"

    def allowed(self, formats: Iterable[str]) -> list[str]:
        """Precisions of the device that plans may use, coarsest first."""
        return [p for p in formats if self.precisions is None or p == "FP32" or p in self.precisions]

    @property
    def name(self) -> str:
        """For the command line."""
        return f"{self.subject.model}:{self.multiprocessors or 'whole'}{':compiled' * self.compiled}"


_SIX = ("FP32", "TF32", "BF16", "FP16", "INT8", "FP8")
_THREE = ("TF32", "BF16", "INT8")


def _combination(
    model: str,
    size: str,
    count: int | None,
    uniform: tuple[str, ...],
    mixed: int,
    solve: bool = False,
    precisions: tuple[str, ...] | None = None,
    compiled: bool = False,
) -> Combination:
    subject = Subject(model=model, size=size)
    return Combination(
        subject=subject,
        multiprocessors=count,
        uniform=uniform,
        mixed=mixed,
        solve=solve,
        precisions=precisions,
        compiled=compiled,
    )


COMBINATIONS = (
    _combination("gpt-110m", SMALL, 8, _SIX, 4, True),
    _combination("bert-base", MEDIUM, 16, _SIX, 4, True),
    _combination("resnet50", LARGE, 32, _SIX, 4, True),
    _combination("vit-base", LARGE, 64, _SIX, 4, True),
    _combination("gpt-110m", MEDIUM, 16, _SIX, 4, True),
    _combination("bert-base", LARGE, 64, _SIX, 4, True),
    _combination("vit-base", SMALL, 8, _SIX, 4, True),
    _combination("resnet50", LARGE, None, _THREE, 4, True, _THREE),
    _combination("vit-base", LARGE, None, _THREE, 4, True, _THREE),
    _combination("gpt-110m", LARGE, None, _THREE, 4, True, _THREE),
    _combination("bert-base", LARGE, None, _THREE, 4, True, _THREE),
    _combination("gpt-short", SMALL, 16, _SIX, 6, True, compiled=True),
    _combination("gpt-short", LARGE, None, _SIX, 6, True, compiled=True),
    _combination("vit-short", SMALL, 16, _SIX, 6, True, compiled=True),
    _combination("vit-short", LARGE, None, _SIX, 6, True, compiled=True),
    _combination("bert-short", SMALL, 16, _SIX, 6, True, compiled=True),
    _combination("bert-short", LARGE, None, _SIX, 6, True, compiled=True),
    _combination("gpt-tiny", SMALL, 16, ("FP32", "BF16"), 2, True),
    _combination("gpt-tiny", LARGE, None, ("FP32", "INT8"), 1),
    _combination("gpt-tiny", SMALL, None, ("FP32", "BF16"), 1, precisions=("BF16",), compiled=True),
)


CAPTURED = ", captured"
"""What the label of a plan ends with whose passes run as CUDA graphs."""

_FIRST = ("random 0", "solver's", "random of 16 bits and TF32 1", "halves", "random", "uniform BF16")


def in_turn(label: str) -> int:
    """When a compiled case has its turn: plans that were not recorded first."""
    return next((i for i, start in enumerate(_FIRST) if label.startswith(start)), len(_FIRST))


def plans(combination: Combination, graph: OpGraph, available: dict[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Plans of rank 1 by label: uniform, drawn at random, one precision per half of the model, 16 bits and TF32."""
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    result = {
        f"uniform {precision}": {name: nearest_available(available[name], precision) for name in names}
        for precision in combination.uniform
        if any(precision in available[name] for name in names)
    }
    generator = random.Random(f"{combination.name} evaluation")
    sixteen = [p for p in ("BF16", "FP16", "TF32") if any(p in available[name] for name in names)]
    kinds = ("random", "random of 16 bits and TF32", "halves")
    for k in range(combination.mixed):
        kind = kinds[k % len(kinds)]
        if kind == "random of 16 bits and TF32" and len(sixteen) < 2:  # a uniform plan
            continue
        if kind == "random":
            plan = {name: generator.choice(available[name]) for name in names}
        elif kind == "halves":
            sampled = [p for p in ("INT8", "BF16", "TF32", "FP8") if any(p in available[name] for name in names)]
            first, second = generator.sample(sampled, 2)
            middle = generator.randrange(len(names) // 4, 3 * len(names) // 4)
            plan = {n: nearest_available(available[n], first if i < middle else second) for i, n in enumerate(names)}
        else:
            plan = {n: nearest_available(available[n], generator.choice(sixteen)) for n in names}
        result[f"{kind} {k}"] = plan
    return result
