"""What is trained: models, and batches of real text and of rendered characters. Nothing is downloaded.

Axis letters: B batch, S sequence, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.runtimes.torch.demo import Gpt, GptConfig, standard_library_text

Batch = tuple[Tensor, ...]
MASKED = -100
"""Label of a position that counts in no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with its data.

    Attributes:
        name: For the record.
        make: A freshly initialised model that returns its loss, after the global seed was set.
        batch: A training batch of a seed, always the same.
        held_out: Batches that no training batch shares a file or a font with.
        optimizer: A fresh optimizer of a model, at the learning rate that training uses.
        what: Model and data in words.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    held_out: Callable[[int], list[Batch]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    what: str

    def model(self, seed: int, device: torch.device) -> nn.Module:
        """Initialised from a seed, in training mode, on a device."""
        torch.manual_seed(seed)
        return self.make().to(device).train()


def adamw(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """AdamW as language models are trained."""
    return lambda model: torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=_on_cuda(model)
    )


def sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """SGD with momentum as image models are trained."""
    return lambda model: torch.optim.SGD(
        model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, fused=_on_cuda(model)
    )


def _on_cuda(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


# -- text ------------------------------------------------------------------------------------------------------------


def gpt(device: torch.device, config: GptConfig, batch: int, *, name: str = "gpt", rate: float = 6e-4) -> Subject:
    """A byte-level language model over the sources of Python's standard library."""
    texts = [text.to(device) for text in standard_library_text(max_bytes=32 << 20)]
    offsets = torch.arange(config.context + 1, device=device)

    def window(text: Tensor, generator: torch.Generator, rows: int) -> Batch:
        starts = torch.randint(0, len(text) - len(offsets), (rows, 1), generator=generator).to(device)
        found = text[starts + offsets].long()
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def held_out(count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        return [window(texts[1], generator, batch) for _ in range(count)]

    size = sum(p.numel() for p in Gpt(config).parameters())
    return Subject(
        name=name,
        make=lambda: Gpt(config),
        batch=lambda seed: window(texts[0], torch.Generator().manual_seed(seed + 1000), batch),
        held_out=held_out,
        optimizer=adamw(rate),
        what=f"decoder-only transformer, {size / 1e6:.1f} M parameters ({config.layers} layers, width {config.width}), "
        f"bytes of Python's standard library ({len(texts[0]) / 1e6:.1f} MB, every tenth file held out), "
        f"{batch} x {config.context} bytes a step",
    )


def _words(text: Tensor, vocabulary: int) -> Tensor:
    """Words and marks of a text as numbers: a checksum each, so that no vocabulary has to be kept."""
    found = re.findall(rb"\w+|[^\w\s]", bytes(text.cpu().numpy().tobytes()))
    return torch.tensor([1000 + zlib.crc32(word) % (vocabulary - 1000) for word in found])


class Masked(nn.Module):
    """BERT with its masked-language-model loss; labels come with the batch."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import BertForMaskedLM

        self.bert = BertForMaskedLM(config)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """The loss over masked words."""
        logits = self.bert(input_ids=tokens_BS).logits
        return F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), ignore_index=MASKED)


def bert(device: torch.device, *, tiny: bool, batch: int, length: int) -> Subject:
    """BERT-base, without dropout, on words of the same sources, 15 % of them masked."""
    from transformers import BertConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= {"vocab_size": 3000}
    config = BertConfig(**(sizes if tiny else {}), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    parts = [_words(text, config.vocab_size).to(device) for text in standard_library_text(max_bytes=4 << 20)]
    offsets = torch.arange(length, device=device)

    def window(words: Tensor, generator: torch.Generator) -> Batch:
        starts = torch.randint(0, len(words) - length, (batch, 1), generator=generator).to(device)
        tokens = words[starts + offsets]
        masked = (torch.rand(tokens.shape, generator=generator) < 0.15).to(device)
        return tokens.masked_fill(masked, 103), tokens.masked_fill(~masked, MASKED)

    def held_out(count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        return [window(parts[1], generator) for _ in range(count)]

    return Subject(
        name="bert",
        make=lambda: Masked(config),
        batch=lambda seed: window(parts[0], torch.Generator().manual_seed(seed + 1000)),
        held_out=held_out,
        optimizer=adamw(1e-4),
        what=f"BERT {'of 2 layers' if tiny else 'base'}, masked words of Python's standard library, {batch} x {length}",
    )


# -- characters ------------------------------------------------------------------------------------------------------

FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique", "DejaVuSerif")
FONTS += ("DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique")
HELD_OUT_FONTS = ("DejaVuSerif-Italic", "DejaVuSerif-BoldItalic", "DejaVuSansMono-BoldOblique")
_RANGES = ((0x21, 0x7F), (0xC0, 0x100), (0x391, 0x3CA), (0x410, 0x450))


def characters() -> list[str]:
    """Latin, Greek and Cyrillic characters, those left out that look like one before them."""
    found = [chr(code) for first, end in _RANGES for code in range(first, end) if chr(code).isprintable()]
    alike = set("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧοАВЕЗКМНОРСТХаеорсухνκ") | {"\u03a2", "|"}
    return [character for character in found if character not in alike]


def render(fonts: tuple[str, ...], classes: list[str], size: int) -> Tensor:
    """Every character in every font, (fonts, classes, size, size) in [0, 1], centred."""
    import matplotlib as mpl
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    pages = torch.zeros(len(fonts), len(classes), size, size)
    for i, name in enumerate(fonts):
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), round(size * 0.62))
        for j, character in enumerate(classes):
            image = Image.new("L", (size, size))
            left, top, right, bottom = font.getbbox(character)
            place = ((size - left - right) / 2, (size - top - bottom) / 2)
            ImageDraw.Draw(image).text(place, character, fill=255, font=font)
            pages[i, j] = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size) / 255
    return pages


class Images:
    """Characters turned, stretched, moved, faded and covered with noise, drawn anew for every batch."""

    def __init__(self, fonts: tuple[str, ...], classes: list[str], size: int, device: torch.device) -> None:
        self._pages = render(fonts, classes, size).to(device)

    def draw(self, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Images (count, 1, size, size) and their classes."""
        pages = self._pages
        device = pages.device
        labels = torch.randint(0, pages.shape[1], (count,), generator=generator)
        fonts = torch.randint(0, pages.shape[0], (count,), generator=generator)
        numbers = torch.rand((count, 8), generator=generator) * 2 - 1
        noise = torch.randn((count, 1, *pages.shape[2:]), generator=generator).to(device)
        angle, stretch, shear = 0.25 * numbers[:, 0], 1 + 0.25 * numbers[:, 1:3], 0.25 * numbers[:, 3]
        cos, sin = angle.cos(), angle.sin()
        rows = [
            torch.stack([cos * stretch[:, 0], -sin + shear, 0.2 * numbers[:, 4]], 1),
            torch.stack([sin, cos * stretch[:, 1], 0.2 * numbers[:, 5]], 1),
        ]
        x = pages[fonts.to(device), labels.to(device)].unsqueeze(1)
        grid = F.affine_grid(torch.stack(rows, 1).to(device), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        contrast = (0.75 + 0.5 * numbers[:, 6]).to(device).view(-1, 1, 1, 1)
        return x * contrast + 0.35 * noise, labels.to(device)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch normalization around a shortcut."""

    def __init__(self, inner: int, entering: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(entering, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or entering != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        """As ResNet has it."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of bottlenecks; (3, 4, 6, 3) blocks of width 64 are ResNet-50."""

    def __init__(self, blocks: tuple[int, ...], width: int, channels: int, classes: int, *, large: bool) -> None:
        super().__init__()
        # Small images keep their size in the first convolution, as in the networks for them.
        stem = nn.Conv2d(channels, width, 7 if large else 3, 2 if large else 1, 3 if large else 1, bias=False)
        self.stem, self.norm, self.large = stem, nn.BatchNorm2d(width), large
        layers: list[nn.Module] = []
        entering = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if block == 0 and stage > 0 else 1
                layers.append(Bottleneck(width << stage, entering, stride))
                entering = 4 * (width << stage)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(entering, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def logits(self, x: Tensor) -> Tensor:
        """(B, classes)."""
        x = torch.relu(self.norm(self.stem(x)))
        if self.large:
            x = F.max_pool2d(x, 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """In training the loss; in evaluation the share of right answers."""
        logits = self.logits(x)
        if self.training:
            return F.cross_entropy(logits, labels)
        return (logits.argmax(1) == labels).float().mean()


def cnn(
    device: torch.device,
    blocks: tuple[int, ...],
    width: int,
    *,
    batch: int,
    size: int,
    large: bool,
    rate: float,
    classes: int | None = None,
) -> Subject:
    """A residual network that reads characters."""
    shown = characters()[:classes]
    train, held = (Images(fonts, shown, size, device) for fonts in (FONTS, HELD_OUT_FONTS))
    channels = 3 if large else 1

    def draw(images: Images, generator: torch.Generator) -> Batch:
        x, labels = images.draw(generator, batch)
        return x.expand(-1, channels, -1, -1).contiguous(), labels

    def held_out(count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        return [draw(held, generator) for _ in range(count)]

    make = lambda: ResNet(blocks, width, channels, len(shown), large=large)  # noqa: E731
    size_of = sum(p.numel() for p in make().parameters())
    layers = 3 * sum(blocks) + 2
    return Subject(
        name="resnet50" if large else "cnn",
        make=make,
        batch=lambda seed: draw(train, torch.Generator().manual_seed(seed + 1000)),
        held_out=held_out,
        optimizer=sgd(rate),
        what=f"residual network of {layers} layers and {size_of / 1e6:.1f} M parameters with batch normalization, "
        f"{len(shown)} characters in {len(FONTS)} fonts, drawn anew for every batch, {len(HELD_OUT_FONTS)} fonts "
        f"held out, {batch} images of {size} x {size} a step",
    )


# -- training a little -----------------------------------------------------------------------------------------------


def train_briefly(subject: Subject, model: nn.Module, steps: int, first: int = 0) -> torch.optim.Optimizer:
    """Train in full precision so that activations are those of a network that has learned; returns the optimizer."""
    optimizer = subject.optimizer(model)
    for number in range(first, first + steps):
        optimizer.zero_grad(set_to_none=True)
        model(*subject.batch(number)).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def subject_of(name: str, device: torch.device, *, scale: str) -> Subject:
    """The subjects by name: ``bert``, ``resnet50``, ``resnet50-adamw``, ``gpt``, ``small-gpt``, ``cnn``.

    ResNet-50 by its own optimizer stays at chance for hundreds of steps; by AdamW it learns.

    ``scale`` is ``full`` for a card, ``small`` for a CPU in minutes, ``tiny`` for a test.
    """
    if name == "bert":
        return bert(
            device, tiny=scale != "full", batch=2 if scale == "tiny" else 8, length=16 if scale == "tiny" else 128
        )
    if name == "resnet50":
        if scale == "tiny":
            return cnn(device, (1, 1), 8, batch=4, size=32, large=True, rate=0.05)
        return cnn(device, (3, 4, 6, 3), 64, batch=32 if scale == "full" else 8, size=64, large=True, rate=0.05)
    if name == "resnet50-adamw":
        return dataclasses.replace(subject_of("resnet50", device, scale=scale), name=name, optimizer=adamw(1e-3))
    if name == "cnn":
        return cnn(device, **_CNNS[scale])
    if name in _GPTS:
        config, batch, rate = _GPTS[name][scale]
        return gpt(device, config, batch, name=name, rate=rate)
    raise SystemExit(f"no subject {name!r}: allowed are bert, resnet50, resnet50-adamw, cnn, {', '.join(_GPTS)}")


_TINY = (GptConfig(width=32, layers=2, context=32), 4, 6e-4)
_GPTS: dict[str, dict[str, tuple[GptConfig, int, float]]] = {
    "gpt": {
        "full": (GptConfig(width=512, heads=8, layers=8, context=256), 16, 6e-4),
        "small": (GptConfig(width=64, heads=4, layers=3, context=32), 16, 3e-3),
        "tiny": _TINY,
    },
    "small-gpt": {
        "full": (GptConfig(width=192, heads=6, layers=6, context=128), 16, 6e-4),
        "small": (GptConfig(width=64, heads=4, layers=4, context=32), 16, 2e-3),
        "tiny": _TINY,
    },
}
_CNNS: dict[str, dict[str, Any]] = {
    "full": {"blocks": (2, 2, 2), "width": 32, "batch": 128, "size": 24, "large": False, "rate": 0.1, "classes": 94},
    "small": {"blocks": (1, 1, 1), "width": 12, "batch": 48, "size": 16, "large": False, "rate": 0.1, "classes": 40},
    "tiny": {"blocks": (1, 1), "width": 8, "batch": 16, "size": 16, "large": False, "rate": 0.05},
}
