"""Costs of a model whose loss is computed in chunks, from costs that were measured with all logits.

Between an output layer and its loss nothing is as large as the logits then: the gradients of the layer's input and
weight are kept instead, and one chunk is there for a time. Measured times stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qsync_opt.costs import DeviceProfile, MeasuredCost
from qsync_opt.kernels.autograd import chunk_rows
from qsync_opt.model import Operator, OpGraph, Role, TensorSpec, base_kind
from qsync_opt.numerics import number_format

LOSSES = frozenset(("cross_entropy_loss", "cross_entropy", "nll_loss"))
_GRADIENT_BYTES = 4
"""Per element of the weight's gradient, which is summed in FP32."""
_CHUNK_BYTES = 6
"""Per logit of a chunk: in FP32, and in 16 bits."""


def without_logits(
    graph: OpGraph, profiles: Mapping[str, DeviceProfile], head: str
) -> tuple[OpGraph, dict[str, DeviceProfile]]:
    """Graph and profiles as they are with the loss of the output layer ``head`` in chunks.

    They are returned as they came if the layer's result goes to anything but a loss, through operators that no plan
    decides on.

    Source: ours.
    """
    region = _until_loss(graph, head)
    weight = _weight_shape(graph, head) if region else None
    if weight is None:
        return graph, dict(profiles)
    classes, features = weight
    rows = graph[head].output_elements // classes
    scalar = (TensorSpec(shape=(1,), dtype="float32"),)

    def smaller(operator: Operator) -> Operator:
        inside = operator.name in region and base_kind(operator.op_type) not in LOSSES
        return replace(operator, output_specs=scalar) if inside else operator

    shrunk = replace(graph, operators=tuple(smaller(operator) for operator in graph))

    def cost_of(name: str, cost: MeasuredCost, result_bytes: int) -> MeasuredCost:
        kept = workspace = 0
        if name == head:
            kept = classes * features * _GRADIENT_BYTES + rows * features * result_bytes
            workspace = chunk_rows(rows, classes) * classes * _CHUNK_BYTES + classes * features * _GRADIENT_BYTES
        return replace(
            cost,
            saved_bytes=kept,
            saves_inputs=(),
            saves_output=False,
            forward_workspace_bytes=workspace,
            backward_workspace_bytes=0,
        )

    def chunked(profile: DeviceProfile) -> DeviceProfile:
        own = {
            f"{profile.operators[name]} in chunks": {
                precision: cost_of(name, cost, number_format(profile.formats[precision].output).num_bytes)
                for precision, cost in profile.cost(name).items()
            }
            for name in region
        }
        keys = {name: f"{key} in chunks" if name in region else key for name, key in profile.operators.items()}
        used = set(keys.values())
        measurements = {key: table for key, table in {**profile.measurements, **own}.items() if key in used}
        return replace(profile, fingerprint=shrunk.fingerprint(), operators=keys, measurements=measurements)

    return shrunk, {name: chunked(profile) for name, profile in profiles.items()}


def _until_loss(graph: OpGraph, head: str) -> set[str]:
    """The output layer and what follows it up to its loss, empty if that is not all that follows."""
    if head not in graph:
        return set()
    region, losses = {head}, 0
    for operator in graph:
        reads = [source for source in operator.inputs if source in region]
        if not any(base_kind(graph[source].op_type) not in LOSSES for source in reads):
            continue
        if operator.role is Role.ADJUSTABLE:
            return set()
        region.add(operator.name)
        losses += base_kind(operator.op_type) in LOSSES
    return region if losses else set()


def _weight_shape(graph: OpGraph, head: str) -> tuple[int, int] | None:
    """(classes, features) of a layer whose weight is trained."""
    shapes = {parameter.name: parameter.spec.shape for parameter in graph.parameters}
    matrices = [shapes[name] for name in graph[head].parameters if name in shapes and len(shapes[name]) == 2]
    return (matrices[0][0], matrices[0][1]) if len(matrices) == 1 else None
