"""Samples by size against the whole; and gradients that sit on few positions, which even samples miss."""

import pytest
import torch
from torch import nn

from qsync_opt.numerics import Granularity, formats_for
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.sensitivity.errors import fixed_point_errors, rounding_errors
from qsync_opt.runtimes.torch.sensitivity.samples import (
    Positions,
    even_positions,
    even_runs,
    places_by_size,
    positions_by_size,
    runs_by_size,
    weights_by_size,
)
from qsync_opt.sensitivity import NoiseOptions, variances


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def heavy(*shape):
    """Numbers of which one in a hundred holds nearly all of the sum."""
    return torch.exp(4 * torch.randn(*shape))


def sample_by_size(sizes, count):
    """Places, and with what weight each counts."""
    total = sizes.sum()
    places = places_by_size(sizes, total, count)
    return places, weights_by_size(sizes[places], total, sizes.numel(), count)


def run_weights(found):
    return weights_by_size(found.runs.square().sum(1), found.total, found.number, found.requested)


def test_every_place_is_met_as_often_as_its_size_and_weight_say():
    sizes = heavy(500)
    expected = 0.5 * sizes / sizes.sum() + 0.5 / 500
    places, weights = sample_by_size(sizes, 400)
    met = torch.bincount(places, minlength=500)
    assert ((met - 400 * expected).abs() < 1 + 1e-3).all()  # systematic: the whole number below or above
    torch.testing.assert_close(weights, 1 / (400 * expected[places]), rtol=1e-4, atol=0)
    again = sample_by_size(sizes, 400)
    assert torch.equal(places, again[0]) and torch.equal(weights, again[1])


def test_a_heavy_sum_is_found_from_a_tenth_of_its_terms():
    sizes = heavy(20_000)
    terms = sizes * (0.5 + torch.rand(20_000))
    places, weights = sample_by_size(sizes, 2_000)
    assert float((weights * terms[places]).sum() / terms.sum()) == pytest.approx(1, abs=0.02)
    assert abs(float(terms[::10].sum() * 10 / terms.sum()) - 1) > 0.05  # evenly spaced terms do not tell


@pytest.mark.parametrize("sizes", [torch.zeros(64), torch.full((64,), torch.inf), torch.full((64,), torch.nan)])
def test_without_a_usable_size_the_sample_is_even_or_nearly(sizes):
    places, weights = sample_by_size(sizes, 8)
    assert int(places.min()) >= 0 and int(places.max()) < 64
    assert weights.isfinite().all()


def test_as_many_as_there_are_is_the_whole():
    places, weights = sample_by_size(torch.rand(9), 9)
    assert places.tolist() == list(range(9)) and weights.tolist() == [1.0] * 9


def test_positions_are_of_all_images_and_channels():
    x = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    found = even_positions(x, 7)
    assert torch.equal(found.of(x), x.permute(0, 2, 3, 1).reshape(-1, 3)[found.images * 20 + found.places])
    assert len(found.places) == 6  # every seventh of 40
    sizes = torch.zeros(2, 1, 4, 5)
    sizes[1, 0, 2, 3] = 1.0
    aimed = positions_by_size(sizes, 10)
    assert ((aimed.positions.images == 1) & (aimed.positions.places == 13)).sum() >= 5
    one = Positions(torch.tensor([1, 0]), torch.tensor([13, 2]))
    assert torch.equal(one.of(x[:1]), torch.stack([x[0, :, 2, 3], x[0, :, 0, 2]]))
    assert torch.equal(one.of(x[:1, :, :1, :1]), x[0, :, 0, 0].expand(2, 3))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(4, 32, 8, 8), (3, 5, 7, 9)])
def test_runs_stand_for_the_tensor(layout, shape):
    x = (heavy(*shape) * torch.randn(shape).sign()).to(memory_format=layout)
    found = runs_by_size(x, x.numel() // 4)
    weights = run_weights(found)
    assert float(found.total) == pytest.approx(float(x.square().sum()), rel=1e-5)
    assert float((weights * found.runs.square().sum(1)).sum()) == pytest.approx(float(x.square().sum()), rel=0.05)
    whole = runs_by_size(x, x.numel())
    assert float(whole.runs.square().sum()) == pytest.approx(float(x.square().sum()), rel=1e-5)
    assert (run_weights(whole) == 1).all()


def test_fixed_point_errors_are_those_of_the_stack():
    x = torch.randn(6, 5) * heavy(6, 1)
    amaxes = {Granularity.TENSOR: x.abs().amax().view(1, 1), Granularity.ROW: x.abs().amax(1, keepdim=True)}
    expected = rounding_errors(x, ("INT8/tensor", "INT8/row"), amaxes)[0]
    found = fixed_point_errors(x, list(amaxes.values()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6 * float(expected.max()))


class Convolved(nn.Module):
    def __init__(self, *args, **options):
        super().__init__()
        self.conv = nn.Conv2d(*args, bias=False, **options)

    def forward(self, x, g):
        return (self.conv(x) * g).sum()


CONVOLUTIONS = {
    "pointwise": ((16, 24, 1), {}),
    "pointwise, steps of 2": ((16, 24, 1), {"stride": 2}),
    "3 x 3": ((16, 24, 3), {"padding": 1}),
    "3 x 3 grouped": ((16, 24, 3), {"padding": 1, "stride": 2, "groups": 4}),
}


def _concentrated(kind):
    """Rectified activations, uneven by position and image, and a gradient of which few positions hold most."""
    sizes, options = CONVOLUTIONS[kind]
    model = Convolved(*sizes, **options)
    x = torch.randn(32, 16, 12, 12).relu() * heavy(32, 1, 12, 12).clamp(max=20) * (0.2 + torch.rand(32, 1, 1, 1))
    shape = model.conv(x).shape
    return model, x.detach(), torch.randn(shape) * heavy(shape[0], 1, *shape[2:])


@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
def test_samples_of_a_convolution_stand_for_a_gradient_on_few_positions(kind):
    model, x, g = _concentrated(kind)
    part, whole = (
        collect_statistics(model, [(x.clone().requires_grad_(), g)], sample_elements=limit).operators[0]
        for limit in (x.numel() // 6, 1 << 30)
    )
    formats = formats_for(("FP32", "INT8", "BF16"), "BF16")
    for precision, options in (
        ("INT8", NoiseOptions()),
        ("INT8", NoiseOptions(activation_granularity=Granularity.ROW)),
        ("INT8", NoiseOptions(backward="eight", weight_granularity=Granularity.TENSOR)),
        ("BF16", NoiseOptions()),
    ):
        found, expected = (variances(s, precision, formats[precision], options) for s in (part, whole))
        for name in ("output", "first_gradient", "second_gradient"):
            ratio = getattr(found, name).total / getattr(expected, name).total
            assert ratio == pytest.approx(1, abs=0.08), (precision, options, name)


@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
def test_the_sampled_variance_of_a_weight_gradient_is_the_measured_one(kind):
    """Monte Carlo in float64 with a quantizer of the test's own."""
    model, x, g = _concentrated(kind)
    found = collect_statistics(model, [(x, g)], sample_elements=x.numel() // 6).operators[0]
    full = formats_for(("FP32", "INT8"), "FP32")["INT8"]
    predicted = variances(found, "INT8", full, NoiseOptions(weight_granularity=Granularity.TENSOR)).second_gradient
    scale, weight = x.double().abs().max() / 127, model.conv.weight.detach().double().requires_grad_()

    def gradient(x):
        return torch.autograd.grad(model.conv._conv_forward(x, weight, None), weight, g.double())[0]

    exact, measured = gradient(x.double()), []
    for _ in range(60):
        noisy = torch.floor(x.double() / scale + torch.rand(x.shape, dtype=torch.float64)) * scale
        measured.append(float((gradient(noisy) - exact).square().sum()))
    assert predicted.total * len(measured) / sum(measured) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_even_runs_stand_for_a_tensor_whose_channels_differ(layout):
    x = torch.randn(16, 64, 24, 24) * torch.logspace(-1, 1, 64).view(1, -1, 1, 1)
    x = x.to(memory_format=layout)
    some = even_runs(x, 1 << 15)
    assert some.shape == (1 << 15,)
    assert torch.isin(some, x).all()
    kinds = ("BF16", "FP16")
    whole, part = (rounding_errors(t.flatten(), kinds, {})[0].mean(1) / t.square().mean() for t in (x, some))
    torch.testing.assert_close(part, whole, rtol=0.03, atol=0)
    assert torch.equal(even_runs(x[:1, :2], 1 << 15).sort().values, x[:1, :2].flatten().sort().values)
