"""Models that cannot be captured: one line with the reason and the module where it stopped."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qsync_opt.errors import ModelError
from qsync_opt.model import Role, RoleTable
from qsync_opt.runtimes.torch.capture import capture, capture_model, save_onnx
from qsync_opt.runtimes.torch.execution import apply, undo

X = torch.ones(2, 4)


class Outer(nn.Module):
    """A linear layer, then the module under test."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.linear(x))


class DataDependent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Untranslatable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x)[1]


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x)


class Growing(nn.Module):
    """Does more on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = self.linear(x)
        return x


@dataclass
class Result:
    logits: Any
    number: int = 3


class Wrapping(nn.Module):
    """Returns its result inside of something else."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.linear(x))


class Selecting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


def refusal(model: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        capture(model, args, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert "\x1b" not in text
    return text


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (nn.Linear(7, 7), "the forward pass failed in module 'inner' (Linear): RuntimeError: mat1 and mat2 shapes"),
        (Autocast(), "module 'inner' (Autocast) enables autocast (cpu, torch.bfloat16) in its forward"),
        (Growing(), "operator 2 is 'inner.linear/linear_1' in the export and 'nothing more' at run time"),
        (Selecting(), "which depends on the data: only models with fixed shapes can be planned"),
    ],
)
def test_the_reason_and_the_module_are_named(inner: nn.Module, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(Outer(inner), X)
    assert capfd.readouterr() == ("", "")


def test_what_depends_on_the_data_is_refused_with_file_and_line_and_a_remedy() -> None:
    text = refusal(DataDependent(), X)
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "x * 2 if x.sum()" in text)
    assert f"(at {__file__}:{line}: return x * 2 if x.sum() > 0 else x)" in text
    assert "(torch.where instead of a branch), move them into a module of their own, which then stays in FP32" in text


class Unequal(nn.Module):
    """Selects rows in the model itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(1) > 0] + 1


def test_sizes_that_depend_on_the_data_have_file_and_line_and_a_remedy() -> None:
    text = refusal(Unequal(), X)
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "x[x.sum(1)" in text)
    assert f"(at {__file__}:{line}: return x[x.sum(1) > 0] + 1)" in text
    assert "give rows the weight 0 instead of selecting others" in text


class Config:
    layerdrop = 0.5


class Dropping(nn.Module):
    """Skips a layer at random."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.linear = Config(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand([]) < self.config.layerdrop else self.linear(x)


class NumberedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x.sum(1) > 0
        for number, expert in enumerate(self.all):
            if (chosen == number).any():
                x = x + expert(x)
        return x


def test_remedies_for_layers_and_experts_that_run_at_times() -> None:
    assert "set model.config.layerdrop = 0" in refusal(Dropping(), X)
    assert 'model.set_experts_implementation("batched_mm")' in refusal(NumberedExperts(), X)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.top = nn.EmbeddingBag(100, 8, mode="sum"), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor, *offsets: torch.Tensor) -> torch.Tensor:
        return self.top(self.bag(ids, *offsets))


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Bag(), (torch.randint(0, 100, (4, 3)),)),
        (Bag(), (torch.randint(0, 100, (12,)), torch.tensor([0, 3, 5, 9]))),
        (Outer(Untranslatable()), (X,)),
    ],
)
@pytest.mark.filterwarnings("ignore:operations unknown")
def test_what_onnx_has_no_form_for_is_fixed(model: nn.Module, args: tuple[Any, ...], tmp_path: Path) -> None:
    captured = capture_model(model, args)
    (linear,) = captured.graph.by_role(Role.ADJUSTABLE)
    opaque = {"embedding_bag", "linalg_svd"}
    (other,) = (o for o in captured.graph if o.op_type in opaque)
    assert other.role is Role.FIXED
    assert captured.calls.keys() == {operator.name for operator in captured.graph}
    undo(apply(model, {linear.name: "BF16"}, graph=captured.graph))(*args)
    text = refusal(model, *args, onnx_path=tmp_path / "m.onnx")
    assert "the ONNX" in text
    assert f"(at {__file__}:" in text


class Forces(nn.Linear):
    """Energies and forces, from a gradient inside the forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]


class Ensemble(nn.Linear):
    """The rows of a batch one by one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(super().forward)(x)


def test_gradients_and_transforms_inside_the_forward_pass_are_refused_with_a_remedy() -> None:
    text = refusal(Forces(4, 4), X)
    assert "takes gradients itself" in text
    assert "loss=" in text
    text = refusal(Ensemble(4, 4), X)
    assert "the model itself (Ensemble) cannot be captured: it uses a transform of torch.func" in text
    assert "module of its own" in text
    with pytest.warns(UserWarning, match=r"'inner' \(Ensemble\) is one operator in FP32"):
        graph = capture(Outer(Ensemble(4, 4)), (X,))
    assert "opaque" in " ".join(operator.op_type for operator in graph)


class Pooled(nn.Module):
    """A pooler that nobody reads, as BERT has it under mean pooling; a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler, self.mean = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        torch.tanh(self.pooler(h)).mul_(2)
        self.seen.add_(self.mean(x).mean(0).detach())
        return h.relu_().mean(1)


def test_what_nobody_reads_is_fixed_and_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"nothing reads the result of 'pooler/linear': kept in FP32"):
        graph = capture(Pooled(), (X,), onnx_path=tmp_path / "m.onnx")
    assert [operator.name for operator in graph.by_role(Role.ADJUSTABLE)] == ["body/linear", "mean/linear"]
    assert graph["pooler/linear"].role is Role.FIXED
    model = apply(Pooled(), {"body/linear": "BF16", "mean/linear": "BF16"}, graph=graph)
    model(X)  # no warning about an operator without a plan


def test_no_gradient_flows_through_integers() -> None:
    class Routed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, indices = super().forward(x).topk(2)
            return values.sum() * indices.float().cumsum(1).mean()

    captured = capture_model(Routed(4, 4), (X,))
    argument = captured.calls["cumsum"].args[0]
    assert not argument.requires_gradient


def test_a_batch_may_be_given_in_place_of_arguments() -> None:
    model = Outer(nn.ReLU())
    graphs = [capture(model, batch) for batch in ((X,), [X], X, {"x": X})]
    assert graphs == [capture(model, (), {"x": X})] * 4


def test_unusable_models_and_arguments() -> None:
    linear = nn.Linear(4, 4)
    assert "cannot capture a function: a torch.nn.Module is needed" in refusal(lambda x: x, X)
    assert "missing 1 required positional argument" in refusal(linear)
    assert "model 'Identity' does nothing" in refusal(nn.Identity(), X)
    assert "parameter 'weight' is bfloat16" in refusal(nn.Linear(4, 4).bfloat16(), X.bfloat16())
    assert "parameter 'weight' is on the meta device" in refusal(nn.Linear(4, 4, device="meta"), X)
    assert "role pattern 'head/*' fits no operator" in refusal(
        linear, X, roles=RoleTable(by_name={"head/*": Role.FIXED})
    )
    assert "cannot write ONNX file" in refusal(linear, X, onnx_path=Path("/nonexistent/model.onnx"))


@pytest.mark.parametrize("wrap", [Result, lambda x: Result({"x": [x]}), lambda x: {"a": (x, 1)}, lambda x: [None, x]])
def test_outputs_may_be_wrapped(wrap: Callable[[torch.Tensor], Any]) -> None:
    assert [operator.name for operator in capture(Wrapping(wrap), (X,))] == ["input/x", "linear/linear"]


def test_outputs_without_tensors_are_refused() -> None:
    assert "the model returns a set in which no tensor is found" in refusal(Wrapping(lambda x: {x}), X)


def test_nothing_is_left_behind_by_a_failure(tmp_path: Path) -> None:
    model = Outer(Untranslatable())
    refusal(model, X, onnx_path=tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
    assert not any(module._forward_hooks or "forward" in module.__dict__ for module in model.modules())
    assert logging.root.manager.disable == logging.NOTSET


def test_the_kind_of_the_model_itself_is_named() -> None:
    assert re.search(r"in the model itself \(DataDependent\)", refusal(DataDependent(), X))


class TwoFiles:
    """Saves as the exporter does when weights are large: beside the model, which names the file."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def save(self, path: Path) -> None:
        path.with_name(f"{path.name}.data").write_text("weights")
        if self.fails:
            raise OSError(28, "No space left on device")
        path.write_text(f"{path.name}.data")


def test_large_weights_lie_beside_the_model(tmp_path: Path) -> None:
    save_onnx(TwoFiles(), tmp_path / "m.onnx")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "m.onnx": "m.onnx.data",
        "m.onnx.data": "weights",
    }


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("old")
    with pytest.raises(ModelError, match="No space left on device"):
        save_onnx(TwoFiles(fails=True), tmp_path / "m.onnx")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
