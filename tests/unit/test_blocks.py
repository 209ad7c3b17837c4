"""Operators at the same place of identical blocks are found by their names, shapes and precisions."""

from dataclasses import replace

from qsync_opt.blocks import identical_blocks
from qsync_opt.planner import solve
from qsync_opt.testing import chain


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
