"""The predictor's benchmark: recorded steps as files, and what its summary says."""

import json
import sys
from pathlib import Path

import pytest
import torch

from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.steps import RecordingOptions, record_steps
from qsync_opt.runtimes.torch.support import TrainingExample

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def modules():
    """The benchmark's modules import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def test_costs_are_fitted_again_from_a_file():
    from predictor_records import records_from_json, records_json

    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), torch.zeros(4, 8)
    graph = capture(model, (x,))
    records = record_steps(
        TrainingExample(model=model, args=(x,)),
        graph,
        torch.optim.SGD(model.parameters(), lr=0.1),
        precisions=["BF16"],
        mixed=0,
        options=RecordingOptions(warm_up=1, repeats=1, traced=1),
        progress=False,
    )
    again = records_from_json(json.loads(json.dumps(records_json(records))))
    assert again.fit(graph).to_json() == records.fit(graph).to_json()


def case(name, predicted, measured, spread):
    return {
        "key": name,
        "model": "any",
        "cluster": "whole",
        "plan": name,
        "plan_recorded_alone": name.startswith("uniform"),
        "predicted_ms": predicted,
        "measured_ms": measured,
        "time_error": predicted / measured - 1,
        "spread": spread,
        "bound_by": "host" if spread else "device",
        "device_ms": measured,
        "host_ms": measured / 2,
        "naive_ms": measured / 2,
        "problem_ms": None,
        "predicted_peak_bytes": 102,
        "measured_peak_bytes": 100,
        "workers": [{"predicted_peak_bytes": 102, "measured_peak_bytes": 100}],
    }


def test_merged_profiles_and_slowdowns_say_which_run_they_are_of():
    from predictor import merged

    both = {"plan": "a", "workers": [{}, {}]}
    alone = {"plan": "b", "workers": [{}]}
    shared = {"baselines": [], "skipped": [], "date": "2026-01-01"}
    parts = [
        {"cases": [both], "profiles": [{"what": "x"}], "slowdowns": {"m whole + 16 SMs": [0.1, 0.2]}} | shared,
        {"cases": [alone], "profiles": [{"what": "y"}]} | shared,
        {"cases": [both], "profiles": [{"what": "z"}], "slowdowns": {"m whole + 16 SMs": [0.3, 0.4]}} | shared,
    ]
    part = merged([merged(parts[:2]), parts[2]])
    assert [profile["workers"] for profile in part["profiles"]] == [2, 1, 2]
    assert part["slowdowns"] == {"m whole + 16 SMs": [0.1, 0.2], "m whole + 16 SMs, run 2": [0.3, 0.4]}
    assert part["workers"] == "1 and 2"


def test_the_summary_counts_what_it_says():
    from predictor import merged, summarize

    cases = [case("uniform BF16", 11.0, 10.0, 0.2), case("a", 19.0, 20.0, 0.0), case("b", 30.0, 30.0, 0.1)]
    parts = [{"cases": cases[:1], "profiles": [], "baselines": [], "skipped": ["x"], "date": "2026-01-01"}]
    parts += [{"cases": cases[1:], "profiles": [], "baselines": [], "skipped": [], "date": "2026-01-02"}]
    parts[1]["cases"].append(case("c", 12.0, 10.0, 0.0) | {"way": "compiled"})
    part = merged(parts)
    assert part["skipped"] == ["x"]
    assert (part["workers"], part["date"]) == ("1", "2026-01-02")
    summary = summarize(part["cases"], part["profiles"])
    assert summary["time"]["mean_absolute"] == pytest.approx((0.1 + 0.05 + 0) / 3)
    assert summary["time"]["worst"] == pytest.approx(0.1)
    assert summary["time_plans_never_run"]["cases"] == 2
    assert summary["time"]["cases"] == 3  # compiled steps are a table of their own
    assert summary["time_compiled"]["worst"] == pytest.approx(0.2)
    assert summary["time_compiled_by_cluster"] == {"any whole": summary["time_compiled"]}
    assert summary["time_bound_by_host"]["cases"] == 2
    assert summary["time_naive"]["mean_absolute"] == pytest.approx(0.5)
    assert summary["time_torch_roofline"] == {"cases": 0}
    assert summary["memory"]["highest"] == pytest.approx(0.02)
    assert summary["spearman"] == pytest.approx(1.0)
    assert summary["repeatability"] == pytest.approx(0.1)
    assert summary["cases_within_their_spread"] == 2


def test_peaks_from_code_are_noted_where_the_same_plan_ran_alone_on_as_much_of_a_card(tmp_path):
    from compiled_memory import note

    record = json.loads((FOLDER / "results" / "predictor-compiled.json").read_text())
    alone = next(case for case in record["cases"] if len(case["workers"]) == 1 and case["cluster"] == "16 SMs")
    for case in record["cases"]:
        case["workers"] = [{k: v for k, v in w.items() if k != "code_peak_bytes"} for w in case["workers"]]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    told = {"model": alone["model"], "precisions": alone["precisions"], "predicted_peak_bytes": 7}
    note([told | {"multiprocessors": None}], path)
    assert json.loads(path.read_text())["summary"]["memory_compiled_by_code"] == {"cases": 0}
    note([told | {"multiprocessors": 16}], path)
    found = json.loads(path.read_text())
    noted = [(c["precisions"], w) for c in found["cases"] for w in c["workers"] if "code_peak_bytes" in w]
    assert noted
    assert all(precisions == alone["precisions"] and w["code_peak_bytes"] == 7 for precisions, w in noted)
    assert found["summary"]["memory_compiled_by_code"]["cases"] == len(noted)
