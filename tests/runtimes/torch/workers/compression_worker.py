"""One worker of the gradient compression tests: what it saw goes to the last line of its output, as JSON."""

import contextlib
import itertools
import json
import os
import sys
import time
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.errors import QSyncError
from qsync_opt.gradients import Plan, build_problem, fit_reductions, schemes, uniform_plan
from qsync_opt.runtimes.torch.ddp import digest, process_group
from qsync_opt.runtimes.torch.gradients import Reducer, measure_schemes

CAP_MB = 0.02


def net(dtype=torch.float32):
    torch.manual_seed(0)
    widths = (32, 128, 64, 64, 96, 64, 8)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def wrapped(group=None, **options):
    return DistributedDataParallel(net(**options), bucket_cap_mb=CAP_MB, process_group=group)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 32, generator=generator).to(dtype), torch.randn(16, 8, generator=generator).to(dtype)


def step_of(model, rank, step, optimizer=None, dtype=torch.float32):
    x, y = batch(rank, step, dtype)
    loss = (model(x) - y).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def bits(tensors):
    return digest([t.detach().reshape(-1).contiguous().view(torch.uint8).tolist() for t in tensors])


def gradients(model):
    return [p.grad for p in model.parameters()]


def refusal(work):
    try:
        work()
    except QSyncError as failure:
        return f"{type(failure).__name__}: {failure}"
    return None


def reduced_by_every_scheme(rank, size):
    result = {}
    torch.manual_seed(rank)
    own = torch.randn(3000) * torch.logspace(-3, 1, 3000)
    exact = own.double()
    dist.all_reduce(exact)
    exact /= size
    kept = Reducer(seed=3)  # whose buffers hold what other schemes sent
    kept.reduce(torch.randn(4001), schemes()["sum8"])
    for name, each in schemes().items():
        if not each.supports(size):
            continue
        x = own.clone()
        Reducer(seed=3).reduce(x, each, step=5, bucket=2)
        again = own.clone()
        kept.reduce(again, each, step=5, bucket=2)
        other = own.clone()
        Reducer(seed=3).reduce(other, each, step=6, bucket=2)
        result[name] = {
            "bits": bits([x]),
            "repeats": torch.equal(x, again),
            "fresh": name == "FP32" or not torch.equal(x, other),
            "error": float((x.double() - exact).norm() / exact.norm()),
        }
    for x in (torch.empty(0), torch.zeros(700)):
        Reducer().reduce(x, schemes()["sum8"])
        assert x.isfinite().all() and not x.any()
    return result


def in_pieces(rank, size):
    """A bucket that is reduced in several pieces, of a length that no piece divides."""
    torch.manual_seed(rank)
    own, kept = torch.randn(1_200_001) * torch.logspace(-3, 1, 1_200_001), Reducer(seed=3)
    exact = own.double()
    dist.all_reduce(exact)
    exact /= size
    result = {}
    for name in ("sum8", "packed8", "two8", "linear"):
        x = own.clone()
        kept.reduce(x, schemes()[name], step=5, bucket=2)
        errors = (x.double() - exact).tensor_split(4)
        norms = [float(e.norm() / part.norm()) for e, part in zip(errors, exact.tensor_split(4), strict=True)]
        result[name] = {"bits": bits([x]), "errors": norms}
    own[700_000] = torch.nan
    Reducer(seed=3).reduce(own, schemes()["sum8"])
    result["spoiled"] = torch.nonzero(~own.isfinite()).flatten().tolist()
    return result


def trained(rank):
    """Losses under a mixture, the parameters' bits, and the same after a resumption in the middle."""
    torch.manual_seed(0)
    model = wrapped()
    state = qsync_opt.compress_gradients(model, "FP32", seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step_of(model, rank, 0, optimizer)
    step_of(model, rank, 1, optimizer)
    sizes = state.elements
    names = ["two8", "sum8", "BF16", "sum4", "FP32", "exponential"]
    plan = Plan(
        schemes={f"b{k}": names[k % len(names)] for k in range(len(sizes))},
        workers=dist.get_world_size(),
        elements=sizes,
    )
    state.use(plan)
    losses = [step_of(model, rank, 2 + k, optimizer) for k in range(8)]
    saved = state.state_dict()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    step_of(model, rank, 20, optimizer)
    first = bits(model.parameters())
    model.load_state_dict(kept)
    state.load_state_dict(saved)
    step_of(model, rank, 20, optimizer)
    return {
        "losses": losses, "bits": first, "resumed": bits(model.parameters()), "step": state.step, "sizes": sizes
    }  # fmt: skip


def plain_equals_ddp(rank):
    alone, hooked = wrapped(), wrapped()
    qsync_opt.compress_gradients(hooked, "FP32")
    for step in range(3):
        for model in (alone, hooked):
            model.zero_grad()
            step_of(model, rank, step)
    return bits(gradients(alone)) == bits(gradients(hooked))


def accumulated(rank):
    exact, compressed = wrapped(), wrapped()
    state = qsync_opt.compress_gradients(compressed, "two8")
    for model in (exact, compressed):
        step_of(model, rank, 0)
        model.zero_grad()
        with model.no_sync():
            step_of(model, rank, 1)
        step_of(model, rank, 2)
    a, b = (torch.cat([grad.flatten() for grad in gradients(model)]) for model in (exact, compressed))
    error = float((a - b).norm() / a.norm())
    return {"error": error, "nonzero": error > 0, "step": state.step, "bits": bits(gradients(compressed))}


def idle(rank):
    """Whether gradients are the rank's own inside the block, and those of all after it."""
    model, alone = wrapped(), net()
    state = qsync_opt.compress_gradients(model, "sum8")
    step_of(model, rank, 0)
    model.zero_grad()
    with state.idle():
        step_of(model, rank, 1)
    step_of(alone, rank, 1)
    own = all(torch.allclose(a, b) for a, b in zip(gradients(model), gradients(alone), strict=True))
    model.zero_grad()
    step_of(model, rank, 2)
    result = {"own": own, "step": state.step, "bits": bits(gradients(model))}
    timed = state.computation(lambda: time.sleep(0.02 * rank), 2)
    return {**result, "times": [timed.alone_ns, *timed.later_ns.items()]}


def not_finite(rank):
    model = wrapped()
    qsync_opt.compress_gradients(model, "sum8")
    step_of(model, rank, 0)
    model.zero_grad()
    x, y = batch(rank, 1)
    loss = (model(x) - y).square().mean() * (float("inf") if rank == 1 else 1.0)
    loss.backward()
    return all(bool(grad.isnan().any()) for grad in gradients(model))


def half(rank):
    model = wrapped(dtype=torch.bfloat16)
    qsync_opt.compress_gradients(model, "sum8")
    for step in range(2):
        model.zero_grad()
        step_of(model, rank, step, dtype=torch.bfloat16)
    return {"bits": bits(gradients(model)), "dtype": str(gradients(model)[0].dtype)}


def refused(rank, size):
    results = {}
    results["unlike"] = refusal(lambda: qsync_opt.compress_gradients(wrapped(), "sum8" if rank else "two8"))
    results["unknown"] = refusal(lambda: qsync_opt.compress_gradients(wrapped(), "sum9" if rank else "sum8"))
    wrong = uniform_plan("sum8", [10], size + 1)
    results["workers"] = refusal(lambda: qsync_opt.compress_gradients(wrapped(), wrong))
    results["unwrapped"] = refusal(lambda: qsync_opt.compress_gradients(net(), "sum8"))
    model = wrapped()
    qsync_opt.compress_gradients(model, uniform_plan("sum8", [17, 18], size))
    step_of(model, rank, 0)
    try:
        step_of(model, rank, 1)
    except Exception as failure:
        results["layout"] = f"{type(failure).__name__}: {failure}"
    model = wrapped()
    state = qsync_opt.compress_gradients(model, "sum8")
    results["state"] = refusal(lambda: state.load_state_dict({"seed": 1, "step": rank}))
    return results


def planned(rank):
    """Sampled statistics and measured times become a problem, its plan is used."""
    model = wrapped()
    state = qsync_opt.compress_gradients(model, "FP32")
    with state.sampling():
        for step in range(3):
            model.zero_grad()
            step_of(model, rank, step)
    statistics = state.statistics()
    times = measure_schemes(("FP32", "BF16", "sum8", "two8"), (256, 4096, 16384), repeats=2)
    count = len(statistics)
    problem = build_problem(statistics, times, [10_000 * k for k in range(count)], 10_000 * count, noise_share=0.5)
    solution = qsync_opt.solve(problem)
    state.use(solution.plan)
    model.zero_grad()
    step_of(model, rank, 5)
    return {
        "sizes": [each.elements for each in statistics] == list(state.elements),
        "noise": min(each.noise for each in statistics),
        "plan": dict(solution.plan.schemes),
        "variance": solution.evaluation.variance,
        "limit": problem.variance_limit,
        "bits": bits(gradients(model)),
    }


def plan_of_the_job(rank):
    """A model, and what `auto_plan` chooses for it and the buckets that DDP will have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 8))
    x, y = batch(rank, 0)
    options = qsync_opt.PlanningOptions(
        precisions=("FP32",), memory="1 GiB", progress=False, trial=False, compare=False, noise_share=0.5
    )
    plan = qsync_opt.auto_plan(
        model, x, loss=lambda output: (output - y).square().mean(), options=options, compress=True
    )
    return model, plan


def mixtures_in_turn(rank):
    """Schemes by bucket and what is said of them where a mixture is planned, and rank 0 finds it as fast, or not."""
    outcomes = []
    for is_kept in (True, False):

        def mixture(model, statistics, *, noise_share):
            names = [("FP32", "BF16")[k % 2] for k in range(len(model.elements))]
            return replace(model.single("FP32"), schemes={f"b{k}": name for k, name in enumerate(names)})

        def is_as_fast(turns, kept=is_kept):
            named = [{r.scheme for r in record.steps[0]} for record in turns[0]]
            return kept if rank == 0 and named[0] == {"FP32", "BF16"} and len(named[1]) == 1 else not kept

        with (
            mock.patch("qsync_opt.runtimes.torch.job.compressing.plan_reductions", mixture),
            mock.patch("qsync_opt.runtimes.torch.job.compressing.is_as_fast", is_as_fast),
        ):
            _, plan = plan_of_the_job(rank)
        outcomes.append([list(plan.compression.schemes.values()), plan.compression_note])
    return outcomes


def planned_by_the_job(rank):
    """The plan of a job is carried out."""
    model, plan = plan_of_the_job(rank)
    ddp = DistributedDataParallel(model)
    state = qsync_opt.compress_gradients(ddp, plan.compression)
    for step in range(2):
        ddp.zero_grad()
        step_of(ddp, rank, step)
    return {
        "bits": bits(gradients(ddp)), "elements": list(state.elements), "predicted": list(plan.compression.elements),
        "workers": plan.compression.workers, "described": f"gradients: {plan.compression_note}" in plan.describe(),
        "costs": None if plan.gradient_costs is None else len(plan.gradient_costs.statistics),
    }  # fmt: skip


def unbiased(rank, size, draws=60):
    """For groups of 1 to all workers, by scheme: how far projections of the mean error lie from 0, in their spreads."""
    result = {}
    for workers in range(1, size + 1):
        group = dist.new_group(range(workers))
        if rank >= workers:
            continue
        torch.manual_seed(rank)
        own = torch.randn(1024) * torch.logspace(-3, 1, 1024)
        exact, largest = own.double() / workers, own.abs()
        dist.all_reduce(exact, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        drawn = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0)).sign()
        directions = torch.cat([exact.sign()[None], drawn])
        directions = directions.double() / largest
        for name, each in schemes().items():
            if name == "FP32" or not each.supports(workers):
                continue
            errors = []
            for step in range(draws):
                x = own.clone()
                Reducer(seed=5, group=group).reduce(x, each, step=step)
                errors.append(x.double() - exact)
            projected = torch.stack(errors) @ directions.T
            spread = projected.std(0) / draws**0.5 + 1e-9
            result[f"{name} {workers}"] = float((projected.mean(0).abs() / spread).max())
    dist.barrier()
    return result


def recorded(rank):
    """Recorded steps under two schemes, the model that is fitted to them, and a mixture predicted by it."""
    model = wrapped()
    state = qsync_opt.compress_gradients(model, "FP32")
    step_of(model, rank, 0)
    refused = refusal(state.recorded)
    records = []
    for name in ("FP32", "sum8"):
        state.use(name)
        with state.recording():
            for step in range(4):
                step_of(model, rank, 1 + step)
        step_of(model, rank, 9)  # of the block alone
        records.append(state.recorded())
    fitted = fit_reductions(records)
    mixture = Plan(schemes={f"b{k}": ("FP32", "sum8")[k % 2] for k in range(len(state.elements))})
    times = measure_schemes(("FP32", "two8"), (256, 4096), repeats=1, beside=True)
    return {
        "refused": refused, "steps": [len(each.steps) for each in records], "elements": fitted.elements,
        "schemes": [sorted({r.scheme for step in each.steps for r in step}) for each in records],
        "buckets": len(state.elements), "predicted": fitted.predict(mixture)[-1].end_ns,
        "shortest": min(each.iteration_ns for each in records), "slowdowns": list(times.slowdowns.values()),
        "stretches": list(times.stretches.values()),
    }  # fmt: skip


def subgroup(rank):
    """The first two of three workers train; the third never hears of it."""
    group = dist.new_group([0, 1])
    result = None
    if rank < 2:
        model = wrapped(group=group)
        qsync_opt.compress_gradients(model, "sum8")
        for step in range(2):
            model.zero_grad()
            step_of(model, rank, step)
        result = bits(gradients(model))
    dist.barrier()
    return result


def closed_and_begun(rank):
    """Reductions that are closed and begun anew, by ranks that do not keep step."""
    seen = []
    for k in range(12):
        if k % 2 == rank:
            time.sleep(0.03)
        model = wrapped()
        state = qsync_opt.compress_gradients(model, "sum8")
        step_of(model, rank, 0)
        state.close()
        seen.append(bits(gradients(model)))
    return len(set(seen)) == 1


def lost(rank, result):
    """The last worker ends without a word in the middle of a step; nobody can go on after that."""
    model = wrapped()
    qsync_opt.compress_gradients(model, "sum8")
    step_of(model, rank, 0)
    step_of(model, rank, 1)
    dist.barrier()
    outcome = "gone"
    if rank < dist.get_world_size() - 1:
        before = bits(model.parameters())
        try:
            step_of(model, rank, 2)
        except Exception as failure:
            outcome = {"error": str(failure), "untouched": bits(model.parameters()) == before}
    print(json.dumps({**result, "lost": outcome}), flush=True)
    os._exit(0)


def main():
    rank, size, port, what = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    with process_group(rank, size, port, timeout_s=100):
        result = {"schemes": reduced_by_every_scheme(rank, size)}
        if what == "everything":
            result |= {
                "trained": trained(rank), "plain": plain_equals_ddp(rank), "accumulated": accumulated(rank),
                "idle": idle(rank), "not_finite": not_finite(rank), "half": half(rank), "refused": refused(rank, size),
                "planned": planned(rank), "pieces": in_pieces(rank, size), "by_the_job": planned_by_the_job(rank),
                "mixtures": mixtures_in_turn(rank),
                "recorded": recorded(rank), "closed": closed_and_begun(rank),
            }  # fmt: skip
        if what == "unbiased":
            result["unbiased"] = unbiased(rank, size)
        if what == "subgroup":
            result["subgroup"] = subgroup(rank)
        if what == "everything":
            lost(rank, result)
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
