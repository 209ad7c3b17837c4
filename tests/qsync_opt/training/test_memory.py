from dataclasses import replace

import pytest

from qsync_opt.costs import MeasuredCost
from qsync_opt.errors import ProblemError
from qsync_opt.model import OpGraph, Role
from qsync_opt.testing import make_cluster, make_graph, make_operator, make_profile, make_sensitivities, residual_graph
from qsync_opt.training import Problem, build_problem, evaluate, memory_breakdown, uniform_plan
from qsync_opt.training.memory import MemoryModel, model_memory
from qsync_opt.training.pricing import device_tables

BIG, SMALL = 64 * 256, 64 * 64


def _model(graph: OpGraph, *, distributed: bool = True, view: bool = False) -> MemoryModel:
    profile = make_profile(graph)
    tables = device_tables(graph, profile, make_cluster().devices[0])
    return model_memory(graph, profile, tables, distributed=distributed, gradient_as_view=view)


def _build(graph: OpGraph, workers: int = 2) -> Problem:
    return build_problem(
        graph, {"slow": make_profile(graph)}, make_sensitivities(graph), make_cluster(count=workers), latency_limit_ns=1
    )


def test_static_memory_is_all_there() -> None:
    graph = residual_graph()
    parameters = sum(p.spec.num_bytes for p in graph.parameters)
    static = _model(graph).static
    assert (static.parameters_bytes, static.buckets_bytes, static.optimizer_bytes) == (parameters, parameters, 800)
    assert _model(graph, distributed=False).static.buckets_bytes == 0
    # Parameters outweigh activations here, so nearly all gradients exist when memory peaks, at the end of backward.
    assert 0 < static.gradients_bytes <= parameters
    assert _model(graph, view=True).static.gradients_bytes == 0


def test_shares_of_operators_add_up_to_the_static_memory() -> None:
    for distributed in (False, True):
        model = _model(residual_graph(), distributed=distributed)
        assert sum(model.fixed_bytes.values()) == model.static.total_bytes
        # A tied weight is charged once, to its first user.
        assert model.fixed_bytes["head"] == 0


def test_what_a_sum_was_above_a_peak_is_taken_off_every_plan_alike() -> None:
    model = _model(residual_graph())
    beyond_activations = model.static.transient_bytes + model.static.gradients_bytes
    least = sum(min(own.values()) for own in model.activation_bytes.values())

    def total(lowered: MemoryModel, precision: str) -> int:
        kept = sum(own.get(precision, min(own.values())) for own in lowered.activation_bytes.values())
        return sum(lowered.fixed_bytes.values()) + kept

    assert least > 1000
    for excess in (-1, 0, 7, beyond_activations, beyond_activations + least // 2, beyond_activations + 2 * least):
        lowered = model.lowered(excess)
        expected = max(0, min(excess, beyond_activations + least))
        rounding = len(model.activation_bytes)
        for precision in ("FP32", "BF16", "INT8"):
            assert 0 <= total(lowered, precision) - (total(model, precision) - expected) <= rounding
        assert sum(lowered.fixed_bytes.values()) == lowered.static.total_bytes
        assert all(num_bytes >= 0 for own in lowered.activation_bytes.values() for num_bytes in own.values())


def test_a_result_with_one_adjustable_keeper_is_charged_there_unless_it_is_cast() -> None:
    charged = _model(residual_graph()).activation_bytes
    # The norm answers in FP32 only: kept as it is by an FP32 layer, as a cast copy (charged on the edge) by others.
    # (Its own result, which gelu keeps, is charged to it besides.)
    assert charged["up"]["FP32"] == 4 * SMALL + 4 * BIG
    assert charged["up"]["BF16"] == 2 * BIG
    # An 8-bit operator's own quantized copy of its input is what the edge charges.
    assert charged["down"]["INT8"] == max(0, SMALL - BIG)
    assert charged["norm"] == {"FP32": 0}


def test_a_result_that_others_keep_is_charged_to_its_producer() -> None:
    charged = _model(residual_graph()).activation_bytes
    # The embedding's result is kept by the norm, in FP32: of a 16-bit one, a cast copy, which is charged on the edge.
    assert charged["embed"] == {"INT8": SMALL, "BF16": 0, "FP32": 4 * SMALL}
    # The up-projection's is kept by gelu, which follows it.
    assert charged["up"]["INT8"] == BIG + 2 * BIG - SMALL
    assert charged["gelu"] == {"BF16": 0, "FP32": 0}
    assert charged["down"] == {"INT8": 0, "BF16": 2 * BIG, "FP32": 4 * BIG}


@pytest.mark.parametrize("names", ["bc", "cb"])
def test_a_result_that_several_layers_keep_is_charged_once_to_its_producer(names: str) -> None:
    graph = make_graph([make_operator("a"), *(make_operator(name, inputs=["a"]) for name in names)])
    charged = _model(graph).activation_bytes
    assert charged["a"] == {"INT8": SMALL + 2 * SMALL, "BF16": 2 * SMALL, "FP32": 4 * SMALL}
    assert charged["b"]["FP32"] == charged["c"]["FP32"] == 0
    # With one reader it is that one's, in the precisions in which it reads the result as it is.
    alone = _model(make_graph([make_operator("a"), make_operator("b", inputs=["a"])])).activation_bytes
    assert alone["a"]["FP32"] == 0 and alone["b"]["FP32"] == 4 * SMALL


def test_views_belong_to_what_they_show() -> None:
    graph = make_graph(
        [
            make_operator("a"),
            make_operator("view", Role.DEPENDENT, ["a"], op_type="view"),
            make_operator("transpose", Role.DEPENDENT, ["view"], op_type="transpose"),
            make_operator("b", inputs=["transpose"]),
        ]
    )
    profile = make_profile(graph)
    tables = {name: dict(table) for name, table in device_tables(graph, profile, make_cluster().devices[0]).items()}
    for name in ("view", "transpose"):
        tables[name] = {p: replace(cost, alias_input=0) for p, cost in tables[name].items()}
    model = model_memory(graph, profile, tables)
    assert model.activation_bytes["b"]["FP32"] == 4 * SMALL
    assert model.activation_bytes["transpose"]["FP32"] == 0


def _liveness_peak(sizes: list[int], gradients: list[int]) -> int:
    """Peak of a chain by replaying its backward pass: activations freed one by one, weight gradients added."""
    alive, peak = sum(sizes), sum(sizes)
    for size, gradient in zip(reversed(sizes), reversed(gradients), strict=True):
        alive += gradient
        peak = max(peak, alive)
        alive -= size
    return max(peak, alive)


@pytest.mark.parametrize("weights", [[1, 1, 1], [10**6, 1, 1], [1, 1, 10**6], [50_000, 50_000, 50_000]])
def test_the_sum_bounds_a_replay_of_the_chain(weights: list[int]) -> None:
    names = ["a", "b", "c"]
    graph = make_graph(
        [make_operator(n, inputs=names[i - 1 : i] if i else [], parameters=[f"w{n}"]) for i, n in enumerate(names)],
        {f"w{n}": w for n, w in zip(names, weights, strict=True)},
    )
    problem = _build(graph, workers=1)
    static = 4 * sum(weights) + 800
    for precision, kept in (("FP32", 4), ("BF16", 2)):
        evaluation = evaluate(problem, uniform_plan(problem, precision))
        truth = static + _liveness_peak([0, kept * SMALL, kept * SMALL], [4 * w for w in weights])
        predicted = evaluation.memory_bytes["slow"]
        # Gradients of activations and rounding come on top.
        assert truth <= predicted <= truth + 8 * 4 * SMALL + 3 * 1024


def test_the_breakdown_adds_up_to_the_evaluation() -> None:
    graph = residual_graph()
    problem = _build(graph)
    for precision in ("INT8", "BF16", "FP32"):
        device = evaluate(problem, uniform_plan(problem, precision)).devices["slow"]
        breakdown = memory_breakdown(problem, device)
        assert breakdown.total_bytes == device.memory_kib * 1024
        assert (breakdown.casts_bytes == 0) == (precision == "FP32")
        assert breakdown.activations_bytes > 0


def test_shared_casts_are_counted_once() -> None:
    graph = make_graph([make_operator("a"), make_operator("b", inputs=["a"]), make_operator("c", inputs=["a"])])
    plans = {"a": "FP32", "b": "BF16", "c": "BF16"}
    sizes = {}
    for sharing in ("edge", "producer"):
        problem = build_problem(
            graph,
            {"slow": make_profile(graph)},
            make_sensitivities(graph),
            make_cluster(),
            cast_sharing=sharing,
            latency_limit_ns=1,
        )
        plan = replace(uniform_plan(problem), devices={"slow": plans})
        sizes[sharing] = memory_breakdown(problem, evaluate(problem, plan).devices["slow"]).casts_bytes
    assert sizes == {"edge": 4 * SMALL, "producer": 2 * SMALL}


def test_a_problem_without_the_note_says_so() -> None:
    problem = replace(_build(residual_graph()), extras={})
    device = evaluate(problem, uniform_plan(problem)).devices["slow"]
    with pytest.raises(ProblemError, match="does not say what the memory of 'slow' is made of"):
        memory_breakdown(problem, device)


def _with_workspaces(forward: dict[str, int], backward: dict[str, int], optimizer: int) -> MemoryModel:
    """A chain a, b, c that keeps nothing and whose gradients live in the buckets; workspaces are as given."""
    graph = make_graph([make_operator(n, inputs=i) for n, i in (("a", []), ("b", ["a"]), ("c", ["b"]))])
    profile = make_profile(graph)
    profile = replace(profile, optimizer=replace(profile.optimizer, workspace_bytes=optimizer))
    tables = {
        name: dict.fromkeys(
            table,
            MeasuredCost(
                forward_ns=1,
                backward_ns=1,
                forward_workspace_bytes=forward.get(name, 0),
                backward_workspace_bytes=backward.get(name, 0),
            ),
        )
        for name, table in device_tables(graph, profile, make_cluster().devices[0]).items()
    }
    return model_memory(graph, profile, tables, gradient_as_view=True)


@pytest.mark.parametrize(
    ("forward", "backward", "optimizer", "peak", "transient_bytes"),
    [
        # While b runs forward, its input and its result exist; while it runs backward, their gradients do, too.
        ({"b": 10**7}, {}, 0, "b", 10**7 + 2 * 4 * SMALL),
        ({}, {"b": 10**7}, 0, "b", 10**7 + 2 * 4 * SMALL),
        ({"a": 10**7, "c": 10**7}, {}, 0, "c", 10**7 + 2 * 4 * SMALL),
        ({"a": 10**7}, {}, 0, "a", 10**7 + 4 * SMALL),
        ({}, {"c": 10**6, "a": 10**7}, 0, "a", 10**7 + 4 * SMALL),
        ({"b": 10**5}, {"c": 10**6}, 10**7, "a", 10**7),
    ],
)
def test_every_workspace_counts_at_its_moment(
    forward: dict[str, int], backward: dict[str, int], optimizer: int, peak: str, transient_bytes: int
) -> None:
    static = _with_workspaces(forward, backward, optimizer).static
    assert (static.transient_bytes, static.gradients_bytes) == (transient_bytes, 0)
    assert static.peak_operator == peak


def test_the_largest_workspace_of_any_precision_counts() -> None:
    graph = make_graph([make_operator("a")])
    profile = make_profile(graph)
    tables = {
        "a": {
            name: MeasuredCost(forward_ns=1, backward_ns=1, forward_workspace_bytes=size, backward_workspace_bytes=0)
            for name, size in (("INT8", 10), ("BF16", 10**6), ("FP32", 20))
        }
    }
    assert model_memory(graph, profile, tables).static.transient_bytes == 10**6 + 4 * SMALL


def test_passing_buffers_count_where_nothing_is_kept() -> None:
    graph = make_graph([make_operator("a"), make_operator("b", inputs=["a"])])
    profile = make_profile(graph)
    tables = device_tables(graph, profile, make_cluster().devices[0])
    greedy = MeasuredCost(forward_ns=1, backward_ns=1, backward_workspace_bytes=10**7)
    with_workspace = {"a": tables["a"], "b": dict.fromkeys(tables["b"], greedy)}
    model = model_memory(graph, profile, with_workspace)
    assert model.static.peak_operator == "b"
    assert model.static.transient_bytes >= 10**7
