"""What a decoder-only language model looks like: sizes, norms, rotary positions; read from a ``config.json``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qsync_opt.errors import ModelError, UnsupportedError

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
"""Values of ``model_type`` that are run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary positions: base, a divisor of all frequencies, and Llama 3's change of low ones (None: as they are)."""

    theta: float
    factor: float = 1.0
    llama3: tuple[float, float, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a decoder; ``windows`` is the sliding window by layer, or None where all is seen."""

    kind: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    epsilon: float
    tied: bool
    attention_bias: bool
    head_norms: bool
    gemma: bool
    query_scale: float
    windows: tuple[int | None, ...]
    rotary: tuple[Rotary, ...]
    end_tokens: tuple[int, ...] = ()


def read_config(folder: str | Path) -> DecoderConfig:
    """The configuration of a model folder; what ends an answer stands in its ``generation_config.json``, too.

    Raises:
        ModelError: There is no readable ``config.json``.
        UnsupportedError: Its kind of model is not run.

    Source: the configuration files of transformers.
    """
    path = Path(folder) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise ModelError(f"{path} cannot be read ({failure}); give a folder with config.json and weights") from failure
    config = config_from_json(data, str(path))
    return replace(config, end_tokens=tuple(dict.fromkeys((*config.end_tokens, *_generation_ends(Path(folder))))))


def _generation_ends(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.exists():
        return ()
    try:
        return _ends(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError) as failure:
        raise ModelError(f"{path} cannot be read ({failure}); repair or remove it") from failure


def _ends(data: dict[str, Any]) -> tuple[int, ...]:
    ends = data.get("eos_token_id")
    return tuple(int(end) for end in (ends if isinstance(ends, list) else [] if ends is None else [ends]))


def config_from_json(data: Any, where: str = "config") -> DecoderConfig:
    """The configuration in the data of a ``config.json``; see `read_config`."""
    kind = data.get("model_type")
    if kind not in KINDS:
        raise UnsupportedError(f"{where}: model_type is {kind!r}, but those that are run are {', '.join(KINDS)}")
    try:
        return _config(data, kind)
    except (KeyError, TypeError, ValueError) as failure:
        raise ModelError(f"{where}: the configuration is incomplete or wrong ({failure!r})") from failure


def _config(data: dict[str, Any], kind: str) -> DecoderConfig:
    layers, heads = int(data["num_hidden_layers"]), int(data["num_attention_heads"])
    size = int(data.get("head_dim") or data["hidden_size"] // heads)
    gemma = kind == "gemma3_text"
    window = data.get("sliding_window")
    types = data.get("layer_types")
    if types is None:
        pattern = data.get("sliding_window_pattern", 6)
        sliding = gemma or (kind == "mistral" and window is not None)
        types = [
            "sliding_attention" if sliding and not (gemma and (i + 1) % pattern == 0) else "full_attention"
            for i in range(layers)
        ]
    if kind == "qwen2" and not data.get("use_sliding_window", False):
        types = ["full_attention"] * layers
    return DecoderConfig(
        kind=kind,
        layers=layers,
        hidden=int(data["hidden_size"]),
        inner=int(data["intermediate_size"]),
        heads=heads,
        kv_heads=int(data.get("num_key_value_heads") or heads),
        head_size=size,
        vocabulary=int(data["vocab_size"]),
        epsilon=float(data.get("rms_norm_eps", 1e-6)),
        tied=bool(data.get("tie_word_embeddings", gemma)),
        attention_bias=kind == "qwen2" or bool(data.get("attention_bias", False)),
        head_norms=kind in ("qwen3", "gemma3_text"),
        gemma=gemma,
        query_scale=1 / math.sqrt(data["query_pre_attn_scalar"] if gemma else size),
        windows=tuple(int(window) if t == "sliding_attention" and window else None for t in types),
        rotary=tuple(_rotary(data, t) for t in types),
        end_tokens=_ends(data),
    )


def _rotary(data: dict[str, Any], layer_type: str) -> Rotary:
    parameters = data.get("rope_parameters") or {}
    parameters = parameters.get(layer_type, parameters)
    if not parameters:
        parameters = dict(data.get("rope_scaling") or {})
        parameters.setdefault("rope_theta", data.get("rope_theta", 10000.0))
        if layer_type == "sliding_attention" and "rope_local_base_freq" in data:
            parameters = {"rope_theta": data["rope_local_base_freq"]}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta", data.get("rope_theta", 10000.0)))
    if kind == "default":
        return Rotary(theta=theta)
    factor = float(parameters["factor"])
    if kind == "linear":
        return Rotary(theta=theta, factor=factor)
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return Rotary(
            theta=theta, factor=factor, llama3=(low, high, int(parameters["original_max_position_embeddings"]))
        )
    raise UnsupportedError(f"rope_type is {kind!r}, but those that are run are default, linear and llama3")
