"""Checkpoints of jobs that are put together in less usual ways."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from qsync_opt.checkpoints import hash_of, step_folder
from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints
from qsync_opt.runtimes.torch.ddp import free_port, process_group
from qsync_opt.runtimes.torch.execution import LossScaler, apply


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.drop(torch.tanh(self.a(x))))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.second(self.norm(self.first(x.reshape(2, 2, 5, 5))))


TIED = (Tied, {"a/linear": "INT8", "b/linear": "BF16"}, (4, 8))
IMAGES = (Images, {"first/conv2d": "INT8", "second/conv2d": "BF16"}, (2, 2, 5, 5))


def two_optimizers(model):
    sgd = torch.optim.SGD([model.a.weight], lr=0.1, momentum=0.9)
    return [sgd, torch.optim.AdamW([model.a.bias, model.b.bias])]


def one_optimizer(model):
    return [torch.optim.AdamW(model.parameters())]


def resumed_losses(folder, case, optimizers_of, prepare=lambda model: model):
    """Losses of steps 3 to 5 of a whole run, and of one that resumes at step 3."""
    make, plan, shape = case

    def build():
        torch.manual_seed(0)
        model = apply(prepare(make()), plan)
        optimizers = optimizers_of(model)
        scaler = LossScaler(model, enabled=True, init_scale=256.0)
        return model, optimizers, scaler, Checkpoints(folder, model, optimizers, scaler=scaler)

    def train(model, optimizers, scaler, checkpoints, steps):
        losses = []
        for step in steps:
            loss = model(torch.randn(*shape, generator=torch.Generator().manual_seed(step))).square().mean()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            losses.append(loss.item())
            if step == 2:
                checkpoints.save(3)
        return losses

    whole = train(*build(), range(6))[3:]
    again = build()
    torch.manual_seed(99)
    assert again[-1].load().step == 3
    return whole, train(*again, range(3, 6))


@pytest.mark.parametrize(
    ("case", "optimizers_of"), [(TIED, two_optimizers), (IMAGES, one_optimizer)], ids=["tied", "channels last"]
)
def test_resumed_to_the_same_losses(tmp_path, case, optimizers_of):
    whole, resumed = resumed_losses(tmp_path, case, optimizers_of)
    assert whole == resumed


def test_tied_weights_that_are_sharded(tmp_path):
    with process_group(0, 1, free_port(), timeout_s=60):
        mesh = dist.init_device_mesh("cpu", (1,))
        whole, resumed = resumed_losses(tmp_path, TIED, one_optimizer, lambda model: fully_shard(model, mesh=mesh))
    assert whole == resumed


def test_parameters_that_only_an_optimizer_has_are_kept(tmp_path):
    def build():
        model, temperature = nn.Linear(4, 4), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.Adam([*model.parameters(), temperature], lr=0.1)
        return model, temperature, optimizer, Checkpoints(tmp_path, model, optimizer)

    model, temperature, optimizer, checkpoints = build()
    (temperature * model(torch.ones(2, 4)).square().mean()).backward()
    optimizer.step()
    checkpoints.save(1)
    _, again, _, checkpoints = build()
    checkpoints.load()
    assert again.item() == temperature.item() != 1


def test_states_go_to_their_parameters_in_whatever_order_these_stand(tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    a, b, c = model.parameters()

    def stepped(groups):
        optimizer = torch.optim.Adam(groups, lr=0.1)
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        return optimizer

    before = stepped([{"params": [a, b], "lr": 0.5}, {"params": [c]}])
    Checkpoints(tmp_path, model, before).save(1)
    after = torch.optim.Adam([{"params": [c], "lr": 0.3}, {"params": [b, a], "lr": 0.3}])
    Checkpoints(tmp_path, model, after).load()
    assert [group["lr"] for group in after.param_groups] == [0.1, 0.5]
    assert all(torch.equal(before.state[p]["exp_avg"], after.state[p]["exp_avg"]) for p in (a, b, c))
    with pytest.raises(ModelError, match="its 2 groups hold others than the 2 here; build the optimizer as before"):
        Checkpoints(tmp_path, model, torch.optim.Adam([{"params": [a]}, {"params": [b, c]}])).load()


def test_milestones_of_a_scheduler_stay_what_they_were(tmp_path):
    model = nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=1.0), [2, 4])
    checkpoints = Checkpoints(tmp_path, model, scheduler=scheduler)
    checkpoints.save(1)
    checkpoints.load()
    assert list(scheduler.milestones.elements()) == [2, 4]


def test_what_does_not_take_its_state_back_is_named(tmp_path):
    class Strict:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise KeyError("b")

    Checkpoints(tmp_path, nn.Linear(2, 2), strict=Strict()).save(1)
    with pytest.raises(
        ModelError, match=r"strict does not take its state from .* \(KeyError: 'b'\): build it as before"
    ):
        Checkpoints(tmp_path, nn.Linear(2, 2), strict=Strict()).load()


@pytest.mark.parametrize(
    ("buffer", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "on the device meta"),
        (torch.ones(2, dtype=torch.complex128), r"of type torch\.complex128"),
    ],
)
def test_tensors_without_a_form_in_files_are_named(tmp_path, buffer, kind):
    model = nn.Linear(2, 2)
    model.register_buffer("odd", buffer)
    with pytest.raises(ModelError, match=rf"'model\.odd' is {kind}.*persistent=False"):
        Checkpoints(tmp_path, model).save(1)


def test_lazy_modules_must_have_run(tmp_path):
    with pytest.raises(ModelError, match=r"'0.weight' has no shape yet: run one batch"):
        Checkpoints(tmp_path, nn.Sequential(nn.LazyLinear(4))).save(1)


def test_memory_must_be_numbers(tmp_path):
    checkpoints = Checkpoints(tmp_path, nn.Linear(2, 2))
    path = checkpoints.save(1)
    state = json.loads((path / "state.json").read_text())
    state["memory_bytes"] = {"T4": "16 GiB"}
    data = json.dumps({k: v for k, v in state.items() if k != "x-digest"}).encode()
    (path / "state.json").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(data), "chunks": [hash_of(data)]}
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "x-digest"}))
    with pytest.raises(ProblemError, match="memory_bytes: T4 is '16 GiB'"):
        checkpoints.load()


def swap_values(model, optimizer):
    model.a.bias.data = torch.full((8,), 7.0)


def turn_around(model, optimizer):
    model.a.weight.data = model.a.weight.data.t()  # the same memory and shape


def replace_a_state(model, optimizer):
    optimizer.state[model.a.bias]["exp_avg"] = torch.full((8,), 3.0)


def add_a_state(model, optimizer):
    optimizer.state[model.a.bias]["more"] = torch.ones(2)


def add_a_number(model, optimizer):
    optimizer.state[model.a.bias]["times"] = 3


def remove_a_state(model, optimizer):
    optimizer.state.pop(model.b.bias, None)


def change_the_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.5


def move_between_groups_without_states(model, optimizer):
    optimizer.state.clear()
    move_between_groups(model, optimizer)


def move_between_groups(model, optimizer):
    first, second = (group["params"] for group in optimizer.param_groups)
    first[:], second[:] = second[:], first[:]


def untie(model, optimizer):
    model.a.weight = nn.Parameter(model.a.weight.detach().clone())


def tie(model, optimizer):
    model.a.bias = model.b.bias = optimizer.param_groups[1]["params"][0]


def replace_a_layer(model, optimizer):
    model.b.bias = nn.Parameter(torch.zeros(8))


def grow_a_buffer(model, optimizer):
    model.register_buffer("seen", torch.arange(5))


def other_shape(model, optimizer):
    model.b.bias.data = torch.zeros(2, 4)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[model.b.bias][name] = torch.zeros(2, 4)


def other_type(model, optimizer):
    model.a.bias.data = model.a.bias.data.bfloat16()


def add_a_state_that_looks_like_a_mark(model, optimizer):
    optimizer.state[model.a.bias] = {"$tensor": torch.ones(2)}


def own_a_parameter_of_no_model(model, optimizer):
    if len(optimizer.param_groups) == 2:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": torch.tensor(0.25)})


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: None,
        swap_values,
        turn_around,
        replace_a_state,
        add_a_state,
        add_a_number,
        remove_a_state,
        change_the_rate,
        move_between_groups,
        move_between_groups_without_states,
        untie,
        tie,
        replace_a_layer,
        grow_a_buffer,
        other_shape,
        other_type,
        add_a_state_that_looks_like_a_mark,
        own_a_parameter_of_no_model,
    ],
)
def test_what_changed_between_saves_is_saved_as_by_one_who_sees_it_for_the_first_time(tmp_path, change):
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW([{"params": [model.a.weight, model.a.bias]}, {"params": [model.b.bias], "lr": 0.1}])
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    long_lived = Checkpoints(tmp_path / "long-lived", model, optimizer)
    for step in (1, 2):
        long_lived.save_in_background(step)
        long_lived.wait()
    change(model, optimizer)
    for step in (3, 4, 5):
        if step == 5:
            change(model, optimizer)
        fresh = Checkpoints(tmp_path / f"fresh-{step}", model, optimizer)
        contents = []
        for checkpoints, folder in ((long_lived, "long-lived"), (fresh, f"fresh-{step}")):
            checkpoints.save_in_background(step)
            checkpoints.wait()
            files = step_folder(tmp_path / folder, step).iterdir()
            contents.append({path.name: path.read_bytes() for path in files})
        assert len(contents[0]) >= 3
        assert contents[0] == contents[1]


def test_what_has_no_form_in_files_is_named_also_after_saves_without_it(tmp_path):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path, model, optimizer)
    for step in (1, 2):
        checkpoints.save_in_background(step)
        checkpoints.wait()
    whole = model.b.bias
    model.b.bias = nn.Parameter(whole.detach().to_sparse())
    for _ in range(2):
        with pytest.raises(ModelError, match=r"'model\.b\.bias' is sparse"):
            checkpoints.save_in_background(3)
    model.b.bias = whole
    checkpoints.save_in_background(3)
    checkpoints.wait()
    assert checkpoints.steps == [2, 3]
