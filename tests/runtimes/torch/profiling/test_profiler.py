import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.costs import DeviceProfile, load_profile
from qsync_opt.errors import ModelError, NotReadyError, ProblemError, UnsupportedError
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import CapturedModel, capture_model
from qsync_opt.runtimes.torch.profiling import OperatorBench, profile, selected_formats
from qsync_opt.runtimes.torch.profiling import profiler as profile_run
from qsync_opt.runtimes.torch.support import Elapsed, TrainingExample, make_stopwatch
from qsync_opt.testing import make_cluster, make_sensitivities
from qsync_opt.training import build_problem, evaluate, uniform_plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(2)])
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gpt() -> tuple[Gpt, tuple[Tensor, Tensor], CapturedModel]:
    torch.manual_seed(0)
    batch = (torch.randint(32, (2, 8)), torch.randint(32, (2, 8)))
    model = Gpt()
    return model, batch, capture_model(model, batch)


@pytest.fixture(scope="module")
def cnn() -> CapturedModel:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 4))
    return capture_model(model, (torch.randn(2, 3, 8, 8),))


@pytest.fixture(scope="module")
def gpt_profile(gpt: tuple[Gpt, tuple[Tensor, Tensor], CapturedModel]) -> DeviceProfile:
    model, batch, captured = gpt
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return profile(
        captured,
        "cpu",
        optimizer=optimizer,
        example=TrainingExample(model=model, args=batch),
        progress=False,
        repeats=2,
        name="test cpu",
    )


def test_a_gpt_is_profiled_in_all_its_precisions(gpt: Any, gpt_profile: DeviceProfile, tmp_path: Path) -> None:
    _, _, captured = gpt
    graph = captured.graph
    assert list(gpt_profile.operators) == [operator.name for operator in graph]
    assert list(gpt_profile.formats) == ["INT8", "BF16", "FP32"]
    for operator in graph:
        costs = gpt_profile.cost(operator.name)
        if operator.op_type == "linear":
            assert list(costs) == ["INT8", "BF16", "FP32"]
            assert all(cost.backward_ns > 0 for cost in costs.values())
        if operator.role is Role.FIXED:
            assert list(costs) == ["FP32"]
    # Two equal blocks are measured once.
    assert gpt_profile.operators["blocks.0.up/linear"] == gpt_profile.operators["blocks.1.up/linear"]
    assert {"FP32>INT8", "BF16>INT8", "FP32>BF16", "BF16>FP32"} == set(gpt_profile.casts)
    assert set(gpt_profile.gradient_sums) == {"BF16", "FP32"}
    gpt_profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == gpt_profile


def test_the_optimizer_is_measured_on_a_copy(gpt: Any, gpt_profile: DeviceProfile) -> None:
    model, _, _ = gpt
    parameters = sum(p.numel() for p in model.parameters())
    assert gpt_profile.optimizer.name == "SGD"
    assert gpt_profile.optimizer.state_bytes == 4 * parameters
    assert gpt_profile.optimizer.step_ns > 0
    assert all(p.grad is None for p in model.parameters())


def test_whole_iterations_are_measured_and_kept(gpt_profile: DeviceProfile) -> None:
    checks = {check.precision: check for check in gpt_profile.overhead.iterations}
    assert list(checks) == ["INT8", "BF16", "FP32"]
    for check in checks.values():
        assert check.predicted_forward_ns >= check.summed_forward_ns
    assert "whole iterations predicted within" in gpt_profile.describe()


def test_memory_of_known_operators(gpt: Any, gpt_profile: DeviceProfile) -> None:
    elements = 2 * 8 * 16
    up = gpt_profile.cost("blocks.0.up/linear")
    # In FP32 a linear layer keeps its input as it is; in BF16 also its weight's cast copy; in INT8 codes of both and
    # one scale for the input, one per output channel for the weight.
    assert (up["FP32"].saves_inputs, up["FP32"].saved_bytes) == ((0,), 0)
    assert (up["BF16"].saves_inputs, up["BF16"].saved_bytes) == ((0,), 2 * 16 * 32)
    assert up["INT8"].saves_inputs == ()
    assert up["INT8"].saved_bytes == elements + 16 * 32 + 4 + 4 * 32
    norm = gpt_profile.cost("blocks.0.norm/layer_norm")["FP32"]
    assert (norm.saves_inputs, norm.saved_bytes) == ((0,), 2 * 4 * 16)
    assert gpt_profile.cost("blocks.0/gelu")["BF16"].saves_inputs == (0,)
    chunk = gpt_profile.cost("blocks.0/chunk")["FP32"]
    assert (chunk.alias_input, chunk.saves_inputs, chunk.saved_bytes) == (0, (), 0)
    attention = gpt_profile.cost("blocks.0/scaled_dot_product_attention")["FP32"]
    assert attention.saves_inputs == (0, 1, 2)


def test_a_problem_can_be_built_from_it(gpt: Any, gpt_profile: DeviceProfile) -> None:
    _, _, captured = gpt
    problem = build_problem(
        captured.graph, {"slow": gpt_profile}, make_sensitivities(captured.graph), make_cluster(count=2)
    )
    times = [evaluate(problem, uniform_plan(problem, p)).iteration_ns for p in ("INT8", "BF16", "FP32")]
    assert problem.latency_limit_ns <= min(times)


def test_a_cnn_with_in_place_and_external_inputs(cnn: CapturedModel) -> None:
    result = profile(cnn, "cpu", progress=False, repeats=2)
    conv = next(o for o in cnn.graph if o.op_type == "conv2d")
    assert list(result.cost(conv.name)) == ["INT8", "BF16", "FP32"]
    relu = next(o for o in cnn.graph if o.op_type.startswith("relu"))
    assert result.cost(relu.name)["FP32"].backward_ns > 0
    image = cnn.graph[conv.inputs[0]]
    assert image.op_type == "input"
    assert result.cost(image.name)["FP32"].forward_ns == 0
    assert result.optimizer.name == "AdamW"
    assert result.overhead.iterations == ()


class _Forbidden:
    def measure(self, *_: Any) -> None:
        raise AssertionError("measured again")


def test_a_second_run_measures_nothing(cnn: CapturedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profile(cnn, "cpu", progress=False, repeats=2, cache_dir=tmp_path)
    monkeypatch.setattr(profile_run, "OperatorBench", lambda *_: _Forbidden())
    for name in ("time_cast", "time_gradient_sum", "measure_optimizer"):
        monkeypatch.setattr(profile_run, name, lambda *_: pytest.fail("measured again"))
    assert profile(cnn, "cpu", progress=False, repeats=2, cache_dir=tmp_path) == first
    with pytest.raises(AssertionError, match="measured again"):
        profile(cnn, "cpu", progress=False, repeats=3, cache_dir=tmp_path)
    with pytest.raises(AssertionError, match="measured again"):
        options = KernelOptions(rounding="nearest")
        profile(cnn, "cpu", progress=False, repeats=2, cache_dir=tmp_path, options=options)


def test_an_interrupted_run_goes_on_where_it_stopped(cnn: CapturedModel, tmp_path: Path) -> None:
    labels: list[str] = []

    def interrupt(done: int, total: int, label: str) -> None:
        labels.append(label)
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(cnn, "cpu", progress=interrupt, repeats=2, cache_dir=tmp_path)
    assert len(labels) == 6
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert len(kept) == 5
    reports: list[tuple[int, int]] = []
    profile(
        cnn, "cpu", progress=lambda done, total, label: reports.append((done, total)), repeats=2, cache_dir=tmp_path
    )
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert reports[-1][0] == reports[-1][1] == len(list(tmp_path.rglob("*.json")))


def test_without_time_costs_are_scaled_from_the_largest_operator(gpt: Any, tmp_path: Path) -> None:
    model, batch, captured = gpt
    example = TrainingExample(model=model, args=batch)
    result = profile(captured, "cpu", example=example, progress=False, repeats=2, seconds=0.0, cache_dir=tmp_path)
    assert list(result.operators) == [operator.name for operator in captured.graph]
    costs = [cost for table in result.measurements.values() for cost in table.values()]
    assert [cost.scaled_from for cost in costs].count("") == 1
    assert "operator by operator, in 0 s" in str(result.options["measured"])
    assert "no whole iterations" in str(result.options["measured"])
    assert "scaled from a measured one" in result.describe()
    (sensitivities, cluster) = make_sensitivities(captured.graph), make_cluster(count=2)
    build_problem(captured.graph, {"slow": result}, sensitivities, cluster)
    # What the limit cut short must not pass for a full measurement in another run.
    assert not any(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_iterations_for_which_memory_does_not_suffice_are_left_out(seconds: float | None) -> None:
    class Limited(nn.Module):
        full = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.full:
                raise torch.cuda.OutOfMemoryError("out of memory")
            return x

    model = nn.Sequential(nn.Linear(8, 16), Limited(), nn.Linear(16, 4))
    captured = capture_model(model, (torch.randn(4, 8),))
    example = TrainingExample(model=model, args=(torch.randn(4, 8),), loss=lambda y: y.square().mean())
    Limited.full = True
    result = profile(captured, "cpu", example=example, progress=False, repeats=2, seconds=seconds)
    assert "no whole iterations" in str(result.options["measured"])
    assert ("in 5 s" in str(result.options["measured"])) == (seconds is not None)
    assert not any(cost.scaled_from for table in result.measurements.values() for cost in table.values())


@pytest.mark.parametrize("seconds", [None, 100.0])
def test_what_memory_does_not_suffice_for_is_scaled(
    seconds: float | None, cnn: CapturedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(math.prod(spec.shape) for operator in cnn.graph for spec in operator.output_specs)

    def short_of_memory(measure: Any, elements: Any) -> Any:
        def run(*args: Any) -> Any:
            if elements(*args) == largest:
                raise torch.cuda.OutOfMemoryError("out of memory")
            return measure(*args)

        return run

    cast = short_of_memory(profile_run.time_cast, lambda source, target, spec, *rest: math.prod(spec.shape))
    bench = short_of_memory(OperatorBench.measure, lambda bench, *rest: bench._operator.output_elements)
    monkeypatch.setattr(profile_run, "time_cast", cast)
    monkeypatch.setattr(OperatorBench, "measure", bench)
    result = profile(cnn, "cpu", repeats=2, seconds=seconds, progress=False)
    scaled = {name for name, table in result.measurements.items() if any(c.scaled_from for c in table.values())}
    assert scaled == {result.operators[o.name] for o in cnn.graph if o.output_elements == largest}
    assert all(fit.ns(largest) > 0 for fit in result.casts.values())
    assert "scaled from a measured one" in str(result.options["measured"])


def test_an_optimizer_that_memory_does_not_suffice_for_is_an_error(
    cnn: CapturedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: Any) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(profile_run, "measure_optimizer", measure)
    with pytest.raises(NotReadyError, match="for a step of the optimizer"):
        profile(cnn, "cpu", repeats=1, progress=False)


def test_with_enough_time_nothing_is_scaled(cnn: CapturedModel) -> None:
    order: list[str] = []
    result = profile(
        cnn,
        "cpu",
        repeats=2,
        seconds=1000.0,
        progress=lambda done, total, label: order.append(label.rpartition(" ")[0]),
    )
    assert not any(cost.scaled_from for table in result.measurements.values() for cost in table.values())
    assert "measured" not in result.options
    operators = [name for name in order if name in cnn.calls]
    assert operators[0] in ("0/conv2d", "4/linear")  # most operations or most bytes, as the processor has it
    assert len(operators) > len(set(operators)) > 3


def test_a_busy_machine_is_named(cnn: CapturedModel, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    class Restless(_CountingStopwatch):
        runs = 0.0

        def time(self, work: Any) -> tuple[Any, Elapsed]:
            self.runs += 1.0
            return work(), Elapsed(device_ns=1e6 * (1 + self.runs % 7))  # the sum of a few of these never settles

    monkeypatch.setattr("qsync_opt.runtimes.torch.profiling.profiler.make_stopwatch", lambda device: Restless())
    profile(cnn, "cpu", precisions=("FP32",), progress=False, repeats=1)
    assert re.search(r"the machine is busy: rounds of \d+ of \d+ measurements disagree, those of '.*' by", caplog.text)


def test_fewer_precisions(cnn: CapturedModel) -> None:
    result = profile(cnn, "cpu", precisions=("FP32",), progress=False, repeats=2)
    assert list(result.formats) == ["FP32"]
    assert result.casts == {}
    # An 8-bit operator answers in 16 bits, so that format comes with it.
    assert list(selected_formats(torch.device("cpu"), ("INT8",))) == ["INT8", "BF16", "FP32"]


def test_bad_arguments_are_named(cnn: CapturedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cpu cannot run in 'FP8': allowed are INT8-BWD8, INT8, BF16, FP32"):
        profile(cnn, "cpu", precisions=("FP8",), progress=False)
    with pytest.raises(ModelError, match="captured is a OpGraph, but the calls of all operators are needed"):
        profile(cnn.graph, "cpu", progress=False)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="repeats is 0"):
        profile(cnn, "cpu", repeats=0, progress=False)
    with pytest.raises(UnsupportedError, match="meta"):
        profile(cnn, "meta", progress=False)
    with pytest.raises(UnsupportedError, match="allowed are cpu and cuda"):
        make_stopwatch(torch.device("meta"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemError, match="cannot make the folder"):
        profile(cnn, "cpu", progress=False, cache_dir=tmp_path / "file")


def test_an_operator_that_cannot_run_is_named(cnn: CapturedModel) -> None:
    linear = next(o.name for o in cnn.graph if o.op_type == "linear")

    def fails(*_: Any) -> None:
        raise RuntimeError("not implemented for 'Half'\nC++ trace")

    calls = {**cnn.calls, linear: dataclasses.replace(cnn.calls[linear], target=fails)}
    broken = dataclasses.replace(cnn, calls=calls)
    with pytest.raises(ModelError, match=rf"{linear}' cannot run by itself in .*: not implemented for 'Half'; give it"):
        profile(broken, "cpu", precisions=("FP32",), progress=False, repeats=2)


class _CountingStopwatch:
    """Every piece of work takes as long as the fake quantizer and product say; nothing depends on the machine."""

    def __init__(self) -> None:
        self.now_ns = 0.0

    def settle(self, *, flush: bool = True) -> None:
        pass

    def time(self, work: Any) -> tuple[Any, Elapsed]:
        start_ns = self.now_ns
        return work(), Elapsed(device_ns=self.now_ns - start_ns)


def test_quantization_is_counted_once(gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operator and cast together are what really happens: no part is lost or counted twice."""
    _, _, captured = gpt
    watch = _CountingStopwatch()
    real_execute, real_cast = ops.execute, ops.cast

    def execute(op_type: str, precision: str, function: Any, args: Any, kwargs: Any, options: Any) -> Any:
        watch.now_ns += 1_000_000
        if precision == "INT8":
            watch.now_ns += 300 * args[0].numel()  # the quantizer inside the operator
        return real_execute(op_type, precision, function, args, kwargs, options)

    def cast(x: Tensor, target: str, options: Any) -> Any:
        watch.now_ns += 300 * x.numel()
        return real_cast(x, target, options)

    monkeypatch.setattr(ops, "execute", execute)
    monkeypatch.setattr(ops, "cast", cast)
    monkeypatch.setattr("qsync_opt.runtimes.torch.profiling.profiler.make_stopwatch", lambda device: watch)
    result = profile(captured, "cpu", progress=False, repeats=2)
    costs = result.cost("blocks.0.up/linear")
    assert costs["BF16"].forward_ns == costs["FP32"].forward_ns == 1_000_000
    assert costs["INT8"].forward_ns == pytest.approx(1_000_000, rel=0.01)
    elements = captured.graph["blocks.0.up/linear"].input_specs[0].elements
    assert result.casts["BF16>INT8"].ns(elements) == pytest.approx(300 * elements, rel=0.01)


class _UnsettledStopwatch:
    """A device behind its host: without a head start, it shows what the host took to start the work.

    A backward pass with more than one gradient is an operator's and takes the device longer than the idle engine's.
    """

    head_start = False

    def settle(self, *, flush: bool = True) -> None:
        self.head_start = True

    def time(self, work: Any) -> tuple[Any, Elapsed]:
        device_ns = 5_000.0 if self.head_start else 400_000.0
        self.head_start = False
        result = work()
        if isinstance(result, tuple) and len(result) > 1:
            device_ns += 100_000.0
        return result, Elapsed(device_ns=device_ns, host_ns=400_000.0)


def test_what_an_idle_backward_takes_of_the_device_is_not_the_hosts_time(cnn: CapturedModel) -> None:
    name = next(o.name for o in cnn.graph if o.op_type == "linear")
    bench = OperatorBench(cnn.graph[name], cnn.calls[name], "FP32", torch.device("cpu"), KernelOptions())
    cost = bench.measure(_UnsettledStopwatch(), 2)
    assert (cost.forward_ns, cost.backward_ns) == (5_000, 100_000)


class Gathered(nn.Module):
    """A look-up with a sparse gradient, and a sum into a tensor that needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(index)
        sums = torch.zeros(3, 8).index_add_(0, index % 3, rows)
        result: torch.Tensor = self.out(sums)
        return result


def test_sparse_gradients_and_writes_into_tensors_without_one() -> None:
    model = capture_model(Gathered(), (torch.arange(6),))
    costs = {}
    for name in ("table/embedding", "index_add_"):  # the second one wrote into what an earlier run had left
        bench = OperatorBench(model.graph[name], model.calls[name], "FP32", torch.device("cpu"), KernelOptions())
        costs[name] = bench.measure(make_stopwatch(torch.device("cpu")), 3)
    assert costs["table/embedding"].alias_input is None
    assert costs["index_add_"].alias_input is not None


class Spectral(nn.Module):
    """Products of the lowest frequencies, written into a spectrum of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(16, 16), nn.Parameter(torch.ones(4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.up(x))
        kept = torch.zeros_like(spectrum)
        kept[:, :4] = spectrum[:, :4] * self.weight
        return torch.fft.irfft(kept)


def test_writes_into_complex_tensors() -> None:
    model = capture_model(Spectral(), (torch.randn(3, 16),))
    result = profile(model, "cpu", precisions=("FP32", "BF16"), progress=False, repeats=2)
    assert {"up/linear", "copy_"} <= result.operators.keys()


class Bags(nn.Module):
    """Bags of unlike numbers of rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(20, 8, mode="mean", **options), nn.Linear(8, 4)

    def forward(self, index: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.table(index, begins))
        return result


@pytest.mark.parametrize(("begins", "options"), [([0, 1, 5], {}), ([0, 1, 5, 7], {"include_last_offset": True})])
def test_bags_begin_at_rising_places(begins: list[int], options: dict[str, bool]) -> None:
    model = capture_model(Bags(**options), (torch.tensor([19, 3, 3, 7, 0, 1, 18]), torch.tensor(begins)))
    call = model.calls["table/embedding_bag"]
    assert [tensor.random("cpu").tolist() for tensor in call.tensors()][2] == [
        7 * k // len(begins) for k in range(len(begins))
    ]
    result = profile(model, "cpu", precisions=("FP32",), progress=False, repeats=2)
    assert "table/embedding_bag" in result.operators


class Causal(nn.Module):
    """Attention by hand that hides with FP32's least number, which BF16 has not."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.query(x) @ self.key(x).mT
        return scores.masked_fill(later, torch.finfo(torch.float32).min).softmax(-1) @ x


def test_numbers_beyond_16_bits_are_profiled_there() -> None:
    model = capture_model(Causal(), (torch.randn(2, 4, 8),))
    result = profile(model, "cpu", precisions=("FP32", "BF16"), progress=False, repeats=2)
    assert "masked_fill" in result.operators
