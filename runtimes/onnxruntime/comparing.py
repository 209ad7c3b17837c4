"""Errors of a model under a plan against the same model in FP32, per result and per operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from qsync_opt.runtimes.onnxruntime.prepared import Array
from qsync_opt.runtimes.onnxruntime.runnable import RunnableModel
from qsync_opt.runtimes.onnxruntime.sessions import run_exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Relative errors against FP32: the root of the summed squares of the differences over that of the FP32 values.

    ``results`` by name of the model's result, ``operators`` by operator, for its first floating-point result, errors
    of all operators before it included. Equal elements, infinities too, have no error. The error is infinite where the
    FP32 values are all zero and the others are not, and where only one of the two has an infinity or a NaN.
    """

    results: Mapping[str, float]
    operators: Mapping[str, float]

    def worst(self, count: int = 5) -> list[tuple[str, float]]:
        """The operators with the largest errors, largest first."""
        return sorted(self.operators.items(), key=lambda entry: -entry[1])[:count]


def compare(model: RunnableModel, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Comparison:
    """Run a model under its plan and in FP32 on the same inputs, and compare the results of all operators.

    Results of all operators are in memory at once. Without a plan every error is zero.

    Args:
        model: With a plan applied.
        args: Inputs in the model's order.
        kwargs: Inputs by name.

    Raises:
        ModelError: The inputs do not fit, or the model fails on them.
    """
    feeds = model.feeds(args, kwargs)
    prepared = model.prepared
    first: dict[str, str] = {}
    for node, owner in zip(prepared.proto.graph.node, prepared.owners, strict=True):
        for value in node.output:
            if prepared.is_floating(value) and value not in prepared.constants:
                # The last node of an operator delivers its result.
                first[owner] = value
                break
    results = [info.name for info in prepared.proto.graph.output if prepared.is_floating(info.name)]
    values = list(dict.fromkeys([*first.values(), *results]))
    if not values:
        return Comparison(results={}, operators={})
    # Values in another format than FP32 are cast to it in the graph that runs.
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    exposed = list(values)
    for position, value in enumerate(values):
        if model.mixed is not None and model.mixed.formats[value] != "FP32":
            exposed[position] = f"{value}__compared_{position}"
            name = model.mixed.names.get(value, value)
            proto.graph.node.append(helper.make_node("Cast", [name], [exposed[position]], to=TensorProto.FLOAT))
    types = dict.fromkeys(exposed, int(TensorProto.FLOAT))
    plain = run_exposed(prepared.proto, values, prepared.types, feeds, model.device)
    mixed = run_exposed(proto, exposed, types, feeds, model.device)
    errors = {value: relative_error(a, b) for value, a, b in zip(values, mixed, plain, strict=True)}
    return Comparison(
        results={name: errors[name] for name in results},
        operators={owner: errors[value] for owner, value in first.items()},
    )


def relative_error(values: Array, exact: Array) -> float:
    """Norm of the difference over the norm of the finite numbers in ``exact``; see `Comparison`."""
    # Masks of attention hold infinities, whose difference is no number.
    alike = (values == exact) | (np.isnan(values) & np.isnan(exact))
    if alike.all():
        return 0.0
    finite = np.isfinite(exact)
    if not (np.isfinite(values) & finite)[~alike].all():
        return float("inf")
    reference = exact[finite].astype(np.float64)
    difference = float(np.linalg.norm(values[finite].astype(np.float64) - reference))
    norm = float(np.linalg.norm(reference))
    return difference / norm if norm > 0 else float("inf")
