"""Check the plug-in as its author would: by qsync-opt's own conformance checks, under the name it registered."""

from qsync_opt import solve
from qsync_opt.registry import Kind, entries
from qsync_opt.testing import check_formulation, check_solver, diamond


def main() -> None:
    entry = entries(Kind.SOLVER)["own"]
    print(f"solver 'own' comes from the package {entry.origin}")
    check_solver("own", random_problems=10)
    check_formulation("ilp", solver="own")
    print("conformance checks passed")
    solution = solve(diamond().problem, "ilp", solver="own")
    print(f"diamond: {solution.termination} with {solution.solver}, objective {solution.objective}")


if __name__ == "__main__":
    main()
