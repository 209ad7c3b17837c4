"""Reading of files up to a bounded size, and atomic writing: to a temporary file that is then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from qsync_opt.errors import ProblemError, QSyncError, reason_of

_READ_BYTES = 2**22


def read_bounded(path: str | os.PathLike[str], largest_bytes: int) -> bytes | None:
    """Return the content of a file, or None if it has more than ``largest_bytes``.

    Raises:
        OSError: The file cannot be read.
        ValueError: The path has a null character.
    """
    parts, left = [], largest_bytes
    with open(path, "rb") as stream:
        while part := stream.read(min(_READ_BYTES, left + 1)):  # read allocates all that it is asked for
            left -= len(part)
            if left < 0:
                return None
            parts.append(part)
    return b"".join(parts)


def read_text(
    path: str | os.PathLike[str], kind: str, largest_bytes: int, *, error: type[QSyncError] = ProblemError
) -> str:
    """Read a UTF-8 file of bounded size; endless ones (devices, pipes) are refused too.

    ``kind`` names the kind of file in errors, such as ``"JSON"``.

    Raises:
        QSyncError: Of kind ``error``: missing, unreadable, too large, or not UTF-8.
    """
    where = os.fspath(path)
    try:
        data = read_bounded(path, largest_bytes)
        if data is None:
            raise error(f"{where}: the file has more than the {largest_bytes} bytes that are read; give a {kind} file")
        return data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{where}: not UTF-8 text (byte {failure.start}); give a {kind} file") from failure
    except (OSError, ValueError) as failure:
        raise error(f"cannot read {where!r}: {reason_of(failure)}; give the path of a {kind} file") from failure


def write_text(path: str | os.PathLike[str], text: str, *, error: type[QSyncError] = ProblemError) -> None:
    """Write ``text`` to ``path`` in UTF-8, whole or not at all; see `write_bytes`."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise error(f"cannot write {os.fspath(path)!r}: the text has no form in UTF-8 ({failure.reason})") from failure
    write_bytes(path, data, error=error)


def write_bytes(path: str | os.PathLike[str], data: bytes, *, error: type[QSyncError] = ProblemError) -> None:
    """Write ``data`` to ``path`` whole or not at all; of a symbolic link the target is replaced.

    Raises:
        QSyncError: Of kind ``error``: the path cannot be written.
    """
    check_writable(path, error=error)
    target = Path(os.path.realpath(path))
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes private files
        os.replace(temporary, target)
    except OSError as failure:
        raise error(f"cannot write {os.fspath(path)!r}: {failure.strerror or failure}") from failure
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def check_writable(path: str | os.PathLike[str], *, error: type[QSyncError] = ProblemError) -> None:
    """Refuse a path that `write_bytes` could not write, before long work whose result goes there.

    Devices and pipes are refused too: a rename would replace them by an ordinary file.
    """
    try:
        target = Path(os.path.realpath(path))
        # A rename would replace even a read-only file.
        free = os.access(target, os.W_OK) if target.is_file() else not target.exists()
        writable = free and os.access(target.parent, os.W_OK | os.X_OK)
    except (OSError, ValueError) as failure:  # a name that is too long, or has a null character
        raise error(f"cannot write {os.fspath(path)!r}: {reason_of(failure)}; give another file name") from failure
    if not writable or os.fspath(path).endswith(os.sep):
        raise error(f"cannot write {os.fspath(path)!r}; give a file in an existing folder that may be written")
