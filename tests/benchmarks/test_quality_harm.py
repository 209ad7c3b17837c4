"""Harm in the quality benchmark: its shards, what is made of them, and how new ones join old ones."""

import pytest

pytestmark = pytest.mark.usefixtures("quality_modules")


def _shard(number, indicators, offset=0.0):
    """Three operators of harm 1, 2 and 3 at the last evaluation, 0 at the first, two repeats."""
    names = ("a", "b", "c")
    return {
        "hardware": "card",
        "model": "gpt",
        "what": "a model",
        "shard": number,
        "factor": 8.0,
        "steps": 20,
        "evaluated": [10, 20],
        "optimizer": "own",
        "rate": "constant",
        "backward": "half",
        "indicators": {"good": dict(zip(names, (1.0, 2.0, 3.0), strict=True))} if indicators else {},
        "after_steps": {name: [[0.0, i + offset], [0.0, i - offset]] for i, name in enumerate(names, 1)},
        "at_once": {name: [float(i)] for i, name in enumerate(names)},
        "gradient": {name: [float(i)] for i, name in enumerate(names)},
    }


def test_harm_is_the_mean_over_evaluations_of_all_shards():
    import harm

    found = harm.merged([_shard(0, True, 0.5), _shard(3, False)])
    after = found["after_steps"]
    assert found["shards"] == [0, 3]
    assert after["repeats"] == 4
    assert after["mean"] == {"a": 0.5, "b": 1.0, "c": 1.5}
    assert after["spearman"]["good"] == pytest.approx(1)
    assert after["by_step"]["20"]["mean"] == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert after["by_step"]["10"]["spearman"]["good"] is None
    assert found["at_once"]["repeats"] == 2


def test_at_a_rate_that_falls_to_zero_the_last_evaluation_counts():
    import harm

    shards = [{**_shard(number, True), "rate": "falling"} for number in (0, 1)]
    assert harm.merged(shards)["after_steps"]["mean"] == {"a": 1.0, "b": 2.0, "c": 3.0}
    shares = [harm.falling(step, 4) for step in range(4)]
    assert shares == [1.0, 0.75, 0.5, 0.25]


def test_a_share_of_the_rate_is_a_share_of_the_step():
    import torch
    from trials import Trial

    from qsync_opt.runtimes.torch.execution import apply

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.a(x).square().mean()

    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(3, 4),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trial = Trial(model, optimizer, lambda copied: apply(copied, {"a/linear": "FP32"}), (batch, batch), None)
    (gradient,) = torch.autograd.grad(model(*batch), [model.a.weight])
    for share in (0.25, 1.0, 0.0):
        trial.restore()
        trial.step(batch, share)
        moved = model.a.weight - next(p for p in trial._state if p.shape == model.a.weight.shape)
        torch.testing.assert_close(moved.detach(), 0.5 * share * gradient)


def test_new_shards_join_what_was_merged_before():
    import harm

    shards = [_shard(0, True, 0.5), _shard(1, False, 0.25), _shard(2, False)]
    at_once, before = harm.merged(shards), harm.as_shard(harm.merged(shards[:2]))
    assert harm.merged([shards[2], before])["after_steps"]["mean"] == at_once["after_steps"]["mean"]
    assert harm.merged([shards[2], before])["shards"] == [0, 1, 2]
    with pytest.raises(SystemExit, match="same shard"):
        harm.merged([shards[1], before])
    assert harm.as_shard({measure: {"mean": {}} for measure in harm.MEASURES}) is None


def test_the_loss_is_evaluated_every_few_steps_and_after_the_last():
    from trials import evaluated

    assert evaluated(60, 20) == [20, 40, 60]
    assert evaluated(25, 10) == [10, 20, 25]
    assert evaluated(5, 10) == [5]


def test_joining_keeps_the_runs_and_repeats_that_are_there(tmp_path):
    pytest.importorskip("matplotlib")
    import quality
    import training

    from qsync_opt.io import read_json, write_json

    head = {"format": quality.PART, "date": "today", "hardware": "card", "versions": {}}

    def part(folder, kind, record):
        folder.mkdir(exist_ok=True)
        told = {**head, "part": kind, "command": f"{kind} {folder.name}", "records": [record]}
        write_json(folder / f"{kind}.json", told)

    def trained(*seeds):
        head = {"setting": training.SETTINGS["gpt"][0].name, "last_training_loss": 1.0}
        settings = [{**head, "policy": "full precision"}]
        settings += [{**head, "policy": "uniform INT8", "setting": s.name} for s in training.SETTINGS["gpt"]]
        runs = [{**setting, "seed": seed, "score": 2.0} for setting in settings for seed in seeds]
        return {"model": "gpt", "what": "a model", "steps": 5, "runs": runs, "unfinished": [], "plans": {}}

    def seeds_of(sections):
        return sorted({run["seed"] for run in sections["train"]["records"][0]["runs"]})

    first, second, output = tmp_path / "first", tmp_path / "second", tmp_path / "all.json"
    part(first, "train", trained(0, 1))
    part(first, "harm", _shard(0, True))
    quality.merge(first, output)
    part(second, "train", trained(1, 2))
    part(second, "harm", _shard(1, False))
    for _ in range(2):
        quality.merge(second, output, join=True)
        sections = read_json(output, (quality.FORMAT,))["sections"]
        assert seeds_of(sections) == [0, 1, 2]
        assert sections["harm"]["records"][0]["shards"] == [0, 1]
        assert sections["harm"]["command"] == "harm second; harm first"
        (second / "harm.json").unlink(missing_ok=True)  # the same repeats twice are refused
    quality.merge(second, output)
    assert seeds_of(read_json(output, (quality.FORMAT,))["sections"]) == [1, 2]
