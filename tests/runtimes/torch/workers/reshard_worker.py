"""Worlds of several sizes on one machine that save checkpoints and load each other's, sharded in several ways."""

import builtins
import hashlib
import io
import itertools
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.runtimes.torch.checkpoints import Checkpoints


class Net(nn.Module):
    """Odd and tiny sizes, a tied head, buffers that change in place, and types beside FP32."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm = nn.BatchNorm1d(6)
        self.one = nn.Linear(6, 1)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.arange(7).to(torch.bfloat16))
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("nothing", torch.empty(0, 3))

    def forward(self, tokens):
        x = self.norm(self.down(torch.relu(self.up(self.embed(tokens)))))
        return self.head(x) + self.one(x) * self.scale


def ways(size):
    """How a world of this size may hold the model."""
    names = ["alone"] if size == 1 else ["ddp", "fsdp"]
    return names + (["hsdp", "tp"] if size == 4 else []) + (["hsdp", "tp", "tp4"] if size == 8 else [])


class Job:
    """A model held in one way, its optimizers and checkpoints."""

    def __init__(self, way, folder, seed):
        torch.manual_seed(seed)
        model = Net()
        size = dist.get_world_size()
        if way == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        elif way == "hsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards")))
        elif way in ("tp", "tp4"):
            tensor_parallel = 4 if way == "tp4" else 2
            shape = (size // tensor_parallel, tensor_parallel)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
        self.model = DistributedDataParallel(model) if way == "ddp" else model
        head = [model.embed.weight]
        body = [parameter for parameter in model.parameters() if parameter is not head[0]]
        self.optimizers = [torch.optim.AdamW(body, 1e-2), torch.optim.SGD(head, 0.1, momentum=0.9)]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)
        self.checkpoints = Checkpoints(folder, self.model, self.optimizers, scheduler=self.scheduler)

    def train(self, begin, end):
        losses = []
        for step in range(begin, end):
            tokens = torch.randint(13, (8,), generator=torch.Generator().manual_seed(step))
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(tokens), (tokens * 5 + 1) % 13)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def state(self):
        """A hash of every tensor of the model and of the optimizers, gathered whole, in one order for all ways."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        values = dict(model.state_dict())
        for number, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                values |= {f"{number} {names[id(parameter)]} {key}": value for key, value in state.items()}
        result = {}
        for name, value in sorted(values.items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if isinstance(whole, torch.Tensor):
                data = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                result[name] = hashlib.sha256(data).hexdigest()[:16]
        result["scheduler"] = self.scheduler.last_epoch
        return result


def save(folder, size):
    for way in ways(size):
        for kind in ("waiting", "background"):
            place = folder / f"{way}-{size}-{kind}"
            job = Job(way, place, 0)
            job.train(0, 3)
            before = job.state()
            if kind == "waiting":
                job.checkpoints.save(3)
                losses = job.train(3, 5)
            else:
                job.checkpoints.save_in_background(3)
                losses = job.train(3, 5)  # begins while parameters are still copied
                job.checkpoints.wait()
            after = job.state()
            if dist.get_rank() == 0:
                text = json.dumps({"before": before, "after": after, "losses": losses})
                (folder / f"{place.name}.json").write_text(text)


class BytesRead:
    """Counts what this process reads of files of tensors."""

    def __init__(self):
        self.count, original = 0, builtins.open
        counter = self

        class Counted(io.FileIO):
            def readinto(self, memory):
                count = super().readinto(memory)
                counter.count += count
                return count

        def opened(path, *arguments, **options):
            if str(path).endswith(".safetensors") and options.get("buffering") == 0:
                return Counted(path)
            return original(path, *arguments, **options)

        builtins.open = opened

    def of_all_ranks(self):
        total = torch.tensor(self.count)
        dist.all_reduce(total)
        self.count = 0
        return int(total)


def load(folder, size):
    checked, read = 0, BytesRead()
    for way, path in itertools.product(ways(size), sorted(folder.glob("*.json"))):
        unchanged = path.stem.startswith(f"{way}-{size}-")
        if path.stem.endswith("background") and not unchanged:
            continue  # the same files as of a save that is waited for
        wanted = json.loads(path.read_text())
        job = Job(way, folder / path.stem, 1)
        resumed = job.checkpoints.load()
        assert resumed.step == 3
        files = (folder / path.stem / "step-00000003").glob("*.safetensors")
        total, saved = read.of_all_ranks(), sum(file.stat().st_size for file in files)
        # Random states of ranks that are no more are left out.
        assert 0.9 * saved <= total <= 1.02 * saved, f"{path.stem} into {way}-{size}: read {total} of {saved} bytes"
        state = job.state()
        different = [name for name in wanted["before"] if state.get(name) != wanted["before"][name]]
        assert not different, f"{path.stem} into {way}-{size}: {different}"
        if unchanged:
            losses = job.train(3, 5)
            assert losses == wanted["losses"], f"{path.stem}: {losses}"
            assert job.state() == wanted["after"], f"{path.stem}: goes on otherwise"
        checked += 1
    if dist.get_rank() == 0:
        print(f"checked {checked}", flush=True)


def _matrix(way):
    model = nn.Linear(1537, 3000, bias=False)  # 18.4 MB, of rows that no chunk begins with
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def save_large(folder, size):
    for way in ("fsdp", "copies"):
        torch.manual_seed(0)
        model = _matrix(way)
        Checkpoints(folder / f"{way}-{size}", model).save(1)


def load_large(folder, size):
    read = BytesRead()
    torch.manual_seed(0)
    wanted = _matrix("copies").weight
    for way, path in itertools.product(("fsdp", "copies"), sorted(folder.glob("[!.]*-*"))):
        torch.manual_seed(1)
        model = _matrix(way)
        Checkpoints(path, model).load()
        total = read.of_all_ranks()
        weight = model.weight.full_tensor() if isinstance(model.weight, DTensor) else model.weight
        assert torch.equal(weight, wanted), f"{path.name} into {way}-{size}"
        saved = sum(file.stat().st_size for file in path.glob("*/*.safetensors"))
        assert total <= 1.02 * saved, f"{path.name} into {way}-{size}: read {total} of {saved} bytes"
        if dist.get_rank() == 0:
            print(f"checked {total / saved:.3f}", flush=True)


def rank_process(work, folder, rank, size):
    """Run in a forked process, which it ends."""
    code = 1
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / f".store-{work.__name__}-{size}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        work(folder, size)
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def world(work, folder, size):
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            rank_process(work, folder, rank, size)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    place, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")]
    for task in (save_large, load_large) if "large" in sys.argv else (save, load):
        for count in sizes:
            if any(world(task, place, count)):
                sys.exit(1)
