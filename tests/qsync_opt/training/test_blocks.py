"""Operators at the same place of identical blocks are found by their names, shapes and precisions."""

from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError, SolverError
from qsync_opt.registry import Feature, Kind, create
from qsync_opt.testing import chain
from qsync_opt.training import identical_blocks, merge_groups, solve


def renamed(problem, names):
    by_old = dict(zip([o.name for o in problem.operators], names, strict=True))
    operators = tuple(
        replace(o, name=by_old[o.name], inputs=tuple(by_old[i] for i in o.inputs)) for o in problem.operators
    )
    devices = tuple(
        replace(d, operators={by_old[name]: table for name, table in d.operators.items()}) for d in problem.devices
    )
    return replace(problem, operators=operators, devices=devices)


def test_only_the_numbers_of_the_path_may_differ():
    problem = renamed(chain().problem, ["layers.0/linear", "layers.1/linear", "head/linear"])
    assert identical_blocks(problem) == (("layers.0/linear", "layers.1/linear"),)
    # The number of an occurrence belongs to the place, not to the block.
    assert identical_blocks(renamed(chain().problem, ["mlp/linear_1", "mlp/linear_2", "mlp/linear_3"])) == ()


def test_other_precisions_are_another_place():
    problem = renamed(chain().problem, ["layers.0/linear", "layers.1/linear", "layers.2/linear"])
    device = problem.devices[0]
    table = {"FP32": device.operators["layers.1/linear"]["FP32"]}
    devices = (replace(device, operators={**device.operators, "layers.1/linear": table}),)
    assert identical_blocks(replace(problem, devices=devices)) == (("layers.0/linear", "layers.2/linear"),)


def test_the_groups_can_be_tied():
    problem = renamed(chain().problem, ["layers.0/linear", "layers.1/linear", "layers.2/linear"])
    plan = solve(problem, "exact", tied=identical_blocks(problem)).plan
    assert len(set(plan.devices["T4"].values())) == 1


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([], []),
        ([["a", "b"], ["c", "d"]], [{"a", "b"}, {"c", "d"}]),
        ([["a", "c"], ["b", "c"]], [{"a", "b", "c"}]),
        ([["a", "b"], ["c", "d"], ["b", "c"]], [{"a", "b", "c", "d"}]),
        ([["a", "a"]], [{"a"}]),
    ],
)
def test_groups_that_share_a_name_are_one(groups, wanted):
    found = merge_groups(groups)
    assert sorted(map(sorted, found)) == sorted(map(sorted, wanted))


def test_an_empty_group_is_refused():
    with pytest.raises(ProblemError, match="a group is empty"):
        merge_groups([["a", "b"], []])


@pytest.mark.parametrize("method", ["greedy", "exact"])
def test_a_tie_is_transitive(method):
    # Free choice would leave one of the three low; tied in pairs they can only move together.
    found = solve(chain().problem, method, tied=[["a", "c"], ["b", "c"]])
    assert found.objective == pytest.approx(1.75)
    assert len(set(found.plan.devices["T4"].values())) == 1


def test_a_formulation_that_breaks_a_tie_is_caught():
    class Deaf:
        FEATURES = frozenset({Feature.TIED})

        def solve(self, problem, options):
            return create(Kind.FORMULATION, "exact").solve(problem, replace(options, tied=()))

    with pytest.raises(SolverError, match="tied operators 'a', 'b', 'c'"):
        solve(chain().problem, Deaf(), tied=[["a", "b", "c"]])
