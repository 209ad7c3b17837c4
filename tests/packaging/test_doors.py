"""Packages are used through their doors: what their ``__init__`` offers."""

import ast
import importlib
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from qsync_opt.doors import offered

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("formulations", "runtimes", "kernels")


def _modules():
    """Dotted name of every module of the product, with its file."""
    for room in ("qsync_opt", *ROOMS):
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if room == "qsync_opt" and parts[1] in ROOMS:
                continue  # a link
            parts = parts if room == "qsync_opt" else ("qsync_opt", *parts)
            yield ".".join(part for part in parts if part != "__init__"), path


MODULES = dict(_modules())
PACKAGES = tuple(name for name, path in MODULES.items() if path.name == "__init__.py")
DOORS = tuple(name for name in PACKAGES if re.search(r"^__all__", MODULES[name].read_text(), re.MULTILINE))


def _package(module):
    return module if module in PACKAGES else module.rpartition(".")[0]


def _sources():
    """Every Python source, and every Python block of a page, with the package that it belongs to, if any."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    own = {path: name for name, path in MODULES.items()}
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_symlink() or not path.exists():
            continue
        if path.suffix == ".py":
            yield name, path.read_text(), _package(own[path]) if path in own else None
        elif path.suffix == ".md":
            for block in re.findall(r"```python[^\n]*\n(.*?)```", path.read_text(), re.DOTALL):
                yield name, block, None


def _imports(text):
    """Of our modules: each imported module with the name taken from it."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "qsync_opt":
            for alias in node.names:
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in MODULES:
                    yield alias.name, ""


def _past_door(module, name, importer):
    """The module behind a door that an import reaches, or None if it goes through the door or stays inside."""
    target = f"{module}.{name}" if f"{module}.{name}" in MODULES else module
    package = _package(target)
    if package == "qsync_opt" or target in PACKAGES:
        return None
    if importer is not None and (importer == package or importer.startswith(f"{package}.")):
        return None
    if target != module and name in offered(package):
        return None
    return target


def _tested(path):
    """The package whose own tests a file belongs to: folders under ``tests`` are named like it."""
    parts = Path(path).parts
    if parts[0] != "tests":
        return None
    folders = parts[1:-1] if parts[1] == "qsync_opt" else ("qsync_opt", *parts[1:-1])
    name = ".".join(folders)
    return name if name in PACKAGES and name != "qsync_opt" else None


def _is_own(path, target):
    """Whether a file is one of the own tests of the package that holds ``target``, of a parent or a part of it."""
    tested, package = _tested(path), _package(target)
    return tested is not None and (f"{package}.".startswith(f"{tested}.") or f"{tested}.".startswith(f"{package}."))


def test_nobody_imports_past_a_door():
    """Beside a package's own tests."""
    past = [
        f"{path}: {target}"
        for path, text, importer in _sources()
        for module, name in _imports(text)
        if (target := _past_door(module, name, importer)) is not None and not _is_own(path, target)
    ]
    assert past == []


def test_own_tests_import_through_the_door_nine_times_in_ten():
    through, past = Counter(), Counter()
    for path, text, importer in _sources():
        tested = _tested(path)
        for module, name in _imports(text) if tested else ():
            if _past_door(module, name, importer) is None:
                through[tested] += 1
            else:
                past[tested] += 1
    assert sum(past.values()) <= 0.1 * (sum(through.values()) + sum(past.values())), past


@pytest.mark.parametrize("package", PACKAGES)
def test_a_door_says_what_its_package_is_for(package):
    tree = ast.parse(MODULES[package].read_text())
    text = ast.get_docstring(tree)
    assert text, package
    assert not text.splitlines()[0].endswith("?")


@pytest.mark.parametrize("package", DOORS)
def test_a_door_offers_what_it_lists(package):
    door = importlib.import_module(package)
    assert {*offered(package)} == set(door.__all__) - {"__version__", "main"}
    for name in door.__all__:
        assert getattr(door, name) is not None
        module = f"{package}.{name}"
        assert module not in MODULES or offered(package)[name] == package, f"{module} would replace the name"
