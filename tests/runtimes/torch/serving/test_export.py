"""Models for other engines, read back by those engines' own readers."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from qsync_opt.cli import main  # noqa: E402
from qsync_opt.errors import ProblemError, UnsupportedError  # noqa: E402
from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    export_llama_cpp,
    export_vllm,
    group_names,
    open_model,
    uniform_plan,
)
from qsync_opt.serving import Plan, Stage  # noqa: E402

SCHEMES = ("W4", "W8", "W16", "W8")


def plan_of(schemes, cut=None):
    names = group_names(len(schemes) // 2)
    parts = (names,) if cut is None else (names[:cut], names[cut:])
    stages = tuple(Stage(device=f"d{k}", groups=part) for k, part in enumerate(parts))
    return Plan(microbatch=0, stages=stages, schemes=dict(zip(names, schemes, strict=True)))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A llama whose matrices groups of 128 divide."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, eos_token_id=None, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    folder = tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model, folder


def test_transformers_and_compressed_tensors_read_what_is_for_vllm(wide, tmp_path):
    pytest.importorskip("compressed_tensors")
    model, folder = wide
    result = export_vllm(folder, plan_of(SCHEMES, cut=2), tmp_path / "out")
    assert result.environment == {"VLLM_PP_LAYER_PARTITION": "1,1"}
    assert list(result.arguments[-2:]) == ["--pipeline-parallel-size", "2"]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    original = dict(model.named_modules())
    tokens = torch.tensor([[5, 9, 33, 2]])
    with torch.inference_mode():
        loaded(tokens)  # it widens the weights
        for name, module in loaded.named_modules():
            if not isinstance(module, torch.nn.Linear) or name == "lm_head":
                continue
            layer, kind = name.split(".")[2:4]
            scheme = SCHEMES[2 * int(layer) + (kind == "mlp")]
            given, got = original[name].weight.float(), module.weight.float()
            largest = given.unflatten(1, (-1, 128)).abs().amax(-1).repeat_interleave(128, 1)
            step = {"W4": 1 / 7, "W8": 1 / 127, "W16": 0.0}[scheme]
            # Half a step, the rounding of the scale, and that of the result.
            allowed = largest * (0.5 * step + (2**-8 if step else 0)) + got.abs() * 2**-8
            assert ((given - got).abs() <= allowed).all(), name
            assert torch.equal(given, got) == (scheme == "W16")


def write_gguf(gguf, path):
    """A file with what this runtime and llama.cpp need of a llama; F32 tensors, and a word list."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"word {k}" for k in range(1200)])
    writer.add_token_types([1] * 1200)
    generator = torch.Generator().manual_seed(2)

    def add(name, *shape):
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())

    add("token_embd", 1200, 64)
    add("output_norm", 64)
    for layer in range(2):
        for stem, rows, columns in (
            ("attn_q", 64, 64), ("attn_k", 32, 64), ("attn_v", 32, 64), ("attn_output", 64, 64), ("ffn_gate", 96, 64),
            ("ffn_up", 96, 64), ("ffn_down", 64, 96),
        ):  # fmt: skip
            add(f"blk.{layer}.{stem}", rows, columns)
        add(f"blk.{layer}.attn_norm", 64)
        add(f"blk.{layer}.ffn_norm", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(gguf, path)
    return path


def test_the_package_gguf_reads_what_is_for_llama_cpp(gguf_file, tmp_path):
    gguf = pytest.importorskip("gguf")
    result = export_llama_cpp(gguf_file, plan_of(("W4", "W8", "W16", "W32"), cut=2), tmp_path / "out.gguf")
    assert list(result.arguments[-2:]) == ["--tensor-split", "1,1"]
    before, after = gguf.GGUFReader(gguf_file), gguf.GGUFReader(tmp_path / "out.gguf")
    names = [name for name in before.fields if not name.startswith("GGUF.")]
    assert {name: after.get_field(name).contents() for name in names} == {
        name: before.get_field(name).contents() for name in names
    }
    expected = {"0.attn": "Q4_0", "0.ffn": "Q8_0", "1.attn": "BF16", "1.ffn": "F32"}
    originals = {tensor.name: tensor for tensor in before.tensors}
    for tensor in after.tensors:
        parts = tensor.name.split(".")
        own = "F32"
        if parts[0] == "blk" and "norm" not in parts[2]:
            own = expected[f"{parts[1]}.{parts[2].split('_')[0]}"]
        assert tensor.tensor_type.name == own, tensor.name
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        given = torch.from_numpy(originals[tensor.name].data.copy())
        error = (values - given).abs().max() / given.abs().max()
        assert error <= {"Q4_0": 0.13, "Q8_0": 0.005, "BF16": 0.004, "F32": 0.0}[own]
    config, source = open_model(tmp_path / "out.gguf")
    assert config.layers == 2
    assert source.read("model.layers.0.mlp.up_proj.weight").shape == (96, 64)


def test_what_a_target_cannot_load_is_refused_by_name(wide, gguf_file, tmp_path):
    _, folder = wide
    out = tmp_path / "out"
    for write, model, plan, text in (
        (export_vllm, folder, plan_of(("W4A8", "W4", "W4", "W4")), "group '0.attn' has the scheme 'W4A8'"),
        (export_vllm, folder, plan_of(SCHEMES, cut=1), "'d1' begins inside a layer, at '0.mlp'"),
        (export_vllm, gguf_file, plan_of(SCHEMES), "export the model's safetensors folder"),
        (export_llama_cpp, folder, plan_of(SCHEMES), "convert_hf_to_gguf"),
        (export_llama_cpp, gguf_file, plan_of(("W8A8", "W4", "W4", "W4")), "'W8A8'; llama.cpp can be given W4"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            write(model, plan, out)
    out.mkdir()
    with pytest.raises(ProblemError, match="exists already"):
        export_vllm(folder, plan_of(SCHEMES), out)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_narrow_model_is_refused_with_the_matrix(llama, tmp_path):
    config, _ = open_model(llama[1])
    with pytest.raises(UnsupportedError, match="q_proj has 32 inputs, which groups of 128 do not divide"):
        export_vllm(llama[1], uniform_plan(config, "W4"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_how_to_start_the_engine(wide, tmp_path, capsys):
    plan_of(SCHEMES, cut=2).save(tmp_path / "plan.json")
    arguments = [str(wide[1]), "--plan", str(tmp_path / "plan.json"), "--to", "vllm", "--output", str(tmp_path / "o")]
    assert main(["serving", "export", *arguments]) == 0
    assert "VLLM_PP_LAYER_PARTITION=1,1 vllm serve" in capsys.readouterr().out
    config = json.loads((tmp_path / "o" / "config.json").read_text())["quantization_config"]
    assert [group["weights"]["num_bits"] for group in config["config_groups"].values()] == [4, 8]
