"""The groups of a decoder: attention and MLP of a layer, each with its residual connection, and the two ends.

Fused as engines fuse them: {q, k, v} and {gate, up} share a scheme. A stage may begin or end between the two groups of
a layer, because only the residual stream passes from group to group.

Axes: B sequences, T tokens of this call, H hidden, L cached positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.serving.config import DecoderConfig, Rotary
from qsync_opt.runtimes.torch.serving.packing import PackedWeight, linear, pack
from qsync_opt.runtimes.torch.serving.weights import WeightSource


def scheme_bits(scheme: str) -> int:
    """Weight bits of a scheme's name: W4, W8, W16 (the computing type, at most 16 bits), or W32.

    Raises:
        UnsupportedError: Any other name.
    """
    if scheme not in ("W4", "W8", "W16", "W32"):
        raise UnsupportedError(f"scheme is {scheme!r}, but this runtime has W4, W8, W16 and W32")
    return int(scheme[1:])


def weight_type(scheme: str, dtype: torch.dtype) -> torch.dtype:
    """The type in which unpacked weights are kept."""
    return {"W16": torch.bfloat16, "W32": torch.float32}.get(scheme, dtype)


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of the cache a call is about, the position that it begins at, and each row's left padding."""

    rows: slice
    start: int
    padding_B: torch.Tensor


class Norm:
    """Root mean square norm in FP32."""

    def __init__(self, weight: torch.Tensor, epsilon: float, *, gemma: bool) -> None:
        self._weight = weight.float() + (1.0 if gemma else 0.0)
        self._plain = weight
        self._epsilon, self._gemma = epsilon, gemma

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The normed vectors, in the type of ``x``."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        # Gemma multiplies before it narrows, the others after.
        return (normed * self._weight).to(x.dtype) if self._gemma else self._plain.to(x.dtype) * normed.to(x.dtype)

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        return self._weight.numel() * 4 + self._plain.numel() * self._plain.element_size()


class Group:
    """What one entry of a plan runs."""

    def __init__(self, config: DecoderConfig, source: WeightSource, layer: int, dtype: torch.dtype) -> None:
        self.config, self.layer, self.dtype = config, layer, dtype
        self._source, self._prefix = source, f"model.layers.{layer}."

    def _norm(self, name: str) -> Norm:
        weight = self._source.read(f"{self._prefix}{name}.weight").to(self.dtype)
        return Norm(weight, self.config.epsilon, gemma=self.config.gemma)

    def _packed(self, names: tuple[str, ...], scheme: str) -> PackedWeight:
        weights = [self._source.read(f"{self._prefix}{name}.weight") for name in names]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return pack(weight, scheme_bits(scheme), dtype=weight_type(scheme, self.dtype))

    def _bias(self, names: tuple[str, ...]) -> torch.Tensor | None:
        present = [f"{self._prefix}{name}.bias" for name in names]
        if any(name not in set(self._source.names()) for name in present):
            return None
        return torch.cat([self._source.read(name) for name in present]).to(self.dtype)


class Attention(Group):
    """Norm, attention with a cache of keys and values, and the residual connection."""

    def __init__(
        self, config: DecoderConfig, source: WeightSource, layer: int, scheme: str, dtype: torch.dtype
    ) -> None:
        super().__init__(config, source, layer, dtype)
        inputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qkv, self.qkv_bias = self._packed(inputs, scheme), self._bias(inputs)
        self.out, self.out_bias = self._packed(("self_attn.o_proj",), scheme), self._bias(("self_attn.o_proj",))
        self.norm = self._norm("input_layernorm")
        self.after = self._norm("post_attention_layernorm") if config.gemma else None
        self.head_norms = (
            (self._norm("self_attn.q_norm"), self._norm("self_attn.k_norm")) if config.head_norms else None
        )
        self._frequencies = _frequencies(config.rotary[layer], config.head_size)
        self._cache: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        norms: list[Norm] = [self.norm, *([self.after] if self.after else []), *(self.head_norms or ())]
        return self.qkv.bytes + self.out.bytes + sum(norm.bytes for norm in norms)

    def reserve(self, sequences: int, positions: int) -> None:
        """Make an empty cache."""
        c = self.config
        self._cache = torch.zeros(2, sequences, c.kv_heads, positions, c.head_size, dtype=self.dtype)

    def __call__(self, x_BTH: torch.Tensor, at: Rows) -> torch.Tensor:
        """The hidden states after the attention; keys and values join the cache."""
        c, (batch, tokens, _) = self.config, x_BTH.shape
        heads = linear(self.norm(x_BTH), self.qkv, self.qkv_bias).view(batch, tokens, -1, c.head_size)
        q, k, v = torch.split(heads, [c.heads, c.kv_heads, c.kv_heads], dim=2)
        if self.head_norms is not None:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        positions_BT = (at.start + torch.arange(tokens)[None] - at.padding_B[:, None]).clamp_min(0)
        cos, sin = self._angles(positions_BT)
        q, k = _rotate(q, cos, sin).transpose(1, 2), _rotate(k, cos, sin).transpose(1, 2)
        assert self._cache is not None, "reserve() comes before the first call"
        end = at.start + tokens
        keys, values = self._cache[:, at.rows]
        keys[:, :, at.start : end], values[:, :, at.start : end] = k, v.transpose(1, 2)
        mask = self._mask(at, tokens)
        y = F.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=c.query_scale, enable_gqa=True
        )
        y = linear(y.transpose(1, 2).reshape(batch, tokens, -1), self.out, self.out_bias)
        return x_BTH + (y if self.after is None else self.after(y))

    def _angles(self, positions_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions_BT[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _mask(self, at: Rows, tokens: int) -> torch.Tensor:
        query = at.start + torch.arange(tokens)[:, None]
        key = torch.arange(at.start + tokens)[None]
        seen = key <= query
        window = self.config.windows[self.layer]
        if window is not None:
            seen = seen & (query - key < window)
        mask = seen[None] & (key[None] >= at.padding_B[:, None, None])
        return (mask | (key == query)[None])[:, None]  # padding sees itself, or its softmax would be undefined


class Mlp(Group):
    """Norm, gated MLP and the residual connection."""

    def __init__(
        self, config: DecoderConfig, source: WeightSource, layer: int, scheme: str, dtype: torch.dtype
    ) -> None:
        super().__init__(config, source, layer, dtype)
        self.gate_up = self._packed(("mlp.gate_proj", "mlp.up_proj"), scheme)
        self.down = self._packed(("mlp.down_proj",), scheme)
        self.norm = self._norm("pre_feedforward_layernorm" if config.gemma else "post_attention_layernorm")
        self.after = self._norm("post_feedforward_layernorm") if config.gemma else None

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        return self.gate_up.bytes + self.down.bytes + self.norm.bytes + (self.after.bytes if self.after else 0)

    def reserve(self, sequences: int, positions: int) -> None:
        """Nothing: an MLP keeps no state."""

    def __call__(self, x_BTH: torch.Tensor, at: Rows) -> torch.Tensor:
        """The hidden states after the MLP."""
        gate, up = linear(self.norm(x_BTH), self.gate_up).chunk(2, dim=-1)
        gate = F.gelu(gate, approximate="tanh") if self.config.gemma else F.silu(gate)
        y = linear(gate * up, self.down)
        return x_BTH + (y if self.after is None else self.after(y))


class Embedding:
    """Token numbers to vectors."""

    def __init__(self, config: DecoderConfig, source: WeightSource, dtype: torch.dtype) -> None:
        self.weight = source.read("model.embed_tokens.weight").to(dtype)
        self._scale = torch.tensor(math.sqrt(config.hidden), dtype=dtype) if config.gemma else None

    def __call__(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """The vectors of tokens."""
        x = F.embedding(tokens_BT, self.weight)
        return x if self._scale is None else x * self._scale


class Head:
    """The last norm and the scores of the next token."""

    def __init__(
        self, config: DecoderConfig, source: WeightSource, dtype: torch.dtype, embedding: Embedding | None
    ) -> None:
        self.norm = Norm(source.read("model.norm.weight").to(dtype), config.epsilon, gemma=config.gemma)
        name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        # A tied embedding is one copy where both ends are here.
        self.weight = embedding.weight if config.tied and embedding is not None else source.read(name).to(dtype)

    def __call__(self, x_BH: torch.Tensor) -> torch.Tensor:
        """The scores of every token of the vocabulary."""
        return F.linear(self.norm(x_BH), self.weight)


def _frequencies(rotary: Rotary, size: int) -> torch.Tensor:
    frequencies = 1.0 / (rotary.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if rotary.llama3 is None:
        return frequencies / rotary.factor
    low, high, context = rotary.llama3
    wavelength = 2 * math.pi / frequencies
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / rotary.factor + smooth * frequencies


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
