"""What do plans of one predicted time add to the gradient's variance? By every indicator, and by random numbers.

The finer measure beside ``train``: training scores scatter from seed to seed by more than such plans differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from estimates import standard_error
from noisy import added_variance, exact_gradient
from plans import COST_MODEL, HIGH, LOW, low_share, magnified
from rank_correlation import spearman
from runs import cached_subject
from subjects import train_briefly
from training import PLANNERS, Comparison
from work import Clock, significant

from qsync_opt.runtimes.torch.execution import ApplyOptions, device_formats
from qsync_opt.sensitivity import plan_variance, sensitivities

RANDOM_PLANS = 8


def section(
    device: torch.device, scale: str, clock: Clock, *, name: str, factor: float, folder: Path, steps: int
) -> Iterator[dict[str, Any]]:
    """One record, that grows plan by plan, in units of the variance between batches."""
    comparison = Comparison(name, device, scale, folder, steps)
    setting = comparison.compared_at(factor)
    subject = cached_subject(name, device, scale)
    model = subject.model(0, device)
    train_briefly(subject, model, 3 if scale == "tiny" else 150, first=10**7)
    batch = subject.batch(10**6)
    exact, options = exact_gradient(model, batch), ApplyOptions(kernels=setting.kernels)
    found = magnified(comparison.statistics, setting.factor)
    table = sensitivities(comparison.graph, found, device_formats(device), options=setting.noise, kind="probed")
    noise = comparison.statistics.gradient_noise
    if noise is None:
        raise RuntimeError("no gradient noise was collected, although there are two batches")
    indicators = [kind for kind in PLANNERS if kind not in ("depth", "random")]
    every = [(kind, 0) for kind in (f"uniform {LOW}", f"uniform {HIGH}", *indicators)]
    rows: list[dict[str, Any]] = []
    for policy, seed in [*every, *(("random", seed) for seed in range(2 if scale == "tiny" else RANDOM_PLANS))]:
        if clock.over():
            return
        plan = comparison.plan(policy, setting, seed)
        draws = 2 if scale == "tiny" else 8
        measured = added_variance(model, batch, exact, plan, comparison.graph, options, draws, factor=setting.factor)
        rows.append(
            {
                "plan": policy,
                "seed": seed,
                "low_share": low_share(plan, comparison.multiplications),
                "measured": statistics.fmean(measured) / noise.variance,
                "standard_error": standard_error(measured) / noise.variance,
                "predicted": plan_variance(comparison.graph, found, table, plan) / noise.variance,
            }
        )
        planned = [row for row in rows if not row["plan"].startswith("uniform")]
        yield significant(
            {
                "model": name,
                "what": comparison.what,
                "setting": setting.name,
                "factor": setting.factor,
                "cost_model": COST_MODEL,
                "rank": spearman([r["predicted"] for r in planned], [r["measured"] for r in planned]),
                "plans": rows,
            }
        )
