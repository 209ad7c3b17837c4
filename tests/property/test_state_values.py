"""State goes through JSON and comes back equal, whatever it is made of; what is not ours is refused, never executed."""

import contextlib
import json
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.errors import ModelError, ProblemError, QSyncError
from qsync_opt.runtimes.torch.checkpoints import join_state, split_state

NAMES = st.text(max_size=8) | st.sampled_from(["$tensor", "$tuple", "$items", "$counter", "$float"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.float64))
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(NAMES, inner, max_size=4)
        | st.dictionaries(st.integers(-5, 5), inner, max_size=4)
        | st.dictionaries(st.integers(-5, 5), st.integers(0, 9), max_size=4).map(Counter)
    ),
    max_leaves=8,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


def equal(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return a == b


@given(STATES)
@settings(max_examples=40)
def test_state_comes_back_equal(state):
    tensors = {}
    data = json.loads(json.dumps(split_state({"root": state}, "x", tensors), allow_nan=False))
    assert equal(join_state(data, tensors), {"root": state})


@given(JSON)
@settings(max_examples=40)
def test_any_json_is_state_or_refused(data):
    with contextlib.suppress(QSyncError):
        join_state(data, {})


@pytest.mark.parametrize("value", [{1.5: 2}, {(1, 2): 3}, {True: 1}, 2**63, {1, 2}, b"bytes", print, object()])
def test_what_json_has_no_form_for_is_named(value):
    with pytest.raises(ModelError, match=r"'x\.deep"):
        split_state({"deep": value}, "x", {})


@pytest.mark.parametrize(
    "data",
    [
        {"$tensor": "gone"},
        {"$tensor": []},
        {"$float": "eleven"},
        {"$tuple": 3},
        {"$items": [[1]]},
        {"$float": "inf", "a": 1},
        {"$counter": [[1]]},
        math.inf,  # what JSON makes of 1e999
    ],
)
def test_forged_state_is_refused(data):
    with pytest.raises(ProblemError):
        join_state({"a": [data]}, {})


@pytest.mark.parametrize("opening", ['{"$items": [[1, ', '{"a": ', "[", '{"$tuple": ['])
def test_state_nested_as_deep_as_json_parses_is_refused(opening):
    closing = "".join({"[": "]", "{": "}"}[bracket] for bracket in reversed(opening) if bracket in "[{")
    data = json.loads(opening * 220 + "1" + closing * 220)
    with pytest.raises(ProblemError):
        join_state(data, {})


def test_state_that_holds_itself_is_named():
    state = {}
    state["again"] = state
    with pytest.raises(ModelError, match=r"'x\.again.* nested in more than 50 levels"):
        split_state(state, "x", {})


def test_the_deepest_state_comes_back():
    state = {1: 2}
    for _ in range(48):
        state = {1: state}
    data = split_state(state, "x", {})
    assert join_state(data, {}) == state
