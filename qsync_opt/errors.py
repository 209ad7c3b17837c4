"""What can go wrong, by kind: every error this package raises on purpose derives from QSyncError."""

LONGEST_TEXT = 2000
"""Characters of an error's text; of a longer one the middle is left out: a file may hold values of any length."""
_SHOWN_END = 500


class QSyncError(Exception):
    """Base of all errors raised on purpose; the text says what is wrong, what is allowed, what to do."""

    def __str__(self) -> str:  # not __init__, which torch.compile could not trace
        return _shortened(super().__str__())


def _shortened(text: str) -> str:
    # Half of a surrogate pair, which JSON can hold, has no form that could be printed.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[: LONGEST_TEXT - _SHOWN_END]} [...] {text[-_SHOWN_END:]}"


class ModelError(QSyncError):
    """The model or its ONNX graph cannot be read, captured, or does not match the plan."""


class ProblemError(QSyncError):
    """A problem, plan, profile, cluster or statistics file holds unusable data."""


class UnsupportedError(QSyncError):
    """This solver, runtime or device can never do what was asked."""


class NotReadyError(QSyncError):
    """It could be done, but not in the present state (for example, a plan is already applied)."""


class NotInstalledError(QSyncError):
    """An optional package is missing; the text holds the install line."""


class SolverError(QSyncError):
    """A solver failed or returned a plan that the independent evaluation contradicts."""


def reason_of(failure: OSError | ValueError) -> str:
    """Why the system did not take a path, for a message that names it; names that it cannot hold are a ValueError."""
    return getattr(failure, "strerror", None) or str(failure)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, of a library's too; its kind where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
