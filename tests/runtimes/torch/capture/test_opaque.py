"""Modules that torch.export cannot look into are one operator each, in FP32."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import qsync_opt
from qsync_opt.errors import ModelError
from qsync_opt.model import OPAQUE, Role, graph_to_json, parse_graph
from qsync_opt.runtimes.torch.capture import CapturedModel, capture_model
from qsync_opt.runtimes.torch.execution import apply, device_formats, undo
from qsync_opt.runtimes.torch.profiling import profile
from qsync_opt.testing import make_cluster, make_sensitivities
from qsync_opt.training import build_problem, uniform_plan

X = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    """Every row goes to one expert; the sizes depend on the data, and branches too."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.all):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                result.index_add_(0, rows, expert(x[rows]))
        return result


class Item(nn.Module):
    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x * 2 if x.abs().max().item() > 0 else x


class Sized(nn.Module):
    """The export succeeds, but a tensor inside has a size that depends on the data."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x * x[x > 0].mean()


class Numpy(nn.Module):
    """Custom code, with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight + float(np.asarray(x.detach()).mean())


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 4)
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x, self.gate(x).argmax(-1))
        result: Tensor = self.last(x)
        return result


def _captured(model: nn.Module) -> CapturedModel:
    with pytest.warns(UserWarning, match="is one operator in FP32"):
        return capture_model(model, (X,))


@pytest.mark.parametrize("kind", [Experts, Item, Sized, Numpy])
def test_such_a_module_is_one_fixed_operator(kind: type[nn.Module]) -> None:
    captured = _captured(Model(kind))
    operator = captured.graph[f"layers.0/{OPAQUE}"]
    assert operator.role is Role.FIXED
    assert operator.inputs == ("first/linear",)
    assert captured.graph.opaque_modules() == ("layers.0",)
    inside = [name for name, _ in Model(kind).named_parameters() if name.startswith("layers.0.")]
    assert list(operator.parameters) == inside
    assert {o.name for o in captured.graph.by_role(Role.ADJUSTABLE)} == {"first/linear", "gate/linear", "last/linear"}
    (note,) = captured.notes
    assert f"module 'layers.0' ({kind.__name__})" in note
    assert kind is Sized or f"at {__file__}:" in note
    # The graph in a file says so too.
    assert parse_graph(json.dumps(graph_to_json(captured.graph)), where="graph").opaque_modules() == ("layers.0",)


def test_all_modules_of_the_class_are_kept_in_one_piece() -> None:
    captured = _captured(Model(Experts, layers=3))
    assert captured.graph.opaque_modules() == ("layers.0", "layers.1", "layers.2")
    assert captured.graph["layers.1/qsync_opt.opaque"].flops == 12 * 2 * 8 * 8
    assert 'model.set_experts_implementation("batched_mm")' in captured.notes[0]


def test_times_memory_and_problem_count_it() -> None:
    model = Model(Numpy)
    captured = _captured(model)
    measured = profile(captured, "cpu", progress=False, repeats=1)
    cost = measured.cost(f"layers.0/{OPAQUE}")["FP32"]
    assert cost.forward_ns > 0
    assert cost.backward_ns > 0
    assert cost.saves_inputs == (0,)
    assert model.layers[0].calls == 0  # a copy was measured
    problem = build_problem(captured.graph, {"slow": measured}, make_sensitivities(captured.graph), make_cluster())
    assert uniform_plan(problem, "BF16").devices["slow"]["first/linear"] == "BF16"


@pytest.mark.parametrize("kind", [Experts, Item, Sized, Numpy])
def test_under_a_plan_it_runs_in_fp32_and_gradients_flow(kind: type[nn.Module]) -> None:
    model = Model(kind)
    captured = _captured(model)
    formats: list[torch.dtype] = []
    model.layers[0].register_forward_pre_hook(lambda _, args: formats.append(args[0].dtype))
    seen: list[torch.dtype] = []
    for module in model.layers[0].modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, result: seen.append(result.dtype))
    plan = {operator.name: "BF16" for operator in captured.graph.by_role(Role.ADJUSTABLE)}
    plain = model(X)
    model.zero_grad()
    apply(model, plan, graph=captured)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none about operators that the plan does not have
        for _ in range(3):
            result = model(X)
            result.sum().backward()
    undo(model)
    assert torch.allclose(result, plain, atol=0.1 * float(plain.abs().max().detach()))
    assert set(seen) <= {torch.float32}
    trained = [p for name, p in model.named_parameters() if "gate" not in name and "all" not in name]
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trained)


def test_statistics_and_sensitivities_leave_it_out() -> None:
    model = Model(Experts)
    captured = _captured(model)
    with pytest.warns(UserWarning, match="does not depend on the result of 'gate/linear'"):
        statistics = qsync_opt.collect_statistics(
            model, [X], loss=lambda y: y.square().mean(), graph=captured, probes=1
        )
    table = qsync_opt.sensitivities(captured.graph, statistics, device_formats("cpu"))
    assert table["first/linear"]["INT8"] > table["first/linear"]["BF16"] > 0


class Twice(nn.Module):
    """Runs one module twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.item = Item()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.item(self.item(x, x), x)
        return result


def test_a_module_that_runs_twice_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'item' cannot be kept in one piece: it runs several times"):
        capture_model(Twice(), (X,))


class Packed(nn.Module):
    """A recurrent layer over sequences of several lengths, as a part of a model or as the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(8, 6), nn.GRU(6, 5, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        result: Tensor = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        return result


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Packed(), nn.Linear(10, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(x, lengths))
        return result


def test_packed_sequences_stay_inside_the_operator() -> None:
    torch.manual_seed(0)
    model, batch = Tagger(), (torch.randn(3, 4, 8), torch.tensor([4, 2, 3]))
    with pytest.warns(UserWarning, match=r"'encoder' \(Packed\) is one operator in FP32"):
        captured = capture_model(model, batch)
    assert [(o.name, o.op_type) for o in captured.graph.by_role(Role.ADJUSTABLE)] == [("head/linear", "linear")]
    expected = model(*batch)
    apply(model, {"head/linear": "BF16"}, graph=captured)
    torch.testing.assert_close(model(*batch), expected, rtol=0.02, atol=0.02)


def test_a_packed_sequence_of_the_model_itself_is_refused_with_a_remedy() -> None:
    with pytest.raises(ModelError, match=r"'layer' takes or returns a packed sequence.*module of their own"):
        capture_model(Packed(), (torch.randn(3, 4, 8), torch.tensor([4, 2, 3])))


def test_nothing_is_left_behind() -> None:
    model = Model(Item)
    _captured(model)
    assert not any("forward" in module.__dict__ or module._forward_hooks for module in model.modules())
