"""The endpoint under many clients on two stages: what is lost, what clients wait for, and the memory of the stages.

    python benchmarks/serving_load.py [--clients 64] [--seconds 120] [--output FILE]

A small model is made on the spot. Times are those of the machine as it is; nothing lost and flat memory hold anywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from results_head import processors, results_head

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.serving import group_names, sample_config, write_sample
from qsync_opt.serving import Plan, Stage

SIZES = {"layers": 8, "hidden": 384, "inner": 1024, "heads": 6, "kv_heads": 2, "vocabulary": 2048}
GROWTH = 0.05


def main() -> None:
    """Run the load test of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "serving-load.json"))
    options = parser.parse_args()
    head = results_head(processors(), {"torch": torch.__version__})
    names = group_names(SIZES["layers"])
    half = len(names) // 2
    stages = (Stage(device="a", groups=names[:half]), Stage(device="b", groups=names[half:]))
    with tempfile.TemporaryDirectory() as folder:
        model = write_sample(Path(folder) / "model", sample_config(**SIZES))
        plan = Path(folder) / "plan.json"
        Plan(microbatch=0, stages=stages, schemes=dict.fromkeys(names, "W8")).save(plan)
        command = [
            str(Path(sys.executable).parent / "qsync-opt"), "serving", "bench", str(model), "--plan", str(plan),
            "--clients", str(options.clients), "--seconds", str(options.seconds), "--rounds", "1", "--quiet", "--json",
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    load = json.loads(done.stdout)["load"]
    lost, memory = sum(load["errors"].values()), load["memory_mib"]
    growth = memory["end"] / memory["begin"] - 1
    rows = [
        {"what": f"answers lost, {options.clients} clients for {options.seconds:g} s", "asked": "0", "measured": lost,
         "met": lost == 0 and load["completed"] > 0, "note": f"{load['completed']} answers"},
        {"what": "memory of both stages at the end over that after a tenth of the time, less 1",
         "asked": f"<= {GROWTH}", "measured": round(growth, 4), "met": growth <= GROWTH,
         "note": f"{memory['begin']:.1f} MiB, {memory['end']:.1f} MiB, {memory['most']:.1f} MiB at most"},
    ]  # fmt: skip
    write_json(options.output, {**head, "asked": rows, "records": [load]})
    for row in rows:
        print(f"{row['what']}: asked {row['asked']}, measured {row['measured']} ({row['note']})")


if __name__ == "__main__":
    main()
