"""Small pieces of the quality benchmark: its statistics, plans at equal time, what it makes of runs."""

import dataclasses
import math
import random
from statistics import fmean

import pytest
import torch

pytestmark = pytest.mark.usefixtures("quality_modules")


@pytest.fixture
def estimates():
    import estimates

    return estimates


@pytest.fixture
def plans():
    import plans

    return plans


@pytest.fixture
def training():
    pytest.importorskip("matplotlib")
    import training

    return training


def test_rank_correlation_shares_ranks_of_equal_values():
    from rank_correlation import ranks, spearman

    assert ranks([10.0, 20.0, 10.0, 30.0]) == [1.5, 3.0, 1.5, 4.0]
    assert spearman([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0]) == pytest.approx(1)
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert spearman([0.0, 0.0, 0.0], [3.0, 2.0, 1.0]) is None
    assert spearman([0.0, 1.0], [3.0, 2.0]) is None


def test_reliability_tells_signal_from_noise(estimates):
    source = random.Random(0)
    truth = [float(i) for i in range(40)]
    clear = [[t + source.gauss(0, 0.1) for _ in range(20)] for t in truth]
    noisy = [[t + source.gauss(0, 1e4) for _ in range(20)] for t in truth]
    assert estimates.reliability(clear) > 0.99
    assert abs(estimates.reliability(noisy)) < 0.6
    assert estimates.ceiling(0.25) == pytest.approx(0.5)
    assert estimates.ceiling(-0.2) == 0


def test_reliability_is_that_of_fresh_repeats(estimates):
    """Against what it stands for: the rank correlation of the means of two independent sets of repeats."""
    from rank_correlation import spearman

    source = random.Random(3)
    said, done = [], []
    for _ in range(30):
        truth = [source.gauss(0, 1) for _ in range(25)]
        one, two = ([[t + source.gauss(0, 3) for _ in range(10)] for t in truth] for _ in range(2))
        said.append(estimates.reliability(one, splits=20))
        done.append(spearman(*([math.fsum(row) for row in rows] for rows in (one, two))))
    assert math.fsum(said) / 30 == pytest.approx(math.fsum(done) / 30, abs=0.06)
    assert estimates.reliability([[1.0], [2.0], [3.0]]) is None


def test_resampled_ranks_scatter_as_fresh_repeats_do(estimates):
    source = random.Random(4)
    truth = [float(i) for i in range(20)]
    repeats = [[t + source.gauss(0, 20) for _ in range(30)] for t in truth]
    found = estimates.resampled(repeats, {"right": truth, "reversed": [-t for t in truth]}, draws=100)
    assert found["right"] == pytest.approx([-rank for rank in found["reversed"]])
    assert 0.02 < torch.tensor(found["right"]).std() < 0.2
    still = estimates.resampled([[t] * 3 for t in truth], {"right": truth}, draws=5)
    assert still["right"] == pytest.approx([1.0] * 5)


def test_paired_difference_drops_what_both_share(estimates):
    mean, error = estimates.paired([101.0, 205.0, 303.0], [100.0, 203.0, 300.0])
    assert mean == pytest.approx(2)
    assert error == pytest.approx(1 / math.sqrt(3))


def test_recovered_share_of_the_gap(estimates):
    assert estimates.recovered(3.0, 1.0, 1.5) == pytest.approx(0.75)
    assert estimates.recovered(1.0, 1.0, 1.0) is None


WORK = {"a": 1 << 20, "b": 1 << 20, "c": 1 << 21, "d": 1 << 22}
TABLE = {"a": (9.0, 0.1), "b": (1.0, 0.1), "c": (5.0, 0.1), "d": (4.0, 0.1)}


@pytest.mark.parametrize("backward", ["half", "eight"])
def test_plan_is_the_best_of_all_that_are_as_fast(plans, backward):
    table = {name: dict(zip((plans.LOW, plans.HIGH), values, strict=True)) for name, values in TABLE.items()}
    chosen = plans.plan_half_way(WORK, table, backward)

    def time(plan):
        costs = [plans.operator_cost(WORK[name], precision, backward, 0.0) for name, precision in plan.items()]
        return sum(cost.forward_ns + cost.backward_ns for cost in costs)

    def harm(plan):
        return sum(table[name][precision] for name, precision in plan.items())

    every = [
        {name: (plans.LOW if bits >> i & 1 else plans.HIGH) for i, name in enumerate(WORK)} for bits in range(1 << 4)
    ]
    limit = (time(every[0]) + time(every[-1])) // 2
    assert time(chosen) <= limit
    assert harm(chosen) == pytest.approx(min(harm(plan) for plan in every if time(plan) <= limit))
    assert plans.low_share(chosen, WORK) >= 0.5


def test_magnified_statistics_scale_8_bit_rounding_alone(plans):
    from qsync_opt.numerics import formats_for
    from qsync_opt.runtimes.torch.sensitivity import collect_statistics
    from qsync_opt.sensitivity import variances

    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    found = collect_statistics(model, [(torch.randn(16, 8),)], step=lambda m, b: m(*b).square().sum())
    larger = plans.magnified(found, 3.0)
    full = formats_for(("FP32",), "BF16")["FP32"]
    name = found.operators[0].name
    before, after = (variances(s[name], "INT8", full).second_gradient for s in (found, larger))
    assert before is not None and after is not None
    assert after.total == pytest.approx(9 * before.total)
    before, after = (variances(s[name], "BF16", full).output for s in (found, larger))
    assert after == before


def _run(policy, setting, seed, score):
    return {"policy": policy, "setting": setting, "seed": seed, "score": score, "last_training_loss": score / 2}


def test_a_setting_harms_if_the_paired_difference_stands_out(training):
    settings = training.SETTINGS["gpt"]
    harmless, harmful = settings[0].name, settings[1].name
    runs = [_run("full precision", harmless, seed, 2.0 + 0.1 * seed) for seed in range(3)]
    runs += [_run("uniform INT8", harmless, seed, 2.0 + 0.1 * seed + (-1) ** seed * 0.01) for seed in range(3)]
    runs += [_run("uniform INT8", harmful, seed, 2.1 + 0.1 * seed + (-1) ** seed * 0.01) for seed in range(3)]
    assert not training.clearly_worse(runs, harmless, 1.0)
    assert training.clearly_worse(runs, harmful, 1.0)
    # Where a higher score is better the same numbers are an improvement.
    assert not training.clearly_worse(runs, harmful, -1.0)


def _job(policy, seed=0, plan=None, factor=1.0):
    from runs import Job, Setting

    return Job(
        subject="gpt",
        policy=policy,
        setting=Setting(name=f"x {factor}", factor=factor),
        seed=seed,
        steps=6,
        plan=plan or {},
        graph="",
        scale="tiny",
        device="cpu",
    )


def test_policies_that_agree_on_a_plan_share_a_run(training):
    import runs

    jobs = [_job("probed", plan={"a": "INT8"}), _job("random", plan={"a": "BF16"}), _job("fisher", plan={"a": "INT8"})]
    jobs += [_job("fisher", seed=1, plan={"a": "INT8"}), _job("fisher", plan={"a": "INT8"}, factor=4.0)]
    assert runs.alike(jobs) == {0: 0, 1: 1, 2: 0, 3: 3, 4: 4}


def test_runs_side_by_side_are_the_runs_alone(training, tmp_path):
    """Side by side, with equal plans shared, and alone: the same losses."""
    import runs

    from qsync_opt.model import save_graph
    from qsync_opt.runtimes.torch.capture import capture

    subject = runs.cached_subject("gpt", torch.device("cpu"), "tiny")
    model = subject.model(0, torch.device("cpu"))
    graph = capture(model, subject.batch(0), name="gpt")
    save_graph(graph, tmp_path / "graph.json")
    low = {"blocks.0.up/linear": "INT8"}
    plans = {"full precision": {}, "probed": low, "fisher": low}

    def jobs(seeds, policies):
        chosen = [(seed, policy) for seed in seeds for policy in policies]
        return [_job(p, seed=s, plan=plans[p]) for s, p in chosen]

    def scores(seeds, policies):
        wanted = [dataclasses.replace(job, graph=str(tmp_path / "graph.json")) for job in jobs(seeds, policies)]
        *_, last = runs.Training(wanted).run(until=math.inf)
        assert all(run["steps"] == 6 for run in last)
        return {(run["policy"], run["seed"]): run["score"] for run in last}

    together = scores((0, 1), tuple(plans))
    assert together["probed", 0] == together["fisher", 0] != together["full precision", 0]
    assert together["full precision", 0] != together["full precision", 1]
    assert scores((1,), ("probed",))["probed", 1] == together["probed", 1]


def test_summary_compares_policies_on_the_seeds_they_share(training):
    name = training.SETTINGS["gpt"][0].name
    runs = [_run("full precision", name, seed, 2.0 + seed) for seed in range(2)]
    runs += [_run("uniform INT8", name, seed, 2.4 + seed) for seed in range(2)]
    runs += [_run("probed", name, 1, 3.1)]
    found = training.summary(runs, name, 1.0)
    assert found["uniform INT8"]["worse_than_full"] == pytest.approx(0.4)
    assert found["probed"]["seeds"] == 1
    assert found["probed"]["worse_than_full"] == pytest.approx(0.1)
    assert found["probed"]["recovered"] == pytest.approx(0.75)
    assert found["probed"]["worse_than_full_error"] is None
    assert found["probed"]["recovered_in_training_loss"] == pytest.approx(0.75)


def test_magnified_plan_errs_in_proportion(training):
    """The output of an 8-bit operator under a factor is the exact one plus the factor times the kernel's error."""
    from noisy import planned

    from qsync_opt.runtimes.torch.capture import capture
    from qsync_opt.runtimes.torch.execution import ApplyOptions

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x = torch.randn(5, 16)
    graph = capture(model, (x,))

    def run(factor):
        with planned(model, {"2/linear": "INT8"}, graph, ApplyOptions(), factor=factor):
            return model(x).detach().float()

    exact, once, twice, reversed_ = model(x).detach(), run(1.0), run(2.0), run(-1.0)
    assert not torch.equal(once, exact)
    torch.testing.assert_close(twice - exact, 2 * (once - exact))
    torch.testing.assert_close(reversed_ - exact, exact - once)


def test_shards_are_merged_by_model_and_length_each_run_once(training):
    name = training.SETTINGS["gpt"][0].name
    plans = {"loss": {"low": ["a"]}, "fisher": {"low": ["b"]}}
    head = {"hardware": "card", "what": "a model", "steps": 5, "unfinished": []}
    one = {**head, "runs": [_run("full precision", name, seed, 2.0) for seed in (0, 1)], "plans": plans}
    two = {**head, "runs": [_run("full precision", name, seed, 3.0) for seed in (1, 2)], "plans": plans}
    other = {**two, "plans": {**plans, "fisher": {"low": ["c"]}}}
    (found,) = training.merged([one, two, other])
    assert [run["seed"] for run in found["runs"]] == [0, 1, 2]
    assert found["plans_differ"] == ["fisher"]
    elsewhere = {**two, "chosen": "finer", "plans": {"loss": {"low": ["d"]}}}
    (found,) = training.merged([{**one, "chosen": "coarse"}, elsewhere])
    assert (found["plans"], found["other_plans"]) == (plans, {"finer": {"loss": {"low": ["d"]}}})
    assert len(training.merged([one, {**two, "steps": 6}])) == 2


def test_plans_are_compared_where_it_is_asked_for(training):
    def job(policy, setting, seed, steps, captured):
        return policy, setting.factor, setting.backward, seed

    comparison = training.Comparison.__new__(training.Comparison)
    comparison.name, comparison.job = "gpt", job
    settings = training.SETTINGS["gpt"]
    assert comparison.compared_at(4.0) == settings[2]
    assert comparison.compared_at(3.0) == settings[-1]
    chosen = comparison.compared_at(4.0)
    some = list(training.jobs(comparison, [5], 1, False, chosen, ["full precision", "progress"]))
    assert some == [("full precision", 1.0, "eight", 5), ("progress", 4.0, "eight", 5)]
    every = list(training.jobs(comparison, [5], 1, False))
    assert ("progress", 8.0, "eight", 5) in every
    assert [job for job in every if job[0] == "uniform INT8"] == [
        ("uniform INT8", setting.factor, setting.backward, 5) for setting in settings
    ]


def test_the_mean_square_of_the_schedule_is_that_of_its_steps(training):
    from runs import mean_square_rate, rate_at

    assert mean_square_rate(1) == rate_at(0, 1) ** 2
    assert 0.3 < mean_square_rate(300) < 0.5


def test_merging_replaces_what_was_measured_anew_and_keeps_the_rest(tmp_path, training):
    import quality

    from qsync_opt.io import read_json, write_json

    def part(folder, model, seconds):
        record = {"model": model, "seconds": seconds}
        head = {"format": quality.PART, "part": f"cost:{model}", "date": "today", "hardware": "card", "versions": {}}
        folder.mkdir(exist_ok=True)
        write_json(folder / f"cost-{model}.json", {**head, "command": f"cost of {model}", "records": [record]})

    output = tmp_path / "all.json"
    for model in ("a", "b"):
        part(tmp_path / "first", model, 1)
    quality.merge(tmp_path / "first", output)
    part(tmp_path / "second", "b", 2)
    quality.merge(tmp_path / "second", output)
    section = read_json(output, (quality.FORMAT,))["sections"]["cost"]
    assert {record["model"]: record["seconds"] for record in section["records"]} == {"a": 1, "b": 2}
    assert section["command"] == "cost of b; cost of a"


def test_frozen_rectifiers_pass_what_they_passed_before():
    from frozen import Masks

    masks, z, other = Masks(), torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-1.0, 3.0, 4.0])
    masks.record(lambda: torch.relu(z))
    assert masks
    x = other.requires_grad_()
    result = masks.run(lambda: torch.relu(x))
    assert result.tolist() == [0.0, 3.0, 4.0]
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == [1.0, 0.0, 1.0]
    masks.record(lambda: torch.tanh(z))
    assert not masks


def test_frozen_pools_read_where_the_largest_was():
    from frozen import Masks

    masks, z = Masks(), torch.tensor([[1.0, 2.0], [-3.0, -2.0]]).view(1, 1, 2, 2)
    pool = torch.nn.MaxPool2d((1, 2))
    masks.record(lambda: pool(torch.relu(z)))
    x = torch.tensor([[5.0, 4.0], [7.0, 6.0]]).view(1, 1, 2, 2).requires_grad_()
    result = masks.run(lambda: pool(torch.relu(x)))
    assert result.flatten().tolist() == [4.0, 6.0]  # of the second window, too, in which nothing was positive
    assert torch.autograd.grad(result.sum(), x)[0].flatten().tolist() == [0.0, 1.0, 0.0, 0.0]


def test_shift_and_frozen_part_of_what_a_plan_adds():
    from noisy import added_parts, added_variance, exact_gradient

    from qsync_opt.runtimes.torch.capture import capture
    from qsync_opt.runtimes.torch.execution import ApplyOptions

    class Net(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.a, self.b, self.function = torch.nn.Linear(16, 64), torch.nn.Linear(64, 1), function

        def forward(self, x):
            return self.b(self.function(self.a(x))).mean()

    torch.manual_seed(0)
    model, batch = Net(torch.relu), (torch.rand(256, 16),)
    for parameter in model.parameters():
        parameter.detach().abs_()  # everything is positive: nothing flips, all is linear
    graph, exact = capture(model, batch), exact_gradient(model, batch)
    plan = {"a/linear": "INT8", "b/linear": "FP32"}
    found = added_parts(model, batch, exact, plan, graph, ApplyOptions(), 24)
    whole = fmean(added_variance(model, batch, exact, plan, graph, ApplyOptions(), 24))
    assert found["frozen"] == pytest.approx(whole, rel=0.2)
    assert abs(found["shift"]) < 0.3 * whole
    smooth = Net(torch.tanh)
    exact = exact_gradient(smooth, batch)
    assert added_parts(smooth, batch, exact, {}, capture(smooth, batch), ApplyOptions(), 2) == {}
