"""Wrong inputs and what is said about them, side by side: makes ``docs/error-messages.md``, which a test keeps true.

Run ``python docs/generators/error_messages.py > docs/error-messages.md`` after a message has changed.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wrong_inputs import write_inputs

from qsync_opt import Plan, uniform_plan
from qsync_opt.cli import main
from qsync_opt.errors import QSyncError
from qsync_opt.testing import diamond


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One wrong input.

    ``run`` is a command line, or a function for what only Python can do wrong (``call`` then shows it). The message
    must hold ``value`` (what is wrong, by name), ``allowed`` and ``advice`` (what to do); the last two may be one.
    """

    what: str
    run: tuple[str, ...] | Callable[[], object]
    value: str
    allowed: str
    advice: str
    call: str = ""

    @property
    def shown(self) -> str:
        """How a reader would write it."""
        return self.call or " ".join(["qsync-opt", *(f'"{a}"' if " " in a or not a else a for a in self.run)])  # type: ignore[union-attr]


CASES: tuple[Case, ...] = (
    Case(
        what="a command that does not exist",
        run=("slove", "problem.json"),
        value="'slove'",
        allowed="allowed are solve, evaluate",
        advice="did you mean 'solve'?",
    ),
    Case(
        what="no such file",
        run=("solve", "none.json"),
        value="'none.json'",
        allowed="JSON file",
        advice="give the path",
    ),
    Case(
        what="a truncated file",
        run=("solve", "truncated.json"),
        value="truncated.json",
        allowed="JSON",
        advice="write it again",
    ),
    Case(
        what="a plan that was damaged, or changed by hand",
        run=("evaluate", "problem.json", "damaged.json"),
        value="x-digest is",
        allowed="the digest of what the file holds",
        advice="write it again, or remove x-digest",
    ),
    Case(
        what="a file of another kind",
        run=("evaluate", "problem.json", "problem.json"),
        value="'qsync-problem/1'",
        allowed="'qsync-plan/1'",
        advice="give",
    ),
    Case(
        what="a misspelled key",
        run=("solve", "misspelled-key.json"),
        value="'latency_limit'",
        allowed="allowed are",
        advice="did you mean 'latency_limit_ns'?",
    ),
    Case(what="a number that is none", run=("solve", "nan.json"), value="NaN", allowed="finite", advice="must be"),
    Case(
        what="a negative time",
        run=("solve", "negative.json"),
        value="forward_ns is -5",
        allowed="integer of at least 0",
        advice="must be",
    ),
    Case(
        what="an operator without costs",
        run=("solve", "no-table.json"),
        value="'b'",
        allowed="every operator",
        advice="needs its costs",
    ),
    Case(
        what="a cast without a cost",
        run=("solve", "no-cast.json"),
        value="FP16>FP32",
        allowed="is needed between",
        advice="add 'FP16>FP32'",
    ),
    Case(
        what="a choice for a fixed operator",
        run=("solve", "two-for-fixed.json"),
        value="'loss'",
        allowed="exactly one precision",
        advice="keep one, or make it adjustable",
    ),
    Case(
        what="operators out of order",
        run=("solve", "order.json"),
        value="'loss' reads 'add'",
        allowed="forward execution order",
        advice="operators must stand",
    ),
    Case(
        what="a role that there is not",
        run=("solve", "role.json"),
        value="'adjusted'",
        allowed="allowed are adjustable, dependent, fixed",
        advice="did you mean 'adjustable'?",
    ),
    Case(
        what="an unknown way to share casts",
        run=("solve", "sharing.json"),
        value="'consumer'",
        allowed="'edge' or 'producer'",
        advice="allowed are",
    ),
    Case(
        what="a misspelled method",
        run=("solve", "problem.json", "--method", "exacts"),
        value="'exacts'",
        allowed="allowed are greedy",
        advice="did you mean 'exact'?",
    ),
    Case(
        what="a misspelled solver",
        run=("solve", "problem.json", "--method", "ilp", "--solver", "ortool"),
        value="'ortool'",
        allowed="allowed are ortools",
        advice="did you mean 'ortools'?",
    ),
    Case(
        what="a solver for a method that uses none",
        run=("solve", "problem.json", "--method", "exhaustive", "--solver", "pulp"),
        value="'exhaustive'",
        allowed="uses a solver",
        advice="those that have it",
    ),
    Case(
        what="a time limit of zero",
        run=("solve", "problem.json", "--time-limit", "0"),
        value="0.0 s",
        allowed="finite number above 0",
        advice="must be",
    ),
    Case(
        what="a gap of two",
        run=("solve", "problem.json", "--gap", "2"),
        value="2.0",
        allowed="at least 0 and below 1",
        advice="must be",
    ),
    Case(
        what="an output folder that is not there",
        run=("solve", "problem.json", "--output", "no/such/plan.json"),
        value="'no/such/plan.json'",
        allowed="existing folder that may be written",
        advice="give a file",
    ),
    Case(
        what="a plan for another model",
        run=("evaluate", "other.json", "plan.json"),
        value="'diamond'",
        allowed="'buckets'",
        advice="make a plan for this problem",
    ),
    Case(
        what="a precision that an operator does not have",
        run=("evaluate", "problem.json", "unknown-precision.json"),
        value="'a' is planned at 'FP8'",
        allowed="its table allows FP16, FP32",
        advice="choose one of them",
    ),
    Case(
        what="a plan that contradicts its own consequences",
        run=("evaluate", "problem.json", "contradiction.json"),
        value="'add' is planned at FP32",
        allowed="its inputs make it run in FP16",
        advice="leave it out or correct it",
    ),
    Case(
        what="a plan that leaves an operator out",
        run=("evaluate", "problem.json", "missing-operator.json"),
        value="'b'",
        allowed="adjustable",
        advice="name a precision for each",
    ),
    Case(
        what="an operator that does not exist",
        run=("explain", "problem.json", "plan.json", "lss"),
        value="'lss'",
        allowed="operator",
        advice="did you mean 'loss'?",
    ),
    Case(
        what="a device type that does not exist",
        run=("explain", "problem.json", "plan.json", "a", "--device", "T40"),
        value="'T40'",
        allowed="it has T4",
        advice="did you mean 'T4'?",
    ),
    Case(
        what="a front against memory, but of which device type?",
        run=("pareto", "two-devices.json", "--against", "memory", "--no-cache"),
        value="against memory",
        allowed="T4, A10",
        advice="--device",
    ),
    Case(
        what="a front of no points",
        run=("pareto", "problem.json", "--points", "0", "--no-cache"),
        value="0",
        allowed="at least 1",
        advice="needs",
    ),
    Case(
        what="a name that doctor does not know",
        run=("doctor", "--require", "ortool"),
        value="'ortool'",
        allowed="that qsync-opt doctor lists",
        advice="did you mean 'ortools'?",
    ),
    Case(
        what="a quantity without unit",
        run=("plan", "model.onnx", "no-unit.yaml"),
        value="15",
        allowed="units:",
        advice="write a number and a unit",
    ),
    Case(
        what="a precision in lower case",
        run=("plan", "model.onnx", "lower-case.yaml"),
        value="'int8'",
        allowed="allowed are INT8",
        advice="did you mean 'INT8'?",
    ),
    Case(
        what="a key that stands twice",
        run=("plan", "model.onnx", "twice.yaml"),
        value="'count'",
        allowed="twice in one mapping (line 4)",
        advice="keep one",
    ),
    Case(
        what="a cluster with nothing to plan",
        run=("plan", "model.onnx", "nothing-planned.yaml"),
        value="'two-kinds'",
        allowed="role is planned",
        advice="give at least one",
    ),
    Case(
        what="two precisions for a fixed type",
        run=("plan", "model.onnx", "two-fixed.yaml"),
        value="'A100'",
        allowed="role is fixed",
        advice="name exactly one",
    ),
    Case(
        what="a GPU without data sheet",
        run=("plan", "model.onnx", "unknown-gpu.yaml"),
        value="'RTX-4090'",
        allowed="there is one for V100",
        advice="profile the device",
    ),
    Case(
        what="a precision that the device does not have",
        run=("plan", "model.onnx", "not-there.yaml"),
        value="'BF16'",
        allowed="has INT8, FP16, FP32",
        advice="remove it or profile it",
    ),
    Case(
        what="a profile that is not there",
        run=("plan", "model.onnx", "no-profile.yaml"),
        value="t4.json",
        allowed="JSON file",
        advice="give the path",
    ),
    Case(
        what="a file that is no ONNX model",
        run=("plan", "notes.onnx", "cluster.yaml"),
        value="notes.onnx",
        allowed="ONNX",
        advice="export the model again",
    ),
    Case(
        what="a model whose batch size is open",
        run=("plan", "unfixed.onnx", "cluster.yaml"),
        value="[batch, 16]",
        allowed="fixed",
        advice="export with fixed shapes",
    ),
    Case(
        what="an indicator without what it needs",
        run=("plan", "model.onnx", "cluster.yaml", "--indicator", "statistics"),
        value="'statistics'",
        allowed="needs statistics",
        advice="collect them",
    ),
    Case(
        what="a latency limit without unit",
        run=("plan", "model.onnx", "cluster.yaml", "--latency-limit", "120"),
        value="'120'",
        allowed="units:",
        advice="write a number and a unit",
    ),
    Case(
        what="an optimizer that estimates do not know",
        run=("plan", "model.onnx", "cluster.yaml", "--optimizer", "adam"),
        value="'adam'",
        allowed="allowed are adamw, momentum, sgd",
        advice="profile the device for any other",
    ),
    Case(
        what="a uniform plan in an unknown precision",
        run=lambda: uniform_plan(diamond().problem, "int8"),
        call='uniform_plan(problem, "int8")',
        value="'int8'",
        allowed="has INT8, FP16, FP32",
        advice="did you mean 'INT8'?",
    ),
    Case(
        what="a plan without devices",
        run=lambda: Plan(problem="diamond", devices={}),
        call='Plan(problem="diamond", devices={})',
        value="no devices",
        allowed="at least one device type",
        advice="must name",
    ),
)


@contextlib.contextmanager
def inputs() -> Iterator[None]:
    """Work in a folder with all inputs, so that messages show short paths."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        os.chdir(name)
        try:
            yield
        finally:
            os.chdir(before)


def message(case: Case) -> str:
    """What is said about a wrong input; the one line of standard error, or the text of the exception."""
    if callable(case.run):
        try:
            case.run()
        except QSyncError as failure:
            return f"{type(failure).__name__}: {failure}"
        raise AssertionError(f"{case.what}: nothing was said")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(case.run)
        except SystemExit as stop:
            status = int(stop.code or 0)
    lines = err.getvalue().splitlines()
    assert status == 2, f"{case.what}: exit status {status}, {lines}"
    assert out.getvalue() == "", f"{case.what}: printed {out.getvalue()!r}"
    assert len(lines) == 1, f"{case.what}: {len(lines)} lines, {lines}"
    return lines[0]


def lacking(case: Case, text: str) -> list[str]:
    """Which of the three parts a message lacks."""
    parts = {"the value": case.value, "what is allowed": case.allowed, "what to do": case.advice}
    return [f"{name} ({part!r})" for name, part in parts.items() if part not in text]


def page() -> str:
    """The Markdown page."""
    lines = [
        "# Error messages",
        "",
        "Wrong inputs and what is said about them: one line that names the value, says what is allowed and what to do.",
        "Commands exit with status 2 and leave standard output empty. This page is made by",
        "`docs/generators/error_messages.py`, and a test compares every line of it with what the program says.",
        "",
    ]
    with inputs():
        for number, case in enumerate(CASES, start=1):
            lines += [f"## {number}. {case.what[0].upper()}{case.what[1:]}", "", "```text", f"$ {case.shown}"]
            lines += [message(case), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
