"""The indicator of harm beside the measured divergence, by group, on a real model and on text of Python's manual.

    python benchmarks/serving_harm.py MODEL.gguf [--pieces 8] [--tokens 32] [--scheme W4] [--output FILE]

Indicator and divergence are measured on different text. ``groups`` has both in nats for each token.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from pathlib import Path

import torch
from rank_correlation import spearman
from results_head import processors, results_head

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.serving import load_tokenizer, measure_harm, open_model, output_divergence

_CHARACTERS = 40_000


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder or .gguf file with a tokenizer")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--scheme", default="W4")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "serving-harm.json"))
    options = parser.parse_args()
    head = results_head(processors(), {"torch": torch.__version__})
    tokenizer = load_tokenizer(options.model, open_model(options.model)[0])
    if tokenizer is None:
        raise SystemExit(f"{options.model} has no tokenizer")
    topics = pydoc_data.topics.topics
    tokens = tokenizer.encode(" ".join(topics[name] for name in sorted(topics))[:_CHARACTERS])
    stride = len(tokens) // (2 * options.pieces)
    pieces = [tokens[k * stride : k * stride + options.tokens] for k in range(2 * options.pieces)]
    began = time.perf_counter()
    harm = measure_harm(options.model, pieces[0::2], (options.scheme,)).groups
    middle = time.perf_counter()
    divergence = output_divergence(options.model, pieces[1::2], options.scheme)
    ended = time.perf_counter()
    groups = {name: {"indicator": harm[name][options.scheme], "measured": divergence[name]} for name in harm}
    layers = len(groups) // 2

    def pairs(names: list[str]) -> float | None:
        return spearman([groups[n]["indicator"] for n in names], [groups[n]["measured"] for n in names])

    by_layer = [
        [sum(groups[f"{k}.{kind}"][key] for kind in ("attn", "mlp")) for k in range(layers)]
        for key in ("indicator", "measured")
    ]
    found = {
        "groups": pairs(list(groups)),
        "attention": pairs([f"{k}.attn" for k in range(layers)]),
        "MLP": pairs([f"{k}.mlp" for k in range(layers)]),
        "layers": spearman(*by_layer),
    }
    rows = [
        {"what": f"rank correlation of indicator and measured divergence, {options.scheme}, {what}",
         "asked": ">= 0.9", "measured": round(value, 3), "met": value >= 0.9, "note": ""}
        for what, value in found.items()
        if value is not None
    ]  # fmt: skip
    record = {
        "model": Path(options.model).name, "scheme": options.scheme, "pieces": options.pieces, "tokens": options.tokens,
        "indicator_s": round(middle - began, 1), "divergence_s": round(ended - middle, 1), "groups": groups,
    }  # fmt: skip
    write_json(options.output, {**head, "asked": rows, "records": [record]})
    for row in rows:
        print(f"{row['what']}: asked {row['asked']}, measured {row['measured']}")


if __name__ == "__main__":
    main()
