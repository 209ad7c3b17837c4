"""What does a plan cost the host in eager mode? Host time of operators and of whole models, plan beside autocast.

``operators``: a chain of equal small operators; host microseconds of one call, forward and backward. ``models``: whole
models with a batch so small that the device waits for the host; host milliseconds of a forward and a backward pass,
calls that pass torch's dispatcher, and kernels launched. ``steps`` (CUDA only): a whole training step with a batch as
in training, by the wall clock: eager, and with forward and backward pass captured as CUDA graphs (plans by
`qsync_opt.graphed`, the others by ``torch.cuda.make_graphed_callables``). Times are medians, beside them the least; the
host's time ends when the call returns, not when the device is done. Writes ``benchmarks/results/host-cost.json``.

    python benchmarks/host_cost.py [--section models] [--device cuda] [--quick] [--profile FOLDER] [--output PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import functools
import gc
import io
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt.io import read_json, write_json
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, graphed, operator_kind, undo
from qsync_opt.runtimes.torch.interception import intercept

sys.path.insert(0, str(Path(__file__).resolve().parent))
from host_cost_subjects import LENGTH, MODELS, OPERATORS

FORMAT = "qsync-bench-host-cost/1"
RESULTS = Path(__file__).parent / "results"
EIGHT = KernelOptions(backward="eight", weights="step", weight_granularity="tensor")
HALF = KernelOptions(weights="step")
# How a model runs: under a plan of one precision with some kernel options, or in torch's own ways.
PLANS: dict[str, tuple[str, KernelOptions]] = {
    "plan FP32": ("FP32", HALF),
    "plan TF32": ("TF32", HALF),
    "plan BF16": ("BF16", HALF),
    "plan FP16": ("FP16", HALF),
    "plan INT8": ("INT8", EIGHT),
    "plan FP8": ("FP8", EIGHT),
    "plan INT8, backward in 16 bits": ("INT8", HALF),
}
AUTOCAST = {"BF16 autocast": torch.bfloat16, "FP16 autocast": torch.float16}
WAYS = ("FP32", *AUTOCAST, *PLANS)


def _loss(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def _plan(model: nn.Module, run: Callable[[], Any], precision: str, device: torch.device) -> dict[str, str]:
    names: list[str] = []
    with torch.no_grad(), intercept(model, lambda call: (names.append(call.name), call.run())[1]):
        run()
    kinds = {name: kind for name in names if (kind := operator_kind(name)) is not None}
    other = "FP32" if precision == "TF32" else "BF16"
    return {name: precision if ops.supports(kind, precision, device) else other for name, kind in kinds.items()}


def _works(way: str, device: torch.device) -> bool:
    precision = PLANS[way][0] if way in PLANS else way.split()[0]
    return ops.supports("linear", precision, device)


@contextlib.contextmanager
def running(model: nn.Module, run: Callable[[], Any], way: str, device: torch.device) -> Iterator[Callable[[], Any]]:
    """``run`` in one of ``WAYS``."""
    if way in AUTOCAST:

        def under_autocast() -> Any:
            with torch.autocast(device.type, AUTOCAST[way]):
                return run()

        yield under_autocast
    elif way in PLANS:
        precision, kernels = PLANS[way]
        plan = _plan(model, run, precision, device)
        if precision == "FP32":  # not all of it, or the plan would step aside after its first pass
            plan[next(name for name in plan if operator_kind(name) == "linear")] = "BF16"
        apply(model, plan, options=ApplyOptions(kernels=kernels))
        try:
            yield run
        finally:
            undo(model)
    else:
        yield run


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_times(model: nn.Module, forward: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, float]:
    """Host seconds of forward and backward pass, median and least; the device has nothing left to do before each."""
    forwards, backwards = [], []
    for number in range(repeats + 3):
        for parameter in model.parameters():
            parameter.grad = None
        _synchronize(device)
        begin = time.perf_counter()
        loss = forward()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        if number >= 3:
            forwards.append(middle - begin)
            backwards.append(end - middle)
    _synchronize(device)
    return {
        "forward": statistics.median(forwards),
        "backward": statistics.median(backwards),
        "forward_least": min(forwards),
        "backward_least": min(backwards),
    }


def counts(forward: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """Calls through the dispatcher, kernels and copies launched, in one forward and backward pass."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        forward().backward()
        _synchronize(device)
    names = [event.name for event in profiler.events() or ()]
    found = {"dispatched": sum("::" in name and not name.startswith("autograd::") for name in names)}
    if device.type == "cuda":
        found["launches"] = sum("Launch" in name or ("Memcpy" in name and "Async" in name) for name in names)
    return found


def profile_text(forward: Callable[[], Any], passes: int = 5) -> str:
    """The Python functions that take most time; the backward pass runs in this thread, so that they are seen there."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        forward().backward()
        profiler.enable()
        for _ in range(passes):
            forward().backward()
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
    return text.getvalue()


def operator_records(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Host microseconds of one call of each kind of operator, in each way."""
    for name, build in OPERATORS.items():
        few = name in ("layer_norm", "softmax", "dropout", "gelu", "add")  # in no plan: one plan shows them all
        torch.manual_seed(0)
        with torch.device(device):
            model, x = build(device)
        x = x.requires_grad_()
        for way in ("FP32", "BF16 autocast", "plan BF16") if few else WAYS:
            if not _works(way, device):
                continue
            with running(model, functools.partial(model, x), way, device) as run:
                times = host_times(model, lambda: run().float().sum(), device, 8 if quick else 25)
                number = counts(lambda: run().float().sum(), device)
            yield {
                "operator": name,
                "way": way,
                **{f"{key}_us": 1e6 * value / LENGTH for key, value in times.items()},
                **{key: value / LENGTH for key, value in number.items()},
            }


def model_records(device: torch.device, quick: bool, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Host milliseconds of whole models on a small batch, in each way."""
    for name, (build, _) in MODELS.items():
        torch.manual_seed(0)
        with torch.device(device):
            model, inputs = build(1, 16, tiny=device.type == "cpu")
        model.train()
        for way in WAYS:
            if not _works(way, device):
                continue
            with running(model, functools.partial(model, **inputs), way, device) as run:
                times = host_times(model, lambda: _loss(run()), device, 8 if quick else 20)
                number = counts(lambda: _loss(run()), device)
                if folder is not None:
                    text = profile_text(lambda: _loss(run()))
                    (folder / f"{name}-{way.replace(' ', '-').replace(',', '')}.txt").write_text(text)
            yield {"model": name, "way": way, **{f"{key}_ms": 1e3 * value for key, value in times.items()}, **number}


def _wall_s(step: Callable[[], Any], repeats: int) -> dict[str, float]:
    for _ in range(4):
        step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {"step_ms": 1e3 * statistics.median(times), "step_least_ms": 1e3 * min(times)}


class _LossOf(nn.Module):
    """A model as ``torch.cuda.make_graphed_callables`` wants one: tensors in, a tensor out."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        return _loss(self.model(**dict(zip(self.names, tensors, strict=True))))


def _captured(model: nn.Module, inputs: Mapping[str, Tensor], way: str, device: torch.device) -> Callable[[], Any]:
    if way in PLANS:
        graphed(model, inputs)
        return functools.partial(model, **inputs)
    dtype, low = AUTOCAST.get(way, torch.bfloat16), way in AUTOCAST
    context = functools.partial(torch.autocast, device.type, dtype, enabled=low, cache_enabled=False)
    tensors = tuple(inputs.values())
    with context():
        captured = torch.cuda.make_graphed_callables(
            _LossOf(model, list(inputs)),
            tensors,
            allow_unused_input=True,
        )

    def run() -> Any:
        with context():
            return captured(*tensors)

    return run


def step_records(
    device: torch.device, quick: bool, models: Sequence[str], ways: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Wall milliseconds of a training step at a training batch, the optimizer included: eager, and captured."""
    if device.type != "cuda":
        return
    for name in models:
        build, (batch, length) = MODELS[name]
        torch.manual_seed(0)
        with torch.device(device):
            model, inputs = build(batch, length, tiny=False)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step(run: Callable[[], Any], optimizer: torch.optim.Optimizer = optimizer) -> None:
            loss = _loss(run())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        for way in ways:
            if not _works(way, device):
                continue
            record = {"model": name, "batch": [batch, length], "way": way}
            repeats = 6 if quick else 15
            with running(model, functools.partial(model, **inputs), way, device) as run:
                yield {**record, "how": "eager", **_wall_s(functools.partial(step, run), repeats)}
                try:
                    captured = _captured(model, inputs, way, device)
                    yield {**record, "how": "graphs", **_wall_s(functools.partial(step, captured), repeats)}
                except Exception as failure:  # named, and the others are measured all the same
                    yield {**record, "how": "graphs", "error": f"{type(failure).__name__}: {failure}"[:300]}
            captured = None
            gc.collect()  # graphs hold their memory until nobody holds them
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=("operators", "models", "steps"), help="default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="of the steps; default: all")
    parser.add_argument("--way", action="append", choices=WAYS, help="of the steps; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--profile", type=Path, help="folder for the Python functions that take most time, per way")
    parser.add_argument("--label", default="", help="kept beside the sections, to tell two versions apart")
    parser.add_argument("--output", type=Path, default=RESULTS / "host-cost.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.profile is not None:
        arguments.profile.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    makers: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "models": lambda: model_records(device, arguments.quick, arguments.profile),
        "operators": lambda: operator_records(device, arguments.quick),
        "steps": lambda: step_records(device, arguments.quick, arguments.model or list(MODELS), arguments.way or WAYS),
    }
    sections: dict[str, Any] = {}
    if arguments.output.is_file():
        sections = dict(read_json(arguments.output, [FORMAT])["sections"])
    for name in arguments.section or makers:
        records: list[dict[str, Any]] = []
        key = f"{name} ({arguments.label})" if arguments.label else name
        sections[key] = {
            "date": datetime.date.today().isoformat(),
            "hardware": hardware,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
            "command": " ".join(["python", *sys.argv]),
            "records": records,
        }
        for record in makers[name]():
            records.append(record)
            # Written at once: a run that is cut short has measured something.
            write_json(arguments.output, {"format": FORMAT, "sections": sections})
    return 0


if __name__ == "__main__":
    sys.exit(main())
