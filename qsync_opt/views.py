"""How data classes show themselves; what draws them, `qsync_opt.report`, is loaded when somebody looks."""

from importlib import import_module
from typing import Any


class Displayed:
    """Shown as one line of text, and in notebooks as HTML; a dataclass of this kind needs ``repr=False``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(import_module("qsync_opt.report.display").text(self))

    def _repr_html_(self) -> str:
        return str(import_module("qsync_opt.report.display").html(self))


class Tabular:
    """Convertible to a table."""

    __slots__ = ()

    def to_pandas(self) -> Any:
        """A pandas table; `qsync_opt.report.display` says what a row is.

        Raises:
            NotInstalledError: pandas is missing; the text holds the install line.
        """
        return import_module("qsync_opt.report.display").table(self)
