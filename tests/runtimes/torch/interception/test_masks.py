"""Masks of attention in traced graphs: constants are left out, and layouts that no fused kernel takes are copied."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from qsync_opt.runtimes.torch.interception import masks, simplify_masks

ATTENTION = F.scaled_dot_product_attention
ROWS = 4
KEPT, LEFT_OUT, CAUSAL = "kept", "left out", "causal"


def traced(mask, **options):
    """Attention and, as a model is traced with it, its graph; its mask is computed of the queries' number of rows."""
    graphs = []

    class Attention(nn.Module):
        def forward(self, q, k, v, given):
            return ATTENTION(q, k, v, attn_mask=mask(q, given), **options)

    def backend(graph, _):
        simplify_masks(graph)
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    inputs = [torch.randn(2, 3, ROWS, 8) for _ in "qkv"]
    given = torch.ones(ROWS, ROWS, dtype=torch.bool)
    result = torch.compile(Attention(), backend=backend, fullgraph=True)(*inputs, given)
    torch.testing.assert_close(result, Attention()(*inputs, given))
    return graphs[0]


def what_became_of(graph):
    (node,) = graph.graph.find_nodes(op="call_function", target=ATTENTION)
    if node.kwargs["attn_mask"] is None:
        return CAUSAL if node.kwargs["is_causal"] else LEFT_OUT
    return KEPT


def positions(q):
    return torch.arange(q.shape[-2], device=q.device)


def visible(q, _):
    return positions(q)[:, None] >= positions(q)[None, :]


def bias(lowest):
    return lambda q, given: torch.zeros(ROWS, ROWS).masked_fill(~visible(q, given), lowest)


def packed(q, given):
    """Of one sequence, as transformers finds out by where positions jump."""
    jumps = torch.diff(positions(q), prepend=positions(q)[:1] - 1) != 1
    sequence = jumps.cumsum(-1)
    return (sequence[:, None] == sequence[None, :]) & visible(q, given)


def filled(q, _):
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool)
    mask.tril_()
    return mask


def drawn(q, _):
    return torch.rand(ROWS, ROWS) >= 0


CASES = {
    "lower triangle": (visible, CAUSAL),
    "one sequence": (packed, CAUSAL),
    "expanded": (lambda q, given: visible(q, given).expand(2, 1, -1, -1), CAUSAL),
    "minus infinity": (bias(-torch.inf), CAUSAL),
    "least number": (bias(torch.finfo(torch.float32).min), CAUSAL),
    "hides nothing": (lambda q, _: (positions(q) >= 0)[None, :].expand(ROWS, -1), LEFT_OUT),
    "zeros": (lambda q, _: torch.zeros(ROWS, ROWS), LEFT_OUT),
    "slopes": (lambda q, _: -(positions(q)[:, None] - positions(q)).abs().float(), KEPT),
    "slightly hidden": (bias(-10.0), KEPT),
    "upper triangle": (lambda q, _: positions(q)[:, None] <= positions(q), KEPT),
    "window": (lambda q, given: visible(q, given) & (positions(q)[:, None] - positions(q) < 2), KEPT),
    "two sequences": (lambda q, given: visible(q, given) & (positions(q)[:, None] // 2 == positions(q) // 2), KEPT),
    "input": (lambda q, given: given, KEPT),
    "of an input": (lambda q, given: visible(q, given) & given, KEPT),
    "written in place": (filled, KEPT),
    "random": (drawn, KEPT),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_that_are_constants_are_left_out(name):
    mask, expected = CASES[name]
    assert what_became_of(traced(mask)) == expected


def test_a_mask_is_kept_where_memory_does_not_suffice_for_a_look_at_it(monkeypatch):
    def out_of_memory(mask):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(masks, "_kind", out_of_memory)
    assert what_became_of(traced(visible)) == KEPT


def test_no_random_numbers_are_drawn_for_a_look_at_a_mask():
    state = torch.get_rng_state()
    traced(drawn)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in "qkv":
        torch.randn(2, 3, ROWS, 8)
    for _ in range(2):
        torch.rand(ROWS, ROWS)  # the inputs, and the masks of two passes
    assert torch.equal(torch.get_rng_state(), after)


def test_other_arguments_stay():
    (node,) = traced(visible, scale=0.5).graph.find_nodes(op="call_function", target=ATTENTION)
    assert [own.op for own in node.args] == ["placeholder"] * 3
    assert node.kwargs == {"attn_mask": None, "is_causal": True, "scale": 0.5}


@pytest.mark.parametrize("rows", [1, 2])
def test_a_lower_triangle_of_other_numbers_of_queries_and_keys_is_none(rows):
    """torch's causal attention aligns the first query with the first key."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "qkv"]
    ones = graph.call_function(torch.ones, (rows, ROWS), {"dtype": torch.bool})
    mask = graph.call_method("tril", (ones,))
    graph.output(graph.call_function(ATTENTION, (*nodes, mask), {}))
    module = torch.fx.GraphModule(nn.Module(), graph)
    simplify_masks(module)
    (node,) = graph.find_nodes(op="call_function", target=ATTENTION)
    assert node.args == (*nodes, mask)


def regions(*masks, inside=lambda mask: mask):
    """Two calls of a region, whose attention masks what each is passed."""
    inner = torch.fx.Graph()
    operands = [inner.placeholder(name) for name in ("q", "k", "v", "mask")]
    operands[3] = inside(operands[3])
    inner.output((inner.call_function(ATTENTION, tuple(operands)),))
    root, outer = nn.Module(), torch.fx.Graph()
    root.region = torch.fx.GraphModule(nn.Module(), inner)
    nodes = [outer.placeholder(name) for name in "qkv"]
    called = []
    for mask in masks:
        region = outer.get_attr("region")
        arguments = (region, "region", *nodes, mask(outer))
        called.append(outer.call_function(torch.ops.higher_order.invoke_subgraph, arguments))
    outer.output(outer.call_function(operator.getitem, (called[-1], 0)))
    module = torch.fx.GraphModule(root, outer)
    simplify_masks(module)
    (node,) = module.region.graph.find_nodes(op="call_function", target=ATTENTION)
    return node


def triangle(graph):
    return graph.call_method("tril", (graph.call_function(torch.ones, (ROWS, ROWS), {"dtype": torch.bool}),))


def everything(graph):
    return graph.call_function(torch.ones, (ROWS, ROWS), {"dtype": torch.bool})


def test_regions_do_without_the_mask_that_all_calls_pass():
    assert regions(triangle, triangle).kwargs == {"attn_mask": None, "is_causal": True}
    assert len(regions(triangle, everything).args) == 4
    narrowed = regions(triangle, triangle, inside=lambda mask: mask.graph.call_method("clone", (mask,)))
    assert narrowed.kwargs == {"attn_mask": None, "is_causal": True}
    assert len(regions(everything, everything, inside=lambda mask: mask.graph.call_method("tril_", (mask,))).args) == 4
    assert len(regions(triangle, lambda graph: graph.placeholder("mask")).args) == 4


def attention_graph(mask, by_name):
    """A graph of attention on a card as torch.compile traces it, with a mask of some layout."""
    graph = torch.fx.Graph()
    nodes = []
    for name, value in {**{name: torch.empty(2, 3, 4, 8, device="cuda") for name in "qkv"}, "mask": mask}.items():
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["example_value"] = value
    arguments = (nodes[:3], {"attn_mask": nodes[3]}) if by_name else (nodes, {})
    graph.output(graph.call_function(ATTENTION, tuple(arguments[0]), arguments[1]))
    return torch.fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("by_name", [True, False])
def test_masks_that_are_expanded_along_the_keys_are_laid_out_for_fused_kernels(by_name):
    with FakeTensorMode():
        rows = {device: torch.empty(1, 1, 4, 1, device=device, dtype=torch.bool) for device in ("cpu", "cuda")}
        module = attention_graph(rows["cuda"].expand(2, 1, 4, 4), by_name)
        laid_out = torch.empty(2, 1, 4, 4, device="cuda", dtype=torch.bool)
        others = [attention_graph(mask, by_name) for mask in (laid_out, rows["cpu"].expand(2, 1, 4, 4))]
    simplify_masks(module)
    (copy,) = module.graph.find_nodes(op="call_method", target="contiguous")
    (attention,) = module.graph.find_nodes(op="call_function", target=ATTENTION)
    assert copy.args[0].name == "mask"
    assert (attention.kwargs["attn_mask"] if by_name else attention.args[3]) is copy
    for other in others:
        simplify_masks(other)
        assert not other.graph.find_nodes(op="call_method", target="contiguous")
