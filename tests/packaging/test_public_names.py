import ast
import doctest
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import qsync_opt


def test_importing_loads_neither_torch_nor_a_solver():
    code = (
        "import sys, qsync_opt, qsync_opt.training.planner, qsync_opt.cli.app\n"
        "qsync_opt.cli.app.command_line()\n"
        "bad = {'torch', 'ortools', 'pulp', 'onnx', 'scipy'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_every_public_name_loads_and_is_listed_for_type_checkers():
    tree = ast.parse(Path(inspect.getfile(qsync_opt)).read_text())
    listed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert listed == qsync_opt._PUBLIC
    for name in qsync_opt.__all__:
        assert getattr(qsync_opt, name) is not None
        assert name in dir(qsync_opt)


def test_type_checkers_see_no_other_names():
    """With ``__getattr__`` in sight they would believe in every name."""
    tree = ast.parse(Path(inspect.getfile(qsync_opt)).read_text())
    seen = {getattr(node, "name", None) for node in tree.body}
    assigned = {ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    assert "__getattr__" not in seen | assigned
    assert callable(qsync_opt.__getattr__)
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


def test_examples_in_docstrings_hold():
    import qsync_opt.training.planner

    result = doctest.testmod(qsync_opt.training.planner)
    assert (result.failed, result.attempted > 0) == (0, True)
