import itertools
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from qsync_opt.runtimes.torch.serving import LocalWorkers, StageModel, group_names, open_model  # noqa: E402
from qsync_opt.serving import Plan, Stage  # noqa: E402

WAIT_S = 120
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


@pytest.fixture(scope="session")
def talking_folder(tmp_path_factory):
    """The small llama with a tokenizer that has a token for each printable ASCII character, and a chat template."""
    import tokenizers

    folder = tmp_path_factory.mktemp("talking")
    build("llama").save_pretrained(folder)
    letters = [chr(code) for code in range(32, 127)]
    words = tokenizers.models.WordLevel({text: k for k, text in enumerate([*letters, "<unk>", "<end>"])}, "<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(.|\n)"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}~{% endfor %}assistant: "
    fast.save_pretrained(folder)
    return folder


class HeldWorkers(LocalWorkers):
    """Workers whose results wait for a permission each."""

    def __init__(self, stages):
        super().__init__(stages)
        self.permits = threading.Semaphore(0)

    def result(self):
        assert self.permits.acquire(timeout=WAIT_S)
        return super().result()

    def let_go(self):
        self.permits.release(100_000)


@pytest.fixture(scope="session")
def plan_of():
    """A plan in FP32 of a model with four layers, cut before some groups."""

    def make(*cuts):
        names = group_names(4)
        ends = [0, *cuts, len(names)]
        stages = tuple(Stage(device=f"d{j}", groups=names[a:b]) for j, (a, b) in enumerate(itertools.pairwise(ends)))
        return Plan(microbatch=0, stages=stages, schemes=dict.fromkeys(names, "W32"))

    return make


@pytest.fixture(scope="session")
def load(plan_of):
    """The stages of a folder's model, in this process."""

    def read(folder, *cuts):
        plan = plan_of(*cuts)
        config, source = open_model(folder)
        return [StageModel(config, source, stage, plan.schemes) for stage in plan.stages]

    return read


@pytest.fixture(scope="session")
def held():
    """The class of workers whose results wait for a permission each."""
    return HeldWorkers
