"""The errors of this package; all that are raised on purpose derive from `QSyncError`."""

from collections.abc import Sequence

LONGEST_TEXT = 2000
"""Most characters of an error's text; the middle of longer ones, which quote long values of files, is left out."""
_SHOWN_END = 500


class QSyncError(Exception):
    """Base of all errors raised on purpose; its text says what is wrong, what is allowed and what to do."""

    def __str__(self) -> str:  # not __init__, which torch.compile could not trace
        # JSON can hold half of a surrogate pair, which cannot be printed.
        text = super().__str__().encode("utf-8", "backslashreplace").decode("utf-8")
        if len(text) <= LONGEST_TEXT:
            return text
        return f"{text[: LONGEST_TEXT - _SHOWN_END]} [...] {text[-_SHOWN_END:]}"


class ModelError(QSyncError):
    """A model or its ONNX graph cannot be read or captured, or does not match the plan."""


class ProblemError(QSyncError):
    """A problem, plan, profile, cluster or statistics file holds unusable data."""


class UnsupportedError(QSyncError):
    """The request is impossible for this solver, runtime or device."""


class NotReadyError(QSyncError):
    """The request is impossible in the present state (for example, because a plan is already applied)."""


class NotInstalledError(QSyncError):
    """An optional package is not installed; the text has the command that installs it."""


class SolverError(QSyncError):
    """A solver failed, or its plan contradicts the independent evaluation."""


def reason_of(failure: OSError | ValueError) -> str:
    """The reason of a failed file operation, for a message that names the path; a ValueError is an impossible path."""
    return getattr(failure, "strerror", None) or str(failure)


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not empty, else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def first_few(texts: Sequence[str], separator: str = ", ", most: int = 3) -> str:
    """The first texts in one, and the number of the others."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more
