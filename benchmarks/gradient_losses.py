"""Training losses under schemes of compressed gradients, beside FP32, over seeds.

Eight workers are simulated in one process: each computes the gradient of its own batch, and the flat gradients are
reduced by the codec that the communication hook uses. A small GPT learns text of the standard library, a small CNN
blurred class patterns, both with SGD and with Adam. A run counts with its mean loss over the last quarter of its steps.

    python benchmarks/gradient_losses.py                  # writes benchmarks/results/gradient-losses.json
    python benchmarks/gradient_losses.py --steps 8 --seeds 2 --output /tmp/smoke.json
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from results_head import processors, results_head
from torch import Tensor, nn

from qsync_opt.gradients import Scheme, Transport, scheme
from qsync_opt.io import write_json
from qsync_opt.kernels.gradients import Codec, Encoded, Layout
from qsync_opt.kernels.quantize import stream_key
from qsync_opt.runtimes.torch.demo import Batches, Gpt, GptConfig, standard_library_text

HERE = Path(__file__).parent
WORKERS = 8
SUBJECTS = ("FP32", "sum8", "two8", "linear")
RATES = {("GPT", "SGD"): 0.3, ("GPT", "Adam"): 3e-3, ("CNN", "SGD"): 0.1, ("CNN", "Adam"): 3e-3}
CLASSES, PIXELS = 8, 12


def reduced(gradients: list[Tensor], name: str, codec: Codec, seed: int, step: int) -> Tensor:
    """The mean of the workers' flat gradients as the scheme gives it."""
    if name == "FP32":
        return torch.stack(gradients).mean(0)
    each = scheme(name)
    assert isinstance(each, Scheme)
    keys = [stream_key(seed, step, worker) for worker in range(2 * WORKERS)]
    elements = gradients[0].numel()
    if each.transport is Transport.SUM:
        block, levels = each.block or elements, each.levels(WORKERS)
        layout = Layout(width=each.width, lanes=each.lanes, block=block)
        scales = torch.stack([codec.sum_scales(g, block) for g in gradients]).amax(0)
        codes = [codec.encode_sum(g, scales, levels, layout, k) for g, k in zip(gradients, keys, strict=False)]
        total = torch.stack(codes).sum(0, dtype=codes[0].dtype)
        return codec.decode_sum(total, scales, levels, WORKERS, layout, elements)
    block = each.block or 4
    sent = [codec.encode(g, "int8", block, k) for g, k in zip(gradients, keys, strict=False)]
    codes, scales = (torch.stack(parts) for parts in zip(*sent, strict=True))
    mean = codec.reduce(codes, scales, "int8", block, keys[WORKERS])
    return codec.decode(Encoded(*mean), "int8", block)


@functools.cache
def _text() -> Tensor:
    return standard_library_text(max_bytes=1 << 20)[0]


def gpt(seed: int) -> tuple[nn.Module, Iterator[Callable[[nn.Module], Tensor]]]:
    """A small GPT, and the loss of one batch after another."""
    torch.manual_seed(seed)
    config = GptConfig(vocabulary=256, context=32, width=32, heads=2, layers=2)
    batches = Batches(_text(), batch=2, context=config.context, seed=seed)

    def losses() -> Iterator[Callable[[nn.Module], Tensor]]:
        while True:
            batch = batches.next()
            yield lambda model, batch=batch: model(*batch)

    return Gpt(config), losses()


def cnn(seed: int) -> tuple[nn.Module, Iterator[Callable[[nn.Module], Tensor]]]:
    """A small CNN, and the loss of one batch after another."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * (PIXELS // 4) ** 2, CLASSES),
    )  # fmt: skip
    patterns = torch.randn(CLASSES, 1, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)

    def losses() -> Iterator[Callable[[nn.Module], Tensor]]:
        while True:
            y = torch.randint(0, CLASSES, (8,), generator=draw)
            x = patterns[y] + 3.0 * torch.randn(8, 1, PIXELS, PIXELS, generator=draw)
            yield lambda model, x=x, y=y: nn.functional.cross_entropy(model(x), y)

    return model, losses()


MODELS = {"GPT": gpt, "CNN": cnn}


def trained(kind: str, optimizer_name: str, subject: str, seed: int, steps: int) -> list[float]:
    """The mean loss of the workers at every step."""
    model, losses = MODELS[kind](seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    make = torch.optim.SGD if optimizer_name == "SGD" else torch.optim.Adam
    optimizer, codec, result = make(parameters, lr=RATES[kind, optimizer_name]), Codec(), []
    for step in range(steps):
        gradients, total = [], 0.0
        for _ in range(WORKERS):
            loss = next(losses)(model)
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
            total += float(loss.detach()) / WORKERS
        mean = reduced(gradients, subject, codec, seed, step)
        for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        result.append(total)
    return result


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each combination and scheme: how far its loss is from that of FP32, in standard deviations."""
    rows = []
    for kind, optimizer in RATES:
        own = [r for r in records if (r["model"], r["optimizer"]) == (kind, optimizer)]
        final = {s: [r["final_loss"] for r in own if r["subject"] == s] for s in SUBJECTS}
        spread = statistics.stdev(final["FP32"])
        for subject in SUBJECTS[1:]:
            # The same seed draws the same weights and batches, so that differences are taken pair by pair.
            differences = [a - b for a, b in zip(final[subject], final["FP32"], strict=True)]
            mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
            is_worse = mean > max(2 * error, 0.0)
            rows.append(
                {
                    "what": f"loss of {kind} with {optimizer} under {subject} against FP32",
                    "asked": "measurably worse" if subject == "linear" else "within seed noise",
                    "measured": round(mean, 5),
                    "met": is_worse if subject == "linear" else abs(mean) <= spread,
                    "note": f"mean of {len(differences)} differences, whose standard error is {error:.5f}; the "
                    f"standard deviation of FP32 over seeds is {spread:.5f}",
                }
            )
    return rows


def main() -> None:
    """Train and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gradient-losses.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for kind, optimizer in RATES:
        for subject in SUBJECTS:
            for seed in range(arguments.seeds):
                losses = trained(kind, optimizer, subject, seed, arguments.steps)
                last = losses[-max(arguments.steps // 4, 1) :]
                record = {"model": kind, "optimizer": optimizer, "subject": subject, "seed": seed}
                records.append(record | {"first_loss": losses[0], "final_loss": statistics.mean(last)})
    data = {
        **results_head(processors(), {"torch": torch.__version__}),
        "settings": {"workers": WORKERS, "steps": arguments.steps, "seeds": arguments.seeds},
        "asked": asked(records),
        "records": records,
    }
    write_json(arguments.output, data)
    for each in data["asked"]:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} ({each['note']})")


if __name__ == "__main__":
    main()
