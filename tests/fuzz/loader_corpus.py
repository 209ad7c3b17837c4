"""Every loader of the package, with valid files to start from and what is done with what it returns."""

from __future__ import annotations

import copy
import gzip
import importlib
import importlib.util
import json
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from onnx import TensorProto, helper, numpy_helper

from qsync_opt.cluster import data_sheet, load_cluster
from qsync_opt.costs import load_profile, roofline_profile
from qsync_opt.costs.learned import RECORD_FORMAT, load_record
from qsync_opt.decoding import load_speculation
from qsync_opt.formulations.training import FrontPoint
from qsync_opt.io import MeasurementCache, encode, parse_json
from qsync_opt.model import Role, graph_to_json, load_graph, save_graph
from qsync_opt.model.onnx import read_onnx, read_weights
from qsync_opt.report import load_measured
from qsync_opt.sensitivity import (
    SENSITIVITY_FORMAT,
    Gain,
    ModelStatistics,
    OperatorKind,
    OperatorStatistics,
    ProductSizes,
    RoundingFactor,
    SensitivityValues,
    Signal,
    TensorStatistics,
    load_statistics,
    save_statistics,
)
from qsync_opt.testing import make_cost_record, random_plan, random_problem, sample_graph
from qsync_opt.training import (
    FrontCache,
    SharesPlan,
    SharesProblem,
    at_batch,
    evaluate,
    evaluate_shares,
    front_key,
    load_plan,
    load_problem,
)

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = """\
name: two-kinds
devices:
  - {name: A100, count: 2, role: fixed, memory: 40 GiB, precisions: [FP32]}
  - {name: T4, count: 1, memory: 15 GiB, precisions: [INT8, FP16, FP32], hardware: T4, x-note: [1, {a: b}]}
network: {latency: 20 us, bandwidth: 10 Gbit/s, source: data sheet}
"""

_SPECULATION = {
    "format": "qsync-decoding-measurements/1",
    "name": "card",
    "memory_kib": 50,
    "lengths": [1, 2],
    "drafts": {"A8": {"memory_kib": 40, "accepted": [950, 900], "judged": [1000, 950]}},
    "regimes": [{"name": "b1", "weight": 1.0, "verify_ns": {"1": 9, "3": 11}, "draft_ns": {"A8": 4}, "x-batch": 1}],
}


@dataclass(frozen=True)
class Loader:
    """``load`` takes a path; ``kind`` is json, yaml or onnx; ``seeds`` are valid: parsed data, text or bytes."""

    name: str
    kind: str
    seeds: list[Any]
    load: Callable[[Path], object]


def _problem(path: Path) -> object:
    problem = load_problem(path)
    repr(problem)
    source = random.Random(0)
    evaluation = evaluate(problem, random_plan(source, problem))
    json.dumps(problem.to_json())
    return evaluation


def _shares_seed(problem: Any) -> SharesProblem:
    anchors = {4: replace(problem, extras={}), 8: at_batch(problem, 4, 8)}
    candidates = {device.name: (2, 4, 8) for device in problem.devices}
    total = 4 * sum(device.count for device in problem.devices)
    return SharesProblem(
        name="shares", global_batch=total, latency_limit_ns=9 * 10**9, anchors=anchors, candidates=candidates
    )


def _shares_plan_seed(problem: Any) -> dict[str, Any]:
    return {"format": "qsync-shares-plan/1", "batches": {device.name: 4 for device in problem.devices}}


def _shares_problem(path: Path) -> object:
    text = path.read_bytes().decode("utf-8", "replace")
    problem = SharesProblem.from_json(parse_json(text, ("qsync-shares/1",), where="shares"))
    json.dumps(problem.to_json())
    plan = SharesPlan(
        batches={name: batches[0] for name, batches in problem.candidates.items()},
        precisions=random_plan(random.Random(0), problem.first),
    )
    return evaluate_shares(problem, plan)


def _shares_plan(path: Path) -> object:
    text = path.read_bytes().decode("utf-8", "replace")
    found = SharesPlan.from_json(parse_json(text, ("qsync-shares-plan/1",), where="plan"))
    found.save(path.with_suffix(".again"))
    return found


def _plan(path: Path) -> object:
    found = load_plan(path)
    repr(found)
    found.save(path.with_suffix(".again"))
    return found


def _profile(path: Path) -> object:
    profile = load_profile(path)
    profile.describe()
    profile.save(path.with_suffix(".again"))
    profile.check_graph(sample_graph())
    return profile


def _cluster(path: Path) -> object:
    found = load_cluster(path)
    found.network.allreduce_ns(10**6, 4)
    return found


def _statistics(path: Path) -> object:
    found = load_statistics(path)
    save_statistics(found, path.with_suffix(".again"))
    return found


def _graph(path: Path) -> object:
    graph = load_graph(path)
    graph.fingerprint()
    graph.distances_to_loss()
    save_graph(graph, path.with_suffix(".again"))
    return graph


def _sensitivities(path: Path) -> object:
    text = path.read_bytes().decode("utf-8", "replace")
    data = parse_json(text, (SENSITIVITY_FORMAT,), where="sensitivities")
    return SensitivityValues.from_json(data).to_json()


def _measurement(path: Path) -> object:
    """A file in the place of a measurement; the cache must take it or leave it, and go on."""
    cache = MeasurementCache(path.parent / "cache", {"device": "here"})
    place = cache._path("fc INT8")
    os.replace(path, place)
    found = cache.get("fc INT8")
    cache.put("fc INT8", {"ns": 1.0})
    assert MeasurementCache(path.parent / "cache", {"device": "here"}).get("fc INT8") == {"ns": 1.0}
    return found


def _front(path: Path) -> object:
    problem = random_problem(random.Random(3))
    cache = FrontCache(path.parent / "front", problem, 0.0, FrontPoint)
    limits = {device.name: device.memory_limit_kib for device in problem.devices}
    os.replace(path, cache._cache._path(front_key(7, limits)))
    return cache.get(7, limits)


def _read_onnx(path: Path) -> object:
    graph = read_onnx(path)
    graph.fingerprint()
    return graph


def _choices(path: Path) -> object:
    from qsync_opt.kernels.matmul import read_choices

    return read_choices(path)


def _runnable(path: Path) -> object:
    from qsync_opt.runtimes.onnxruntime import prepare

    return prepare(path)


def _sample_statistics() -> ModelStatistics:
    def tensor(elements: int) -> TensorStatistics:
        return TensorStatistics(
            elements=elements,
            amax=4.0,
            square_sum=20.0,
            mean_square_amax={"tensor": 16.0, "channel": 4.0, "row": 2.0},
            rounding={"INT8/tensor": RoundingFactor(stochastic=0.9, nearest=0.4)},
        )

    operator = OperatorStatistics(
        name="fc/linear",
        op_type="linear",
        kind=OperatorKind.PRODUCT,
        calls=1,
        products=(ProductSizes(products=1, rows=2, contraction=5, columns=3),),
        first_parameter=None,
        second_parameter="fc.weight",
        first=tensor(10),
        second=tensor(15),
        output=TensorStatistics(elements=6, amax=1.0, square_sum=3.0),
        output_gradient=TensorStatistics(elements=6, amax=1.0, square_sum=3.0),
        second_gradient=TensorStatistics(elements=15, amax=1.0, square_sum=2.0),
        alignment={"first>output/tensor": 1.5},
        gains={"first": Gain(uniform=1.0, floating=2.0)},
    )
    signals = {"norm": Signal(elements=4, input_square_sum=2.0, output_square_sum=4.0)}
    return ModelStatistics(batches=1, operators=(operator,), signals=signals, model_fingerprint="abc")


def onnx_models() -> list[bytes]:
    """A network with most attributes that the reader looks at, and one that computes shapes."""
    weight = np.ones((4, 3, 3, 3), np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["a"], name="conv", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["a", "s", "s", "s", "s"], ["b"], name="bn", epsilon=1e-5),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["d"], name="pool"),
        helper.make_node("Shape", ["d"], ["shape"], start=0, end=1),
        helper.make_node("Concat", ["shape", "rest"], ["sizes"], axis=0),
        helper.make_node("Reshape", ["d", "sizes"], ["e"], name="flat"),
        helper.make_node("Gemm", ["e", "w", "v"], ["f"], name="head", transB=1, alpha=0.5),
        helper.make_node("Einsum", ["f", "f"], ["g"], equation="ij,kj->ik"),
        helper.make_node("Constant", [], ["one"], value=numpy_helper.from_array(np.float32(1.0))),
        helper.make_node("Mul", ["g", "one"], ["y"]),
    ]
    weights = {"k": weight, "s": weight[:, 0, 0, 0], "w": np.ones((5, 4), np.float32), "v": np.ones(5, np.float32)}
    weights["rest"] = np.array([-1], np.int64)  # type: ignore[assignment]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3, 8, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 2))],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    first = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    second = copy.deepcopy(first)
    tensor = second.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    tensor.external_data.add(key="offset", value="0")
    tensor.external_data.add(key="length", value="432")
    second.metadata_props.add(key="qsync_opt.model.graph", value=json.dumps(graph_to_json(sample_graph())))
    return [first.SerializeToString(), second.SerializeToString()]


def loaders(*, core_only: bool = False) -> list[Loader]:
    """All of them; those of parts whose packages are missing, or that are no part of the core, are left out."""
    problem = json.loads((ROOT / "tests" / "data" / "instances" / "tiny.json").read_text())
    made = random_problem(random.Random(5))
    small_plan = random_plan(random.Random(5), made).to_json()
    small_plan["solution"] = {"termination": "optimal", "objective": 0.7, "x-more": [1, 2]}
    profile = json.loads(json.dumps(roofline_profile(sample_graph(), data_sheet("T4")).to_json()))
    environment = {"device": "here"}
    measurement = {
        "format": "qsync-measurement/1",
        "environment": environment,
        "key": "fc INT8",
        "measurement": {"ns": 5.0},
    }
    front_problem = random_problem(random.Random(3))
    point = {
        "limit": 7,
        "objective": 0.5,
        "bound": 0.5,
        "iteration_ns": 5,
        "memory_kib": {"T4": 3},
        "plan": random_plan(random.Random(3), front_problem).to_json(),
    }
    front = _front_seed(front_problem, point)
    sensitivities = {
        "format": "qsync-sensitivities/1",
        "unit": "variance",
        "values": {"fc": {"INT8": 0.5, "FP32": 0.0}},
        "excluded": {"fc": {"FP8": "range"}},
    }
    measured = {
        "format": "qsync-measured/1",
        "source": "a run",
        "iteration_ns": 5,
        "devices": {"T4": {"iteration_ns": 4, "peak_memory_bytes": 10}},
    }
    found = [
        Loader("problem", "json", [problem, made.to_json()], _problem),
        Loader("plan", "json", [small_plan], _plan),
        Loader("shares problem", "json", [_shares_seed(made).to_json()], _shares_problem),
        Loader("shares plan", "json", [{**_shares_plan_seed(made), "precisions": small_plan}], _shares_plan),
        Loader("profile", "json", [profile], _profile),
        Loader("cluster", "yaml", [yaml.safe_load(CLUSTER), CLUSTER], _cluster),
        Loader("statistics", "json", [encode(_sample_statistics(), version="qsync-statistics/3")], _statistics),
        Loader("graph", "json", [graph_to_json(sample_graph())], _graph),
        Loader("sensitivities", "json", [sensitivities], _sensitivities),
        Loader("measurement cache", "json", [measurement], _measurement),
        Loader("front cache", "json", [front], _front),
        Loader("measured", "json", [measured], load_measured),
        Loader("cost record", "json", [encode(make_cost_record(2), version=RECORD_FORMAT)], _cost_record),
        Loader("speculation", "json", [_SPECULATION], load_speculation),
        Loader("onnx", "onnx", onnx_models(), _read_onnx),
        Loader("onnx weights", "onnx", onnx_models(), read_weights),
    ]
    if core_only:
        return found
    if importlib.util.find_spec("onnxruntime"):
        importlib.import_module("qsync_opt.runtimes.onnxruntime.prepared")
        found.append(Loader("onnx with weights", "onnx", onnx_models(), _runnable))
    if importlib.util.find_spec("torch"):
        # Before memory and time are limited.
        importlib.import_module("qsync_opt.kernels.matmul.tiles")
        importlib.import_module("qsync_opt.runtimes.torch.job.file")
        table = json.loads(next((ROOT / "kernels" / "tables").glob("*.json")).read_text())
        table["choices"] = table["choices"][:3]
        found.append(Loader("job", "json", [_job_seed(profile, sensitivities)], _job))
        found.append(Loader("matmul choices", "json", [table], _choices))
    return found


def _cost_record(path: Any) -> Any:
    """The loader of records, which are compressed; the corpus spoils what is inside."""
    packed = Path(f"{path}.gz")
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    record = load_record(packed)
    return list(record.programs())


def _job_seed(profile: dict[str, Any], sensitivities: dict[str, Any]) -> dict[str, Any]:
    graph = sample_graph()
    precisions = dict.fromkeys([o.name for o in graph if o.role is Role.ADJUSTABLE], "FP16")
    way = {"precisions": precisions, "autocast": "FP16", "sensitivity": 0.5, "pass_ns": 7, "needed_bytes": 1 << 20}
    return {
        "format": "qsync-job/1",
        "facts": {"memory_bytes": {"T4": 1 << 30}},
        "graph": graph_to_json(graph),
        "profiles": {"T4": profile},
        "sensitivities": {"T4": sensitivities},
        "ways": {"T4": [{"name": "FP16 autocast", **way}]},
        "steps": [{"taken": {"T4": "FP16 autocast"}, "step_ns": 9}],
        "network": {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9, "source": "a run"},
        "devices": [{"name": "T4", "count": 1, "memory_bytes": 1 << 30, "precisions": ["FP16", "FP32"]}],
    }


def _job(path: Path) -> None:
    from qsync_opt.runtimes.torch.job import load_job

    load_job(path)


def _front_seed(problem: Any, point: dict[str, Any]) -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cache = FrontCache(Path(folder), problem, 0.0, FrontPoint)
        key = front_key(7, {device.name: device.memory_limit_kib for device in problem.devices})
        cache._cache.put(key, {"point": point})
        data: dict[str, Any] = json.loads(cache._cache._path(key).read_text())
        return data


def run_loader(loader: Loader, path: Path) -> str:
    """Load one file; ``"taken"`` or ``"refused"``. Anything but the package's own errors is raised."""
    from qsync_opt.errors import QSyncError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loader.load(path)
        except QSyncError as error:
            text = str(error)
            assert text and len(text) < 5000, f"an error of {len(text)} characters"
            text.encode("utf-8")  # a terminal must be able to show it
            return "refused"
    return "taken"
