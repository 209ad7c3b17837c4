"""How long planning the widths of millions of messages takes, and what is proved.

Four exchanges of eight workers, scores log-normal (spread 1.5) and of unlike size by exchange, pairs of unlike numbers
of messages and links; the limit is the exposed time of uniform 4 bits. Once each pair has a link of its own, round by
round (``ring``), once all go at once over shared ports (``ports``), each also with packing and unpacking of unlike
speed by worker (``packing``), a tenth as long as sending. The time is that of a whole `solve`, with the
evaluation of the answer.

    python benchmarks/message_planner.py        # writes benchmarks/results/messages-planner.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from results_head import processors, results_head

import qsync_opt
from qsync_opt.io import write_json
from qsync_opt.messages import (
    Exchange,
    Pair,
    Problem,
    all_to_all_round,
    evaluate,
    ring_rounds,
    uniform_plan,
    variance_factor,
)

HERE = Path(__file__).parent
WORKERS, DIM = 8, 256
NAMES = ("forward 1", "forward 2", "backward 1", "backward 2")


def make_problem(messages: int, links: str, seed: int = 0) -> Problem:
    """A problem of about so many messages."""
    rng = np.random.default_rng(seed)
    per_pair = messages / (len(NAMES) * WORKERS * (WORKERS - 1))

    def pair(source: int, target: int, scale: float) -> Pair:
        count = int(per_pair * rng.uniform(0.5, 1.5))
        beta = np.exp(rng.normal(scale, 1.5, size=count))
        return Pair(
            source=source, target=target, fixed_ns=20_000, ns_per_byte=float(rng.uniform(0.5, 2)), beta=beta,
            pack_ns_per_byte=float(pack_ns[source]), unpack_ns_per_byte=float(pack_ns[target]),
        )  # fmt: skip

    pack_ns = np.random.default_rng(seed).uniform(0.03, 0.1, WORKERS) * ("packing" in links)
    shares_ports = links.startswith("ports")
    rounds = all_to_all_round(WORKERS) if shares_ports else ring_rounds(WORKERS)
    exchanges = tuple(
        Exchange(
            name=name, dim=DIM, ports=shares_ports,
            rounds=tuple(tuple(pair(i, j, -1.5 * k) for i, j in group) for group in rounds),
        )
        for k, name in enumerate(NAMES)
    )  # fmt: skip
    free = Problem(
        name=f"{links} of {WORKERS} workers", time_limit_ns=None, variance_weight=1.0, time_weight=1.0,
        bits={str(bits): variance_factor(bits) for bits in (1, 2, 4, 8, 16, 32)}, exchanges=exchanges,
    )  # fmt: skip
    limit = int(evaluate(free, uniform_plan(free, 4)).exposed_ns)
    return replace(free, time_limit_ns=limit, time_weight=None)


def main() -> None:
    """Plan and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "messages-planner.json")
    arguments = parser.parse_args()
    records, asked = [], []
    for links in ("ring", "ports", "ring, packing", "ports, packing"):
        problem = make_problem(arguments.messages, links)
        for repeat in range(arguments.repeats):
            began = time.perf_counter()
            solution = qsync_opt.solve(problem)
            seconds = time.perf_counter() - began
            records.append(
                {
                    "links": links, "messages": problem.num_messages, "repeat": repeat, "seconds": seconds,
                    "objective": solution.objective, "bound": solution.bound, "gap": solution.gap,
                }
            )  # fmt: skip
            print(records[-1], flush=True)
        own = [record for record in records if record["links"] == links]
        seconds = statistics.median(record["seconds"] for record in own)
        gap = max(record["gap"] for record in own)
        what = f"{problem.num_messages} messages of {WORKERS} workers, {links}"
        for name, target, measured, met in (
            ("seconds to plan", "<= 2", round(seconds, 3), seconds <= 2),
            ("proved gap of", "<= 1e-5", float(f"{gap:.3g}"), gap <= 1e-5),
        ):
            asked.append({"what": f"{name} {what}", "asked": target, "measured": measured, "met": met, "note": ""})
    hardware = processors()
    head = results_head(hardware, {"numpy": np.__version__})
    write_json(arguments.output, {**head, "asked": asked, "records": records})


if __name__ == "__main__":
    main()
