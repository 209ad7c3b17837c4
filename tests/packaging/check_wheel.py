"""Build sdist and wheel, install the wheel in an empty environment, import every sub-package.

A script rather than a test: it needs the network for the build requirements and takes a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

CHECK = """
import importlib, pkgutil, sys
import qsync_opt
assert "site-packages" in qsync_opt.__file__, qsync_opt.__file__
doors = [module.name for module in pkgutil.walk_packages(qsync_opt.__path__, "qsync_opt.") if module.ispkg]
assert len(doors) > 30, doors
for name in doors:
    importlib.import_module(name)
assert "torch" not in sys.modules and "ortools" not in sys.modules
problem = qsync_opt.load_problem(sys.argv[1])
print("imported", qsync_opt.__version__, "and read a problem with", len(problem.operators), "operators")
"""


def run(*command: str | os.PathLike[str], **options: object) -> None:
    print("+", " ".join(map(str, command)), flush=True)
    subprocess.run([str(c) for c in command], check=True, **options)  # type: ignore[call-overload]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist = Path(folder) / "dist"
        run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
        (wheel,) = dist.glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        sources = {
            "qsync_opt/" + str(path.relative_to(ROOT)).removeprefix("qsync_opt/")
            for top in ("qsync_opt", "formulations", "runtimes", "kernels")
            for kind in ("*.py", "page/*.*")
            for path in (ROOT / top).rglob(kind)
            if "__pycache__" not in path.parts and not any(p.is_symlink() for p in path.parents if p != ROOT)
        }
        sources |= {
            f"qsync_opt/{path.relative_to(ROOT)}"
            for folder in ("csrc", "tables")
            for path in (ROOT / "kernels" / folder).rglob("*")
            if path.is_file()
        }
        missing = sorted(sources - set(names))
        if missing:
            raise SystemExit(f"the wheel lacks {missing}")
        stray = [n for n in names if not n.startswith(("qsync_opt/", "qsync_opt-"))]
        if stray:
            raise SystemExit(f"the wheel would install files outside the package: {stray}")
        environment = Path(folder) / "env"
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
        problem = ROOT / "tests" / "data" / "instances" / "tiny.json"
        run(python, "-I", "-c", CHECK, problem, cwd=folder)
        command = environment / "bin" / "qsync-opt"
        run(command, "--help", cwd=folder, stdout=subprocess.DEVNULL)
        run(command, "solve", problem, "--output", "plan.json", cwd=folder, stdout=subprocess.DEVNULL)
        run(command, "report", problem, "plan.json", cwd=folder)
    print("wheel: all good")


if __name__ == "__main__":
    main()
