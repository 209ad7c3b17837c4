"""The decoder beside transformers, token by token; stages in one process and in several; packed weights."""

import itertools
import os
import signal

import pytest

torch = pytest.importorskip("torch")

from qsync_opt.errors import ModelError, ProblemError, UnsupportedError  # noqa: E402
from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    Choice,
    Layout,
    MemoryWatch,
    PagedCache,
    PageStore,
    Pipeline,
    StageError,
    StageModel,
    StateSource,
    Step,
    choose,
    config_from_json,
    generate_here,
    group_names,
    linear,
    microbatch_rows,
    open_model,
    pack,
    read_config,
    sample_config,
    unpack,
    write_sample,
)
from qsync_opt.serving import Plan, Stage  # noqa: E402

PROMPTS = [[5, 9, 33, 2, 71, 8, 1], [44, 7, 3], [90, 12, 12, 65, 4]]
NEW = 8


def make_plan(layers, cuts, scheme="W32"):
    names = group_names(layers)
    ends = [0, *cuts, len(names)]
    stages = tuple(Stage(device=f"d{j}", groups=names[a:b]) for j, (a, b) in enumerate(itertools.pairwise(ends)))
    return Plan(microbatch=0, stages=stages, schemes=dict.fromkeys(names, scheme))


def load(folder, plan, **options):
    config, source = open_model(folder)
    return [StageModel(config, source, stage, plan.schemes, **options) for stage in plan.stages]


def reference(model):
    result = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(NEW):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        result.append(tokens[0, len(prompt) :].tolist())
    return result


def test_tokens_are_those_of_transformers_for_any_number_of_stages(model_and_folder):
    model, folder = model_and_folder
    expected = reference(model)
    for cuts in ((), (3,), (2, 5)):
        stages = load(folder, make_plan(4, cuts))
        for parts in (1, 2, 3):
            assert generate_here(stages, PROMPTS, NEW, parts=parts) == expected


def a_step(prompts, start=0, **more):
    """A pass of prompts whose pages follow one another."""
    pages = tuple(tuple(range(1 + 4 * k, 5 + 4 * k)) for k in range(len(prompts)))
    arguments = {"number": 0, "starts": (start,) * len(prompts), "choices": (Choice(),) * len(prompts), "pages": pages}
    return Step(tokens=tuple(map(tuple, prompts)), **(arguments | more))


def test_scores_are_those_of_transformers(model_and_folder):
    model, folder = model_and_folder
    (stage,) = load(folder, make_plan(4, ()))
    stage.reserve(20)
    layout = Layout.of(a_step(PROMPTS), torch.device("cpu"))
    scores = stage.scores(stage.hidden(layout.tokens_N, layout)[layout.last_S])
    with torch.inference_mode():
        for prompt, row in zip(PROMPTS, scores, strict=True):
            torch.testing.assert_close(row, model(torch.tensor([prompt])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_prompts_of_one_length_are_computed_together_as_alone(model_and_folder):
    """Within the sliding window and beyond."""
    _, folder = model_and_folder
    (stage,) = load(folder, make_plan(4, ()))
    stage.reserve(20)
    for length in (2, 7):
        prompts = [[(5 * k + 3 * n) % 90 for n in range(length)] for k in range(3)]
        together = a_step(prompts)
        layout = Layout.of(together, stage.device)
        expected = []
        for k, prompt in enumerate(prompts):
            one = a_step([prompt], pages=(together.pages[k],))
            expected.append(stage.hidden(torch.tensor(prompt), Layout.of(one, stage.device)))
        torch.testing.assert_close(stage.hidden(layout.tokens_N, layout), torch.cat(expected), rtol=1e-3, atol=1e-4)


def test_caches_are_the_same_in_any_micro_batches_and_parts_of_a_prompt(model_and_folder):
    _, folder = model_and_folder
    (stage,) = load(folder, make_plan(4, ()))

    def caches(*steps):
        stage.reserve(20)
        for step in steps:
            stage.run(step)
        layers = [group.cache.codes for group in stage.groups if hasattr(group, "cache")]
        return torch.stack([layer[:, :, 16:] for layer in layers])  # without the page that belongs to nobody

    together = a_step(PROMPTS)
    pages = together.pages
    apart = [a_step([prompt], pages=(own,)) for prompt, own in zip(PROMPTS, pages, strict=True)]
    torch.testing.assert_close(caches(*apart), caches(together), rtol=1e-4, atol=1e-5)
    begun = a_step([prompt[:2] for prompt in PROMPTS])
    continued = a_step([prompt[2:] for prompt in PROMPTS], start=2)
    torch.testing.assert_close(caches(begun, continued), caches(together), rtol=1e-4, atol=1e-5)
    token_by_token = [
        a_step([[prompt[k]]], start=k, pages=(own,)) for prompt, own in zip(PROMPTS, pages, strict=True)
        for k in range(len(prompt))
    ]  # fmt: skip
    torch.testing.assert_close(caches(*token_by_token), caches(together), rtol=1e-4, atol=1e-5)


def test_decoding_over_many_pages_is_that_of_transformers(model_and_folder):
    model, folder = model_and_folder
    long = [[(7 * k + 3) % 97 for k in range(70)], [4] * 33]
    (stage,) = load(folder, make_plan(4, ()))
    expected = []
    for prompt in long:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(20):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        expected.append(tokens[0, len(prompt) :].tolist())
    assert generate_here([stage], long, 20) == expected


def test_a_cache_of_8_bits_is_near_and_small(model_and_folder):
    _, folder = model_and_folder
    scores, sizes = [], []
    for bits in (None, 8):
        (stage,) = load(folder, make_plan(4, ()), kv_bits=bits)
        stage.reserve(20)
        stage.run(a_step(PROMPTS))
        sizes.append(stage.cache_bytes)
        layout = Layout.of(a_step([[3]], start=len(PROMPTS[0])), torch.device("cpu"))
        scores.append(stage.scores(stage.hidden(layout.tokens_N, layout)))
    torch.testing.assert_close(scores[1], scores[0], rtol=0.05, atol=0.05 * float(scores[0].abs().max()))
    assert not torch.equal(*scores)
    assert sizes[0] / sizes[1] == 32 / 12  # 8 numbers of 4 bytes, or of 1 byte with a scale of 4


def test_the_head_may_have_a_scheme(model_and_folder):
    _, folder = model_and_folder
    scores = []
    for head in (None, "W32", "W8"):
        (stage,) = load(folder, make_plan(4, ()), head=head)
        stage.reserve(20)
        layout = Layout.of(a_step(PROMPTS), torch.device("cpu"))
        scores.append(stage.scores(stage.hidden(layout.tokens_N, layout)[layout.last_S]))
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])
    torch.testing.assert_close(scores[2], scores[0], rtol=0.02, atol=0.02 * float(scores[0].abs().max()))


def test_cache_codes_are_rounded_to_nearest():
    generator = torch.Generator().manual_seed(4)
    cache = PagedCache(3, 2, 8, dtype=torch.float32, bits=8, device=torch.device("cpu"))
    keys, values = torch.randn((2, 5, 2, 8), generator=generator)
    cache.write(torch.tensor([16, 17, 35, 40, 47]), keys, values)
    for stored, given in zip(cache.read(torch.tensor([[1, 2]])), (keys, values), strict=True):
        got = stored[:, 0, [0, 1, 19, 24, 31]].transpose(0, 1)
        assert ((got - given).abs() <= given.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()
    with pytest.raises(UnsupportedError, match="KV bits are 5"):
        PagedCache(3, 2, 8, dtype=torch.float32, bits=5, device=torch.device("cpu"))


def test_the_upper_halves_of_a_cache_are_its_codes_without_their_lower_bits():
    generator = torch.Generator().manual_seed(5)
    cache = PagedCache(3, 2, 8, dtype=torch.float64, bits=8, device=torch.device("cpu"))
    keys, values = torch.randn((2, 32, 2, 8), generator=generator, dtype=torch.float64)
    cache.write(torch.arange(16, 48), keys, values)
    table = torch.tensor([[1, 2]])
    whole, upper = cache.read(table), cache.read(table, high_halves=True)
    for which in (0, 1):
        scale = cache.scales[which, :, 16:48].double()[:, None]
        codes = (whole[which] / scale).round()
        assert torch.allclose(codes * scale, whole[which], rtol=1e-12)
        assert bool((codes.abs().amax(-1) == 127).all())
        expected = (torch.floor(codes / 16) * 16 + 7.5) * scale
        assert torch.allclose(upper[which], expected, rtol=1e-12)
    assert cache.bytes == 2 * 2 * 48 * (8 + 4)


def chi_square(tokens, probabilities):
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum()) + 1e9 * float(counts[expected == 0].sum())


def test_choices_follow_the_distribution():
    probabilities = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1], dtype=torch.float64)
    scores = torch.log(probabilities)[None].float()
    draws = [Choice(temperature=1.0, noise=n) for n in range(5_000)]
    # 99.99 % of chi-square with 4 degrees of freedom is 23.5.
    assert chi_square(choose(scores.expand(len(draws), -1), draws).tolist(), probabilities) < 23.5
    squares = probabilities**2
    cold = [Choice(temperature=0.5, noise=n) for n in range(5_000)]
    assert chi_square(choose(scores.expand(len(cold), -1), cold).tolist(), squares / squares.sum()) < 23.5
    kept = torch.tensor([0.0, 0.4, 0.25, 0.0, 0.0], dtype=torch.float64)
    nucleus = [Choice(temperature=1.0, top_p=0.6, noise=n) for n in range(5_000)]
    assert chi_square(choose(scores.expand(len(nucleus), -1), nucleus).tolist(), kept / kept.sum()) < 23.5
    assert choose(scores.expand(4, -1), [Choice()] * 4).tolist() == [1] * 4


def test_choices_of_like_scores_mostly_agree():
    """At least (1 - d) / (1 + d) of them, at total variation distance d."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((1, 50), generator=generator)
    other = scores + 0.1 * torch.randn((1, 50), generator=generator)
    distance = float((scores.softmax(-1) - other.softmax(-1)).abs().sum() / 2)
    draws = [Choice(temperature=1.0, noise=n) for n in range(5_000)]
    agreed = choose(scores.expand(len(draws), -1), draws) == choose(other.expand(len(draws), -1), draws)
    assert 0.02 < distance < 0.1
    assert float(agreed.double().mean()) > (1 - distance) / (1 + distance) - 0.01


def test_scores_that_hold_nan_give_no_token():
    scores = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 2.0, 1.0], [torch.nan] * 3])
    assert choose(scores, [Choice(), Choice(), Choice(temperature=1.0)]).tolist() == [-1, 1, -1]


def test_pages_are_taken_and_given_back():
    store = PageStore(6)
    first, second = store.take(17), store.take(40)
    assert sorted((*first, *second)) == [1, 2, 3, 4, 5]
    assert store.take(1) is None
    store.give_back(second)
    assert store.used == 2
    assert sorted(store.take(33)) == sorted(second)


@pytest.mark.parametrize("cuts", [(), (3,)])
def test_processes_give_the_same_tokens(llama, cuts):
    model, folder = llama
    expected = reference(model)
    seen = []
    with Pipeline(str(folder), make_plan(4, cuts)) as pipeline:
        for prefill, decode in ((1, 1), (3, 2), (2, 3)):
            generation = pipeline.generate(
                PROMPTS, NEW, prefill=prefill, decode=decode, on_tokens=lambda rows, tokens: seen.append((rows, tokens))
            )
            assert [list(tokens) for tokens in generation.tokens] == expected
            assert generation.prefill_s > 0 and generation.decode_s > 0
        assert len(seen) == (1 + 7) + (3 + 7 * 2) + (2 + 7 * 3)


def test_a_stage_keeps_nothing_of_what_it_sent(tmp_path):
    folder = write_sample(tmp_path, sample_config(layers=2, hidden=512, inner=64, heads=4, kv_heads=1, vocabulary=64))
    prompts = [[1 + t % 7 for t in range(64)]] * 8  # 1 MiB of hidden states
    peaks = []
    with Pipeline(str(folder), make_plan(2, (2,))) as pipeline:
        for passes in (10, 60):
            with MemoryWatch(pipeline.pids[:1]) as watch:
                for _ in range(passes):
                    pipeline.generate(prompts, 1, prefill=1)
            peaks.append(max(watch.peaks_kib.values()))
    if not peaks[0]:
        pytest.skip("there is no /proc here")
    assert peaks[1] - peaks[0] < 30 << 10


def test_a_killed_stage_is_an_error_and_not_a_wait(llama):
    _, folder = llama
    pipeline = Pipeline(str(folder), make_plan(4, (3,)), timeout_s=60)
    killed = []

    def kill(rows, tokens):
        if not killed:
            killed.append(pipeline.pids[0])
            os.kill(pipeline.pids[0], signal.SIGKILL)

    with pytest.raises(StageError, match="stage"):
        pipeline.generate(PROMPTS, 200, on_tokens=kill)
    with pytest.raises(StageError, match="can serve no more"):
        pipeline.generate(PROMPTS, 2)


def test_packed_weights_are_near_and_small():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    for scheme, bits, error in (("W8", 8, 0.02), ("W4A8", 4, 0.3)):
        packed = pack(weight, scheme)
        assert (unpack(packed) - weight).abs().max() < error
        assert packed.bytes == 64 * 256 * bits // 8 + 64 * 2 * 4
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
        y = linear(x, packed)
        difference = (y - x @ unpack(packed).T).abs().max()
        assert difference < (0.5 if scheme == "W4A8" else 1e-4)
        assert (difference > 1e-3) == (scheme == "W4A8")
    assert unpack(pack(torch.zeros(2, 4), "W4")).abs().max() == 0
    assert torch.equal(unpack(pack(weight, "W32")), weight)
    with pytest.raises(UnsupportedError, match="scheme is 'W5', but this runtime has W4"):
        pack(weight, "W5")


def test_schemes_change_memory_and_keep_the_output_near(llama):
    _, folder = llama
    sizes = []
    for scheme in ("W32", "W16", "W8", "W4", "W4A8"):
        (stage,) = load(folder, make_plan(4, (), scheme))
        sizes.append(stage.bytes)
        tokens = generate_here([stage], PROMPTS, NEW)
        assert all(len(row) == NEW for row in tokens)
    assert sizes[0] > sizes[1] and sizes[2] > sizes[3] == sizes[4]  # packed matrices are padded to 64 rows


def test_bad_input(llama, tmp_path):
    _, folder = llama
    stages = load(folder, make_plan(4, ()))
    with pytest.raises(ProblemError, match="token 97"):
        generate_here(stages, [[97]], 1)
    with pytest.raises(ProblemError, match="at least one"):
        generate_here(stages, [[]], 1)
    with pytest.raises(ProblemError, match="plan for this model"):
        Pipeline(str(folder), make_plan(3, ()))
    with pytest.raises(UnsupportedError, match="model_type"):
        config_from_json({"model_type": "mamba"})
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(tmp_path)
    for missing in ("model.gguf", "folder"):
        with pytest.raises(ModelError, match=f"{missing} does not exist"):
            open_model(tmp_path / missing)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="truncated"):
        open_model(tmp_path)


def test_end_tokens_are_those_of_both_configurations(llama, tmp_path):
    import json

    data = json.loads((llama[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"eos_token_id": 7}))
    assert read_config(tmp_path).end_tokens == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_config(tmp_path).end_tokens == (7, 9)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        read_config(tmp_path)


def test_rows_of_microbatches():
    assert microbatch_rows(5, 2) == [slice(0, 2), slice(2, 5)]
    assert microbatch_rows(2, 5) == [slice(0, 1), slice(1, 2)]


def write_gguf(path, model):
    """A llama in GGUF, with the rows of q and k in the order of that format."""
    gguf = pytest.importorskip("gguf")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(500.0)
    stems = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in state.items():
        stem = name.removesuffix(".weight")
        if stem in ends:
            target = ends[stem]
        else:
            _, _, layer, rest = stem.split(".", 3)
            target = f"blk.{layer}.{stems[rest]}"
            if rest.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if rest.endswith("q_proj") else config.num_key_value_heads
                value = value.reshape(heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(f"{target}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rows_are_read_alone(source):
    for name in source.names():
        whole = source.read(name)
        assert source.shape(name) == tuple(whole.shape)
        assert torch.equal(source.read(name, slice(3, 10)), whole[3:10])


def test_rows_of_weights_are_read_alone(llama):
    _, folder = llama
    source = open_model(folder)[1]
    rows_are_read_alone(source)
    rows_are_read_alone(StateSource({name: source.read(name) for name in source.names()}))
    with pytest.raises(ModelError, match=r"lack the tensor 'model.norm.weights'; did you mean 'model.norm.weight'"):
        source.shape("model.norm.weights")


def test_gguf_gives_the_tokens_of_transformers(tmp_path):
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    assert generate_here(load(path, make_plan(2, (1,))), PROMPTS, NEW) == reference(model)
    rows_are_read_alone(open_model(path)[1])
    (tmp_path / "short.gguf").write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ModelError, match="truncated"):
        open_model(tmp_path / "short.gguf")
