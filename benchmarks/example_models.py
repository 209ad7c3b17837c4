"""Models of known families, from a few layers to full size, with one batch of inputs each; nothing is downloaded.

For tests and benchmarks. The language and vision transformers are built from configurations of the
package ``transformers``, which must be installed; the convolutional networks are written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import NotInstalledError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model in training mode and the keyword arguments of one forward pass."""

    model: nn.Module
    kwargs: Mapping[str, Any]


class Classifier(nn.Module):
    """Images to cross-entropy loss: a feature extractor with a head, the loss inside."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss; ``images`` (batch, 3, height, width), ``labels`` (batch,)."""
        return nn.functional.cross_entropy(self.network(images), labels)


class Bottleneck(nn.Module):
    """The residual block of ResNet-50: 1x1, 3x3 and 1x1 convolutions, each with batch normalization."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, (batch, 4 * width, height / stride, width / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        result: torch.Tensor = self.relu(out)
        return result


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """Return ResNet-50, or a narrower or shallower relative of it.

    Source:
        He et al., Deep Residual Learning for Image Recognition, table 1, with the stride on the 3x3 convolution.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = width
    for stage, count in enumerate(blocks):
        inner = width << stage
        for position in range(count):
            layers.append(Bottleneck(channels, inner, stride=2 if stage and not position else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def vgg(
    plan: tuple[tuple[int, int], ...] = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)),
    hidden: int = 4096,
    pooled: int = 7,
    classes: int = 1000,
) -> nn.Module:
    """Return VGG-16 with batch normalization; ``plan`` has the convolutions and channels of every stage.

    Source:
        Simonyan and Zisserman, Very Deep Convolutional Networks, configuration D.
    """
    layers: list[nn.Module] = []
    channels = 3
    for count, width in plan:
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(pooled), nn.Flatten(), nn.Linear(channels * pooled * pooled, hidden)]
    head += [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, *head, nn.Linear(hidden, classes))


def _images(model: nn.Module, batch: int, size: int, classes: int) -> Example:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, size, size, generator=generator)
    labels = torch.randint(classes, (batch,), generator=generator)
    return Example(model=Classifier(model).train(), kwargs={"images": images, "labels": labels})


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise NotInstalledError("this example model needs transformers: pip install transformers") from None
    return transformers


# Sizes of the small relatives, in the words of the configurations.
_SMALL_ENCODER = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def _tokens(model: nn.Module, vocabulary: int, batch: int, length: int) -> Example:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, vocabulary, (batch, length), generator=generator)
    kwargs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    return Example(model=model.train(), kwargs=kwargs)


def _bert(small: bool) -> Example:
    package = _transformers()
    config = package.BertConfig(**(_SMALL_ENCODER | {"vocab_size": 64} if small else {}))
    return _tokens(package.BertForMaskedLM(config), config.vocab_size, 2, 8 if small else 128)


def _roberta(small: bool) -> Example:
    package = _transformers()
    config = package.RobertaConfig(
        **(_SMALL_ENCODER | {"vocab_size": 64} if small else {"max_position_embeddings": 514})
    )
    return _tokens(package.RobertaForMaskedLM(config), config.vocab_size, 2, 8 if small else 128)


def _gpt2(small: bool) -> Example:
    package = _transformers()
    config = package.GPT2Config(
        **(
            {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
            if small
            else {}
        )
    )
    return _tokens(package.GPT2LMHeadModel(config), config.vocab_size, 2, 8 if small else 128)


def _llama(small: bool) -> Example:
    package = _transformers()
    sizes = {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816}
    sizes |= _SMALL_ENCODER | {"num_attention_heads": 4, "vocab_size": 64} if small else {"vocab_size": 32000}
    config = package.LlamaConfig(**sizes, num_key_value_heads=sizes["num_attention_heads"] // 2, use_cache=False)
    return _tokens(package.LlamaForCausalLM(config), config.vocab_size, 2, 8 if small else 128)


def _vit(small: bool) -> Example:
    package = _transformers()
    sizes = _SMALL_ENCODER | {"image_size": 16, "patch_size": 8} if small else {}
    config = package.ViTConfig(**sizes, num_labels=10)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, config.image_size, config.image_size, generator=generator)
    kwargs = {"pixel_values": images, "labels": torch.tensor([1, 2])}
    return Example(model=package.ViTForImageClassification(config).train(), kwargs=kwargs)


def _resnet50(small: bool) -> Example:
    if small:
        return _images(resnet((1, 2), width=4, classes=10), batch=2, size=32, classes=10)
    return _images(resnet(), batch=2, size=224, classes=1000)


def _vgg16(small: bool) -> Example:
    if small:
        return _images(vgg(((1, 4), (2, 8)), hidden=16, pooled=2, classes=10), batch=2, size=16, classes=10)
    return _images(vgg(), batch=2, size=224, classes=1000)


_BUILDERS: dict[str, Callable[[bool], Example]] = {
    "bert-base": _bert,
    "roberta-base": _roberta,
    "gpt2": _gpt2,
    "llama": _llama,
    "vit-base": _vit,
    "resnet50": _resnet50,
    "vgg16-bn": _vgg16,
}

NAMES: tuple[str, ...] = tuple(_BUILDERS)
"""Names that ``example`` takes."""


def example(name: str, *, small: bool = False) -> Example:
    """Return a model of a known family with random weights and one batch.

    Args:
        name: One of ``NAMES``.
        small: Two layers of a few channels instead of the published size.

    Raises:
        UnsupportedError: No such name.
        NotInstalledError: It needs ``transformers``.
    """
    if name not in _BUILDERS:
        raise UnsupportedError(f"unknown example model {name!r}: allowed are {', '.join(NAMES)}")
    return _BUILDERS[name](small)
