import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import qsync_opt
from qsync_opt.doors import offered


def test_importing_loads_neither_torch_nor_a_solver():
    code = (
        "import sys, qsync_opt, qsync_opt.training.planner, qsync_opt.cli.app\n"
        "qsync_opt.cli.app.command_line()\n"
        "bad = {'torch', 'ortools', 'pulp', 'onnx', 'scipy'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_every_public_name_loads_and_is_listed_for_type_checkers():
    assert {*offered("qsync_opt"), "__version__"} == set(qsync_opt.__all__)
    for name in qsync_opt.__all__:
        assert getattr(qsync_opt, name) is not None
        assert name in dir(qsync_opt)


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'slove'"):
        qsync_opt.slove  # noqa: B018


def test_a_missing_package_is_named_with_its_install_line():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import qsync_opt\n"
        "try:\n"
        "    qsync_opt.capture\n"
        "except qsync_opt.QSyncError as error:\n"
        "    assert \"pip install 'qsync-opt[torch]'\" in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=250)


def test_no_public_name_is_that_of_a_submodule():
    # Importing such a sub-module would replace the public name by the module.
    submodules = {module.name for module in pkgutil.iter_modules(qsync_opt.__path__)}
    assert not submodules & set(qsync_opt.__all__)


def test_the_documented_calls_work(instance_path, tmp_path):
    problem = qsync_opt.load_problem(instance_path("tiny"))
    solution = qsync_opt.solve(problem, method="greedy")
    exact = qsync_opt.solve(problem, method="exact", time_limit_s=60)
    assert (solution.point, exact.termination) == ("feasible", "optimal")
    check = qsync_opt.evaluate(problem, exact.plan)
    assert check.feasible
    assert check.objective == exact.objective
    exact.plan.save(tmp_path / "plan.json")
    assert qsync_opt.load_plan(tmp_path / "plan.json") == exact.plan


@pytest.mark.parametrize("module", ["qsync_opt.systems", "qsync_opt.training.planner"])
def test_examples_in_docstrings_hold(module):
    result = doctest.testmod(importlib.import_module(module))
    assert (result.failed, result.attempted > 0) == (0, True)
