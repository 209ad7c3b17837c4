import fnmatch
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SIBLINGS = ("formulations", "runtimes", "kernels")


@pytest.mark.parametrize("name", SIBLINGS)
def test_link_resolves_to_the_root_folder(name):
    link = ROOT / "qsync_opt" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", SIBLINGS)
def test_root_folder_does_not_shadow_an_installed_package(name):
    # In a process of its own: other tests put the folders of benchmarks on the path, and one has a module of that name.
    code = f"import importlib.util as u; found = u.find_spec({name!r}); print(found.origin or '' if found else '')"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ROOT not in Path(done.stdout.strip()).resolve().parents


def test_importing_the_package_loads_neither_torch_nor_a_solver():
    code = (
        "import sys, qsync_opt\n"
        "heavy = {'torch', 'ortools', 'pulp', 'onnx', 'onnxscript', 'highspy', 'rich'}\n"
        "raise SystemExit(', '.join(sorted(heavy & sys.modules.keys())) or 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"import qsync_opt loads {done.stderr}"


def test_no_source_loads_a_pickle():
    forbidden = ("pickle.load", "pickle.dump", "torch.load(", "torch.save(", "yaml.load(")
    for top in ("qsync_opt", *SIBLINGS):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text()
            assert not [word for word in forbidden if word in text], path


def test_sources_stay_small():
    """A model that somebody tried a command with is no source, and a repository keeps it for ever."""
    for top in (*SIBLINGS, "qsync_opt", "tests", "benchmarks", "docs", "examples"):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
                assert path.stat().st_size <= 2**20, f"{path}: {path.stat().st_size} bytes"


def test_the_source_distribution_has_every_tracked_file():
    """But those that only a checkout needs: hidden ones, and the links."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    patterns = []
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        kind, *words = line.split()
        if kind == "include":
            patterns += words
        elif kind == "recursive-include":
            patterns += [f"{words[0]}/{name}" for name in words[1:]]  # in fnmatch, * crosses folders
    # What setuptools takes by itself.
    patterns += ["pyproject.toml", "setup.py", "MANIFEST.in"]
    lost = [
        name
        for name in listed.stdout.splitlines()
        if not name.startswith(".")
        and not (ROOT / name).is_symlink()
        and (ROOT / name).exists()
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    assert lost == []
