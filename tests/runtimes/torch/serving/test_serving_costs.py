"""What is measured of a model on this machine: costs by layer kind, memory, harm, and the demo."""

import json

import pytest

torch = pytest.importorskip("torch")

from qsync_opt.errors import ProblemError, QSyncError, UnsupportedError  # noqa: E402
from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    PAGE,
    Attention,
    Choice,
    PassDifferences,
    StageModel,
    StateSource,
    Step,
    config_from_json,
    group_names,
    measure_harm,
    open_model,
    output_divergence,
    profile_serving,
    random_state,
    run_serving_demo,
    sample_config,
    serve_model,
    write_sample,
)
from qsync_opt.serving import ServeWorkload, ServingDevice, Stage, plan_serving  # noqa: E402

SIZES = sample_config(layers=3, hidden=64, inner=128, heads=4, kv_heads=2, vocabulary=97)
PROMPTS = [[(7 * row + 3 * t) % 97 for t in range(8)] for row in range(6)]


def test_a_sample_is_a_model_folder(tmp_path):
    config, source = open_model(write_sample(tmp_path, SIZES, seed=3))
    assert config == config_from_json(SIZES)
    again = random_state(config, seed=3)
    assert all(torch.equal(source.read(name), again[name]) for name in again)
    sizes = serve_model(config, "sample")
    assert (sizes.layers, sizes.hidden, sizes.kv_heads, sizes.head_size) == (3, 64, 2, 16)
    names = group_names(3)
    stage = StageModel(config, source, Stage(device="d", groups=names), dict.fromkeys(names, "W32"))
    matrices = sum(p.numel() for name, p in again.items() if "proj" in name)
    assert matrices == 3 * (sizes.parameters("attn") + sizes.parameters("mlp"))
    assert stage.bytes >= 4 * matrices


def test_a_profile_is_planned_with(tmp_path):
    workload = ServeWorkload(prompts=2, prompt_tokens=8, new_tokens=4)
    config = config_from_json(SIZES)
    profile = profile_serving(config, workload, schemes=("W4", "W32"), repeats=1, beside=(1,), head="W8")
    assert profile.schemes == ("W4", "W32") and profile.source == "measured"
    assert profile.base_kib > 20_000  # a process that has loaded torch
    for kind in ("attn", "mlp"):
        weights = profile.weights_kib[kind]
        assert (
            profile.model.parameters(kind) * 4 // 1024 <= weights["W32"] <= profile.model.parameters(kind) * 4 // 1000
        )
        assert weights["W4"] < weights["W32"] / 4
    # 97 tokens of 64 numbers in 8 bits with a scale for each, and the scores of two prompts.
    assert profile.last_kib < profile.first_kib == 25
    device = ServingDevice(name="cpu", memory_kib=profile.base_kib + 2000, profile=profile)
    result = plan_serving(profile.model, [device], workload)
    assert result.predict().stages[0].memory_kib <= device.memory_kib
    with pytest.raises(UnsupportedError, match="W3"):
        profile_serving(config, workload, schemes=("W3",), repeats=1)
    with pytest.raises(ProblemError, match="at least 1"):
        profile_serving(config, workload, repeats=0)
    with pytest.raises(ProblemError, match=r"beside is \[0\]"):
        profile_serving(config, workload, beside=(0,))
    with pytest.raises(ProblemError, match="device is 'cuda:99', but this machine has cpu"):
        profile_serving(config, workload, device="cuda:99")


def sample_stage():
    names = group_names(3)
    config = config_from_json(SIZES)
    source = StateSource(random_state(config, scale=0.3))
    stage = StageModel(config, source, Stage(device="here", groups=names), dict.fromkeys(names, "W32"))
    stage.reserve(2)
    return stage


def test_a_part_of_a_stage_has_its_weights_and_pages():
    stage, step = sample_stage(), Step(number=0, tokens=((5, 6, 7),), starts=(0,), pages=((1,),), choices=(Choice(),))
    tokens, hidden = stage.run(step), stage.part(range(6), head=False).run(step)
    assert hidden.shape == (3, 64) and torch.equal(stage.part(range(6)).run(step), tokens)
    without = stage.part([0, 1, 4, 5], head=False)
    assert not torch.allclose(without.run(step), hidden, rtol=0.01)
    assert without.groups[2] is stage.groups[4] and len(stage.groups) == 6 and stage.last


def test_pages_are_kept_for_smaller_batches_and_empty():
    stage, step = sample_stage(), Step(number=0, tokens=((5, 6, 7),), starts=(0,), pages=((1,),), choices=(Choice(),))
    stage.reserve(5)
    cache = stage.groups[0].cache
    stage.run(step)
    stage.reserve(2)
    assert stage.groups[0].cache is cache and stage.cache_bytes > 0
    assert not cache.codes[:, :, : 2 * PAGE].any()
    stage.reserve(6)
    assert stage.groups[0].cache is not cache


def test_parts_of_a_pass_are_differences_between_passes(monkeypatch):
    """With a clock that only passes move: each attention takes 3 s, an MLP 5 s, the head 7 s, and all else 11 s."""
    now = [0.0]

    def run(stage, step):
        now[0] += sum(3 if isinstance(group, Attention) else 5 for group in stage.groups) + 7 * stage.last + 11
        return torch.zeros(1)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(StageModel, "run", run)
    watch = PassDifferences(sample_stage())
    for tokens in ((5,) * 1025, (5, 6, 7), (5,)):  # of long and short prompts, and of decoding
        step = Step(number=0, tokens=(tokens,), starts=(0,), pages=((1,),), choices=(Choice(),))
        assert watch.seconds(step) == {"attn": 3, "mlp": 5, "head": 7, "rest": 11}


def source_of(state):
    config = config_from_json(SIZES)
    return config, StateSource(state)


def test_harm_is_the_divergence_to_second_order():
    model = source_of(random_state(config_from_json(SIZES), seed=1, scale=0.2))
    harm = measure_harm(model, PROMPTS, ("W4", "W8", "W32"), name="sample", draws=200)
    assert harm.tokens == 48 and tuple(harm.groups) == group_names(3)
    # 8 bits change little, where the second order is all; 1200 draws are right within a tenth or so.
    measured = output_divergence(model, PROMPTS, "W8")
    for group, values in harm.groups.items():
        assert values["W32"] == 0
        assert 50 < values["W4"] / values["W8"] < 1500  # (127 / 7) ** 2 = 329
        assert values["W8"] == pytest.approx(measured[group], rel=0.25)


def test_harm_has_the_seed_of_its_draws():
    model = source_of(random_state(config_from_json(SIZES), seed=1))
    first, again, other = (measure_harm(model, PROMPTS[:2], ("W4",), seed=seed).groups for seed in (0, 0, 1))
    assert first == again != other
    with pytest.raises(ProblemError, match="draws is 0"):
        measure_harm(model, PROMPTS, draws=0)


def test_divergence_is_zero_without_rounding_and_grows_with_fewer_bits():
    model = source_of(random_state(config_from_json(SIZES), seed=1, scale=0.2))
    assert max(output_divergence(model, PROMPTS, "W32").values()) == 0
    eight, four = (output_divergence(model, PROMPTS, scheme) for scheme in ("W8", "W4"))
    assert all(0 < eight[group] < four[group] for group in group_names(3))


def test_bad_text_and_weights_are_refused():
    state = random_state(config_from_json(SIZES), seed=1)
    with pytest.raises(ProblemError, match="one length"):
        measure_harm(source_of(state), [[1, 2], [1]])
    with pytest.raises(ProblemError, match="use the tokenizer of this model"):
        measure_harm(source_of(state), [[97, 1]])
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    with pytest.raises(QSyncError, match=r"(?i)nan"):
        measure_harm(source_of(state), PROMPTS, ("W4",))


@pytest.mark.slow
def test_the_demo_plans_serves_and_compares():
    lines = []
    result = run_serving_demo(seed=1, say=lines.append)
    assert result.planned.plan is not None and lines
    header, rows = result.table()
    assert len(header) == 7 and rows[0][0] == "planned"
    for run in result.measured:
        assert run.prefill_tokens_per_s > 0 and run.decode_tokens_per_s > 0
        assert all(kib > 20_000 for kib in run.memory_kib.values())
    assert json.dumps(result.to_json())
