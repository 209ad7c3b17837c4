"""Made-up graphs, profiles, step costs and clusters for tests without a device, with costs that follow simple rules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsync_opt.cluster import Cluster, DeviceRole, DeviceType, Network
from qsync_opt.costs import CostFit, DeviceIdentity, DeviceProfile, IterationOverhead, MeasuredCost, OptimizerCost
from qsync_opt.model import Operator, OpGraph, ParameterSpec, Role, TensorSpec, WeightStatistics
from qsync_opt.numerics import FORMATS, formats_for
from qsync_opt.sensitivity import ModelKnowledge
from qsync_opt.steps import PHASE_LABELS, Case, CaseCost, StepCosts, StepFlow, Work, result_format
from qsync_opt.training import Problem, build_problem, evaluate, problem_role, uniform_plan

_FORMATS = ("BF16", "FP16", "FP32")
_MOST_INPUTS = 3
"""Operators with more inputs have only cases in which all arrive in the same format."""


def random_step_costs(graph: OpGraph, precisions: Sequence[str], *, seed: int = 0) -> StepCosts:
    """Step costs with random times and sizes, the same for the same arguments.

    Every adjustable operator has all ``precisions``.
    """
    generator = random.Random(seed)
    flow = StepFlow(graph, "BF16")

    def work() -> Work:
        host, device = generator.randrange(2_000, 60_000), generator.randrange(0, 200_000)
        return Work(host, device, device + generator.randrange(0, host))

    cases: dict[Case, CaseCost] = {}
    for i, operator in enumerate(graph):
        count = len(flow.inputs[i])
        arrivals = (
            itertools.product(_FORMATS, repeat=count) if count <= _MOST_INPUTS else ((f,) * count for f in _FORMATS)
        )
        chosen = tuple(precisions) if operator.role is Role.ADJUSTABLE else ("",)
        for inputs, precision in itertools.product(tuple(arrivals), chosen):
            case = Case(flow.signature(i), precision, inputs)
            if case in cases:
                continue
            size = 512 * generator.randrange(0, 64)
            cases[case] = CaseCost(
                output=result_format(operator, precision, inputs, "BF16"),
                samples=1,
                forward=work(),
                backward=work(),
                saves_inputs=tuple(k for k in range(count) if generator.random() < 0.5),
                saves_output=generator.random() < 0.3,
                result_bytes=size,
                forward_net_bytes=size + 512 * generator.randrange(0, 8),
                forward_peak_bytes=size + 512 * generator.randrange(8, 64),
                backward_net_bytes=-512 * generator.randrange(0, 8),
                backward_peak_bytes=512 * generator.randrange(0, 64),
                kernel_ns=generator.randrange(0, 100_000),
            )
    names = [operator.name for operator in graph]
    return StepCosts(
        device=DeviceIdentity(name=f"made up {seed}", kind="cuda", threads=1, versions={}),
        model=graph.name,
        fingerprint=graph.fingerprint(),
        half_format="BF16",
        cases=cases,
        phases={label: work() for label in PHASE_LABELS},
        phase_peaks=dict.fromkeys(PHASE_LABELS, 0),
        roots={},
        held={name: names[min(i + 1, len(names) - 1)] for i, name in enumerate(names)},
        resident_bytes=1 << 20,
        casts={
            f"{a}>{b}": CostFit(base_ns=1000, ns_per_mi_elements=2000) for a in _FORMATS for b in _FORMATS if a != b
        },
        cast_host_ns=5000,
    )


SPEED: Mapping[str, int] = {"INT8": 4, "FP8": 4, "BF16": 2, "FP16": 2, "TF32": 2, "FP32": 1}
"""Speed of a made-up device relative to FP32."""
FORWARD_NS = 4000
"""Forward time of a made-up operator in FP32."""
NETWORK = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9, source="made up")
_STACKED = ("INT8", "BF16", "FP32")


def make_operator(
    name: str,
    role: Role = Role.ADJUSTABLE,
    inputs: Sequence[str] = (),
    *,
    shape: tuple[int, ...] = (64, 64),
    dtype: str = "float32",
    parameters: Sequence[str] = (),
    op_type: str | None = None,
) -> Operator:
    """An operator, by default of a kind that is typical for its role."""
    kinds = {Role.ADJUSTABLE: "linear", Role.DEPENDENT: "add", Role.FIXED: "layer_norm"}
    spec = TensorSpec(shape=shape, dtype=dtype)
    kind = op_type or kinds[role]
    return Operator(
        name=name,
        op_type=kind,
        role=role,
        inputs=tuple(inputs),
        input_specs=(spec,) * len(inputs),
        output_specs=(spec,),
        parameters=tuple(parameters),
        flops=spec.elements,
        num_bytes=spec.num_bytes,
        signature=f"{kind}:{shape}:{dtype}:{len(inputs)}",
    )


def make_graph(
    operators: Sequence[Operator],
    parameters: Mapping[str, int | tuple[int, ...]] | None = None,
    *,
    name: str = "synthetic",
) -> OpGraph:
    """A graph; ``parameters`` maps names to numbers of elements or shapes, in registration order."""
    shapes = {key: (size,) if isinstance(size, int) else size for key, size in (parameters or {}).items()}
    specs = [ParameterSpec(name=key, spec=TensorSpec(shape=shape, dtype="float32")) for key, shape in shapes.items()]
    return OpGraph(name=name, operators=tuple(operators), parameters=tuple(specs))


def residual_graph() -> OpGraph:
    """Embedding, then a block (norm, two linear layers, residual addition), then a head and a loss."""
    return make_graph(
        [
            make_operator("embed", parameters=("embed.weight",)),
            make_operator("norm", Role.FIXED, ["embed"], parameters=("norm.weight",)),
            make_operator("up", inputs=["norm"], shape=(64, 256), parameters=("up.weight", "up.bias")),
            make_operator("gelu", Role.DEPENDENT, ["up"], shape=(64, 256), op_type="gelu"),
            make_operator("down", inputs=["gelu"], parameters=("down.weight",)),
            make_operator("residual", Role.DEPENDENT, ["embed", "down"]),
            make_operator("head", inputs=["residual"], parameters=("embed.weight",)),
            make_operator("loss", Role.FIXED, ["head"], shape=(), op_type="cross_entropy_loss"),
        ],
        {"embed.weight": 65536, "norm.weight": 64, "up.weight": 262144, "up.bias": 256, "down.weight": 16384},
    )


def stacked_graph(blocks: int) -> OpGraph:
    """Transformer blocks of ten operators, named like those of captured models; 10 * ``blocks`` + 3 operators."""
    wide = (64, 256)
    operators = [make_operator("embed/embedding", parameters=("embed.weight",), op_type="embedding")]
    parameters = {"embed.weight": 65536}

    def add(name: str, role: Role, reads: Sequence[str], shape: tuple[int, ...], kind: str, elements: int = 0) -> str:
        weight = f"{name.rpartition('/')[0]}.weight"
        if elements:
            parameters[weight] = elements
        used = (weight,) if elements else ()
        operators.append(make_operator(name, role, reads, shape=shape, parameters=used, op_type=kind))
        return name

    x = operators[0].name
    for block in range(blocks):
        at = f"blocks.{block}"
        y = add(f"{at}.norm1/layer_norm", Role.FIXED, [x], (64, 64), "layer_norm", 64)
        y = add(f"{at}.attention.qkv/linear", Role.ADJUSTABLE, [y], (64, 192), "linear", 12288)
        kind = "scaled_dot_product_attention"
        y = add(f"{at}.attention/{kind}", Role.ADJUSTABLE, [y], (64, 64), kind)
        y = add(f"{at}.attention.out/linear", Role.ADJUSTABLE, [y], (64, 64), "linear", 4096)
        x = add(f"{at}/add", Role.DEPENDENT, [x, y], (64, 64), "add")
        y = add(f"{at}.norm2/layer_norm", Role.FIXED, [x], (64, 64), "layer_norm", 64)
        y = add(f"{at}.mlp.up/linear", Role.ADJUSTABLE, [y], wide, "linear", 16384)
        y = add(f"{at}.mlp/gelu", Role.DEPENDENT, [y], wide, "gelu")
        y = add(f"{at}.mlp.down/linear", Role.ADJUSTABLE, [y], (64, 64), "linear", 16384)
        x = add(f"{at}/add_1", Role.DEPENDENT, [x, y], (64, 64), "add")
    x = add("head/linear", Role.ADJUSTABLE, [x], (64, 1024), "linear", 65536)
    add("cross_entropy_loss", Role.FIXED, [x], (), "cross_entropy_loss")
    return make_graph(operators, parameters)


def stacked_problem(blocks: int, *, devices: Sequence[str] = ("slow",), seed: int = 0) -> Problem:
    """The problem of `stacked_graph` on made-up device types, with limits that force a mix of precisions.

    Each of ``devices`` is slower than the one before. Sensitivities span two decades; ``seed`` draws them.
    """
    graph = stacked_graph(blocks)
    source = random.Random(seed)
    scales = {operator.name: 10 ** source.uniform(-3, -1) for operator in graph}
    sensitivities = {
        name: {precision: scales[name] * value for precision, value in table.items()}
        for name, table in make_sensitivities(graph).items()
    }
    cluster = Cluster(
        name="synthetic",
        devices=tuple(
            DeviceType(name=name, count=2, memory_limit_bytes=2**40, precisions=_STACKED) for name in devices
        ),
        network=NETWORK,
    )
    profiles = {name: make_profile(graph, _STACKED, scale=10 + 2 * i) for i, name in enumerate(devices)}
    problem = build_problem(graph, profiles, sensitivities, cluster, latency_limit_ns=2**50)
    low, high = (evaluate(problem, uniform_plan(problem, precision)) for precision in ("BF16", "FP32"))
    return replace(
        problem,
        latency_limit_ns=(low.iteration_ns + high.iteration_ns) // 2,
        devices=tuple(
            replace(device, memory_limit_kib=(low.memory_kib[device.name] + 3 * high.memory_kib[device.name]) // 4)
            for device in problem.devices
        ),
    )


def random_graph(source: random.Random, *, max_operators: int = 12) -> OpGraph:
    """A random graph whose first operator is adjustable and whose last is a fixed scalar."""
    operators: list[Operator] = []
    parameters: dict[str, int] = {}
    for i in range(source.randint(2, max_operators)):
        names = [operator.name for operator in operators]
        role = Role.ADJUSTABLE if i == 0 else source.choice(list(Role))
        reads = source.sample(names, k=min(len(names), source.randint(1, 2))) if i else []
        used = []
        if role is not Role.DEPENDENT and source.random() < 0.7:
            if not parameters or source.random() < 0.8:
                parameters[f"p{i}"] = source.randint(1, 2**20)
            used = [source.choice(list(parameters))]
        shape = (source.randint(1, 64), source.randint(1, 64))
        operators.append(make_operator(f"o{i}", role, reads, shape=shape, parameters=used))
    operators.append(make_operator("loss", Role.FIXED, [operators[-1].name], shape=(), op_type="mse_loss"))
    return make_graph(operators, parameters)


def make_profile(
    graph: OpGraph,
    precisions: Sequence[str] = ("INT8", "BF16", "FP32"),
    *,
    kind: str = "cpu",
    scale: int = 1,
    host_ns: int = 0,
    overhead: IterationOverhead | None = None,
) -> DeviceProfile:
    """A made-up profile: forward takes `FORWARD_NS` times ``scale`` over `SPEED`, backward twice that.

    Adjustable and fixed operators keep their first input, and so does ``gelu``; other dependent ones keep nothing.
    """
    formats = formats_for(precisions, "BF16")
    half = {borders.output for borders in formats.values()}
    measurements = {}
    for operator in graph:
        role = problem_role(operator)
        names = list(formats) if role is Role.ADJUSTABLE else ["FP32"] if role is Role.FIXED else sorted(half)
        keeps = (0,) if operator.inputs and (role is not Role.DEPENDENT or operator.op_type == "gelu") else ()
        measurements[f"{operator.signature} {role}"] = {
            name: MeasuredCost(
                forward_ns=FORWARD_NS * scale // SPEED[name],
                backward_ns=2 * FORWARD_NS * scale // SPEED[name],
                host_forward_ns=host_ns,
                host_backward_ns=host_ns,
                saves_inputs=() if FORMATS[name].bits == 8 else keeps,
                saved_bytes=operator.output_elements if FORMATS[name].bits == 8 else 0,
            )
            for name in names
        }
    pairs = {(a.output, p) for a in formats.values() for p in formats} | {(a, b) for a in half for b in half}
    fit = CostFit(base_ns=100, ns_per_mi_elements=200_000)
    return DeviceProfile(
        device=DeviceIdentity(name=f"synthetic {kind}", kind=kind, threads=1, versions={"synthetic": "1"}),
        model=graph.name,
        fingerprint=graph.fingerprint(),
        options={"rounding": "stochastic"},
        formats=formats,
        measurements=measurements,
        operators={o.name: f"{o.signature} {problem_role(o)}" for o in graph},
        casts={f"{a}>{b}": fit for a, b in sorted(pairs) if a != b},
        gradient_sums={name: fit for name in sorted(half)},
        optimizer=OptimizerCost(name="Adam", step_ns=9000, zero_grad_ns=1000, state_bytes=800, workspace_bytes=0),
        overhead=overhead or IterationOverhead(),
    )


def make_cluster(
    *,
    count: int = 1,
    memory_limit_bytes: int = 2**40,
    precisions: Sequence[str] = ("INT8", "BF16", "FP32"),
    fixed: int = 0,
) -> Cluster:
    """``count`` planned workers called "slow" and ``fixed`` FP32 workers called "fast", 1 GB/s and 10 us apart."""
    devices = [
        DeviceType(name="slow", count=count, memory_limit_bytes=memory_limit_bytes, precisions=tuple(precisions))
    ]
    if fixed:
        devices.append(
            DeviceType(name="fast", count=fixed, memory_limit_bytes=2**40, precisions=("FP32",), role=DeviceRole.FIXED)
        )
    return Cluster(name="synthetic", devices=tuple(devices), network=NETWORK)


def make_sensitivities(graph: OpGraph) -> dict[str, dict[str, float]]:
    """Sensitivities of all adjustable operators: 4 in INT8 and FP8, 1 in 16 bits, 0.5 in TF32, 0 in FP32."""
    by_precision = {"INT8": 4.0, "FP8": 4.0, "BF16": 1.0, "FP16": 1.0, "TF32": 0.5, "FP32": 0.0}
    return {operator.name: dict(by_precision) for operator in graph.by_role(Role.ADJUSTABLE)}


def sample_graph() -> OpGraph:
    """A graph with a look-up, a normalization, two linear layers, an activation and a residual addition."""
    operators = (
        make_operator("embed", op_type="embedding", parameters=("embed.weight",)),
        make_operator("norm", Role.FIXED, ["embed"], parameters=("norm.weight",)),
        make_operator("fc1", inputs=["norm"], parameters=("fc1.weight",)),
        make_operator("act", Role.DEPENDENT, ["fc1"], op_type="gelu"),
        make_operator("fc2", inputs=["act"], parameters=("fc2.weight",)),
        make_operator("add", Role.DEPENDENT, ["fc2", "embed"]),
    )
    shapes = {"embed.weight": (64, 64), "norm.weight": (64,), "fc1.weight": (64, 64), "fc2.weight": (64, 64)}
    return make_graph(operators, shapes, name="sample")


def sample_knowledge(graph: OpGraph) -> ModelKnowledge:
    """Knowledge of a sample graph: normally distributed weights, and no statistics."""
    return ModelKnowledge(
        weights={
            parameter.name: WeightStatistics(
                elements=parameter.spec.elements,
                mean_square=1.0,
                mean_square_amax={"first": 9.0, "last": 9.0},
                first_size=64,
                last_size=64,
            )
            for parameter in graph.parameters
        }
    )
