"""List the packages, so that a new sub-package cannot be forgotten in the wheel."""

from setuptools import find_packages, setup

SIBLINGS = ("formulations", "runtimes", "kernels")


def packages() -> list[str]:
    """Return the core package and its siblings under their installed names."""
    core = ["qsync_opt", *(f"qsync_opt.{p}" for p in find_packages("qsync_opt") if p.split(".")[0] not in SIBLINGS)]
    nested = find_packages(include=[p for s in SIBLINGS for p in (s, f"{s}.*")])
    return [*core, *(f"qsync_opt.{name}" for name in nested)]


setup(packages=packages())
