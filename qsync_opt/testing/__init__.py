"""Conformance checks for plug-ins, small problems with known optima, and synthetic models for tests.

Other packages check their own solvers, formulations, indicators, cost models and runtimes with these.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.testing.conformance import (
        check_cost_model,
        check_formulation,
        check_indicator,
        check_runtime,
        check_solution,
        check_solver,
        expect,
    )
    from qsync_opt.testing.costs import (
        linear_workload,
        make_cost_record,
        make_device_vector,
        pointwise_workload,
        without_laws,
    )
    from qsync_opt.testing.problems import (
        INSTANCES,
        Instance,
        buckets,
        cast_coupling,
        chain,
        cost,
        diamond,
        late_peers,
        no_memory,
        no_time,
        operator,
        random_plan,
        random_problem,
        shared_casts,
        skipped_level,
    )
    from qsync_opt.testing.synthetic import (
        FORWARD_NS,
        make_cluster,
        make_graph,
        make_operator,
        make_profile,
        make_sensitivities,
        random_graph,
        random_step_costs,
        residual_graph,
        sample_graph,
        sample_knowledge,
        stacked_graph,
        stacked_problem,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "FORWARD_NS", "INSTANCES", "Instance", "buckets", "cast_coupling", "chain", "check_cost_model",
    "check_formulation", "check_indicator", "check_runtime", "check_solution", "check_solver", "cost", "diamond",
    "expect", "late_peers", "linear_workload", "make_cluster", "make_cost_record", "make_device_vector",
    "make_graph", "make_operator", "make_profile", "make_sensitivities", "no_memory", "no_time", "operator",
    "pointwise_workload", "random_graph", "random_plan", "random_problem", "random_step_costs", "residual_graph",
    "sample_graph", "sample_knowledge", "shared_casts", "skipped_level", "stacked_graph", "stacked_problem",
    "without_laws",
]  # fmt: skip
