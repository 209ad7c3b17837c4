from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.checkpoints import Piece, Problem, Writer
from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.linear import LinearModel, LinearOptions, required_solver
from qsync_opt.solving import TerminationStatus
from qsync_opt.systems import load_problem, solve

DATA = Path(__file__).resolve().parents[2] / "data" / "systems"
RATES = st.floats(0.3, 3.0)


@st.composite
def problems(draw, rows=4):
    hosts = {f"h{k}": draw(RATES) for k in range(draw(st.integers(1, 3)))}
    writers = {
        f"r{k}": Writer(host=draw(st.sampled_from(sorted(hosts))), bytes_per_s=draw(RATES))
        for k in range(draw(st.integers(1, 3)))
    }
    pieces = tuple(
        Piece(
            name=f"p{k}",
            row_bytes=draw(st.sampled_from([1, 2, 7])),
            rows=draw(st.integers(1, rows)),
            writers=tuple(sorted(draw(st.sets(st.sampled_from(sorted(writers)), min_size=1)))),
        )
        for k in range(draw(st.integers(1, 3)))
    )
    return Problem(name="random", hosts=hosts, writers=writers, pieces=pieces)


def _whole_pieces(problem):
    """Seconds of the rule of torch: each piece, in order, to the writer with least bytes."""
    loads = dict.fromkeys(problem.writers, 0)
    for piece in problem.pieces:
        loads[min(piece.writers, key=loads.__getitem__)] += piece.num_bytes
    hosts = dict.fromkeys(problem.hosts, 0)
    for name, load in loads.items():
        hosts[problem.writers[name].host] += load
    return max(
        max(load / problem.writers[name].bytes_per_s for name, load in loads.items()),
        max(load / problem.hosts[name] for name, load in hosts.items()),
    )


@given(problems())
@settings(max_examples=60)
def test_methods_agree_with_exhaustive_search(problem):
    default, exact, best = (solve(problem, method) for method in ("default", "exact", "exhaustive"))
    assert default.bound <= best.objective * (1 + 1e-9)
    assert best.objective <= default.objective * (1 + 1e-9)
    assert exact.termination is TerminationStatus.OPTIMAL
    assert exact.objective == pytest.approx(best.objective, rel=1e-6)


@pytest.mark.slow
@given(problems())
@settings(max_examples=1000, deadline=None)
def test_the_bound_lies_between_the_relaxation_and_the_optimum(problem):
    default, best = solve(problem), solve(problem, "exhaustive")
    assert _relaxed_seconds(problem) * (1 - 1e-6) <= default.bound <= best.objective * (1 + 1e-9)
    assert best.objective <= default.objective * (1 + 1e-9)


def _relaxed_seconds(problem):
    """Least time if rows could be divided, by a solver of linear programs."""
    model = LinearModel(name="relaxed")
    loads = {name: {} for name in problem.writers}
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
    return required_solver(None, "the relaxation", continuous=True).solve(model, LinearOptions()).values[seconds]


@given(problems(rows=10**6))
@settings(max_examples=100)
def test_many_rows_are_split_as_well_as_the_bound(problem):
    default = solve(problem)
    assert default.objective <= _whole_pieces(problem) * (1 + 1e-9)
    slowest = min([*(w.bytes_per_s for w in problem.writers.values()), *problem.hosts.values()])
    assert default.objective <= default.bound + 3 * 7 * 3 / slowest  # some rows of rounding


@given(problems(rows=1000))
@settings(max_examples=25)
def test_the_bound_is_the_linear_relaxation(problem):
    coarse = solve(problem)
    fine = Problem(
        name="fine",
        hosts=problem.hosts,
        writers=problem.writers,
        pieces=tuple(
            Piece(name=p.name, row_bytes=1, rows=p.num_bytes * 1000, writers=p.writers) for p in problem.pieces
        ),
    )
    program = solve(fine, "ilp")  # so many rows that whole ones count for nothing
    assert coarse.bound == pytest.approx(program.objective / 1000, rel=1e-3) or coarse.gap < 1e-6


@pytest.mark.parametrize("name", ["writes-public-0", "writes-public-1"])
def test_examples(name):
    problem = load_problem(DATA / f"{name}.json")
    least = problem.extras["x-bound",]
    default = solve(problem)
    assert default.bound == pytest.approx(least, rel=1e-9)
    assert default.gap < 1e-3
    for method in ("exact", "ilp"):
        solution = solve(problem, method)
        assert solution.termination is TerminationStatus.OPTIMAL
        assert least * (1 - 1e-9) <= solution.objective <= default.objective


def test_equal_writers_cut_few_pieces():
    names = tuple(f"r{k}" for k in range(16))
    problem = Problem(
        name="replicated",
        hosts={"h": 1e12},
        writers={name: Writer(host="h", bytes_per_s=1e9) for name in names},
        pieces=tuple(Piece(name=f"p{k}", row_bytes=4, rows=1000 + 37 * k, writers=names) for k in range(50)),
    )
    solution = solve(problem)
    assert solution.gap < 1e-3
    assert sum(len(parts) for parts in solution.plan.writes.values()) <= 50 + 15


def test_a_writer_that_all_others_wait_for_is_the_bound():
    problem = Problem(
        name="bottleneck",
        hosts={"h": 100.0},
        writers={"slow": Writer(host="h", bytes_per_s=1.0), "fast": Writer(host="h", bytes_per_s=10.0)},
        pieces=(
            Piece(name="own", row_bytes=1, rows=50, writers=("slow",)),
            Piece(name="both", row_bytes=1, rows=50, writers=("slow", "fast")),
        ),
    )
    solution = solve(problem)
    assert (solution.termination, solution.objective) == (TerminationStatus.OPTIMAL, 50.0)
    assert [part.writer for part in solution.plan.writes["both"]] == ["fast"]


@pytest.mark.parametrize("ranks", [1, 3, 7, 8, 16, 100, 1000])
def test_any_number_of_ranks_writes_equally_much(ranks):
    names = tuple(f"r{k}" for k in range(ranks))
    lengths = [50257 * 1024, 1024 * 1024, *[1024 * 3072, 3072, 1024 * 1024, 1024] * 12]
    problem = Problem(
        name="replicated",
        hosts={f"h{k}": 1e12 for k in range(-(-ranks // 8))},
        writers={name: Writer(host=f"h{k // 8}", bytes_per_s=1e9) for k, name in enumerate(names)},
        pieces=tuple(Piece(name=f"p{k}", row_bytes=4, rows=rows, writers=names) for k, rows in enumerate(lengths)),
    )
    solution = solve(problem)
    mean = problem.num_bytes / ranks / 1e9
    assert solution.objective <= 1.01 * mean
    assert solution.objective <= _whole_pieces(problem) * (1 + 1e-6)


def test_a_piece_smaller_than_rounding_is_written():
    problem = Problem(
        name="terabytes",
        hosts={"h": 1e12},
        writers={name: Writer(host="h", bytes_per_s=1e9) for name in "abc"},
        pieces=(
            Piece(name="weights", row_bytes=4, rows=10**13, writers=("a", "b")),
            Piece(name="step", row_bytes=4, rows=1, writers=("c",)),
        ),
    )
    solution = solve(problem)
    assert solution.objective == pytest.approx(2e4)
    assert [(part.writer, part.end) for part in solution.plan.writes["step"]] == [("c", 1)]


def test_nothing_to_write_takes_no_time():
    problem = Problem(name="empty", hosts={"h": 1.0}, writers={"r": Writer(host="h", bytes_per_s=1.0)}, pieces=())
    for method in ("default", "exact", "ilp", "exhaustive"):
        assert solve(problem, method).objective == 0.0


def test_too_many_plans_are_refused():
    with pytest.raises(UnsupportedError, match="use method 'exact'"):
        solve(load_problem(DATA / "writes-public-0.json"), "exhaustive")
