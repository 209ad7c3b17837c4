"""Packages whose names load on first use: importing one costs nothing until a name of it is asked for.

A package lists what it offers once, as imports under ``if TYPE_CHECKING``, which type checkers read as they stand;
`lazy` reads the same lines when the first name is wanted. A name may be offered and be a
sub-module too only where the sub-module itself is offered: importing it would replace anything else.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

_EXTRAS = {
    "torch": "torch",
    "onnxscript": "torch",
    "safetensors": "torch",
    "onnxruntime": "onnxruntime",
    "torch_geometric": "messages",
}
"""Packages that only some names need, with the extra that installs them."""


@cache
def offered(package: str) -> dict[str, str]:
    """Each name that a package offers, with the module that defines it."""
    spec = importlib.util.find_spec(package)
    source = spec.loader.get_source(package) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    return {
        alias.asname or alias.name: node.module or ""
        for block in ast.parse(source or "").body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of the package of that ``__name__``.

    The first raises `AttributeError` for a name that is not offered and `NotInstalledError` for one that needs a
    package which is not installed.
    """

    def load(name: str) -> Any:
        module = None if name.startswith("__") else offered(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            if module == package:  # the name is that of a sub-module, which the import sets
                return importlib.import_module(f"{package}.{name}")
            value = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as missing:
            if missing.name not in _EXTRAS:
                raise
            from qsync_opt.errors import NotInstalledError

            raise NotInstalledError(
                f"{package}.{name} needs {missing.name}, which is not installed: "
                f"pip install 'qsync-opt[{_EXTRAS[missing.name]}]'"
            ) from missing
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *offered(package)})
