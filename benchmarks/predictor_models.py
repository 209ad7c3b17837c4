"""Models of the predictor's benchmark, each at two batch sizes, and their captured graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from example_models import Classifier, resnet
from torch import nn

from qsync_opt.model import OpGraph, load_graph, save_graph
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig

SMALL, MEDIUM, LARGE = "small", "medium", "large"
BATCHES = {
    "gpt-110m": {SMALL: 4, MEDIUM: 8, LARGE: 16},
    "bert-base": {SMALL: 16, MEDIUM: 32, LARGE: 64},
    "vit-base": {SMALL: 16, MEDIUM: 64, LARGE: 128},
    "resnet50": {SMALL: 32, LARGE: 64},
    "gpt-short": {SMALL: 4, LARGE: 32},
    "vit-short": {SMALL: 16, LARGE: 128},
    "bert-short": {SMALL: 16, LARGE: 128},
    "gpt-tiny": {SMALL: 2, LARGE: 4},
}
"""Samples per worker: few for slow partitions, so that a step does not last seconds, many for fast ones."""
GPT = GptConfig(vocabulary=32768, width=768, heads=12, layers=12, context=512)
GPT_SHORT = dataclasses.replace(GPT, layers=2)
"""With the suffix -short: two layers, because every plan is compiled anew."""
GPT_TINY = GptConfig(vocabulary=64, width=64, heads=2, layers=2, context=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model at a batch size."""

    model: str
    size: str

    @property
    def batch(self) -> int:
        """Samples per worker."""
        return BATCHES[self.model][self.size]

    @property
    def name(self) -> str:
        """Of the model and the batch."""
        return f"{self.model}-b{self.batch}"

    def build(self, device: torch.device | str) -> tuple[nn.Module, Mapping[str, Any]]:
        """The model in training mode and one batch."""
        torch.manual_seed(0)
        with torch.device(device):
            model, kwargs = _build(self.model, self.batch)
        return model.train(), kwargs

    def graph(self, folder: Path | None) -> OpGraph:
        """The captured graph, from ``folder`` if it is there, else captured (and kept there)."""
        path = None if folder is None else folder / f"{self.name}.json"
        if path is not None and path.is_file():
            return load_graph(path)
        model, kwargs = self.build("cpu")
        graph = capture(model, (), kwargs, name=self.name)
        if path is not None:
            save_graph(graph, path)
        return graph


def _build(name: str, batch: int) -> tuple[nn.Module, Mapping[str, Any]]:
    layers = {"num_hidden_layers": 2} if name.endswith("-short") else {}
    if name in ("gpt-110m", "gpt-short", "gpt-tiny"):
        config = {"gpt-110m": GPT, "gpt-short": GPT_SHORT, "gpt-tiny": GPT_TINY}[name]
        tokens = torch.randint(0, config.vocabulary, (batch, config.context))
        return Gpt(config), {"tokens_BS": tokens, "targets_BS": tokens}
    if name in ("bert-base", "bert-short"):
        import transformers

        bert = transformers.BertConfig(**layers)
        tokens = torch.randint(5, bert.vocab_size, (batch, 128))
        kwargs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        return transformers.BertForMaskedLM(bert), kwargs
    if name in ("vit-base", "vit-short"):
        import transformers

        vit = transformers.ViTConfig(num_labels=1000, **layers)
        images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
        return transformers.ViTForImageClassification(vit), {"pixel_values": images, "labels": labels}
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    return Classifier(resnet()), {"images": images, "labels": labels}
