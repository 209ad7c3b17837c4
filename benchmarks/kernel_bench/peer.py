"""Section peer: Linear-GELU-Linear beside torchao's FP8 training of the same layers, and on a partition of the card.

Forward and backward, compiled, weights in BF16, all quantization included. Partition: both on 16 of the
card's multiprocessors, launched by the host.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from layer import EIGHT, SHAPES, Network, _apart, _eight, _half, _options, _step, _whole
from measuring import median_eager_s, median_s
from torch import nn

from qsync_opt.kernels.compilation import library

RECIPES = ("tensorwise", "rowwise")
PARTITION = 16
Shape = tuple[int, int, int]


def _inputs(shape: Shape) -> list[torch.Tensor]:
    """Input, both weights and the gradient of the result."""
    tokens, width, hidden = shape
    sizes = ((tokens, width), (hidden, width), (width, hidden), (tokens, width))
    x, first, second, grad = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    leaves = [x, first.mul_(width**-0.5), second.mul_(hidden**-0.5)]
    return [*(leaf.requires_grad_() for leaf in leaves), grad]


def _time(network: Network, shape: Shape, *, replayed: bool = True) -> float:
    torch.compiler.reset()
    step = functools.partial(_step(network), *_inputs(shape))
    # A graph belongs to the context in which it was captured: a partition's stream runs what the host launches.
    return median_s(step, calls=2) if replayed else median_eager_s(step, calls=2)


def _torchao_s(recipe: str, shape: Shape) -> float:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    _, width, hidden = shape
    torch.compiler.reset()
    layers = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False))
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = convert_to_float8_training(layers.to("cuda", torch.bfloat16), config=config)
    compiled = torch.compile(model, dynamic=False, fullgraph=True)
    x, _, _, grad = _inputs(shape)
    leaves = (x, *model.parameters())
    return median_s(lambda: torch.autograd.grad(compiled(x), leaves, grad), calls=2)


def _torchao(shape: Shape) -> list[dict[str, Any]]:
    """torchao's FP8 training, or why it does not run here."""
    found: list[dict[str, Any]] = []
    for recipe in RECIPES:
        record = {"shape": shape, "implementation": f"torchao FP8 {recipe}"}
        try:
            found.append({**record, "version": metadata.version("torchao"), "seconds": _torchao_s(recipe, shape)})
        except Exception as error:  # whatever a foreign package raises is what is to be recorded
            found.append({**record, "error": f"{type(error).__name__}: {error}"[:300]})
    return found


def _beside(shape: Shape, networks: dict[str, Network]) -> list[dict[str, Any]]:
    half = _time(_apart(_half), shape)
    peers = _torchao(shape)
    found = [{"shape": shape, "implementation": "torch BF16", "seconds": half}, *peers]
    for name, network in networks.items():
        seconds = _time(network, shape)
        record: dict[str, Any] = {
            "shape": shape,
            "implementation": name,
            "seconds": seconds,
            "speed_up": half / seconds,
        }
        for recipe, peer in zip(RECIPES, peers, strict=True):
            if "seconds" in peer:
                record[f"times_torchao_{recipe}"] = peer["seconds"] / seconds
        found.append({**record, "wanted_times_torchao_tensorwise": 1.15 if shape == SHAPES[0][:3] else None})
    return found


def _on_partition(shape: Shape, networks: dict[str, Network]) -> list[dict[str, Any]]:
    context = torch.cuda.GreenContext.create(num_sms=PARTITION, device_id=0)
    facts = {"shape": shape, "multiprocessors": PARTITION}
    with torch.cuda.stream(context.Stream()):
        half = _time(_apart(_half), shape, replayed=False)
        found: list[dict[str, Any]] = [{**facts, "implementation": "torch BF16", "seconds": half}]
        for name, network in networks.items():
            seconds = _time(network, shape, replayed=False)
            found.append({**facts, "implementation": name, "seconds": seconds, "speed_up": half / seconds})
    return found


def records(quick: bool) -> Iterator[dict[str, Any]]:
    """Records of the whole card by shape and implementation, and of a partition, as they are measured."""
    for unit in ("quantize", "matmul"):
        if not library.activate(unit):
            raise SystemExit(f"the compiled kernels do not run here: {library.reason(unit)}")
    whole = {f"{precision}, one operation": _whole(precision, _options()) for precision in ("INT8", "FP8")}
    apart = _apart(functools.partial(_eight, "FP8", _options(**EIGHT)))
    for shape in SHAPES[1 if quick else 0 :]:
        yield from _beside(shape[:3], {**whole, "FP8, three operations": apart})
    for shape in SHAPES[1:] if quick else reversed(SHAPES):
        yield from _on_partition(shape[:3], whole)
