"""What does scoring cost? Time and memory of collecting statistics against training steps."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from subjects import Subject, bert, cnn, gpt, subject_of
from torch import nn
from work import Clock, significant

from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.demo import GptConfig
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.sensitivity import collect_statistics, full_precision
from qsync_opt.sensitivity import sensitivities

_TIMES = 3
"""How often scoring is timed after the first run."""


class Meter:
    """Seconds and peak memory of a function."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def __call__(self, function: Callable[[], object]) -> tuple[float, int]:
        """Seconds, and bytes at the peak (0 on a CPU)."""
        self._settle()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        function()
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, torch.cuda.max_memory_allocated() if self._cuda else 0

    def on_card(self, function: Callable[[], object]) -> dict[str, float] | None:
        """What the card does in it: kernels, copies and fills, and the seconds that these take; None on a CPU."""
        if not self._cuda:
            return None
        self._settle()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        events = [event.time_range.elapsed_us() for event in profile.events() or () if event.device_type == cuda]
        return {"launches": len(events), "busy_s": sum(events) / 1e6}

    def _settle(self) -> None:
        gc.collect()
        if self._cuda:
            torch.cuda.synchronize()


def _training_step(subject: Subject, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with full_precision():
        optimizer.zero_grad(set_to_none=True)
        model(*subject.batch(1)).backward()
        optimizer.step()


def measure(subject: Subject, device: torch.device, probes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Training step, statistics with these numbers of probes, and the table of all precisions; grows by measuring."""
    meter = Meter(device)
    torch.manual_seed(0)
    with device:
        model = subject.make().train()
    graph: OpGraph | None = None

    def captured() -> None:
        nonlocal graph
        graph = capture(model, subject.batch(0), name=subject.name)

    capture_s, _ = meter(captured)
    assert graph is not None
    optimizer = subject.optimizer(model)
    steps = [meter(lambda: _training_step(subject, model, optimizer)) for _ in range(8)][3:]
    step_s, step_bytes = statistics.median(s for s, _ in steps), max(b for _, b in steps)
    optimizer.zero_grad(set_to_none=True)
    batch_s = statistics.median(meter(lambda: subject.batch(1))[0] for _ in range(_TIMES))
    formats = device_formats(device)
    scored = len(formats) - 1  # full precision needs no score
    record: dict[str, Any] = {
        "model": subject.name,
        "what": subject.what,
        "parameters": sum(p.numel() for p in model.parameters()),
        "operators": sum(1 for _ in graph.operators),
        "precisions": len(formats),
        "scored_precisions": scored,
        "capture_s": capture_s,
        "step_s": step_s,
        "batch_s": batch_s,  # in the step as in scoring
        "step_bytes": step_bytes,
        "scoring": [],
    }
    yield significant(record)
    launches: list[tuple[dict[str, Any], Callable[[], None]]] = [
        (record, lambda: _training_step(subject, model, optimizer))
    ]
    for count in probes:
        found: list[Any] = []

        def score(count: int = count, found: list[Any] = found) -> None:
            assert graph is not None
            known = collect_statistics(model, [subject.batch(2)], graph=graph, probes=count)
            found.append(sensitivities(graph, known, formats))

        first_s = meter(score)[0]  # with the first use of every kernel
        runs = [meter(score) for _ in range(_TIMES)]
        seconds, peak = statistics.median(s for s, _ in runs), max(b for _, b in runs)
        scoring = {
            "probes": count,
            "indicator": str(found[-1].kind),
            "first_seconds": first_s,
            "seconds": seconds,
            "steps": seconds / step_s,
            "steps_per_precision": seconds / step_s / scored,
            "peak_bytes": peak,
            "extra_memory": peak / step_bytes - 1 if step_bytes else None,
        }
        record["scoring"].append(scoring)
        launches.append((scoring, score))
        yield significant(record)
    for told, function in launches:  # last: a profiler slows what comes after it
        told["on_card"] = meter.on_card(function)
    yield significant(record)


def _bert(device: torch.device, scale: str, batch: int) -> Subject:
    """BERT-base at a batch at which a card has more to do than the host."""
    tiny = scale != "full"
    found = bert(device, tiny=tiny, batch=2 if tiny else batch, length=16 if tiny else 128)
    return dataclasses.replace(found, name=f"bert-{batch}")


def _resnet50(device: torch.device, scale: str, batch: int) -> Subject:
    """At the size of images that it is mostly trained with."""
    if scale == "tiny":
        found = cnn(device, (1, 1), 8, batch=batch // 16, size=48, large=True, rate=0.05)
    else:
        found = cnn(device, (3, 4, 6, 3), 64, batch=batch, size=224, large=True, rate=0.05)
    return dataclasses.replace(found, name="resnet50-224" if batch == 32 else f"resnet50-224-{batch}")


def section(
    device: torch.device, scale: str, clock: Clock, names: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """BERT, a model of a thousand million parameters, ResNet-50 at three sizes; records replace each other by model."""
    config = GptConfig(width=2048, layers=20, heads=16, context=512)
    if scale == "tiny":
        config = GptConfig(width=64, layers=2, heads=2, context=32)
    subjects: dict[str, Callable[[], Subject]] = {
        "bert": lambda: subject_of("bert", device, scale=scale),
        "bert-32": lambda: _bert(device, scale, 32),
        "gpt-1b": lambda: gpt(device, config, 2, name="gpt-1b"),
        "resnet50": lambda: subject_of("resnet50", device, scale=scale),
        "resnet50-224": lambda: _resnet50(device, scale, 32),
        "resnet50-224-64": lambda: _resnet50(device, scale, 64),
    }
    for name in names or subjects:
        if clock.over():
            return
        yield from measure(subjects[name](), device, (0, 1))
        if device.type == "cuda":
            torch.cuda.empty_cache()
