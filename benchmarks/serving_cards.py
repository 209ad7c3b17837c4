"""Serving over several cards of one host: profiled, planned with unequal memory, run, and beside what is done by hand.

python benchmarks/serving_cards.py [--device cuda|cpu] [--stages N] [--output FILE]

A Llama-shaped model with random weights is written to a folder, one card is profiled, and the model is planned for N
cards, each of which may use a third of the memory for weights that the one before has; half the harm of 4 bits
everywhere is allowed. The plan, equal layers on all cards, and equal bits in all layers are then served: what does not
fit or harms more is recorded as such. What every plan should do is written down before it runs. At the end a stage is
killed while it serves. On a CPU everything is small. Writes ``benchmarks/results/serving-cards-<number>.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from results_head import asked_row, processors, results_head
from safetensors.torch import save_file

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.serving import (
    MemoryWatch,
    Pipeline,
    StageError,
    config_from_json,
    measure_batches,
    profile_serving,
    random_state,
    sample_config,
)
from qsync_opt.serving import (
    KINDS,
    Plan,
    ServeWorkload,
    ServingDevice,
    ServingPlan,
    ServingProfile,
    Stage,
    plan_serving,
    rounding_harm,
)

SCHEMES = ("W4", "W8", "W16")
FIRST_SHARE = 0.45
"""Of the memory that weights in 16 bits need, what the first card may use for weights."""
HARM_LIMIT = 0.5
LIMIT_S = 60.0
"""Until a batch must have failed once a stage was killed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model and what it serves."""

    model: dict[str, int]
    workload: ServeWorkload
    rounds: int
    dtype: torch.dtype


SIZES = {
    "cuda": Sizes(
        {"layers": 8, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 32768},
        ServeWorkload(prompts=16, prompt_tokens=512, new_tokens=64),
        3,
        torch.bfloat16,
    ),
    "cpu": Sizes(
        {"layers": 4, "hidden": 128, "inner": 256, "heads": 4, "kv_heads": 2, "vocabulary": 300},
        ServeWorkload(prompts=4, prompt_tokens=16, new_tokens=8),
        1,
        torch.float32,
    ),
}


def write_model(folder: Path, sizes: Sizes) -> str:
    """A model folder; all layers have the weights of the first, which changes nothing in time or memory."""
    data = sample_config(**sizes.model)
    config = config_from_json(data)
    state = random_state(config, repeat=True)
    folder.mkdir()
    save_file({k: v.to(sizes.dtype, copy=True) for k, v in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    return str(folder)


def devices_of(profile: ServingProfile, workload: ServeWorkload, count: int) -> list[ServingDevice]:
    """Cards of one kind with less and less room for weights."""
    whole = profile.model.layers * sum(profile.weights_kib[kind]["W16"] for kind in KINDS)
    passes = round(profile.workspace.at(workload.prompts, workload.prompt_tokens))
    fixed = (
        profile.base_kib + profile.link_kib + max(passes, profile.load_kib) + max(profile.first_kib, profile.last_kib)
    )
    fixed += (
        profile.model.layers
        * workload.prompts
        * profile.model.cache_bytes(workload.prompt_tokens + workload.new_tokens)
        // 1024
    )
    return [
        ServingDevice(name=f"card{k}", memory_kib=fixed + round(FIRST_SHARE * whole / 3**k), profile=profile)
        for k in range(count)
    ]


def plans_of(planned: ServingPlan, devices: list[ServingDevice]) -> dict[str, tuple[ServingPlan, Plan | None, str]]:
    """The plan and its rivals, each with why it cannot be served, if it cannot."""
    plans: dict[str, tuple[ServingPlan, Plan | None, str]] = {"planned": (planned, planned.plan, "")}
    names = [group.name for group in planned.problem.groups]
    layers = len(names) // 2
    borders = [2 * (layers * k // len(devices)) for k in range(len(devices) + 1)]
    parts = [tuple(names[a:b]) for a, b in itertools.pairwise(borders)]
    options = planned.problem.microbatches
    harm = rounding_harm(devices[0].profile.model, SCHEMES)
    for scheme in SCHEMES:
        hurt = sum(values[scheme] for values in harm.values())
        reason = f"harm {hurt:.3f} is above {HARM_LIMIT}" if hurt > HARM_LIMIT else ""
        stages = tuple(Stage(device=d.name, groups=part) for d, part in zip(devices, parts, strict=True))
        tries = [Plan(microbatch=k, stages=stages, schemes=dict.fromkeys(names, scheme)) for k in range(len(options))]
        fitting = [plan for plan in tries if not planned.predict(plan).evaluation.violations]
        best = min(fitting, key=lambda plan: planned.predict(plan).evaluation.objective, default=None)
        plans[f"equal layers, {scheme}"] = (planned, best, reason or ("" if best else "does not fit"))
        uniform = plan_serving(
            planned.devices[0].profile.model, devices, planned.workload, harm_limit=HARM_LIMIT, schemes=(scheme,)
        )
        plans[f"planned, {scheme} in all layers"] = (uniform, uniform.plan, "" if uniform.plan else uniform.reason)
    return plans


class CardWatch:
    """The most memory in use of every card, in KiB, beyond what was in use before; a context manager."""

    def __init__(self) -> None:
        self._before = self._read()
        self.peaks_kib = dict.fromkeys(range(len(self._before)), 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @staticmethod
    def _read() -> list[int]:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [1024 * int(line) for line in output.split()]

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            for card, (now, before) in enumerate(zip(self._read(), self._before, strict=True)):
                self.peaks_kib[card] = max(self.peaks_kib[card], now - before)

    def __enter__(self) -> CardWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def places(plan: Plan, device: str) -> list[str]:
    """Where each stage runs."""
    return [f"cuda:{k}" if device == "cuda" else "cpu" for k in range(len(plan.stages))]


def serve(model: str, base: ServingPlan, plan: Plan, sizes: Sizes, device: str) -> dict[str, Any]:
    """What a plan does: seconds of both phases, and memory of the stages."""
    work, option = base.workload, base.problem.microbatches[plan.microbatch]
    watch: Any = CardWatch() if device == "cuda" else MemoryWatch()
    started = watch.add if device == "cpu" else None
    with (
        watch,
        Pipeline(model, plan, dtype=sizes.dtype, devices=places(plan, device), started=started) as pipeline,
    ):
        speeds = measure_batches(
            pipeline,
            prompts=work.prompts,
            prompt_tokens=work.prompt_tokens,
            new_tokens=work.new_tokens,
            rounds=sizes.rounds,
            prefill=option.prefill,
            decode=option.decode,
        )
    peaks = list(watch.peaks_kib.values())[: len(plan.stages)]
    return {"prefill": speeds["prefill_s"], "decode": speeds["decode_s"], "memory_kib": peaks}


def lose_a_stage(model: str, base: ServingPlan, plan: Plan, sizes: Sizes, device: str) -> dict[str, Any]:
    """Seconds from the death of the last stage until the batch fails, and the error."""
    with Pipeline(model, plan, dtype=sizes.dtype, devices=places(plan, device)) as pipeline:
        killed: list[float] = []

        def kill(rows: slice, tokens: Any) -> None:
            if not killed:
                killed.append(time.perf_counter())
                os.kill(pipeline.pids[-1], signal.SIGKILL)

        prompts = [[1] * base.workload.prompt_tokens] * base.workload.prompts
        try:
            pipeline.generate(prompts, 10_000 // base.workload.prompts, on_tokens=kill)
        except StageError as failure:
            return {"failed_after_s": round(time.perf_counter() - killed[0], 3), "message": str(failure)[:300]}
    return {"failed_after_s": None, "message": "the batch did not fail"}


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each figure that was set as a target."""
    rows = []
    runs = {r["plan"]: r for r in records if "measured" in r}
    total = {name: sum(r["measured"][phase] for phase in ("prefill", "decode")) for name, r in runs.items()}
    rivals = {name: seconds for name, seconds in total.items() if name != "planned"}
    if rivals:
        best = min(rivals, key=lambda name: rivals[name])
        ratio = rivals[best] / total["planned"]
        rows.append(asked_row("the best rival's time over the plan's", ">= 1.3", round(ratio, 3), ratio >= 1.3, best))
    for phase in ("prefill", "decode"):
        errors = {name: r["predicted"][phase] / r["measured"][phase] - 1 for name, r in runs.items()}
        worst = max(errors, key=lambda name: abs(errors[name]))
        error = errors[worst]
        rows.append(
            asked_row(f"{phase}: predicted over measured, furthest", "within 10 %", round(error, 3), abs(error) <= 0.1,
                      worst)
        )  # fmt: skip
    memory = {
        f"{name}, stage {k}": predicted / measured - 1
        for name, r in runs.items()
        for k, (predicted, measured) in enumerate(
            zip(r["predicted"]["memory_kib"], r["measured"]["memory_kib"], strict=True)
        )
    }
    above, below = max(memory, key=lambda name: memory[name]), min(memory, key=lambda name: memory[name])
    for what, text, worst, met in (
        ("most above", "<= 0.05", above, memory[above] <= 0.05),
        ("most below", ">= -0.02", below, memory[below] >= -0.02),
    ):
        rows.append(asked_row(f"memory: predicted over measured, {what}", text, round(memory[worst], 3), met, worst))
    for record in records:
        if "failed_after_s" in record:
            seconds = record["failed_after_s"]
            met = seconds is not None and seconds <= LIMIT_S
            rows.append(
                asked_row("a stage killed: seconds until its batch fails", f"<= {LIMIT_S:.0f}", seconds, met,
                          record["message"])
            )  # fmt: skip
    return rows


def main() -> None:
    """Profile, plan, serve and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", type=int, help="as many as there are cards; 2 on a CPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device, sizes = arguments.device, SIZES[arguments.device]
    count = arguments.stages or (torch.cuda.device_count() if device == "cuda" else 2)
    output = arguments.output or Path(__file__).parent / "results" / f"serving-cards-{count}.json"
    card = f"{count} x {torch.cuda.get_device_name()}, " if device == "cuda" else ""
    head = results_head(f"{card}{processors()}", {"torch": torch.__version__})
    began, records = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", sizes)
        print(f"model written after {time.perf_counter() - began:.0f} s", flush=True)
        profile = profile_serving(
            model, sizes.workload, device="cuda:0" if device == "cuda" else "cpu", schemes=SCHEMES, dtype=sizes.dtype
        )
        print(f"profiled after {time.perf_counter() - began:.0f} s", flush=True)
        devices = devices_of(profile, sizes.workload, count)
        planned = plan_serving(profile.model, devices, sizes.workload, harm_limit=HARM_LIMIT, schemes=SCHEMES)
        assert planned.plan is not None, planned.reason
        plans = plans_of(planned, devices)
        for label, (base, plan, reason) in plans.items():
            record: dict[str, Any] = {"plan": label}
            if plan is None or reason:
                records.append(record | {"not_served": reason})
                continue
            expected = base.predict(plan)
            record |= {
                "predicted": {
                    "prefill": expected.prefill_s,
                    "decode": expected.decode_s,
                    "memory_kib": [stage.memory_kib for stage in expected.stages],
                },
                "stages": expected.to_json()["stages"],
                "microbatches": dataclasses.asdict(base.problem.microbatches[plan.microbatch]),
            }
            records.append(record)
        facts = {"devices": {d.name: d.memory_kib for d in devices}, "gap": planned.solution.gap}
        write_json(output, {**head, **facts, "asked": [], "records": records, "profile": profile.to_json()})
        for record in records:
            base, plan, _ = plans[record["plan"]]
            if plan is not None and "predicted" in record:
                record["measured"] = serve(model, base, plan, sizes, device)
                print(f"{record['plan']}: {record['predicted']}, {record['measured']}", flush=True)
                write_json(output, {**head, **facts, "asked": [], "records": records, "profile": profile.to_json()})
        records.append({"plan": "planned, a stage killed", **lose_a_stage(model, planned, planned.plan, sizes, device)})
    rows = asked(records)
    write_json(output, {**head, **facts, "asked": rows, "records": records, "profile": profile.to_json()})
    for row in rows:
        print(f"{row['what']}: asked {row['asked']}, measured {row['measured']} {row['note']}")


if __name__ == "__main__":
    main()
