"""Steps of compiled models: what is in their graphs, what they cost, and jobs that train compiled."""

import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from qsync_opt.costs import DeviceIdentity
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.kernels.autograd import float_modes
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply
from qsync_opt.runtimes.torch.job import FORMS, ExecutionMode, PlanningOptions, auto_plan, time_modes
from qsync_opt.runtimes.torch.steps import RecordingOptions, Stepper, StepRecords, record_plan
from qsync_opt.runtimes.torch.steps.compiled import (
    annotated_operators,
    compiled_inside,
    read_schedules,
    record_compiled_plan,
    recording,
    schedule,
)
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.steps import BACKWARD, FORWARD, Range, StepCosts, StepPredictor
from qsync_opt.steps.compiled import HostCall

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning"),
]
CPU = DeviceIdentity(kind="cpu", name="test", threads=1, versions={})
PLAN = {"a/linear": "BF16", "b/linear": "FP32"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(x + self.b(F.gelu(self.a(x)))).square().mean()


class Breaking(Block):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.fixture(scope="module")
def graph():
    return capture(Block(), (torch.randn(16, 32),))


@pytest.fixture
def block(graph):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(16, 32)
    yield SimpleNamespace(model=model, x=x, graph=graph, example=TrainingExample(model=model, args=(x,)))
    torch.compiler.reset()


def _linear(x, w, c):
    return float_modes.linear(x, w, c, "tf32").square().sum()


def _product(a, b):
    return float_modes.product(a, b, None, "ieee").square().sum()


def _convolution(x, w, c):
    return float_modes.convolution(x, w, c, ((1, 1), (1, 1), (1, 1), False, (0, 0), 1), "tf32").square().sum()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (_linear, [(2, 8, 4), (3, 4), (3,)]),
        (_product, [(2, 3, 4), (2, 4, 5)]),
        (_convolution, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    ],
)
def test_products_in_a_mode_are_operators_of_a_compiled_graph(function, shapes):
    torch.manual_seed(0)
    arguments = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    eager = function(*arguments)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments)
    torch.testing.assert_close(compiled, eager)
    pairs = zip(torch.autograd.grad(compiled, arguments), torch.autograd.grad(eager, arguments), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_bytes_say_which_share_of_a_kernel_an_operator_has(block):
    """The nodes of a real graph, forward and backward, as if a compiler had fused what stands beside each other."""
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return module.forward

    apply(block.model, PLAN, graph=block.graph)
    torch.compiler.reset()
    compiled = torch.compile(block.model, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=False)
    with annotated_operators(block.model, block.graph):
        compiled(block.x).backward()
    forward, backward = ({node.name: node for node in graph.nodes} for graph in graphs)
    labels = {schedule._label(node) for node in (*forward.values(), *backward.values())} - {""}
    assert {"a/linear", "gelu", "b/linear", "add", "norm/layer_norm"} <= labels
    gelu = next(node for node in forward.values() if node.name.startswith("gelu"))
    (cast,) = [user for user in gelu.users if "to_copy" in user.name]
    # GELU reads 16 x 64 values in BF16; what is written is for the reader, and in FP32.
    shares = dict(schedule._shares([gelu, cast]))
    saved = any(user.op == "output" for user in gelu.users)
    assert shares["b/linear"] == pytest.approx(4 / (2 + 4 + 2 * saved))
    assert sum(shares.values()) == pytest.approx(1.0)
    product = next(node for node in backward.values() if node.name.startswith("mm"))
    assert schedule._label(product) == "b/linear"


def test_a_model_without_graphs_is_refused():
    with pytest.raises(UnsupportedError, match="0 graphs of the forward and 0 of the backward pass"):
        read_schedules([])


@pytest.mark.parametrize("order", ["f0 b0 f1 b1 f2 b2", "f0 f1 f2 b2 b1 b0"], ids=["together", "later"])
def test_parts_of_a_graph_are_in_the_order_in_which_they_run(monkeypatch, order):
    """Backward passes are compiled with the forward pass of their part, or when they first run."""
    monkeypatch.setattr(schedule, "_entries", lambda nodes: nodes)
    collected = [(name.startswith("b"), SimpleNamespace(nodes=[name])) for name in order.split()]
    assert read_schedules(collected) == ([["f0"], ["f1"], ["f2"]], [["b2"], ["b1"], ["b0"]])


@pytest.mark.parametrize(("failures", "traces"), [(0, 1), (2, 3), (3, 3)])
def test_a_trace_that_lacks_kernels_is_made_again(monkeypatch, failures, traces):
    made = []

    def charge(*_):
        if len(made) <= failures:
            raise ProblemError("kernels are missing")
        return ["first", "last"]

    monkeypatch.setattr(recording, "trace_steps", lambda *_, **__: made.append(1))
    monkeypatch.setattr(recording, "read_compiled_events", lambda *_, **__: None)
    monkeypatch.setattr(recording, "charge_compiled", charge)
    with pytest.raises(ProblemError) if failures == traces else contextlib.nullcontext():
        assert recording._traced(None, 1, ((), ()), (), memory=False) == "last"
    assert len(made) == traces


def _node(graph, target, inputs, operator, shape=(4, 8)):
    node = graph.call_function(target, tuple(inputs))
    node.meta = {"custom": {schedule._KEY: operator}, "val": torch.empty(shape)}
    return node


def test_what_one_other_operator_reads_is_written_for_it():
    aten, graph = torch.ops.aten, torch.fx.Graph()
    x = graph.placeholder("x")
    product = _node(graph, aten.mm.default, (x, x), "a")
    biased = _node(graph, aten.add.Tensor, (product, 1), "a")
    gelu = _node(graph, aten.gelu.default, (biased,), "gelu")
    first = _node(graph, aten.mm.default, (gelu, x), "b")
    second = _node(graph, aten.mm.default, (gelu, x), "c")
    alone = _node(graph, aten.sum.default, (first,), "b", ())
    graph.output((alone, second))
    # Past the bias, which is its own operator's; a product is not passed, since what it makes is something else.
    assert schedule._writes([product], [product]) == (("gelu", 4 * 8 * 4),)
    assert schedule._writes([gelu], [biased, gelu]) == (("gelu", 4 * 8 * 4),)  # two read it
    assert schedule._writes([second], [second]) == (("c", 4 * 8 * 4),)  # nobody in this graph
    assert schedule._writes([biased], [biased, gelu]) == ()


def _part(name, kind, origin, origins, users=()):
    value = SimpleNamespace(
        get_origin_node=lambda: origin,
        get_origins=lambda: origins,
        get_size=lambda: (4, 8),
        get_dtype=lambda: torch.float32,
    )
    result = SimpleNamespace(users=[SimpleNamespace(node=user) for user in users])
    methods = {"get_name": lambda _: name, "get_outputs": lambda _: [result], "get_nodes": lambda self: [self]}
    return type(kind, (), methods | {"node": value})()


def test_copies_for_a_librarys_call_are_written_for_it():
    """A call that takes no buffer of the kernel as it is (8 bits, TF32) gets a copy, and is named among its origins."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    x = graph.placeholder("x")
    gelu = _node(graph, aten.gelu.default, (x,), "gelu")
    product = _node(graph, aten.mm.default, (gelu, x), "b")
    graph.output((gelu, product))
    call = _part("op2", "ExternKernelSchedulerNode", product, [product, gelu])
    copy = _part("op0", "SchedulerNode", None, [product, gelu], [call])
    saved = _part("op1", "SchedulerNode", gelu, [gelu])
    kernel = SimpleNamespace(get_nodes=lambda: [copy, saved])
    entry = schedule._scheduled(kernel, {product})
    assert entry.writes == (("b", 4 * 8 * 4), ("b", 4 * 8 * 4))
    assert dict(entry.shares)["b"] == pytest.approx(0.5)  # it reads x for itself, and writes for b
    inside = _part("op3", "SchedulerNode", None, [gelu], [saved])
    assert schedule._written(inside, {"op1", "op3"}, [gelu]) == ()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return F.cross_entropy(self.head(torch.relu(self.middle(self.words(x)))).flatten(0, 1), x.flatten())


@pytest.mark.slow
def test_a_product_that_is_added_to_the_gradient_of_a_shared_weight_is_its_operators():
    torch.compiler.reset()
    model, x = Tied(), torch.randint(0, 50, (4, 8))
    graph = capture(Tied(), (x,))
    with annotated_operators(model, graph), schedule.collected_schedules() as found:
        torch.compile(model, fullgraph=True)(x).backward()
    _, (backward,) = read_schedules(found)
    torch.compiler.reset()
    calls = [entry for entry in backward if entry.calls]
    assert [dict(entry.shares) for entry in calls].count({"head/linear": 1.0}) == 2  # gradients of input and weight
    assert all(entry.shares for entry in calls)


def test_what_runs_nothing_is_no_part_of_a_schedule():
    nothing = type("NopKernelSchedulerNode", (), {})()
    assert schedule._entries([nothing, nothing]) == []


def test_second_stages_that_went_into_another_kernel_are_no_part_of_a_schedule():
    def node(*names):
        parts = [SimpleNamespace(get_name=lambda name=name: name) for name in names]
        return SimpleNamespace(names=names, get_nodes=lambda: parts)

    nodes = [node("op1"), node("op2", "op3"), node("op4", "op5"), node("op6")]
    left = schedule.running_nodes(SimpleNamespace(nodes=nodes, removed_ops={"op2", "op3", "op5", "op6"}))
    assert [found.names for found in left] == [("op1",), ("op4", "op5")]
    assert schedule.running_nodes(SimpleNamespace(nodes=nodes)) == nodes


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x):
        return self.b(F.gelu(self.a(x))).square().mean()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_a_graph_that_is_split_at_buckets_is_recorded_part_by_part(tmp_path):
    model, x = Wide(), torch.randn(4, 512)
    graph = capture(Wide(), (x,))
    address = f"file://{tmp_path / 'group'}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        stepper = Stepper(TrainingExample(model=wrapped, args=(x,)), torch.optim.SGD(wrapped.parameters(), lr=1e-3))
        plan = {"a/linear": "FP32", "b/linear": "BF16"}
        options = RecordingOptions(warm_up=1, repeats=1, traced=1)
        sample = record_compiled_plan(stepper, graph, "split", plan, options)
    finally:
        torch.distributed.destroy_process_group()
    assert sample.graphs == 2
    for phase in (FORWARD, BACKWARD):
        for name in plan:
            assert sample.spans.spans[phase, name].host_ns > 0
    assert {"a/linear", "b/linear"} <= {block.operator for block in sample.blocks}


def test_a_schedule_of_another_kind_is_refused():
    with pytest.raises(UnsupportedError, match="cannot be read"):
        read_schedules([(False, SimpleNamespace(nodes=[object()]))])


def test_a_model_that_breaks_into_graphs_is_refused(graph):
    model, x = Breaking(), torch.randn(16, 32)
    stepper = Stepper(TrainingExample(model=model, args=(x,)), torch.optim.SGD(model.parameters(), lr=1e-3))
    with pytest.raises(UnsupportedError, match="cannot be compiled as one graph"):
        record_compiled_plan(stepper, graph, "one", PLAN)
    assert applied_plan(model) is None


def test_a_profilers_overhead_hides_no_kernels():
    names = ["Activity Buffer Request", "triton_poi_fused_add_0", "aten::mm", "Torch-Compiled Region: 0/0"]
    calls = [recording.call_of(10 + 2 * i, 11 + 2 * i if i else 100, name) for i, name in enumerate(names)]
    assert [call and call.name for call in calls] == [None, "triton_poi_fused_add_0", "aten::mm", None]
    assert [call.fused for call in calls if call] == [True, False]


def test_what_is_called_inside_other_calls_or_outside_of_graphs_is_left_out():
    inner, outer = HostCall(12, 14, "aten::mm", False), HostCall(11, 15, "aten::linear", False)
    before, after = HostCall(1, 9, "aten::copy_", False), HostCall(18, 25, "Torch-Compiled Region", False)
    last = HostCall(31, 33, "triton_a", True)
    graphs = [Range(10, 20, "g"), Range(30, 40, "g")]
    assert recording.outermost([last, inner, outer, before, after], graphs) == [outer, last]


@pytest.mark.slow
def test_compiled_steps_are_recorded_kernel_by_kernel(block):
    """With the compiler for CPUs, which writes C++."""
    optimizer = torch.optim.SGD(block.model.parameters(), lr=1e-3)
    stepper = Stepper(block.example, optimizer)
    options = RecordingOptions(warm_up=1, repeats=1, traced=1)
    sample = record_compiled_plan(stepper, block.graph, "mixed", PLAN, options)
    assert block.model._compiled_call_impl is None
    assert applied_plan(block.model) is None
    assert sample.graphs == 1
    assert sample.outputs["a/linear"] == "BF16"
    for phase in (FORWARD, BACKWARD):
        for name in ("a/linear", "gelu", "b/linear"):
            assert sample.spans.spans[phase, name].host_ns > 0
    costs = StepRecords(device=CPU, half_format="BF16", samples=(sample,)).fit(block.graph)
    assert costs.graphs == 1
    assert StepCosts.from_json(costs.to_json(), "again") == costs
    predictor = StepPredictor(block.graph, costs)
    step = predictor.plan(PLAN)
    assert predictor.steady_ns(step) > 0
    assert predictor.memory(step).peak_bytes == costs.resident_bytes + sample.memory.peak_bytes


@pytest.fixture
def sample(block):
    stepper = Stepper(block.example, torch.optim.SGD(block.model.parameters(), lr=1e-3))
    return record_plan(stepper, block.graph, "one", PLAN, RecordingOptions(warm_up=1, repeats=1, traced=1))


def test_steps_of_both_kinds_are_not_fitted_together(block, sample):
    with pytest.raises(ProblemError, match="some of the recorded steps were compiled and some not"):
        StepRecords(device=CPU, half_format="BF16", samples=(sample, replace(sample, graphs=1))).fit(block.graph)


def test_gradients_of_one_graph_are_ready_at_its_end(block, sample):
    costs = StepRecords(device=CPU, half_format="BF16", samples=(sample,)).fit(block.graph)
    times = []
    for graphs in (0, 1, 2):
        predictor = StepPredictor(block.graph, replace(costs, graphs=graphs), (block.graph.index("b/linear"),))
        step = predictor.plan(PLAN)
        times.append(predictor.steady_ns(step, [(0, 10**12)]))
    early, at_the_end, split = times
    assert early == split < at_the_end
    assert at_the_end - early == step.device_ns[1]


def _mode(precision):
    return ExecutionMode(name=precision, precisions=dict.fromkeys(PLAN, precision))


def test_modes_are_timed_compiled(block, monkeypatch):
    seen = []

    def noted(model):
        seen.append(dict(applied_plan(model).precisions) if applied_plan(model) else {})
        return compiled_inside(model, backend="aot_eager")

    monkeypatch.setattr("qsync_opt.runtimes.torch.job.passes.compiled_inside", noted)
    monkeypatch.setattr("qsync_opt.runtimes.torch.job.passes._ROUNDS", 1)
    modes = [_mode("FP32"), _mode("BF16")]
    kernels = ApplyOptions().kernels
    timed = time_modes(block.example, modes, block.graph, kernels, compiled=True)
    assert all(mode.pass_ns > 0 and mode.needed_bytes == 0 for mode in timed)
    assert seen == [{}, dict.fromkeys(PLAN, "BF16")]
    assert block.model._compiled_call_impl is None


def test_a_mode_that_cannot_be_compiled_is_not_taken(monkeypatch, caplog):
    monkeypatch.setattr(
        "qsync_opt.runtimes.torch.job.passes.compiled_inside", functools.partial(compiled_inside, backend="aot_eager")
    )
    example = TrainingExample(model=Breaking(), args=(torch.randn(16, 32),))
    (timed,) = time_modes(example, [_mode("FP32")], None, ApplyOptions().kernels, compiled=True)
    assert timed.needed_bytes is None
    assert "FP32 is not timed compiled" in caplog.text


def test_a_job_whose_compiled_steps_cannot_be_recorded_says_so(block, monkeypatch, tmp_path):
    def refuse(*_, compiled, **__):
        assert compiled
        raise UnsupportedError("this model breaks into several graphs")

    monkeypatch.setattr("qsync_opt.runtimes.torch.job.steps.record_steps", refuse)
    options = PlanningOptions(
        precisions=("FP32",), compiled=True, trial=False, compare=False, cache_dir=tmp_path, progress=False
    )
    plan = auto_plan(block.model, (block.x,), options=options)
    assert "this model breaks into several graphs" in plan.describe()


def test_what_the_script_compiles_is_neither_captured_nor_compiled_by_the_plan():
    options = PlanningOptions(compiled=True)
    assert [form for form in FORMS if options.allows(form)] == ["launched"]
    assert [form for form in FORMS if PlanningOptions(compile=False).allows(form)] == ["launched", "captured"]
    assert [form for form in FORMS if PlanningOptions(capture=False).allows(form)] == ["launched", "compiled"]
