"""The decoder beside transformers, token by token; stages in one process and in several; packed weights."""

import itertools
import os
import signal

import pytest

torch = pytest.importorskip("torch")

from qsync_opt.errors import ModelError, ProblemError, UnsupportedError  # noqa: E402
from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    Pipeline,
    StageError,
    StageModel,
    config_from_json,
    generate_here,
    group_names,
    microbatch_rows,
    open_model,
    pack,
    unpack,
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


def test_scores_are_those_of_transformers(model_and_folder):
    from qsync_opt.runtimes.torch.serving import Batch, Rows

    model, folder = model_and_folder
    (stage,) = load(folder, make_plan(4, ()))
    batch = Batch.of([PROMPTS[0]], 97)
    stage.reserve(1, 7)
    scores = stage.scores(stage.hidden(batch.tokens_BT, Rows(slice(0, 1), 0, batch.padding_B)))
    with torch.inference_mode():
        torch.testing.assert_close(scores, model(batch.tokens_BT).logits[:, -1], rtol=1e-4, atol=1e-4)


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
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(2))
    for bits, error in ((8, 0.02), (4, 0.3)):
        packed = pack(weight, bits)
        step = packed.scales.repeat_interleave(128, dim=1)
        assert ((unpack(packed, torch.float32) - weight).abs() <= step * 0.5001).all()
        assert (unpack(packed, torch.float32) - weight).abs().max() < error
        assert packed.bytes == 48 * 256 * bits // 8 + 48 * 2 * 4
    assert unpack(pack(torch.zeros(2, 4), 4), torch.float32).abs().max() == 0
    with pytest.raises(UnsupportedError, match="allowed are 4, 8, 16 and 32"):
        pack(weight, 5)
    with pytest.raises(UnsupportedError, match="do not divide"):
        pack(weight, 4, 100)


def test_schemes_change_memory_and_keep_the_output_near(llama):
    _, folder = llama
    sizes = []
    for scheme in ("W32", "W8", "W4"):
        (stage,) = load(folder, make_plan(4, (), scheme))
        sizes.append(stage.bytes)
        tokens = generate_here([stage], PROMPTS, NEW)
        assert all(len(row) == NEW for row in tokens)
    assert sizes[0] > sizes[1] > sizes[2]


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
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="truncated"):
        open_model(tmp_path)


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
    (tmp_path / "short.gguf").write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ModelError, match="truncated"):
        open_model(tmp_path / "short.gguf")
