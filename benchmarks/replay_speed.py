"""How fast is a plan predicted, in full and after the change of one operator?

BERT-base's captured graph, four device types with costs made up for every case: only the number of operators, cases and
buckets matters for the speed. Writes ``benchmarks/results/replay-speed.json``.

    python benchmarks/replay_speed.py [--model bert-base] [--output PATH]
"""

from __future__ import annotations

import argparse
import datetime
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from qsync_opt.io import write_json
from qsync_opt.model import OpGraph, Role, load_graph
from qsync_opt.steps import PlannedStep, StepPredictor, bucket_borders, bucket_segments, network_tails
from qsync_opt.testing import random_step_costs
from qsync_opt.training import gradient_buckets

sys.path.insert(0, str(Path(__file__).resolve().parent))

RESULTS = Path(__file__).parent / "results"
TYPES = 4
PRECISIONS = ("INT8", "FP8", "BF16", "FP16", "TF32", "FP32")


def captured(model: str) -> OpGraph:
    """The graph of an example model."""
    from example_models import example

    from qsync_opt.runtimes.torch.capture import capture

    found = example(model)
    return capture(found.model, (), found.kwargs, name=model)


def measure(graph: OpGraph, repeats: int) -> dict[str, Any]:
    """Processor times in milliseconds, medians: the replay is one thread, other processes do not count."""
    buckets = gradient_buckets(graph)
    borders, segments = bucket_borders(graph, buckets), bucket_segments(graph, buckets)
    tails = network_tails([bucket.num_bytes // 100 for bucket in buckets], segments)
    predictors = [StepPredictor(graph, random_step_costs(graph, PRECISIONS, seed=k), borders) for k in range(TYPES)]
    generator = random.Random(0)
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]

    def draw() -> list[dict[str, str]]:
        return [{name: generator.choice(PRECISIONS) for name in names} for _ in predictors]

    def full(plans: list[dict[str, str]]) -> tuple[int, list[PlannedStep]]:
        steps = [p.plan(plan) for p, plan in zip(predictors, plans, strict=True)]
        return finish(steps), steps

    def finish(steps: list[PlannedStep]) -> int:
        return max(p.steady_ns(step, tails) for p, step in zip(predictors, steps, strict=True))

    full(draw())
    wholes, changes, works, plays = [], [], [], []
    for _ in range(repeats):
        plans = draw()
        start = time.thread_time()
        _, steps = full(plans)
        wholes.append(time.thread_time() - start)
        start = time.thread_time()
        finish(steps)
        plays.append(time.thread_time() - start)
        times = [p.steady_ns(step, tails) for p, step in zip(predictors, steps, strict=True)]
        for _ in range(20):
            k, name, precision = generator.randrange(TYPES), generator.choice(names), generator.choice(PRECISIONS)
            start = time.thread_time()
            predictors[k].change(steps[k], name, precision)
            works.append(time.thread_time() - start)
            times[k] = predictors[k].steady_ns(steps[k], tails)
            found = max(times)
            changes.append(time.thread_time() - start)
            plans[k][name] = precision
        if full(plans)[0] != found:
            raise AssertionError("an incremental prediction differs from the full one")
    return {
        "operators": len(graph),
        "adjustable": len(names),
        "buckets": len(buckets),
        "device_types": TYPES,
        "full_ms": statistics.median(wholes) * 1e3,
        "after_one_change_ms": statistics.median(changes) * 1e3,
        "of_which_the_change_ms": statistics.median(works) * 1e3,
        "steady_time_of_all_ms": statistics.median(plays) * 1e3,
        "ratio": statistics.median(wholes) / statistics.median(changes),
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--graph", type=Path, help="a captured graph; without it the model is captured")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS / "replay-speed.json")
    arguments = parser.parse_args()
    graph = load_graph(arguments.graph) if arguments.graph else captured(arguments.model)
    found = measure(graph, arguments.repeats)
    print(found)
    write_json(
        arguments.output,
        {
            "format": "qsync-bench-replay-speed/1",
            "date": datetime.date.today().isoformat(),
            "command": f"python benchmarks/replay_speed.py --model {arguments.model} --repeats {arguments.repeats}",
            "hardware": platform.machine(),
            "versions": {"python": platform.python_version()},
            "model": arguments.model,
            **found,
        },
    )


if __name__ == "__main__":
    main()
