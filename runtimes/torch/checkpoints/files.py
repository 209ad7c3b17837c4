"""Checkpoints as folders: written under a temporary name, renamed when complete, and verified before they are read.

A checkpoint is a folder ``step-00000100`` of safetensors files, ``state.json`` and ``manifest.json``, which lists every
other file with its size and SHA-256. It is written as ``.step-00000100.tmp`` and renamed at the end, so that a job that
is killed while it writes leaves the older checkpoints unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qsync_opt.errors import ProblemError, reason_of
from qsync_opt.io import decode, encode, read_json, write_json

MANIFEST_FORMAT = "qsync-manifest/1"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.(tmp|old)")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Every other file of a checkpoint, by name."""

    files: Mapping[str, FileFact]


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending.

    Raises:
        ProblemError: The folder cannot be read.
    """
    matches = (_NAME.fullmatch(name) for name in _entries(folder) if os.path.isdir(folder / name))
    return sorted(int(match[1]) for match in matches if match)


@contextlib.contextmanager
def _naming(what: str, advice: str = "") -> Iterator[None]:
    """Raise failures of the file system as errors that begin with ``what`` and end with the advice."""
    try:
        yield
    except (OSError, ValueError) as failure:  # ValueError: a null character, or bytes that are no text
        raise ProblemError(f"{what}: {reason_of(failure)}{advice}") from failure


def _entries(folder: Path) -> list[str]:
    """Names in a folder, none if it does not exist."""
    if not os.path.isdir(folder):  # Path.is_dir raises where the name is too long, or is in another user's folder
        return []
    with _naming(f"cannot read the folder {str(folder)!r}", "; give one that may be read"):
        return sorted(os.listdir(folder))


def restore(folder: Path) -> None:
    """Restore a checkpoint that was being replaced by one of the same step when the job was killed.

    `finish` moves the old one away before it renames the new one; in between there is none.

    Raises:
        ProblemError: The folder cannot be written.
    """
    for name in _entries(folder):
        final = folder / name[1 : -len(".old")]
        if name.endswith(".old") and _LEFT_OVER.fullmatch(name) and not final.exists():
            what = f"cannot put the checkpoint {str(folder / name)!r} back in its place"
            with _naming(what, f"; rename it to {final.name!r}"):
                os.replace(folder / name, final)


def begin(folder: Path, step: int) -> Path:
    """Create an empty folder for the checkpoint of a step; what an interrupted job left is removed.

    Raises:
        ProblemError: The folder cannot be written.
    """
    with _naming(f"cannot write checkpoints into {str(folder)!r}", "; give a folder that may be written"):
        os.fspath(folder).encode()  # safetensors supports no other names
        folder.mkdir(parents=True, exist_ok=True)
        restore(folder)
        for entry in folder.iterdir():
            if _LEFT_OVER.fullmatch(entry.name):
                shutil.rmtree(entry)
        temporary = folder / f".{step_folder(folder, step).name}.tmp"
        temporary.mkdir()
    return temporary


def files_in(path: Path) -> list[str]:
    """Names of the files of a checkpoint except the manifest, sorted."""
    return [name for name in _entries(path) if name != MANIFEST]


def file_facts(path: Path, names: Sequence[str]) -> dict[str, FileFact]:
    """Size and hash of some files of a checkpoint."""
    facts = {}
    for name in names:
        with open(path / name, "rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            facts[name] = FileFact(bytes=stream.tell(), sha256=sha256)
    return facts


def write_manifest(path: Path, facts: Mapping[str, FileFact]) -> None:
    """Write the manifest of a checkpoint, given the facts of all other files."""
    manifest = Manifest(files={name: facts[name] for name in sorted(facts)})
    write_json(path / MANIFEST, encode(manifest, version=MANIFEST_FORMAT))


def finish(temporary: Path, step: int, facts: Mapping[str, FileFact], keep: int) -> None:
    """Write the manifest of a folder from `begin`, rename it, and remove the oldest checkpoints.

    ``facts`` are of every file in it. ``keep`` checkpoints stay, this one included: those of the highest steps.
    """
    write_manifest(temporary, facts)
    folder = temporary.parent
    _flush(temporary / MANIFEST)
    _flush(temporary)
    final = step_folder(folder, step)
    old = folder / f".{final.name}.old"
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    _flush(folder)
    if old.exists():
        shutil.rmtree(old)
    if later := [other for other in steps_in(folder) if other > step]:
        _LOGGER.warning(
            "%r has checkpoints of later steps than %d, up to %d: load() takes these; remove them if the job went back",
            str(folder),
            step,
            later[-1],
        )
    for other in steps_in(folder)[:-keep]:
        if other != step:
            shutil.rmtree(step_folder(folder, other))


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename does not come before the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain_file_bytes(path: Path) -> int:
    """Size of a regular file; pipes and devices, which may have no end, are refused."""
    with _naming(f"cannot read {str(path)!r}"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ProblemError(f"{str(path)!r} is no ordinary file, as those of a checkpoint are")
    return status.st_size


def verify(path: Path, rank: int, size: int) -> None:
    """Compare the files of a checkpoint with its manifest: their names, and sizes and hashes of a rank's share.

    Raises:
        ProblemError: No manifest or a damaged one; the folder has files that are not in it, or lacks some; or a file
            was changed after it was written.
    """
    where = path / MANIFEST
    _plain_file_bytes(where)
    facts = decode(Manifest, read_json(where, (MANIFEST_FORMAT,)), str(where), version=MANIFEST_FORMAT).files
    for name in facts:
        if Path(name).name != name:
            raise ProblemError(f"{where}: files name {name!r}, but a file of this folder is needed")
    present = set(files_in(path))
    if present != facts.keys():
        missing, unknown = sorted(facts.keys() - present), sorted(present - facts.keys())
        what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}, which its manifest does not name"
        raise ProblemError(f"the checkpoint {str(path)!r} {what}")
    for name in sorted(facts)[rank::size]:
        size_bytes = _plain_file_bytes(path / name)
        damage = f"has {size_bytes} bytes instead of {facts[name].bytes}" if size_bytes != facts[name].bytes else ""
        if not damage:
            with _naming(f"cannot read {str(path / name)!r}"):
                damage = "" if file_facts(path, [name])[name] == facts[name] else "was changed after it was written"
        if damage:
            raise ProblemError(f"the checkpoint {str(path)!r} is damaged: {name} {damage}")
