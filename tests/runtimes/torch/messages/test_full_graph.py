"""Full-graph training over processes beside a single one, and what happens when something is wrong."""

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("pymetis")
import numpy as np
import torch
from torch_geometric.data import Data

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.messages import Exchange, Pair, Problem, uniform_plan
from qsync_opt.runtimes.torch.messages import MessageOptions, load_part, partition_graph
from qsync_opt.runtimes.torch.messages.links import Codec, fit_link
from qsync_opt.runtimes.torch.messages.prediction import codec_by_worker


@pytest.fixture
def run(graph_workers):
    """Function of a scenario and a number of workers: results of those that ended by themselves, by rank."""

    def results(scenario, world):
        ranks, statuses = graph_workers.ended("messages_worker.py", scenario, world_size=world)
        assert all(status in (0, 9) for status in statuses), [rank.errors.read_text() for rank in ranks]
        return {k: rank.result() for k, (rank, status) in enumerate(zip(ranks, statuses, strict=True)) if status == 0}

    return results


def test_fp32_over_three_workers_equals_one_process(run):
    assert all(result["worst"] <= 1e-5 for result in run("equal", 3).values())


def test_plans_are_made_while_training_and_are_the_same_everywhere(run):
    results = run("planned", 2)
    first, second = results[0], results[1]
    assert first["losses"] == second["losses"] and first["losses"][-1] < 0.7 * first["losses"][0]
    assert first["widths"] == second["widths"] and first["same"] and second["same"]
    assert first["exchanges"] == ["forward second", "forward third", "backward second", "backward third"]
    assert first["accuracy"] == second["accuracy"] > 0.6
    assert first["packing"] == second["packing"] and len(first["packing"]) == 2
    for (packed, unpacked), (pack_ns, unpack_ns) in zip(first["packing"], first["costs"], strict=True):
        assert min(packed + unpacked) > 0  # measured, in every width of the menu
        assert pack_ns >= 0 and unpack_ns >= 0


def test_a_pass_in_inference_mode_leaves_training_as_it_is_and_masks_are_checked(run):
    for result in run("inferred", 2).values():
        assert result["finite"] and result["alike"] == pytest.approx(0, abs=1e-4)
        own = result["own"]
        assert f"the mask has the shape ({own + 1},), but own nodes are ({own},)" in result["error"]


def test_measured_sensitivities_weigh_exchanges_and_leave_training_as_it_was(run):
    results = run("weighed", 3)
    assert results[0] == results[1] == results[2]
    result = results[0]
    assert result["kept"] and all(value > 0 for value in result["sensitivities"].values())
    assert result["ratios"] == pytest.approx(result["sensitivities"])
    # Unmeasured, exchanges count alike relative to their own size: gradients are far smaller than rows.
    assert max(result["sizes"]) > 100 * min(result["sizes"]) and result["alike"] == pytest.approx([1.0] * 4)
    assert set(result["rounds"]) == {1} and all(result["ports"])


def test_a_plan_that_weighs_exchanges_has_the_variance_that_it_promises(run):
    for result in run("foretold", 2).values():
        assert 0.5 < result["had"] / result["promised"] < 2, result


def test_late_messages_and_samples_of_the_boundary(run):
    """Weights stay as they are here, so that the third step has the rows of the first layers as they should be."""
    for result in run("other_messages", 2).values():
        assert result["late"][0] > 1e-3 and result["late"][-1] <= 1e-5  # the first step has zeros
        assert max(result["eval"]) <= 1e-5
        assert 0.4 < result["sampled_bytes"] < 0.7
        assert 0 < result["bias"] < 0.15  # 1 / sqrt(200) is 0.07
        assert sum(result["parts"][:3]) == pytest.approx(result["parts"][3]) and min(result["parts"]) >= 0


def test_a_run_tells_what_was_waited_for_of_every_exchange(run):
    results = list(run("trained", 2).values())
    assert results[0] == results[1]
    names = results[0]["names"]
    waits = {name: 11.0 + i for i, name in enumerate(names)}  # of the second worker, which waits longer
    assert len(names) > 1 and results[0]["waits"] == waits
    assert results[0]["wait"] == sum(waits.values())


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("nan", "rows of rank 0 hold NaN"),
        ("unlike", "another partition"),
        ("unlike_model", "another parameters"),
        ("unlike_plan", "another plan"),
    ],
)
def test_every_rank_stops_with_the_same_reason(run, scenario, words):
    errors = {result["error"] for result in run(scenario, 2).values()}
    assert len(errors) == 1 and words in errors.pop()


@pytest.mark.parametrize("scenario", ["foreign_plan", "half_fitting_plan"])
def test_a_plan_of_another_partition_stops_every_rank(run, scenario):
    results = run(scenario, 2)
    assert all("it is the plan of another partition" in result["error"] for result in results.values())


def test_parts_without_an_edge_between_them_train_and_plan(run):
    assert all(result == {"halo": 0, "finite": True, "bytes": 16} for result in run("alone", 2).values())


def test_nobody_waits_for_a_worker_that_was_killed(run):
    results = run("killed", 3)
    assert sorted(results) == [0, 1]
    assert all("another worker may have stopped" in result["error"] for result in results.values())


def test_link_costs_are_those_of_the_times_they_are_fitted_to():
    sizes = (1_000, 65_000, 1_000_000)
    assert fit_link(sizes, [2_000 + 3.0 * size for size in sizes]) == (2_000, pytest.approx(3.0))
    assert fit_link(sizes, [3.0 * size - 900 for size in sizes])[0] == 0  # a link has no negative costs
    fixed, per_byte = fit_link(sizes, [10_000.0, 9_900.0, 9_800.0])
    assert per_byte == 0 and 9_800 <= fixed <= 10_000


def test_packing_costs_what_a_byte_more_takes_and_nothing_where_wide_rows_are_not_slower():
    sizes = {1: 20, 2: 36, 4: 68, 8: 132, 16: 256, 32: 512}  # of 128 numbers, with zero and step below 16 bits
    slower = {width: ((200 + 0.5 * size) / 128, 7 / 128) for width, size in sizes.items()}
    assert Codec((0, 0), slower).per_byte(128) == (pytest.approx(0.5), pytest.approx(0, abs=1e-12))
    faster = {width: ((900 - size) / 128, (300 + 0.25 * size) / 128) for width, size in sizes.items()}
    assert Codec((0, 0), faster).per_byte(128) == (0.0, pytest.approx(0.25))
    alike = {width: (1e-6, 7 / 128) for width in sizes}
    assert Codec((0, 0), alike).per_byte(128) == (0.0, 0.0)


def test_a_width_whose_packing_was_not_measured_is_named():
    pairs = tuple(
        Pair(source=i, target=1 - i, fixed_ns=10, ns_per_byte=1.0, beta=np.ones(5), pack_ns_per_byte=0.1)
        for i in range(2)
    )
    problem = Problem(
        name="p", time_limit_ns=1000, variance_weight=1.0, time_weight=None, bits={"2": 1.0, "32": 0.0},
        exchanges=(Exchange(name="e", dim=4, rounds=(pairs,), hidden_ns=0),),
    )  # fmt: skip
    codecs = [Codec((5.0, 7.0), {2: (1.0, 2.0), 4: (1.0, 2.0)})] * 2
    spent = codec_by_worker(problem, uniform_plan(problem, 2), codecs)
    assert spent == {0: 5 + 20 + 7 + 40, 1: 5 + 20 + 7 + 40}
    with pytest.raises(ProblemError, match="messages of 32 bits, but packing was measured in 2, 4"):
        codec_by_worker(problem, uniform_plan(problem, 32), codecs)


def test_options_out_of_range_are_refused():
    with pytest.raises(UnsupportedError, match=r"share is 0\.0, but it must be above 0"):
        MessageOptions(share=0.0)


def small(edges, count=6):
    return Data(x=torch.arange(2.0 * count).view(count, 2), edge_index=torch.tensor(edges), y=torch.zeros(count).long())


def test_parts_by_hand(tmp_path):
    """0 -> 1 -> 2 | 3 -> 4, 2 -> 3 crosses: 3 is marginal and 2 its halo; 5 is isolated."""
    first, second = partition_graph(small([[0, 1, 2, 3], [1, 2, 3, 4]]), 2, assignment=[0, 0, 0, 1, 1, 1])
    assert first.nodes.tolist() == [0, 1, 2] and first.central == 3 and first.halo.numel() == 0
    assert first.send.tolist() == [2] and first.send_counts.tolist() == [0, 1]
    assert second.nodes.tolist() == [4, 5, 3] and second.central == 2 and second.halo.tolist() == [2]
    assert second.edge_index.tolist() == [[3, 2], [2, 0]]
    assert first.out_alpha[:, 0].tolist() == [0.25, 1.0]  # degrees 1 and 1: 1 / (2 * 2), and 1 / 1
    second.save(tmp_path / "part.safetensors")
    loaded = load_part(tmp_path / "part.safetensors")
    assert loaded.digest == second.digest and torch.equal(loaded.edge_index, second.edge_index)


def test_bad_graphs_and_parts_are_refused(tmp_path):
    with pytest.raises(ProblemError, match="names node 9"):
        partition_graph(small([[0], [9]]), 2)
    with pytest.raises(ProblemError, match="edge_index has the shape"):
        partition_graph(small([0, 1]), 2)
    with pytest.raises(ProblemError, match="one part from 0 to 1"):
        partition_graph(small([[0], [1]]), 2, assignment=[0, 0, 0, 0, 0, 7])
    with pytest.raises(ProblemError, match="parts is 0"):
        partition_graph(small([[0], [1]]), 0)
    (tmp_path / "part").write_bytes(b"nothing")
    with pytest.raises(ProblemError, match="not a readable part"):
        load_part(tmp_path / "part")
