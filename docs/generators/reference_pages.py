"""The reference: one page per module, for all modules in the folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"": "qsync_opt", "formulations": "formulations", "runtimes": "runtimes", "kernels": "kernels"}
"""Sub-package of ``qsync_opt`` (or none) to the folder that holds it."""
TITLES = {
    "": "Core",
    "formulations": "Formulations and solvers",
    "runtimes": "Runtimes",
    "kernels": "Kernels",
}


def modules(part: str) -> Iterator[str]:
    """Import paths of all public modules of a part, in alphabetical order, packages before what they hold."""
    top = ROOT / FOLDERS[part]
    for path in sorted(top.rglob("*.py")):
        relative = path.relative_to(top)
        linked = part == "" and relative.parts[0] in FOLDERS  # a sibling folder, seen through its link
        hidden = any(name.startswith("_") and name != "__init__.py" for name in relative.parts)
        is_package = part == "" and relative == Path("__init__.py")  # has the page of public names
        if linked or hidden or is_package:
            continue
        names = [name for name in relative.with_suffix("").parts if name != "__init__"]
        yield ".".join(["qsync_opt", *([part] if part else []), *names])


def page_path(module: str) -> str:
    """Path of a module's page below the documentation folder."""
    return f"reference/{module}.md"


def module_page(module: str) -> str:
    """Markdown of a module's page."""
    return (
        f"---\nsearch:\n  boost: 0.5\n---\n\n# {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
    )


def navigation() -> list[dict[str, list[dict[str, str]]]]:
    """The part of the navigation that lists all modules."""
    return [
        {TITLES[part]: [{module.removeprefix("qsync_opt."): page_path(module)} for module in modules(part)]}
        for part in FOLDERS
    ]


def public_names_page() -> str:
    """Markdown of the page that lists the names of the package itself."""
    import qsync_opt

    package = griffe.load("qsync_opt", search_paths=[str(ROOT)], resolve_aliases=True)
    lines = [
        "# Reference",
        "",
        "These names are loaded on first use from `qsync_opt`; importing the package loads neither torch nor a solver. "
        "Everything else is imported from its package, such as `qsync_opt.training`; the navigation lists what each "
        "module defines.",
        "",
        "| name | what it is |",
        "|---|---|",
    ]
    names = sorted(name for name in qsync_opt.__all__ if name != "__version__")
    lines += [f"| [`{name}`][qsync_opt.{name}] | {summary(package[name])} |" for name in names]
    return "\n".join([*lines, "", "::: qsync_opt\n    options:\n      show_root_heading: false\n"])


def summary(found: griffe.Object | griffe.Alias) -> str:
    """First paragraph of an object's docstring, on one line; the object is read, not imported."""
    if found.docstring is None:
        raise LookupError(f"{found.path} has no docstring")
    return " ".join(found.docstring.value.split("\n\n")[0].split()).replace("|", "\\|")
