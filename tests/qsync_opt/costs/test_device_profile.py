import json
from pathlib import Path
from typing import Any

import pytest

from qsync_opt.costs import DeviceProfile, IterationCheck, IterationOverhead, load_profile
from qsync_opt.errors import ProblemError
from qsync_opt.model import OpGraph
from qsync_opt.testing import make_graph, make_operator, make_profile, residual_graph

CHECK = IterationCheck(
    precision="FP32",
    forward_ns=100,
    backward_ns=200,
    summed_forward_ns=80,
    summed_backward_ns=170,
    predicted_forward_ns=95,
    predicted_backward_ns=190,
)


@pytest.fixture
def graph() -> OpGraph:
    return residual_graph()


def _data(graph: OpGraph) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(make_profile(graph).to_json()))
    return data


def test_a_profile_survives_its_file(graph: OpGraph, tmp_path: Path) -> None:
    overhead = IterationOverhead(forward_ns_per_operator=3, backward_ns_per_operator=4, iterations=(CHECK,))
    profile = make_profile(graph, overhead=overhead)
    profile.save(tmp_path / "profile.json")
    again = load_profile(tmp_path / "profile.json")
    assert again == profile
    assert again.to_json() == profile.to_json()


def test_equal_signatures_share_one_measurement(graph: OpGraph) -> None:
    profile = make_profile(graph)
    assert profile.operators["embed"] != profile.operators["head"]
    assert profile.operators["down"] == profile.operators["head"]
    assert len(profile.measurements) < len(profile.operators)


def test_residual_and_description(graph: OpGraph) -> None:
    overhead = IterationOverhead(iterations=(CHECK,))
    assert overhead.residual == pytest.approx(15 / 300)
    assert "8 operators (7 measured) in INT8, BF16, FP32; whole iterations predicted within 5.0 %" in (
        make_profile(graph, overhead=overhead).describe()
    )
    assert make_profile(graph).describe().endswith("FP32")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["measurements", "add:(64, 64):float32:2 dependent", "FP32", "forward_ns"], -5, "forward_ns is -5"),
        (["measurements", "add:(64, 64):float32:2 dependent", "FP12"], {}, "is missing"),
        (["casts", "FP32>BF16", "base_ns"], 1.5, "base_ns is 1.5"),
        (
            ["casts", "FP32"],
            {"base_ns": 1, "ns_per_mi_elements": 1, "worst_error": 0, "samples": 0},
            "no pair|not a pair",
        ),
        (["formats", "INT8", "output"], "INT4", "unknown precision 'INT4'"),
        (["operators", "embed"], "nowhere", "refers to measurement 'nowhere'"),
        (["device", "kind"], "tpu", "kind is 'tpu', but allowed are cpu, cuda"),
        (["optimizer", "step_ns"], "fast", "step_ns is 'fast'"),
        (["surprise"], 1, "unknown key 'surprise'"),
        (["format"], "qsync-profile/9", "allowed is 'qsync-profile/1'"),
    ],
)
def test_unusable_files_are_refused(graph: OpGraph, tmp_path: Path, path: list[str], value: Any, text: str) -> None:
    data = _data(graph)
    node = data
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ProblemError, match=text):
        load_profile(file)


def test_nan_and_truncation_are_refused(graph: OpGraph, tmp_path: Path) -> None:
    text = json.dumps(_data(graph))
    (tmp_path / "nan.json").write_text(text.replace('"base_ns": 100', '"base_ns": NaN', 1))
    with pytest.raises(ProblemError, match="NaN"):
        load_profile(tmp_path / "nan.json")
    (tmp_path / "half.json").write_text(text[: len(text) // 2])
    with pytest.raises(ProblemError, match="may be truncated"):
        load_profile(tmp_path / "half.json")


def test_an_operator_that_was_not_profiled_is_named(graph: OpGraph) -> None:
    with pytest.raises(ProblemError, match=r"no entry for operator 'tail'"):
        make_profile(graph).cost("tail")


def test_a_profile_of_another_model_names_the_first_differing_operators(graph: OpGraph) -> None:
    other = make_graph([make_operator("embed"), make_operator("mixer", inputs=["embed"])])
    with pytest.raises(ProblemError, match=r"has 'mixer' where the graph has 'norm'.*nothing where the graph has 'up'"):
        make_profile(other).check_graph(graph)


def test_a_profile_for_other_shapes_says_so(graph: OpGraph) -> None:
    wider = make_graph([make_operator("embed", shape=(8, 8))])
    narrow = make_graph([make_operator("embed", shape=(8, 4))])
    with pytest.raises(ProblemError, match="equal names but other shapes"):
        make_profile(wider).check_graph(narrow)
    profile: DeviceProfile = make_profile(graph)
    profile.check_graph(residual_graph())
