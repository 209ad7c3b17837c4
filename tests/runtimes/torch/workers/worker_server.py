"""Runs scripts in processes of their own that find torch loaded: each is forked from this process, at once.

Its arguments name further modules to load. Reads one line of JSON per script: its path, its arguments, the environment,
flags of Python's, the files that take what it prints, and until when it may run: shortly before that it shows where it
is. Answers with the exit status when it has ended. This process runs no operator, so that a script inherits no thread;
it is started once per rank, so that ranks differ in the order of their sets as they do elsewhere.
"""

import faulthandler
import importlib
import json
import os
import runpy
import sys
import time
import warnings

from qsync_opt.runtimes.torch.job import auto_plan  # noqa: F401  (loaded for the scripts)


def redirect(path, number):
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(opened, number)
    os.close(opened)


def next_request():
    """What this process is to run: None in the server, after its last request."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            return request
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return None


def main():
    for name in sys.argv[1:]:
        importlib.import_module(name)
    request = next_request()
    if request is None:
        return
    redirect(os.devnull, 0)
    redirect(request["output"], 1)
    redirect(request["errors"], 2)
    faulthandler.dump_traceback_later(max(1.0, request["deadline"] - 10 - time.monotonic()), file=sys.stderr)
    os.environ.clear()
    os.environ.update(request["environment"])
    for flag, action in zip(request["flags"][::2], request["flags"][1::2], strict=True):
        if flag != "-W":
            raise ValueError(f"{flag}: of Python's flags only -W can be given to a script that is forked")
        warnings.simplefilter(action)
    sys.argv = [request["script"], *request["arguments"]]
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    main()
