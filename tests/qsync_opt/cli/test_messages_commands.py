"""From a graph in a file to training over two workers, by commands alone."""

import json

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("pymetis")

from qsync_opt.runtimes.torch.messages import block_graph, save_graph

SMALL = ("--layers", "2", "--hidden", "8")


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "graph.safetensors"
    save_graph(block_graph(300, noise=0.5), path)
    return str(path)


def test_partition_plan_and_run(graph, tmp_path, run):
    parts, plan, problem = (str(tmp_path / name) for name in ("parts", "plan.json", "problem.json"))
    status, out, err = run("messages", "partition", graph, "--parts", "2", "--output", parts, "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)["parts"]
    assert sum(row["nodes"] for row in rows) == 300 and rows[0]["sends"] == rows[1]["receives"] > 0
    chosen = ("--epochs", "12", "--menu", "2,4,8,32", "--output", plan, "--problem", problem, "--json")
    status, out, err = run("messages", "plan", parts, *SMALL, *chosen)
    assert (status, err) == (0, "")
    planned = json.loads(out)
    assert planned["gap"] >= 0 and planned["evaluation"]["feasible"]
    status, out, _ = run("messages", "evaluate", problem, plan, "--json")
    assert status == 0 and json.loads(out)["objective"] == pytest.approx(planned["objective"])
    status, out, err = run("messages", "run", parts, "--plan", plan, *SMALL, "--epochs", "30", "--json")
    assert (status, err) == (0, "")
    trained = json.loads(out)
    assert trained["test_accuracy"] > 0.8 and len(trained["losses"]) == 30
    assert set(trained["widths"]) <= {"2", "4", "8", "32"} and sum(trained["widths"].values()) == pytest.approx(1)
    # Packing on a worker that will be another device is estimated, and its plan has a limit with it.
    few = ("--epochs", "3", "--menu", "4,32", "--packing", "1=Intel Xeon, 1 thread")
    status, out, err = run("messages", "plan", parts, *SMALL, *few, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["estimates"]["costs"].keys() == {"packing on worker 1"}
    # A plan of two layers does not fit a model of three; who started the workers says why they stopped.
    status, out, err = run("messages", "run", parts, "--plan", plan, "--hidden", "8", "--epochs", "3")
    assert (status, out) == (2, "") and err.count("\n") == 1 and "may be of another model" in err


def test_bad_arguments_are_one_line(graph, tmp_path, run):
    for arguments, words in (
        (("run", str(tmp_path / "none")), "holds no parts of a graph"),
        (("plan", str(tmp_path), "--menu", "2,3"), "--menu has the width 3"),
        (("plan", str(tmp_path), "--menu", "2,8"), "--budget-bits is 4"),
        (("run", str(tmp_path), "--bits", "5"), "--bits is 5"),
        (("plan", str(tmp_path), "--packing", "T4"), "packing is 'T4', but it must read WORKER=HARDWARE"),
        (("plan", str(tmp_path), "--packing", "1=T5"), "neither a data sheet nor a learned device 'T5'"),
        (("partition", str(tmp_path / "no"), "--parts", "2", "--output", str(tmp_path / "p")), "not a readable graph"),
        (("run", str(tmp_path), "--model", "gnc"), "did you mean 'gcn'?"),
    ):
        status, out, err = run("messages", *arguments)
        assert (status, out) == (2, "") and words in err and err.count("\n") == 1, err


@pytest.mark.slow
def test_the_demo_shows_plan_bytes_and_accuracy(tmp_path, run):
    folder = str(tmp_path / "demo")
    status, out, err = run("messages", "demo", "--output", folder, "--nodes", "400", "--epochs", "10", "--json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    runs = result["runs"]
    assert list(runs) == ["FP32", "16 bits", "planned"]
    # 16 bits are half of the bytes but for one word of each part of the wire.
    assert runs["16 bits"]["message_bytes"] == pytest.approx(runs["FP32"]["message_bytes"] / 2, rel=0.01)
    assert (tmp_path / "demo" / "plan.json").exists()
