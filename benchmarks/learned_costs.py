"""Learned costs on held-out operators, families, models and devices, beside peers, and plans made from them.

    python benchmarks/learned_costs.py [--records FILE...] [--output PATH] [--no-networks]

Reads the records of times of a processor under ``benchmarks/records``, or those given; nothing is measured here. Errors
are in seconds. Plans are the fastest ones of captured models, made from predicted costs and evaluated with the measured
ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from results_head import results_head

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import DeviceProfile, MeasuredCost, fit_cost
from qsync_opt.costs.learned import (
    CostRecord,
    DeviceVector,
    LearnedModel,
    Phase,
    Split,
    TimeEstimate,
    class_name,
    fit_laws,
    group_keys,
    kernel_of,
    learned_profile,
    load_record,
    merge_records,
    parts,
    predict_samples,
    reference_ns,
    summary,
    workload_of,
)
from qsync_opt.io import write_json
from qsync_opt.model import OpGraph, Role
from qsync_opt.training import (
    Plan,
    Problem,
    build_problem,
    choose_profiles,
    evaluate,
    fastest,
    problem_role,
    profile_groups,
    uniform_plan,
)

ROOT = Path(__file__).resolve().parent
# Of one machine; those of another processor and of cards have results of their own.
RECORDS = sorted((ROOT / "records").glob("costs-xeon-*.json.gz"))
RESULTS = ROOT / "results" / "learned-costs.json"
SEEDS = 10
BUDGETS = (1, 2, 4, 8)
PROFILES = (0, 10, 30, 100)
REGRET = 0.02


# ------------------------------------------------------------------ errors of times


def _reference(train: CostRecord, test: CostRecord) -> np.ndarray:
    """The roofline with a launch per leaf."""
    return np.array([reference_ns(program, device) for program, device, _ in test.programs()])


def _scaled_peaks(train: CostRecord, test: CostRecord) -> np.ndarray:
    """The same, scaled by the median ratio of each precision and pass in the training data."""
    ratios: dict[tuple[str, Phase], list[float]] = defaultdict(list)
    for sample, reference in zip(train.samples, _reference(train, train), strict=True):
        ratios[sample.precision, sample.phase].append(sample.ns / reference)
    scale = {key: statistics.median(values) for key, values in ratios.items()}
    return _reference(train, test) * [scale.get((s.precision, s.phase), 1.0) for s in test.samples]


def _trees(train: CostRecord, test: CostRecord) -> np.ndarray:
    from learned_costs_features import trees_ns

    return trees_ns(train, test)


def _network(kind: str) -> Callable[[CostRecord, CostRecord], np.ndarray]:
    def predict(train: CostRecord, test: CostRecord) -> np.ndarray:
        from learned_costs_networks import predicted_ns

        return predicted_ns(kind, train, test)[0]

    return predict


PEERS: dict[str, Callable[[CostRecord, CostRecord], np.ndarray]] = {
    "roofline": _reference,
    "scaled peaks": _scaled_peaks,
    "boosted trees": _trees,
    "set transformer": _network("set"),
    "paper's network, mended": _network("paper"),
    "utilisation (NeuSight's idea)": _network("utilisation"),
}


def _with_law(model: LearnedModel, record: CostRecord, places: Sequence[int]) -> list[int]:
    """Those places of a record whose samples a model predicts; it refuses kernels never measured on such devices."""
    programs = zip(places, record.select(places).programs(), strict=True)
    return [i for i, (program, device, _) in programs if model.knows(program, device)]


def _errors(record: CostRecord, networks: bool) -> list[dict[str, Any]]:
    rows = []
    for split in Split:
        predictions: dict[str, list[float]] = defaultdict(list)
        estimates: list[TimeEstimate] = []
        actual: list[float] = []
        classes: list[str] = []
        without_law = 0
        for name, train_places, test_places in parts(record, split):
            train = record.select(train_places)
            model = fit_laws(train, errors=False, rounds=2)
            test = record.select(_with_law(model, record, test_places))
            without_law += len(test_places) - len(test)
            print(f"{split} {name}: {len(train)} and {len(test)} of {len(test_places)}", file=sys.stderr)
            if not len(test):
                continue
            estimates += predict_samples(model, test)
            actual += [sample.ns for sample in test.samples]
            classes += [class_name(program).partition(" ")[0] for program, _, _ in test.programs()]
            for peer, predict in PEERS.items():
                # Trees and networks take long: they are compared where little and where most is new.
                fitted = split in (Split.WORKLOAD, Split.DEVICE) and (networks or predict is _trees)
                if fitted or predict in (_reference, _scaled_peaks):
                    predictions[peer] += predict(train, test).tolist()
        row = {"split": str(split), "peer": "laws", **summary(actual, estimates), "without_law": without_law}
        rows.append(row | {"median_by_class": _by_class(classes, estimates, actual)})
        for peer, values in predictions.items():
            errors = np.abs(np.array(values) - actual) / actual
            errors_of_peer = {
                "median": float(np.median(errors)),
                "p90": float(np.quantile(errors, 0.9)),
                "samples": len(errors),
            }
            rows.append({"split": str(split), "peer": peer, **errors_of_peer})
    return rows


def _by_class(classes: list[str], estimates: list[TimeEstimate], actual: list[float]) -> dict[str, float]:
    errors: dict[str, list[float]] = defaultdict(list)
    for name, estimate, ns in zip(classes, estimates, actual, strict=True):
        errors[name].append(abs(estimate.ns - ns) / ns)
    return {name: round(statistics.median(values), 4) for name, values in sorted(errors.items())}


def _repeats(records: list[CostRecord]) -> dict[str, float]:
    """How far two runs of collecting on one device differ: a law that knew the times would be off by 0.7 of it."""
    differences: list[float] = []
    tables: dict[str, list[dict[Any, float]]] = defaultdict(list)
    for record in records:
        of_key: dict[Any, list[float]] = defaultdict(list)
        for sample in record.samples:
            if sample.model != "edges":
                of_key[record.workloads[sample.workload], sample.precision, sample.phase].append(sample.ns)
        tables[record.devices[0].name].append({key: statistics.median(v) for key, v in of_key.items()})
    for runs in tables.values():
        for a, b in itertools.pairwise(runs):
            differences += [abs(a[key] - b[key]) / b[key] for key in a if key in b]
    if not differences:
        return {}
    return {
        "median": statistics.median(differences),
        "p90": float(np.quantile(differences, 0.9)),
        "samples": len(differences),
    }


def _by_run(records: list[CostRecord], record: CostRecord) -> list[dict[str, Any]]:
    """Errors on held-out shapes by the run of collecting that they are from."""
    run_of = [number for number, of_run in enumerate(records) for _ in range(len(of_run))]
    held: dict[int, tuple[list[float], list[TimeEstimate]]] = {number: ([], []) for number in range(len(records))}
    for _, train, test in parts(record, Split.WORKLOAD):
        model = fit_laws(record.select(train), errors=False, rounds=1)
        known = _with_law(model, record, test)
        for i, estimate in zip(known, predict_samples(model, record.select(known)), strict=True):
            held[run_of[i]][0].append(record.samples[i].ns)
            held[run_of[i]][1].append(estimate)
    return [{"device": records[n].devices[0].name, "run": n, **summary(*pair)} for n, pair in held.items()]


def _chosen_workloads(record: CostRecord, device: int, count: int) -> set[int]:
    """Workloads to profile on a device: of each kind in turn the one of middle size, then those between."""
    of_kind: dict[str, list[int]] = defaultdict(list)
    for w in {s.workload for s in record.samples if s.device == device}:
        of_kind[record.workloads[w].kind].append(w)
    for kind, works in of_kind.items():
        of_kind[kind] = sorted(works, key=lambda w: (sum(x.elements for x in record.workloads[w].outputs), w))
    chosen: list[int] = []
    for share in (0.5, 0.8, 0.2, 0.65, 0.35):
        for kind in sorted(of_kind, key=lambda kind: (-len(of_kind[kind]), kind)):
            work = of_kind[kind][int(share * (len(of_kind[kind]) - 1))]
            if work not in chosen and len(chosen) < count:
                chosen.append(work)
    return set(chosen)


def _after_profiles(record: CostRecord) -> list[dict[str, Any]]:
    """Errors on each device that was held out, before and after some of its operators were profiled."""
    rows = []
    shapes = group_keys(record, Split.WORKLOAD)
    for name, train, test in parts(record, Split.DEVICE):
        model = fit_laws(record.select(train), errors=False, rounds=2)
        device = next(vector for vector in record.devices if vector.name == name)
        for count in PROFILES:
            chosen = _chosen_workloads(record, record.devices.index(device), count)
            known = {shapes[i] for i in test if record.samples[i].workload in chosen}
            measured = record.select([i for i in test if record.samples[i].workload in chosen])
            held = record.select([i for i in test if shapes[i] not in known])
            programs = [program for program, _, _ in measured.programs()]
            corrected = model.corrected(device, programs, [sample.ns for sample in measured.samples])
            actual, estimates = [sample.ns for sample in held.samples], predict_samples(corrected, held)
            errors = summary(actual, estimates) | {"known_factors": _known_factors(held, estimates)}
            rows.append({"device": name, "profiles": count, "times": len(measured), **errors})
    return rows


def _known_factors(held: CostRecord, estimates: Sequence[TimeEstimate]) -> float:
    """Median error if the best factor of every kernel on the device were known from all its held-out times."""
    left: dict[str, list[float]] = defaultdict(list)
    for (program, _, sample), estimate in zip(held.programs(), estimates, strict=True):
        left[kernel_of(program)].append(estimate.ns / sample.ns)
    errors = [abs(ratio / statistics.median(ratios) - 1) for ratios in left.values() for ratio in ratios]
    return round(statistics.median(errors), 4)


# ------------------------------------------------------------------ plans


def _cluster(profile: DeviceProfile) -> Cluster:
    device = DeviceType(name="device", count=1, memory_limit_bytes=2**45, precisions=tuple(profile.formats))
    link = Network(latency_s=0.0, bandwidth_bytes_per_s=1e9, source="none is used")
    return Cluster(name="one", devices=(device,), network=link)


def _problem(graph: OpGraph, profile: DeviceProfile) -> Problem:
    noise = {"INT8": 4.0, "FP8": 4.0, "BF16": 1.0, "FP16": 1.0, "TF32": 0.5, "FP32": 0.0}
    noise |= {"INT8-BWD8": 8.0, "FP8-BWD8": 8.0}
    names = [operator.name for operator in graph if operator.role is Role.ADJUSTABLE]
    return build_problem(graph, {"device": profile}, dict.fromkeys(names, noise), _cluster(profile), slack=0.0)


def _truth(graph: OpGraph, record: CostRecord, device: int, base: DeviceProfile) -> DeviceProfile:
    """A measured profile from the record's times of a model's operators."""
    times: dict[Any, list[float]] = defaultdict(list)
    edges: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for sample in record.samples:
        if sample.device != device:
            continue
        work = record.workloads[sample.workload]
        if sample.phase is Phase.CAST:
            edges[sample.source, sample.precision].append((work.outputs[0].elements, sample.ns))
        else:
            times[work, sample.precision, sample.phase].append(sample.ns)
    casts = {f"{a}>{b}": fit_cost(points) for (a, b), points in edges.items() if f"{a}>{b}" in base.casts}
    measurements: dict[str, dict[str, MeasuredCost]] = {}
    for operator in graph:
        work = workload_of(graph, operator)
        table = measurements[f"{operator.signature} {problem_role(operator)}"] = {}
        for precision, cost in base.cost(operator.name).items():
            forward = times.get((work, precision, Phase.FORWARD))
            if forward is None:
                continue
            backward = times.get((work, precision, Phase.BACKWARD), [0.0])
            inside = 0
            if precision in ("INT8", "FP8") and operator.role is Role.ADJUSTABLE:
                fit = casts[f"{base.formats[precision].output}>{precision}"]
                inside = sum(fit.ns(graph[source].output_elements) for source in operator.inputs)
            forward_ns = max(0, round(statistics.median(forward)) - inside)
            backward_ns = round(statistics.median(backward))
            table[precision] = replace(cost, forward_ns=forward_ns, backward_ns=backward_ns, source="", interval_ns=())
    measurements = {key: table for key, table in measurements.items() if table}
    names = {o.name: f"{o.signature} {problem_role(o)}" for o in graph}
    return replace(
        base,
        options={},
        casts=base.casts | casts,
        measurements=measurements,
        operators={name: key for name, key in names.items() if key in measurements},
    )


def _partial(truth: DeviceProfile, names: set[str]) -> DeviceProfile | None:
    """The measured profile of some operators only."""
    keys = {truth.operators[name] for name in names if name in truth.operators}
    if not keys:
        return None
    return replace(
        truth,
        measurements={key: table for key, table in truth.measurements.items() if key in keys},
        operators={name: key for name, key in truth.operators.items() if key in keys},
    )


def _fastest(problem: Problem) -> Plan:
    answer = fastest(problem, "exact", time_limit_s=20.0)
    assert answer is not None
    return answer.plan


def _plan_rows(record: CostRecord) -> list[dict[str, Any]]:
    from qsync_opt.runtimes.torch.capture import capture
    from qsync_opt.runtimes.torch.costs import MODELS

    full = fit_laws(record, errors=False, rounds=1)
    shapes, names = group_keys(record, Split.WORKLOAD), group_keys(record, Split.MODEL)
    rows = []
    for d, vector in enumerate(record.devices):
        for name, build in MODELS.items():
            model, inputs = build(1)
            graph = capture(model, inputs)
            test_shapes = {shapes[i] for i, key in enumerate(names) if key == name}
            unseen = [i for i in range(len(record)) if shapes[i] not in test_shapes]
            elsewhere = [i for i in unseen if record.samples[i].device != d]
            base = learned_profile(graph, vector, full)
            measured = _truth(graph, record, d, base)
            # Views and inputs were not measured; they are the same on both sides.
            truth = learned_profile(graph, vector, full, measured=measured)
            truth_problem = _problem(graph, truth)
            best_ns = fastest(truth_problem, "exact", time_limit_s=20.0).iteration_ns
            row: dict[str, Any] = {"device": vector.name, "model": name, "best_ms": best_ns / 1e6}

            def regret(plan: Plan, problem: Problem = truth_problem, best: int = best_ns) -> float:
                return evaluate(problem, Plan(problem=problem.name, devices=plan.devices)).iteration_ns / best - 1

            roofline = _roofline(base, graph, record, d)
            row["roofline"] = regret(_fastest(_problem(graph, roofline)))
            for label, places in (("unseen model", unseen), ("unseen device", elsewhere)):
                if len(places) < 200:
                    continue
                fitted = fit_laws(record.select(places), errors=False, rounds=2)
                guess = learned_profile(graph, vector, fitted)
                problem = _problem(graph, guess)
                row[label] = regret(_fastest(problem))
                row[f"{label}: iteration"] = _iteration_errors(problem, truth_problem)
                if label == "unseen device":
                    row["choice"] = _choices(graph, vector, fitted, measured, problem, regret)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return rows


def _roofline(base: DeviceProfile, graph: OpGraph, record: CostRecord, device: int) -> DeviceProfile:
    """The profile with the roofline and a launch per kernel as the time of every operator."""
    from qsync_opt.costs.learned import programs_of, reference_ns

    vector = record.devices[device]
    table: dict[str, dict[str, MeasuredCost]] = {}
    for operator in graph:
        work = workload_of(graph, operator)
        entries = table[operator.signature] = dict(base.cost(operator.name))
        if operator.op_type in ("input", "getitem"):
            continue
        for precision, cost in entries.items():
            forward, backward = (
                round(reference_ns(program, vector)) if program.leaves else 0
                for program in programs_of(work, precision, base.formats[precision])
            )
            entries[precision] = replace(
                cost, forward_ns=forward, backward_ns=backward, source="roofline", interval_ns=()
            )
    return replace(base, measurements=table, operators={o.name: o.signature for o in graph})


def _iteration_errors(problem: Problem, truth: Problem) -> dict[str, float]:
    """Relative error of the iteration time of each uniform plan."""
    errors = {}
    for precision in ("FP32", "BF16", "INT8"):
        predicted, actual = (evaluate(p, uniform_plan(p, precision)).iteration_ns for p in (problem, truth))
        errors[precision] = predicted / actual - 1
    return errors


def _choices(
    graph: OpGraph, vector: Any, model: LearnedModel, measured: DeviceProfile, problem: Problem, regret: Any
) -> dict[str, Any]:
    """Regret of the plan after measuring the operators that each method chooses, by budget."""

    def after(names: set[str]) -> float:
        profile = learned_profile(graph, vector, model, measured=_partial(measured, names))
        return float(regret(_fastest(_problem(graph, profile))))

    groups = len(profile_groups(problem))
    result: dict[str, Any] = {"groups": groups, "everything": after({o.name for o in graph})}
    for budget in BUDGETS:
        if budget >= groups:
            break
        row: dict[str, Any] = {}
        for method in ("bounds", "kmeans", "facility"):
            choice = choose_profiles(problem, budget, method=method)
            row[method] = after({name for _, name in choice.targets})
        row["random"] = [
            after({name for _, name in choose_profiles(problem, budget, method="random", seed=seed).targets})
            for seed in range(SEEDS)
        ]
        result[str(budget)] = row
    return result


# ------------------------------------------------------------------ results


def _speed(record: CostRecord) -> dict[str, float]:
    started = time.process_time()
    model = fit_laws(record, errors=False)
    fit_s = time.process_time() - started
    programs = [program for program, _, _ in record.programs()][:1000]
    times = []
    for _ in range(7):
        started = time.process_time()
        model.predict(programs, record.devices[0])
        times.append(time.process_time() - started)
    return {"fit_cpu_s": fit_s, "predict_1000_cpu_ms": 1e3 * statistics.median(times)}


def _asked(data: dict[str, Any], devices: Sequence[DeviceVector]) -> list[dict[str, Any]]:
    note = "devices: " + ", ".join(device.name for device in devices)
    rows: list[dict[str, Any]] = []

    def ask(what: str, limit: str, value: float | None, met: bool, more: str = note) -> None:
        rounded = None if value is None else round(value, 4)
        rows.append({"what": what, "asked": limit, "measured": rounded, "met": met, "note": more})

    laws = {row["split"]: row for row in data["errors"] if row["peer"] == "laws"}
    for split, what, limit in (
        ("workload", "held-out shapes", 0.08), ("family", "held-out family", 0.20), ("device", "held-out device", 0.12),
    ):  # fmt: skip
        if split in laws:
            value = laws[split]["median"]
            refused = laws[split]["without_law"]
            more = f"{refused} of {refused + laws[split]['samples']} times have no law and are refused; {note}"
            ask(f"{what}, median error", f"<= {limit}", value, value <= limit, more)
    if "workload" in laws:
        value = laws["workload"]["coverage"]
        ask("90 % intervals of held-out shapes cover", "0.87 to 0.93", value, 0.87 <= value <= 0.93)
    for split in ("family", "model", "device"):
        value = laws[split]["coverage"]
        ask(f"90 % intervals of held-out {split} cover", "0.87 to 0.93", value, 0.87 <= value <= 0.93)
    for split in ("workload", "device"):
        networks = [r["median"] for r in data["errors"] if r["split"] == split and r["peer"] in PEERS]
        value = laws[split]["median"] / min(networks)
        ask(f"median error over the best peer's, held-out {split}", "<= 1", value, value <= 1)
    if plans := data["plans"]:
        for label in ("unseen model", "unseen device"):
            regrets = [row[label] for row in plans if label in row]
            roofline = statistics.median(row["roofline"] for row in plans)
            if not regrets:
                continue
            value = statistics.median(regrets)
            met = value <= 0.02 and value <= roofline / 2
            worst = (
                f"mean {statistics.mean(regrets):.4f}, roofline's {statistics.mean(r['roofline'] for r in plans):.4f}"
            )
            ask(
                f"plan regret, {label}, median",
                f"<= 0.02 and half of the roofline's {roofline:.4f}",
                value,
                met,
                f"{worst}; {note}",
            )
            if label == "unseen device":
                _ask_effort(ask, [row for row in plans if label in row])
            iterations = [abs(e) for row in plans if label in row for e in row[f"{label}: iteration"].values()]
            value = statistics.median(iterations)
            replayed = f"against the replay of measured operators, not whole steps; {note}"
            ask(f"iteration time of three models, {label}, median", "<= 0.08", value, value <= 0.08, replayed)
        # Models whose plan is the best without any measurement tell nothing about the choice.
        choices = [
            row["choice"][b] for row in plans if row.get("unseen device", 0) > 0 for b in row["choice"] if b.isdigit()
        ]
        pairs = [(choice["bounds"], value) for choice in choices for value in choice["random"]]
        if pairs:
            value = statistics.mean(chosen < drawn - 1e-9 for chosen, drawn in pairs)
            ties = statistics.mean(abs(chosen - drawn) <= 1e-9 for chosen, drawn in pairs)
            more = (
                f"{len(pairs)} pairs of seeds, budgets and models; of {len(plans)} models and devices those whose plan "
                f"was not the best to begin with; {100 * ties:.0f} % are ties; {note}"
            )
            ask("chosen K beats random K, share of seeds", ">= 0.9", value, value >= 0.9, more)
    speed = data["speed"]
    more = "with intervals, without the held-out errors of the card; one core"
    ask("fit, processor seconds", "<= 120", speed["fit_cpu_s"], speed["fit_cpu_s"] <= 120, more)
    ask("1,000 queries, processor ms", "<= 50", speed["predict_1000_cpu_ms"], speed["predict_1000_cpu_ms"] <= 50)
    profiled = [row["median"] for row in data["profiles"] if row["profiles"] == 30]
    value = statistics.mean(profiled)
    ask("held-out device after 30 chosen profiles, median error", "<= 0.06", value, value <= 0.06)
    floor = data["repeats"].get("median")
    more = "no target: the same operator in two runs on one device; each is off by about 0.7 of it, and so is any law"
    ask("two runs of collecting, median difference", "-", floor, True, more)
    quiet = min(data["runs"], key=lambda row: row["median"])
    more = f"of run {quiet['run']} alone, on {quiet['device']}; all runs are fitted"
    ask("held-out shapes, median error, least disturbed run", "<= 0.08", quiet["median"], quiet["median"] <= 0.08, more)
    cards = [device for device in devices if device.kind != "cpu"]
    for what in () if cards else ("held-out card or partition", "held-out card after 30 chosen profiles"):
        ask(what, "<= 0.12, <= 0.06", None, False, "these are records of processors")
    return rows


def _ask_effort(ask: Callable[..., None], plans: list[dict[str, Any]]) -> None:
    """Regret after the largest budget, and the share of measurements that suffices for a regret of 2 %."""
    last, efforts = [], []
    for row in plans:
        choice = row["choice"]
        budgets = sorted(int(b) for b in choice if b.isdigit())
        regrets = {0: row["unseen device"], **{b: choice[str(b)]["bounds"] for b in budgets}}
        last.append(regrets[max(regrets)])
        enough = next((b for b in sorted(regrets) if regrets[b] <= REGRET), choice["groups"])
        efforts.append(enough / choice["groups"])
    value, roofline = statistics.median(last), statistics.median(row["roofline"] for row in plans)
    met = value <= REGRET and value <= roofline / 2
    what = f"plan regret, unseen device, median, after {max(BUDGETS)} chosen measurements"
    ask(what, f"<= 0.02 and half of the roofline's {roofline:.4f}", value, met, f"mean {statistics.mean(last):.4f}")
    more = "1: all had to be measured; median over models and devices"
    ask("share of measurements for a regret of 2 %", "-", statistics.median(efforts), True, f"no target; {more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", nargs="+", type=Path, default=RECORDS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--no-networks", action="store_true", help="leave out the peers that need torch")
    options = parser.parse_args()
    records = [load_record(path) for path in options.records]
    record = merge_records(records)
    data: dict[str, Any] = {"repeats": _repeats(records), "speed": _speed(record)}
    data["errors"] = _errors(record, networks=not options.no_networks)
    data["runs"] = _by_run(records, record)
    data["profiles"] = _after_profiles(record)
    data["plans"] = _plan_rows(record)
    write_json(
        options.output,
        {
            **results_head("; ".join(device.name for device in record.devices), {"qsync_opt": qsync_opt.__version__}),
            "asked": _asked(data, record.devices),
            "records": [{"kind": kind, "rows": rows} for kind, rows in data.items()],
        },
    )


if __name__ == "__main__":
    main()
