"""Saves that end at every point of their protocol: killed, or refused by the system; what a load then gives is printed.

Each attempt is a forked world of one or two ranks on a folder that has the checkpoint of step 1, whose weights are 1;
it saves step 2, whose weights are 2. One rank meets its fault just before its n-th call of the system that changes
files. Prints, for each n until a save meets no fault: the world, the fault, the call, how the ranks ended, the loaded
value.
"""

import errno
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from qsync_opt.errors import NotReadyError, ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints

CALLS = ("mkdir", "open", "pwrite", "fsync", "replace", "unlink", "rmdir")


def weights(value):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


class Fault:
    """Comes before the n-th call that changes files."""

    def __init__(self, number, kind, folder):
        self.left, self.kind, self.folder = number, kind, str(folder)
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, original):
        def call(*arguments, **options):
            if self._changes_files(name, arguments):
                if self.left == 0:
                    with open(f"{self.folder}.call", "w") as stream:
                        stream.write(name)
                    if self.kind == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.left -= 1
            return original(*arguments, **options)

        return call

    def _changes_files(self, name, arguments):
        if name == "open":
            return bool(arguments[1] & os.O_CREAT) and str(arguments[0]).startswith(self.folder)
        if name in ("pwrite", "fsync"):
            return os.readlink(f"/proc/self/fd/{arguments[0]}").startswith(self.folder)
        return True


def rank_process(folder, rank, size, fault):
    """Run in a forked process, which it ends: 0 if it saved, 3 if it was told why not, 1 otherwise."""
    code = 1
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        if size > 1:
            store = dist.FileStore(str(folder) + ".store", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        checkpoints = Checkpoints(folder, weights(2))
        if rank == size - 1:
            Fault(fault[1], fault[0], folder)
        try:
            if fault[2] == "background":
                checkpoints.save_in_background(2)
                checkpoints.wait()
            else:
                checkpoints.save(2)
            code = 0
        except (ProblemError, NotReadyError) as failure:
            assert any(text in str(failure) for text in ("step 2 was not written", "cannot write", "rank")), failure
            code = 3
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def loaded(folder):
    model = weights(9)
    Checkpoints(folder, model).load()
    values = {value for tensor in model.state_dict().values() for value in tensor.reshape(-1).tolist()}
    return values.pop() if len(values) == 1 else "mixed"


def attempt(place, number, size, kind, way):
    folder = place / f"{kind}-{way}-{size}-{number}"
    Checkpoints(folder, weights(1)).save(1)
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            rank_process(folder, rank, size, (kind, number, way))
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    log = Path(f"{folder}.call")
    call = log.read_text() if log.exists() else None
    value = loaded(folder)
    Checkpoints(folder, weights(3)).save(3)  # the job that goes on can save
    again = loaded(folder)
    print(json.dumps({"size": size, "kind": kind, "way": way, "call": call, "ended": ended, "loaded": [value, again]}))
    return call is not None


if __name__ == "__main__":
    root, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")]
    torch.set_num_threads(1)
    for world_size in sizes:
        for fault_kind in ("kill", "full"):
            for how in ("waiting", "background"):
                point = 0
                while attempt(root, point, world_size, fault_kind, how):
                    point += 1
