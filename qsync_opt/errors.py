"""What can go wrong, by kind: every error this package raises on purpose derives from QSyncError."""


class QSyncError(Exception):
    """Base of all errors raised on purpose; the text says what is wrong, what is allowed, what to do."""


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
