"""Further commands of the system messages: from a graph to parts, a plan, and training over workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync_opt.cli.console import (
    EXIT_INFEASIBLE,
    EXIT_OK,
    Json,
    PlanOutput,
    Quiet,
    Verbose,
    check_outputs,
    choice,
    estimates_json,
    gap_text,
    option,
    print_estimates,
    print_json,
    print_table,
)
from qsync_opt.errors import NotInstalledError, ProblemError, UnsupportedError

app = typer.Typer(rich_markup_mode=None)

_PACKAGES = ("torch", "torch_geometric", "pymetis", "safetensors")
_MODELS = ("gcn", "sage", "gat")
_WIDTHS = (1, 2, 4, 8, 16, 32)
_LINKS = ("ring", "all-to-all")
_LEAST_EPOCHS = 10

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="parts of a graph, written by partition")]
Model = Annotated[str, option("NAME", f"kind of convolutions: {', '.join(_MODELS)}", **choice(*_MODELS))]
Layers = Annotated[int, option("N", "number of convolutions", min=1)]
Hidden = Annotated[int, option("N", "width between convolutions", min=1)]
Seed = Annotated[int, option("N", "seed of weights, and of the rounding", min=0)]
Menu = Annotated[str, option("BITS", "widths to choose from, with commas between")]
Weigh = Annotated[
    bool, typer.Option("--weigh-layers", help="measure what each exchange's variance does to the gradient")
]
Links = Annotated[str, option("NAME", "ring (pair by pair) or all-to-all (pairs share ports)", **choice(*_LINKS))]
Budget = Annotated[int, option("BITS", "allow the exposed time of this uniform width, with its packing")]


@app.command()
def partition(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="safetensors: edge_index, x, and y and masks if any")],
    parts: Annotated[int, option("N", "number of workers", min=1)],
    output: Annotated[Path, option("FOLDER", "folder for the parts; must hold no others")],
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Split a graph into one part for each worker, with few edges between them."""
    messages = _runtime()
    if list(output.glob("part-*.safetensors")):
        raise ProblemError(f"--output {str(output)!r} holds parts already; give an empty or a new folder")
    graph_parts = messages.partition_graph(messages.load_graph(graph), parts)
    _save_parts(messages, graph_parts, output)
    rows = [_part_row(part) for part in graph_parts]
    if json:
        print_json({"parts": rows})
    else:
        print_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    return EXIT_OK


@app.command()
def plan(
    folder: Folder,
    output: PlanOutput = None,
    problem: Annotated[str | None, option("PROBLEM", "write the problem to this file")] = None,
    model: Model = "gcn",
    layers: Layers = 3,
    hidden: Hidden = 64,
    epochs: Annotated[int, option("N", "epochs in which ranges are traced", min=1)] = 20,
    menu: Menu = "1,2,4,8,16,32",
    budget_bits: Budget = 4,
    links: Links = "ring",
    weigh_layers: Weigh = False,
    packing: Annotated[
        list[str] | None,
        option("WORKER=HARDWARE", "estimate packing on this worker, such as 1=T4, for one that is not this machine"),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Train a little over workers of this machine, measure ranges and links, and solve for the widths."""
    from qsync_opt.systems import solve

    messages = _runtime()
    check_outputs([output, problem], [])
    hardware = dict(_worker(text) for text in packing or [])
    widths = _menu(menu)
    if budget_bits not in widths:
        raise UnsupportedError(f"--budget-bits is {budget_bits}, but it must be on the menu {menu}")
    options = messages.TrainingOptions(
        model=model, layers=layers, hidden=hidden, epochs=epochs, seed=seed, weigh_layers=weigh_layers,
        messages=messages.MessageOptions(
            menu=widths, initial_bits=widths[-1], budget_bits=budget_bits, replan_steps=0, seed=seed,
            links=links,
        ),
    )  # fmt: skip
    run = messages.Run(options=options, with_problem=True)
    with messages.part_workers(folder) as train:
        _, data = train(run, _progress("tracing", quiet))
    built = _problem(data)
    if hardware:
        built = _with_packing(built, hardware, budget_bits)
    if problem is not None:
        built.save(problem)
    solution = solve(built)
    if solution.plan is not None and output is not None:
        solution.plan.save(output)
    if json:
        result = solution.to_json()
        evaluation = solution.evaluation.to_json() if solution.evaluation else None
        print_json(result | {"evaluation": evaluation} | estimates_json(built.extras))
    elif solution.evaluation is None:
        print(solution.reason)
    else:
        _print_plan(built, solution)
    return EXIT_OK if solution.plan is not None else EXIT_INFEASIBLE


@app.command()
def run(
    folder: Folder,
    plan: Annotated[str | None, option("PLAN", "send in the widths of this plan")] = None,
    bits: Annotated[int | None, option("BITS", "send everything in this width instead")] = None,
    model: Model = "gcn",
    layers: Layers = 3,
    hidden: Hidden = 64,
    epochs: Annotated[int, option("N", "epochs", min=1)] = 60,
    rate: Annotated[float, option("R", "learning rate of Adam")] = 0.01,
    replan: Annotated[int, option("N", "epochs between plans made in training", min=1)] = 20,
    menu: Menu = "1,2,4,8,16,32",
    budget_bits: Budget = 4,
    links: Links = "ring",
    weigh_layers: Weigh = False,
    device: Annotated[str, option("NAME", "cpu or cuda", **choice("cpu", "cuda"))] = "cpu",
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Train over one worker for each part: those of torchrun if it started this, else processes of this machine.

    Without --plan and --bits, plans are made in training.
    """
    messages = _runtime()
    if plan is not None and bits is not None:
        raise UnsupportedError("--plan and --bits exclude each other: a plan says the width of every message")
    if bits is not None and bits not in _WIDTHS:
        raise UnsupportedError(f"--bits is {bits}, but allowed are {', '.join(map(str, _WIDTHS))}")
    widths = _menu(menu)
    chosen = {"menu": widths, "budget_bits": budget_bits, "seed": seed, "links": links}
    if plan is not None or bits is not None:
        chosen |= {"replan_steps": 0, "initial_bits": 8 if bits is None else bits}
    else:
        chosen |= {"replan_steps": replan}
    options = messages.TrainingOptions(
        model=model, layers=layers, hidden=hidden, epochs=epochs, rate=rate, seed=seed,
        weigh_layers=weigh_layers,
        messages=messages.MessageOptions(**chosen),
    )  # fmt: skip
    work = messages.Run(options=options, plan=None if plan is None else _plan(plan).to_json())
    if messages.under_launcher():
        rank, trained = messages.train_own_part(folder, work, device)
        if rank:
            return EXIT_OK
    elif device == "cuda":
        raise UnsupportedError("--device cuda needs one process for each card: torchrun --nproc-per-node N ... ")
    else:
        with messages.part_workers(folder) as train:
            trained, _ = train(work, _progress("training", quiet))
    if json:
        print_json(trained.to_json())
    else:
        label = f"{bits} bits" if bits is not None else "planned"
        _print_runs({label: trained})
    return EXIT_OK


@app.command()
def demo(
    output: Annotated[Path, option("FOLDER", "folder for the files it writes")] = Path("messages-demo"),
    nodes: Annotated[int, option("N", "nodes of the graph", min=100)] = 4000,
    epochs: Annotated[int, option("N", f"epochs of each of the three runs, at least {_LEAST_EPOCHS}")] = 40,
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Train a GNN on two workers in FP32, in 16 bits and in planned widths, and show plan, bytes, time and accuracy."""
    from qsync_opt.io import write_json
    from qsync_opt.systems import solve

    if epochs < _LEAST_EPOCHS:
        raise UnsupportedError(f"--epochs is {epochs}: at least {_LEAST_EPOCHS} are needed to time an epoch")
    messages = _runtime()
    for old in output.glob("part-*.safetensors"):
        old.unlink()
    graph = messages.block_graph(nodes, mixing=0.5, noise=5.0, seed=seed)
    parts = messages.partition_graph(graph, 2)
    _save_parts(messages, parts, output)

    def options(**chosen: Any) -> Any:
        return messages.TrainingOptions(
            epochs=epochs, seed=seed, messages=messages.MessageOptions(replan_steps=0, seed=seed, **chosen)
        )

    with messages.part_workers(output) as train:
        exact, data = train(messages.Run(options=options(initial_bits=32), with_problem=True), _progress("FP32", quiet))
        half, _ = train(messages.Run(options=options(initial_bits=16)), _progress("16 bits", quiet))
        problem = _problem(data)
        solution = solve(problem)
        if solution.plan is None:
            raise ProblemError(f"no plan was found: {solution.reason}")
        problem.save(output / "problem.json")
        solution.plan.save(output / "plan.json")
        planned, _ = train(messages.Run(options=options(), plan=solution.plan.to_json()), _progress("planned", quiet))
    runs = {"FP32": exact, "16 bits": half, "planned": planned}
    result = {
        "parts": [_part_row(part) for part in parts],
        "solution": solution.to_json(),
        "evaluation": solution.evaluation.to_json(),
        "runs": {label: each.to_json() for label, each in runs.items()},
    }
    write_json(output / "result.json", result)
    if json:
        print_json(result)
        return EXIT_OK
    print(f"a graph of {nodes} nodes and {graph.edge_index.shape[1]} edges in two parts:")
    rows = result["parts"]
    print_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    print()
    _print_plan(problem, solution)
    print()
    _print_runs(runs)
    print(f"\nfiles: {output}")
    return EXIT_OK


def _runtime() -> Any:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise NotInstalledError(f"messages need {', '.join(missing)}: pip install 'qsync-opt[messages]'")
    return import_module("qsync_opt.runtimes.torch.messages")  # the core does not depend on runtimes


def _save_parts(messages: Any, parts: list[Any], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ProblemError(f"--output {str(folder)!r} is a file, but it must be a folder or a new name") from None
    for part in parts:
        part.save(messages.part_file(folder, part.rank))


def _part_row(part: Any) -> dict[str, int]:
    return {
        "part": part.rank,
        "nodes": part.own,
        "central": part.central,
        "edges": part.edge_index.shape[1],
        "sends": part.send.numel(),
        "receives": part.halo.numel(),
    }


def _menu(text: str) -> tuple[int, ...]:
    allowed = ", ".join(map(str, _WIDTHS))
    try:
        widths = tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        raise UnsupportedError(f"--menu is {text!r}, but it must be widths with commas between: {allowed}") from None
    wrong = [width for width in widths if width not in _WIDTHS]
    if wrong:
        raise UnsupportedError(f"--menu has the width {wrong[0]}, but allowed are {allowed}")
    return widths


def _problem(data: Any) -> Any:
    from qsync_opt.messages import Problem

    return Problem.from_json(data)


def _worker(text: str) -> tuple[int, Any]:
    from qsync_opt.costs.learned import known_device

    worker, _, name = text.partition("=")
    if not worker.isdecimal() or not name:
        raise ProblemError(f"packing is {text!r}, but it must read WORKER=HARDWARE, such as 1=T4")
    return int(worker), known_device(name)


def _with_packing(problem: Any, hardware: dict[int, Any], budget_bits: int) -> Any:
    """The problem with estimated packing, and the limit that the uniform width has with it."""
    from qsync_opt.messages import evaluate, uniform_plan, with_learned_packing

    problem = with_learned_packing(problem, hardware)
    exposed_ns = evaluate(problem, uniform_plan(problem, budget_bits)).exposed_ns
    return replace(problem, time_limit_ns=int(exposed_ns) + 1)


def _plan(path: str) -> Any:
    from qsync_opt.io import load_file
    from qsync_opt.messages import PLAN_FORMAT, Plan

    return load_file(path, {PLAN_FORMAT: Plan.from_json})


def _progress(label: str, quiet: bool) -> Callable[[int, int], None]:
    """Shows one line that counts epochs, on a terminal only."""
    if quiet or not sys.stderr.isatty():
        return lambda epoch, epochs: None

    def show(epoch: int, epochs: int) -> None:
        end = "\n" if epoch == epochs else ""
        print(f"\r{label}: epoch {epoch} of {epochs}", end=end, file=sys.stderr, flush=True)

    return show


def _print_plan(problem: Any, solution: Any) -> None:
    import numpy as np

    rows = []
    for exchange in problem.exchanges:
        pieces = [pair for group in solution.plan.bits[exchange.name] for pair in group]
        widths = np.concatenate([np.zeros(0, np.uint8), *pieces])
        shares = [f"{np.mean(widths == width) if widths.size else 0:.0%}" for width in problem.menu]
        took = solution.evaluation.exchange_ns[exchange.name]
        rows.append([exchange.name, str(widths.size), *shares, _ms(took / 1e9), _ms(exchange.hidden_ns / 1e9)])
    print_table(
        ["exchange", "messages", *(f"{width} bits" for width in problem.menu), "predicted", "hidden up to"], rows
    )
    evaluation = solution.evaluation
    packing = f" with {_ms(evaluation.codec_ns / 1e9)} of packing" if evaluation.codec_ns else ""
    print(
        f"{solution.termination}: variance {evaluation.variance:.4g}, gap {gap_text(solution.gap)}, exposed "
        f"{_ms(evaluation.exposed_ns / 1e9)}{packing}, {evaluation.message_bytes / 1e6:.3f} MB, "
        f"{evaluation.mean_bits:.2f} bits in the mean"
    )
    print_estimates(problem.extras)


def _print_runs(runs: dict[str, Any]) -> None:
    rows = [
        [
            label,
            f"{each.message_bytes / 1e6:.3f} MB",
            _ms(each.epoch_s),
            _ms(each.exchange_s),
            _ms(each.exposed_s),
            _ms(each.codec_s),
            f"{each.losses[-1]:.4f}",
            f"{each.test_accuracy:.2%}",
        ]
        for label, each in runs.items()
    ]
    header = ("messages", "bytes an epoch", "epoch", "exchange", "exposed", "codec", "loss", "test accuracy")
    print_table(header, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
