"""PuLP with the CBC that it ships. The only file that imports pulp."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import re
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear.model import LinearModel
from qsync_opt.formulations.linear.solver import LinearOptions, LinearResult, LinearStatus

_LOGGER = logging.getLogger(__name__)
_TOLERANCE = 1e-9
"""Feasibility tolerance: rows are scaled to about 1e3, so that this is far below one nanosecond or KiB."""
_ABSOLUTE_GAP = 1e-9
"""Objectives are scaled to about 1e3; CBC's own default would stop far earlier."""

_PLAIN_COLUMNS = 200
"""Programs up to this size are tried without CBC's preprocessing, which cut off the optimum of one such program in
thousands. It cannot simply stay off: without it CBC misses some proofs of infeasibility, and crashes on some programs.
Larger programs keep it, because it makes them small."""

# PuLP's ``status`` is "Optimal" for any run that ended with a point; ``sol_status`` separates proofs from time limits.
# A test walks PuLP's own table.
STATUSES: dict[str, LinearStatus] = {
    "Optimal Solution Found": LinearStatus.OPTIMAL,
    "Solution Found": LinearStatus.LIMIT,
    "No Solution Found": LinearStatus.LIMIT,
    "No Solution Exists": LinearStatus.INFEASIBLE,
    "Solution is Unbounded": LinearStatus.UNBOUNDED,
}
_PRINTED = 1e-3
"""CBC prints three decimals, so a printed bound may be rounded up by this much."""
_FINAL_BOUND = re.compile(r"^Lower bound:\s+(\S+)$", re.MULTILINE)
_PASSING_BOUND = re.compile(r"best possible (-?[0-9.eE+-]+)")
# Verdicts that CBC logs while its solution file, and so PuLP, only says that it stopped.
_LOGGED: dict[str, LinearStatus] = {
    "Pre-processing says infeasible or unbounded": LinearStatus.INFEASIBLE_OR_UNBOUNDED,
    "Result - Problem proven infeasible": LinearStatus.INFEASIBLE,
    "Result - Linear relaxation infeasible": LinearStatus.INFEASIBLE,
    "Result - Linear relaxation unbounded": LinearStatus.UNBOUNDED,
}


class PulpSolver:
    """CBC as a process of its own, through PuLP.

    Source: ours.
    """

    name = "pulp:cbc"
    continuous = True

    @property
    def version(self) -> str:
        """Version of the pulp package."""
        return importlib.metadata.version("pulp")

    def solve(self, model: LinearModel, options: LinearOptions) -> LinearResult:
        """Minimise ``model``; see `LinearSolver.solve`."""
        started = time.monotonic()
        if len(model.columns) > _PLAIN_COLUMNS:
            return self._run(model, options, ())
        try:
            result = self._run(model, options, ("preprocess off",))
        except SolverError:
            _LOGGER.info("CBC failed on %r without preprocessing; trying with it", model.name)
        else:
            if result.status is LinearStatus.OPTIMAL:
                return result
        if options.time_limit_s is not None:
            left_s = max(0.0, options.time_limit_s - (time.monotonic() - started))
            options = replace(options, time_limit_s=left_s)
        return self._run(model, options, ())

    def _run(self, model: LinearModel, options: LinearOptions, words: tuple[str, ...]) -> LinearResult:
        """One run of CBC, with further ``words`` on its command line."""
        import pulp

        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="qsync-cbc-") as folder, warnings.catch_warnings():
            # PuLP 3.3 warns of names that change in version 4, which this package's requirement excludes.
            warnings.simplefilter("ignore", DeprecationWarning)
            native, variables = _translate(model)
            log = Path(folder) / "cbc.log"
            command = pulp.PULP_CBC_CMD(
                msg=False,
                timeLimit=options.time_limit_s,
                gapRel=options.relative_gap,
                gapAbs=max(_ABSOLUTE_GAP, options.absolute_gap),
                maxNodes=options.node_limit,
                logPath=str(log),
                options=[
                    f"primalTolerance {_TOLERANCE}",
                    f"integerTolerance {_TOLERANCE}",
                    f"randomCbcSeed {options.seed}",
                    *words,
                ],
            )
            command.tmpDir = folder  # the model and solution files go with the folder, also after an interrupt
            try:
                native.solve(command)
            except pulp.PulpError as failure:
                raise SolverError(f"{self.name} failed on {model.name!r}: {failure}") from failure
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        status = STATUSES.get(pulp.LpSolution[native.sol_status], LinearStatus.ERROR)
        # Near the time limit CBC also calls a relaxation infeasible that it had no time to solve.
        in_time = options.time_limit_s is None or time.monotonic() - started < options.time_limit_s / 2
        if status is LinearStatus.LIMIT and in_time:
            status = next((logged for words, logged in _LOGGED.items() if words in text), status)
        values = None
        if native.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            values = tuple(float(variable.value() or 0.0) for variable in variables)
        return LinearResult(
            status=status,
            values=values,
            bound=_bound(model, status, values, text),
            native=f"{pulp.LpStatus[native.status]}: {pulp.LpSolution[native.sol_status]}",
        )


def _translate(model: LinearModel) -> tuple[Any, list[Any]]:
    import pulp

    native = pulp.LpProblem("model", pulp.LpMinimize)
    # Plain numbered names: CBC's file formats forbid characters that operators' names have.
    variables = [
        pulp.LpVariable(
            f"c{i}",
            lowBound=column.lower,
            upBound=None if column.upper == math.inf else column.upper,
            cat=pulp.LpInteger if column.integer else pulp.LpContinuous,
        )
        for i, column in enumerate(model.columns)
    ]
    native += pulp.LpAffineExpression(
        [(variable, column.cost) for variable, column in zip(variables, model.columns, strict=True) if column.cost]
    )
    for row in model.rows:
        terms = pulp.LpAffineExpression([(variables[column], value) for column, value in row.terms.items()])
        if row.lower == row.upper:
            native += terms == row.upper
            continue
        if row.upper < math.inf:
            native += terms <= row.upper
        if row.lower > -math.inf:
            native += terms >= row.lower
    return native, variables


def _bound(model: LinearModel, status: LinearStatus, values: tuple[float, ...] | None, log: str) -> float | None:
    """PuLP gives no bound: without a final one in CBC's log it is the objective if proved, else the last one logged."""
    final, passing = _FINAL_BOUND.findall(log), _PASSING_BOUND.findall(log)
    if status is LinearStatus.OPTIMAL and values is not None and not final:
        return model.objective(values)
    bounds = [float(text) for text in final or passing]
    if not bounds or not math.isfinite(bounds[-1]):
        return None
    return bounds[-1] - _PRINTED + model.constant
