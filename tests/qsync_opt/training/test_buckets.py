import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.testing import make_graph, make_operator, residual_graph
from qsync_opt.training import BucketOptions, gradient_buckets, gradient_users, merge_by_operator, operator_buckets


def test_order_of_readiness_with_a_tied_weight() -> None:
    graph = residual_graph()
    assert gradient_users(graph)["embed.weight"] == (0, 6)
    buckets = gradient_buckets(graph, BucketOptions(first_bytes=1, cap_bytes=1))
    # Backward order; the tied weight is complete only when the embedding's backward is.
    assert [b.parameters for b in buckets] == [
        ("down.weight",),
        ("up.bias",),
        ("up.weight",),
        ("norm.weight",),
        ("embed.weight",),
    ]
    assert [b.operator for b in buckets] == ["down", "up", "up", "norm", "embed"]


def test_sizes_close_buckets() -> None:
    graph = residual_graph()
    buckets = gradient_buckets(graph)
    # 64 KiB + 1 KiB + 1 MiB close the first; the rest stays below 25 MiB.
    assert [b.parameters for b in buckets] == [
        ("down.weight", "up.bias", "up.weight"),
        ("norm.weight", "embed.weight"),
    ]
    assert [b.num_bytes for b in buckets] == [4 * (16384 + 256 + 262144), 4 * (64 + 65536)]


def test_buckets_that_one_operator_completes_are_merged() -> None:
    graph = residual_graph()
    groups = merge_by_operator(gradient_buckets(graph, BucketOptions(first_bytes=1, cap_bytes=1)))
    assert [len(group) for group in groups] == [1, 2, 1, 1]
    mapped = operator_buckets(graph, groups)
    assert mapped == {
        "embed": 3,
        "norm": 2,
        "up": 1,
        "gelu": None,
        "down": 0,
        "residual": None,
        "head": 3,
        "loss": None,
    }


def test_every_group_has_an_operator_that_completes_it() -> None:
    # One layer closes the first bucket with its bias and leaves its weight to the second.
    graph = make_graph(
        [
            make_operator("a", parameters=["a.weight"]),
            make_operator("b", inputs=["a"], parameters=["b.weight", "b.bias"]),
        ],
        {"a.weight": 10, "b.weight": 10, "b.bias": 10},
    )
    groups = merge_by_operator(gradient_buckets(graph, BucketOptions(first_bytes=40, cap_bytes=100)))
    assert [[b.parameters for b in group] for group in groups] == [[("b.bias",)], [("b.weight", "a.weight")]]
    assert operator_buckets(graph, groups) == {"b": 0, "a": 1}


def test_unused_parameters_come_last_and_a_model_without_any_has_no_bucket() -> None:
    graph = make_graph([make_operator("a", parameters=["w"])], {"unused": 5, "w": 5})
    (bucket,) = gradient_buckets(graph)
    assert (bucket.parameters, bucket.operator) == (("w", "unused"), "a")
    assert gradient_buckets(make_graph([make_operator("a")])) == ()


def test_a_cap_of_the_users_own_is_that_of_the_first_bucket_too() -> None:
    assert BucketOptions.of_ddp() == BucketOptions()
    assert BucketOptions.of_ddp(bucket_cap_mb=2) == BucketOptions(first_bytes=2 << 20, cap_bytes=2 << 20)
    assert BucketOptions.of_ddp(find_unused_parameters=True, gradient_as_bucket_view=True) == BucketOptions(
        find_unused=True, gradient_as_view=True
    )
    assert BucketOptions.of_ddp(find_unused_parameters=True, static_graph=True) == BucketOptions()
    for wrong in (0, -1.0, 1e-9, float("nan"), float("inf")):
        with pytest.raises(ProblemError, match="bucket_cap_mb"):
            BucketOptions.of_ddp(bucket_cap_mb=wrong)


def test_unused_parameters_keep_buckets_in_the_order_of_registration_and_hold_none_back() -> None:
    graph = make_graph(
        [make_operator(name, parameters=[f"{name}.w"], inputs=source) for name, source in (("a", []), ("b", ["a"]))],
        {"b.w": 10, "unused.w": 10, "a.w": 10},
    )
    single = gradient_buckets(graph, BucketOptions(first_bytes=1, cap_bytes=1, find_unused=True))
    # From the parameter that was registered last; b's gradient is ready first but launched last.
    assert [b.parameters for b in single] == [("a.w",), ("unused.w",), ("b.w",)]
    assert [b.operator for b in single] == ["a", "a", "a"]
    # Filled from the other end, the small bucket is the last one. The unused parameter waits for nobody.
    pairs = gradient_buckets(graph, BucketOptions(first_bytes=80, cap_bytes=80, find_unused=True))
    assert [(b.parameters, b.operator) for b in pairs] == [(("a.w",), "a"), (("b.w", "unused.w"), "a")]
    late = make_graph(graph.operators, {"a.w": 10, "b.w": 10, "unused.w": 10})
    ready = gradient_buckets(late, BucketOptions(first_bytes=40, cap_bytes=80, find_unused=True))
    assert [(b.parameters, b.operator) for b in ready] == [(("b.w", "unused.w"), "b"), (("a.w",), "a")]
