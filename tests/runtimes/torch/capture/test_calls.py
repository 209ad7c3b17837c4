"""Recorded calls: made-up arguments of the right kind, and FLOPs."""

import operator

import pytest
import torch

from qsync_opt.errors import ModelError
from qsync_opt.model import TensorSpec
from qsync_opt.runtimes.torch.capture import RecordedCall, TensorArgument, count_flops, index_bound

aten = torch.ops.aten


def argument(
    *shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None, **more: object
) -> TensorArgument:
    dense = torch.empty(shape, device="meta").stride()
    return TensorArgument(spec=TensorSpec(shape=shape, dtype=dtype), stride=stride or dense, **more)  # type: ignore[arg-type]


def test_made_up_tensors_have_shape_type_stride_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    transposed = argument(3, 4, stride=(1, 3), requires_gradient=True).random("cpu", generator)
    assert (transposed.shape, transposed.stride(), transposed.is_leaf) == ((3, 4), (1, 3), True)
    assert transposed.requires_grad
    expanded = argument(5, 4, dtype="bfloat16", stride=(0, 1)).random("cpu", generator)
    assert (expanded.dtype, expanded.untyped_storage().nbytes()) == (torch.bfloat16, 2 * 4)
    assert argument(0, 4).random("cpu", generator).shape == (0, 4)
    assert argument(2, dtype="complex64").random("cpu", generator).dtype is torch.complex64


def test_made_up_indices_are_valid_and_masks_hide_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    indices = argument(1000, dtype="int64", upper=7).random("cpu", generator)
    assert (int(indices.min()), int(indices.max())) == (0, 6)
    assert not argument(9, dtype="int64").random("cpu", generator).any()
    assert argument(9, dtype="bool").random("cpu", generator).all()


def test_the_same_seed_gives_the_same_arguments() -> None:
    call = RecordedCall(target=aten.cat.default, args=((argument(2, 3), argument(4, 3)), 0))
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    first, second = (call.build(lambda a, g=g: a.random("cpu", g))[0] for g in generators)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert call.target(*first).shape == (6, 3)


def test_a_call_moves_to_another_device() -> None:
    call = RecordedCall(target=aten.zeros.default, args=([2, 3],), kwargs={"device": torch.device("cpu")})
    args, kwargs = call.build(TensorArgument.meta, "meta")
    assert call.target(*args, **kwargs).device.type == "meta"


@pytest.mark.parametrize(
    ("op_type", "shapes", "bound"),
    [
        ("embedding", [(9, 4)], 9),
        ("cross_entropy_loss", [(8, 5)], 5),
        ("cross_entropy_loss", [(5,)], 5),
        ("gather", [(3, 4)], 3),
        ("relu", [(3, 4)], None),
        ("gather", [], None),
    ],
)
def test_bounds_of_indices(op_type: str, shapes: list[tuple[int, ...]], bound: int | None) -> None:
    assert index_bound(op_type, tuple(torch.empty(shape) for shape in shapes)) == bound


def test_signatures_tell_parameters_from_activations() -> None:
    def call(**more: object) -> RecordedCall:
        return RecordedCall(target=aten.linear.default, args=(argument(2, 4), argument(3, 4, **more)))

    assert call().signature("linear") == call().signature("linear")
    assert call().signature("linear") != call(state="w", is_parameter=True).signature("linear")
    # The name of the parameter is of no account.
    assert call(state="v", is_parameter=True).signature("l") == call(state="w", is_parameter=True).signature("l")


def test_flops_of_calls() -> None:
    def flops(target: object, *args: object) -> int:
        return count_flops("x", RecordedCall(target=target, args=args))  # type: ignore[arg-type]

    heads = argument(2, 4, 5, 8)
    assert flops(aten.linear.default, argument(2, 7, 4), argument(3, 4), argument(3)) == 2 * 2 * 7 * 4 * 3
    assert flops(aten.scaled_dot_product_attention.default, heads, heads, heads) == 2 * 2 * 2 * 4 * 5 * 5 * 8
    assert flops(aten.mv.default, argument(3, 4), argument(4)) == 2 * 3 * 4
    assert flops(aten.addmv.default, argument(3), argument(3, 4), argument(4)) == 2 * 3 * 4
    assert flops(aten.dot.default, argument(4), argument(4)) == 2 * 4
    assert flops(operator.add, argument(4), argument(4)) == 0
    with pytest.raises(ModelError, match="the operations of 'x' cannot be counted"):
        flops(aten.mm.default, argument(3, 4), argument(3, 4))
