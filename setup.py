"""List the packages, so that a new sub-package cannot be forgotten in the wheel."""

from setuptools import find_packages, setup

SIBLINGS = ("formulations", "runtimes", "kernels")


def packages() -> list[str]:
    """Return the core package and its siblings under their installed names."""
    core = find_packages(include=["qsync_opt", "qsync_opt.report"])
    nested = find_packages(include=[p for s in SIBLINGS for p in (s, f"{s}.*")])
    return [*core, *(f"qsync_opt.{name}" for name in nested)]


setup(packages=packages())
