"""A cache of measurements on disk, so that equal work on equal devices is measured once.

Each measurement is a file of its own, named by the digests of its environment (device, versions, threads, options) and
of its key, and written atomically. So several processes may read and write at the same time, and an interrupted run
keeps what it has measured.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsync_opt.errors import ProblemError, reason_of
from qsync_opt.io.codec import decode, encode
from qsync_opt.io.json_files import read_json, write_json

MEASUREMENT_FORMAT = "qsync-measurement/1"
_LOGGER = logging.getLogger(__name__)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def default_cache_folder() -> Path:
    """The default folder of caches: ``$XDG_CACHE_HOME/qsync-opt``, else ``~/.cache/qsync-opt``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qsync-opt"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The content of one file."""

    environment: Mapping[str, Any]
    key: str
    measurement: Mapping[str, Any]


class MeasurementCache:
    """Measurements of one environment, by key.

    An existing folder that cannot be written (read-only, full) is still read; a warning says that nothing is kept.
    Damaged files are recognized by their digest.

    ``folder`` is created if missing; None keeps them for this process only. ``environment`` is all that a measurement
    depends on besides its key, as plain JSON data.

    Raises:
        ProblemError: The folder cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, environment: Mapping[str, Any]) -> None:
        self._environment = dict(environment)
        self._known: dict[str, dict[str, Any]] = {}
        self._folder: Path | None = None
        self._warned = False
        if folder is None:
            return
        own = Path(folder) / _digest(json.dumps(self._environment, sort_keys=True))
        try:
            own.mkdir(parents=True, exist_ok=True)
            self._folder = own
        except (OSError, ValueError) as failure:  # ValueError: a null character
            text = f"cannot make the folder {str(own)!r}"
            # os.path, not Path: that raises where a folder of another user must not be looked into.
            if not os.path.isdir(folder) or getattr(failure, "errno", None) not in _NOT_WRITABLE:
                advice = "name another cache folder"
                raise ProblemError(f"{text} for measurements: {reason_of(failure)}; {advice}") from failure
            _LOGGER.warning(
                "measurements are not kept for other runs: %s (%s); name another cache folder, or make room",
                text,
                reason_of(failure),
            )

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the measurement of ``key``, or None if there is none; a warning names an unusable file."""
        if key in self._known:
            return self._known[key]
        if self._folder is None or not os.path.exists(path := self._path(key)):
            return None
        try:
            entry = decode(_Entry, read_json(path, [MEASUREMENT_FORMAT]), str(path), version=MEASUREMENT_FORMAT)
        except ProblemError as failure:
            _LOGGER.warning("measuring again what the cache has no usable file for: %s", failure)
            return None
        if entry.environment != self._environment or entry.key != key:
            _LOGGER.warning("measuring again: %s holds another measurement than its name says", path)
            return None
        self._known[key] = dict(entry.measurement)
        return self._known[key]

    def put(self, key: str, measurement: Mapping[str, Any]) -> None:
        """Store a measurement (plain JSON data)."""
        self._known[key] = dict(measurement)
        if self._folder is not None:
            entry = _Entry(environment=self._environment, key=key, measurement=self._known[key])
            try:
                write_json(self._path(key), encode(entry, version=MEASUREMENT_FORMAT), digest=True)
            except ProblemError as failure:
                # This run goes on; only others have to measure again.
                if not self._warned:
                    _LOGGER.warning("measurements are not kept for other runs: %s", failure)
                self._warned = True

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{_digest(key)}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
