"""The write balance: its bound beside optima, and its plans for real models on up to 4,096 simulated ranks.

Random cases are solved by the default method, by trying every plan, and their relaxation (rows may be divided) by a
linear program. Models are GPT-2 medium and Llama 2 7B with AdamW's states, replicated on all ranks or on groups of
them; ``torch`` is the rule of ``torch.distributed.checkpoint``: each whole shard to the rank with least bytes so far.

    python benchmarks/write_balance.py        # writes benchmarks/results/checkpoints-write-balance.json
    python benchmarks/write_balance.py --cases 20 --ranks 8,16 --output /tmp/smoke.json
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results_head import asked_row, processors, results_head

from qsync_opt.checkpoints import Box, Piece, Problem, Shard, Writer, assign_boxes, evaluate, replica_problem
from qsync_opt.formulations.linear import LinearModel, LinearOptions, required_solver
from qsync_opt.io import write_json
from qsync_opt.systems import solve

HERE = Path(__file__).parent
Record = dict[str, Any]


def gpt2_medium() -> dict[str, tuple[int, ...]]:
    """Shapes of its parameters, 355 million in all."""
    width, shapes = 1024, {"wte": (50257, 1024), "wpe": (1024, 1024), "ln_f.w": (1024,), "ln_f.b": (1024,)}
    for layer in range(24):
        linears = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        for name, shape in linears.items():
            shapes |= {f"{layer}.{name}.w": shape, f"{layer}.{name}.b": shape[1:]}
        shapes |= {f"{layer}.{name}": (width,) for name in ("ln_1.w", "ln_1.b", "ln_2.w", "ln_2.b")}
    return shapes


def llama_7b() -> dict[str, tuple[int, ...]]:
    """Shapes of its parameters, 6.7 billion in all."""
    width, inner = 4096, 11008
    shapes: dict[str, tuple[int, ...]] = {"embed": (32000, width), "head": (32000, width), "norm": (width,)}
    for layer in range(32):
        shapes |= {f"{layer}.{name}": (width, width) for name in "qkvo"}
        shapes |= {f"{layer}.{name}": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{layer}.down": (width, inner), f"{layer}.norm_1": (width,), f"{layer}.norm_2": (width,)}
    return shapes


def shards_of(shapes: dict[str, tuple[int, ...]], ranks: int, groups: int) -> list[Shard]:
    """Weights and two states of each, split over ``groups`` by rows; every rank of a group holds the same."""
    members = [tuple(range(group, ranks, groups)) for group in range(groups)]
    shards = []
    for state in ("model", "exp_avg", "exp_avg_sq"):
        for name, shape in shapes.items():
            for group, own in enumerate(members):
                begin, end = shape[0] * group // groups, shape[0] * (group + 1) // groups
                box = Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))
                shards.append(Shard(tensor=f"{state}.{name}", shape=shape, itemsize=4, box=box, ranks=own))
    return shards


def torch_rule(shards: list[Shard], ranks: int) -> int:
    """Bytes of the rank that writes most under the rule of torch."""
    loads = [0] * ranks
    for shard in shards:
        rank = min(shard.ranks, key=loads.__getitem__)
        loads[rank] += shard.box.size * shard.itemsize
    return max(loads)


def model_case(model: str, ranks: int, groups: int) -> Record:
    """One model on so many ranks."""
    shards = shards_of(gpt2_medium() if model == "GPT-2 medium" else llama_7b(), ranks, groups)
    hosts = [f"h{rank // 8}" for rank in range(ranks)]
    wall, processor = time.perf_counter(), time.process_time()
    problem = replica_problem(shards, hosts)
    solution = solve(problem)
    planned = time.perf_counter() - wall, time.process_time() - processor
    assert solution.plan is not None
    boxes = assign_boxes(shards, problem, solution.plan)
    assigned = time.perf_counter() - wall, time.process_time() - processor
    written = evaluate(problem, solution.plan).writer_bytes.values()
    mean = problem.num_bytes / ranks
    return {
        "model": model,
        "ranks": ranks,
        "groups": groups,
        "pieces": len(problem.pieces),
        "boxes": sum(map(len, boxes)),
        "max_over_mean": round(max(written) / mean, 6),
        "torch_max_over_mean": round(torch_rule(shards, ranks) / mean, 6),
        "gap": solution.gap,
        "plan_s": round(planned[0], 3),
        "plan_processor_s": round(planned[1], 3),
        "boxes_s": round(assigned[0] - planned[0], 3),
        "boxes_processor_s": round(assigned[1] - planned[1], 3),
    }


def random_problem(source: random.Random) -> Problem:
    """Few pieces, writers and hosts of unlike rates: small enough to try every plan."""
    hosts = {f"h{k}": source.uniform(0.3, 3.0) for k in range(source.randint(1, 3))}
    names = [f"r{k}" for k in range(source.randint(1, 3))]
    writers = {n: Writer(host=source.choice(list(hosts)), bytes_per_s=source.uniform(0.3, 3.0)) for n in names}
    pieces = tuple(
        Piece(
            name=f"p{k}",
            row_bytes=source.choice([1, 2, 7]),
            rows=source.randint(1, 4),
            writers=tuple(sorted(source.sample(names, source.randint(1, len(names))))),
        )
        for k in range(source.randint(1, 3))
    )
    return Problem(name="random", hosts=hosts, writers=writers, pieces=pieces)


def relaxed_seconds(problem: Problem) -> float:
    """Least time if rows could be divided, by a solver of linear programs."""
    model = LinearModel(name="relaxed")
    loads: dict[str, dict[int, float]] = {name: {} for name in problem.writers}
    for piece in problem.pieces:
        columns = {name: model.add_column(f"{piece.name} {name}", upper=piece.num_bytes) for name in piece.writers}
        model.add_row(piece.name, dict.fromkeys(columns.values(), 1.0), lower=piece.num_bytes, upper=piece.num_bytes)
        for name, column in columns.items():
            loads[name][column] = 1.0
    seconds = model.add_column("time", upper=float("inf"), cost=1.0)
    for name, writer in problem.writers.items():
        model.add_row(name, {**loads[name], seconds: -writer.bytes_per_s}, upper=0.0)
    for host, rate in problem.hosts.items():
        terms = {k: v for n, w in problem.writers.items() if w.host == host for k, v in loads[n].items()}
        model.add_row(host, {**terms, seconds: -rate}, upper=0.0)
    solver = required_solver(None, "the relaxation", continuous=True)
    values = solver.solve(model, LinearOptions()).values
    assert values is not None
    return values[seconds]


def random_case(number: int) -> Record:
    """The default method beside every plan, and its bound beside the linear program."""
    problem = random_problem(random.Random(number))
    default, best = solve(problem), solve(problem, "exhaustive")
    relaxed = relaxed_seconds(problem)
    return {
        "case": number,
        "default": default.objective,
        "bound": default.bound,
        "optimum": best.objective,
        "relaxed": relaxed,
    }


def asked(cases: list[Record], models: list[Record]) -> list[Record]:
    """One row for each figure that was set as a target."""

    beyond = sum(case["bound"] > case["optimum"] * (1 + 1e-9) for case in cases)
    below = sum(case["bound"] < case["relaxed"] * (1 - 1e-6) for case in cases)
    rows = [
        asked_row(
            f"bounds above the optimum, {len(cases)} random cases", "0", beyond, beyond == 0, "every plan was tried"
        ),
        asked_row(
            f"bounds below the relaxation, {len(cases)} random cases", "0", below, below == 0, "by a linear program"
        ),
    ]
    worst = max(models, key=lambda each: each["max_over_mean"])
    where = f"{worst['model']}, {worst['ranks']} ranks in {worst['groups']} groups"
    met = worst["max_over_mean"] <= 1.01
    rows.append(asked_row("max / mean of bytes, any number of ranks", "<= 1.01", worst["max_over_mean"], met, where))
    worse = sum(each["max_over_mean"] > each["torch_max_over_mean"] * (1 + 1e-6) for each in models)
    rows.append(asked_row("models on which torch's rule is better", "0", worse, worse == 0))
    most = max(each["ranks"] for each in models)
    for each in (each for each in models if each["ranks"] == most):
        what = f"planning {each['model']}, {most} ranks in {each['groups']} groups, {each['pieces']} pieces"
        note = f"{each['plan_s']} s by the clock of a shared machine"
        rows.append(asked_row(what, "<= 1 s", each["plan_processor_s"], each["plan_processor_s"] <= 1.0, note))
    return rows


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--ranks", default="8,16,64,512,4096")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "checkpoints-write-balance.json")
    arguments = parser.parse_args()
    models = []
    for model in ("GPT-2 medium", "Llama 2 7B"):
        for ranks in map(int, arguments.ranks.split(",")):
            for groups in (1, 8, 64):
                if groups < ranks:
                    models.append(model_case(model, ranks, groups))
                    print(models[-1], flush=True)
    cases = [random_case(number) for number in range(arguments.cases)]
    data = {
        **results_head(processors()),
        "asked": asked(cases, models),
        "records": models + cases,
    }
    write_json(arguments.output, data)
    for each in data["asked"]:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} {each['note']}")


if __name__ == "__main__":
    main()
