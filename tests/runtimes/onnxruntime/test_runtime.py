"""The runtime behind the common contract: conformance, profiles, and the way from a profile to a plan to a run."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")

from qsync_opt.cli import main
from qsync_opt.costs import load_profile
from qsync_opt.errors import ModelError, UnsupportedError
from qsync_opt.model import Role
from qsync_opt.registry import Kind, create
from qsync_opt.runtime import Runtime
from qsync_opt.runtimes.onnxruntime import OnnxRuntime, RunnableModel, sessions
from qsync_opt.testing import check_runtime
from qsync_opt.training import load_plan

RANDOM = np.random.default_rng(3)


def weight(name, *shape):
    return numpy_helper.from_array((RANDOM.standard_normal(shape) * 0.2).astype(np.float32), name)


@pytest.fixture
def proto():
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["a"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("GlobalAveragePool", ["b"], ["c"], name="pool"),
        helper.make_node("Flatten", ["c"], ["d"], name="flat"),
        helper.make_node("Gemm", ["d", "w", "v"], ["e"], name="head"),
        helper.make_node("Softmax", ["e"], ["y"], name="soft"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3, 8, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 5))],
        [weight("k", 6, 3, 3, 3), weight("w", 6, 5), weight("v", 5)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def image():
    return RANDOM.standard_normal((2, 3, 8, 8)).astype(np.float32)


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def conforms(runtime, proto, image):
    check_runtime(
        runtime,
        model=RunnableModel(proto, threads=1),
        args=(image,),
        device="cpu",
        outputs_equal=equal,
        step=lambda model, args: model(*args),
    )


def test_it_conforms(proto, image):
    runtime = create(Kind.RUNTIME, "onnxruntime")
    assert isinstance(runtime, Runtime)
    conforms(runtime, proto, image)


class Forgetful(OnnxRuntime):
    def undo(self, model):
        model.precisions = {}
        return model


class Backward(OnnxRuntime):
    """Says that it does not train, and has times of backward passes all the same."""

    def profile(self, *args, **kwargs):
        profile = super().profile(*args, **kwargs)
        data = json.loads(json.dumps(profile.to_json()))
        next(iter(next(iter(data["measurements"].values())).values()))["backward_ns"] = 5
        return type(profile).from_json(data)


class Elsewhere(OnnxRuntime):
    """Profiles another model."""

    def profile(self, model, args, kwargs=None, **options):
        profile = super().profile(model, args, kwargs, **options)
        return type(profile).from_json({**profile.to_json(), "fingerprint": "other"})


@pytest.mark.parametrize(
    ("runtime", "needle"),
    [
        (Forgetful, "undo does not give the model back"),
        (Backward, "has backward times"),
        (Elsewhere, "of another graph"),
    ],
)
def test_faulty_runtimes_are_found(runtime, needle, proto, image):
    with pytest.raises(AssertionError, match=needle):
        conforms(runtime(), proto, image)


class NoProfile:
    name, trains = "half", False
    capture = device_formats = operator_precisions = apply = undo = None


def test_a_runtime_that_lacks_a_method_is_told_which(proto, image):
    with pytest.raises(AssertionError, match="lacks profile"):
        conforms(NoProfile(), proto, image)


def test_from_profile_to_plan_to_run(proto, image, tmp_path, capsys):
    """The files in between are those of the command line."""
    runtime = OnnxRuntime()
    onnx.save(proto, tmp_path / "net.onnx")
    profile = runtime.profile(tmp_path / "net.onnx", (image,), repeats=2, name="desk")
    profile.save(tmp_path / "desk.json")
    assert load_profile(tmp_path / "desk.json") == profile
    assert set(profile.formats) == {"INT8", "FP16", "FP32"}
    assert set(profile.cost("conv")) == {"INT8", "FP16", "FP32"} and set(profile.cost("soft")) == {"FP32"}
    assert all(cost.forward_ns > 0 for cost in profile.cost("conv").values())
    assert profile.options["pass"] == "forward" and "onnxruntime" in profile.device.versions
    assert {check.precision for check in profile.overhead.iterations} == {"INT8", "FP16", "FP32"}
    (tmp_path / "cluster.yaml").write_text(
        "name: one\n"
        "devices: [{name: desk, count: 1, memory: 1 GiB, precisions: [INT8, FP16, FP32], profile: desk.json}]\n"
        "network: {latency: 20 us, bandwidth: 10 Gbit/s, source: none}\n"
    )
    files = [str(tmp_path / name) for name in ("net.onnx", "cluster.yaml")]
    assert main(["plan", *files, "--output", str(tmp_path / "plan.json"), "--latency-limit", "1 s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["termination"] in ("optimal", "feasible")
    plan = load_plan(tmp_path / "plan.json")
    model = runtime.apply(tmp_path / "net.onnx", plan, graph=runtime.capture(tmp_path / "net.onnx"))
    assert equal(model(image), RunnableModel(proto)(image))  # with a second to spare, nothing is lowered
    assert set(model.precisions.values()) == {"FP32"}


def test_a_second_profile_takes_all_from_the_cache(proto, image, tmp_path, monkeypatch):
    from qsync_opt.runtimes.onnxruntime import profiler

    model = RunnableModel(proto, threads=1)
    first = profiler.profile(model, (image,), precisions=["FP16"], cache_dir=tmp_path, repeats=2)
    assert set(first.formats) == {"FP16", "FP32"}
    for name in ("_time_operator", "_time_cast"):
        monkeypatch.setattr(profiler._Bench, name, lambda *args: pytest.fail("measured again"))
    again = profiler.profile(model, (image,), precisions=["FP16"], cache_dir=tmp_path, repeats=2)
    assert again.measurements == first.measurements and again.casts == first.casts


def test_what_cannot_be_is_refused_by_name(proto, image):
    runtime = OnnxRuntime()
    model = runtime.load(proto)
    with pytest.raises(UnsupportedError, match=r"'FP8'.*allowed are INT8, FP16, FP32"):
        runtime.profile(model, (image,), precisions=["FP8"])
    with pytest.raises(UnsupportedError, match="allowed are cpu, cuda"):
        runtime.profile(model, (image,), device="tpu")
    other = onnx.ModelProto()
    other.CopyFrom(proto)
    other.graph.node[0].name = "convolution"
    with pytest.raises(ModelError, match="of another model"):
        runtime.apply(model, {"conv": "FP32", "head": "FP32"}, graph=runtime.capture(other))


def test_kinds_of_operators_and_their_precisions():
    runtime = OnnxRuntime()
    assert set(runtime.device_formats("cpu")) >= {"INT8", "FP16", "FP32"}
    assert runtime.operator_precisions("MatMul", "cpu") == runtime.operator_precisions("linear", "cpu")
    assert runtime.operator_precisions("Softmax", "cpu") == ("FP32",)
    assert "INT8" not in runtime.operator_precisions("Gather", "cpu")


def test_adjustable_operators_are_those_of_the_reader(proto):
    assert [o.name for o in OnnxRuntime().capture(proto).by_role(Role.ADJUSTABLE)] == ["conv", "head"]


def test_a_captured_model_some_of_whose_operators_have_no_nodes(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from qsync_opt.runtimes.torch.capture import capture

    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = torch.nn.Embedding(20, 16), torch.nn.Embedding(12, 16)
            self.head = torch.nn.Linear(16, 20)
            self.register_buffer("numbers", torch.arange(12)[None])

        def forward(self, ids):
            length = ids.shape[1]
            torch.arange(length)[None] + 1  # nobody reads it
            x = self.words(ids) + self.places(self.numbers[:, :length]) + self.places(self.numbers[:, 1 : length + 1])
            return self.head(x)

    ids = torch.arange(8).view(2, 4)
    graph = capture(Positions(), (ids,), onnx_path=tmp_path / "model.onnx")
    dropped = [operator.name for operator in graph if not operator.onnx_nodes and operator.op_type != "input"]
    assert dropped
    runtime = OnnxRuntime()
    model = runtime.load(tmp_path / "model.onnx", threads=1)
    profile = runtime.profile(model, (ids.numpy(),), repeats=1)
    assert all(profile.cost(name)["FP32"].forward_ns == 0 for name in dropped)
    runtime.apply(model, {operator.name: "FP16" for operator in graph.by_role(Role.ADJUSTABLE)})
    assert model(ids.numpy()).keys()


def test_sessions_of_a_card_compute_in_fp32_and_may_be_bound_to_it(proto, monkeypatch):
    import onnxruntime as ort

    entry = "session.disable_cpu_ep_fallback"
    options = ort.SessionOptions()
    options.add_session_config_entry(entry, "1")
    with pytest.raises(Exception, match="explicitly added the CPU EP"):  # so that the two must not stand together
        ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    started = []

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "InferenceSession", lambda data, options, providers: started.append(providers))
    card = sessions.find_device("cuda:1")
    on_card = ("CUDAExecutionProvider", {"device_id": 1, "use_tf32": 0})
    sessions.start_session(proto, card, "the model")
    sessions.start_session(proto, card, "the model", own_device_only=True)
    assert started == [[on_card, "CPUExecutionProvider"], [on_card]]
