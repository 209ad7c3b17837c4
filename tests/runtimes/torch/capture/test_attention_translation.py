"""The ONNX form of attention computes what torch computes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import nn

from qsync_opt.runtimes.torch.capture import export_onnx, export_program


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def exported(model: nn.Module, args: tuple[Any, ...], path: Path) -> onnx.ModelProto:
    export_onnx(export_program(model, args, {})).save(path)
    return onnx.load(path)


MASK = torch.tensor([[True, False, True, True, False, True]] * 4 + [[False] * 5 + [True]])


@pytest.mark.parametrize(
    ("shapes", "mask", "options"),
    [
        ([(2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3)], None, {}),
        ([(2, 5, 8), (2, 6, 8), (2, 6, 8)], torch.linspace(-2, 2, 30).view(5, 6), {}),
        ([(5, 8), (6, 8), (6, 8)], None, {"is_causal": True}),
        ([(2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)], MASK, {"enable_gqa": True, "scale": 0.3}),
        ([(2, 2, 2, 5, 8)] * 3, None, {}),
    ],
)
def test_values(
    shapes: list[tuple[int, ...]], mask: torch.Tensor | None, options: dict[str, Any], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    model = Attention(**options)
    proto = exported(model, (q, k, v, mask), tmp_path / "m.onnx")
    names = [value.name for value in proto.graph.input]
    values = dict(zip(names, (q, k, v, mask), strict=False))
    (result,) = ReferenceEvaluator(proto).run(None, {name: t.numpy() for name, t in values.items() if t is not None})
    np.testing.assert_allclose(result, model(q, k, v, mask).numpy(), rtol=1e-5, atol=1e-6)
    assert [node.op_type for node in proto.graph.node].count("MatMul") == 2


def test_dropout_is_in_training_mode(tmp_path: Path) -> None:
    q = torch.ones(1, 2, 4, 8)
    proto = exported(Attention(dropout_p=0.5), (q, q, q, None), tmp_path / "m.onnx")
    (result,) = ReferenceEvaluator(proto).run(None, {value.name: q.numpy() for value in proto.graph.input})
    # Equal weights of 1/4 keep or lose their share at random and are doubled.
    assert set(np.unique(np.round(result, 5))) <= {0.0, 0.5, 1.0, 1.5, 2.0}
    assert len(np.unique(result)) > 1
