"""The groups of a decoder: attention and MLP of a layer, each with its residual connection, and the two ends.

Fused as engines fuse them: {q, k, v} and {gate, up} share a scheme. A stage may begin or end between the two groups of
a layer, because only the residual stream passes from group to group.

Axes: N tokens of a pass, S sequences, T tokens of one sequence, H hidden, L cached positions, G query heads that share
a head of keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from qsync_opt.kernels import decoder
from qsync_opt.kernels.paged_attention import explain, paged_attention
from qsync_opt.kernels.weight_only import WIDE, RoundedRows, gated_linear
from qsync_opt.runtimes.torch.serving.cache import PagedCache
from qsync_opt.runtimes.torch.serving.config import DecoderConfig, Rotary
from qsync_opt.runtimes.torch.serving.packing import (
    PackedWeight,
    activations_of,
    has_reproducible,
    join_parts,
    linear,
    pack_parts,
)
from qsync_opt.runtimes.torch.serving.steps import PAGE, Layout, pages_of
from qsync_opt.runtimes.torch.serving.weights import StateSource, WeightSource, row_parts


class Residual(NamedTuple):
    """The residual stream (N, H) between groups: what a group adds waits for the next norm, which adds it."""

    x: torch.Tensor
    added: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """The hidden states."""
        return self.x if self.added is None else self.x + self.added


class Norm:
    """Root mean square norm, computed in FP32."""

    def __init__(self, weight: torch.Tensor, epsilon: float, *, gemma: bool) -> None:
        self.weight = weight.float() + 1.0 if gemma else weight
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The normed vectors, in the type of ``x``."""
        return decoder.rms_norm(x, self.weight, self._epsilon)

    def of(
        self, stream: Residual, layout: Layout, weight: PackedWeight
    ) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
        """The normed hidden states as a product with a weight takes them, and these themselves."""
        if stream.added is None or layout.pieces:
            x = stream.whole()
            return layout.apart(self, x), x
        rows = (stream.x, stream.added, self.weight, self._epsilon)
        activations = activations_of(weight, layout.precision.activations)
        if weight.packed is not None and activations != WIDE:
            rounded = decoder.add_rms_norm_and_round(*rows, rotation=weight.packed.rotation, activations=activations)
            if rounded is not None:
                return rounded
        return decoder.add_rms_norm(*rows)

    @property
    def bytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes


def _product(
    x: torch.Tensor | RoundedRows, weight: PackedWeight, layout: Layout, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` in the precision of a pass; its bits depend on nothing else where pieces stand apart."""
    activations = layout.precision.activations
    if layout.pieces and isinstance(x, torch.Tensor) and not has_reproducible(weight, x):
        return layout.apart(lambda part: linear(part, weight, bias, activations=activations), x)
    return linear(x, weight, bias, activations=activations, reproducible=bool(layout.pieces))


class Group:
    """What one entry of a plan runs; its weights are read, moved and packed some rows at a time."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        layer: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.layer, self.dtype, self.device = config, layer, dtype, torch.device(device)
        self._source, self._prefix = source, f"model.layers.{layer}."

    def _norm(self, name: str) -> Norm:
        weight = self._source.read(f"{self._prefix}{name}.weight").to(self.device, self.dtype)
        return Norm(weight, self.config.epsilon, gemma=self.config.gemma)

    def _packed(self, names: tuple[str, ...], scheme: str) -> PackedWeight:
        shape, parts = row_parts(self._source, [f"{self._prefix}{name}.weight" for name in names], self.device)
        return pack_parts(parts, shape, scheme)

    def _bias(self, names: tuple[str, ...]) -> torch.Tensor | None:
        present = [f"{self._prefix}{name}.bias" for name in names]
        if any(name not in set(self._source.names()) for name in present):
            return None
        return torch.cat([self._source.read(name) for name in present]).to(self.device, self.dtype)


class Attention(Group):
    """Norm, attention with a cache of keys and values, and the residual connection."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        layer: int,
        scheme: str,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config, source, layer, dtype, device)
        inputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qkv, self.qkv_bias = self._packed(inputs, scheme), self._bias(inputs)
        self.out, self.out_bias = self._packed(("self_attn.o_proj",), scheme), self._bias(("self_attn.o_proj",))
        self.norm = self._norm("input_layernorm")
        self.after = self._norm("post_attention_layernorm") if config.gemma else None
        self.head_norms = (
            (self._norm("self_attn.q_norm"), self._norm("self_attn.k_norm")) if config.head_norms else None
        )
        self._frequencies = _frequencies(config.rotary[layer], config.head_size).to(self.device)
        self.cache: PagedCache | None = None

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        """The matrices."""
        return self.qkv, self.out

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        norms: list[Norm] = [self.norm, *([self.after] if self.after else []), *(self.head_norms or ())]
        return self.qkv.bytes + self.out.bytes + sum(norm.bytes for norm in norms)

    def reserve(self, pages: int, kv_bits: int | None = None) -> None:
        """Make empty pages."""
        c = self.config
        self.cache = PagedCache(pages, c.kv_heads, c.head_size, dtype=self.dtype, bits=kv_bits, device=self.device)

    def wipe(self, pages: Sequence[int]) -> None:
        """Set pages to zero."""
        assert self.cache is not None, "reserve() comes before"
        self.cache.wipe(pages)

    def __call__(self, stream: Residual, layout: Layout) -> Residual:
        """The hidden states after the attention; keys and values join the cache."""
        c = self.config
        normed, x_NH = self.norm.of(stream, layout, self.qkv)
        heads = _product(normed, self.qkv, layout, self.qkv_bias).view(len(x_NH), -1, c.head_size)
        if self.head_norms is not None:
            q, k, v = torch.split(heads, [c.heads, c.kv_heads, c.kv_heads], dim=1)
            heads = torch.cat([layout.apart(self.head_norms[0], q), layout.apart(self.head_norms[1], k), v], dim=1)
        angles = layout.angles(c.rotary[self.layer], self._frequencies, self.dtype)
        y = None if layout.counts else self._newest(heads, angles, layout)
        if y is None:
            q, k, v = self._to_cache(heads, angles, layout)
            y = self._ragged(q, k, v, layout) if layout.counts else self._decode(q, layout)
        y = _product(y, self.out, layout, self.out_bias)
        return Residual(x_NH, y if self.after is None else layout.apart(self.after, y))

    def _to_cache(
        self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys with their positions, and values; keys and values join the cache."""
        c = self.config
        assert self.cache is not None, "reserve() comes before the first call"
        q_and_k, v = torch.split(heads, [c.heads + c.kv_heads, c.kv_heads], dim=1)
        rotated = decoder.rotate_into_pages(heads, *angles, layout.slots_N, self.cache.codes, self.cache.scales)
        if rotated is None:
            rotated = decoder.rotate_positions(q_and_k, *angles)
            self.cache.write(layout.slots_N, rotated[:, c.heads :], v)
        q, k = torch.split(rotated, [c.heads, c.kv_heads], dim=1)
        return q, k, v

    def _newest(
        self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], layout: Layout
    ) -> torch.Tensor | None:
        """One token of each sequence, as one kernel from the products on; None where there is none, or are more."""
        c = self.config
        assert self.cache is not None, "reserve() comes before the first call"
        y = decoder.rotate_and_attend(
            heads, *angles, layout.slots_N, self.cache.codes, layout.table_SP, layout.contexts_S, scale=c.query_scale,
            window=c.windows[self.layer], scales=self.cache.scales, high_halves=layout.precision.high_halves,
        )  # fmt: skip
        return None if y is None else y.view(len(heads), -1)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel reads the pages where they are, for several new tokens of each sequence too."""
        assert self.cache is not None, "reserve() comes before"
        is_read = self.cache.scales is not None or self.cache.codes.dtype is self.dtype
        return is_read and not explain(self.device, self.dtype, self.config.head_size)

    def _decode(self, q: torch.Tensor, layout: Layout) -> torch.Tensor:
        """As many tokens of each sequence; without a kernel one, and heads that share keys are rows of a product."""
        c, sequences = self.config, q.shape[0]
        assert self.cache is not None
        window = c.windows[self.layer]
        if self.has_kernel:
            y = paged_attention(
                q, self.cache.codes, layout.table_SP, layout.contexts_S, scale=c.query_scale, window=window,
                scales=self.cache.scales, high_halves=layout.precision.high_halves, settled=True,
            )  # fmt: skip
            return y.view(sequences, -1)
        table, mask = layout.seen(window, self.dtype)
        keys, values = self.cache.read(table, high_halves=layout.precision.high_halves)
        rows = q.reshape(sequences, c.kv_heads, -1, c.head_size).transpose(0, 1)
        mask = mask.expand(c.kv_heads, -1, rows.shape[2], -1)
        y = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=c.query_scale)
        return y.transpose(0, 1).reshape(sequences, -1)

    def _ragged(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Any number of tokens per sequence, one sequence after another, or prompts of one length together."""
        alike = not any(layout.starts) and len(set(layout.counts)) == 1
        if alike and not layout.pieces and q.device.type == "cpu":  # cards may have other bits for other batches
            size = (len(layout.counts), layout.counts[0])
            q, k, v = (heads.view(*size, *heads.shape[1:]).transpose(1, 2) for heads in (q, k, v))
            return self._alike(q, k, v, 0)
        results, begin = [], 0
        for row, (count, start) in enumerate(zip(layout.counts, layout.starts, strict=True)):
            part = slice(begin, begin + count)
            begin += count
            if start and layout.pieces:
                table = layout.table_SP[row]
                high = layout.precision.high_halves
                results += [self._token(one, table, start + done, high) for done, one in enumerate(q[part])]
                continue
            keys, values = k[part].transpose(0, 1), v[part].transpose(0, 1)
            if start:
                assert self.cache is not None
                pages = layout.table_SP[row : row + 1, : -(-(start + count) // PAGE)]
                keys, values = (cached[:, 0, : start + count] for cached in self.cache.read(pages))
            results.append(self._alike(q[part].transpose(0, 1)[None], keys[None], values[None], start))
        return torch.cat(results)

    def _token(self, q: torch.Tensor, pages_P: torch.Tensor, position: int, high_halves: bool) -> torch.Tensor:
        """One token with what it sees and nothing else, so that its bits do not depend on other rows or lengths."""
        c, window = self.config, self.config.windows[self.layer]
        assert self.cache is not None
        keys, values = self.cache.read(pages_P[None, : pages_of(position + 1)], high_halves=high_halves)
        low = 0 if window is None else max(0, position + 1 - window)
        y = F.scaled_dot_product_attention(
            q.view(c.kv_heads, 1, -1, c.head_size), keys[:, :, low : position + 1], values[:, :, low : position + 1],
            scale=c.query_scale,
        )  # fmt: skip
        return y.reshape(1, -1)

    def _alike(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
        """Sequences of one length, (S, heads, T, size), with all keys and values that they see; returns rows, S T."""
        c, count, total = self.config, q.shape[2], keys.shape[2]
        window, mask = c.windows[self.layer], None
        if start or (window is not None and total > window):
            distance = torch.arange(start, total, device=q.device)[:, None] - torch.arange(total, device=q.device)[None]
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
        y = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, scale=c.query_scale, enable_gqa=True
        )
        return y.transpose(1, 2).reshape(len(q) * count, -1)


class Mlp(Group):
    """Norm, gated MLP and the residual connection."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        layer: int,
        scheme: str,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config, source, layer, dtype, device)
        self.gate_up = self._packed(("mlp.gate_proj", "mlp.up_proj"), scheme)
        self.down = self._packed(("mlp.down_proj",), scheme)
        self.norm = self._norm("pre_feedforward_layernorm" if config.gemma else "post_attention_layernorm")
        self.after = self._norm("post_feedforward_layernorm") if config.gemma else None

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        """The matrices."""
        return self.gate_up, self.down

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        return self.gate_up.bytes + self.down.bytes + self.norm.bytes + (self.after.bytes if self.after else 0)

    def reserve(self, pages: int, kv_bits: int | None = None) -> None:
        """Nothing: an MLP keeps no state."""

    def wipe(self, pages: Sequence[int]) -> None:
        """Nothing: an MLP keeps no state."""

    def __call__(self, stream: Residual, layout: Layout) -> Residual:
        """The hidden states after the MLP."""
        normed, x_NH = self.norm.of(stream, layout, self.gate_up)
        y = _product(self._gated(normed, layout), self.down, layout)
        return Residual(x_NH, y if self.after is None else layout.apart(self.after, y))

    def _gated(self, normed: torch.Tensor | RoundedRows, layout: Layout) -> torch.Tensor:
        """The gate times what it lets through, (N, inner)."""
        by_gelu, packed = self.config.gemma, self.gate_up.packed
        is_wide = activations_of(self.gate_up, layout.precision.activations) == WIDE
        if isinstance(normed, torch.Tensor) and packed is not None and is_wide:
            gated = gated_linear(normed, packed, by_gelu=by_gelu, reproducible=bool(layout.pieces))
            if gated is not None:
                return gated
        gate = decoder.gelu_gate if by_gelu else decoder.silu_gate
        return layout.apart(gate, _product(normed, self.gate_up, layout))


class Embedding:
    """Token numbers to vectors."""

    def __init__(
        self, config: DecoderConfig, source: WeightSource, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape, parts = row_parts(source, ["model.embed_tokens.weight"], device)
        self.weight = join_parts(parts, shape, dtype)
        self._scale = torch.tensor(math.sqrt(config.hidden), dtype=dtype, device=device) if config.gemma else None

    def __call__(self, tokens_N: torch.Tensor) -> torch.Tensor:
        """The vectors (N, H) of tokens."""
        x = F.embedding(tokens_N, self.weight)
        return x if self._scale is None else x * self._scale


class Head:
    """The last norm and the scores of the next token; its matrix may be in a scheme, beside the embedding."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        dtype: torch.dtype,
        embedding: Embedding | None,
        device: torch.device | str = "cpu",
        scheme: str | None = None,
    ) -> None:
        norm = source.read("model.norm.weight").to(device, dtype)
        self.norm = Norm(norm, config.epsilon, gemma=config.gemma)
        name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        self.weight: torch.Tensor | PackedWeight
        if config.tied and embedding is not None:
            if scheme is None:
                self.weight = embedding.weight  # one copy where both ends are here
                return
            source = StateSource({name: embedding.weight})
        shape, parts = row_parts(source, [name], device)
        if scheme is None:
            self.weight = join_parts(parts, shape, dtype)
        else:
            self.weight = pack_parts((part.to(dtype) for part in parts), shape, scheme)

    def __call__(self, x_SH: torch.Tensor) -> torch.Tensor:
        """The scores (S, vocabulary) of every token."""
        x_SH = self.norm(x_SH)
        return linear(x_SH, self.weight) if isinstance(self.weight, PackedWeight) else F.linear(x_SH, self.weight)


def _frequencies(rotary: Rotary, size: int) -> torch.Tensor:
    frequencies = 1.0 / (rotary.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if rotary.llama3 is None:
        return frequencies / rotary.factor
    low, high, context = rotary.llama3
    wavelength = 2 * math.pi / frequencies
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / rotary.factor + smooth * frequencies
