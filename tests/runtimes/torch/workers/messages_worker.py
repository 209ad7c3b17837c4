"""One worker of the message tests: rank, world, port, SCENARIO; prints the results."""

import json
import os
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from qsync_opt.errors import QSyncError
from qsync_opt.messages import Plan, by_bytes, evaluate, in_rounds, uniform_plan
from qsync_opt.runtimes.torch.messages import (
    FullGraph,
    MessageOptions,
    TrainingOptions,
    full_graph,
    partition_graph,
    predict_epoch,
    train,
)
from qsync_opt.systems import solve

KINDS = {"gcn": GCNConv, "mean": SAGEConv, "gat": GATConv}
NODES, DIM = 60, 12


class Net(nn.Module):
    def __init__(self, kind, hidden=16):
        super().__init__()
        layer = KINDS[kind]
        self.first, self.second, self.third = layer(DIM, hidden), layer(hidden, hidden), layer(hidden, 3)

    def forward(self, x, edge_index):
        x = torch.relu(self.first(x, edge_index))
        return self.third(torch.relu(self.second(x, edge_index)), edge_index)


def graph(directed=False):
    """Random edges with self-loops, repeated edges and isolated nodes; labels that features tell."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NODES - 5, (2, 200), generator=generator)
    edges = edges if directed else torch.cat([edges, edges.flip(0)], 1)
    x = torch.randn(NODES, DIM, generator=generator)
    y = x[:, :3].argmax(1)
    return Data(x=x, edge_index=edges, y=y, train_mask=torch.rand(NODES, generator=generator) < 0.6)


def assignment(name, world):
    if name == "metis":
        return None
    numbers = torch.arange(NODES)
    return numbers % world if name == "stripes" else torch.where(numbers % 5 == 0, world - 1, 0)  # "empty" between


def parts_of(data, world, name="metis"):
    return partition_graph(data, world, assignment=assignment(name, world))


def equal(rank, world):
    """Forward, loss and gradients beside those of one process, for every kind of layer, graph and partition."""
    worst = 0.0
    for kind in KINDS:
        for directed in (False, True):
            for name in ("metis", "stripes", "empty"):
                data = graph(directed)
                part = parts_of(data, world, name)[rank]
                torch.manual_seed(1)
                model = Net(kind)
                full = full_graph(model, part, options=MessageOptions(initial_bits=32, replan_steps=0))
                for _ in range(2):  # the second step has the features kept
                    model.zero_grad()
                    output = full()
                    loss = full.loss(output)
                    loss.backward()
                full.close()
                torch.manual_seed(1)
                single = Net(kind)
                expected = single(data.x, data.edge_index)
                mask = data.train_mask
                value = nn.functional.cross_entropy(expected[mask], data.y[mask])
                value.backward()
                total = loss.detach().clone()
                dist.all_reduce(total)
                errors = [(total / world - value).detach().abs(), *(
                    (p.grad - q.grad).abs().max() for p, q in zip(model.parameters(), single.parameters(), strict=True)
                )]  # fmt: skip
                if part.own:
                    errors.append((output - expected[part.nodes]).detach().abs().max())
                assert list(model.state_dict()) == list(single.state_dict())
                worst = max(worst, *(float(e) for e in errors))
    return {"worst": worst}


def planned(rank, world):
    """Training with plans made while it runs, stopped and continued."""
    torch.manual_seed(1)
    model = Net("gcn")
    options = MessageOptions(replan_steps=5, budget_bits=4, seed=3)
    full = full_graph(model, parts_of(graph(), world)[rank], options=options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = full.loss(full())
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    full.finish_planning()
    problem = full.build_problem()
    state = full.state_dict()
    full.close()
    other = full_graph(model, parts_of(graph(), world)[rank], options=options)
    other.load_state_dict(state)
    same = other.plan == full.plan and other.steps == full.steps
    widths = [pair.tolist() for rounds in full.plan.bits.values() for group in rounds for pair in group]
    return {
        "losses": losses, "widths": widths, "exchanges": [e.name for e in problem.exchanges], "same": same,
        "accuracy": other.accuracy(other.part.train_mask),
        "packing": [list(zip(*each.number_ns.values(), strict=True)) for each in full.codec],
        "costs": [[pair.pack_ns_per_byte, pair.unpack_ns_per_byte] for pair in problem.exchanges[0].pairs],
    }  # fmt: skip


def inferred(rank, world):
    """Nothing of a pass in inference mode is kept for training; a mask must be of own nodes."""
    full = full_graph(Net("gcn"), parts_of(graph(), world)[rank])
    with torch.inference_mode():
        full.loss(full())
    loss = full.loss(full())
    loss.backward()
    part = full.part
    alike = float(full.loss(full(), part.train_mask).detach() - full.loss(full()).detach())
    try:
        full.loss(full(), torch.ones(part.own + 1, dtype=torch.bool))
    except QSyncError as error:
        return {"finite": bool(loss.isfinite()), "alike": alike, "error": str(error), "own": part.own}


def weighed(rank, world):
    """Sensitivities change nothing in training but the plans, which are for one round of all pairs here."""
    options = MessageOptions(replan_steps=0, links="all-to-all", menu=(2, 4, 8))
    torch.manual_seed(1)
    model = Net("gcn")
    full = full_graph(model, parts_of(graph(), world)[rank], options=options)
    full.loss(full()).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    kept = [(way.send_bits.clone(), way.spread.clone()) for way in full.directions()]
    alike = full.build_problem()
    full.sensitivities = {exchange.name: 1.0 for exchange in alike.exchanges}
    plain = full.build_problem()
    sensitivities = full.measure_sensitivities()
    kept_all = all(torch.equal(p.grad, q) for p, q in zip(model.parameters(), before, strict=True)) and all(
        torch.equal(way.send_bits, bits) and torch.equal(way.spread, spread)
        for way, (bits, spread) in zip(full.directions(), kept, strict=True)
    )
    problem = full.build_problem()
    pairs = zip(plain.exchanges, problem.exchanges, strict=True)
    ratios = {a.name: float(b.pairs[0].beta.sum() / a.pairs[0].beta.sum()) for a, b in pairs}
    full.use(solve(problem).plan)
    full.loss(full()).backward()
    return {
        "kept": kept_all, "alike": [sum(float(pair.beta.sum()) for pair in e.pairs) for e in alike.exchanges],
        "sizes": [sum(float(pair.beta.sum()) for pair in e.pairs) for e in plain.exchanges],
        "sensitivities": sensitivities, "ratios": ratios, "rounds": [len(e.rounds) for e in problem.exchanges],
        "ports": [e.ports for e in problem.exchanges],
    }  # fmt: skip


def foretold(rank, world):
    """The squared error of the gradient under a plan that weighs exchanges, and the variance that it promises."""
    options = MessageOptions(replan_steps=0, links="all-to-all", menu=(1, 2, 4, 8))
    torch.manual_seed(1)
    model = Net("gcn", hidden=64)
    full = full_graph(model, parts_of(graph(), world)[rank], options=options)
    full.loss(full()).backward()
    full.measure_sensitivities()
    problem = full.build_problem()
    plan = in_rounds(solve(by_bytes(problem, options.budget_bits)).plan, problem)

    def gradient():
        model.zero_grad()
        full.loss(full()).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    exactly = {
        name: [[np.full_like(widths, 32) for widths in group] for group in rounds] for name, rounds in plan.bits.items()
    }
    full.use(Plan(bits=exactly))
    exact = gradient()
    full.use(plan)
    errors = [float((gradient() - exact).square().sum()) for _ in range(40)]
    return {"promised": evaluate(problem, plan).variance, "had": sum(errors) / len(errors)}


def other_messages(rank, world):
    """Rows a step late, and samples of the boundary, beside whole messages of the same step; weights stay."""
    results = {}
    for name, options in {"whole": {}, "late": {"late": True}, "sampled": {"share": 0.5}}.items():
        torch.manual_seed(1)
        model = Net("gcn")
        plain = MessageOptions(initial_bits=32, replan_steps=0, **options)
        full = full_graph(model, parts_of(graph(), world)[rank], options=plain)
        second = []
        model.second.register_forward_hook(lambda module, inputs, output, second=second: second.append(output.detach()))
        outputs, sent = [], []
        for _ in range(200 if name == "sampled" else 3):
            output = full()
            full.loss(output).backward()
            outputs.append(output.detach())
            sent.append(full.directions()[0].wire_bytes)
        if name == "whole":
            problem = full.build_problem()
            predicted = predict_epoch(problem, uniform_plan(problem, 4), full.step_times(problem))
        model.eval()
        results[name] = outputs, torch.stack(second), full().detach(), sum(sent) / len(sent)
        full.close()
    whole, late, sampled = results.values()
    errors = sampled[1] - whole[1][0]  # the second layer is affine in what is sampled, so its mean is right
    return {
        "late": [float((a - b).abs().max()) for a, b in zip(late[0], whole[0], strict=True)],
        "eval": [float((each[2] - whole[2]).abs().max()) for each in (late, sampled)],
        "sampled_bytes": sampled[3] / whole[3],
        "bias": float(errors.mean(0).norm() / errors.square().mean(0).sum().sqrt()),
        "parts": [predicted.compute_s, predicted.codec_s, predicted.exposed_s, predicted.epoch_s],
    }  # fmt: skip


def trained(rank, world):
    """A short run of workers that say how long they waited: in exchange i 10 rank + i + 1 seconds."""
    directions = FullGraph.directions

    def told(full):
        ways = directions(full)
        for i, way in enumerate(ways):
            way.wait_ns = 1e9 * (10 * rank + i + 1)
        return ways

    FullGraph.directions = told
    part = parts_of(graph(), world)[rank]
    result, problem = train(part, TrainingOptions(epochs=6, hidden=16), with_problem=True)
    return {
        "waits": dict(result.exposed_s_by_exchange),
        "wait": result.exposed_s,
        "names": [each["name"] for each in problem["exchanges"]],
    }


def nan(rank, world):
    data = graph()
    model = Net("mean")
    full = full_graph(model, parts_of(data, world, "stripes")[rank])
    full()
    if rank == 0:
        model.first.lin_l.bias.data[0] = torch.nan
    full.ddp = model  # DDP would copy rank 0's parameters to all
    full()
    return {}


def unlike(rank, world):
    full_graph(Net("gcn"), parts_of(graph(), world, "stripes" if rank else "metis")[rank])
    return {}


def plan_for(rank, world, name):
    """A plan of another partition of the same graph."""
    full = full_graph(Net("gcn"), parts_of(graph(), world, name)[rank], options=MessageOptions(replan_steps=0))
    full.loss(full()).backward()
    problem = full.build_problem()
    full.close()
    return uniform_plan(problem, 4)


def foreign_plan(rank, world):
    full = full_graph(Net("gcn"), parts_of(graph(), world)[rank], plan_for(rank, world, "stripes"))
    for _ in range(2):  # layers are known after one pass
        full.loss(full()).backward()
    return {}


def half_fitting_plan(rank, world):
    """Only the last rank's widths are those of another partition."""
    full = full_graph(Net("gcn"), parts_of(graph(), world)[rank], options=MessageOptions(replan_steps=0))
    full.loss(full()).backward()
    plan = uniform_plan(full.build_problem(), 4)
    if rank == world - 1:
        plan = Plan(bits={n: [[pair[1:] for pair in group] for group in rounds] for n, rounds in plan.bits.items()})
    full.use(plan)
    return {}


def unlike_plan(rank, world):
    plan = plan_for(rank, world, "metis")
    if rank:
        plan = Plan(bits={name: [[pair * 2 for pair in group] for group in r] for name, r in plan.bits.items()})
    full_graph(Net("gcn"), parts_of(graph(), world)[rank], plan)
    return {}


def alone(rank, world):
    """Parts where nobody has edges to another: every pair is empty."""
    data = graph()
    inside = assignment("stripes", world)[data.edge_index]
    data.edge_index = data.edge_index[:, inside[0] == inside[1]]
    full = full_graph(Net("gcn"), parts_of(data, world, "stripes")[rank], options=MessageOptions(replan_steps=2))
    for _ in range(6):
        loss = full.loss(full())
        loss.backward()
    full.finish_planning()
    return {"halo": full.part.halo.numel(), "finite": bool(loss.isfinite()), "bytes": full.directions()[0].wire_bytes}


def unlike_model(rank, world):
    full_graph(Net("gcn", hidden=16 + rank), parts_of(graph(), world)[rank])
    return {}


def killed(rank, world):
    full = full_graph(Net("gcn"), parts_of(graph(), world, "stripes")[rank], options=MessageOptions(replan_steps=0))
    for step in range(5):
        if rank == world - 1 and step == 2:
            os._exit(9)
        full.loss(full()).backward()
    return {}


def main():
    rank, world, port, scenario = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        result = globals()[scenario](rank, world)
    except QSyncError as failure:
        result = {"error": f"{type(failure).__name__}: {failure}"}
    print(json.dumps(result), flush=True)
    if scenario not in ("killed",):
        dist.barrier()
    os._exit(0)  # taking gloo's groups down may wait for peers that have left


main()
