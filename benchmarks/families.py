"""Generated problems of realistic shape: which operators there are, what they cost by a roofline, where limits lie."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qsync_opt.training import Plan, Problem, evaluate, precisions_by_rank

FAMILIES = ("cnn", "encoder", "decoder", "moe", "encoder_decoder", "dense")
"""Kinds of networks."""
LADDERS = {2: ("FP16", "FP32"), 3: ("INT8", "FP16", "FP32"), 4: ("INT8", "FP8", "FP16", "FP32")}
_BYTES = {"INT8": 1, "FP8": 1, "FP16": 2, "FP32": 4}
# Peak operations per second by precision, and bytes per second: public data sheets of T4 and L4.
_DEVICES = {
    "T4": ({"INT8": 130e12, "FP16": 65e12, "FP32": 8.1e12}, 300e9),
    "L4": ({"INT8": 242e12, "FP8": 242e12, "FP16": 121e12, "FP32": 30e12}, 300e9),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to generate."""

    family: str
    operators: int
    formats: int = 3
    seed: int = 0
    latency: float | None = 0.3  # where the limit lies between the lowest and the highest plan; None: slack
    memory: float | None = 0.3
    communication: float = 0.5  # all-reduce time over the FP16 backward time
    copies: bool = False  # keep FP16 and INT8 weight copies: memory then pulls against low precision
    native: bool = False  # kernels deliver their own format
    symmetric: bool = False  # layers of equal shape cost the same
    sigma: float = 2.0
    sharing: str = "edge"
    devices: int = 1

    @property
    def name(self) -> str:
        """Short name that tells the options."""
        flags = [f for f in ("copies", "native", "symmetric") if getattr(self, f)]
        limits = f"t{self.latency}-m{self.memory}-c{self.communication}"
        parts = [self.family, self.operators, f"f{self.formats}", limits, *flags, f"s{self.seed}"]
        if self.sharing != "edge":
            parts.append(self.sharing)
        if self.sigma != 2.0:
            parts.append(f"w{self.sigma}")
        if self.devices > 1:
            parts.append(f"d{self.devices}")
        return "-".join(map(str, parts))


@dataclass
class _Net:
    """Operators being laid out: rows for the file and, per operator, (operations, weights, layer kind)."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    work: list[tuple[float, float, str]] = field(default_factory=list)
    adjustable: int = 0

    def add(self, kind: str, role: str, inputs: list[str], elements: int, flops: float = 0.0, weights: int = 0) -> str:
        name = f"{kind}_{len(self.rows)}"
        self.rows.append(
            {"name": name, "type": kind, "role": role, "inputs": inputs, "output_elements": elements, "bucket": None}
        )
        self.work.append((flops, float(weights), kind))
        self.adjustable += role == "adjustable"
        return name

    def linear(self, source: str, tokens: int, fan_in: int, fan_out: int, kind: str = "linear") -> str:
        flops = 2.0 * tokens * fan_in * fan_out
        return self.add(kind, "adjustable", [source], tokens * fan_out, flops, fan_in * fan_out)


def _attention(net: _Net, query: str, memory: str, tokens: int, width: int) -> str:
    heads, length = 12, 128
    q, k, v = (net.linear(s, tokens, width, width) for s in (query, memory, memory))
    scores, flops = tokens * length * heads, 2.0 * tokens * length * width
    product = net.add("matmul_qk", "adjustable", [q, k], scores, flops)
    soft = net.add("softmax", "fixed", [product], scores)
    mixed = net.add("matmul_av", "adjustable", [soft, v], tokens * width, flops)
    return net.linear(mixed, tokens, width, width)


def _feed_forward(net: _Net, source: str, tokens: int, width: int) -> str:
    up = net.linear(source, tokens, width, 4 * width)
    act = net.add("gelu", "dependent", [up], tokens * 4 * width)
    return net.linear(act, tokens, 4 * width, width)


def _residual(net: _Net, one: str, two: str, elements: int) -> str:
    return net.add("add", "dependent", [one, two], elements)


def _transformer(net: _Net, recipe: Recipe) -> str:
    tokens, width = 16 * 128, 768
    size = tokens * width
    x = net.add("embedding", "adjustable", [], size, 0.0, 30000 * width)
    norm_first = recipe.family != "encoder"
    memory: str | None = None
    while net.adjustable < recipe.operators - 1:
        if recipe.family == "encoder_decoder" and memory is None and net.adjustable >= recipe.operators // 2:
            memory = net.add("layer_norm", "dependent", [x], size)
            x = net.add("embedding", "adjustable", [], size, 0.0, 30000 * width)
        y = net.add("layer_norm", "fixed", [x], size) if norm_first else x
        x = _residual(net, x, _attention(net, y, y, tokens, width), size)
        x = x if norm_first else net.add("layer_norm", "fixed", [x], size)
        if memory is not None:
            y = net.add("layer_norm", "fixed", [x], size)
            x = _residual(net, x, _attention(net, y, memory, tokens, width), size)
        y = net.add("layer_norm", "fixed", [x], size) if norm_first else x
        if recipe.family == "moe":
            net.linear(y, tokens, width, 64, "router")
            experts = [_feed_forward(net, y, tokens // 16, width) for _ in range(min(64, recipe.operators // 8))]
            joined = net.add("combine", "dependent", experts, size)
        else:
            joined = _feed_forward(net, y, tokens, width)
        x = _residual(net, x, joined, size)
        x = x if norm_first else net.add("layer_norm", "fixed", [x], size)
    return net.linear(x, tokens, width, 1000, "head")


def _cnn(net: _Net, recipe: Recipe) -> str:
    images = 32

    def conv(source: str, side: int, fan_in: int, fan_out: int, kernel: int) -> str:
        flops = 2.0 * images * side * side * fan_in * fan_out * kernel * kernel
        elements = images * side * side * fan_out
        out = net.add("conv", "adjustable", [source], elements, flops, fan_in * fan_out * kernel * kernel)
        return net.add("batch_norm", "dependent", [out], elements)

    x = net.add("conv", "adjustable", [], images * 112 * 112 * 64, 2.0 * images * 112 * 112 * 64 * 147, 9408)
    blocks = max(1, (recipe.operators - 2) // 3)
    for block in range(blocks):
        stage = min(3, 4 * block // blocks)
        side, width = 56 >> stage, 64 << stage
        y = x
        for fan_in, fan_out, kernel in ((4 * width, width, 1), (width, width, 3), (width, 4 * width, 1)):
            y = conv(y, side, fan_in, fan_out, kernel)
            if fan_out == width:
                y = net.add("relu", "dependent", [y], images * side * side * fan_out)
        elements = images * side * side * 4 * width
        x = net.add("relu", "dependent", [_residual(net, x, y, elements)], elements)
    pooled = net.add("pool", "dependent", [x], images * 2048)
    return net.linear(pooled, images, 2048, 1000, "fc")


def _dense(net: _Net, recipe: Recipe) -> str:
    images, side, growth = 32, 14, 32
    x = net.add("conv", "adjustable", [], images * side * side * 64, 1e9, 9408)
    while net.adjustable < recipe.operators - 1:
        layers = [x]
        for _ in range(6):
            elements = images * side * side * growth
            joined = net.add("concat", "dependent", list(layers), elements * len(layers))
            flops = 2.0 * elements * growth * len(layers) * 9
            layers.append(net.add("conv", "adjustable", [joined], elements, flops, 9 * growth * growth * len(layers)))
        joined = net.add("concat", "dependent", layers, images * side * side * growth * len(layers))
        x = net.add("conv", "adjustable", [joined], images * side * side * 64, 1e9, 64 * growth * len(layers))
    return net.linear(x, images, 64, 1000, "fc")


def _buckets(net: _Net, total_ns: float) -> dict[str, Any]:
    """Put about 25 MB of gradients into each bucket, from the last operator on."""
    bucket, filled, sizes = -1, math.inf, []
    for row, (_, weights, _) in zip(reversed(net.rows), reversed(net.work), strict=True):
        if weights:
            if filled * 4 > 25e6:
                bucket, filled = bucket + 1, 0.0
                sizes.append(0.0)
            row["bucket"] = bucket
            filled += weights
            sizes[-1] += weights
    share = total_ns / max(sum(sizes), 1.0)
    return {"allreduce_ns": [int(s * share) for s in sizes], "peer_ready_ns": [0] * len(sizes)}


def _device(net: _Net, recipe: Recipe, number: int) -> dict[str, Any]:
    name = "L4" if recipe.formats == 4 or number % 2 else "T4"
    peaks, bandwidth = _DEVICES[name]
    formats = [f for f in LADDERS[recipe.formats] if f in peaks]
    rng = np.random.default_rng([recipe.seed, number])
    cache: dict[tuple[str, float, float], dict[str, Any]] = {}
    tables: dict[str, Any] = {}
    for row, (flops, weights, kind) in zip(net.rows, net.work, strict=True):
        allowed = formats if row["role"] == "adjustable" else [f for f in formats if f in ("FP16", "FP32")]
        if kind == "embedding":
            allowed = ["FP16", "FP32"]
        if row["role"] == "fixed":
            allowed = ["FP32"]
        key = (kind, flops, weights)
        if not recipe.symmetric or key not in cache:
            cache[key] = _costs(recipe, row, flops, weights, allowed, peaks, bandwidth, rng)
        tables[row["name"]] = cache[key]
    casts = {}
    for source in formats:
        for target in formats:
            if source != target:
                quantizes = target in ("INT8", "FP8")
                moved = (2 if quantizes else 1) * _BYTES[source] + _BYTES[target]
                casts[f"{source}>{target}"] = {
                    "base_ns": 4000,
                    "ns_per_mi_elements": int(2**20 * moved / bandwidth * 1e9 / 0.8),
                }
    precisions = {}
    for form in formats:
        low = form in ("INT8", "FP8")
        out = form if not low or recipe.native else "FP16"
        precisions[form] = {
            "output": out,
            "gradient_input": "FP16" if form == "INT8" else form,
            "gradient_output": "FP16" if low else form,
        }
    return {
        "name": f"{name}#{number}", "count": 4, "memory_limit_kib": 1, "precisions": precisions, "casts": casts,
        "operators": tables,
    }  # fmt: skip


def _costs(
    recipe: Recipe, row: dict[str, Any], flops: float, weights: float, allowed: list[str], peaks: dict[str, float],
    bandwidth: float, rng: np.random.Generator,
) -> dict[str, Any]:  # fmt: skip
    elements = row["output_elements"]
    scale = math.exp(recipe.sigma * rng.standard_normal())
    result = {}
    for form in allowed:
        noise = np.exp(0.15 * rng.standard_normal(2))
        seconds = 5e-6 + max(flops / (0.5 * peaks[form]), _BYTES[form] * 3.0 * elements / (0.8 * bandwidth))
        backward_form = "FP16" if form == "INT8" else form
        slow = 5e-6 + 2 * max(flops / (0.5 * peaks[backward_form]), _BYTES[form] * 3.0 * elements / (0.8 * bandwidth))
        copy = _BYTES[form] * weights if recipe.copies and form != "FP32" else 0.0
        sensitivity = {"INT8": 1.0, "FP8": math.exp(0.5 + rng.standard_normal()), "FP16": 2e-3, "FP32": 0.0}[form]
        result[form] = {
            "forward_ns": int(seconds * noise[0] * 1e9),
            "backward_ns": int(slow * noise[1] * 1e9),
            "memory_kib": int((_BYTES[form] * elements + 4 * weights * recipe.copies + copy) / 1024)
            + (0 if recipe.copies else int(_BYTES[form] * weights / 1024)),
            "sensitivity": sensitivity * scale if row["role"] == "adjustable" else 0.0,
        }
    return result


def generate(recipe: Recipe) -> Problem:
    """The problem of a recipe; limits lie between the plans of all lowest and all highest precisions."""
    net = _Net()
    layout = {"cnn": _cnn, "dense": _dense}.get(recipe.family, _transformer)
    last = layout(net, recipe)
    net.add("loss", "fixed", [last], 1)
    devices = [_device(net, recipe, number) for number in range(recipe.devices)]
    backward = sum(t.get("FP16", t["FP32"])["backward_ns"] for t in devices[0]["operators"].values())
    data: dict[str, Any] = {
        "format": "qsync-problem/1", "name": recipe.name,
        "formats": {f: _BYTES[f] for f in LADDERS[recipe.formats]},
        "operators": net.rows, "communication": _buckets(net, recipe.communication * backward),
        "optimizer_ns": 1_000_000, "latency_limit_ns": 1, "devices": devices, "cast_sharing": recipe.sharing,
        "optimum": None,
    }  # fmt: skip
    loose = Problem.from_json(data)
    low, high = (evaluate(loose, _uniform(loose, end)) for end in (0, -1))
    slack = max(low.iteration_ns, high.iteration_ns)
    between = low.iteration_ns + (recipe.latency or 0) * (high.iteration_ns - low.iteration_ns)
    data["latency_limit_ns"] = 2 * slack if recipe.latency is None else int(between)
    for device in devices:
        least, most = (e.memory_kib[device["name"]] for e in (low, high))
        limit = least + (recipe.memory or 0) * (most - least)
        device["memory_limit_kib"] = 2 * max(least, most) if recipe.memory is None else int(limit)
    return Problem.from_json(data)


def _uniform(problem: Problem, end: int) -> Plan:
    devices = {
        device.name: {op.name: precisions_by_rank(problem, device, op.name)[end] for op in problem.adjustable}
        for device in problem.devices
    }
    return Plan(problem=problem.name, devices=devices)
