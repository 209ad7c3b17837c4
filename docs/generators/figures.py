"""Single figures in running text: a page writes ``{{ name }}``, and the figure comes from ``benchmarks/results``.

``python docs/generators/figures.py`` writes the table of README anew; a test compares it.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_figures import compiled_figures, memory_figures
from kernel_figures import host_figures, kernel_figures
from quality_figures import quality_figures
from results_pages import ROOT, Record, environment, load_results, percent, span, table
from runtime_figures import NOT_MEASURED, runtime_figures
from trained_figures import trained_figures

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_PLACE = re.compile(r"\{\{ ([\w.-]+) \}\}")


def figures() -> dict[str, str]:
    """Name to figure."""
    results = load_results()
    return {
        **_predicted(results["predicted-cuda.json"]),
        **_steps(results["predictor.json"]),
        **compiled_figures(results["predictor-compiled.json"], results["predictor-held-out-compiled.json"]),
        **memory_figures(results["compiled-memory.json"]),
        **_held_out(results["predictor-held-out.json"]),
        "replay.full": f"{results['replay-speed.json']['full_ms']:.1f} ms",
        "replay.change": f"{results['replay-speed.json']['after_one_change_ms']:.3f} ms",
        **_indicator(results["indicator.json"]),
        **_solvers(results["solvers.json"]),
        **_capture(results["capture.json"]),
        **kernel_figures(results["kernels.json"]["sections"]),
        **host_figures(results["host-cost.json"]["sections"]),
        **quality_figures(results["quality.json"]),
        **runtime_figures(results["runtime.json"]),
        **_by_hand(results["by-hand.json"]),
        **_gradient_steps(results["gradient-steps.json"]),
        **_onnx_runtime(results["onnx-runtime.json"]),
        **_eight_bit(results["eight-bit-training.json"]),
        **_checkpoints(results["checkpoints-h200.json"], results["checkpoints-h200-stall.json"]),
        **_memory_limited(results["memory-limited.json"]),
        **_cards(results["cards-2.json"]),
        **_hybrid_step(results["hybrid-step.json"]),
        **_serving_cards(results["serving-cards-2.json"]),
        **trained_figures(results["training-quality.json"]),
        **_unseen(results["predictor-unseen-cpu.json"]),
        **_learned_costs("costs", results["learned-costs.json"]),
        **_learned_costs("costs-epyc", results["learned-costs-epyc.json"]),
        **_learned_costs("costs-h200", results["learned-costs-h200.json"]),
        **_serving_holes("holes", results["serving-holes.json"]),
        **_serving_holes("holes-h200", results["serving-holes-h200.json"]),
        **_plain_processor(results["plain-processor.json"]),
        **_serving_card(results["serving-card.json"]),
        **_weight_only(results["weight-only.json"]),
        **_serving_harm(results["serving-harm.json"]),
        **_serving_load(results["serving-load.json"]),
        **_serving_peers(results["serving-peers.json"]),
        **_serving_solvers(results["serving-solvers.json"]),
        **_speculation(results["decoding-simulation.json"]),
        **_acceptance(results["decoding-acceptance.json"]),
        **_acceptance_by_text(results["decoding-acceptance-texts.json"]),
        **_lookup(results["decoding-lookup.json"]),
        **_decoding_speed(results["decoding.json"]),
        **_codec_speed(results["codec-speed.json"]),
    }


def _speculation(data: Record) -> dict[str, str]:
    """How near plans and the controller of speculation come to the best choice, by a simulated clock."""
    families = ("tuned", "seeds", "others", "falling")
    each = len(data["asked"]) // len(families)
    texts = {}
    for number, family in enumerate(families):
        values = (row["measured"] for row in data["asked"][each * number : each * (number + 1)])
        plan, _, controller, least, cost, adapted, drafts, plain = values
        texts |= {
            f"speculation.{family}.plan": f"{100 * plan:.1f} %",
            f"speculation.{family}.controller": f"{100 * controller:.1f} %",
            f"speculation.{family}.least": f"{least:.3f}",
            f"speculation.{family}.cost": f"{100 * cost:.2f} %",
            f"speculation.{family}.adapted": f"{100 * adapted:.1f} %",
            f"speculation.{family}.from-drafts": f"{100 * drafts:.1f} %",
            f"speculation.{family}.from-plain": f"{100 * plain:.1f} %",
        }
    return texts


def _acceptance_by_text(data: Record) -> dict[str, str]:
    """Intervals of look-up's acceptance by how texts differ and by tokens, and what error two halves differ by."""
    lookup = next(record for record in data["records"] if record["draft"] == "lookup")
    first, worst = lookup["lengths"][0], max(lookup["lengths"], key=lambda at: abs(at["error"]))
    texts = len(lookup["by_text"])
    return {
        "acceptance.texts": span(first["interval"], ".3f"),
        "acceptance.tokens": span(first["interval_of_independent_tokens"], ".3f"),
        "acceptance.chance": f"{100 * worst['error_by_chance']:.0f} %",
        "acceptance.needed": f"{math.ceil(texts * (worst['error_by_chance'] / 0.03) ** 2):,}",
    }


def _lookup(data: Record) -> dict[str, str]:
    """How far tokens per cycle of look-up are predicted from half of many texts."""
    (record,), (_, row) = data["records"], data["asked"]
    return {"lookup.texts": f"{len(record['by_text']):,}", "lookup.error": f"{100 * row['measured']:.1f} %"}


def _serving_load(data: Record) -> dict[str, str]:
    """What the endpoint lost under many clients, and how its memory grew."""
    lost, growth = data["asked"]
    return {
        "serving-load.lost": str(lost["measured"]),
        "serving-load.answers": lost["note"],
        "serving-load.growth": percent(growth["measured"]),
    }


def _serving_peers(data: Record) -> dict[str, str]:
    """Tokens per second of engines, medians, and ours over the peers'."""
    texts = {}
    for phase in ("prefill", "decode"):
        speeds: dict[str, list[float]] = {}
        for record in data["records"]:
            name = record["engine"].replace(", ", ".").replace(" ", "-").lower()
            speeds.setdefault(f"serving-peers.{phase}.{name}", []).append(record[f"{phase}_tokens_per_s"])
        texts |= {name: f"{statistics.median(values):.0f}" for name, values in speeds.items()}
    missed = []
    for row in data["asked"]:
        phase, peer = row["what"].split()[0], row["what"].split(" over ")[1].split(",")[0]
        texts[f"serving-peers.{phase}.over-{peer}"] = f"{row['measured']:.2f}"
        missed += [] if row["met"] else [f"{phase} over {peer}"]
    texts["serving-peers.missed"] = f": missed by {', '.join(missed)}" if missed else ""
    return texts


def _serving_solvers(data: Record) -> dict[str, str]:
    """How far the default is from the best plan and its bound, how long it takes, and what `exact` proves."""
    rows = [(r["size"], {x["method"]: x for x in r["results"] if x["method"] != "ilp"}) for r in data["records"]]
    texts = {}
    for size in dict.fromkeys(size for size, _ in rows):
        own = [methods for of, methods in rows if of == size]
        name = f"serving-solvers.{size.replace(' ', '')}"
        above = [m["chain"]["objective_ns"] / m["exact"]["objective_ns"] - 1 for m in own]
        texts[f"{name}.above"] = f"{100 * statistics.median(above):.2g} %"
        texts[f"{name}.milliseconds"] = span([1e3 * m["chain"]["seconds"] for m in own], ".0f")
        texts[f"{name}.proved"] = f"{sum(m['exact']['termination'] == 'optimal' for m in own)} of {len(own)}"
        texts[f"{name}.exact"] = f"{max(m['exact']['seconds'] for m in own):.2g} s"
    gaps = [100 * methods["chain"]["gap"] for size, methods in rows if size != "small"]
    texts["serving-solvers.gap"] = f"{min(gaps):.0f} to {max(gaps):.0f} %"
    return texts


def _serving_card(data: Record) -> dict[str, str]:
    """Captured decoding passes on a card, by scheme: times their floor, and how many times as fast as in 16 bits."""
    passes = {(row["scheme"], row["rows"]): row for row in data["records"]}
    texts = {}
    for scheme in ("W4", "W8", "W16"):
        own = [row["times_floor"] for (name, _), row in passes.items() if name == scheme]
        texts[f"serving-card.{scheme}"] = span(own, ".2f")
        for rows in (1, 16):
            faster = passes["W16", rows]["graph_s"] / passes[scheme, rows]["graph_s"]
            texts[f"serving-card.{scheme}.{rows}"] = f"{faster:.2f}"
    return texts


def _weight_only(data: Record) -> dict[str, str]:
    """Shares of the rate of a copy at which products with packed weights read them, by format and rows."""
    texts = {}
    for form, rows in itertools.product(("W4A16", "W8A16"), (1, 16)):
        own = [100 * r["share_of_copy"] for r in data["records"] if (r["format"], r["rows"]) == (form, rows)]
        texts[f"weight-only.{form}.{rows}"] = f"{span(own, '.0f')} %"
    return texts


def _serving_harm(data: Record) -> dict[str, str]:
    """Rank correlation of the indicator of harm with the measured divergence."""
    rows = {row["what"].rpartition(", ")[2]: row["measured"] for row in data["asked"]}
    return {f"serving-harm.{what}": f"{rows[what]:.2f}" for what in ("groups", "layers")}


def _share(value: float) -> str:
    """A share or an error without a sign, in percent."""
    return f"{100 * value:.1f} %"


def _learned_costs(name: str, data: Record) -> dict[str, str]:
    """Held-out errors of learned costs, and how far two runs of measuring differ, where there were two."""
    parts = {record["kind"]: record["rows"] for record in data["records"]}
    repeats = parts["repeats"]
    result = {f"{name}.repeat": _share(repeats["median"])} if repeats else {}
    for row in parts["errors"]:
        if row["peer"] == "boosted trees":
            result[f"{name}.{row['split']}.trees"] = _share(row["median"])
        if row["peer"] == "set transformer":
            result[f"{name}.{row['split']}.network"] = _share(row["median"])
        if row["peer"] == "laws":
            result[f"{name}.{row['split']}"] = _share(row["median"])
            result[f"{name}.{row['split']}.coverage"] = _share(row["coverage"])
            result[f"{name}.{row['split']}.refused"] = str(row["without_law"])
            for of_class, median in row["median_by_class"].items():
                result[f"{name}.{row['split']}.{of_class}"] = _share(median)
    for what, key in (("profiled", "median"), ("known", "known_factors")):
        values = [row[key] for row in parts["profiles"] if row["profiles"] == 30]
        result[f"{name}.{what}"] = _share(sum(values) / len(values))
    return result


def _serving_holes(name: str, data: Record) -> dict[str, str]:
    """Errors of costs of serving that were left out and filled, by way, kind and phase: median and 90th percentile."""

    def both(row: Record) -> str:
        return f"{100 * row['median']:.0f} and {100 * row['p90']:.0f} %"

    rows = {f"{row['way']}.{row['kind']}.{row['phase']}": row for row in data["records"]}
    texts = {f"{name}.{what.replace(' ', '-')}": both(row) for what, row in {**rows, **data["ways"]}.items()}
    return {**texts, f"{name}.repeat": both(data["repeat"])}


def _plain_processor(data: Record) -> dict[str, str]:
    """Times of operators in low precisions against FP32 on a processor with AVX2 alone: the least and the most."""
    kinds = {"depthwise": ("depthwise",), "convolution": ("convolution",), "product": ("linear", "batched")}
    result = {"plain.date": data["date"], "plain.operators": str(len(data["records"]))}
    for precision in ("bf16", "int8"):
        for kind, beginnings in kinds.items():
            times = [
                row[f"{precision}_both_times"] for row in data["records"] if row["operator"].startswith(beginnings)
            ]
            result[f"plain.{precision}.{kind}"] = f"{min(times):.2f} to {max(times):.2f}"
    return result


def _unseen(data: Record) -> dict[str, str]:
    """Errors of predictions that stood in a commit before they were measured."""
    every = data["summary"]["all"]
    time, memory = every["time"], every["memory"]
    ranks = [row["spearman"] for name, row in data["summary"].items() if name != "all"]
    rounds = len(data["records"][0]["rounds_ms"])
    return {
        "unseen.cases": str(data["asked"][0]["measured"]),
        "unseen.models": str(len(ranks)),
        "unseen.time": f"{100 * time['mean_absolute']:.1f} % on average and {100 * time['worst']:.1f} % at worst",
        "unseen.span": f"{percent(time['lowest'])} to {percent(time['highest'])}",
        "unseen.memory": f"{percent(memory['lowest'])} to {percent(memory['highest'])}",
        "unseen.median": percent(every["median_time_error"]),
        "unseen.repeated": _repeated(every, rounds),
        "unseen.rank": span(ranks, ".2f"),
        "unseen.hardware": data["hardware"],
        "unseen.date": data["date"],
        "unseen.predicted": data["predictions_commit"],
    }


def _repeated(summary: Record, rounds: int) -> str:
    """How far the rounds of one plan are apart, where there are several."""
    if rounds == 1:
        return "every plan was measured in one round, so that how far it repeats itself is not known"
    spread = f"{100 * summary['spread_of_rounds']:.0f} % on average and {100 * summary['worst_spread']:.0f} % at most"
    return f"{rounds} rounds of the same plan differed by {spread}"


def _gradient_steps(result: Record) -> dict[str, str]:
    errors = [abs(row["predicted_ms"]["step"] / row["measured_ms"]["step"] - 1) for row in result["records"]]
    return {
        "gradient-steps.kept": f"{result['asked'][0]['measured']} of {len(errors)}",
        "gradient-steps.median": f"{100 * statistics.median(errors):.1f} %",
    }


def _by_hand(data: Record) -> dict[str, str]:
    """Steps of default plans over the best that people set by hand, and which of them miss what was asked."""
    every = [(row["what"].partition(":")[0], row) for row in data["asked"]]
    rows = [(model, row) for model, row in every if row["measured"] is not None]
    ways = {
        model: len({r["way"] for r in data["records"] if r["model"] == model and r["way"] != "plan"})
        for model, _ in rows
    }
    return {
        "by-hand.steps": ", ".join(f"{model} {row['measured']:.2f} ({ways[model]} by hand)" for model, row in rows),
        "by-hand.missed": _missed(
            model if row["measured"] is not None else f"{model} ({row['note']})"
            for model, row in every
            if not row["met"]
        ),
    }


def _missed(what: Iterable[str]) -> str:
    named = ", ".join(what)
    return f"missed by {named}" if named else "met by all"


def _onnx_runtime(data: Record) -> dict[str, str]:
    """Runs under the default plan over those in the best single format, and each model's prediction furthest off."""
    plans, errors = data["asked"][::2], data["asked"][1::2]
    return {
        "onnx.ratios": ", ".join(f"{row['measured']:.2f} ({row['what'].partition(':')[0]})" for row in plans),
        "onnx.errors": ", ".join(f"{100 * row['measured']:+.0f} %" for row in errors),
        "onnx.profiled": span((record["profiled_s"] for record in data["records"]), ".0f"),
    }


def _cards(data: Record) -> dict[str, str]:
    """What was measured on two cards: steps and epochs over others, a save's stall, when a lost worker is noticed."""
    rows = {row["what"]: row["measured"] for row in data["asked"]}
    lost = (max(r["others_ended_after_s"]) for r in data["records"] if r["part"] == "lost" and r["statuses"][0])
    links, sockets = (
        {
            r["subject"]: statistics.median(r["ms"])
            for r in data["records"]
            if r["part"] == "gradients" and r["what"] == "GPT step" and r["link"] == link
        }
        for link in ("links", "sockets")
    )
    errors = [
        abs(rows[f"gradients over {link}: predicted over measured step under the plan"])
        for link in ("links", "sockets")
    ]
    return {
        "cards.gradients.links": f"{links['planned'] / links['plain']:.3f}",
        "cards.gradients.sum8": f"{links['sum8'] / links['plain']:.2f}",
        "cards.gradients.sockets": f"{rows['gradients over sockets: planned step over the fastest']:.3f}",
        "cards.gradients.plain": f"{sockets['planned'] / sockets['plain']:.2f}",
        "cards.gradients.hook": f"{sockets['planned'] / sockets['BF16 hook']:.2f}",
        "cards.gradients.error": f"{100 * max(errors):.0f} %",
        "cards.messages": f"{rows['messages: planned epoch over the fastest']:.3f}",
        "cards.stall": f"{rows['FSDP2 on 2: stall']:.1f} ms",
        "cards.lost": f"{max(lost):.0f}",
    }


def _serving_cards(data: Record) -> dict[str, str]:
    """What was measured of a served model on two cards: times of rivals, predictions, and a killed stage."""
    rows = {row["what"]: row["measured"] for row in data["asked"]}
    runs = [record for record in data["records"] if "measured" in record]
    usual = {
        what.rpartition("plan, ")[2]: value for what, value in rows.items() if what.startswith("the best of the usual")
    }
    own = [run for run in runs if run["plan"] == "planned"]
    decode, prefill = (
        [run["predicted"][phase] / run["measured"][phase] - 1 for run in own] for phase in ("decode", "prefill")
    )
    memory = [
        predicted / measured - 1
        for run in own
        for predicted, measured in zip(run["predicted"]["memory_kib"], run["measured"]["memory_kib"], strict=True)
    ]
    return {
        "serving-cards.usual": " and ".join(
            f"{value:.2f} ({setting.partition(' prompts')[0]} prompt{'s' if setting[:2] != '1 ' else ''})"
            for setting, value in usual.items()
            if value is not None
        ),
        "serving-cards.least": f"{rows['any rival over the plan, least']:.2f}",
        "serving-cards.prefill": f"{span((100 * share for share in prefill), '.0f')} %",
        "serving-cards.decode": f"{span((100 * share for share in decode), '.0f')} %",
        "serving-cards.memory": f"{span((100 * share for share in memory), '.1f')} %",
        "serving-cards.lost": f"{rows['a stage killed: seconds until its batch fails']:.1f} s",
    }


def _hybrid_step(data: Record) -> dict[str, str]:
    """Steps of two unequal workers: under the joint plan, with equal batches, and how the joint one was predicted."""
    times = {record["way"]: record["measured_ms"] for record in data["records"]}
    joint = next(row for row in data["asked"] if "predicted over measured" in row["what"])
    return {
        "hybrid.joint": f"{times['joint plan']:.1f} ms",
        "hybrid.equal": f"{times['equal batches, plan']:.1f} ms",
        "hybrid.fp32": f"{times['equal batches, FP32']:.1f} ms",
        "hybrid.error": f"{-100 * joint['measured']:.0f} %",
    }


def _memory_limited(data: Record) -> dict[str, str]:
    """Plans under caps at which BF16 autocast runs out of memory: peaks over its peak, and how they are predicted."""
    records = data["records"]
    return {
        "limited.times": " and ".join(map(str, sorted({record["times"] for record in records}))),
        "limited.peaks": ", ".join(f"{r['of_bf16']:.2f} ({r['model'].removesuffix(' full')})" for r in records),
        "limited.error": f"{100 * max(abs(record['error']) for record in records):.1f} %",
        "limited.planning": f"{span((record['planning_s'] for record in records), '.0f')} s",
    }


def _checkpoints(durable: Record, stall: Record) -> dict[str, str]:
    """What a save behind training costs on a card."""

    def listed(data: Record, what: str, unit: str, scale: float = 1.0) -> str:
        rows = [row for row in data["asked"] if row["what"].startswith(what) and row["measured"] is not None]
        return ", ".join(f"{scale * r['measured']:.3g} {unit} ({r['what'].rpartition(', ')[2]})" for r in rows)

    return {
        "checkpoints.durable": listed(durable, "durable against the disk", "x"),
        "checkpoints.stall": listed(stall, "stall", "ms", 1e3),
        "checkpoints.steps": listed(stall, "steps beside a save", "%"),
        "checkpoints.memory": listed(stall, "host memory", "MiB"),
    }


def _acceptance(data: Record) -> dict[str, str]:
    """First drafted tokens that a real model accepts, and how far tokens per cycle of other texts are predicted."""
    first = {(r["served"], r["draft"]): r["lengths"][0]["acceptance"] for r in data["records"] if r.get("lengths")}
    texts = {f"acceptance.{served}-{draft}": f"{100 * share:.1f} %" for (served, draft), share in first.items()}
    errors = {r["what"].partition(",")[0]: r["measured"] for r in data["asked"] if r["asked"] == "<= 0.03"}
    own = max(error for what, error in errors.items() if "lookup" not in what)
    looked_up = max(error for what, error in errors.items() if "lookup" in what)
    texts["acceptance.date"] = data["date"]
    return {**texts, "acceptance.error": f"{100 * own:.1f} %", "acceptance.lookup-error": f"{100 * looked_up:.1f} %"}


def _decoding_speed(data: Record) -> dict[str, str]:
    """Speed of planned speculation and of prompt look-up over plain decoding, and of both over peers."""
    speed = {(r["kind"], r["batch"], r["way"]): r for r in [*data["records"], *data["peer"]]}
    cases = [(kind, batch) for kind in ("topics", "repeats") for batch in (1, 4)]

    def listed(way: str) -> str:
        return ", ".join(f"{speed[*case, way]['speedup']:.2f}" for case in cases)

    def rate(kind: str, way: str) -> float:
        return statistics.median(speed[kind, 1, way]["tokens_per_s"])

    peers = [rate(kind, "plain") / rate(kind, "transformers plain") for kind in ("topics", "repeats")]
    return {
        "decoding.auto": listed("auto"),
        "decoding.lookup": listed("lookup:3"),
        "decoding.peer": " and ".join(f"{peer:.1f}" for peer in peers),
        "decoding.llama": ", ".join(
            f"{speed[*case, 'auto']['speedup'] / speed[*case, 'llama.cpp']['speedup']:.2f}" for case in cases
        ),
    }


def _eight_bit(data: Record) -> dict[str, str]:
    """Speed and peak memory of whole 8-bit steps over 16-bit ones, and over the faster recipe of torchao."""
    rows = [(*row["what"].split(", compiled step: "), row) for row in data["asked"] if row["measured"] is not None]

    def listed(what: str) -> str:
        return ", ".join(f"{model} {row['measured']:.2f}" for model, kind, row in rows if kind == what)

    return {
        "eight.speed": listed("speed over BF16 autocast"),
        "eight.torchao": listed("speed over the faster recipe of torchao"),
        "eight.memory": listed("peak memory over BF16 autocast"),
        "eight.missed": _missed(
            f"{kind.partition(' over')[0]} of {model}" for model, kind, row in rows if not row["met"]
        ),
    }


def _codec_speed(data: Record) -> dict[str, str]:
    """Times of the codecs on a card, and the shares of a copy's speed that they reach."""
    known = {row["what"]: row["measured"] for row in data["asked"]}

    def shares(what: str, **where: Any) -> str:
        own = [r for r in data["records"] if r["pass"] == what and all(r.get(k) == v for k, v in where.items())]
        least, most = (f(r["share_of_copy"] for r in own) for f in (min, max))
        return f"{least:.2f} to {most:.2f}"

    return {
        "codec.encode": f"{known['sum8, 26 MB, encode']:.1f} us",
        "codec.all": f"{known['sum8, 26 MB, all passes']:.1f} us",
        "codec.sum8": f"{min(r['share_of_copy'] for r in data['records'] if r.get('subject') == 'sum8'):.2f}",
        "codec.lanes": shares("encode", subject="packed8").partition(" ")[0],
        **{f"codec.{what}": shares(what, part="messages") for what in ("pack", "unpack")},
        **{f"codec.{what}-256": shares(what, part="messages", dim=256) for what in ("pack", "unpack")},
    }


def with_figures(text: str, known: Mapping[str, str]) -> str:
    """Fill in the figures of a page.

    Raises:
        KeyError: A page asks for a figure that is not known.
    """
    return _PLACE.sub(lambda found: known[found[1]], text)


def _predicted(data: Record) -> dict[str, str]:
    rows = data["rows"]
    times, memories = ([row[key] for row in rows] for key in ("time_error", "memory_error"))
    plain = next(row for row in rows if row["plan"] == "uniform FP32")
    return {
        "predicted.hardware": environment(data)["hardware"],
        "predicted.date": environment(data)["date"],
        "predicted.time": f"{percent(min(times))} to {percent(max(times))}",
        "predicted.time-fp32": percent(plain["time_error"]),
        "predicted.time-highest": percent(max(times)),
        "predicted.memory": f"{percent(min(memories))} to {percent(max(memories))}",
        "predicted.plans": str(len(rows)),
        **{
            f"predicted.{row['plan'].removeprefix('uniform ').lower()}.measured": f"{row['measured_ms']:.0f} ms"
            for row in rows
            if row["plan"].startswith("uniform ")
        },
    }


def _steps(data: Record) -> dict[str, str]:
    summary = data["summary"]

    def both(name: str) -> str:
        errors = summary[name]
        if not errors["cases"]:
            return "not measured"
        return f"{100 * errors['mean_absolute']:.1f} % on average and {100 * errors['worst']:.1f} % at worst"

    def shares(found: Sequence[float]) -> str:
        low, high = f"{min(found):.1f}", f"{max(found):.1f}"
        return low if low == high else f"{low} to {high}"

    memory, peaks = summary["memory"], summary["memory_torch_tracker"]
    clusters = {
        f"steps.cluster.{name.partition(' ')[0]}": (
            f"{100 * errors['mean_absolute']:.1f} %, {100 * errors['worst']:.1f} %, "
            f"{summary['spearman_by_cluster'][name]:.2f}"
        )
        for name, errors in summary["time_by_cluster"].items()
    }
    slowdowns = list(zip(*data["slowdowns"].values(), strict=True))
    new = [c for c in data["cases"] if c["predicted_ms"] is not None and not c["plan_recorded_alone"]]
    new_hosts = sum(c["bound_by"] == "host" for c in new if c.get("way", "eager") == "eager")
    host_spread = max(case["spread"] for case in data["cases"] if case["bound_by"] == "host")
    return {
        **clusters,
        "steps.slowdown-whole": shares(slowdowns[0]),
        "steps.slowdown-part": shares(slowdowns[1]),
        "steps.hardware": environment(data)["hardware"],
        "steps.date": environment(data)["date"],
        "steps.cases": str(summary["time"]["cases"]),
        "steps.all": both("time"),
        "steps.new": both("time_plans_never_run"),
        "steps.new-host": "none" if not new_hosts else str(new_hosts),
        "steps.new-cases": str(summary["time_plans_never_run"]["cases"]),
        "steps.device": both("time_device_far_above_host"),
        "steps.device-cases": str(summary["time_device_far_above_host"]["cases"]),
        "steps.host": both("time_bound_by_host"),
        "steps.host-cases": str(summary["time_bound_by_host"]["cases"]),
        "steps.captured": both("time_captured"),
        "steps.captured-cases": str(summary["time_captured"]["cases"]),
        "steps.naive": both("time_naive"),
        "steps.torch": both("time_torch_operators_benchmarked"),
        "steps.torch-cases": str(summary["time_torch_operators_benchmarked"]["cases"]),
        "steps.torch-memory": f"{percent(peaks['lowest'])} to {percent(peaks['highest'])}",
        "steps.rows": both("time_problem_rows"),
        "steps.host-spread": f"{100 * host_spread:.0f} %",
        "steps.rank": f"{summary['spearman']:.3f}",
        "steps.rank-least": f"{min(summary['spearman_by_cluster'].values()):.2f}",
        "steps.memory": f"{percent(memory['lowest'])} to {percent(memory['highest'])}",
        "steps.memory-plans": str(memory["cases"]),
        "steps.seconds": f"{summary['profile_seconds_most']:.0f} s",
    }


def _held_out(data: Record) -> dict[str, str]:
    summary = data["summary"]

    def both(name: str) -> str:
        return (
            f"{100 * summary[name]['mean_absolute']:.1f} % on average and {100 * summary[name]['worst']:.1f} % at worst"
        )

    def span(name: str) -> str:
        return f"{percent(summary[name]['lowest'])} to {percent(summary[name]['highest'])}"

    return {
        "held-out.hardware": data["hardware"],
        "held-out.date": environment(data)["date"],
        "held-out.cases": str(summary["time"]["cases"]),
        "held-out.all": both("time"),
        "held-out.measured": both("time_of_measured_costs"),
        "held-out.scaled": both("time_of_scaled_costs"),
        "held-out.naive": both("time_naive"),
        "held-out.memory": span("memory_of_measured_costs"),
        "held-out.memory-scaled": span("memory_of_scaled_costs"),
    }


def _indicator(data: Record) -> dict[str, str]:
    kinds = ("output", "weight_gradient", "input_gradient")
    ratios = [found[kind] for found in data["operators"] for kind in kinds if found.get(kind) is not None]
    probed = [network for network in data["networks"] if network["indicator"] == "probed"]
    swept = [network for network in data["networks"] if network["indicator"] == "propagated"]
    by_depth = [network for network in data["networks"] if network["indicator"] == "depth"]
    return {
        "indicator.operators": span(ratios, ".2f"),
        "indicator.cases": str(len(ratios)),
        "indicator.networks": str(len(probed)),
        "indicator.probed.rank": span((n["all"]["spearman"] for n in probed), ".2f"),
        "indicator.probed.rank-int8": span((n["INT8"]["spearman"] for n in probed), ".2f"),
        "indicator.propagated.rank": span((n["all"]["spearman"] for n in swept), ".2f"),
        "indicator.depth.rank": span((n["all"]["spearman"] for n in by_depth), ".2f"),
        "indicator.probed.plans": span(
            (n["plans"][end] for n in probed for end in ("ratio_lowest", "ratio_highest")), ".2f"
        ),
        "indicator.propagated.plans": span(
            (n["plans"][end] for n in swept for end in ("ratio_lowest", "ratio_highest")), ".2f"
        ),
    }


def _solvers(data: Record) -> dict[str, str]:
    found = {}
    for key, values in data["summary"].items():
        size, method = key.split(" ", 1)
        name = f"solvers.{method}.{size}"
        found[f"{name}.seconds"] = f"{values['seconds']['median']:.2g} s"
        found[f"{name}.worst-seconds"] = f"{values['seconds']['worst']:.2g} s"
        found[f"{name}.proved"] = f"{values['optimal']} of {values['cases']}"
        found[f"{name}.worst-error"] = f"{100 * values['error']['worst']:.2g} %"
        found[f"{name}.median-error"] = f"{100 * values['error']['median']:.3g} %"
        found[f"{name}.median-share"] = f"{100 * values['error_share_of_range']['median']:.2g} %"
    found["solvers.hardware"] = environment(data)["hardware"]
    found["solvers.load"] = _solver_load(data["sections"]["quality"])
    return found


def _solver_load(section: Record) -> str:
    """What a fixed piece of work tells of other load while 1,000 operators were measured; nothing if there was none."""
    turns = ("probe_before_s", "probe_after_s")
    every = [r[turn] for r in section["records"] for turn in turns if turn in r]
    own = [r[turn] for r in section["records"] for turn in turns if turn in r and r.get("size") == 1000]
    slower = statistics.median(own) / min(every) if own else 1.0
    return f" (beside other load, which made the core {slower:.1f} times slower)" if slower > 1.1 else ""


def _capture(data: Record) -> dict[str, str]:
    models = [model for model in data["models"] if model["operators"] > 10]
    return {
        "capture.models": str(len(models)),
        "capture.seconds": span((model["seconds"] for model in models), ".0f") + " s",
        "capture.operators": span((model["operators"] for model in models), "d"),
    }


_ROWS = (
    # what, result, what was asked of it, file, its sections where they may be of several days
    (
        "Iteration time of {{ steps.new-cases }} plans never run, one card and part of another; predicted again after "
        "they were measured, with costs fitted anew to recordings of other plans",
        "off by {{ steps.new }}; {{ steps.new-host }} paced by the host",
        "40 plans, written down before: missed",
        "predictor.json",
    ),
    (
        "Iteration time of {{ unseen.cases }} plans never run, {{ unseen.models }} fresh models on one thread of a "
        "processor, predicted in a commit before they were measured",
        "off by {{ unseen.time }}; peak memory {{ unseen.memory }}",
        "40 plans",
        "predictor-unseen-cpu.json",
    ),
    ("Peak memory of {{ steps.cases }} plans on both, as above", "{{ steps.memory }}", "", "predictor.json"),
    (
        "Throughput of the plan on a whole card and 16 multiprocessors of another, equal batches, beside the best "
        "other way with equal batches, launched or captured",
        "{{ runtime.equal }}",
        ">= 0.98 x, at less sensitivity: missed by resnet50's",
        "runtime.json",
    ),
    (
        "The same with local batches by speed, beside the best other way with local batches by speed",
        "{{ runtime.by-speed }}",
        "> 1 x: {{ runtime.by-speed-missed }}",
        "runtime.json",
    ),
    (
        "The plan with equal batches beside the best with local batches by speed",
        "{{ runtime.of-by-speed }}",
        "",
        "runtime.json",
    ),
    (
        "Step of the plan that `auto_plan` makes by default over the best of those ways by hand, compiled or captured, "
        "that were timed",
        "{{ by-hand.steps }}",
        "<= 1.02: {{ by-hand.missed }}",
        "by-hand.json",
    ),
    (
        "Compiled training step of GPT and Llama kinds, width 2048 and 4096, under the faster of INT8 and FP8 plans "
        "with an 8-bit backward pass: speed over compiled BF16 autocast, over the faster FP8 recipe of torchao; peak "
        "memory over BF16 autocast",
        "{{ eight.speed }}; {{ eight.torchao }}; {{ eight.memory }}",
        "1.3 x and 1.5 x; > 1 x; <= 0.85: {{ eight.missed }}",
        "eight-bit-training.json",
    ),
    (
        "Training under a memory cap at which BF16 autocast runs out of memory: peak over autocast's; predicted peak "
        "off by",
        "{{ limited.peaks }}; {{ limited.error }}",
        "<= 3 %",
        "memory-limited.json",
    ),
    (
        "A save behind training until durable, over the disk's own write",
        "{{ checkpoints.durable }}",
        "<= 1.1 x",
        "checkpoints-h200.json",
    ),
    (
        "What its call takes from training; steps beside it slower by; host memory beyond one copy",
        "{{ checkpoints.stall }}; {{ checkpoints.steps }}; {{ checkpoints.memory }}",
        "<= 5 ms; <= 3 %; <= 64 MiB",
        "checkpoints-h200-stall.json",
    ),
    (
        "Drafts of Gemma 3 270M by itself with 4-bit weights, accepted at the first position: activations of INT8, "
        "FP8, 4 bits with rotated inputs, 4 bits without; tokens per cycle predicted from other texts, and of "
        "prompt look-up",
        "{{ acceptance.W4H-A8 }}, {{ acceptance.W4H-F8 }}, {{ acceptance.W4H-A4 }}, {{ acceptance.W4-A4 }}; off by "
        "{{ acceptance.error }} at most, {{ acceptance.lookup-error }}",
        "<= 3 %: missed by look-up",
        "decoding-acceptance.json",
    ),
    (
        "Tokens per cycle of prompt look-up on the same model, predicted from half of {{ lookup.texts }} texts",
        "off by {{ lookup.error }} at most",
        "<= 3 %",
        "decoding-lookup.json",
    ),
    (
        "Speed of planned speculation over plain decoding, the same model on two threads, answers of 64 tokens: texts "
        "and texts that repeat themselves, batches 1 and 4; plain decoding over transformers in FP32; planned "
        "speculation over llama.cpp",
        "{{ decoding.auto }}; {{ decoding.peer }} x; {{ decoding.llama }}",
        ">= 0.99",
        "decoding.json",
    ),
    (
        "Serving Gemma 3 270M with 4-bit layers and an 8-bit head on two threads, 8 prompts of 64 tokens and 32 new "
        "ones: tokens per second over transformers, over llama.cpp, each in its faster type",
        "prefill {{ serving-peers.prefill.over-transformers }} and {{ serving-peers.prefill.over-llama.cpp }} x, "
        "decoding {{ serving-peers.decode.over-transformers }} and {{ serving-peers.decode.over-llama.cpp }} x",
        ">= 1 x; >= 0.8 x{{ serving-peers.missed }}",
        "serving-peers.json",
    ),
    (
        "Decoding pass of a model of Llama-3-8B's shape with weights of 4 and 8 bits, captured: speed over BF16 with 1 "
        "and 16 sequences; time over what reading weights and cache takes",
        "{{ serving-card.W4.1 }} and {{ serving-card.W4.16 }} x, {{ serving-card.W8.1 }} and "
        "{{ serving-card.W8.16 }} x; {{ serving-card.W4 }} x, {{ serving-card.W8 }} x (BF16 {{ serving-card.W16 }} x)",
        "<= 1.35 x: missed by 4 bits, and by 8 with 16 sequences",
        "serving-card.json",
    ),
    (
        "Serving plans of 80 layers: over 4 devices the default's distance from the best plan in the median and its "
        "time; over 8 devices with 4 schemes a proved optimum",
        "{{ serving-solvers.80x4.above }} in {{ serving-solvers.80x4.milliseconds }} ms; "
        "{{ serving-solvers.80x8.exact }}",
        "1 % in 50 ms; 10 s",
        "serving-solvers.json",
    ),
    (
        "Step of BERT-base, 16 x 128 tokens: BF16 autocast, BF16 plan, INT8 plan",
        "launched {{ host.bert-base.eager.bf16-autocast }}, {{ host.bert-base.eager.plan-bf16 }}, "
        "{{ host.bert-base.eager.plan-int8 }}; CUDA graphs {{ host.bert-base.graphs.bf16-autocast }}, "
        "{{ host.bert-base.graphs.plan-bf16 }}, {{ host.bert-base.graphs.plan-int8 }}",
        "",
        "host-cost.json",
        "steps",
    ),
    (
        "Speed of two transformers under INT8 and FP8 plans, against BF16 autocast run the same way",
        "launched {{ kernels.model.eager.mean }} ({{ kernels.model.eager }}), CUDA graphs "
        "{{ kernels.model.graph.mean }} ({{ kernels.model.graph }})",
        "",
        "kernels.json",
        "model",
    ),
    (
        "Speed of INT8 products of {{ kernels.product.shapes }} shapes, against BF16",
        "{{ kernels.product.int8.all }} x, {{ kernels.product.int8.least }} x at worst",
        "1.6 x",
        "kernels.json",
        "product",
    ),
    (
        "Speed of INT8 convolutions, forward, against BF16: 23 shapes; the 53 layers of ResNet-50",
        "{{ kernels.convolution }} x, {{ kernels.convolution.least }} x at worst; {{ kernels.convolution.layers }} x",
        "1.3 x",
        "kernels.json",
        "convolution",
    ),
    (
        "Rank correlation of predicted and measured gradient variance, 5 small networks before and after training: "
        "INT8 and BF16 together; INT8 alone",
        "{{ indicator.probed.rank }}; {{ indicator.probed.rank-int8 }}",
        "",
        "indicator.json",
    ),
    (
        "GPT of 25.6 M parameters, {{ quality.gpt.steps }} steps, held-out loss above full precision, mean and "
        "standard error over {{ quality.gpt.x4.seeds }} seeds of several runs, the last of which is dated: uniform "
        "INT8 as it is; with errors times 4 uniform INT8, plans by `progress`, `probed`, `fisher`, `random`",
        "{{ quality.gpt.x1.gap }}; {{ quality.gpt.x4.gap }}, {{ quality.gpt.x4.progress.worse }}, "
        "{{ quality.gpt.x4.probed.worse }}, {{ quality.gpt.x4.fisher.worse }}, "
        "{{ quality.gpt.x4.random.worse }} nats per byte",
        "errors as they are, to convergence: missed",
        "quality.json",
        "train",
    ),
    (
        "Small CNN, ViT and GPT trained to convergence on a CPU, {{ trained.cnn.probed.seeds }} seeds or more, "
        "95 % intervals, nats of held-out loss: 8 bits in both passes everywhere minus full precision; our plan minus "
        "random plans of the same simulated time and memory; the latter with errors times 16 in the GPT, times 32 in "
        "the CNN",
        "{{ trained.cnn.uniform-lowest.held-out-loss }}, {{ trained.vit.uniform-lowest.held-out-loss }}, "
        "{{ trained.gpt.uniform-lowest.held-out-loss }}; {{ trained.cnn.probed.held-out-loss.minus-random }}, "
        "{{ trained.vit.progress.held-out-loss.minus-random }}, {{ trained.gpt.progress.held-out-loss.minus-random }}; "
        "{{ trained.gpt-x16.progress.held-out-loss.minus-random }}, "
        "{{ trained.cnn-x32.probed.held-out-loss.minus-random }}",
        "ours better than random and than 8 bits everywhere, errors as they are: missed by all three",
        "training-quality.json",
    ),
    (
        "`exact`, 1,000 operators: proved; median time",
        "{{ solvers.exact.1000.proved }}; {{ solvers.exact.1000.seconds }}",
        "",
        "solvers.json",
    ),
    (
        "`greedy`, 1,000 operators: worst distance from the optimum; median time",
        "{{ solvers.greedy.1000.worst-error }}; {{ solvers.greedy.1000.seconds }}",
        "",
        "solvers.json",
    ),
    (
        "Capture of {{ capture.models }} models with {{ capture.operators }} operators",
        "{{ capture.seconds }}",
        "",
        "capture.json",
    ),
)
"""Results that a user chooses by, each beside its like; the page of results has all."""


def _hardware(part: Record) -> str:
    """The machine of what a row shows; where a file has several kinds of records, that of pairs of workers."""
    pairs = [r["hardware"] for r in part.get("throughput", ()) if len(r["local_batches"]) == 2]
    return str(pairs[0]) if pairs else environment(part)["hardware"]


def readme_table() -> str:
    """The table of measured results that README shows; a test compares the two."""
    known, results = figures(), load_results()

    def row(what: str, result: str, asked: str, name: str, *sections: str) -> tuple[str, str, str, str]:
        parts = [results[name]["sections"][section] for section in sections] or [results[name]]
        days = sorted({environment(part)["date"][: len("2026-11-22")] for part in parts})
        if len(days) > 1:
            raise ValueError(f"the row {what!r} is of several days, {', '.join(days)}: split it")
        # Of several machines their cards; the file has the rest.
        machines = [text.split(",")[0] for part in parts for text in _hardware(part).split("; ")]
        cards = list(dict.fromkeys(text for text in machines if "NVIDIA" in text)) or machines[:1]
        texts = (with_figures(text, known) for text in (what, result, asked))
        return *texts, f"`{name}`: {'; '.join(cards)}, {days[0]}"

    rows = [row(*each) for each in _ROWS if known.get(_PLACE.findall(each[1])[0]) != NOT_MEASURED]
    return table(("measured", "result", "asked", "file in `benchmarks/results/`"), rows)


def write_readme_table(path: Path) -> None:
    """Put the table between its two marks in a file."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{readme_table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_readme_table(ROOT / "README.md")
