"""Two ranks with a second process group; one of them stays silent there."""

import json
import sys
import time
from pathlib import Path

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.ddp import companion_group, gather_json, process_group

TIMEOUT_S, SILENCE_S = 3.0, 60.0

rank, world_size, port = map(int, sys.argv[1:4])
answer = Path(sys.argv[4]) / "answer"
with process_group(rank, world_size, port, timeout_s=TIMEOUT_S):
    group = companion_group()
    seen = gather_json(rank, group)
    if rank:  # it stays, so that nothing but time tells that it is silent
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline and not answer.exists():
            time.sleep(0.05)
        print(json.dumps({"seen": seen, "waited_s": time.monotonic() - deadline + SILENCE_S}))
        sys.exit()
    try:
        gather_json("anyone?", group)
        text = "all answered"
    except NotReadyError as failure:
        text = str(failure)
    answer.touch()
    print(json.dumps({"seen": seen, "text": text}))
