"""A device with too little memory for BF16 autocast: the plan fits and runs, its peak predicted beside measured.

python benchmarks/memory_limited.py [--models "vit full,diffusion full"] [--shares 0.92,0.98] [--times 4] [--device cpu]

For every model one fresh process measures the peak of a step under BF16 autocast, and shows that it runs out of memory
under a cap (``torch.cuda.set_per_process_memory_fraction``) of the largest of ``--shares`` of that. Another one plans
under a cap of the first share and trains; where there is no plan, the next share is tried. The plan keeps 5 % of the
cap free, as by default: room for workspaces of libraries and for fragmentation, some 200 MB, so that the cap should
be well above 4 GB. ``--times`` repeats the batch. On a CPU, where nothing enforces a cap, it is the plan's limit.
Writes ``benchmarks/results/memory-limited.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from by_hand_worker import WithLoss
from results_head import results_head
from unlike_models import KINDS, SIZES, Subject, subject

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.support import allocation_of, out_of_memory_by_type

HERE = Path(__file__).resolve().parent
MODELS = tuple(f"{kind} {size}" for kind in KINDS for size in SIZES)
DEFAULT = ("vit full", "diffusion full", "encoder full")
ASKED = 0.03
"""Most that the predicted peak may be off."""
STEPS = 4
LIMIT_S = {"cuda": 200, "cpu": 600}
"""Seconds after which a process is given up, by device."""


class Training:
    """A model with its batch, loss and optimizer on a device; peaks are of allocated memory, nothing else counted."""

    def __init__(self, made: Subject, device: torch.device, times: int) -> None:
        self.device, self.loss = device, made.loss
        self.model = made.model.to(device)
        self.batch = {key: torch.cat([value] * times).to(device) for key, value in made.batch.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def step(self, context: Any = contextlib.nullcontext, scaler: Any = None) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        with context():
            loss = WithLoss(self.model, self.loss)(**self.batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def peak_bytes(self, **how: Any) -> int:
        """Peak of a step once the optimizer has its state, with parameters, buffers and that state."""
        self.step(**how)
        parameters = [*self.model.parameters(), *self.model.buffers()]
        state = [x for own in self.optimizer.state.values() for x in own.values() if torch.is_tensor(x)]
        kept = sum(x.numel() * x.element_size() for x in (*parameters, *state) if x.device.type == self.device.type)
        peaks = []
        for _ in range(STEPS):
            self.optimizer.zero_grad()  # the gradients of the step before are not there when it begins
            peaks.append(allocation_of(lambda: self.step(**how), self.device)[1].peak_bytes)
        return kept + max(peaks)


def autocast(device: torch.device) -> Any:
    """BF16 autocast on a device."""
    return torch.autocast(device.type, torch.bfloat16)


def by_hand(model: str, device: torch.device, times: int, share: float) -> dict[str, Any]:
    """The peak of BF16 autocast, and whether a step of it runs under a cap of a share of that."""
    training = Training(subject(model), device, times)
    peak = training.peak_bytes(context=lambda: autocast(device))
    record: dict[str, Any] = {"bf16_peak_bytes": peak, "bf16_cap_bytes": int(share * peak)}
    if device.type != "cuda":
        return record
    record["bf16_runs_under_cap"] = True
    training.optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    use_cap(record["bf16_cap_bytes"], device)
    try:
        training.step(context=lambda: autocast(device))
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        record["bf16_runs_under_cap"] = False
    return record


def use_cap(num_bytes: int, device: torch.device) -> None:
    """Let this process allocate no more than so much of a card's memory."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)


def planned(model: str, device: torch.device, times: int, cap_bytes: int) -> dict[str, Any]:
    """The plan under the cap: predicted and measured peak, and time of a step."""
    import qsync_opt

    if device.type == "cuda":
        use_cap(cap_bytes, device)
    training = Training(subject(model), device, times)
    options = qsync_opt.PlanningOptions(
        memory=None if device.type == "cuda" else cap_bytes,
        cache_dir=os.environ.get("MEMORY_LIMITED_CACHE"),
        progress=False,
        least_gain=0.0,
        profile_seconds=8.0,
        race_seconds=2.0,
        planning_seconds=110.0,
        capture=False,  # graphs keep their memory for themselves
        compare="passes",
    )
    began = time.perf_counter()
    plan = qsync_opt.auto_plan(
        training.model, training.batch, loss=training.loss, optimizer=training.optimizer, options=options
    )
    planning_s = time.perf_counter() - began
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    assert plan.problem is not None
    assert plan.model is not None
    bound = qsync_opt.evaluate(plan.problem, plan.plan).memory_bytes[plan.device_type]
    qsync_opt.apply(training.model, plan)
    record = {
        "planning_s": round(planning_s, 1),
        "taken": dict(plan.taken),
        "reason": plan.reason,
        "bound_bytes": bound,
        "memory_excess_bytes": dict(plan.model.memory_excess_bytes),
        "predicted_peak_bytes": plan.peak_bytes[plan.device_type],
        "modes": {
            mode.label: [round(mode.pass_ns / 1e6, 3), mode.needed_bytes]
            for own in plan.model.modes.values()
            for mode in own
        },
    }
    try:
        with out_of_memory_by_type():
            return record | trained(training, qsync_opt.LossScaler(training.model))
    except torch.OutOfMemoryError as failure:
        return record | {"failure": f"training under the plan: {failure}"[:400]}


def trained(training: Training, scaler: Any) -> dict[str, Any]:
    """Peak and time of a step of a model under its plan."""
    peak = training.peak_bytes(scaler=scaler)
    began = time.perf_counter()
    for _ in range(STEPS):
        training.step(scaler=scaler)
    on_card = training.device.type == "cuda"
    if on_card:
        torch.cuda.synchronize()
    return {
        "peak_bytes": peak,
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_card else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_card else None,
        "step_ms": (time.perf_counter() - began) / STEPS * 1e3,
    }


def in_process(what: str, model: str, device: str, times: int, number: float, cache: str) -> dict[str, Any]:
    """The record of a fresh process; what it measured for planning is kept for the next in the folder ``cache``."""
    command = [sys.executable, Path(__file__).name, "--worker", what, "--models", model, "--device", device]
    command += ["--times", str(times), "--number", repr(number)]
    try:
        done = subprocess.run(
            command,
            cwd=HERE,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S[device],
            env={**os.environ, "MEMORY_LIMITED_CACHE": cache},
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"{what} was not done after {LIMIT_S[device]} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"failure": f"exit status {done.returncode}: {reason}"[:400]}
    record: dict[str, Any] = json.loads(lines[-1])
    return record


def measure(model: str, device: str, times: int, shares: list[float]) -> dict[str, Any]:
    """The record of one model."""
    with tempfile.TemporaryDirectory() as cache:
        record: dict[str, Any] = {"model": model, "times": times}
        record |= in_process("by hand", model, device, times, max(shares), cache)
        for share in shares if "failure" not in record else ():
            cap_bytes = int(share * record["bf16_peak_bytes"])
            result = in_process("plan", model, device, times, float(cap_bytes), cache)
            record.update({"share": share, "cap_bytes": cap_bytes, **result})
            if "peak_bytes" in record:
                record.pop("failure", None)
                break
    if "peak_bytes" in record:
        record["error"] = round(record["predicted_peak_bytes"] / record["peak_bytes"] - 1, 4)
        record["of_bf16"] = round(record["peak_bytes"] / record["bf16_peak_bytes"], 3)
    return record


def asked(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one model: the plan runs where BF16 autocast does not, and its peak is predicted."""
    model, ran = record["model"], "peak_bytes" in record
    alone = ran and record.get("bf16_runs_under_cap") is False
    note = record.get("failure", "") if not ran else f"{record['of_bf16']} of the peak of BF16 autocast"
    fits = ran and record["peak_bytes"] <= record["cap_bytes"]
    return [
        {
            "what": f"{model}: the plan trains under a cap at which BF16 autocast runs out of memory",
            "asked": "yes",
            "measured": "yes" if alone and fits else "not enforced on a CPU" if ran and fits else "no",
            "met": alone and fits,
            "note": note,
        },
        {
            "what": f"{model}: predicted over measured peak of a step",
            "asked": f"within {ASKED:.0%}",
            "measured": record.get("error"),
            "met": ran and abs(record["error"]) <= ASKED,
            "note": note,
        },
    ]


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(DEFAULT))
    parser.add_argument("--shares", default="0.92,0.98", help="caps, as shares of the peak of BF16 autocast")
    parser.add_argument("--times", type=int, default=1, help="how many times the batch of each model is repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "memory-limited.json")
    parser.add_argument("--worker", choices=("by hand", "plan"), help=argparse.SUPPRESS)
    parser.add_argument("--number", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = [name.strip() for name in arguments.models.split(",")]
    if unknown := [name for name in models if name not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; allowed are {', '.join(MODELS)}")
    if arguments.worker:
        device = torch.device(arguments.device)
        if arguments.worker == "by hand":
            result = by_hand(models[0], device, arguments.times, arguments.number)
        else:
            result = planned(models[0], device, arguments.times, int(arguments.number))
        print(json.dumps(result))
        return
    records = []
    for model in models:
        shares = sorted(map(float, arguments.shares.split(",")))
        records.append(measure(model, arguments.device, arguments.times, shares))
        print(json.dumps({key: value for key, value in records[-1].items() if key != "modes"}), flush=True)
    on_card = arguments.device == "cuda"
    write_json(
        arguments.output,
        {
            **results_head(
                torch.cuda.get_device_name() if on_card else platform.machine(), {"torch": torch.__version__}
            ),
            "asked": [row for record in records for row in asked(record)],
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
