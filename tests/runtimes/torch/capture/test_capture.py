"""Capture of known and odd models: every product found, mapped to its module, with the same names always."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import example_models
import pytest
import torch
import torch.nn.functional as F
from example_models import NAMES, Example
from torch import distributions, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qsync_opt.model import OpGraph, Role, RoleTable
from qsync_opt.model.onnx import read_onnx, read_weights
from qsync_opt.runtimes.torch.capture import CapturedModel, capture

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def flops_by_module(graph: OpGraph) -> dict[str, int]:
    totals: dict[str, int] = defaultdict(int)
    for operator in graph:
        totals[operator.module] += operator.flops
    return {module: flops for module, flops in totals.items() if flops}


def counted_flops_by_module(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """What torch's counter finds in each module itself, its inner modules taken off."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**kwargs)
    root = type(model).__name__
    found = {k.removeprefix(root).removeprefix("."): sum(v.values()) for k, v in counter.get_flop_counts().items()}
    del found["Global"]
    own: dict[str, int] = {}
    for path, flops in found.items():
        inner = [p for p in found if p and p != path and p.rpartition(".")[0] == path]
        own[path] = flops - sum(found[p] for p in _outermost(found, path, inner))
    return {module: flops for module, flops in own.items() if flops}


def _outermost(found: Mapping[str, int], path: str, inner: list[str]) -> list[str]:
    """Modules directly inside ``path``, and those inside containers that never ran themselves."""
    below = [p for p in found if p and p != path and (not path or p.startswith(f"{path}."))]
    return [p for p in below if not any(p.startswith(f"{q}.") for q in below)] or inner


Known = Callable[[str], tuple[Example, CapturedModel]]


@pytest.fixture(params=NAMES)
def one_known(request: pytest.FixtureRequest, known: Known) -> tuple[Example, CapturedModel]:
    return known(request.param)


def test_products_are_those_that_torch_counts_module_by_module(one_known: tuple[Example, CapturedModel]) -> None:
    chosen, captured = one_known
    assert flops_by_module(captured.graph) == counted_flops_by_module(chosen.model, chosen.kwargs)


def test_every_trainable_parameter_is_used_by_some_operator(one_known: tuple[Example, CapturedModel]) -> None:
    chosen, captured = one_known
    assert [p.name for p in captured.graph.parameters] == [name for name, _ in chosen.model.named_parameters()]
    used = {parameter for operator in captured.graph for parameter in operator.parameters}
    assert used == {p.name for p in captured.graph.parameters}


def test_the_last_operator_is_the_loss_and_all_products_lead_to_it(one_known: tuple[Example, CapturedModel]) -> None:
    _, captured = one_known
    graph = captured.graph
    loss = next(o for o in graph if o.op_type == "cross_entropy_loss")
    reached = {loss.name}
    for operator in reversed(graph.operators):
        if operator.name in reached:
            reached.update(operator.inputs)
    products = {o.name for o in graph if o.flops}
    assert products <= reached
    assert graph.distances_to_input()[loss.name] > 2


def test_the_calls_can_be_run_again(one_known: tuple[Example, CapturedModel]) -> None:
    _, captured = one_known
    generator = torch.Generator().manual_seed(0)
    for operator in captured.graph:
        call = captured.calls[operator.name]
        args, kwargs = call.build(lambda argument: argument.random("cpu", generator), "cpu")
        # Autograd lets nobody write into a leaf.
        with torch.set_grad_enabled(not operator.op_type.endswith("_")):
            result = call.target(*args, **kwargs)
        results = result if isinstance(result, (list, tuple)) else [result]
        assert [tuple(r.shape) for r in results] == [spec.shape for spec in operator.output_specs], operator.name
        if operator.role is Role.ADJUSTABLE:
            assert all(r.isfinite().all() for r in results), operator.name
            arguments = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            assert results[0].requires_grad == any(x.requires_grad for x in arguments), operator.name
            assert results[0].requires_grad or not operator.parameters, operator.name


def test_names_are_the_same_in_another_process(tmp_path: Path, known: Known) -> None:
    script = tmp_path / "names.py"
    script.write_text(
        "from qsync_opt.runtimes.torch.capture.model import capture\n"
        f"import sys; sys.path.append({str(Path(example_models.__file__).parent)!r})\n"
        "from example_models import example\n"
        "chosen = example('resnet50', small=True)\n"
        "print(capture(chosen.model, (), chosen.kwargs, name='resnet50').fingerprint())\n"
    )
    _, captured = known("resnet50")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == captured.graph.fingerprint()
    assert done.stderr == ""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(self.body(self.embedding(tokens)))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + (x @ self.embedding.weight.t()).mean()


def test_tied_weights_have_one_name_and_repeated_calls_are_numbered() -> None:
    graph = capture(Tied(), (TOKENS,))
    assert [o.name for o in graph.by_role(Role.ADJUSTABLE)] == [
        "embedding/embedding",
        "body/linear",
        "body/linear_1",
        "head/linear",
        "matmul",
    ]
    assert graph["head/linear"].parameters == graph["embedding/embedding"].parameters == ("embedding.weight",)
    assert [p.name for p in graph.parameters] == ["embedding.weight", "body.weight", "body.bias"]
    # The transposed weight is FP32 whatever the plan says.
    assert graph["t"].role is Role.FIXED
    assert graph["matmul"].inputs == ("body/linear_1", "t")


def test_a_file_has_tied_weights_under_the_name_in_the_graph(tmp_path: Path) -> None:
    capture(Tied(), (TOKENS,), onnx_path=tmp_path / "tied.onnx")
    assert {"embedding.weight", "body.weight"} <= set(read_weights(tmp_path / "tied.onnx"))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_shared_module_goes_by_its_first_name() -> None:
    graph = capture(Shared(), (torch.randn(2, 4),))
    assert [o.name for o in graph] == [
        "input/x",
        "first.0/linear",
        "first.1/relu",
        "first.0/linear_1",
        "first.1/relu_1",
    ]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.cross = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        y = self.encoder(x, mask=mask, is_causal=True)
        y, _ = self.cross(y, memory, memory)
        return F.scaled_dot_product_attention(y, y, y).sum()


def test_functional_products_inside_attention_modules_are_found() -> None:
    graph = capture(Attention(), (torch.randn(2, 5, 8), torch.randn(2, 3, 4)))
    kinds = [(o.module, o.op_type) for o in graph if o.flops]
    assert kinds.count(("encoder.layers.1.self_attn", "linear")) == 2
    assert kinds.count(("encoder.layers.1.self_attn", "scaled_dot_product_attention")) == 1
    # Where attention weights are asked for, torch multiplies by itself.
    assert [kind for module, kind in kinds if module == "cross"] == [*["linear"] * 3, "bmm", "bmm", "linear"]
    assert ("", "scaled_dot_product_attention") in kinds  # with three dimensions, not four


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.bilinear = nn.Bilinear(8, 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bij,jk->bik", x, self.w)
        z = torch.baddbmm(torch.einsum("bij,bkj->bik", y, y), x, y.transpose(1, 2))
        t = torch.einsum("bij,jk,kl->bil", x, self.w, self.w) + torch.tensordot(x, self.w, 1)
        v = torch.dot(x[0, 0], self.w[0]) + (x[0] @ self.w[0]).sum() + torch.einsum("i,j->ij", x[0, 0], x[0, 1]).sum()
        return z.sum() + t.sum() + v + self.bilinear(x, y).sum() + torch.addmm(x[0], x[0], self.w).sum()


def test_flops_of_functional_products() -> None:
    graph = capture(Products(), (torch.randn(2, 8, 8),))
    product = 2 * 2 * 8 * 8 * 8
    flops = {o.name: o.flops for o in graph if o.flops}
    # With opt_einsum installed torch multiplies the two small matrices first.
    assert flops.pop("einsum_2") in (2 * product, product + product // 2)
    assert flops == {
        "einsum": product,
        "einsum_1": product,
        "baddbmm": product,
        "tensordot": product,
        "dot": 2 * 8,
        "matmul": 2 * 8 * 8,
        "bilinear/bilinear": 2 * 2 * 8 * 4 * 8 * 8,
        "addmm": 2 * 8 * 8 * 8,
    }
    assert graph["tensordot"].role is Role.FIXED


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(4, 8, 3, padding="same", groups=2)
        self.up = nn.ConvTranspose1d(8, 4, 3, stride=2, groups=2)
        self.two = nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2, padding_mode="reflect")
        self.up2 = nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1)
        self.three = nn.Conv3d(1, 2, 3)

    def forward(self, x: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        volume = images[:, None].expand(-1, 3, -1, -1, -1)[:, :1]
        return self.up(self.one(x)).sum() + self.up2(self.two(images)).sum() + self.three(volume).sum()


def test_flops_of_convolutions() -> None:
    model = Convolutions()
    inputs = {"x": torch.randn(2, 4, 9), "images": torch.randn(2, 4, 8, 8)}
    graph = capture(model, (), inputs)
    assert len([o for o in graph if o.flops]) == 5
    assert flops_by_module(graph) == counted_flops_by_module(model, inputs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].sum()


def test_recurrent_modules_stay_in_full_precision_and_keep_their_weights() -> None:
    model = Recurrent()
    x = torch.randn(2, 3, 8)
    expected = model(x)
    graph = capture(model, (x,))
    assert (graph["lstm/lstm"].role, graph["lstm/lstm"].flops) == (Role.FIXED, 2 * 2 * 3 * 2 * 32 * 8)
    assert len(graph["lstm/lstm"].parameters) == 4
    assert torch.equal(model(x), expected)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.conv(x)), inplace=True).mean((2, 3))
        first, second = self.head(self.drop(self.frozen(x))).chunk(2, dim=-1)
        return first.float() + second


def test_training_mode_is_captured_and_nothing_of_the_model_changes(tmp_path: Path) -> None:
    model = Normalized().eval()
    model.bn.train()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    keys = set(model.__dict__)
    graph = capture(model, (torch.randn(2, 3, 6, 6),), onnx_path=tmp_path / "m.onnx")
    assert {name for name, module in model.named_modules() if module.training} == {"bn"}
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert set(model.__dict__) == keys
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    # Dropout and the statistics of batch normalization are there, with nodes of their own where ONNX has some.
    assert graph["drop/dropout"].onnx_nodes
    assert graph["bn/batch_norm"].role is Role.FIXED
    assert "bn/add_" in graph
    assert not graph["bn/add_"].is_floating
    # Frozen parameters are not trained.
    assert graph["frozen/linear"].parameters == ()
    assert "frozen.weight" not in {p.name for p in graph.parameters}
    # Each part of a split is an operator of its own, so that edges count the right elements.
    assert graph["getitem"].output_elements == 2
    assert graph["to"].role is Role.FIXED
    assert graph["add"].inputs == ("to", "getitem_1")


def test_random_state_is_put_back() -> None:
    model, x = Normalized(), torch.randn(2, 3, 6, 6)
    state = torch.get_rng_state()
    capture(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_file_that_is_kept_reads_back_as_the_graph(tmp_path: Path) -> None:
    graph = capture(Normalized(), (torch.randn(2, 3, 6, 6),), onnx_path=tmp_path / "m.onnx", name="net")
    assert read_onnx(tmp_path / "m.onnx") == graph
    assert graph.name == "net"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_roles_can_be_changed() -> None:
    table = RoleTable(by_type={"conv2d": Role.FIXED}, by_name={"bn/batch_norm": Role.DEPENDENT})
    graph = capture(Normalized(), (torch.randn(2, 3, 6, 6),), roles=table)
    assert graph["conv/conv2d"].role is Role.FIXED
    # Dependent by request, but it reads FP32 weights.
    assert graph["bn/batch_norm"].role is Role.FIXED
    assert graph["head/linear"].role is Role.ADJUSTABLE


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.deg2rad(x) + torch.deg2rad(2 * x)


def test_unknown_operations_are_kept_and_named_once() -> None:
    with pytest.warns(UserWarning, match="kept in FP32: deg2rad;") as caught:
        graph = capture(Unknown(), (torch.randn(3),))
    assert len(caught) == 1
    assert [o.name for o in graph.by_role(Role.FIXED)] == ["input/x", "deg2rad", "deg2rad_1"]
    table = RoleTable(by_type={"deg2rad": Role.DEPENDENT})
    assert capture(Unknown(), (torch.randn(3),), roles=table)["deg2rad"].role is Role.DEPENDENT


class Caching(nn.Module):
    """Returns a container that torch.export does not know, as language models return their caches."""

    class Cache:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"loss": y.sum(), "cache": self.Cache(y)}


def test_outputs_of_unknown_types_do_not_matter() -> None:
    assert [o.name for o in capture(Caching(), (torch.randn(2, 4),))] == ["input/x", "linear/linear", "sum"]


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding="same"), nn.BatchNorm2d(4)
        self.up1, self.up2, self.up3 = (
            nn.ConvTranspose1d(4, 4, 2),
            nn.ConvTranspose2d(4, 4, 2),
            nn.ConvTranspose3d(4, 4, 1),
        )
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = self.head(self.table(ids)) @ self.weight
        rows = rows + torch.einsum("ij,jk->ik", rows, self.weight) + torch.mv(self.weight, rows[0])
        x = self.up2(self.norm(self.conv(x))).flatten(2)
        return self.up1(x).sum() + self.up3(x[:, :, :8].view(1, 4, 2, 2, 2)).sum() + rows.sum()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_plan_of_an_exported_file_names_the_operators_that_capture_names(tmp_path: Path, training: bool) -> None:
    model, args = Kinds().train(training), (torch.randn(1, 4, 4, 4), torch.randint(0, 9, (3,)))
    torch.onnx.export(model, args, tmp_path / "model.onnx", dynamo=True, verbose=False)
    of_file, captured = read_onnx(tmp_path / "model.onnx"), capture(model, args)
    names = {operator.name for operator in of_file.by_role(Role.ADJUSTABLE)}
    assert names == {operator.name for operator in captured.by_role(Role.ADJUSTABLE)}


def test_tf32_of_convolutions_alone_may_be_set():
    script = """
import torch
from qsync_opt.runtimes.torch.capture.model import capture_model
for precision in ("ieee", "tf32"):
    torch.backends.cudnn.conv.fp32_precision = precision
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    captured = capture_model(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3)), (torch.zeros(1, 1, 4, 4),), {})
    print(len(captured.graph), torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision)
"""  # in a process of its own: torch cannot be brought back to where it was
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for precision, line in zip(("ieee", "tf32"), done.stdout.splitlines(), strict=True):
        count, *flags = line.split()
        assert int(count) >= 1
        assert flags == [precision, "ieee"]


class Twice(nn.Module):
    """One network for two views, as contrastive losses and discriminators have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(a), self.net(b)


def test_a_normalization_may_be_called_twice() -> None:
    torch.manual_seed(0)
    model, a, b = Twice(), torch.randn(8, 4), torch.randn(8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = capture(model, (a, b))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert graph["net.1/batch_norm"].inputs == ("net.0/linear",)
    assert graph["net.1/batch_norm_1"].inputs == ("net.0/linear_1",)


@pytest.mark.parametrize(
    "make",
    [
        lambda h: distributions.Normal(h[:, :2], h[:, 2:].exp()),
        lambda h: distributions.Independent(distributions.Normal(h[:, :2], h[:, 2:].exp()), 1),
        lambda h: distributions.Categorical(logits=h),
    ],
    ids=["normal", "independent", "categorical"],
)
def test_a_model_may_return_a_distribution(make: Callable[[torch.Tensor], distributions.Distribution]) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> distributions.Distribution:
            return make(self.linear(x))

    checks = distributions.Distribution._validate_args
    graph = capture(Policy(), (torch.randn(8, 4),))
    assert [operator.name for operator in graph.by_role(Role.ADJUSTABLE)] == ["linear/linear"]
    assert distributions.Distribution._validate_args is checks
