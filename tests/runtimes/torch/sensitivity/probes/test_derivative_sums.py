"""Sums over many derivatives at once: those of each alone, in FP64."""

import pytest
import torch

from qsync_opt.runtimes.torch.sensitivity.probes import DerivativeSums, ParameterGradients
from qsync_opt.runtimes.torch.sensitivity.probes import taps as derivative_sums


def _numbers(sums):
    found = {}
    for key, names, values in sums.numbers:
        for name, value in zip(names, values.tolist(), strict=True):
            added = value**2 if name.startswith("~") else value
            found[key, name.strip("~")] = found.get((key, name.strip("~")), 0.0) + added
    return found


def _expected(derivative, values):
    d, v = derivative.double(), values.double()
    steps = (v * 127 / v.abs().max().clamp(min=1e-30)).frac().abs()
    fixed = steps - steps**2
    return {
        "plain": (d**2).sum(),
        "values": (v**2).sum(),
        "floating": (d * v).square().sum(),
        "fixed": (d**2 * fixed).sum(),
        "fixed_weight": fixed.sum(),
    }


@pytest.mark.parametrize("together", [1 << 22, 700])
def test_sums_do_not_depend_on_what_waits_together(monkeypatch, together):
    monkeypatch.setattr(derivative_sums, "_TOGETHER", together)
    torch.manual_seed(0)
    sums, inputs = DerivativeSums(None), {}
    for i, (tensor, shape) in enumerate(
        [("first", (5, 60)), ("output", (900,)), ("second", (30, 50)), ("first", (7,))]
    ):
        key = (f"operator {i}", tensor, 0)
        inputs[key] = torch.randn(shape), torch.randn(shape) * 10.0**i
        sums.add(key, *inputs[key])
    inputs["none", "first", 0] = torch.randn(4), torch.zeros(4)
    sums.add(("none", "first", 0), *inputs["none", "first", 0])
    sums.flush()
    found = _numbers(sums)
    for key, (derivative, values) in inputs.items():
        for name, expected in _expected(derivative, values).items():
            if key[1] == "output" and name.startswith("fixed"):
                assert (key, name) not in found  # a result is not quantized
            else:
                assert found[key, name] == pytest.approx(float(expected), rel=1e-4, abs=1e-12)


def test_what_is_kept_are_the_same_elements_of_each():
    torch.manual_seed(0)
    sums = DerivativeSums(lambda key, elements: key[0] == "a" and elements == 40_000)
    d, v = torch.randn(40_000), torch.randn(40_000)
    sums.add(("a", "second", 0), d, v)
    sums.add(("b", "second", 0), d, v)
    sums.flush()
    assert list(sums.kept) == [("a", "second", 0)]
    (kept,) = sums.kept["a", "second", 0]
    places = [int((v == x).nonzero()[0]) for x in kept[1, :20]]
    assert torch.equal(d[places], kept[0, :20])
    steps = (v[places] * 127 / v.abs().max()).frac().abs()
    torch.testing.assert_close(kept[2, :20], steps - steps**2, rtol=1e-3, atol=1e-5)


def test_gradients_of_parameters_are_summed_up_without_their_derivative():
    torch.manual_seed(0)
    gradients, parameter, other = ParameterGradients(), torch.zeros(3), torch.zeros(3)
    g, h = torch.randn(40), torch.randn(2, 5)
    gradients.add(("a", "second_gradient", 0), parameter, g)
    gradients.add(("b", "second_gradient", 0), other, h)
    found = gradients.sums({id(parameter): torch.tensor(3.0)})
    a, b = found["a", "second_gradient", 0], found["b", "second_gradient", 0]
    assert (a.plain, a.elements) == (9 * 40, 40)
    assert a.values == pytest.approx(float(g.double().square().sum()))
    assert a.floating == pytest.approx(9 * a.values)
    assert (b.plain, b.floating) == (10, pytest.approx(float(h.double().square().sum())))
