"""Measurements that are kept on disk, so that equal work on an equal device is measured once.

Each measurement is a file of its own, named by the digests of its environment (device, versions, threads, options)
and of its key, written whole and then renamed. So any number of processes may read and write at the same time, an
interrupted run keeps what it had finished, and two that measure the same at once merely agree on the later one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsync_opt.errors import ProblemError, reason_of
from qsync_opt.io.codec import Fields, read_json, write_json

MEASUREMENT_FORMAT = "qsync-measurement/1"
_LOGGER = logging.getLogger(__name__)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def default_cache_folder() -> Path:
    """Where caches go if nothing else is said: ``$XDG_CACHE_HOME/qsync-opt``, else ``~/.cache/qsync-opt``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qsync-opt"


class MeasurementCache:
    """A folder of measurements of one environment.

    Args:
        folder: Where to keep them; made if missing. None keeps them for this process only.
        environment: All that a measurement depends on besides its key, as plain JSON data.

    A folder that is there but takes no files (read-only, full) is read as far as it goes; a warning says that nothing
    is kept. The digest of each file tells a damaged one from a good one, which is then measured again.

    Raises:
        ProblemError: The folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, environment: Mapping[str, Any]) -> None:
        self._environment = dict(environment)
        self._known: dict[str, dict[str, Any]] = {}
        self._folder: Path | None = None
        self._warned = False
        if folder is not None:
            self._folder = Path(folder) / _digest(json.dumps(self._environment, sort_keys=True))
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except (OSError, ValueError) as failure:  # ValueError: a null character
                reason = reason_of(failure)
                # os.path, not Path: that raises where a folder of another user must not be looked into.
                if os.path.isdir(folder) and getattr(failure, "errno", None) in _NOT_WRITABLE:
                    _LOGGER.warning(
                        "measurements are not kept for other runs: cannot make the folder %r (%s); name another cache "
                        "folder, or make room",
                        str(self._folder),
                        reason,
                    )
                    self._folder = None
                    return
                raise ProblemError(
                    f"cannot make the folder {str(self._folder)!r} for measurements: {reason}; "
                    "name another cache folder"
                ) from failure

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the measurement of ``key``, or None if there is none.

        A file that cannot be used is named in a warning and measured again.
        """
        if key in self._known:
            return self._known[key]
        if self._folder is None or not os.path.exists(path := self._path(key)):
            return None
        try:
            reader = Fields(read_json(path, [MEASUREMENT_FORMAT]), str(path))
            reader.take("format")
            stored_environment, stored_key = reader.mapping("environment"), reader.text("key")
            value = reader.mapping("measurement")
            reader.finish()
        except ProblemError as failure:
            _LOGGER.warning("measuring again what the cache has no usable file for: %s", failure)
            return None
        if stored_environment != self._environment or stored_key != key:
            _LOGGER.warning("measuring again: %s holds another measurement than its name says", path)
            return None
        self._known[key] = value
        return value

    def put(self, key: str, measurement: Mapping[str, Any]) -> None:
        """Keep a measurement (plain JSON data)."""
        self._known[key] = dict(measurement)
        if self._folder is not None:
            data = {
                "format": MEASUREMENT_FORMAT,
                "environment": self._environment,
                "key": key,
                "measurement": self._known[key],
            }
            try:
                write_json(self._path(key), data, digest=True)
            except ProblemError as failure:
                # The measurement is good all the same; only the next job has to make it again.
                if not self._warned:
                    _LOGGER.warning("measurements are not kept for other runs: %s", failure)
                self._warned = True

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{_digest(key)}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
