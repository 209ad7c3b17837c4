"""Reading of problem files, which `Problem.save` writes."""

from __future__ import annotations

import os
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import Fields, decode, read_json, split_extras
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.training.problem import (
    PROBLEM_FORMAT,
    CastCost,
    Communication,
    OperatorCost,
    Optimum,
    Problem,
    ProblemDevice,
    ProblemOperator,
)


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """Read and check a problem file.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or breaks a rule of the format; one
            line that names the file, the place and what is allowed.

    Source: the problem file format of this package, "qsync-problem/1".
    """
    data = read_json(path, (PROBLEM_FORMAT,))
    try:
        return problem_from_json(data)
    except ProblemError as failure:
        raise ProblemError(f"{os.fspath(path)}: {failure}") from failure


def problem_from_json(data: Any) -> Problem:
    """Build a `Problem` from the JSON data of a problem file; see `load_problem`."""
    clean, extras = split_extras(data)
    fields = Fields(clean, "problem")
    fields.version(PROBLEM_FORMAT)
    optimum = fields.take_or("optimum", None)
    arguments = {
        "name": fields.text("name"),
        "formats": fields.mapping("formats"),
        "operators": tuple(
            decode(ProblemOperator, item, _place("operator", item, i))
            for i, item in enumerate(fields.sequence("operators"))
        ),
        "communication": decode(Communication, fields.take("communication"), "communication"),
        "optimizer_ns": fields.integer("optimizer_ns"),
        "latency_limit_ns": fields.integer("latency_limit_ns"),
        "devices": tuple(_device(item, _place("device", item, i)) for i, item in enumerate(fields.sequence("devices"))),
        "cast_sharing": fields.take_or("cast_sharing", "edge"),
        "optimum": None if optimum is None else decode(Optimum, optimum, "optimum"),
    }
    fields.finish()
    return Problem(**arguments, extras=extras)


def _place(kind: str, data: Any, index: int) -> str:
    name = data.get("name") if isinstance(data, dict) else None
    return f"{kind} {name!r}" if name else f"{kind}s[{index}]"


def _device(data: Any, place: str) -> ProblemDevice:
    fields = Fields(data, place)
    arguments: dict[str, Any] = {
        "name": fields.text("name"),
        "count": fields.integer("count", minimum=1),
        "memory_limit_kib": fields.integer("memory_limit_kib"),
        "precisions": {
            precision: decode(PrecisionFormats, borders, f"{place}: precisions {precision!r}")
            for precision, borders in fields.mapping("precisions").items()
        },
        "casts": {
            _pair(pair, place): decode(CastCost, cost, f"{place}: casts {pair!r}")
            for pair, cost in fields.mapping("casts").items()
        },
        "operators": {
            operator: {p: decode(OperatorCost, table.take(p), f"{table.where} {p}") for p in table}
            for operator, table in fields.children("operators")
        },
    }
    fields.finish()
    return ProblemDevice(**arguments)


def _pair(key: str, place: str) -> tuple[str, str]:
    source, _, target = key.partition(">")
    if not source or not target:
        raise ProblemError(f"{place}: casts {key!r}: the key must read FROM>TO, such as 'FP16>INT8'")
    return source, target
