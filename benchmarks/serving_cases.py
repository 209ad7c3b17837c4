"""Serving problems in the shapes of real models: costs by roofline of data-sheet rates, harms that differ by layer.

Sizes are those of Llama-3-8B (32 layers) and Llama-3-70B (80 layers); the harm of a layer is drawn around a trend.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsync_opt.serving import Problem

BITS = {"W3": 3.25, "W4": 4.25, "W8": 8.25, "W16": 16.0}
# GiB of memory, TFLOP/s and GB/s that are reached, of cards that people own; the last four come as a second pair.
CARDS = {
    "A": (22.0, 60.0, 500.0),
    "B": (10.0, 45.0, 600.0),
    "C": (15.0, 28.0, 260.0),
    "D": (30.0, 50.0, 750.0),
    "E": (14.0, 9.0, 480.0),
    "F": (46.0, 100.0, 700.0),
    "G": (7.5, 20.0, 350.0),
    "H": (38.0, 150.0, 1400.0),
}
LINK_GB_S = 8.0


def case(
    layers: int, devices: int, schemes: int = 4, *, seed: int = 0, tightness: float = 0.5, options: int = 3
) -> Problem:
    """A problem with attention and MLP of each layer apart (two groups a layer).

    ``tightness`` in (0, 1] places the devices' memory between the smallest and the largest schemes; about half the
    harm of the smallest schemes is allowed.
    """
    random = np.random.default_rng(seed)
    hidden, inner, kv = (8192, 28672, 1024) if layers > 48 else (4096, 14336, 1024)
    weights = {"attn": hidden * (2 * hidden + 2 * kv), "mlp": 3 * hidden * inner}
    names = list(BITS)[-schemes:]
    prompts, tokens, new = 32, 512, 100
    micro = [(max(prompts // m, 1), m) for m in (1, 4, 8, 16, 2, 32)][:options]

    def state_kib(kind: str) -> list[int]:
        cache = prompts * (tokens + new) * 2 * kv * 2 if kind == "attn" else 0
        return [(cache + rows * tokens * hidden * 4) // 1024 for rows, _ in micro]

    kib = {kind: {s: int(count * BITS[s] / 8 / 1024) for s in names} for kind, count in weights.items()}
    state = {kind: state_kib(kind) for kind in weights}
    least = layers * sum(min(kib[k].values()) + max(state[k]) for k in weights)
    most = layers * sum(max(kib[k].values()) + max(state[k]) for k in weights)
    chosen = dict(list(CARDS.items())[:devices])
    ends_kib = 128_256 * hidden * 2 // 1024
    wanted = least + tightness * (most - least) + 2 * ends_kib
    share = wanted / sum(memory for memory, _, _ in chosen.values())
    costs: dict[str, Any] = {}
    ends: dict[str, Any] = {}
    for card, (_, tera, giga) in chosen.items():
        costs[card] = {
            kind: {
                s: [
                    [
                        _ns(2 * count * rows * tokens / tera / 1e12 * (1.15 if BITS[s] < 16 else 1.0)),
                        _ns(max(kib[kind][s] * 1024 / giga / 1e9, 2 * count * rows / tera / 1e12) + 12e-6),
                    ]
                    for rows, _ in micro
                ]
                for s in names
            }
            for kind, count in weights.items()
        }
        head = [
            [_ns(ends_kib * 1024 / giga / 1e9), _ns(ends_kib * 1024 / giga / 1e9 + rows * 1e-6)] for rows, _ in micro
        ]
        ends[card] = {"first_kib": ends_kib, "last_kib": ends_kib, "first": [[9000, 9000]] * len(micro), "last": head}
    link = [
        [_ns(rows * tokens * hidden * 2 / LINK_GB_S / 1e9), _ns(rows * hidden * 2 / 8e9 + 2e-5)] for rows, _ in micro
    ]
    harm = {}
    for layer in range(layers):
        for kind in weights:
            size = float(random.lognormal(0.0, 0.6) * (1.5 - layer / layers) * (2.0 if kind == "mlp" else 1.0))
            harm[f"{layer}.{kind}"] = {s: 0.0 if s == "W16" else size * 4.0 ** (4 - int(s[1:])) for s in names}
    worst = sum(max(values.values()) for values in harm.values())
    return Problem.from_json(
        {
            "format": "qsync-serving/1",
            "name": f"{layers} layers x {devices} devices x {schemes} schemes, seed {seed}",
            "new_tokens": new,
            "schemes": names,
            "harm_limit": worst * (0.5 if schemes < 4 else 0.12),
            "microbatches": [{"prefill": m, "decode": m} for _, m in micro],
            "devices": [{"name": c, "memory_kib": int(m * share)} for c, (m, _, _) in chosen.items()],
            "groups": [{"name": name, "kind": name.partition(".")[2]} for name in harm],
            "weights_kib": kib,
            "state_kib": state,
            "costs": costs,
            "ends": ends,
            "links": {f"{a}>{b}": link for a in chosen for b in chosen if a != b},
            "harm": harm,
            "optimum": None,
        }
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
