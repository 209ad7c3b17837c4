"""Every way in which a crash may leave a folder while a checkpoint is saved, by replay of what the save did to it.

The model of the disk: entries of a directory become durable in order, those before the last fsync of the directory
surely; directories are independent of each other. The content of a file is durable from its fsync on; before, it may be
lost, torn or there.
"""

import contextlib
import hashlib
import itertools
import os
import sys
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints

_RECORDERS = []
_EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove"}


def _on_event(event, arguments):
    if _RECORDERS and event in _EVENTS:
        recorder, *_RECORDERS[:] = _RECORDERS  # looking at the folder raises events, too
        recorder.look()
        _RECORDERS.append(recorder)


sys.addaudithook(_on_event)


@dataclass
class Entry:
    """A file (with its content, and the durable one) or a directory (with its history of entries)."""

    content: bytes | None = None
    durable: bytes = b""
    history: list = field(default_factory=lambda: [{}])
    synced: int = 0


class Recorder:
    """What happens to a folder, as a disk that could crash at any time; ``crashes`` are all folders it could leave."""

    def __init__(self, root):
        self.root = root
        self.entries = {os.stat(root).st_ino: Entry()}
        self.crashes = {}
        self.note()
        for entry in self.entries.values():  # what was there before is durable
            entry.durable, entry.synced = entry.content or b"", len(entry.history) - 1
        self.crash()

    def look(self):
        """Note what has changed since the last look, and how a crash would leave it."""
        self.note()
        self.crash()

    def note(self):
        """Note the entries of directories and the contents of files."""
        seen = set()
        for path, names, files in os.walk(self.root):
            seen.add(self._look_at(path, [*names, *files]))
            for name in files:
                number = os.stat(os.path.join(path, name)).st_ino
                seen.add(number)
                with open(os.path.join(path, name), "rb") as stream:
                    self.entries.setdefault(number, Entry()).content = stream.read()
        for number in self.entries.keys() - seen:
            self.entries[number].history.append({})
            self._gone(number)

    def _gone(self, number):
        # The system may give the number to another file; directories keep pointing to what it was.
        entry = self.entries.pop(number)
        for other in self.entries.values():
            other.history = [{n: (entry if e == number else e) for n, e in h.items()} for h in other.history]

    def _look_at(self, path, names):
        number = os.stat(path).st_ino
        entry = self.entries.setdefault(number, Entry())
        now = {name: os.stat(os.path.join(path, name)).st_ino for name in names}
        if now != entry.history[-1]:
            entry.history.append(now)
        return number

    def fsync(self, descriptor):
        entry = self.entries[os.fstat(descriptor).st_ino]
        if entry.content is None:
            entry.synced = len(entry.history) - 1
        else:
            entry.durable = entry.content

    def crash(self):
        """Add every folder that a crash may leave now."""
        root = self.entries[os.stat(self.root).st_ino]
        for moment in range(root.synced, len(root.history)):
            for early, kept in itertools.product((True, False), ("lost", "torn", "there")):
                tree = dict(self._tree(root, moment, early, kept))
                key = hashlib.sha256(repr(sorted(tree.items())).encode()).hexdigest()
                self.crashes[key] = tree

    def _tree(self, entry, moment, early, kept, place=""):
        for name, number in entry.history[moment].items():
            child = number if isinstance(number, Entry) else self.entries[number]
            path = os.path.join(place, name)
            if child.content is not None:
                torn = child.content[: len(child.content) // 2] + bytes(len(child.content) - len(child.content) // 2)
                unsure = {"lost": child.durable, "torn": torn, "there": child.content}
                yield path, child.content if child.durable == child.content else unsure[kept]
            else:
                yield path, None
                yield from self._tree(child, child.synced if early else len(child.history) - 1, early, kept, path)


@contextlib.contextmanager
def recording(folder, monkeypatch):
    recorder = Recorder(folder)
    fsync = os.fsync

    def noted(descriptor):
        _RECORDERS.clear()
        recorder.look()
        fsync(descriptor)
        recorder.fsync(descriptor)
        recorder.crash()
        _RECORDERS.append(recorder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        _RECORDERS.append(recorder)
        try:
            yield recorder
        finally:
            _RECORDERS.clear()
    recorder.look()


def _build(tree, place):
    place.mkdir()
    for path, content in tree.items():
        if content is None:
            (place / path).mkdir(parents=True, exist_ok=True)
        else:
            (place / path).write_bytes(content)


def _weights(value):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def _loaded(place):
    """The value that a load gives: None without a checkpoint, "refused", or "mixed"."""
    model = _weights(9)
    try:
        if Checkpoints(place, model).load() is None:
            return None
    except ProblemError:
        return "refused"
    values = {value for tensor in model.state_dict().values() for value in tensor.reshape(-1).tolist()}
    return values.pop() if len(values) == 1 else "mixed"


def _outcomes(folder, tmp_path, monkeypatch, step, keep, value=2, background=False):
    """What a load gives after each crash of a save of ``value``."""
    with recording(folder, monkeypatch) as recorder:
        checkpoints = Checkpoints(folder, _weights(value), keep=keep)
        if background:
            checkpoints.save_in_background(step)
            checkpoints.wait()
        else:
            checkpoints.save(step)
    outcomes = []
    for number, tree in enumerate(recorder.crashes.values()):
        place = tmp_path / f"crash-{number}"
        _build(tree, place)
        outcomes.append(_loaded(place))
        # And the job that goes on can save.
        if number % 10 == 0:
            Checkpoints(place, _weights(3), keep=keep).save(7)
            assert _loaded(place) == 3
    return outcomes


@pytest.mark.parametrize(
    ("step", "keep", "background"), [(5, 2, False), (5, 1, False), (4, 2, False), (4, 1, False), (5, 1, True)]
)
def test_after_any_crash_there_is_the_old_checkpoint_or_the_new_one(tmp_path, monkeypatch, step, keep, background):
    folder = tmp_path / "run"
    Checkpoints(folder, _weights(1)).save(4)
    outcomes = _outcomes(folder, tmp_path, monkeypatch, step, keep, background=background)
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 12


def test_after_any_crash_of_the_first_save_there_is_none_or_it(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    assert set(_outcomes(folder, tmp_path, monkeypatch, 1, 2)) == {None, 2}


@pytest.mark.parametrize("part", ["data", "folder"])
def test_the_replay_sees_what_was_not_flushed(tmp_path, monkeypatch, part):
    """A save that leaves out a flush does lose checkpoints in the model of the disk."""
    folder = tmp_path / "run"
    Checkpoints(folder, _weights(1)).save(4)
    original = recording

    @contextlib.contextmanager
    def lazily(folder, patch):
        with original(folder, patch) as recorder:
            noted = os.fsync

            def only_some(descriptor):
                if os.path.isdir(f"/proc/self/fd/{descriptor}") != (part == "folder"):
                    noted(descriptor)

            with patch.context() as inner:
                inner.setattr(os, "fsync", only_some)
                yield recorder

    monkeypatch.setitem(globals(), "recording", lazily)
    assert "refused" in _outcomes(folder, tmp_path, monkeypatch, 5, 1)
