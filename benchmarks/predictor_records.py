"""Recorded steps as JSON, so that costs can be fitted again without the GPUs that they were recorded on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qsync_opt.costs import CostFit, DeviceIdentity
from qsync_opt.io import decode, encode
from qsync_opt.runtimes.torch.steps import StepRecords
from qsync_opt.steps import Block, KeptTensors, Span, StepSample, StepSpans


def records_json(records: StepRecords) -> dict[str, Any]:
    """Everything but the names of kernels and what ran on other streams."""
    return {
        "device": encode(records.device),
        "half_format": records.half_format,
        "casts": {pair: asdict(fit) for pair, fit in records.casts.items()},
        "cast_host_ns": records.cast_host_ns,
        "available": {name: list(precisions) for name, precisions in records.available.items()},
        "samples": [_sample_json(sample) for sample in records.samples],
    }


def records_from_json(data: dict[str, Any]) -> StepRecords:
    """Read what `records_json` wrote."""
    return StepRecords(
        device=decode(DeviceIdentity, data["device"], "device"),
        half_format=data["half_format"],
        casts={pair: CostFit(**fit) for pair, fit in data["casts"].items()},
        cast_host_ns=data["cast_host_ns"],
        available=data.get("available", {}),
        samples=tuple(_sample(entry) for entry in data["samples"]),
    )


def _spans_json(spans: StepSpans) -> dict[str, Any]:
    return {
        "gap_ns": spans.gap_ns,
        "latency_ns": spans.latency_ns,
        "peak_bytes": spans.peak_bytes,
        "start_ns": spans.start_ns,
        "end_ns": spans.end_ns,
        "order": spans.order,
        "waits": spans.waits,
        "spans": [
            [*key, s.host_ns, s.blocked_ns, [k[:2] for k in s.kernels], s.changes] for key, s in spans.spans.items()
        ],
    }


def _spans(data: dict[str, Any]) -> StepSpans:
    spans = {}
    for phase, name, host, *_, blocked, kernels, changes in data["spans"]:  # older records count calls and launches
        spans[phase, name] = Span(host, [(a, b, "") for a, b in kernels], changes, blocked)
    return StepSpans(
        spans=spans,
        order=tuple(data["order"]),
        other_streams=(),
        waits=data.get("waits", False),
        **{name: data[name] for name in ("gap_ns", "latency_ns", "peak_bytes", "start_ns", "end_ns")},
    )


def _sample_json(sample: StepSample) -> dict[str, Any]:
    plain = ("name", "iteration_ns", "resident_bytes", "peak_bytes", "latencies_ns", "host_unit_ns", "resting_ns")
    plain += ("host_rounds_ns", "graphs", "blocks")
    return {name: getattr(sample, name) for name in plain} | {
        "precisions": dict(sample.precisions),
        "outputs": dict(sample.outputs),
        "host_ns": dict(sample.host_ns),
        "kept": {name: asdict(kept) for name, kept in sample.kept.items()},
        "spans": _spans_json(sample.spans),
        "memory": _spans_json(sample.memory),
    }


def _sample(data: dict[str, Any]) -> StepSample:
    kept = {name: KeptTensors(**(entry | {"inputs": tuple(entry["inputs"])})) for name, entry in data["kept"].items()}
    changed = {"kept": kept, "spans": _spans(data["spans"]), "memory": _spans(data["memory"])}
    tuples = {name: tuple(data.get(name, ())) for name in ("latencies_ns", "host_rounds_ns")}
    blocks = tuple(Block(*entry) for entry in data.get("blocks", ()))
    return StepSample(**(data | changed | tuples | {"blocks": blocks}))
