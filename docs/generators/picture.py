"""The picture of a plan at the top of README and site: ``python docs/generators/picture.py`` writes it anew.

It shows the recorded optimum of a problem file: one panel per device type, a column per layer, a row per operator of a
layer. Colour and text of a cell both say its precision. A test compares the files with what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = ROOT / "tests" / "data" / "instances" / "bertl-mix.json"
ASSETS = ROOT / "docs" / "assets"
ROWS = ("query", "key", "value", "scores", "context", "output", "feed-forward 1", "feed-forward 2")
CELL, GAP, LEFT, TOP, PANEL = 28, 2, 128, 76, 300
THEMES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "light": {
        "ground": ("#ffffff", "#1f2328"),
        "INT8": ("#b3400f", "#ffffff"),
        "FP16": ("#2f6ea8", "#ffffff"),
        "FP32": ("#e3e6ea", "#3d434b"),
    },
    "dark": {
        "ground": ("#1b1d23", "#e6e8ec"),
        "INT8": ("#f5a25d", "#241405"),
        "FP16": ("#8fbce6", "#0c1c2c"),
        "FP32": ("#3a3f49", "#d3d6dc"),
    },
}
"""Colour of the ground and of each precision, each with that of the text on it."""
MEANING = {"INT8": "8", "FP16": "16", "FP32": "32"}


def picture(theme: str) -> str:
    """The SVG text in one of the themes."""
    problem = json.loads(PROBLEM.read_text(encoding="utf-8"))
    colours = THEMES[theme]
    ground, ink = colours["ground"]
    layers = layer_names(problem)
    width = LEFT + len(layers) * (CELL + GAP) + 20
    height = TOP + PANEL * len(problem["devices"]) - 20
    kinds = " and ".join(f"{device['count']} x {device['name'].partition('#')[0]}" for device in problem["devices"])
    title = f"A plan for BERT-large on {kinds}: the precision of each operator, by layer"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="{width}" height="{height}" rx="8" fill="{ground}"/>',
        text(20, 32, title, 17, ink, weight="600"),
        *legend(colours, ink),
    ]
    for number, device in enumerate(problem["devices"]):
        chosen = problem["optimum"]["devices"][device["name"]]
        parts += panel(TOP + number * PANEL, device, chosen, layers, colours)
    return "\n".join([*parts, "</svg>", ""])


def layer_names(problem: Mapping[str, Any]) -> list[list[str]]:
    """Adjustable operators of every layer, in order; those before the first and after the last layer are left out."""
    names = [o["name"] for o in problem["operators"] if o["role"] == "adjustable"]
    inner = [name for name in names if name.startswith(("linear", "matmul"))]
    if len(inner) % len(ROWS):
        raise ValueError(f"{len(inner)} operators are no whole number of layers of {len(ROWS)}")
    return [inner[i : i + len(ROWS)] for i in range(0, len(inner), len(ROWS))]


def legend(colours: Mapping[str, tuple[str, str]], ink: str) -> list[str]:
    """What the cells mean."""
    parts, x = [], 20
    for name, short in MEANING.items():
        parts += cell(x, 46, *colours[name], short)
        parts.append(text(x + CELL + 8, 64, name, 14, ink))
        x += 100
    return parts


def panel(
    top: int,
    device: Mapping[str, Any],
    chosen: Mapping[str, str],
    layers: list[list[str]],
    colours: Mapping[str, tuple[str, str]],
) -> list[str]:
    """One device type."""
    ink = colours["ground"][1]
    counts = {name: sum(chosen[o] == name for layer in layers for o in layer) for name in MEANING}
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    kind = device["name"].partition("#")[0]
    right = LEFT + len(layers) * (CELL + GAP) - GAP
    parts = [
        text(20, top + 24, f"{kind}: {shown}", 15, ink, weight="600"),
        text(right, top + 24, f"layers 1 to {len(layers)}", 13, ink, anchor="end"),
    ]
    for row, label in enumerate(ROWS):
        y = top + 36 + row * (CELL + GAP)
        parts.append(text(LEFT - 10, y + 19, label, 13, ink, anchor="end"))
        for column, layer in enumerate(layers):
            precision = chosen[layer[row]]
            parts += cell(LEFT + column * (CELL + GAP), y, *colours[precision], MEANING[precision])
    return parts


def cell(x: int, y: int, fill: str, ink: str, label: str) -> list[str]:
    """A coloured square with its text."""
    return [
        f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3" fill="{fill}"/>',
        text(x + CELL // 2, y + 19, label, 12, ink, anchor="middle"),
    ]


def text(x: int, y: int, words: str, size: int, fill: str, *, anchor: str = "start", weight: str = "400") -> str:
    """A line of text."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )


if __name__ == "__main__":
    for name in THEMES:
        (ASSETS / f"plan-{name}.svg").write_text(picture(name), encoding="utf-8")
