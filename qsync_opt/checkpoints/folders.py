"""Checkpoints as folders: written under a temporary name, renamed when complete, and verified before they are read.

A checkpoint is a folder ``step-00000100`` of safetensors files, ``state.json`` and ``manifest.json``, which lists every
other file with its size and a hash of every 4 MiB, and says which box of which tensor lies where. It is written as
``.step-00000100.tmp``: data first, flushed to the disk; then the manifest; then the folder is renamed. A job that is
killed while it writes leaves the older checkpoints unchanged. Older manifests, with one SHA-256 per file, are read too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import mmap
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from qsync_opt.checkpoints.boxes import Box, check_cover
from qsync_opt.errors import NotInstalledError, ProblemError, reason_of
from qsync_opt.io import Json, check_fields, decode, encode, read_json, write_json

OLD_FORMAT, MANIFEST_FORMAT = "qsync-manifest/1", "qsync-manifest/2"
CHUNK_BYTES = 4 * 2**20
"""Bytes per hash: who reads a part of a file verifies that part."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.(tmp|old)")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """Size of a file in bytes, and the XXH3-128 of each `CHUNK_BYTES` of it; in old manifests one SHA-256 instead."""

    bytes: int
    chunks: Annotated[tuple[str, ...], Json(omitted=True)] = ()
    sha256: Annotated[str | None, Json(omitted=True)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPiece:
    """A box of a tensor, in row-major order from byte ``begin`` of a file on."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Its indices in the tensor."""
        return Box(self.offsets, self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Type (a name of safetensors, such as ``"F32"``), shape, and the pieces that cover a tensor exactly."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]

    def __post_init__(self) -> None:
        check_fields(self, "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Every other file of a checkpoint by name, and its tensors; old manifests have no tensors."""

    files: Mapping[str, FileFact]
    tensors: Annotated[Mapping[str, SavedTensor], Json(optional=True)] = field(default_factory=dict)


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


def hash_of(data: bytes | memoryview | mmap.mmap) -> str:
    """XXH3-128 of a chunk, in hexadecimal.

    Raises:
        NotInstalledError: xxhash is missing.
    """
    if importlib.util.find_spec("xxhash") is None:
        raise NotInstalledError("xxhash is missing, which checkpoints need: pip install 'qsync-opt[torch]'")
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def file_facts(path: Path, names: Sequence[str]) -> dict[str, FileFact]:
    """Size and hashes of some files of a checkpoint."""
    facts = {}
    for name in names:
        chunks = []
        with open(path / name, "rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                chunks.append(hash_of(chunk))
            facts[name] = FileFact(bytes=stream.tell(), chunks=tuple(chunks))
    return facts


def write_manifest(path: Path, facts: Mapping[str, FileFact], tensors: Mapping[str, SavedTensor] | None = None) -> None:
    """Write the manifest of a checkpoint, given the facts of all other files; None: its tensors stay as they are."""
    if tensors is None:
        tensors = read_manifest(path).tensors
    manifest = Manifest(files={name: facts[name] for name in sorted(facts)}, tensors=tensors)
    write_json(path / MANIFEST, encode(manifest, version=MANIFEST_FORMAT))


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder, old or new, checked as far as it can be without reading other files.

    Raises:
        ProblemError: There is none, it is damaged, or the pieces of a tensor do not cover it or leave their files.
    """
    where = path / MANIFEST
    _plain_file_bytes(where)
    data = read_json(where, (OLD_FORMAT, MANIFEST_FORMAT))
    manifest = decode(Manifest, data, str(where), version=data["format"])
    for name in manifest.files:
        if Path(name).name != name:
            raise ProblemError(f"{where}: files name {name!r}, but a file of this folder is needed")
    for name, tensor in manifest.tensors.items():
        try:
            check_cover(tensor.shape, (piece.box for piece in tensor.pieces), f"tensor {name!r}")
        except ProblemError as failure:
            raise ProblemError(f"{where}: {failure}") from failure
    return manifest


def finish(temporary: Path, step: int, facts: Mapping[str, FileFact], tensors: Mapping[str, SavedTensor]) -> None:
    """Write the manifest of a folder from `begin` and rename it: from then on it is a checkpoint.

    ``facts`` are of every file in it, which must be on the disk; ``tensors`` says what they hold.
    """
    write_manifest(temporary, facts, tensors)
    folder = temporary.parent
    flush(temporary / MANIFEST)
    flush(temporary)
    final = step_folder(folder, step)
    old = folder / f".{final.name}.old"
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    flush(folder)


def remove_older(folder: Path, step: int, keep: int) -> None:
    """Remove what the checkpoint of a step replaces: all but the ``keep`` of the highest steps, and its own older self.

    Freeing gigabytes takes the file system a while, and the checkpoint is complete without it. A folder that cannot be
    removed is only warned of: that is no failure of the checkpoint. One that is removed in part is no checkpoint any
    more, since it was renamed before.
    """
    steps = steps_in(folder)
    if steps[-1] > step:
        _LOGGER.warning(
            "%r has checkpoints of later steps than %d, up to %d: load() takes these; remove them if the job went back",
            str(folder),
            step,
            steps[-1],
        )
    try:
        replaced = folder / f".{step_folder(folder, step).name}.old"
        if replaced.exists():
            shutil.rmtree(replaced)
        for other in steps[:-keep]:
            if other != step:
                path = step_folder(folder, other)
                hidden = folder / f".{path.name}.tmp"
                os.replace(path, hidden)
                shutil.rmtree(hidden)
    except OSError as failure:
        _LOGGER.warning("an older checkpoint in %r was not removed: %s", str(folder), failure)


def flush(path: Path) -> None:
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


def verify(path: Path, rank: int = 0, size: int = 1) -> Manifest:
    """Compare the files of a checkpoint with its manifest: their names, and sizes and hashes of a rank's share.

    Raises:
        ProblemError: No manifest or a damaged one; the folder has files that are not in it, or lacks some; or a file
            was changed after it was written.
    """
    manifest = verify_sizes(path)
    for name in sorted(manifest.files)[rank::size]:
        fact = manifest.files[name]
        if fact.sha256 is None:
            verify_file(path, name, fact)
            continue
        with _naming(f"cannot read {str(path / name)!r}"), open(path / name, "rb") as stream:
            changed = hashlib.file_digest(stream, "sha256").hexdigest() != fact.sha256
        if changed:
            raise _damaged(path, name, "was changed after it was written")
    return manifest


def verify_sizes(path: Path) -> Manifest:
    """The manifest of a checkpoint, after comparing it with the names and sizes of the files.

    Raises:
        ProblemError: See `verify`.
    """
    manifest = read_manifest(path)
    facts = manifest.files
    present = set(files_in(path))
    if present != facts.keys():
        missing, unknown = sorted(facts.keys() - present), sorted(present - facts.keys())
        what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}, which its manifest does not name"
        raise ProblemError(f"the checkpoint {str(path)!r} {what}")
    for name, fact in facts.items():
        size_bytes = _plain_file_bytes(path / name)
        if size_bytes != fact.bytes:
            raise _damaged(path, name, f"has {size_bytes} bytes instead of {fact.bytes}")
        if fact.sha256 is None and len(fact.chunks) != -(-fact.bytes // CHUNK_BYTES):
            raise _damaged(path, name, f"has {len(fact.chunks)} hashes for {fact.bytes} bytes")
    return manifest


def read_chunk(path: Path, name: str, fact: FileFact, number: int, into: memoryview) -> None:
    """Read a chunk of a file and compare it with its hash.

    Args:
        path: Of the checkpoint.
        name: Of the file.
        fact: Of the file, from the manifest.
        number: Of the chunk.
        into: Memory of the chunk's size.

    Raises:
        ProblemError: The hash differs, or the file cannot be read.
    """
    with _naming(f"cannot read {str(path / name)!r}"), open(path / name, "rb", buffering=0) as stream:
        stream.seek(number * CHUNK_BYTES)
        rest = into
        while len(rest) and (count := stream.readinto(rest)):
            rest = rest[count:]
    if len(rest) or hash_of(into) != fact.chunks[number]:
        raise _damaged(path, name, f"was changed after it was written (in bytes from {number * CHUNK_BYTES})")


def verify_file(path: Path, name: str, fact: FileFact) -> None:
    """Compare all chunks of a file with their hashes.

    Raises:
        ProblemError: One differs, or the file cannot be read.
    """
    memory = memoryview(bytearray(min(CHUNK_BYTES, fact.bytes)))
    for number in range(len(fact.chunks)):
        read_chunk(path, name, fact, number, memory[: fact.bytes - number * CHUNK_BYTES])


def _damaged(path: Path, name: str, what: str) -> ProblemError:
    return ProblemError(f"the checkpoint {str(path)!r} is damaged: {name} {what}")
