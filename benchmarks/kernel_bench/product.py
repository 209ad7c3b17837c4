"""Section product: 8-bit products with fused scales beside cuBLAS BF16, torch._int_mm and torch._scaled_mm.

Shapes are rows x columns x depth of the products of the two linear layers of a transformer's MLP at 8192 tokens: the
forward product of one layer has the shape of the other's input gradient, so that four are distinct per model, two of
them weight gradients; and two more of a square projection. Implementations of a shape take turns, round by round, each
round in another order, so that all meet the same clocks (which of them ran before decides how warm the card is); inputs
outgrow the second-level cache. FP8 is measured with one scale per row and column and with one per tensor.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qsync_opt.kernels.matmul import activate, choice_of, kind_of, operand_sets, scaled_mm

TOKENS = 8192
MODELS = {"BERT-base": (768, 3072), "BERT-large": (1024, 4096), "Llama-7B": (4096, 11008)}
LARGE = (16384, 4096, 4096)
PARTITION = 16
ROUNDS = 15
Shape = tuple[int, int, int]
Launches = Sequence[Callable[[], Any]]


def shapes() -> list[tuple[str, str, Shape]]:
    """Model, what the product is, and its shape."""
    found = []
    for model, (width, hidden) in MODELS.items():
        found += [
            (model, "up: forward; down: input gradient", (TOKENS, hidden, width)),
            (model, "down: forward; up: input gradient", (TOKENS, width, hidden)),
            (model, "up: weight gradient", (hidden, width, TOKENS)),
            (model, "down: weight gradient", (width, hidden, TOKENS)),
            (model, "projection: forward, input gradient", (TOKENS, width, width)),
            (model, "projection: weight gradient", (width, width, TOKENS)),
        ]
    return [*found, ("", "large", LARGE)]


def _implementations(shape: Shape) -> dict[str, Launches]:
    rows, columns, depth = shape
    int8 = operand_sets((1, *shape), torch.int8, torch.int8)
    fp8 = operand_sets((1, *shape), torch.float8_e4m3fn, torch.float8_e4m3fn)
    a = [torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16) for _ in int8]
    b = [torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) for _ in int8]
    one = torch.ones((), device="cuda")
    library = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
    return {
        "cuBLAS BF16": [functools.partial(torch.mm, x, y.t()) for x, y in zip(a, b, strict=True)],
        "torch._int_mm (no scales)": [functools.partial(torch._int_mm, x, y.t()) for x, y, *_ in int8],
        "torch._scaled_mm per tensor": [functools.partial(library, x, y.t(), one, one) for x, y, *_ in fp8],
        "torch._scaled_mm row x column": [
            functools.partial(library, x, y.t(), s[:, None], t[None]) for x, y, s, t in fp8
        ],
        "qsync_opt INT8 row x column": [functools.partial(scaled_mm, *operands) for operands in int8],
        "qsync_opt FP8 row x column": [functools.partial(scaled_mm, *operands) for operands in fp8],
        "qsync_opt FP8 per tensor": [functools.partial(scaled_mm, x, y, one, one) for x, y, *_ in fp8],
    }


def _once_s(launches: Launches) -> float:
    """Device time of one launch. The host gets ahead while the device waits, so that launches follow one another."""
    torch.cuda._sleep(int(2e9 * (1e-4 + 5e-5 * len(launches))))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / len(launches)


def _medians_s(implementations: dict[str, Launches], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in implementations}
    draw = random.Random(0)
    for round_ in range(rounds + 2):
        for name in draw.sample(list(implementations), len(implementations)):
            seconds = _once_s(implementations[name])
            if round_ >= 2:  # warm
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def _cut(shape: Shape, dtype: torch.dtype) -> str:
    a, b = (torch.empty(n, shape[2], dtype=dtype, device="cuda") for n in shape[:2])
    choice = choice_of(kind_of(a, b, torch.bfloat16))
    return (
        "one tile for all" if choice is None else f"tile {choice.variant}, splits {choice.splits}, group {choice.group}"
    )


def _of_shape(model: str, what: str, shape: Shape, rounds: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    seconds = _medians_s(_implementations(shape), rounds)
    common = {"shape": shape, "model": model, "product": what, **facts}
    operations = 2 * math.prod(shape)
    found = []
    for name, value in seconds.items():
        record = {**common, "implementation": name, "seconds": value, "operations_per_s": operations / value}
        if name.startswith("qsync_opt"):
            record["cut"] = _cut(shape, torch.int8 if "INT8" in name else torch.float8_e4m3fn)
            record["times_bf16"] = seconds["cuBLAS BF16"] / value
            rival = "torch._int_mm (no scales)" if "INT8" in name else "torch._scaled_mm per tensor"
            record["times_rival"] = seconds[rival] / value
            if name == "qsync_opt FP8 row x column":
                record["times_row_scaled_rival"] = seconds["torch._scaled_mm row x column"] / value
        found.append(record)
    return found


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _summary(records: list[dict[str, Any]], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Geometric means over the twelve shapes of the MLPs and over all eighteen, and the smallest."""
    found = []
    for name, ratio, wanted in (
        ("qsync_opt INT8 row x column", "times_bf16", 1.6),
        ("qsync_opt INT8 row x column", "times_rival", None),
        ("qsync_opt FP8 row x column", "times_rival", 1.0),
        ("qsync_opt FP8 per tensor", "times_rival", 1.0),
        ("qsync_opt FP8 row x column", "times_row_scaled_rival", None),
        ("qsync_opt FP8 row x column", "times_bf16", None),
    ):
        ours = [record for record in records if record["implementation"] == name and record["model"]]
        mlp = [record[ratio] for record in ours if not record["product"].startswith("projection")]
        every = [record[ratio] for record in ours]
        found.append(
            {
                "summary": f"{name}: {ratio}",
                **facts,
                "geometric_mean_mlp": _geometric_mean(mlp),
                "geometric_mean_all": _geometric_mean(every),
                "smallest": min(every),
                "shapes": [len(mlp), len(every)],
                "wanted_mean": wanted,
            }
        )
    return found


def _measured(quick: bool, facts: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for model, what, shape in shapes():
        if not quick or not model or what.startswith(("up", "down")):
            found += _of_shape(model, what, shape, 5 if quick else ROUNDS, facts)
    return found + _summary([record for record in found if "implementation" in record], facts)


def records(quick: bool) -> list[dict[str, Any]]:
    """Records of the whole card and of a partition of it."""
    activate()
    found = _measured(quick, {"multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count})
    context = torch.cuda.GreenContext.create(num_sms=PARTITION, device_id=0)
    with torch.cuda.stream(context.Stream()):
        found += _measured(quick=True, facts={"multiprocessors": PARTITION})
    return found
