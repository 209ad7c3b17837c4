"""The role table: what it lists, what users may change, and what type promotion makes of it."""

import pytest

from qsync_opt.errors import ModelError
from qsync_opt.model import ADJUSTABLE, ATEN_PRODUCTS, ROLE_TABLE, Role, RoleTable, decide_role
from qsync_opt.model.roles import DEPENDENT, FIXED


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        ("linear", Role.ADJUSTABLE),
        ("MatMul", Role.ADJUSTABLE),
        ("scaled_dot_product_attention", Role.ADJUSTABLE),
        ("layer_norm", Role.FIXED),
        ("Softmax", Role.FIXED),
        ("relu", Role.DEPENDENT),
        ("relu_", Role.DEPENDENT),
        ("__and__", Role.DEPENDENT),
        ("nothing_of_the_kind", None),
    ],
)
def test_the_shipped_table(kind: str, role: Role | None) -> None:
    assert RoleTable().lookup("m/x", kind) is role


def test_every_adjustable_torch_kind_but_the_look_up_has_flops() -> None:
    kinds = {kind for kind in ADJUSTABLE.split() if kind.islower()}
    assert kinds - ATEN_PRODUCTS == {"embedding"}
    assert set(ROLE_TABLE) >= ATEN_PRODUCTS


def test_names_win_over_kinds_and_earlier_patterns_over_later_ones() -> None:
    table = RoleTable(by_type={"linear": Role.ADJUSTABLE}, by_name={"head.out/*": Role.ADJUSTABLE, "head*": Role.FIXED})
    assert table.lookup("head.out/linear", "linear") is Role.ADJUSTABLE
    assert table.lookup("head.in/linear", "linear") is Role.FIXED
    assert table.lookup("body/linear", "linear") is Role.ADJUSTABLE


def test_an_in_place_form_may_be_overridden_by_itself() -> None:
    table = RoleTable(by_type={"relu_": Role.FIXED})
    assert table.lookup("a/relu_", "relu_") is Role.FIXED
    assert table.lookup("a/relu", "relu") is Role.DEPENDENT


def test_what_cannot_run_in_several_precisions_cannot_be_made_adjustable() -> None:
    with pytest.raises(ModelError, match="operation 'softmax' cannot be adjustable"):
        RoleTable(by_type={"softmax": Role.ADJUSTABLE})
    with pytest.raises(ModelError, match=r"'a/softmax' \(pattern 'a/\*'\) cannot be adjustable"):
        RoleTable(by_name={"a/*": Role.ADJUSTABLE}).lookup("a/softmax", "softmax")


def test_unusable_overrides_are_refused() -> None:
    with pytest.raises(ModelError, match="allowed are adjustable, dependent, fixed"):
        RoleTable(by_type={"linear": "free"})  # type: ignore[dict-item]
    with pytest.raises(ModelError, match=r"role pattern 'haed/\*' fits no operator"):
        RoleTable(by_name={"haed/*": Role.FIXED}).check_patterns(("head/linear", "loss"))


FLOATS = {"delivers_floating": True, "reads_floating": True, "reads_state": False, "casts_to_full": False}


@pytest.mark.parametrize(
    ("listed", "change", "decided"),
    [
        (Role.DEPENDENT, {}, Role.DEPENDENT),
        (Role.DEPENDENT, {"reads_state": True}, Role.FIXED),
        (Role.DEPENDENT, {"casts_to_full": True}, Role.FIXED),
        (Role.DEPENDENT, {"reads_floating": False}, Role.FIXED),
        (Role.DEPENDENT, {"delivers_floating": False}, Role.DEPENDENT),
        (Role.DEPENDENT, {"delivers_floating": False, "reads_floating": False}, Role.FIXED),
        (Role.ADJUSTABLE, {"reads_state": True}, Role.ADJUSTABLE),
        (Role.ADJUSTABLE, {"reads_floating": False, "reads_state": True}, Role.ADJUSTABLE),
        (Role.ADJUSTABLE, {"delivers_floating": False, "reads_floating": False}, Role.FIXED),
        (None, {}, Role.FIXED),
    ],
)
def test_promotion(listed: Role | None, change: dict[str, bool], decided: Role) -> None:
    assert decide_role(listed, **(FLOATS | change)) is decided


def test_every_kind_has_one_role() -> None:
    kinds = [kind for text in (ADJUSTABLE, FIXED, DEPENDENT) for kind in text.split()]
    assert len(set(kinds)) == len(kinds) == len(ROLE_TABLE)
