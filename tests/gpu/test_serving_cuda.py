"""Stages on a card: captured and launched decoding, cards and processors, caches of 8 bits."""

import threading

import pytest
import torch

from qsync_opt.errors import ProblemError
from qsync_opt.kernels.weight_only import explain
from qsync_opt.runtimes.torch.serving import (
    Choice,
    Engine,
    EngineLimits,
    Layout,
    LocalWorkers,
    Pipeline,
    Request,
    StageModel,
    StateSource,
    Step,
    config_from_json,
    generate_here,
    group_names,
    open_model,
    pages_of,
    profile_serving,
    sample_config,
    write_sample,
)
from qsync_opt.serving import Plan, ServeWorkload, ServingDevice, Stage, plan_serving

pytestmark = pytest.mark.gpu
CONFIGS = {
    "llama": {"model_type": "llama"},
    "gemma": {
        "model_type": "gemma3_text", "sliding_window": 20, "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen": {"model_type": "qwen3"},
}  # fmt: skip
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 500, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = [[(7 * k + 11 * j) % 500 for j in range(3 + 9 * k)] for k in range(5)]


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    if explain("cuda"):
        pytest.skip(f"the compiled products do not run here: {explain('cuda')}")


def build(kind, device, dtype, scheme, **options):
    config = config_from_json(SIZES | CONFIGS[kind])
    generator = torch.Generator().manual_seed(1)
    state = {}

    def add(name, *shape):
        scale = 0.1 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        offset = 1.0 if len(shape) == 1 and not config.gemma else 0.0
        state[f"{name}.weight"] = torch.randn(shape, generator=generator) * scale + offset

    add("model.embed_tokens", 500, 256), add("lm_head", 500, 256), add("model.norm", 256)
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            add(f"{at}self_attn.{name}", rows, 256)
        add(f"{at}self_attn.o_proj", 256, 256), add(f"{at}mlp.gate_proj", 512, 256), add(f"{at}mlp.up_proj", 512, 256)
        add(f"{at}mlp.down_proj", 256, 512)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            add(f"{at}{name}_layernorm", 256)
        for name in ("q_norm", "k_norm"):
            add(f"{at}self_attn.{name}", 64)
    names = group_names(2)
    stage = Stage(device="card", groups=names)
    return StageModel(
        config, StateSource(state), stage, dict.fromkeys(names, scheme), dtype=dtype, device=device, **options
    )


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_tokens_in_fp32_are_those_of_a_processor(kind):
    expected = generate_here([build(kind, "cpu", torch.float32, "W32")], PROMPTS, 40)
    for capture in (False, True):
        stage = build(kind, "cuda", torch.float32, "W32", capture=capture)
        assert generate_here([stage], PROMPTS, 40) == expected
        assert (stage._graphs is not None) == capture


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("scheme", ["W4", "W4A8", "W8", "W16"])
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_captured_decoding_has_the_scores_of_launched_decoding(kind, scheme, kv_bits):
    stage = build(kind, "cuda", torch.bfloat16, scheme, kv_bits=kv_bits)
    tokens = generate_here([stage], PROMPTS, 30)
    assert all(len(row) == 30 for row in tokens)
    assert len(stage._graphs) > 0
    lengths = [len(prompt) + 25 for prompt in PROMPTS]
    pages, first = [], 1
    for prompt in PROMPTS:  # those that the prompts had above
        pages.append(tuple(range(first, first + pages_of(len(prompt) + 30))))
        first += len(pages[-1])
    step = Step(
        number=0,
        tokens=tuple((row[20],) for row in tokens),
        starts=tuple(lengths),
        pages=tuple(pages),
        choices=(Choice(),) * len(PROMPTS),
    )
    with torch.inference_mode():
        captured = stage._graphs.run(step, None, stage.device).clone()
        layout = Layout.of(step, stage.device)
        launched = stage.scores(stage.hidden(layout.tokens_N, layout))
    torch.testing.assert_close(captured, launched, rtol=0.05, atol=0.05 * float(launched.abs().max()))


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_captured_judging_has_the_scores_of_decoding_and_leaves_its_cache(kind, kv_bits):
    """Tokens that were decoded one by one are judged at once, as many as each sequence drafted."""
    stages = [build(kind, "cuda", torch.bfloat16, "W4", kv_bits=kv_bits, capture=True) for _ in range(2)]
    texts = [[*prompt, *row] for prompt, row in zip(PROMPTS, generate_here(stages[:1], PROMPTS, 12), strict=True)]
    counts, pages, first = (3, 1, 3, 2, 3), [], 1
    for prompt in PROMPTS:
        pages.append(tuple(range(first, first + pages_of(len(prompt) + 12))))
        first += len(pages[-1])
    for stage in stages:
        stage.reserve(first)
        generate_here([stage], PROMPTS, 12)

    def step(tokens, starts, rows, every):
        return Step(
            number=0,
            tokens=tuple(map(tuple, tokens)),
            starts=tuple(starts),
            pages=tuple(pages[row] for row in rows),
            choices=(Choice(),) * sum(map(len, tokens)),
            every=every,
        )

    starts = [len(prompt) + 4 for prompt in PROMPTS]
    drafts = [text[start : start + count] for text, start, count in zip(texts, starts, counts, strict=True)]
    judged = stages[0].run(step(drafts, starts, range(5), True)).tolist()
    assert any(key[1] == 3 for key in stages[0]._graphs._graphs)
    alone = []
    for row, (draft, start) in enumerate(zip(drafts, starts, strict=True)):
        for k, token in enumerate(draft):
            alone += stages[1].run(step([[token]], [start + k], [row], False)).tolist()
    assert sum(a == b for a, b in zip(judged, alone, strict=True)) >= len(alone) - 1  # the head's product
    for ours, theirs in zip(stages[0].groups[0::2], stages[1].groups[0::2], strict=True):
        assert torch.equal(ours.cache.codes[:, :, 16:], theirs.cache.codes[:, :, 16:])  # all but page 0


def test_requests_that_come_and_go_get_the_tokens_of_a_processor():
    stage = build("llama", "cpu", torch.float32, "W32")
    expected = [generate_here([stage], [prompt], 20 + 3 * k)[0] for k, prompt in enumerate(PROMPTS)]
    heard = [[] for _ in PROMPTS]
    ended = threading.Semaphore(0)
    workers = LocalWorkers([build("llama", "cuda", torch.float32, "W32")])
    with Engine(workers, EngineLimits(context=128, cached=512, running=3)) as engine:
        for tokens, prompt, new in zip(heard, PROMPTS, map(len, expected), strict=True):

            def listen(update, tokens=tokens):
                if update.token is None:
                    ended.release()
                else:
                    tokens.append(update.token)

            engine.submit(Request(prompt=prompt, new_tokens=new, listener=listen))
        assert all(ended.acquire(timeout=240) for _ in PROMPTS)
    assert heard == expected


SAMPLE = sample_config(layers=4, hidden=256, inner=512, heads=4, kv_heads=2, vocabulary=500)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("scheme", ["W32", "W8"])
def test_stages_on_two_cards_have_the_tokens_of_one(tmp_path, scheme):
    folder, names = write_sample(tmp_path / "model", SAMPLE), group_names(4)
    whole = StageModel(
        *open_model(folder), Stage(device="a", groups=names), dict.fromkeys(names, scheme), device="cuda"
    )
    expected = generate_here([whole], PROMPTS, 20)
    stages = (Stage(device="a", groups=names[:3]), Stage(device="b", groups=names[3:]))
    plan = Plan(microbatch=0, stages=stages, schemes=dict.fromkeys(names, scheme))
    with Pipeline(str(folder), plan, devices=["cuda:0", "cuda:1"]) as pipeline:
        for parts in (1, 2):  # one prompt at a time is computed in other shapes
            generation = pipeline.generate(PROMPTS, 20, prefill=1, decode=parts)
            assert [list(tokens) for tokens in generation.tokens] == expected


def test_a_card_is_profiled_and_planned_with():
    workload = ServeWorkload(prompts=4, prompt_tokens=32, new_tokens=8)
    profile = profile_serving(config_from_json(SAMPLE), workload, device="cuda:0", repeats=2)
    assert profile.schemes == ("W4", "W8", "W16") and profile.threads is None and profile.cache_bytes_per_number == 2
    assert profile.base_kib > 50_000  # a context
    for kind in ("attn", "mlp"):
        assert set(profile.costs[kind]) == set(profile.schemes)
    room = ServingDevice(name="card", memory_kib=profile.base_kib + (1 << 20), profile=profile)
    result = plan_serving(profile.model, [room], workload)
    assert result.predict().decode_s > 0
    with pytest.raises(ProblemError, match="threads and beside"):
        profile_serving(config_from_json(SAMPLE), workload, device="cuda:0", threads=2)
