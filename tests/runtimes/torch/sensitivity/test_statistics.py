import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.numerics import Granularity, PrecisionFormats, Rounding
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import (
    NoiseOptions,
    OperatorKind,
    load_statistics,
    merge_statistics,
    save_statistics,
    variances,
)

FULL = PrecisionFormats(output="FP32", gradient_input="FP32", gradient_output="FP32")


class Net(nn.Module):
    """A convolution, a shared linear layer that is used twice, a lookup, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.norm = nn.BatchNorm1d(12)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(12, 12)
        self.head = nn.Linear(12, 11)

    def forward(self, tokens, targets):
        h = self.table(tokens)
        h = h + self.act(self.norm(self.conv(h.transpose(1, 2)))).transpose(1, 2)
        h = self.drop(self.fc(self.fc(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def batches(count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [tuple(torch.randint(0, 11, (3, 7), generator=generator) for _ in range(2)) for _ in range(count)]


def norm2(x: torch.Tensor) -> float:
    return float(x.detach().double().square().sum())


def test_moments_are_those_of_the_tensors_and_gradients_are_the_operators_own():
    x = torch.randn(5, 6)
    first, second = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    model = nn.ModuleList([first, second])
    model.forward = lambda x: (first(x) * second(x)).sum()
    statistics = collect_statistics(model, [x.clone().requires_grad_()])
    a, b = first(x), second(x)
    found = statistics["0/linear"]
    g = b.detach()  # gradient of the first result
    assert found.first.square_sum == pytest.approx(norm2(x))
    assert found.first.amax == pytest.approx(float(x.abs().max()))
    assert found.second.square_sum == pytest.approx(norm2(first.weight))
    assert found.output.square_sum == pytest.approx(norm2(a))
    assert found.output_gradient.square_sum == pytest.approx(norm2(g))
    assert found.second_gradient is not None
    assert found.second_gradient.square_sum == pytest.approx(norm2(g.T @ x))
    assert found.first_gradient is not None  # not the gradient of x, to which both layers contribute
    assert found.first_gradient.square_sum == pytest.approx(norm2(g @ first.weight))
    assert found.second_parameter == "0.weight"
    row, channel = x.abs().amax(1), x.abs().amax(0)
    assert found.first.mean_square_amax == pytest.approx(
        {"tensor": float(x.abs().max()) ** 2, "row": norm2(row) / 5, "channel": norm2(channel) / 6}
    )
    assert found.second.mean_square_amax["channel"] == pytest.approx(norm2(first.weight.abs().amax(1)) / 4)


def test_a_result_that_is_used_twice_has_its_gradients_added():
    fc = nn.Linear(3, 3, bias=False)
    model = nn.ModuleList([fc])

    def forward(x):
        z = fc(x)
        return (z * 2).sum() + (z * 3).sum()

    model.forward = forward
    found = collect_statistics(model, [torch.randn(4, 3)])["0/linear"]
    assert found.output_gradient.square_sum == pytest.approx(25 * 12)


def test_everything_about_the_model_is_as_before():
    model = Net()
    model.fc.bias.grad = torch.full((12,), 7.0)
    before, grad, state = copy.deepcopy(model.state_dict()), model.fc.bias.grad, torch.get_rng_state()
    collect_statistics(model, batches(2), probes=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.fc.bias.grad is grad
    assert float(grad[0]) == 7.0
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["fc.bias"]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert "forward" not in vars(model.fc)


def test_the_model_is_as_before_when_a_batch_fails():
    model = Net()
    before = copy.deepcopy(model.state_dict())

    def broken() -> Iterator[object]:
        yield batches()[0]
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        collect_statistics(model, broken())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert "forward" not in vars(model.fc)


def test_same_batches_same_statistics_and_files_keep_them(tmp_path):
    model = Net()
    found = collect_statistics(model, batches(2), probes=2)
    assert collect_statistics(model, batches(2), probes=2) == found
    save_statistics(found, tmp_path / "statistics.json")
    assert load_statistics(tmp_path / "statistics.json") == found
    model.fc.weight.data.mul_(2)
    assert collect_statistics(model, batches(2), probes=2)["fc/linear"] != found["fc/linear"]


def test_ranks_merge_to_what_one_process_sees():
    model = Net().eval()  # without dropout, a batch means the same wherever it comes
    data = batches(3)
    together = collect_statistics(model, data)
    merged = merge_statistics([collect_statistics(model, data[:2]), collect_statistics(model, data[2:])])
    assert merged.batches == 3
    for operator in together.operators:
        for precision in ("INT8", "BF16"):
            one, other = (variances(s[operator.name], precision, FULL).output.total for s in (together, merged))
            assert other == pytest.approx(one)


def test_graph_and_statistics_name_the_same_operators():
    model = Net()
    graph = capture(model, batches()[0])
    found = collect_statistics(model, batches(), graph=graph)
    assert {o.name for o in found.operators} == {
        "table/embedding",
        "conv/conv1d",
        "fc/linear",
        "fc/linear_1",
        "head/linear",
    }
    assert found.model_fingerprint == graph.fingerprint()
    assert found["table/embedding"].kind is OperatorKind.LOOKUP
    assert found["fc/linear"].second_parameter == found["fc/linear_1"].second_parameter == "fc.weight"


def test_operators_of_the_graph_that_do_not_run_are_named():
    model = Net()
    graph = capture(model, batches()[0])

    def shorter(model, batch):
        return model.head(model.fc(model.table(batch[0]))).sum()

    with pytest.raises(ModelError, match="adjustable operators of graph 'Net' did not run, the first is 'conv/conv1d'"):
        collect_statistics(model, batches(), step=shorter, graph=graph)


def test_a_result_the_loss_ignores_is_warned_about_and_counts_as_zero():
    class Ignored(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.unused(x)
            return self.used(x).sum()

    with pytest.warns(UserWarning, match="does not depend on the result of 'unused/linear'"):
        found = collect_statistics(Ignored(), [torch.randn(2, 3)])
    assert found["unused/linear"].output_gradient.square_sum == 0
    gradient = variances(found["unused/linear"], "INT8", FULL).second_gradient
    assert gradient is not None
    assert gradient.total == 0


def test_frozen_weights_have_no_gradient_but_their_noise_counts():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    found = collect_statistics(model, [torch.randn(8, 3)], step=lambda m, b: m(b).square().mean())["0/linear"]
    assert found.second_gradient is None
    assert found.first_gradient is None
    assert variances(found, "INT8", FULL).output.total > 0


def test_an_operator_that_runs_twice_per_step_counts_twice():
    fc = nn.Linear(3, 3)
    batch = torch.randn(4, 3)
    once = collect_statistics(fc, [batch], step=lambda m, b: m(b).sum())["linear"]
    twice = collect_statistics(fc, [batch], step=lambda m, b: m(b).sum() + m(b).sum())["linear"]
    assert (once.calls, twice.calls) == (1, 2)
    assert variances(twice, "INT8", FULL).output.total == pytest.approx(2 * variances(once, "INT8", FULL).output.total)


def test_inplace_operations_after_an_operator_do_not_spoil_its_gradient():
    def loss(inplace: bool):
        def step(model, batch):
            return F.relu(model(batch), inplace=inplace).square().sum()

        return step

    fc, batch = nn.Linear(3, 3), torch.randn(4, 3)
    with_it, without = (collect_statistics(fc, [batch], step=loss(flag))["linear"] for flag in (True, False))
    assert with_it == without


def test_tied_weights_have_one_name_and_separate_contributions():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return F.cross_entropy(self.head(self.table(tokens)), tokens)

    model = Tied()
    found = collect_statistics(model, [torch.arange(5)])
    assert found["table/embedding"].second_parameter == found["head/linear"].second_parameter == "table.weight"
    h = model.table.weight.detach().clone().requires_grad_()
    w = model.table.weight.detach().clone().requires_grad_()
    F.cross_entropy(h @ w.T, torch.arange(5)).backward()
    assert found["head/linear"].second_gradient is not None
    assert found["head/linear"].second_gradient.square_sum == pytest.approx(norm2(w.grad))
    assert found["table/embedding"].second_gradient is not None
    assert found["table/embedding"].second_gradient.square_sum == pytest.approx(norm2(h.grad))


def test_padding_of_a_lookup_gets_no_gradient_noise():
    model = nn.Embedding(5, 4, padding_idx=2)
    tokens = torch.tensor([0, 2, 2, 4])
    found = collect_statistics(model, [tokens], step=lambda m, b: (m(b) * torch.randn(4, 4)).sum())["embedding"]
    assert found.alignment["gradient>second_gradient/floating"] < 0.9
    options = PrecisionFormats(output="BF16", gradient_input="BF16", gradient_output="BF16")
    assert variances(found, "BF16", options).second_gradient is not None


def test_rounding_factors_know_zeros_subnormals_and_exact_numbers():
    x = torch.zeros(16, 16)
    x[:, 0] = 1.0
    fc = nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        fc.weight.copy_(fc.weight.to(torch.bfloat16))
    step = lambda m, b: (m(b) * 1e-9).sum()  # noqa: E731
    found = collect_statistics(fc, [x], step=step)["linear"]
    assert (
        found.first.variance("INT8/tensor", Rounding.STOCHASTIC) == 0
    )  # zeros and the largest element are on the grid
    assert found.second.variance("BF16", Rounding.NEAREST) == 0  # pretrained in BF16
    assert found.second.variance("FP16", Rounding.NEAREST) == 0
    gradient = found.output_gradient  # 1e-9 is flushed to zero in FP16, and fine in BF16
    assert gradient.variance("FP16", Rounding.NEAREST) == pytest.approx(gradient.mean_square)
    assert gradient.variance("BF16", Rounding.NEAREST) < 1e-4 * gradient.mean_square


def test_sampling_changes_little():
    fc = nn.Linear(64, 32)
    batch = torch.randn(512, 64)
    step = lambda m, b: m(b).square().mean()  # noqa: E731
    whole = collect_statistics(fc, [batch], step=step)["linear"]
    sampled = collect_statistics(fc, [batch], step=step, sample_elements=4096)["linear"]
    options = NoiseOptions(activation_granularity=Granularity.ROW)
    for name in ("output", "second_gradient"):
        a, b = (getattr(variances(s, "INT8", FULL, options), name).total for s in (whole, sampled))
        assert b == pytest.approx(a, rel=0.1)
        assert b != a


@pytest.mark.parametrize(
    ("model", "data", "step", "message"),
    [
        (nn.Linear(2, 2), [], None, "no batches"),
        (nn.Linear(2, 2), [torch.ones(3, 2)], None, "returned Tensor without a scalar loss: pass loss="),
        (nn.Linear(2, 2), [torch.ones(3, 2)], lambda m, b: m(b).detach().sum(), "does not depend on any trainable"),
        (
            nn.Linear(2, 2),
            [torch.ones(3, 2)],
            nn.Linear.forward,
            r"returned a tensor of shape \(3, 2\): it must return",
        ),
        (nn.Linear(2, 2), [torch.ones(3, 2)], lambda m, b: None, "returned NoneType: it must return the loss"),
        (nn.Linear(2, 2), [torch.ones(3, 2)], lambda m, b: m.weight.sum(), "no adjustable operator ran"),
        (nn.Linear(2, 2), [torch.full((3, 2), torch.inf)], lambda m, b: m(b).sum(), "'linear': first is not finite"),
        (nn.Linear(2, 2).bfloat16(), [torch.ones(3, 2).bfloat16()], lambda m, b: m(b).sum(), "'linear' reads bfloat16"),
        (nn.DataParallel(nn.Linear(2, 2)), [torch.ones(3, 2)], None, r"wrapped in DataParallel: pass .* model\.module"),
    ],
)
def test_unusable_input_is_named(model, data, step, message):
    with pytest.raises(ModelError, match=message):
        collect_statistics(model, data, step=step)


def test_batches_of_different_shapes_are_refused():
    fc = nn.Linear(2, 2)
    with pytest.raises(ProblemError, match=r"operator 'linear' differs between parts .* batches of one shape"):
        collect_statistics(fc, [torch.ones(3, 2), torch.ones(4, 2)], step=lambda m, b: m(b).sum())


def test_default_step_understands_the_usual_outputs():
    class Output(dict):
        loss: torch.Tensor

    class Model(nn.Module):
        def __init__(self, pack):
            super().__init__()
            self.fc, self.pack = nn.Linear(2, 2), pack

        def forward(self, x):
            return self.pack(self.fc(x).sum())

    def attribute(loss):
        output = Output()
        output.loss = loss
        return output

    for pack in (lambda loss: loss, lambda loss: (loss, 1), lambda loss: {"loss": loss}, attribute):
        for batch in (torch.ones(3, 2), (torch.ones(3, 2),), {"x": torch.ones(3, 2)}):
            assert "fc/linear" in collect_statistics(Model(pack), [batch])


def test_progress_is_reported():
    seen = []
    collect_statistics(nn.Linear(2, 2), [torch.ones(3, 2)] * 3, step=lambda m, b: m(b).sum(), progress=seen.append)
    assert seen == [1, 2, 3]
