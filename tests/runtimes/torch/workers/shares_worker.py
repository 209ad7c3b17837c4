"""One worker of the tests of unequal batches: trains a step in several ways, prints its gradients."""

import json
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import qsync_opt
from qsync_opt.runtimes.torch.ddp import process_group

BATCHES = (5, 2, 1)
IGNORED = -100


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(21, 6, 8, generator=generator)
    labels = torch.randint(0, 5, (21, 6), generator=generator)
    labels[torch.rand(21, 6, generator=generator) < 0.4] = IGNORED
    labels[7] = IGNORED  # the third rank's only sample of the first step
    return TensorDataset(inputs, labels)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()


def loss_of(model, inputs, labels, reduction="mean"):
    logits = model(inputs.double()).flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def difference(model, expected):
    return float((gradients(model) - expected).abs().max() / expected.abs().max())


def square(model, inputs):
    return model(inputs.double()).square().mean()


def run(rank):
    dataset = data()
    sampler = qsync_opt.ShareSampler(dataset, BATCHES, shuffle=False)
    steps = list(DataLoader(dataset, batch_sampler=sampler))
    whole, begin = [], 0
    for step in range(len(sampler)):
        size = sum(sampler.sizes(step))
        rows = torch.arange(begin, begin + size) % len(dataset)
        whole.append((dataset.tensors[0][rows], dataset.tensors[1][rows]))
        begin += size
    outcome = {"steps": len(steps), "sizes": [len(x) for x, _ in steps]}

    def expected(compute):
        model = network()
        compute(model)
        return gradients(model)

    for scheme in (None, "FP32", "BF16"):
        model = DistributedDataParallel(network())
        if scheme is not None:
            qsync_opt.compress_gradients(model, scheme)
        for step, ((inputs, labels), (all_inputs, all_labels)) in enumerate(zip(steps, whole, strict=True)):
            model.zero_grad()
            qsync_opt.global_mean(square(model, inputs), len(inputs)).backward()
            right = expected(lambda plain, all_inputs=all_inputs: square(plain, all_inputs).backward())
            outcome[f"samples, {scheme}, step {step}"] = difference(model, right)
            model.zero_grad()
            count = (labels != IGNORED).sum()
            mean = qsync_opt.global_mean(loss_of(model, inputs, labels, "sum"), count, summed=True)
            mean.backward()
            right = expected(lambda plain, x=all_inputs, y=all_labels: loss_of(plain, x, y).backward())
            outcome[f"tokens, {scheme}, step {step}"] = difference(model, right)
            losses = [torch.zeros_like(mean) for _ in BATCHES]
            torch.distributed.all_gather(losses, mean.detach())
            with torch.no_grad():
                outcome[f"loss, {scheme}, step {step}"] = float(
                    (sum(losses) / len(losses) - loss_of(network(), all_inputs, all_labels)).abs()
                )
    # Two micro-batches of an optimizer's step: the mean is over the tokens of both.
    model = DistributedDataParallel(network())
    counts = [(labels != IGNORED).sum() for _, labels in steps[1:]]
    total = qsync_opt.global_count(sum(counts))
    with model.no_sync():
        qsync_opt.global_mean(loss_of(model, *steps[1]), counts[0], total=total).backward()
    qsync_opt.global_mean(loss_of(model, *steps[2]), counts[1], total=total).backward()
    both = [torch.cat(parts) for parts in zip(*whole[1:], strict=True)]
    outcome["accumulated"] = difference(model, expected(lambda plain: loss_of(plain, *both).backward()))
    # Whole numbers, which need no communication.
    model = DistributedDataParallel(network())
    inputs, total = steps[0][0], sampler.global_batch
    qsync_opt.global_mean(square(model, inputs), len(inputs), total=total).backward()
    outcome["by numbers"] = difference(model, expected(lambda plain: square(plain, whole[0][0]).backward()))
    return outcome


def main():
    rank, size, port = (int(value) for value in sys.argv[1:4])
    with process_group(rank, size, port):
        print(json.dumps(run(rank)))


if __name__ == "__main__":
    main()
