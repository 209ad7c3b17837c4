"""Serving over several cards of one host: profiled, planned with unequal memory, run, and beside what is done by hand.

python benchmarks/serving_cards.py [--device cuda|cpu] [--stages N] [--output FILE]

A Llama-shaped model with random weights is written to a folder, one card is profiled, and the model is planned for N
cards under half the harm of 4 bits everywhere. What the cards may use is set by two numbers: ``share``, the memory for
weights in all, of that of weights in 16 bits, and ``skew``, how much of it a card has over the next. The caches' memory
is added and divided in the same way, and every card has what its process, its passes and one of embedding and head
need. On a card, weights in 4 bits take 0.27 of those in 16 bits, half in 4 and half in 8 bits 0.39, and all in 8 bits
0.52: these just fit at the larger share, and only mixtures do at the smaller one.

The rivals have the same memory and harm limit. By hand: equal layers, layers by memory, or the card with most memory
alone, each with one scheme everywhere or with 8 bits where a card has memory for them and 4 elsewhere (first the groups
with most harm; 16 bits would only be slower), in the micro-batches that suit it best. By the planner: one scheme
everywhere, and the fastest plan, which knows no harm. All are predicted, for many prompts and for one; of memory that
is skewed, the plan is served, the rival that should be fastest, and the fastest of the usual ways: an even split and
uniform bits, with one scheme everywhere, and the fastest plan. At the end a stage is killed while it serves. On a CPU
everything is small. Writes ``benchmarks/results/serving-cards-<number>.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
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
    Problem,
    ServeWorkload,
    ServingDevice,
    ServingPlan,
    ServingProfile,
    Stage,
    build_serving_problem,
    plan_serving,
    predict,
)

SCHEMES = ("W4", "W8", "W16")
MIXED = "W4 or W8 by memory"
HARM_LIMIT = 0.5
SETTINGS = ((0.45, 1), (0.45, 3), (0.55, 1), (0.55, 3))
"""Share and skew; see above."""
PLANNED = "planned"
COMMON = ("equal layers, W", "planned, W", "planned, any harm")
"""How the labels of the usual ways begin: an even split, uniform bits in the best split, and time alone."""
PLANNING_S = 10.0
LIMIT_S = 60.0
"""Until a batch must have failed once a stage was killed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model and what it serves."""

    model: dict[str, int]
    workloads: tuple[ServeWorkload, ...]  # the first is the largest
    rounds: int
    dtype: torch.dtype


SIZES = {
    "cuda": Sizes(
        {"layers": 16, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 32768},
        (
            ServeWorkload(prompts=16, prompt_tokens=512, new_tokens=64),
            ServeWorkload(prompts=1, prompt_tokens=128, new_tokens=64),
        ),
        3,
        torch.bfloat16,
    ),
    "cpu": Sizes(
        {"layers": 4, "hidden": 128, "inner": 256, "heads": 4, "kv_heads": 2, "vocabulary": 300},
        (ServeWorkload(prompts=4, prompt_tokens=16, new_tokens=8),),
        1,
        torch.float32,
    ),
}


@dataclass(frozen=True)
class Case:
    """Devices that a plan uses, and what it must keep: one that is alone needs no memory for links."""

    devices: list[ServingDevice]
    workload: ServeWorkload

    @functools.cached_property
    def problem(self) -> Problem:
        model = self.devices[0].profile.model
        return build_serving_problem(model, self.devices, self.workload, harm_limit=HARM_LIMIT, schemes=SCHEMES)


def write_model(folder: Path, sizes: Sizes) -> str:
    """A model folder; all layers have the weights of the first, which changes nothing in time or memory."""
    data = sample_config(**sizes.model)
    config = config_from_json(data)
    state = random_state(config, repeat=True)
    folder.mkdir()
    save_file({k: v.to(sizes.dtype, copy=True) for k, v in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    return str(folder)


def devices_of(
    profile: ServingProfile, workload: ServeWorkload, count: int, share: float, skew: int
) -> list[ServingDevice]:
    """Cards of one kind, each with ``skew`` times the memory for weights and caches that the next one has."""
    model = profile.model
    weights = model.layers * sum(profile.weights_kib[kind]["W16"] for kind in KINDS)
    tokens = workload.prompt_tokens + workload.new_tokens
    caches = model.layers * workload.prompts * model.cache_bytes(tokens, profile.cache_bytes_per_number) // 1024
    passes = math.ceil(profile.workspace.at(workload.prompts, workload.prompt_tokens))
    process = profile.base_kib + profile.link_kib + max(passes, profile.load_kib)
    parts = [skew**-k for k in range(count)]
    return [
        ServingDevice(
            name=f"card{k}",
            memory_kib=process
            + max(profile.first_kib, profile.last_kib)
            + round((share * weights + caches) * part / sum(parts)),
            profile=profile,
        )
        for k, part in enumerate(parts)
    ]


def plan_for(devices: list[ServingDevice], workload: ServeWorkload, **options: Any) -> ServingPlan:
    """A plan that is proved, if there is time to."""
    model = devices[0].profile.model
    return plan_serving(model, devices, workload, method="exact", time_limit_s=PLANNING_S, **options)


def split_layers(problem: Problem, shares: list[int]) -> tuple[Stage, ...]:
    """Whole layers on the devices in order, as near to their shares as possible."""
    names = [group.name for group in problem.groups]
    ends = [round(len(names) // len(KINDS) * total / sum(shares)) for total in itertools.accumulate(shares)]
    return tuple(
        Stage(device=device.name, groups=tuple(names[len(KINDS) * begin : len(KINDS) * end]))
        for device, (begin, end) in zip(problem.devices, itertools.pairwise([0, *ends]), strict=True)
        if end > begin
    )


def schemes_by_memory(problem: Problem, stages: tuple[Stage, ...]) -> dict[str, str]:
    """W8 for the groups with most harm, as long as the memory of their device lasts, and W4 for the others."""
    kinds = {group.name: group.kind for group in problem.groups}
    schemes = dict.fromkeys(kinds, "W4")
    for stage in stages:
        ends = problem.ends[stage.device]
        left = problem.device(stage.device).memory_kib
        left -= (stage is stages[0]) * ends.first_kib + (stage is stages[-1]) * ends.last_kib
        left -= sum(problem.weights_kib[kinds[g]]["W4"] + max(problem.state_kib[kinds[g]]) for g in stage.groups)
        for group in sorted(stage.groups, key=lambda g: -problem.harm[g]["W4"]):
            more = problem.weights_kib[kinds[group]]["W8"] - problem.weights_kib[kinds[group]]["W4"]
            if more <= left:
                schemes[group] = "W8"
                left -= more
    return schemes


def rivals_of(devices: list[ServingDevice], workload: ServeWorkload) -> dict[str, tuple[Case, list[Plan]]]:
    """What is done otherwise; by hand in all micro-batches."""
    all_cards, first = Case(devices, workload), Case(devices[:1], workload)
    memory = [device.memory_kib for device in all_cards.problem.devices]
    rivals: dict[str, tuple[Case, list[Plan]]] = {}
    for split, case, shares in (
        ("equal layers", all_cards, [1] * len(memory)),
        ("layers by memory", all_cards, memory),
        ("card0 alone", first, [1]),
    ):
        stages = split_layers(case.problem, shares)
        for bits in (*SCHEMES, MIXED):
            names = [group.name for group in case.problem.groups]
            schemes = schemes_by_memory(case.problem, stages) if bits == MIXED else dict.fromkeys(names, bits)
            options = range(len(case.problem.microbatches))
            rivals[f"{split}, {bits}"] = case, [Plan(microbatch=k, stages=stages, schemes=schemes) for k in options]
    chosen = {
        f"planned, {s} everywhere": plan_for(devices, workload, harm_limit=HARM_LIMIT, schemes=(s,)) for s in SCHEMES
    }
    chosen["planned, any harm"] = plan_for(devices, workload, schemes=SCHEMES)
    return rivals | {label: case_of(found) for label, found in chosen.items()}


def case_of(found: ServingPlan) -> tuple[Case, list[Plan]]:
    """A plan beside the problem that it is held to."""
    return Case(list(found.devices), found.workload), [found.plan] if found.plan else []


def expect(case: Case, tries: list[Plan]) -> tuple[Plan | None, dict[str, Any]]:
    """The fastest of some plans that keeps the limits, if one does, and what is recorded of it."""
    expected = [(plan, predict(case.problem, plan, case.workload, case.devices)) for plan in tries]
    fitting = [(plan, prediction) for plan, prediction in expected if prediction.evaluation.feasible]
    if not fitting:
        reasons = [violation for _, prediction in expected[:1] for violation in prediction.evaluation.violations]
        return None, {"not_served": "; ".join(reasons) or "no split keeps both limits"}
    plan, prediction = min(fitting, key=lambda pair: pair[1].evaluation.objective)
    return plan, {
        "predicted": {
            "prefill": prediction.prefill_s,
            "decode": prediction.decode_s,
            "memory_kib": [stage.memory_kib for stage in prediction.stages],
        },
        "harm": prediction.harm,
        "stages": prediction.to_json()["stages"],
        "microbatches": dataclasses.asdict(case.problem.microbatches[plan.microbatch]),
    }


def seconds(record: dict[str, Any], how: str = "predicted") -> float:
    """Of both phases."""
    return float(record[how]["prefill"] + record[how]["decode"])


def is_usual(label: str) -> bool:
    """Whether a rival is one of the usual ways."""
    return label.startswith(COMMON) and MIXED not in label


def same(plan: Plan) -> tuple[Any, ...]:
    """What two plans have in common that do the same."""
    return plan.microbatch, plan.stages, tuple(sorted(plan.schemes.items()))


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


def serve(model: str, case: Case, plan: Plan, sizes: Sizes, device: str) -> dict[str, Any]:
    """What a plan does: seconds of both phases, and memory of the stages."""
    work, option = case.workload, case.problem.microbatches[plan.microbatch]
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


def lose_a_stage(model: str, case: Case, plan: Plan, sizes: Sizes, device: str) -> dict[str, Any]:
    """Seconds from the death of the last stage until the batch fails, and the error."""
    with Pipeline(model, plan, dtype=sizes.dtype, devices=places(plan, device)) as pipeline:
        killed: list[float] = []

        def kill(rows: slice, tokens: Any) -> None:
            if not killed:
                killed.append(time.perf_counter())
                os.kill(pipeline.pids[-1], signal.SIGKILL)

        prompts = [[1] * case.workload.prompt_tokens] * case.workload.prompts
        try:
            pipeline.generate(prompts, 10_000 // case.workload.prompts, on_tokens=kill)
        except StageError as failure:
            return {"failed_after_s": round(time.perf_counter() - killed[0], 3), "message": str(failure)[:300]}
    return {"failed_after_s": None, "message": "the batch did not fail"}


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each figure that was set as a target."""
    rows = []
    runs = {f"{r['setting']}: {r['plan']}": r for r in records if "measured" in r}
    ratios = {}
    for plan in (r for r in runs.values() if r["plan"] == PLANNED):
        setting = plan["setting"]
        rivals = [r for r in runs.values() if r["setting"] == setting and r["plan"] != PLANNED]
        times = {r["plan"]: seconds(r, "measured") / seconds(plan, "measured") for r in rivals}
        ratios |= {f"{setting}: {label}": ratio for label, ratio in times.items()}
        usual = {label: ratio for label, ratio in times.items() if is_usual(label)}
        best = min(usual, key=lambda label: usual[label], default=None)
        ratio = None if best is None else round(usual[best], 3)
        rows.append(
            asked_row(f"the best of the usual ways over the plan, {setting}", ">= 1.3", ratio,
                      ratio is None or ratio >= 1.3, best or "none of them keeps the limits")
        )  # fmt: skip
    if ratios:
        worst = min(ratios, key=lambda label: ratios[label])
        rows.append(
            asked_row("any rival over the plan, least", ">= 1", round(ratios[worst], 3), ratios[worst] >= 1, worst)
        )
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
            failed_after = record["failed_after_s"]
            met = failed_after is not None and failed_after <= LIMIT_S
            rows.append(
                asked_row("a stage killed: seconds until its batch fails", f"<= {LIMIT_S:.0f}", failed_after, met,
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
            model,
            sizes.workloads[0],
            device="cuda:0" if device == "cuda" else "cpu",
            schemes=SCHEMES,
            dtype=sizes.dtype,
        )
        print(f"profiled after {time.perf_counter() - began:.0f} s", flush=True)
        facts: dict[str, Any] = {"devices": {}, "gap": {}, "profile": profile.to_json()}
        to_serve: list[tuple[dict[str, Any], Case, Plan]] = []
        for workload, (share, skew) in itertools.product(sizes.workloads, SETTINGS):
            setting = f"{workload.prompts} prompts, {share} of 16 bits, {skew} : 1"
            devices = devices_of(profile, workload, count, share, skew)
            planned = plan_for(devices, workload, harm_limit=HARM_LIMIT, schemes=SCHEMES)
            facts["devices"][setting] = {device.name: device.memory_kib for device in devices}
            facts["gap"][setting] = planned.solution.gap
            found = {}
            for label, (case, plans) in ({PLANNED: case_of(planned)} | rivals_of(devices, workload)).items():
                plan, facts_of_plan = expect(case, plans)
                records.append({"setting": setting, "plan": label, **facts_of_plan})
                if plan is not None:
                    found[label] = (records[-1], case, plan)
            if skew > 1 and PLANNED in found:
                to_serve.append(found.pop(PLANNED))
                usual = [one for label, one in found.items() if is_usual(label)]
                fastest = [min(some, key=lambda one: seconds(one[0])) for some in (usual, found.values()) if some]
                to_serve += {same(one[2]): one for one in reversed(fastest)}.values()
        write_json(output, {**head, **facts, "asked": [], "records": records})
        assert to_serve, "nothing can be planned"
        served: dict[tuple[Any, ...], dict[str, Any]] = {}
        for record, case, plan in to_serve:
            if same(plan) not in served:
                served[same(plan)] = serve(model, case, plan, sizes, device)
                print(f"served after {time.perf_counter() - began:.0f} s", flush=True)
            record["measured"] = served[same(plan)]
            print(f"{record['setting']}, {record['plan']}: {record['predicted']}, {record['measured']}", flush=True)
            write_json(output, {**head, **facts, "asked": [], "records": records})
        record, case, plan = to_serve[0]
        lost = lose_a_stage(model, case, plan, sizes, device)
        records.append({"setting": record["setting"], "plan": "planned, a stage killed", **lost})
    rows = asked(records)
    write_json(output, {**head, **facts, "asked": rows, "records": records})
    for row in rows:
        print(f"{row['what']}: asked {row['asked']}, measured {row['measured']} {row['note']}")


if __name__ == "__main__":
    main()
