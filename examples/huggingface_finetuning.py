"""Fine-tune a Hugging Face classifier under a plan: capture, statistics, profile, problem, plan, training.

The model is built from a configuration and the task is made up (is the first token in the upper half of the
vocabulary?), so that nothing is downloaded. With a model of your own, replace `make_model` and `batches`.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.training import evaluate

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 16, 60
NO_HURRY_NS = 60 * 10**9
Batch = dict[str, Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return BertForSequenceClassification(config).train()


def batches(count: int, seed: int) -> Iterator[Batch]:
    source = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=source)
        labels = (tokens[:, 0] >= VOCABULARY // 2).long()
        yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def plan_for(model: nn.Module, folder: Path) -> qsync_opt.Plan:
    """A plan in half of the memory between what the lowest precisions and FP32 need, without hurry."""
    captured = qsync_opt.capture_model(model, kwargs=next(batches(1, seed=1)), name="tiny-bert")
    print(repr(captured.graph))
    statistics = qsync_opt.collect_statistics(model, batches(2, seed=2), graph=captured.graph)
    profile = qsync_opt.profile(captured, "cpu", cache_dir=folder / "cache", repeats=2)
    table = qsync_opt.sensitivities(captured.graph, statistics, profile.formats)

    def problem(memory_bytes: int, **limits: int) -> qsync_opt.Problem:
        device = DeviceType(name="worker", count=1, memory_limit_bytes=memory_bytes, precisions=tuple(profile.formats))
        network = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9, source="assumed")
        cluster = Cluster(name="one", devices=(device,), network=network)
        return qsync_opt.build_problem(captured.graph, {"worker": profile}, table, cluster, **limits)

    roomy = problem(2**40, latency_limit_ns=NO_HURRY_NS)
    full = evaluate(roomy, qsync_opt.uniform_plan(roomy, "FP32")).memory_bytes["worker"]
    least = evaluate(roomy, qsync_opt.uniform_plan(roomy)).memory_bytes["worker"]
    asked = problem(least + (full - least) // 2, latency_limit_ns=NO_HURRY_NS)
    print(repr(asked))
    solution = qsync_opt.solve(asked)
    print(repr(solution))
    if solution.plan is None:
        raise SystemExit(f"no plan: {solution.reason}")
    solution.plan.save(folder / "plan.json")
    return solution.plan


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for batch in batches(STEPS, seed=3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        plan = plan_for(make_model(), Path(name))
        results = {
            "FP32": train(make_model()),
            "plan": train(qsync_opt.apply(make_model(), plan, "worker")),
        }
    for label, losses in results.items():
        print(f"{label}: loss {sum(losses[:5]) / 5:.3f} at first, {sum(losses[-5:]) / 5:.3f} after {STEPS} steps")


if __name__ == "__main__":
    main()
