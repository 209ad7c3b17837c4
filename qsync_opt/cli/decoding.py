"""The commands of speculative decoding beside ``solve`` and ``evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsync_opt.cli.console import (
    EXIT_OK,
    Json,
    PlanOutput,
    Quiet,
    Verbose,
    check_outputs,
    choice,
    option,
    print_json,
    print_table,
)
from qsync_opt.errors import ProblemError, SolverError

app = typer.Typer(rich_markup_mode=None)
_RUNTIME = "qsync_opt.runtimes.torch.serving"  # runtimes are reached by name
_MODEL_HELP = "model folder (config.json and safetensors) or .gguf file"
_LARGEST_TEXT = 16 << 20


@app.command("measure")
def measure(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    output: Annotated[str, option("FILE", "where the measurements are written", "--output")],
    prompts: Annotated[
        str | None, option("FILE", "text of the kind that will be served, a prompt a line; random tokens by default")
    ] = None,
    batches: Annotated[str, option("N,N", "sequences of a pass")] = "1,4",
    contexts: Annotated[str, option("N,N", "cached tokens of a sequence")] = "128,1024",
    lengths: Annotated[str, option("N,N", "drafted tokens of a cycle, at most 16")] = "1,2,4,8",
    new_tokens: Annotated[int, option("N", "new tokens of each prompt", min=2)] = 128,
    rounds: Annotated[int, option("N", "passes of each kind; the median counts", min=1)] = 7,
    scheme: Annotated[str | None, option("NAME", "weight scheme, such as W4; as 'serving run' by default")] = None,
    dtype: Annotated[str | None, option("NAME", "float32, bfloat16, float16")] = None,
    kv_bits: Annotated[int | None, option("BITS", "8 keeps keys and values in 8 bits", "--kv-bits")] = None,
    head: Annotated[str | None, option("NAME", "weight scheme of the head", "--head")] = None,
    device: Annotated[str | None, option("PLACE", "cpu or cuda:0")] = None,
    threads: Annotated[int | None, option("N", "threads; all processors by default", min=1)] = None,
    name: Annotated[str | None, option("NAME", "of the measurements; the model's by default")] = None,
    quiet: Quiet = False,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Measure how often drafts are accepted, and what drafting and judging cost here; serve nothing else meanwhile."""
    from qsync_opt.registry import attribute

    check_outputs([output], [model, prompts])
    result = attribute(f"{_RUNTIME}:measure_model")(
        model,
        prompts=None if prompts is None else _lines(prompts),
        batches=_numbers(batches, "--batches"),
        contexts=_numbers(contexts, "--contexts"),
        lengths=_numbers(lengths, "--lengths"),
        new_tokens=new_tokens,
        rounds=rounds,
        scheme=scheme,
        dtype=dtype,
        kv_bits=kv_bits,
        head=head,
        device=device,
        threads=threads,
        name=name or Path(model).stem,
        say=None if quiet or json else lambda text: print(text, flush=True),
    )
    result.save(output)
    if json:
        print_json(result.to_json())
        return EXIT_OK
    rows = []
    for draft, measured in result.drafts.items():
        for length in result.lengths:
            interval = measured.counts.interval(length, result.confidence_level)
            judged = sum(measured.judged[:length])
            rows.append(
                (draft, str(length), str(judged), f"{interval.mid:.3f}", f"{interval.low:.3f} - {interval.high:.3f}")
            )
    print_table(("draft", "length", "judged", "accepted", f"{result.confidence_level:.0%} interval"), rows)
    for regime in result.regimes:
        plain_ns = regime.verify_ns[1]
        passes = ", ".join(f"{n} tokens {t / plain_ns:.2f}" for n, t in regime.verify_ns.items() if n > 1)
        drafts = ", ".join(f"{draft} {t / plain_ns:.2f}" for draft, t in regime.draft_ns.items())
        print(f"{regime.name}: plain {plain_ns / 1e6:.3f} ms; times that: {passes}; a draft of {drafts}")
    return EXIT_OK


@app.command("plan")
def plan(
    measurements: Annotated[str, typer.Argument(metavar="MEASUREMENTS", help="file of measured times and acceptances")],
    confidence: Annotated[
        str,
        option(
            "low|mid|high",
            "limit of the acceptance intervals to plan by; low speculates only where it surely gains",
            **choice("low", "mid", "high"),
        ),
    ] = "low",
    method: Annotated[str, option("NAME", "default, exact, ilp, exhaustive")] = "default",
    problem: Annotated[str | None, option("FILE", "write the problem that is solved to this file")] = None,
    output: PlanOutput = None,
    report: Annotated[str | None, option("FILE", "write a page about the plan (HTML) to this file", "--report")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Plan from measured times and acceptances, and say why each regime speculates or not."""
    from qsync_opt.decoding import build_problem, explain, load_measurements
    from qsync_opt.report import write_decoding_report
    from qsync_opt.systems import solve

    check_outputs([problem, output, report], [measurements])
    built = build_problem(load_measurements(measurements), confidence)
    solution = solve(built, method)
    if solution.plan is None or solution.evaluation is None:  # plain decoding needs no memory
        raise SolverError(f"method {method!r} found no plan, but plain decoding always is one; use another method")
    if problem is not None:
        built.save(problem)
    if output is not None:
        solution.plan.save(output)
    if report is not None:
        write_decoding_report(built, solution.plan, report)
    reasons = explain(built, solution.plan)
    if json:
        print_json({**solution.to_json(), "evaluation": solution.evaluation.to_json(), "reasons": reasons})
        return EXIT_OK
    print(f"{built.name}: {solution.termination} by {solution.method}, {solution.objective:.9g} ns per token by weight")
    for name, reason in reasons.items():
        print(f"{name}: {reason}")
    return EXIT_OK


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ProblemError(f"{flag} is {text!r}, but it must be numbers of at least 1 with commas between, such as 1,4")
    return tuple(dict.fromkeys(map(int, parts)))


def _lines(path: str) -> tuple[str, ...]:
    from qsync_opt.io import read_text

    lines = tuple(line.strip() for line in read_text(path, "text", _LARGEST_TEXT).splitlines() if line.strip())
    if not lines:
        raise ProblemError(f"{path} holds no prompt, but at least one line is needed")
    return lines
