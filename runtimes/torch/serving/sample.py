"""A small Llama with seeded random weights, written as a model folder: for demos, tests and the memory of a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qsync_opt.runtimes.torch.serving.config import config_from_json
from qsync_opt.runtimes.torch.serving.profiling import random_state


def sample_config(
    *, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    """The data of a ``config.json`` of a Llama of these sizes."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }


def write_sample(folder: str | Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write a model folder with seeded random weights, and return it.

    Raises:
        UnsupportedError: The configuration is of a kind that is not run.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(random_state(config_from_json(config), seed=seed), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
