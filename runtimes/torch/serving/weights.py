"""Weights of a model, read a tensor or some of its rows at a time: safetensors, also in shards, or GGUF by ``gguf``.

Tensors have the names of transformers, such as ``model.layers.0.self_attn.q_proj.weight``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from qsync_opt.errors import ModelError, NotInstalledError, UnsupportedError
from qsync_opt.io import near_match
from qsync_opt.runtimes.torch.serving.config import DecoderConfig, config_from_json, read_config

ALL = slice(None)
"""All rows of a tensor."""
_PART_BYTES, _ROWS = 2 << 20, 64
"""Bytes in FP32 of the rows that are read at a time, and what their number is a multiple of."""


class WeightSource(Protocol):
    """Named tensors, each or some rows of it read when they are asked for."""

    def names(self) -> Iterable[str]:
        """All names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read.

        Raises:
            ModelError: It is missing.
        """

    def read(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """One tensor, or some of its rows.

        Raises:
            ModelError: It is missing or unreadable.
        """


def row_parts(
    source: WeightSource, names: Sequence[str], device: torch.device | str = "cpu"
) -> tuple[tuple[int, int], Iterator[torch.Tensor]]:
    """Matrices of one width, one below another: their shape together, and their rows, some MiB at a time, on a device.

    Every part but the last has a multiple of 64 rows.

    Raises:
        ModelError: One is missing.
    """
    shapes = [source.shape(name) for name in names]
    total, width = sum(shape[0] for shape in shapes), shapes[0][1]
    step = max(_PART_BYTES // (4 * width * _ROWS), 1) * _ROWS

    def parts() -> Iterator[torch.Tensor]:
        for begin in range(0, total, step):
            pieces, top = [], 0
            for name, (height, _) in zip(names, shapes, strict=True):
                first, last = max(begin - top, 0), min(begin + step - top, height)
                if first < last:
                    pieces.append(source.read(name, slice(first, last)).to(device))
                top += height
            yield torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    return (total, width), parts()


class SafetensorsSource:
    """The ``*.safetensors`` files of a folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        paths = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            paths = [folder / name for name in dict.fromkeys(names)]
        if not paths:
            raise ModelError(f"{folder} holds no *.safetensors file; give a model folder, or a .gguf file")
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as failure:
                raise ModelError(f"{path} cannot be read, it may be truncated ({failure}); fetch it again") from failure
            self._files.update(dict.fromkeys(list(file.keys()), file))

    def names(self) -> Iterable[str]:
        """All names."""
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; see `WeightSource`."""
        return tuple(_tensor_of(self._files, name).get_slice(name).get_shape())

    def read(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """One tensor; see `WeightSource`."""
        file = _tensor_of(self._files, name)
        tensor: torch.Tensor = file.get_tensor(name) if rows == ALL else file.get_slice(name)[rows]
        return tensor


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


_GGUF_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
_LONG_ARRAY = 1000


def _reader_class(gguf: Any) -> type[Any]:
    """A reader that passes over long arrays, such as a tokenizer's words, which take it most of a minute."""

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            types = gguf.GGUFValueType
            if raw_type != types.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            view = memoryview(self.data)
            kind, length = struct.unpack_from("<IQ", view, orig_offs)
            if length < _LONG_ARRAY or kind == types.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            at = orig_offs + 12
            if kind == types.STRING:
                for _ in range(length):
                    at += 8 + struct.unpack_from("<Q", view, at)[0]
            else:
                at += length * self.gguf_scalar_to_np[types(kind)]().itemsize
            return at - orig_offs, [], [], [types.ARRAY, types(kind)]

    return Reader


class GgufSource:
    """A GGUF file; its tensors are widened to FP32 as they are read."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError as missing:
            raise NotInstalledError(
                "reading GGUF needs the package 'gguf': pip install 'qsync-opt[serving]'"
            ) from missing
        try:
            self._reader: Any = _reader_class(gguf)(path)
        except Exception as failure:  # the reader raises whatever a damaged file makes it stumble over
            raise ModelError(f"{path} cannot be read, it may be truncated ({failure}); fetch it again") from failure
        self._dequantize: Callable[..., Any] = gguf.quants.dequantize
        self._architecture = str(self._value("general.architecture"))
        if self._architecture not in _GGUF_KINDS:
            raise UnsupportedError(
                f"{path}: architecture is {self._architecture!r}, but those that are run are {', '.join(_GGUF_KINDS)}"
            )
        self._tensors = {self._name(tensor.name): tensor for tensor in self._reader.tensors}
        scaling = self._value(f"{self._architecture}.rope.scaling.type", "none")
        if "rope_freqs.weight" in self._tensors or scaling != "none":
            raise UnsupportedError(
                f"{path}: its rotary frequencies are scaled, which is not read from GGUF; use the safetensors model"
            )

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _name(self, name: str) -> str:
        *block, stem, kind = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        if self._architecture == "gemma3" and stem == "ffn_norm":
            return f"{prefix}pre_feedforward_layernorm.{kind}"
        return f"{prefix}{_GGUF_NAMES.get(stem, stem)}.{kind}"

    def config(self) -> DecoderConfig:
        """The configuration that the file's metadata holds."""
        a = self._architecture

        def get(key: str, default: Any = None) -> Any:
            return self._value(f"{a}.{key}", default)

        heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
        data = {
            "model_type": _GGUF_KINDS[a],
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length", hidden // heads),
            "hidden_size": hidden,
            "intermediate_size": get("feed_forward_length"),
            "vocab_size": int(self._tensors["model.embed_tokens.weight"].shape[1]),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
            "rope_theta": get("rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "eos_token_id": [end for end in map(self._value, _GGUF_ENDS) if end is not None],
        }
        if a == "gemma3":
            data |= {
                "query_pre_attn_scalar": data["head_dim"],
                "sliding_window": get("attention.sliding_window"),
                "rope_theta": get("rope.freq_base", 1e6),
                "rope_local_base_freq": get("rope.freq_base_swa", 10000.0),
            }
        return config_from_json(data, "GGUF metadata")

    def names(self) -> Iterable[str]:
        """All names."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; see `WeightSource`."""
        return tuple(int(size) for size in reversed(_tensor_of(self._tensors, name).shape))

    def read(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """One tensor in FP32; see `WeightSource`."""
        tensor = _tensor_of(self._tensors, name)
        wanted: Any = rows
        if self._architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self._value("llama.attention.head_count")
            if name.endswith("k_proj.weight"):
                heads = self._value("llama.attention.head_count_kv", heads)
            # GGUF interleaves the two halves of rotary pairs.
            order = torch.arange(len(tensor.data)).view(heads, -1, 2).transpose(1, 2).reshape(-1)
            wanted = order[rows].numpy()
        values = torch.from_numpy(self._dequantize(tensor.data[wanted], tensor.tensor_type).copy()).float()
        if self._architecture == "gemma3" and name.endswith("norm.weight"):
            return values - 1  # GGUF stores 1 + weight
        return values


class StateSource:
    """The tensors of a ``state_dict``, for models that exist in memory."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def names(self) -> Iterable[str]:
        """All names."""
        return self._state

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; see `WeightSource`."""
        return tuple(_tensor_of(self._state, name).shape)

    def read(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """One tensor; see `WeightSource`."""
        tensor = _tensor_of(self._state, name).detach()
        wanted: torch.Tensor = tensor if rows == ALL else tensor[rows]
        return wanted


def _tensor_of(tensors: Mapping[str, Any], name: str) -> Any:
    if name not in tensors:
        raise ModelError(f"the weights lack the tensor {name!r}{near_match(name, tensors)}")
    return tensors[name]


def open_model(path: str | Path) -> tuple[DecoderConfig, WeightSource]:
    """Configuration and weights of a model folder (``config.json`` and safetensors) or of a ``.gguf`` file.

    Raises:
        ModelError: There is nothing, or nothing that can be read.
        UnsupportedError: Its kind of model is not run.
        NotInstalledError: A package is missing.
    """
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path} does not exist; give a .gguf file, or a folder with config.json and weights")
    if path.suffix == ".gguf":
        source = GgufSource(path)
        return source.config(), source
    return read_config(path), SafetensorsSource(path)
