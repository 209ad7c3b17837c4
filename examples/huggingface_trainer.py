"""Hugging Face's Trainer under a plan: planned from inside the script, interrupted, resumed to the same weights.

The Trainer's own checkpoints hold everything but the place of the rounding in its random stream; a callback keeps
that beside them. Runs alone or on several workers: ``torchrun --nproc_per_node 2 huggingface_trainer.py``.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import qsync_opt

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 16, 30


class FirstToken(Dataset[dict[str, Tensor]]):
    """Is the first token in the upper half of the vocabulary?"""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": (self.tokens[index, 0] >= VOCABULARY // 2).long()}


class KeepPlan(TrainerCallback):
    """Writes the plan's state into the Trainer's checkpoints, and reads it when training resumes."""

    def __init__(self, model: nn.Module, resume_from: str | None = None) -> None:
        self.state = qsync_opt.PlanState(model)
        self.resume_from = resume_from

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(exist_ok=True)
        (folder / f"plan-{args.process_index}.json").write_text(json.dumps(self.state.state_dict()))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.resume_from is not None:
            path = Path(self.resume_from) / f"plan-{args.process_index}.json"
            self.state.load_state_dict(json.loads(path.read_text()))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return BertForSequenceClassification(config).train()


def arguments(folder: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def common_folder() -> str:
    """The same new folder on all workers that one torchrun has started on this host."""
    if "RANK" not in os.environ:
        return tempfile.mkdtemp(prefix="trainer-")
    return str(Path(tempfile.gettempdir()) / f"trainer-{os.getppid()}-{os.environ['MASTER_PORT']}")


def main() -> None:
    torch.set_num_threads(1)
    data = FirstToken(512)
    folder = common_folder()
    settings = arguments(folder)  # joins the process group that torchrun prepared
    model = make_model()
    batch = {name: torch.stack([data[i][name] for i in range(BATCH)]) for name in ("input_ids", "labels")}
    # Many processors compute nothing faster than FP32; least_gain=0 applies the plan all the same.
    options = qsync_opt.PlanningOptions(least_gain=0.0, progress=False)
    plan = qsync_opt.auto_plan(model, batch, options=options)
    print(plan.describe())

    model = qsync_opt.apply(model, plan)
    trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[KeepPlan(model)])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")

    half = f"{folder}/checkpoint-{STEPS // 2}"
    again = qsync_opt.apply(make_model(), plan)
    resumed = Trainer(model=again, args=settings, train_dataset=data, callbacks=[KeepPlan(again, half)])
    resumed.train(resume_from_checkpoint=half)
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    print("resumed to the same weights:", all(torch.equal(a, b) for a, b in pairs))
    print("last checkpoint:", Path(get_last_checkpoint(folder) or "").name)


if __name__ == "__main__":
    main()
