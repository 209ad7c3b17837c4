import json

from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.io import decode, encode
from qsync_opt.numerics import Granularity, Rounding, noise_kinds
from qsync_opt.sensitivity import (
    ModelStatistics,
    OperatorKind,
    OperatorStatistics,
    ProductSizes,
    RoundingFactor,
    TensorStatistics,
    merge_statistics,
)

values = st.floats(min_value=0, max_value=1e6, allow_subnormal=False).map(lambda x: round(x, 6))


@st.composite
def tensors(draw, *, elements: int, scaled: bool) -> TensorStatistics:
    return TensorStatistics(
        elements=elements,
        amax=draw(values),
        square_sum=draw(values),
        mean_square_amax={str(g): draw(values) for g in Granularity} if scaled else {},
        rounding={
            kind: RoundingFactor(stochastic=draw(values), nearest=draw(values))
            for kind in noise_kinds(scaled=scaled)[:5]
        },
    )


@st.composite
def models(draw) -> ModelStatistics:
    operator = OperatorStatistics(
        name="fc/linear",
        op_type="linear",
        kind=OperatorKind.PRODUCT,
        calls=1,
        products=(ProductSizes(products=1, rows=2, contraction=5, columns=3),),
        first_parameter=None,
        second_parameter="fc.weight",
        first=draw(tensors(elements=10, scaled=True)),
        second=draw(tensors(elements=15, scaled=True)),
        output=draw(tensors(elements=6, scaled=False)),
        output_gradient=draw(tensors(elements=6, scaled=False)),
        alignment={"first>output/floating": draw(values)},
    )
    return ModelStatistics(batches=draw(st.integers(1, 5)), operators=(operator,))


def variances(model: ModelStatistics) -> list[float]:
    operator = model.operators[0]
    found = [
        tensor.variance(kind, rounding)
        for _, tensor in operator.tensors()
        for kind in tensor.rounding
        for rounding in Rounding
    ]
    path = operator.alignment["first>output/floating"] * operator.first.mean_square * operator.second.mean_square
    return [*found, path]


@given(models())
def test_files_keep_everything(model: ModelStatistics) -> None:
    data = json.loads(json.dumps(encode(model)))
    assert decode(ModelStatistics, data, "statistics") == model


@settings(max_examples=60)
@given(st.lists(models(), min_size=1, max_size=4))
def test_merging_averages_variances_in_any_order_and_grouping(parts: list[ModelStatistics]) -> None:
    def close(a: list[float], b: list[float]) -> bool:
        return all(abs(x - y) <= 1e-9 * max(abs(x), abs(y), 1e-12) for x, y in zip(a, b, strict=True))

    weights = [part.batches for part in parts]
    rows = [variances(part) for part in parts]
    wanted = [sum(w * row[i] for w, row in zip(weights, rows, strict=True)) / sum(weights) for i in range(len(rows[0]))]
    assert close(variances(merge_statistics(parts)), wanted)
    assert close(variances(merge_statistics(parts[::-1])), wanted)
    assert close(variances(merge_statistics([merge_statistics(parts[:1]), *parts[1:]])), wanted)
