"""Models of unlike kinds with random weights, a batch and a loss: sizes that fill a card and sizes bound by the host.

None of them is used anywhere else: nothing in the package was tuned on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from example_models import resnet
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in training mode on the CPU, one batch as keyword arguments, and the loss of its output.

    ``loss`` is None where the model returns it.
    """

    model: nn.Module
    batch: Mapping[str, Any]
    loss: Loss | None = None


def _tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(2, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def square_error(output: Any) -> Tensor:
    """Mean square of an output: a loss that needs no target."""
    return output.float().square().mean()  # type: ignore[no-any-return]


def llama(full: bool) -> Subject:
    """Decoder with rotary positions, grouped key heads and gated feed-forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 2048 if full else 256
    config = LlamaConfig(
        vocab_size=32000 if full else 1000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=6 if full else 4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        use_cache=False,
    )
    ids = _tokens(config.vocab_size, *((8, 1024) if full else (4, 128)))
    return Subject(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


def t5(full: bool) -> Subject:
    """Encoder and decoder with relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    width = 768 if full else 128
    config = T5Config(
        vocab_size=32000 if full else 1000,
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=6 if full else 2,
        num_heads=width // 64,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    shape = (16, 512) if full else (8, 64)
    ids = _tokens(config.vocab_size, *shape)
    return Subject(T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids})


def bert(full: bool) -> Subject:
    """Encoder with masked-language head."""
    from transformers import BertConfig, BertForMaskedLM

    width = 768 if full else 128
    config = BertConfig(
        vocab_size=30522 if full else 1000,
        hidden_size=width,
        num_hidden_layers=8 if full else 4,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = _tokens(config.vocab_size, *((32, 256) if full else (8, 64)))
    return Subject(BertForMaskedLM(config), {"input_ids": ids, "labels": ids})


def vit(full: bool) -> Subject:
    """Vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    width = 768 if full else 192
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=12 if full else 4,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        image_size=224 if full else 64,
        num_labels=1000,
    )
    count = 64 if full else 8
    return Subject(
        ViTForImageClassification(config),
        {"pixel_values": _noise(count, 3, config.image_size, config.image_size), "labels": _tokens(1000, count)},
    )


def convolutional(full: bool) -> Subject:
    """ResNet-50, without depthwise convolutions."""
    count, side = (64, 224) if full else (8, 64)
    labels = _tokens(1000, count)
    return Subject(
        resnet() if full else resnet((1, 1, 1, 1), 32),
        {"input": _noise(count, 3, side, side)},
        _CrossEntropy(labels),
    )


class _CrossEntropy:
    """Cross entropy of logits, with labels that move to their device."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __call__(self, logits: Tensor) -> Tensor:
        self.labels = self.labels.to(logits.device)
        return F.cross_entropy(logits.float(), self.labels)


class _DepthwiseBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


def depthwise(full: bool) -> Subject:
    """Convolutional network with depthwise 7 x 7 convolutions, as ConvNeXt has them."""
    widths, depths, count, side = ((96, 192, 384, 768), (2, 2, 4, 2), 64, 224) if full else ((32, 64), (1, 1), 8, 64)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=4)]
    for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        layers += [_DepthwiseBlock(width) for _ in range(depth)]
        if index + 1 < len(widths):
            layers.append(nn.Conv2d(width, widths[index + 1], 2, stride=2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000)]
    return Subject(nn.Sequential(*layers), {"input": _noise(count, 3, side, side)}, _CrossEntropy(_tokens(1000, count)))


class _Double(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
        )


class _UNet(nn.Module):
    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(_Double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.mix = nn.ModuleList(_Double(2 * a, a) for a in widths[-2::-1])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        kept, x = [], image
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, mix, beside in zip(self.up, self.mix, kept[-2::-1], strict=True):
            x = mix(torch.cat([up(x), beside], 1))
        return self.head(x)  # type: ignore[no-any-return]


def unet(full: bool) -> Subject:
    """U-Net with group normalization and transposed convolutions."""
    width, levels, count, side = (64, 4, 16, 128) if full else (32, 3, 8, 64)
    return Subject(_UNet(width, levels), {"image": _noise(count, 3, side, side)}, square_error)


class _Conformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.conv_norm, self.ff_norm = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.point = nn.Conv1d(width, width, 1)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.heads = width // 64

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        y = F.glu(self.gate(self.conv_norm(x).transpose(1, 2)), 1)
        x = x + self.point(F.silu(self.depthwise(y))).transpose(1, 2)
        return x + self.ff(self.ff_norm(x))  # type: ignore[no-any-return]


class _Audio(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(1, width, 10, stride=5), nn.GELU(), nn.Conv1d(width, width, 8, stride=4), nn.GELU(),
            nn.Conv1d(width, width, 8, stride=4), nn.GELU(),
        )  # fmt: skip
        self.blocks = nn.Sequential(*(_Conformer(width) for _ in range(layers)))
        self.head = nn.Linear(width, 64)

    def forward(self, wave: Tensor) -> Tensor:
        return self.head(self.blocks(self.front(wave).transpose(1, 2)))  # type: ignore[no-any-return]


def audio(full: bool) -> Subject:
    """Waveforms: strided convolutions, then attention with depthwise convolutions."""
    width, layers, count, samples = (512, 8, 16, 80000) if full else (128, 2, 4, 16000)
    return Subject(_Audio(width, layers), {"wave": _noise(count, 1, samples)}, square_error)


class _Recommender(nn.Module):
    def __init__(self, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
        index = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", index[0] * (tables + 1) + index[1])

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.dense(numbers)
        rows = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (rows @ rows.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([dense, products], 1))  # type: ignore[no-any-return]


def recommender(full: bool) -> Subject:
    """Embedding tables, products of pairs, and layers of different widths."""
    tables, rows, width, hidden, count = (26, 20000, 128, 2048, 16384) if full else (8, 1000, 32, 128, 256)
    return Subject(
        _Recommender(tables, rows, width, hidden),
        {"numbers": _noise(count, 13), "ids": _tokens(rows, count, tables)},
        square_error,
    )


def experts(full: bool) -> Subject:
    """Decoder whose feed-forward layers are mixtures of experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    width = 1024 if full else 128
    config = MixtralConfig(
        vocab_size=8000 if full else 1000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4 if full else 2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        num_local_experts=4,
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    ids = _tokens(config.vocab_size, *((2, 512) if full else (2, 64)))
    return Subject(model, {"input_ids": ids, "labels": ids})


class _DiTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.modulation = nn.Linear(width, 6 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + a) + b).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        x = x + c * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + f * self.ff(self.norm(x) * (1 + d) + e)  # type: ignore[no-any-return]


class _DiT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, 2, stride=2)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_DiTBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, latent: Tensor, time: Tensor) -> Tensor:
        x, condition = self.patch(latent).flatten(2).transpose(1, 2), self.time(time)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)  # type: ignore[no-any-return]


def diffusion(full: bool) -> Subject:
    """Diffusion transformer with adaptive normalization."""
    width, layers, count, side = (768, 8, 32, 32) if full else (128, 2, 8, 16)
    return Subject(
        _DiT(width, layers), {"latent": _noise(count, 4, side, side), "time": _noise(count, 1)}, square_error
    )


class _Recurrent(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])  # type: ignore[no-any-return]


def recurrent(full: bool) -> Subject:
    """Language model of LSTM layers."""
    vocabulary, width, shape = (8000, 1024, (64, 128)) if full else (500, 128, (8, 32))
    return Subject(_Recurrent(vocabulary, width), {"ids": _tokens(vocabulary, *shape)}, square_error)


KINDS: Mapping[str, Callable[[bool], Subject]] = {
    "decoder": llama,
    "encoder-decoder": t5,
    "encoder": bert,
    "vit": vit,
    "convolutional": convolutional,
    "depthwise": depthwise,
    "u-net": unet,
    "audio": audio,
    "recommender": recommender,
    "experts": experts,
    "diffusion": diffusion,
    "recurrent": recurrent,
}
SIZES: Mapping[str, bool] = {"full": True, "small": False}


def subject(name: str) -> Subject:
    """The subject of a name such as ``"u-net full"``, with weights from a fixed seed."""
    kind, _, size = name.rpartition(" ")
    torch.manual_seed(0)
    made = KINDS[kind](SIZES[size])
    made.model.train()
    return made
