import pytest
import torch
from torch import nn

from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.errors import ModelError, NotReadyError, ProblemError
from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply, device_formats, undo
from qsync_opt.runtimes.torch.job import PlanRefresher
from qsync_opt.runtimes.torch.profiling import profile
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import sensitivities
from qsync_opt.training import Plan, build_problem


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))), y)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


@pytest.fixture(scope="module")
def captured():
    return capture_model(Net(), batch(), name="net")


@pytest.fixture(scope="module")
def make_problem(captured):
    profiled = profile(captured, "cpu", precisions=("INT8", "BF16"), repeats=1, progress=False)
    cluster = Cluster(
        name="one",
        devices=(DeviceType(name="cpu", count=1, memory_limit_bytes=1 << 30, precisions=("INT8", "BF16", "FP32")),),
        network=Network(latency_s=0.0, bandwidth_bytes_per_s=1e9, source="none"),
    )

    def make(statistics):
        table = sensitivities(captured.graph, statistics, device_formats("cpu"))
        return build_problem(captured.graph, {"cpu": profiled}, table, cluster, latency_limit_ns=10**12)

    return make


LOW = {"a/linear": "INT8", "b/linear": "INT8", "c/linear": "INT8"}


def refresher(model, make_problem, captured, **options):
    plan = Plan(problem="net", devices={"cpu": LOW})
    apply(model, plan, "cpu", graph=captured.graph, options=ApplyOptions(kernels=KernelOptions(seed=3, offset=100)))
    settings = {"make_problem": make_problem, "every": 3, "graph": captured.graph, **options}
    return PlanRefresher(model, plan, "cpu", **settings)


def test_a_better_plan_is_put_on_after_every_steps(captured, make_problem):
    model = Net()
    refresh = refresher(model, make_problem, captured)
    moved = []
    for step in range(4):
        model(*batch(step)).backward()
        moved.append(refresh.step(batch(step)))
    assert moved == [False, False, True, False]
    # With a generous limit everything runs in FP32.
    assert set(refresh.plan.devices["cpu"].values()) == {"FP32"}
    assert set(applied_plan(model).precisions.values()) == {"FP32"}
    (decision,) = refresh.decisions
    assert decision.replaced
    assert decision.before.objective > 0


@pytest.mark.parametrize(
    ("probes", "kind"),
    [((1, 0, 0), "probed"), ((0, 1, 0), "progress"), ((0, 0, 0), "propagated"), ((0, 0, 1), "hessian")],
)
def test_statistics_have_what_the_indicator_of_the_problem_needs(captured, make_problem, probes, kind):
    seen = []

    def make(statistics):
        seen.append(sensitivities(captured.graph, statistics, device_formats("cpu"), kind=kind))
        return make_problem(statistics)

    options = dict(zip(("probes", "adaptive_probes", "curvature_probes"), probes, strict=True))
    refresh = refresher(Net(), make, captured, every=1, **options)
    refresh.step(batch())
    assert [table.kind for table in seen] == [kind]


def test_a_problem_in_shares_of_the_gradients_noise_is_refreshed_from_several_batches(captured, make_problem):
    seen = []

    def make(statistics):
        table = sensitivities(captured.graph, statistics, device_formats("cpu"))
        seen.append((statistics.batches, table.relative_to(statistics.gradient_noise, workers=1)))
        return make_problem(statistics)

    model = Net()
    refresh = refresher(model, make, captured, every=3, batches=2)
    for step in range(6):
        refresh.step(batch(step))
    assert [count for count, _ in seen] == [2, 2]
    undo(model)
    wanted = collect_statistics(model, [batch(4), batch(5)], graph=captured.graph, probes=1)
    table = sensitivities(captured.graph, wanted, device_formats("cpu"))
    shares = table.relative_to(wanted.gradient_noise, workers=1)
    assert {name: dict(row) for name, row in seen[1][1].items()} == {name: dict(row) for name, row in shares.items()}
    with pytest.raises(ProblemError, match="batches is 4, but between two looks there are 3"):
        PlanRefresher(model, refresh.plan, None, make_problem=make, every=3, batches=4)


def test_the_random_stream_goes_on(captured, make_problem):
    model = Net()
    refresh = refresher(model, make_problem, captured, improvement=0.5)
    for step in range(3):
        model(*batch(step))
        refresh.step(batch(step))
    # 100 at the start, and three passes since.
    assert applied_plan(model).options.kernels.offset == 103
    assert applied_plan(model).options.kernels.seed == 3


def test_a_plan_that_autocast_carries_out_gives_way_to_one_that_it_cannot(captured, make_problem):
    model, half = Net(), dict.fromkeys(LOW, "BF16")
    plan = Plan(problem="net", devices={"cpu": half})
    apply(model, plan, "cpu", graph=captured.graph, options=ApplyOptions(autocast="BF16"))
    refresh = PlanRefresher(model, plan, "cpu", make_problem=make_problem, every=1, graph=captured.graph)
    model(*batch()).backward()
    assert refresh.step(batch())
    assert set(applied_plan(model).precisions.values()) == {"FP32"}
    assert applied_plan(model).options.autocast is None


def test_a_plan_that_is_good_enough_stays(captured, make_problem):
    model = Net()
    plan = Plan(problem="net", devices={"cpu": dict.fromkeys(LOW, "FP32")})
    apply(model, plan, "cpu")
    refresh = PlanRefresher(model, plan, "cpu", make_problem=make_problem, every=1, graph=captured.graph)
    model(*batch())
    assert not refresh.step(batch())
    assert refresh.plan is plan
    assert applied_plan(model).device_type == "cpu"


def test_the_model_keeps_its_plan_when_looking_fails(captured):
    def broken(statistics):
        raise ProblemError("no profile any more")

    model = Net()
    refresh = refresher(model, broken, captured, every=1)
    model(*batch())
    with pytest.raises(ProblemError, match="no profile any more"):
        refresh.step(batch())
    assert applied_plan(model).precisions == LOW


def test_what_it_needs_is_checked_at_once(captured, make_problem):
    plan = Plan(problem="net", devices={"cpu": LOW})
    with pytest.raises(NotReadyError, match="no plan is applied"):
        PlanRefresher(Net(), plan, "cpu", make_problem=make_problem, every=2)
    with pytest.raises(ModelError, match="'T4'"):
        PlanRefresher(apply(Net(), plan, "cpu"), plan, "T4", make_problem=make_problem, every=2)
    with pytest.raises(ProblemError, match="every"):
        PlanRefresher(apply(Net(), plan, "cpu"), plan, "cpu", make_problem=make_problem, every=0)


def test_a_plan_that_somebody_took_off_is_reported(captured, make_problem):
    model = Net()
    refresh = refresher(model, make_problem, captured, every=1)
    model(*batch())
    undo(model)
    with pytest.raises(NotReadyError, match="taken off"):
        refresh.step(batch())


def test_all_ranks_move_together(run_workers):
    first, second = run_workers("refresh_worker.py")
    assert first["moved"] == second["moved"] == [False, True, False, False]
    assert first["plan"] == second["plan"]
    assert first["precisions"] == {}
    assert second["precisions"] == {"a/linear": "FP32", "c/linear": "FP32"}
    assert first["weights"] == second["weights"]
    assert second["said"].startswith("rank 0 failed: ProblemError: limits changed")
    assert first["said"] == "limits changed"
    assert first["kept"] == second["kept"] == [None, second["precisions"]]
    assert first["odd"] == "'T4'"
    assert second["odd"] == "rank 0 failed: KeyError: 'T4'"
    assert second["differs"] == first["differs"]
    assert "ranks 1 are not as rank 0" in first["differs"]
