"""One way of training one model, timed in a process of its own: by hand (eager, compiled, captured) or planned.

python benchmarks/by_hand_worker.py "u-net full" "BF16 compiled"    prints one line of JSON
python benchmarks/by_hand_worker.py "u-net full" "BF16 compiled" --held

With ``--held`` an empty line says that it is warm, and steps are timed once a line was read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PRECISIONS = ("FP32", "TF32", "BF16", "FP16")
FORMS = ("eager", "compiled", "captured", "compiled captured")
BY_HAND = tuple(f"{precision} {form}" for form in FORMS for precision in PRECISIONS)
PLANNED, BY_BLOCKS = "plan", "BF16 compiled by blocks"
"""Ways that need this package: the default plan, and BF16 autocast with repeated blocks compiled once."""
WARM_UP_S, BLOCK_S, BLOCKS, STEPS = 0.7, 0.2, 5, 3
"""Seconds of steps before any is timed, seconds of a timed block, blocks, and the fewest steps of each."""


class WithLoss(nn.Module):
    """A model that returns its loss, so that one form covers both."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **batch: Any) -> Tensor:
        """The loss of a batch."""
        output = self.model(**batch)
        result: Tensor = self.loss(output) if self.loss is not None else output.loss
        return result


class _Positional(nn.Module):
    """Takes the batch as a tuple, as ``make_graphed_callables`` wants it."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *batch: Any) -> Tensor:
        result: Tensor = self.model(**dict(zip(self.names, batch, strict=True)))
        return result


def use_tf32(on: bool) -> None:
    """Whether FP32 products and convolutions may run in TF32."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32" if on else "ieee"


def by_hand(name: str, subject: Any, device: torch.device) -> Callable[[], None]:
    """A training step as somebody would write it without a planner."""
    precision, _, form = name.partition(" ")
    use_tf32(precision != "FP32")
    model = WithLoss(subject.model.to(device), subject.loss)
    batch = {key: value.to(device) for key, value in subject.batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    dtype = {"BF16": torch.bfloat16, "FP16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "FP16", init_scale=2.0**10)

    def context() -> Any:
        return (
            contextlib.nullcontext()
            if dtype is None
            else torch.autocast(device.type, dtype, cache_enabled=form != "captured")
        )

    run: Callable[[], Tensor] = functools.partial(model, **batch)
    if form == "captured":
        with context():
            captured = torch.cuda.make_graphed_callables(_Positional(model, tuple(batch)), tuple(batch.values()))
        run = functools.partial(captured, *batch.values())
    elif form != "eager":
        compiled = torch.compile(model, mode="reduce-overhead" if "captured" in form else None)
        run = functools.partial(compiled, **batch)

    def step() -> None:
        optimizer.zero_grad(set_to_none=form != "captured")
        with context():
            loss = run()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def planned(subject: Any, device: torch.device, facts: dict[str, Any], **options: Any) -> Callable[[], None]:
    """A training step under the plan that `auto_plan` makes with default options."""
    import qsync_opt
    from qsync_opt.runtimes.torch.execution import LossScaler

    model = subject.model.to(device)
    batch = {key: value.to(device) for key, value in subject.batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    began = time.perf_counter()
    plan = qsync_opt.auto_plan(
        model,
        batch,
        loss=subject.loss,
        optimizer=optimizer,
        options=qsync_opt.PlanningOptions(progress=False, **options),
    )
    facts["planning_s"] = time.perf_counter() - began
    facts["stages_s"] = dict(plan.stages_s)
    facts["reason"], facts["taken"], facts["expected_ms"] = plan.reason, dict(plan.taken), (plan.expected_ns or 0) / 1e6
    if plan.model is not None:
        facts["modes"] = {m.label: round(m.pass_ns / 1e6, 3) for own in plan.model.modes.values() for m in own}
        facts["steps"] = {"/".join(s.taken.values()): round(s.step_ns / 1e6, 3) for s in plan.model.steps}
    trained = qsync_opt.apply(model, plan)
    scaler = LossScaler(trained)

    def step() -> None:
        optimizer.zero_grad()
        output = trained(**batch)
        loss = subject.loss(output) if subject.loss is not None else output.loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def by_blocks(subject: Any, device: torch.device) -> Callable[[], None]:
    """A training step in BF16 autocast whose model is compiled by blocks."""
    from qsync_opt.model import Role
    from qsync_opt.runtimes.torch.capture import capture_model
    from qsync_opt.runtimes.torch.execution import ApplyOptions, apply

    use_tf32(True)
    model = subject.model.to(device)
    batch = {key: value.to(device) for key, value in subject.batch.items()}
    graph = capture_model(model, (), batch).graph
    plan = {operator.name: "BF16" for operator in graph.by_role(Role.ADJUSTABLE)}
    apply(model, plan, graph=graph, options=ApplyOptions(autocast="BF16", compiled=True, regional=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        output = model(**batch)
        loss = subject.loss(output) if subject.loss is not None else output.loss
        loss.backward()
        optimizer.step()

    return step


def warmed(step: Callable[[], None]) -> tuple[dict[str, Any], int]:
    """Seconds of the first step, and how many steps make a timed block, after steps that are not timed."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else list
    began = time.perf_counter()
    step()
    synchronize()
    first = time.perf_counter() - began
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S or count < STEPS:
        step()
        synchronize()
        count += 1
    return {"first_s": first}, max(STEPS, round(BLOCK_S / ((time.perf_counter() - began) / count)))


def timed(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Median milliseconds of a step, those of every block of some steps, and the peak memory of steps."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else list
    step()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    blocks = []
    for _ in range(BLOCKS):
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        blocks.append((time.perf_counter() - began) / steps * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
    return {"step_ms": statistics.median(blocks), "blocks_ms": blocks, "peak_mib": peak}


def run(model: str, way: str, *, held: bool = False, **options: Any) -> dict[str, Any]:
    """The record of one subject and one way; ``held`` as in the module's description, ``options`` of the plan."""
    from unlike_models import subject

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"model": model, "way": way}
    try:
        made = subject(model)
        if way == PLANNED:
            step = planned(made, device, record, **options)
        elif way == BY_BLOCKS:
            step = by_blocks(made, device)
        else:
            step = by_hand(way, made, device)
        first, steps = warmed(step)
        if held:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # others wait on the same card
            print(flush=True)
            sys.stdin.readline()
        record.update(first, **timed(step, steps))
    except Exception as failure:  # the record says it
        text = str(failure)
        record["failure"] = f"{type(failure).__name__}: {text.strip().splitlines()[0] if text.strip() else ''}"[:300]
    return record


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:3], held="--held" in sys.argv[3:])))
