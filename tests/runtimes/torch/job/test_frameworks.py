"""Hugging Face's Trainer and Accelerate under a plan that rounds; what is made comes from the examples."""

import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.runtimes.torch.checkpoints import PlanState
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply, undo

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
PLAN = {"0/linear": "INT8", "3/linear": "BF16"}


def example(name):
    pytest.importorskip("accelerate")
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def linears(model):
    """Every linear layer in INT8, attention in BF16: more than any plan would ask for."""
    plan = {f"{path}/linear": "INT8" for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    plan.update({f"{path}/embedding": "BF16" for path, m in model.named_modules() if isinstance(m, torch.nn.Embedding)})
    paths = [path for path, _ in model.named_modules() if path.endswith("attention.self")]
    return {**plan, **dict.fromkeys((f"{path}/scaled_dot_product_attention" for path in paths), "BF16")}


def methods_of(*classes):
    """Functions of classes and of what they inherit; what they add to themselves while they run is theirs."""
    kinds = {kind for own in classes for kind in own.__mro__}
    return {(kind, name): value for kind in kinds for name, value in vars(kind).items() if callable(value)}


def test_accelerate_resumes_to_the_same_losses(tmp_path):
    module = example("huggingface_accelerate")
    before = methods_of(module.Accelerator)
    job = module.Job(PLAN)
    losses = job.train(0, 4)
    job.accelerator.save_state(str(tmp_path))
    losses += job.train(4, 8)
    assert losses[-1] < losses[0]
    again = module.Job(PLAN)
    again.accelerator.load_state(str(tmp_path))
    assert again.train(4, 8) == losses[4:]
    assert applied_plan(again.model).precisions == PLAN
    applied_plan(again.model).go_on_at(0, 999)
    again.accelerator.load_state(str(tmp_path))
    assert again.train(4, 8) == losses[4:]
    assert methods_of(module.Accelerator).items() >= before.items()  # nothing of theirs is patched


@pytest.mark.filterwarnings("ignore")
def test_trainer_resumes_to_the_same_weights(tmp_path):
    pytest.importorskip("transformers")
    module = example("huggingface_trainer")
    data = module.FirstToken(128)
    classes = (module.Trainer, module.BertForSequenceClassification)
    before = methods_of(*classes)
    settings = module.arguments(str(tmp_path))
    settings.max_steps, settings.save_steps = 8, 4

    def train(resume_from=None):
        model = apply(module.make_model(), linears(module.make_model()))
        callbacks = [module.KeepPlan(model, resume_from)]
        trainer = module.Trainer(model=model, args=settings, train_dataset=data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume_from)
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = train()
        again, _ = train(str(tmp_path / "checkpoint-4"))
    assert "INT8" in applied_plan(model).precisions.values()
    assert methods_of(*classes).items() >= before.items()  # nothing of theirs is patched
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_state_of_a_plan_is_json_and_checked():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    apply(model, PLAN)
    kept = PlanState(model)
    model(torch.zeros(2, 8))
    state = json.loads(json.dumps(kept.state_dict()))
    assert state["offset"] == 1
    expected = model(torch.ones(2, 8))
    model(torch.ones(2, 8))
    kept.load_state_dict(state)
    assert torch.equal(model(torch.ones(2, 8)), expected)
    with pytest.raises(ProblemError, match="digest differs"):
        kept.load_state_dict({**state, "precisions": {"0/linear": "INT8"}})
    with pytest.raises(ProblemError, match="qsync-plan-state/1"):
        kept.load_state_dict({})
    states = PlanState(model, all_ranks=True).state_dict()
    kept.load_state_dict(json.loads(json.dumps(states)))
    with pytest.raises(ModelError, match="made by 0 ranks and this job has 1"):
        kept.load_state_dict({**states, "ranks": []})
    with pytest.raises(ProblemError, match="no object"):
        kept.load_state_dict({**states, "ranks": [1]})
    undo(model)
    with pytest.raises(ModelError, match="'0/linear' was INT8 and is unplanned, '3/linear' was BF16 and is unplanned"):
        kept.load_state_dict(state)
    plain = kept.state_dict()
    kept.load_state_dict(plain)
    apply(model, PLAN)
    with pytest.raises(ModelError, match="'0/linear' was unplanned and is INT8"):
        kept.load_state_dict(plain)
    for wrong in (None, [1], "text"):
        with pytest.raises(ProblemError, match="give what state_dict"):
            kept.load_state_dict(wrong)


def test_the_state_of_a_plan_under_autocast_is_not_that_of_one_without():
    def made(autocast):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        plan = {"0/linear": "BF16", "1/linear": "BF16"}
        return PlanState(apply(model, plan, options=ApplyOptions(autocast=autocast)))

    state = made("BF16").state_dict()
    made("BF16").load_state_dict(state)
    with pytest.raises(ModelError, match="made under autocast in BF16, and this job runs under no autocast"):
        made(None).load_state_dict(state)
    # What loads only the keys that are there now, as torch's distributed checkpoints do, leaves it out.
    with pytest.raises(ProblemError, match="digest differs"):
        made(None).load_state_dict({key: value for key, value in state.items() if key != "autocast"})
