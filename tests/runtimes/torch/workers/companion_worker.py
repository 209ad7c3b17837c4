"""Two ranks with a second process group; one of them stays silent there."""

import json
import sys
import time

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.ddp import companion_group, gather_json, process_group

TIMEOUT_S, SILENCE_S = 3.0, 12.0

rank, world_size, port = map(int, sys.argv[1:4])
with process_group(rank, world_size, port, timeout_s=TIMEOUT_S):
    group = companion_group()
    seen = gather_json(rank, group)
    if rank:
        time.sleep(SILENCE_S)
        print(json.dumps({"seen": seen}))
        sys.exit()
    try:
        gather_json("anyone?", group)
        text = "all answered"
    except NotReadyError as failure:
        text = str(failure)
    print(json.dumps({"seen": seen, "text": text}))
