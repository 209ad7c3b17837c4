"""The graph foretells in which format every tensor reaches an operator when a plan is at work."""

from typing import Any

import pytest
import torch
from example_models import NAMES
from torch import Tensor, nn

from qsync_opt.model import ROLE_TABLE, OpGraph, Role
from qsync_opt.runtimes.torch.execution import AppliedPlan, ApplyOptions, apply, undo
from qsync_opt.runtimes.torch.interception import OperatorCall


def foretold(graph: OpGraph, plan: dict[str, str]) -> dict[str, str]:
    """Format that each operator delivers: its own, or the highest that reaches it."""
    formats: dict[str, str] = {}
    for operator in graph:
        if operator.role is Role.DEPENDENT:
            formats[operator.name] = max(formats[source] for source in operator.inputs)  # "BF16" < "FP32"
        else:
            formats[operator.name] = plan.get(operator.name, "FP32")
    return formats


@pytest.mark.parametrize("name", NAMES)
def test_formats_that_arrive(name: str, known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, captured = known(name)
    graph: OpGraph = captured.graph
    adjustable = graph.by_role(Role.ADJUSTABLE)
    plan = {operator.name: "FP32" if i % 3 == 0 else "BF16" for i, operator in enumerate(adjustable)}
    arrived: dict[str, list[str]] = {}
    run = AppliedPlan.__call__

    def note(self: AppliedPlan, call: OperatorCall) -> object:
        tensors = (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor))
        activations = (t for t in tensors if t.is_floating_point() and not isinstance(t, nn.Parameter))
        arrived[call.name] = ["BF16" if t.dtype is torch.bfloat16 else "FP32" for t in activations]
        return run(self, call)

    monkeypatch.setattr(AppliedPlan, "__call__", note)
    apply(chosen.model, plan, graph=graph, options=ApplyOptions(chunked_loss=False))  # the head is called, too
    try:
        chosen.model(**chosen.kwargs)
    finally:
        undo(chosen.model)
    formats = foretold(graph, plan)
    # Conversions have several spellings in torch (to, float), which the run time does not number as the export does.
    compared = [o for o in graph if o.inputs and ROLE_TABLE.get(o.op_type) in (Role.ADJUSTABLE, Role.FIXED)]
    expected = {o.name: [formats[source] for source in o.inputs] for o in compared}
    assert len(expected) >= len(adjustable) - 3  # look-ups read no activation
    # Masks and running statistics come after the activations and are no operators' results.
    assert expected == {operator: arrived[operator][: len(inputs)] for operator, inputs in expected.items()}
