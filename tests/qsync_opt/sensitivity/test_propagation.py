import math

import pytest

from qsync_opt.model import Operator, OpGraph, ParameterSpec, Role, TensorSpec
from qsync_opt.sensitivity import (
    ModelStatistics,
    Noise,
    OperatorKind,
    OperatorStatistics,
    ProductSizes,
    Signal,
    TensorStatistics,
)
from qsync_opt.sensitivity.propagation import Effect, Propagation

ROWS, WIDTH = 8, 16


def node(name: str, op_type: str, *inputs: str) -> Operator:
    spec = TensorSpec(shape=(ROWS, WIDTH), dtype="float32")
    return Operator(
        name=name,
        op_type=op_type,
        module="",
        role=Role.ADJUSTABLE if op_type in ("linear", "matmul") else Role.DEPENDENT,
        inputs=inputs,
        input_specs=(spec,),
        output_specs=(spec,),
        parameters=(f"{name}.weight",) if op_type == "linear" else (),
        onnx_nodes=(),
        flops=1,
        num_bytes=1,
        signature=op_type,
    )


def graph(*operators: Operator) -> OpGraph:
    weight = TensorSpec(shape=(WIDTH, WIDTH), dtype="float32")
    names = [name for operator in operators for name in operator.parameters]
    return OpGraph(
        name="g", operators=operators, parameters=tuple(ParameterSpec(name=name, spec=weight) for name in names)
    )


def tensor(elements: int, square_sum: float) -> TensorStatistics:
    return TensorStatistics(elements=elements, amax=1.0, square_sum=square_sum)


def linear(name: str, *, output: float, gradient: float, weight: float = 3.0) -> OperatorStatistics:
    """White signals: a product of independent factors, so every weight along a chain is 1."""
    size = ROWS * WIDTH
    return OperatorStatistics(
        name=name,
        op_type="linear",
        kind=OperatorKind.PRODUCT,
        calls=1,
        products=(ProductSizes(products=1, rows=ROWS, contraction=WIDTH, columns=WIDTH),),
        first_parameter=None,
        second_parameter=f"{name}.weight",
        first=tensor(size, output),
        second=tensor(WIDTH * WIDTH, WIDTH),
        output=tensor(size, output),
        output_gradient=tensor(size, gradient),
        first_gradient=tensor(size, gradient),
        second_gradient=tensor(WIDTH * WIDTH, weight),
    )


def model(*operators: OperatorStatistics, signals: dict[str, Signal] | None = None) -> ModelStatistics:
    return ModelStatistics(batches=1, operators=operators, signals=signals or {})


RESIDUAL = graph(
    node("a", "linear"),
    node("b", "linear", "a"),
    node("act", "gelu", "b"),
    node("c", "linear", "act"),
    node("sum", "add", "a", "c"),
    node("head", "linear", "sum"),
)


def own(operator: OperatorStatistics) -> float:
    """Sum over rows of |x|^2 |g|^2 for evenly spread signals."""
    return operator.products[0].volume * operator.first.mean_square * operator.output_gradient.mean_square


def test_forward_noise_reaches_every_later_weight_of_a_chain() -> None:
    chain = graph(node("a", "linear"), node("b", "linear", "a"), node("c", "linear", "b"))
    a, b, c = (linear(n, output=128.0, gradient=2.0, weight=w) for n, w in (("a", 3.0), ("b", 5.0), ("c", 7.0)))
    found = Propagation(chain, model(a, b, c))
    effect = found.output_effect("a")
    assert effect.independent == pytest.approx(own(b) + own(c))
    assert effect.shared == pytest.approx(5.0 + 7.0)
    assert found.output_effect("c") == Effect()


def test_gradient_noise_reaches_every_earlier_weight_of_a_chain() -> None:
    chain = graph(node("a", "linear"), node("b", "linear", "a"), node("c", "linear", "b"))
    parts = [linear(n, output=128.0, gradient=2.0, weight=w) for n, w in (("a", 3.0), ("b", 5.0), ("c", 7.0))]
    effect = Propagation(chain, model(*parts)).input_gradient_effect("c", 0)
    assert effect.independent == pytest.approx(own(parts[0]) + own(parts[1]))
    assert effect.shared == pytest.approx(3.0 + 5.0)


def test_a_sum_dilutes_a_branch_by_its_share_of_the_energy() -> None:
    parts = [
        linear("a", output=300.0, gradient=2.0),
        linear("b", output=100.0, gradient=1.0),
        linear("c", output=100.0, gradient=1.0),
        linear("head", output=400.0, gradient=1.0),
    ]
    found = Propagation(RESIDUAL, model(*parts))
    assert found.output_effect("c").independent == pytest.approx(own(parts[3]) * 100 / 400)
    head_only = found.output_effect("sum").independent
    assert head_only == pytest.approx(own(parts[3]))


def test_gradient_of_a_branch_is_diluted_where_branches_part() -> None:
    parts = [
        linear("a", output=300.0, gradient=4.0),
        linear("b", output=100.0, gradient=1.0),
        linear("c", output=100.0, gradient=1.0),
        linear("head", output=400.0, gradient=1.0),
    ]
    effect = Propagation(RESIDUAL, model(*parts)).input_gradient_effect("b", 0)
    assert effect.independent == pytest.approx(own(parts[0]) * 1.0 / 4.0)


def test_a_mask_of_huge_numbers_does_not_amplify() -> None:
    chain = graph(
        node("a", "linear"),
        node("mask", "masked_fill", "a"),
        node("soft", "softmax", "mask"),
        node("b", "linear", "soft"),
    )
    signals = {"soft": Signal(elements=ROWS * WIDTH, input_square_sum=1e18, output_square_sum=8.0)}
    a, b = linear("a", output=128.0, gradient=1.0), linear("b", output=8.0, gradient=1.0)
    effect = Propagation(chain, model(a, b, signals=signals)).output_effect("a")
    assert effect.independent == pytest.approx(own(b) * 128.0 / (ROWS * WIDTH))


def test_rectifiers_add_sign_changes_that_grow_with_the_root_of_the_noise() -> None:
    chain = graph(node("a", "linear"), node("r", "relu", "a"), node("b", "linear", "r"))
    a, b = (linear(n, output=128.0, gradient=2.0) for n in "ab")
    effect = Propagation(chain, model(a, b)).output_effect("a")
    assert effect.kink == pytest.approx(2 / math.pi * own(a))
    small, large = (effect.variance(Noise(independent=r), 1.0) for r in (1e-8, 4e-8))
    assert large == pytest.approx(2 * small, rel=1e-3)


def test_noise_that_reaches_the_loss_changes_its_gradient() -> None:
    chain = graph(node("a", "linear"), node("loss", "mse_loss", "a"))
    signals = {"loss": Signal(elements=ROWS * WIDTH, input_square_sum=1.0, output_square_sum=1.0, curvature=0.5)}
    a = linear("a", output=128.0, gradient=2.0)
    assert Propagation(chain, model(a, signals=signals)).output_effect("a").independent == pytest.approx(0.5 * own(a))


def test_a_signal_of_another_size_is_not_believed() -> None:
    chain = graph(node("a", "linear"), node("loss", "mse_loss", "a"))
    signals = {"loss": Signal(elements=3, input_square_sum=1.0, output_square_sum=1.0, curvature=0.5)}
    assert (
        Propagation(chain, model(linear("a", output=1.0, gradient=1.0), signals=signals)).output_effect("a") == Effect()
    )


def test_each_kind_of_noise_has_its_own_effect() -> None:
    effect = Effect(independent=2.0, shared=3.0, kink=5.0)
    assert effect.variance(Noise(independent=0.75), 3.0) == pytest.approx(2.0 * 0.25 + 5.0 * 0.5)
    assert effect.variance(Noise(shared=0.75), 3.0) == pytest.approx(3.0 * 0.25 + 5.0 * 0.5)
    assert effect.variance(Noise(independent=0.25, shared=0.5), 3.0) == pytest.approx(
        2.0 * 0.25 / 3 + 3.0 * 0.5 / 3 + 5.0 * 0.5
    )
    assert effect.variance(Noise(independent=1.0, shared=1.0), 0.0) == 0.0
    assert effect.weighted(0.25) == Effect(independent=0.5, shared=0.75, kink=2.5)
    assert effect + Effect(independent=1.0, shared=10.0, kink=100.0) == Effect(independent=3.0, shared=13.0, kink=105.0)


def with_shortcut(op_type: str, *inputs: str) -> OpGraph:
    """Linear layers a and b, an operator of a kind on them, whose result is added to that of a; then a last layer."""
    return graph(
        node("a", "linear"),
        node("b", "linear"),
        node("f", op_type, *inputs),
        node("sum", "add", "f", "a"),
        node("head", "linear", "sum"),
    )


@pytest.mark.parametrize(
    ("op_type", "inputs", "energy"),
    [
        ("gelu", ("a",), 256.0),  # as large as what it reads
        ("tanh", ("b",), 384.0),
        ("max", ("a", "b"), 384.0),  # as the larger of two
        ("mul", ("a", "b"), 128 * 2.0 * 3.0),  # independent factors
        ("cat", ("a", "b"), 256.0 + 384.0),
        ("layer_norm", ("a",), 128.0),  # a mean square of 1
    ],
)
def test_energies_that_nobody_measured_follow_from_the_inputs(
    op_type: str, inputs: tuple[str, ...], energy: float
) -> None:
    a, b = linear("a", output=256.0, gradient=2.0), linear("b", output=384.0, gradient=2.0)
    head = linear("head", output=100.0, gradient=1.0)
    found = Propagation(with_shortcut(op_type, *inputs), model(a, b, head))
    # The sum holds at least what its branches do.
    assert found.output_effect("f").independent == pytest.approx(own(head) * energy / (energy + 256.0))


def test_the_energy_that_a_reader_saw_counts_before_any_rule() -> None:
    net = graph(
        node("a", "linear"), node("act", "gelu", "a"), node("b", "linear", "act"), node("sum", "add", "act", "a"),
        node("head", "linear", "sum"),
    )  # fmt: skip
    a, b = linear("a", output=256.0, gradient=2.0), linear("b", output=64.0, gradient=1.0)
    head = linear("head", output=100.0, gradient=1.0)
    effect = Propagation(net, model(a, b, head)).output_effect("act")
    assert effect.independent == pytest.approx(own(b) + own(head) * 64.0 / (64.0 + 256.0))


@pytest.mark.parametrize(
    ("op_type", "inputs", "share"),
    [
        ("gelu", ("a",), 1.0),  # hands its gradient on as it is
        ("mul", ("a", "b"), 3.0),  # times the other factor
        ("layer_norm", ("a",), 128.0 / 256.0),  # over the size of its input
    ],
)
def test_gradients_that_nobody_measured_follow_from_the_readers(
    op_type: str, inputs: tuple[str, ...], share: float
) -> None:
    # The gradient of a is 8 times that of the sum, which the last layer delivered.
    a, b = linear("a", output=256.0, gradient=8.0), linear("b", output=384.0, gradient=2.0)
    head = linear("head", output=100.0, gradient=1.0)
    effect = Propagation(with_shortcut(op_type, *inputs), model(a, b, head)).input_gradient_effect("f", 0)
    assert effect.independent == pytest.approx(own(a) * share / 8.0)
    assert effect.shared == pytest.approx(3.0 * share / 8.0)
