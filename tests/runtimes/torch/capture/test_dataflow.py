"""What an operator really reads: conversions that change nothing, writes in place, views, scalars, gradients."""

import pytest
import torch
from torch import nn

from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.capture import CapturedModel, capture_model

X = torch.ones(2, 4)


def captured(model: nn.Module, *args: torch.Tensor) -> CapturedModel:
    return capture_model(model, args or (X,))


def edges(graph: OpGraph) -> dict[str, tuple[str, ...]]:
    return {operator.name: operator.inputs for operator in graph}


class Conversions(nn.Module):
    """Root-mean-square normalization as it is commonly written, with a residual that bypasses the conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        full = x.to(torch.float32)
        normal = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True))
        return x + self.weight * normal.contiguous()


def test_a_conversion_that_changes_nothing_is_read_only_by_its_own_users() -> None:
    graph = captured(Conversions()).graph
    assert edges(graph) == {
        "input/x": (),
        "linear/linear": ("input/x",),
        "to": ("linear/linear",),
        "pow": ("to",),
        "mean": ("pow",),
        "rsqrt": ("mean",),
        "mul": ("to", "rsqrt"),
        "mul_1": ("mul",),
        "add": ("linear/linear", "mul_1"),
    }
    assert [graph[name].role for name in ("to", "mul", "mul_1", "add")] == [
        Role.FIXED,
        Role.DEPENDENT,
        Role.FIXED,
        Role.DEPENDENT,
    ]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.ones(4))
        self.register_buffer("running", torch.zeros(4))
        self.running: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        early = y.view(4, 2)
        y += x
        y.add_(self.shift)
        late = y.view(4, 2)
        self.running.mul_(0.9).add_(y.detach().mean(0))
        y[:, 0] = 1.0
        return early.sum() + late.sum() + (y * self.running).sum()


def test_reads_lead_to_the_last_write() -> None:
    graph = captured(InPlace()).graph
    reads = edges(graph)
    assert reads["add_"] == ("linear/linear", "input/x")
    assert reads["add__1"] == ("add_",)
    assert reads["view_1"] == ("add__1",)
    assert reads["detach"] == ("add__1",)
    assert reads["select"] == ("add__1",)
    assert reads["fill_"] == ("select",)
    # The early view shares memory with what was written later.
    assert reads["sum"] == ("fill_",)
    assert reads["mul"] == ("fill_", "add__2")
    # Writing into an activation keeps that one's format, even if what is added is an FP32 parameter.
    assert graph["add__1"].role is Role.DEPENDENT
    assert graph["add__1"].parameters == ("shift",)


def test_buffers_that_are_written_stay_as_they_were() -> None:
    model = InPlace()
    captured(model)
    assert torch.equal(model.running, torch.zeros(4))


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scale = self.temperature.exp()
        y = self.linear(x) * scale * self.temperature
        mask = positions > 1
        return torch.where(mask, y, self.table).sum() * scale


def test_scalars_and_integers_carry_no_precision() -> None:
    graph = captured(Scalars(), X, torch.tensor([0, 1, 2, 3])).graph
    reads = edges(graph)
    assert reads["mul"] == ("linear/linear",)
    assert reads["mul_1"] == ("mul",)
    assert [graph[name].role for name in ("mul", "mul_1")] == [Role.DEPENDENT, Role.DEPENDENT]
    assert graph["mul_1"].parameters == ("temperature",)
    # Without larger operands a scalar is what decides.
    assert reads["mul_2"] == ("sum", "exp")
    assert (reads["gt"], graph["gt"].role) == ((), Role.FIXED)
    assert "input/positions" not in graph
    assert (reads["where"], graph["where"].role) == (("mul_1",), Role.FIXED)


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.no_grad()
    def turn(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", enabled=False):
            y = self.linear(x.float()).cos()
        return y, y.sin()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.turn(self.linear(x))
        return self.linear(first), second


def test_regions_are_part_of_the_pass() -> None:
    result = captured(Regions())
    assert edges(result.graph) == {
        "input/x": (),
        "linear/linear": ("input/x",),
        "to": ("linear/linear",),
        "linear/linear_1": ("to",),
        "cos": ("linear/linear_1",),
        "sin": ("cos",),
        "linear/linear_2": ("cos",),
    }


def test_gradients_stop_where_they_are_disabled() -> None:
    calls = captured(Regions()).calls
    wanted = {
        name: next(call.tensors()).requires_gradient for name, call in calls.items() if not name.startswith("input/")
    }
    assert wanted == {
        "linear/linear": False,
        "to": True,
        "linear/linear_1": False,
        "cos": False,
        "sin": False,
        "linear/linear_2": False,
    }


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.view(2, 4), x.t().reshape(2, 4)]).flatten().expand(3, -1).contiguous()


def test_only_what_moves_data_has_bytes() -> None:
    graph = captured(Views()).graph
    assert {o.name: o.num_bytes for o in graph} == {
        "input/x": 0,
        "view": 0,
        "t": 0,
        "reshape": 2 * 32,
        "cat": 2 * 64,
        "flatten": 0,
        "expand": 0,
        "contiguous": 2 * 3 * 64,
    }


def test_signatures_are_equal_for_equal_work_only() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    first, second, third, fourth = (o.signature for o in captured(Same()).graph if o.op_type == "linear")
    assert second == third
    # The first one's input wants no gradient, the last one has no bias.
    assert len({first, second, fourth}) == 3


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_without_effect_is_not_mistaken_for_its_input(inplace: bool) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.drop = nn.Dropout(0.0, inplace=inplace)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y * self.drop(y)

    kind = "dropout_" if inplace else "dropout"
    graph = captured(Dropped()).graph
    source = f"drop/{kind}" if inplace else "linear/linear"
    assert graph["mul"].inputs == (source, f"drop/{kind}")
