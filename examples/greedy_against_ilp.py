"""The default method beside the integer program on problems that are made up at random: quality, certificate, time."""

import random

from qsync_opt import Problem, Solution, solve
from qsync_opt.testing import random_problem

METHODS = ("greedy", "exact", "ilp")


def solvable(count: int, seed: int = 7) -> list[Problem]:
    """Random problems that some plan solves and whose best plan is not free."""
    source = random.Random(seed)
    found: list[Problem] = []
    while len(found) < count:
        problem = random_problem(source, max_operators=60)
        if len(problem.operators) >= 20 and (solve(problem, "exact").objective or 0.0) > 0.0:
            found.append(problem)
    return found


def row(number: int, size: int, solution: Solution) -> str:
    gap = "no bound" if solution.gap is None else f"{100 * solution.gap:.3f} %"
    seconds = solution.build_seconds + solution.solve_seconds
    return (
        f"{number:>7}  {size:>9}  {solution.method:<6}  {solution.termination:<8}  {solution.objective:>12.6g}  "
        f"{gap:>8}  {1e3 * seconds:>8.1f} ms"
    )


def main() -> None:
    print("problem  operators  method  ended        objective       gap         time")
    worst = 0.0
    for number, problem in enumerate(solvable(5)):
        solutions = {method: solve(problem, method) for method in METHODS}
        for solution in solutions.values():
            print(row(number, len(problem.operators), solution))
        best, found = solutions["ilp"].objective, solutions["greedy"].objective
        assert best is not None and found is not None
        worst = max(worst, found / best - 1.0)
    print(f"greedy is at most {100 * worst:.3f} % above the proved optimum on these problems")


if __name__ == "__main__":
    main()
