"""Figures and tables of plans in training, from ``benchmarks/results/runtime.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from results_pages import Record, percent, table

NOT_MEASURED = "not measured"
PLAIN = ("FP32", "TF32", "BF16 autocast", "FP16 autocast", "uniform INT8", "uniform FP8")
"""What a user can choose without a plan, the same on all workers."""
AS_FAST = 0.98
BY_SPEED, CAPTURED = "local batches by speed, ", ", captured"
_NAMES = (
    "fp32", "bf16", "bf16-operators", "cpu-fp32", "cpu-bf16", "cpu-bf16-operators", "throughput", "sensitivity",
    "equal", "of-by-speed", "by-speed-missed",
    "less-sensitive", "less-sensitive-rounds", "by-speed", "first-step", "soak", "soak-memory", "soak-prediction",
    "soak-drifts", "soak-moved", "predicted", "hardware", "many", "many-first-step", "scaling", "many-plain",
    "many-by-speed",
)  # fmt: skip


def runtime_figures(data: Record) -> dict[str, str]:
    """Name to figure or table; what was not measured says so."""
    found = {f"runtime.{name}": NOT_MEASURED for name in _NAMES}
    for record in data.get("overhead", ()):
        on_card = "NVIDIA" in record["hardware"]
        name = ("" if on_card else "cpu-") + record["precision"].lower()
        if record["precision"] != "FP32" and record.get("carried_out") != "by torch.autocast":
            name += "-operators"
        memory = record.get("more_memory")
        found[f"runtime.{name}"] = f"{percent(record['slower'])} time" + (
            "" if memory is None else f", {percent(memory)} memory"
        )
        if on_card:
            found["runtime.hardware"] = record["hardware"]
    clusters = _clusters(data)
    pairs = {model: ways for (model, workers), ways in clusters.items() if workers == 2 and "plan" in ways}
    many = {model: ways for (model, workers), ways in clusters.items() if workers > 2 and "plan" in ways}
    if pairs:
        found |= _of_pairs(pairs)
    if many:
        ratios = {model: against_plain(ways)[0] for model, ways in many.items()}
        steps = [ways["plan"]["first_planned_step_s"] for ways in many.values()]
        found["runtime.many"] = ", ".join(f"{model} {ratio:.2f} x" for model, ratio in ratios.items())
        found["runtime.many-first-step"] = ", ".join(f"{seconds:.0f} s" for seconds in steps)
    for (_, workers), ways in clusters.items():
        if workers < 8:
            continue
        for name, prefix in (("many-plain", ""), ("many-by-speed", BY_SPEED)):
            among = [way for way in ways if way.startswith(BY_SPEED) == bool(prefix) and not way.endswith("plan")]
            if among:
                best = max(among, key=lambda way: ways[way]["samples_per_s"])
                found[f"runtime.{name}"] = f"{best.removeprefix(prefix)} {ways[best]['samples_per_s']:,.0f} samples/s"
    for record in data.get("soak", ()):
        if "NVIDIA" not in record["hardware"]:
            continue
        found["runtime.soak"] = (
            f"{record['steps']:,} steps: {percent(record['drift'])} time, "
            f"{record['memory_growth_bytes'] / 2**20:+.1f} MiB; planned again in {record['replan_s']:.2f} s"
        )
        found["runtime.soak-moved"] = f"{record['plans_that_differed']} times in {record['replanned']}"
        found["runtime.soak-memory"] = f"{record['memory_growth_bytes']:,} bytes"
        found["runtime.soak-prediction"] = (
            "; ".join(
                f"{', '.join(json.loads(kind).values())} {percent(first)} and {percent(last)}"
                for kind, (first, last) in record.get("prediction_error_by_plan", {}).items()
            )
            or NOT_MEASURED
        )
        found["runtime.soak-drifts"] = (
            "; ".join(
                f"{', '.join(json.loads(kind).values())} {percent(drift)}"
                for kind, drift in record.get("drift_by_plan", {}).items()
            )
            or NOT_MEASURED
        )
    found["runtime.table.throughput"] = _throughput_table(clusters)
    found["runtime.table.plans"] = _plans_table(clusters)
    found["runtime.table.bars"] = _bars_table(clusters)
    return found


def _clusters(data: Record) -> dict[tuple[str, int], dict[str, Record]]:
    """Model and number of workers, all at work at once on cards, to the records of its ways that ran.

    A record's ``variant`` says in what its code or options differed from the others'.
    """
    found: dict[tuple[str, int], dict[str, Record]] = {}
    for record in data.get("throughput", ()):
        if "NVIDIA" in record["hardware"] and record.get("samples_per_s") and not record.get("workers_in_turn"):
            variant = record.get("variant")
            name = f"{record['model']} ({variant})" if variant else record["model"]
            key = (name, len(record["local_batches"]))
            found.setdefault(key, {})[record["configuration"]] = record
    return found


def against_plain(ways: Mapping[str, Record]) -> tuple[float, str]:
    """Throughput of the plan as a share of the best plain way's, and the name of that."""
    best = max((name for name in PLAIN if name in ways), key=lambda name: ways[name]["samples_per_s"])
    return ways["plan"]["samples_per_s"] / ways[best]["samples_per_s"], best


def less_sensitive(ways: Mapping[str, Record], *, rounds: bool = True) -> bool:
    """Whether the plan has less total sensitivity than every plain way that is as fast.

    As fast is what has at least `AS_FAST` of the plan's throughput. With ``rounds`` so is what took turns with it and
    was not slower by as much in every round: a median beyond that says little where rounds differ by more.
    """
    return not _finer_rivals(ways, rounds=rounds)


def _finer_rivals(ways: Mapping[str, Record], *, rounds: bool) -> list[Record]:
    plan = ways["plan"]
    rivals = [ways[name] for name in PLAIN if name in ways and not _is_slower(ways[name], plan, rounds=rounds)]
    return [r for r in rivals if r.get("sensitivity") is not None and plan["sensitivity"] >= r["sensitivity"]]


def _is_slower(rival: Record, plan: Record, *, rounds: bool) -> bool:
    if rival["samples_per_s"] >= AS_FAST * plan["samples_per_s"]:
        return False
    if not rounds or rival["configuration"] not in plan.get("in_turn_with", ()):
        return True
    return all(AS_FAST * theirs > mine for theirs, mine in _turns(rival, plan))


def _turns(rival: Record, plan: Record) -> list[tuple[float, float]]:
    return list(zip(rival.get("rounds_ms", ()), plan.get("rounds_ms", ()), strict=False))


def _sensitivity_cell(ways: Mapping[str, Record], itself: str) -> str:
    if less_sensitive(ways):
        return "yes"
    if not less_sensitive(ways, rounds=False):
        return f"no{itself}"
    slower = [
        f"{rival['configuration']} was {percent(min(shares))} to {percent(max(shares))}"
        for rival in _finer_rivals(ways, rounds=True)
        for shares in [[theirs / mine - 1 for theirs, mine in _turns(rival, ways["plan"])]]
    ]
    return f"by medians yes, in every round no: a round of {' and '.join(slower)} slower"


def by_speed(ways: Mapping[str, Record]) -> float | None:
    """Throughput of plan and local batches by speed together as a share of the best of all other ways."""
    best = best_beside(ways)
    return None if best is None else ways[f"{BY_SPEED}plan"]["samples_per_s"] / ways[best]["samples_per_s"]


def best_beside(ways: Mapping[str, Record], *, launched: bool = False) -> str | None:
    """The fastest way but for plan and local batches by speed together, if that was measured.

    ``launched`` leaves out those whose passes are captured.
    """
    others = [name for name in ways if name != f"{BY_SPEED}plan" and not (launched and name.endswith(CAPTURED))]
    if f"{BY_SPEED}plan" not in ways or not others:
        return None
    return max(others, key=lambda name: ways[name]["samples_per_s"])


def best_of_equal_batches(ways: Mapping[str, Record]) -> str:
    """The fastest way beside the plan that gives all workers equal batches, launched or captured."""
    others = [name for name in ways if name != "plan" and not name.startswith(BY_SPEED)]
    return max(others, key=lambda name: ways[name]["samples_per_s"])


def _beside_equal(ways: Mapping[str, Record]) -> str:
    """Speed and sensitivity of a plan over those of the best way with equal batches."""
    plan, best = ways["plan"], ways[best_of_equal_batches(ways)]
    speed = f"{plan['samples_per_s'] / best['samples_per_s']:.2f} x"
    if not best.get("sensitivity") or plan.get("sensitivity") is None:
        return speed
    return f"{speed} (sensitivity {plan['sensitivity'] / best['sensitivity']:.2g} x)"


def _missed(ratios: Mapping[str, float]) -> str:
    """The models whose ratio is not above 1."""
    missed = [model for model, ratio in ratios.items() if ratio <= 1]
    return f"missed by {', '.join(missed)}" if missed else "met"


def _of_by_speed(ways: Mapping[str, Record]) -> str | None:
    """Throughput of the plan with equal batches as a share of the best with local batches by speed."""
    sized = [record["samples_per_s"] for name, record in ways.items() if name.startswith(BY_SPEED)]
    return f"{ways['plan']['samples_per_s'] / max(sized):.2f} x" if sized else None


def same_way(record: Record, name: str) -> bool:
    """Whether a plan is this plain way on every device type."""
    return {*record.get("taken", {}).values()} == {name.removeprefix(BY_SPEED).removeprefix("uniform ")}


def _of_pairs(pairs: Mapping[str, Mapping[str, Record]]) -> dict[str, str]:
    models = sorted(pairs)
    ratios = {model: against_plain(pairs[model])[0] for model in models}
    together = {model: by_speed(pairs[model]) for model in models}
    steps = [pairs[model]["plan"]["first_planned_step_s"] for model in models]
    shares = [
        plan["sensitivity"] / best["sensitivity"]
        for ways in pairs.values()
        if (best := ways[against_plain(ways)[1]]).get("sensitivity") and (plan := ways["plan"])
    ]
    # Whole steps that were timed in planning, where they were.
    errors = [
        abs(ways["plan"]["predicted_ms"] / ways["plan"]["step_ms"] - 1)
        for ways in pairs.values()
        if ways["plan"].get("steps")
    ]
    said = {
        "predicted": percent(max(errors)).removeprefix("+") if errors else NOT_MEASURED,
        "throughput": ", ".join(f"{model} {ratio:.2f} x" for model, ratio in ratios.items()),
        "equal": ", ".join(f"{model} {_beside_equal(pairs[model])}" for model in models),
        "of-by-speed": ", ".join(f"{m} {share}" for m in models if (share := _of_by_speed(pairs[m])) is not None),
        "by-speed-missed": _missed({model: ratio for model, ratio in together.items() if ratio is not None}),
        "by-speed": ", ".join(f"{model} {ratio:.2f} x" for model, ratio in together.items() if ratio is not None),
        "first-step": f"{min(steps):.0f} to {max(steps):.0f} s",
        "sensitivity": f"{min(shares):.2g} to {max(shares):.2g}" if shares else NOT_MEASURED,
        "scaling": "; ".join(filter(None, (_scaling(model, pairs[model]) for model in models))),
        "less-sensitive": f"{sum(less_sensitive(ways, rounds=False) for ways in pairs.values())} of {len(pairs)}",
        "less-sensitive-rounds": f"{sum(less_sensitive(ways) for ways in pairs.values())} of {len(pairs)}",
    }
    return {f"runtime.{name}": text or NOT_MEASURED for name, text in said.items()}


def _throughput_table(clusters: Mapping[tuple[str, int], Mapping[str, Record]]) -> str:
    names = sorted({name for ways in clusters.values() for name in ways}, key=_order)
    header = ["", *(f"{model}, {workers} workers" for model, workers in clusters)]
    rows = []
    for name in names:
        speeds = [ways[name]["samples_per_s"] if name in ways else None for ways in clusters.values()]
        rows.append([name, *(None if speed is None else f"{speed:.0f}" for speed in speeds)])
    return table(header, rows) if clusters else NOT_MEASURED


def _scaling(model: str, ways: Mapping[str, Record]) -> str:
    """What a step takes beside the slowest worker's passes, with losses that are scaled and with others."""
    told = [
        f"{name} {ways[name]['step_ms'] - max(ways[name]['alone_ms']):.1f} ms"
        for name in ("FP16 autocast", "BF16 autocast")
        if name in ways and ways[name].get("alone_ms")
    ]
    return f"{model} {', '.join(told)}" if len(told) > 1 else ""


def _bars_table(clusters: Mapping[tuple[str, int], Mapping[str, Record]]) -> str:
    """What was asked for beside what was found."""
    rows = []
    for (model, workers), ways in clusters.items():
        if "plan" not in ways or not any(name in ways for name in PLAIN):
            continue
        ratio, best = against_plain(ways)
        beside, both, launched = best_beside(ways), by_speed(ways), best_beside(ways, launched=True)
        sized = ways.get(f"{BY_SPEED}plan", {})
        itself = next((f", it is {name}" for name in PLAIN if same_way(ways["plan"], name)), "")
        tied = ", which it is" if beside is not None and same_way(sized, beside) else ""
        rows.append(
            [
                f"{model}, {workers} workers",
                f"{ratio:.3f} of {best}",
                _sensitivity_cell(ways, itself),
                None if both is None else f"{both:.3f} of {beside}{tied}",
                None
                if launched is None
                else f"{sized['samples_per_s'] / ways[launched]['samples_per_s']:.2f} of {launched}",
                f"{ways['plan']['first_planned_step_s']:.0f} s",
            ]
        )
    header = (
        "",
        "plan beside the best plain way: at least 0.98",
        "less sensitivity than every plain way as fast: yes",
        "plan with local batches by speed beside the best of all others: above 1",
        "the same, beside the best whose passes the host launches",
        "start to first planned step",
    )
    return table(header, rows) if rows else NOT_MEASURED


def _order(name: str) -> tuple[int, bool, str]:
    plain: Sequence[str] = PLAIN
    place = plain.index(name) if name in plain else len(plain) + (name == "plan")
    return place + 10 * name.startswith(BY_SPEED), "plan" in name, name


def _plans_table(clusters: Mapping[tuple[str, int], Mapping[str, Record]]) -> str:
    rows = []
    for (model, workers), ways in clusters.items():
        for name, record in ways.items():
            if not record.get("taken"):
                continue
            taken = "; ".join(f"{way} on {kind}" for kind, way in record["taken"].items())
            batches = " + ".join(map(str, record["local_batches"]))
            rows.append([f"{model}, {workers} workers", name, taken, batches, f"{record['sensitivity']:.2g}"])
    return table(("", "", "plan", "samples per worker", "total sensitivity"), rows) if rows else NOT_MEASURED
