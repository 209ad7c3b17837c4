"""Checkpoints by the callback of Hugging Face's Trainer, and in a loop with Accelerate."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from qsync_opt.errors import NotReadyError, ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints
from qsync_opt.runtimes.torch.execution import applied_plan, apply

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

PLAN = {"first/linear": "INT8", "second/linear": "BF16"}
STEPS = 14


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 3)

    def forward(self, x, labels):
        output = self.second(self.drop(torch.relu(self.first(x)))).float()
        return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}


def _data(count=40):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row[:3].argmax()} for row in x]


def _trainer(folder, stop=None, **options):
    """A Trainer of 14 steps in epochs of 5, interrupted after ``stop`` steps."""
    from qsync_opt.runtimes.torch.checkpoints import TrainerCheckpoints

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == stop:
                control.should_training_stop = True

    torch.manual_seed(0)
    model = apply(Classifier(), PLAN)
    callback = TrainerCheckpoints(folder / "run", every=4, keep=10, **options)
    settings = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        max_steps=STEPS,
        save_strategy="no",
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=_data(), callbacks=[callback, Stop()])
    return trainer, callback


def _weights(trainer):
    return [tensor.clone() for tensor in trainer.model.state_dict().values()]


@pytest.mark.parametrize("background", [True, False])
def test_a_trainer_goes_on_to_the_same_weights(tmp_path, background):
    whole, _ = _trainer(tmp_path / "whole")
    whole.train()
    first, _ = _trainer(tmp_path / "parts", stop=7, background=background)
    first.train()
    assert Checkpoints(tmp_path / "parts" / "run", first.model).steps == [4, 7]
    second, callback = _trainer(tmp_path / "parts")
    path = callback.resume(second.model, tmp_path / "resume")
    second.train(resume_from_checkpoint=path)
    assert second.state.global_step == STEPS
    assert all(torch.equal(a, b) for a, b in zip(_weights(whole), _weights(second), strict=True))
    assert {name: applied_plan(second.model).precisions[name] for name in PLAN} == PLAN
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (whole, second)]
    assert losses[0] == losses[1]  # those of before the interruption are kept, too


def test_without_a_checkpoint_a_trainer_begins(tmp_path):
    trainer, callback = _trainer(tmp_path)
    assert callback.resume(trainer.model, tmp_path / "resume") is None


def test_checkpoints_of_other_loops_are_refused_by_the_trainer(tmp_path):
    trainer, callback = _trainer(tmp_path)
    Checkpoints(tmp_path / "run", trainer.model).save(3)
    with pytest.raises(ProblemError, match="does not say how far the Trainer came"):
        callback.resume(trainer.model, tmp_path / "resume")


def test_a_trainer_that_begins_anew_does_not_take_the_checkpoint(tmp_path):
    first, _ = _trainer(tmp_path, stop=4)
    first.train()
    second, callback = _trainer(tmp_path)
    callback.resume(second.model, tmp_path / "resume")
    with pytest.raises(NotReadyError, match="at step 0, and the checkpoint of step 4"):
        second.train()


def test_a_loop_with_accelerate_saves_behind_training(tmp_path):
    def job():
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        bare = apply(Classifier(), PLAN)
        optimizer = torch.optim.AdamW(bare.parameters(), 1e-2)
        loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(3, (40,))), batch_size=8)
        model, prepared, loader = accelerator.prepare(bare, optimizer, loader)
        # A loader draws a random number when it begins: before a load.
        return accelerator, model, prepared, list(loader), Checkpoints(tmp_path, bare, prepared)

    def train(parts, begin, end):
        accelerator, model, optimizer, batches, checkpoints = parts
        losses = []
        for step, (x, labels) in enumerate(batches):
            if begin <= step < end:
                loss = model(x, labels)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if step == 1:
                    checkpoints.save_in_background(2)
        checkpoints.wait()
        return losses

    whole = train(job(), 0, 5)
    again = job()
    assert again[-1].load().step == 2
    assert train(again, 2, 5) == whole[2:]
