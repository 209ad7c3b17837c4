import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": None,
}
KINDS = {
    "llama": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 4, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip


def build(kind):
    """A small random model of transformers."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@pytest.fixture(scope="session", params=list(KINDS))
def model_and_folder(request, tmp_path_factory):
    model = build(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    model = build("llama")
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, folder
