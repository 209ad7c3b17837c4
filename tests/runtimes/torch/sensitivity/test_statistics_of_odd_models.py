"""Statistics where a model does what few models do: parts without gradients, sparse tables, no gradient at all."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_opt import TrainingExample, apply, sensitivities, undo
from qsync_opt.errors import ModelError, UnsupportedError
from qsync_opt.numerics import Granularity, Rounding, formats_for
from qsync_opt.runtimes.torch.capture import capture, capture_model
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.sensitivity.probes import embedding_bag_twice
from qsync_opt.sensitivity import NoiseOptions


class Table(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens)).square().mean()


def test_a_sparse_gradient_of_a_table_says_what_a_dense_one_says():
    batches = [torch.randint(0, 50, (6, 5)), torch.randint(0, 30, (6, 5))]
    tables = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = Table(sparse)
        graph = capture(model, (batches[0],))
        found = collect_statistics(
            model, batches, graph=graph, probes=2, adaptive_probes=2, curvature_probes=4, whole_batches=True
        )
        assert found.gradient_noise is not None
        kinds = ("probed", "progress", "propagated", "fisher", "hessian", "weight")
        tables.append(
            [
                {name: dict(row) for name, row in sensitivities(graph, found, device_formats("cpu"), kind=kind).items()}
                for kind in kinds
            ]
            + [found.gradient_noise.variance]
        )
        assert all(parameter.grad is None for parameter in model.parameters())
    *dense, noise = tables[0]
    *sparse_rows, sparse_noise = tables[1]
    assert noise == pytest.approx(sparse_noise)
    for one, other in zip(dense, sparse_rows, strict=True):
        for name, row in one.items():
            assert other[name] == pytest.approx(row, rel=1e-4)


class Inert(nn.Module):
    """A part that runs without gradients, and one that is trained."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        with torch.no_grad():
            h = self.before(x)
        return self.after(h).square().mean()


def test_only_what_runs_without_gradients_is_counted_by_formula():
    torch.manual_seed(0)
    model, batch = Inert(), torch.randn(16, 8)
    graph, formats = capture(model, (batch,)), device_formats("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the loss does depend on it
        plain = sensitivities(graph, collect_statistics(model, [batch], graph=graph), formats)
        found = collect_statistics(model, [batch], graph=graph, probes=16, adaptive_probes=16)
    assert not found["before/linear"].gains
    assert found["after/linear"].gains
    assert found["after/linear"].adaptive_gains
    probed, progress = (sensitivities(graph, found, formats, kind=kind) for kind in ("probed", "progress"))
    for precision in ("INT8", "BF16"):
        assert probed["before/linear"][precision] == plain["before/linear"][precision] > 0
        # In the unit of progress, related to the other operator as it is by formula.
        related = plain["before/linear"][precision] / plain["after/linear"][precision]
        assert progress["before/linear"][precision] / progress["after/linear"][precision] == pytest.approx(related)
    with pytest.raises(ModelError, match=r"'before/linear' runs without gradients.*requires_grad_\(False\)"):
        collect_statistics(model, [batch], graph=graph, curvature_probes=2)


class Masked(nn.Module):
    """A mask that is added to a learned bias before attention, as T5 has it; or to the scores."""

    def __init__(self, lowest, fused):
        super().__init__()
        self.qkv, self.out, self.bias = nn.Linear(16, 48), nn.Linear(16, 16), nn.Embedding(8, 1)
        self.lowest, self.fused = lowest, fused

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = self.bias(torch.arange(8)).view(1, 8)
        bias = bias + torch.full((8, 8), self.lowest).triu(1)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            x = torch.softmax(q @ k.mT / 4 + bias, -1) @ v
        return self.out(x).square().mean()


@pytest.mark.parametrize("fused", [True, False])
def test_masked_elements_leave_the_statistics(fused):
    tables = []
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
    for lowest in (torch.finfo(torch.float32).min, -1e9, -torch.inf):
        torch.manual_seed(0)
        model = Masked(lowest, fused)
        graph = capture(model, (x,))
        found = collect_statistics(model, [x], graph=graph)
        assert max(signal.output_square_sum for signal in found.signals.values()) < 1e4
        tables.append(
            [value for row in sensitivities(graph, found, device_formats("cpu")).values() for value in row.values()]
        )
    assert tables[1] == pytest.approx(tables[0], rel=1e-4)
    assert tables[2] == pytest.approx(tables[0], rel=1e-4)


def test_an_operator_whose_values_are_not_finite_is_named():
    class Huge(nn.Linear):
        def forward(self, x):
            return torch.sigmoid(super().forward(x) + torch.inf).mean()

    with pytest.raises(ModelError, match=r"operator 'add': input or result is not finite in batch 0"):
        collect_statistics(Huge(4, 4), [torch.randn(2, 4)])


def test_batches_and_losses_are_taken_as_by_auto_plan():
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(16, 8)
    captured = capture_model(model, x)
    profile = SimpleNamespace(formats=device_formats("cpu"))
    tables = []
    for batch in (x, (x,), [x], {"input": x}):
        found = collect_statistics(model, [batch], loss=lambda out: out.square().mean(), graph=captured, probes=1)
        tables.append(sensitivities(captured, found, profile).values_only())
    found = collect_statistics(model, [x], step=lambda m, x: m(x).square().mean(), graph=captured.graph, probes=1)
    tables.append(sensitivities(captured.graph, found, profile.formats).values_only())
    assert all(table == tables[0] for table in tables)


def test_batches_that_are_none_are_refused_in_words():
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(16, 8)

    def loss(output):
        return output.square().mean()

    with pytest.raises(ModelError, match=r"batches is a Tensor of shape \(16, 8\): .* for a single one pass \[batch\]"):
        collect_statistics(model, x, loss=loss)
    with pytest.raises(ModelError, match=r"batches is a dict: a list of batches"):
        collect_statistics(model, {"input": x}, loss=loss)
    with pytest.raises(
        ModelError, match=r"the step failed on batch 1 \(\(16, 7\)\): RuntimeError: .*model\(\*\*batch\)"
    ):
        collect_statistics(model, [x, torch.randn(16, 7)], loss=loss)
    with pytest.raises(ModelError, match=r"step and loss are both given"):
        collect_statistics(model, [x], loss=loss, step=lambda m, b: loss(m(b)))
    with pytest.raises(ModelError, match=r"graph is a Sequential: an operator graph or a captured model"):
        collect_statistics(model, [x], loss=loss, graph=model)
    graph = capture(model, x)
    with pytest.raises(UnsupportedError, match=r"device_formats is a tuple: needed are a profile, or its formats"):
        sensitivities(graph, collect_statistics(model, [x], loss=loss, graph=graph), ("INT8",))


def test_where_nothing_is_learnt_no_share_of_progress_is_lost():
    model, batch = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(16, 8),)
    graph = capture(model, batch)
    with pytest.raises(ModelError, match=r"every gradient of the batch is zero.*adaptive_probes=0"):
        collect_statistics(model, [batch], step=lambda m, b: m(*b).sum() * 0, graph=graph, adaptive_probes=2)
    found = collect_statistics(model, [batch], step=lambda m, b: m(*b).sum() * 0, graph=graph, probes=2)
    assert {row["INT8"] for row in sensitivities(graph, found, device_formats("cpu")).values()} == {0.0}


@pytest.mark.parametrize("floating", [False, True])
def test_attention_rows_that_see_nothing_err_by_nothing(floating):
    torch.manual_seed(0)
    allowed = torch.ones(3, 1, 16, 16, dtype=torch.bool)
    allowed[0, :, 5] = False  # a padded query
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf")) if floating else allowed

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 96)

        def operands(self, x):
            return (p.view(3, 16, 4, 8).transpose(1, 2) for p in self.fc(x).chunk(3, -1))

        def forward(self, x):
            return F.scaled_dot_product_attention(*self.operands(x), attn_mask=mask)

    model, x, weight = Attention(), 2 * torch.randn(3, 16, 32), torch.randn(3, 4, 16, 8)
    found = collect_statistics(model, [x], step=lambda m, b: (m(b) * weight).sum())
    (operator,) = (part for part in found.operators if part.kind == "attention")

    def run(dtype):
        operands = [p.detach().to(dtype).requires_grad_() for p in model.operands(x)]
        given = mask if mask.dtype == torch.bool else mask.to(dtype)
        result = F.scaled_dot_product_attention(*operands, attn_mask=given)
        return [p.detach().double() for p in (result, *torch.autograd.grad(result, operands, weight.to(dtype)))]

    measured = operator.measured["BF16"]
    predicted = (measured.output, measured.first_gradient, measured.second_gradient, measured.third_gradient)
    for value, low, exact in zip(predicted, run(torch.bfloat16), run(torch.float64), strict=True):
        assert value == pytest.approx(float((low - exact).square().sum()), rel=0.6)


def test_a_model_without_adjustable_operators_says_so_whatever_is_probed():
    model = nn.LayerNorm(8)
    with pytest.raises(ModelError, match="no adjustable operator ran"):
        collect_statistics(model, [torch.randn(4, 8)], step=lambda m, b: m(b).square().sum(), curvature_probes=2)


def test_calls_of_one_operator_count_by_the_noise_of_each():
    """A step that runs the model on small and on large inputs: not mean noise times mean effect."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)), torch.randn(6, 4)
    # The large call has nearly all of the noise, the small one nearly all of the effect, or the other way round.
    for weights in ((1.0, 0.01), (0.01, 1.0)):

        def step(net, batch, weights=weights):
            return weights[0] * net(batch).square().mean() + weights[1] * net(4 * batch).square().mean()

        name = "0/linear"
        operator = collect_statistics(model, [x], step=step, probes=300, whole_batches=True)[name]
        expected = 0.0
        for factor, weight in zip((1.0, 4.0), weights, strict=True):
            alone = collect_statistics(model, [factor * x], step=lambda net, batch: net(batch).square().mean())[name]
            variance = alone.first.variance("BF16", Rounding.NEAREST)
            expected += variance * _effect(model, factor * x, weight)
        found = operator.gains["first"].floating * operator.first.variance("BF16", Rounding.NEAREST)
        assert found == pytest.approx(expected, rel=0.25)


def _effect(model, x, weight):
    """What noise in proportion to the square of the first operand does to the gradient of all parameters, per unit."""
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach() for p in model.parameters()]

    def gradient(moved):
        given = dict(zip(names, (v.clone().requires_grad_() for v in values), strict=True))
        loss = weight * torch.func.functional_call(model, given, (moved,)).square().mean()
        found = torch.autograd.grad(loss, list(given.values()), create_graph=True)
        return torch.cat([part.flatten() for part in found])

    squares = torch.autograd.functional.jacobian(gradient, x).square().sum(0)
    return float((squares * x.square()).sum() / x.square().mean())


def test_eight_bits_backward_cost_a_frozen_first_layer_nothing_more():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    batch = torch.randn(4, 8)
    graph = capture(model, batch)
    statistics = collect_statistics(model, [batch], graph=graph, step=lambda module, x: module(x).square().mean())
    formats = formats_for(("INT8", "INT8-BWD8", "BF16", "FP32"), "BF16")
    table = sensitivities(graph, statistics, formats, options=NoiseOptions(weight_granularity=Granularity.TENSOR))
    frozen, trained = (table[operator.name] for operator in graph if operator.op_type == "linear")
    assert frozen["INT8-BWD8"] == frozen["INT8"] > 0
    assert trained["INT8-BWD8"] > trained["INT8"]


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_weights_that_are_computed_from_parameters_count_by_formula(normed):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    computed = copy.deepcopy(plain)
    for layer in (computed[0], computed[2]):
        normed(layer)
    with torch.no_grad():  # the same weights
        for layer, other in zip((plain[0], plain[2]), (computed[0], computed[2]), strict=True):
            layer.weight.copy_(other.weight)
    batch = torch.randn(16, 8)
    tables = []
    for model in (plain, computed.eval()):
        graph = capture(model, batch)
        found = collect_statistics(model, [batch], graph=graph, loss=lambda y: y.square().mean())
        tables.append(sensitivities(graph, found, device_formats("cpu"), kind="propagated"))
    for name in ("0/linear", "2/linear"):
        # Exact for a norm that is a parameter at its first value; a spectral norm takes a direction out.
        assert dict(tables[1][name]) == pytest.approx(dict(tables[0][name]), rel=0.3), name


class Spectral(nn.Module):
    """A filter in the frequency domain with complex weights, and einsums of one and of three tensors."""

    def __init__(self):
        super().__init__()
        self.lift, self.drop = nn.Linear(6, 4), nn.Linear(4, 2)
        self.filter = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        y = self.lift(x)
        z = torch.fft.irfft(torch.fft.rfft(y, dim=1) @ self.filter, n=x.shape[1], dim=1)
        z = z + torch.fft.irfft(torch.einsum("blc,cd->bld", torch.fft.rfft(y, dim=1), self.filter), n=8, dim=1)
        z = torch.einsum("blc,cd,bld->bld", z, self.mix, y) + torch.einsum("bll->bl", y @ y.mT)[..., None]
        return self.drop(z).square().mean()


def test_products_of_complex_numbers_and_einsums_of_other_than_two_tensors_are_fixed():
    torch.manual_seed(0)
    model, x = Spectral(), torch.randn(3, 8, 6)
    graph = capture(model, x)
    assert {o.name: str(o.role) for o in graph if o.op_type in ("linear", "matmul", "einsum")} == {
        "lift/linear": "adjustable", "matmul": "fixed", "einsum": "fixed", "einsum_1": "fixed",
        "matmul_1": "adjustable", "einsum_2": "fixed", "drop/linear": "adjustable",
    }  # fmt: skip
    for known in (graph, None):
        found = collect_statistics(model, [x], graph=known, probes=1, adaptive_probes=1, curvature_probes=1)
        assert [entry.name for entry in found.operators] == ["lift/linear", "matmul_1", "drop/linear"]
    table = sensitivities(graph, found, device_formats("cpu"))
    assert all(row["INT8"] > row["BF16"] > 0 for row in table.values())
    for precision in ("BF16", "INT8"):
        apply(model, dict.fromkeys(table, precision), graph=graph)
        model(x).backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        undo(model)


class Bounded(nn.Module):
    """A table whose rows are scaled down when they are read."""

    def __init__(self, max_norm):
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8, max_norm=max_norm), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens)).square().mean()


def test_a_table_of_bounded_rows_is_measured_as_it_is_read():
    torch.manual_seed(0)
    bounded, plain = Bounded(1.0), Bounded(None)
    with torch.no_grad():
        bounded.table.weight.mul_(4)
    plain.load_state_dict(bounded.state_dict())
    with torch.no_grad():
        torch.embedding_renorm_(plain.table.weight, torch.arange(30), 1.0, 2.0)
    before = bounded.table.weight.detach().clone()
    batches = [torch.randint(0, 30, (32, 9)), torch.randint(0, 30, (32, 9))]  # every row is read
    tables = []
    graph = capture(bounded, (batches[0],))
    for model in (bounded, plain):
        found = collect_statistics(model, batches, graph=graph, probes=2, curvature_probes=2)
        assert "second" in found["table/embedding"].gains
        tables.append(
            [
                value
                for kind in ("propagated", "probed", "fisher", "hessian")
                for row in sensitivities(graph, found, device_formats("cpu"), kind=kind).values()
                for value in row.values()
            ]
        )
    assert tables[0] == pytest.approx(tables[1], rel=1e-4)
    assert torch.equal(bounded.table.weight, before)


class Checkpointed(nn.Module):
    """Blocks whose activations are kept (None), or recomputed by either kind of checkpointing."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.before, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        x = self.before(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def tables_of_checkpointed():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    tables, graphs = {}, []
    for reentrant in (True, False, None):
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        if not graphs:
            graphs.append(capture(model, (x,)))
        (graph,) = graphs
        found = collect_statistics(model, [x], graph=graph, probes=2, adaptive_probes=2, curvature_probes=2)
        kinds = ("propagated", "probed", "progress", "fisher", "hessian")
        tables[reentrant] = [sensitivities(graph, found, device_formats("cpu"), kind=kind).values() for kind in kinds]
    return {key: [list(row.values()) for table in rows for row in table] for key, rows in tables.items()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_sensitivity(tables_of_checkpointed, reentrant):
    for row, other in zip(tables_of_checkpointed[reentrant], tables_of_checkpointed[None], strict=True):
        assert row == pytest.approx(other)
    assert any(max(row) > 0 for row in tables_of_checkpointed[None])


class Unreached(nn.Module):
    """Reentrant checkpointing of a part whose input needs no gradient, which trains nothing there."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed, self.inner, self.head = checkpointed, nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        if self.checkpointed:
            x = checkpoint(self.inner, x, use_reentrant=True)
        else:
            with torch.no_grad():
                x = self.inner(x)
        return self.head(x).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_checkpointing_does_not_train_has_no_gradient():
    x, tables = torch.randn(8, 8), []
    graph = capture(Unreached(False), (x,))
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Unreached(checkpointed)
        found = collect_statistics(model, [x], graph=graph, probes=2)
        assert not found["inner/linear"].gains
        tables.append(list(sensitivities(graph, found, device_formats("cpu"), kind="probed").values()))
    for one, other in zip(*tables, strict=True):
        assert one == pytest.approx(other)


def test_a_batch_without_samples_is_refused_by_name():
    model, full = nn.Sequential(nn.Linear(8, 2)), torch.randn(4, 8)
    graph = capture(model, (full,))

    def loss(output):
        return output.square().mean()

    remedy = r"pass a batch with at least one sample.*drop_last=True"
    with pytest.raises(ModelError, match=rf"argument 0 of the batch has the shape \(0, 8\).*{remedy}"):
        capture(model, (full[:0],))
    with pytest.raises(ModelError, match=rf"'input' of the batch has the shape \(0, 8\).*{remedy}"):
        collect_statistics(model, [{"input": full}, {"input": full[:0]}], loss=loss, graph=graph)
    with pytest.raises(ModelError, match=r"operator '0/linear' reads a tensor of shape \(0, 8\).*at least one sample"):
        collect_statistics(model, [full], step=lambda model, batch: model(batch[:0]).sum(), graph=graph)
    with pytest.raises(ModelError, match=rf"argument 0 .*{remedy}"):
        TrainingExample(model=model, args=full[:0])


class WrittenInto(nn.Module):
    """Products whose results are views (of einsum, of a product with a vector), scaled in place or not."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place, self.first, self.head = in_place, nn.Linear(8, 8), nn.Linear(6, 3)
        self.experts = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x):
        y = torch.einsum("bd,edh->beh", self.first(x), self.experts)
        y = (y.div_(3.0) if self.in_place else y / 3.0).tanh().sum(1)
        z = torch.matmul(y, self.head.weight[0])
        z = z.mul_(2.0) if self.in_place else z * 2.0
        return self.head(y).square().mean() + z.square().mean()


def test_writing_into_a_view_that_a_product_returns_hides_no_gradient():
    x, tables = torch.randn(16, 8), []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = WrittenInto(in_place)
        graph = capture(model, (x,))
        found = collect_statistics(model, [x], graph=graph, probes=2, whole_batches=True)
        assert found["einsum"].output_gradient.square_sum > 0
        kinds = ("propagated", "probed")
        formats = device_formats("cpu")
        tables.append([row for kind in kinds for row in sensitivities(graph, found, formats, kind=kind).values()])
    for one, other in zip(*tables, strict=True):
        assert list(one.values()) == pytest.approx(list(other.values()), rel=1e-4)


class Bags(nn.Module):
    """Sums and means of looked-up rows, by a bag or by what a bag computes."""

    def __init__(self, bags):
        super().__init__()
        self.bags, self.head = bags, nn.Linear(16, 1)
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 8, mode=mode, padding_idx=0) for mode in ("sum", "mean"))

    def forward(self, chosen, target):
        if self.bags:
            rows = [table(chosen) for table in self.tables]
        else:
            counted = (chosen > 0).float()[..., None]
            rows = [(table.weight[chosen] * counted).sum(1) for table in self.tables]
            rows[1] = rows[1] / counted.sum(1).clamp(min=1)
        return F.mse_loss(self.head(torch.cat(rows, 1)).tanh(), target)


def test_bags_of_rows_do_not_keep_a_model_from_being_probed():
    batch, values = (torch.randint(0, 20, (16, 3)), torch.randn(16, 1)), []
    for bags in (True, False):
        torch.manual_seed(0)
        model = Bags(bags)
        graph = capture(model, batch)
        found = collect_statistics(model, [batch], graph=graph, probes=2, adaptive_probes=2)
        kinds = ("probed", "progress")
        values.append([sensitivities(graph, found, device_formats("cpu"), kind=k)["head/linear"] for k in kinds])
    for one, other in zip(*values, strict=True):
        assert dict(one) == pytest.approx(dict(other))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_that_are_differentiated_again_are_those_of_torch(mode):
    torch.manual_seed(0)
    table, flat, square = torch.randn(10, 4, requires_grad=True), torch.randint(0, 10, (9,)), torch.full((2, 3), 4)
    calls = [
        ((torch.randint(0, 10, (5, 3)), table), {"padding_idx": 2}),
        ((square, table), {"padding_idx": 4}),  # an empty bag
        ((flat, table, torch.tensor([0, 3, 3, 7])), {"padding_idx": -1}),
        ((flat, table, torch.tensor([0, 3, 3, 7, 9])), {"include_last_offset": True}),
    ]
    if mode == "sum":
        calls.append(((square, table), {"per_sample_weights": torch.rand(2, 3)}))
    for args, kwargs in calls:
        call = OperatorCall("bag", "embedding_bag", "", F.embedding_bag, args, {"mode": mode, **kwargs})
        found, expected = embedding_bag_twice(call), call.run()
        assert torch.allclose(found, expected, atol=1e-6)
        signs = torch.randn_like(expected)
        ours, torchs = (torch.autograd.grad(result, table, signs)[0] for result in (found, expected))
        assert torch.allclose(ours, torchs, atol=1e-6)
