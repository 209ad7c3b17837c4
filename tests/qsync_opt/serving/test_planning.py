"""Profiles, problems that are built from them, predictions, and what is refused."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import ProblemError
from qsync_opt.report import serving_report_html, write_serving_report
from qsync_opt.serving import (
    KINDS,
    Harm,
    Microbatch,
    ServeModel,
    ServeWorkload,
    ServingDevice,
    ServingMeasurement,
    Table,
    build_serving_problem,
    default_microbatches,
    load_harm,
    load_serving_profile,
    plan_serving,
    roofline_serving_profile,
    rounding_harm,
)

MODEL = ServeModel(
    name="small", layers=6, hidden=512, inner=1536, heads=8, kv_heads=2, head_size=64, vocabulary=4000
)  # fmt: skip
WORKLOAD = ServeWorkload(prompts=8, prompt_tokens=64, new_tokens=32)


def profile(speed=1.0, schemes=("W4", "W8", "W16"), model=MODEL):
    return roofline_serving_profile(
        model, "card", flops_per_s=1e12 * speed, bytes_per_s=2e10 * speed, schemes=schemes
    )  # fmt: skip


def devices(memory=(40_000, 20_000), **options):
    return [
        ServingDevice(name=name, memory_kib=kib, profile=profile(speed, **options))
        for name, kib, speed in zip(("fast", "slow"), memory, (2.0, 1.0), strict=True)
    ]


def test_caches_and_what_loading_needs_are_not_there_at_once():
    def predicted(load_kib):
        loading = dataclasses.replace(profile(), base_kib=1000, load_kib=load_kib)
        result = plan_serving(MODEL, [ServingDevice(name="d", memory_kib=100_000, profile=loading)], WORKLOAD)
        (stage,), plan = result.predict().stages, result.plan
        caches = sum(result.problem.state_kib[name.partition(".")[2]][plan.microbatch] for name in stage.groups)
        return stage.memory_kib, result.predict().evaluation.memory_kib["d"], caches

    served, held, caches = predicted(0)
    assert caches > 100 and served > held + 1000
    assert predicted(caches)[0] == served
    # Weights and the ends, and what loading needs.
    assert predicted(50_000)[0] == held - caches + 1000 + 50_000


def test_links_hold_memory_where_there_are_several_stages():
    def planned(link_kib, counts):
        linked = dataclasses.replace(profile(), base_kib=1000, link_kib=link_kib)
        cards = [ServingDevice(name=f"d{k}", memory_kib=25_000, profile=linked) for k in range(counts)]
        return plan_serving(MODEL, cards, WORKLOAD, schemes=("W8",))

    plain, linked = planned(0, 2), planned(700, 2)
    assert len(plain.plan.stages) == 2
    free = [{device.name: device.memory_kib for device in each.problem.devices} for each in (plain, linked)]
    assert all(free[0][name] - free[1][name] == 700 for name in free[0])
    pairs = zip(plain.predict().stages, linked.predict(plain.plan).stages, strict=True)
    assert all(b.memory_kib - a.memory_kib == 700 for a, b in pairs)
    alone = planned(700, 1)
    assert alone.problem.devices == planned(0, 1).problem.devices


def test_one_device_alone_has_the_memory_of_links():
    linked = dataclasses.replace(profile(), base_kib=1000, link_kib=4_000, link_ns=2_000_000)
    cards = [ServingDevice(name=f"d{k}", memory_kib=36_000 - k, profile=linked) for k in range(2)]
    together = qsync_opt.solve(build_serving_problem(MODEL, cards, WORKLOAD, schemes=("W8",)), "exact")
    assert len(together.plan.stages) == 2  # one would need more than links leave
    planned = plan_serving(MODEL, cards, WORKLOAD, schemes=("W8",), method="exact")
    assert [device.name for device in planned.devices] == [stage.device for stage in planned.plan.stages] == ["d0"]
    assert planned.solution.objective < together.objective
    assert planned.solution.bound <= planned.solution.objective
    assert planned.solution.termination == "optimal"
    prediction = planned.predict()
    assert prediction.evaluation.feasible and prediction.stages[0].memory_kib <= cards[0].memory_kib
    # Where several are faster all the same, or the only way, nothing changes.
    quick = dataclasses.replace(linked, link_ns=0)
    for memory in (36_000, 26_000):
        few = [ServingDevice(name=f"d{k}", memory_kib=memory, profile=quick) for k in range(2)]
        alone = [plan_serving(MODEL, [card], WORKLOAD, schemes=("W8",)).solution.objective for card in few]
        best = plan_serving(MODEL, few, WORKLOAD, schemes=("W8",), method="exact").solution.objective
        assert best <= min((each for each in alone if each is not None), default=math.inf)


def test_costs_are_longer_everywhere():
    costs = profile().costs["mlp"]["W4"]
    longer = costs.longer_by(50)
    for phase in ("prefill", "decode"):
        assert getattr(longer, phase).at(3, 17) == pytest.approx(getattr(costs, phase).at(3, 17) + 50)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 20), st.integers(0, 20))
def test_tables_never_decrease_and_meet_their_points(rows, length, more_rows, more):
    table = Table(rows=(2, 8, 16), lengths=(4, 16), values=((5, 9), (4, 30), (20, 25)))
    assert table.at(rows, length) <= table.at(rows + more_rows, length + more)
    assert table.at(8, 16) == 30
    assert table.at(8, 4) == 5  # what was measured faster with more rows was noise
    assert table.at(32, 16) == 2 * table.at(16, 16)


@pytest.mark.parametrize("change", [{"rows": (2, 2)}, {"lengths": ()}, {"values": ((1,),)}, {"rows": (0, 1)}])
def test_bad_tables(change):
    with pytest.raises(ProblemError, match="table"):
        Table(**{"rows": (1, 2), "lengths": (1,), "values": ((1,), (2,)), **change})


def test_profiles_are_files(tmp_path):
    profile().save(tmp_path / "card.json")
    assert load_serving_profile(tmp_path / "card.json") == profile()
    data = json.loads((tmp_path / "card.json").read_text())
    data["costs"].pop("mlp")
    data.pop("digest", None)
    data.pop("x-digest", None)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ProblemError, match="lacks the kind 'mlp'"):
        load_serving_profile(tmp_path / "bad.json")
    (tmp_path / "cut.json").write_text((tmp_path / "card.json").read_text()[:200])
    with pytest.raises(ProblemError, match=r"cut\.json"):
        load_serving_profile(tmp_path / "cut.json")


def test_a_problem_says_what_the_profiles_say():
    problem = build_serving_problem(MODEL, devices(), WORKLOAD, microbatches=[Microbatch(prefill=4, decode=2)])
    assert [group.name for group in problem.groups] == list(MODEL.groups)
    card = profile(2.0)
    times = problem.costs["fast"]["mlp"]["W4"][0]
    assert times.prefill == round(card.costs["mlp"]["W4"].prefill.at(2, 64))
    assert times.decode == round(card.costs["mlp"]["W4"].decode.at(4, 64 + 16))
    assert problem.state_kib["attn"] == (8 * 2 * 96 * 2 * 64 * 2 // 1024,)
    assert problem.weights_kib["mlp"]["W16"] == 3 * 512 * 1536 * 2 // 1024
    assert qsync_opt.load_problem  # the file of such a problem is one of the system's
    assert type(problem).from_json(problem.to_json()) == problem


def test_a_plan_is_predicted_stage_by_stage():
    result = qsync_opt.plan_serving(MODEL, devices(), WORKLOAD, harm_limit=0.5, method="exact")
    assert result.plan is not None and result.solution.termination == "optimal"
    prediction = result.predict()
    assert prediction.evaluation.total_ns == result.solution.objective
    assert math.isclose(prediction.prefill_s + prediction.decode_s, prediction.evaluation.total_ns / 1e9)
    assert prediction.decode_tokens_per_s == pytest.approx(8 * 31 / prediction.decode_s)
    limits = {device.name: device.memory_kib for device in result.devices}
    for stage in prediction.stages:
        assert stage.memory_kib <= limits[stage.device]
        assert sum(stage.schemes.values()) == len(stage.groups)
    assert prediction.harm <= 0.5 * (1 + 1e-9)
    assert json.dumps(prediction.to_json())


def test_more_memory_a_faster_device_or_more_harm_never_hurts():
    def seconds(memory=(40_000, 20_000), limit=0.3):
        result = plan_serving(MODEL, devices(memory), WORKLOAD, harm_limit=limit, method="exact")
        return result.solution.objective

    first = seconds()
    assert seconds((60_000, 20_000)) <= first
    assert seconds((40_000, 30_000)) <= first
    assert seconds(limit=1.0) <= first


def test_what_fits_nowhere_names_the_device_and_what_is_missing():
    result = plan_serving(MODEL, devices((9_000, 9_000)), WORKLOAD)
    assert result.plan is None
    assert "memory" in result.reason and "KiB more" in result.reason and "device" in result.reason
    with pytest.raises(ProblemError, match="no plan to predict"):
        result.predict()
    with pytest.raises(ProblemError, match="no plan to report"):
        serving_report_html(result)
    heavy = [ServingDevice(name="d", memory_kib=500, profile=dataclasses.replace(profile(), base_kib=1000))]
    result = plan_serving(MODEL, heavy, WORKLOAD)
    assert result.plan is None and "on 'd'" in result.reason and "caches of both phases" in result.reason
    result = plan_serving(MODEL, devices(), WORKLOAD, harm_limit=0.0, schemes=("W4", "W8"))
    assert result.plan is None and "harm" in result.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schemes": ("W4", "W3")}, "no costs of kind 'attn' in scheme 'W3'"),
        ({"harm": {}}, "harm lacks the group '0.attn'"),
        ({"harm": {g: {"W4": 1.0, "W8": math.nan, "W16": 0.0} for g in MODEL.groups}}, "'W8' is nan"),
        ({"harm": {g: {"W4": 1.0, "W8": math.inf, "W16": 0.0} for g in MODEL.groups}}, "'W8' is inf"),
        ({"harm": {g: {"W4": 1.0} for g in MODEL.groups}}, "lacks the scheme 'W8'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ProblemError, match=message):
        build_serving_problem(MODEL, devices(), WORKLOAD, **options)


def test_profiles_of_other_models_and_without_a_common_scheme_are_refused():
    other = dataclasses.replace(MODEL, layers=7)
    with pytest.raises(ProblemError, match="other sizes"):
        build_serving_problem(other, devices(), WORKLOAD)
    unlike = [
        ServingDevice(name=s, memory_kib=40_000, profile=profile(schemes=(s,))) for s in ("W4", "W8")
    ]  # fmt: skip
    with pytest.raises(ProblemError, match="no scheme in common"):
        build_serving_problem(MODEL, unlike, WORKLOAD)
    with pytest.raises(ProblemError, match="at least one is needed"):
        build_serving_problem(MODEL, [], WORKLOAD)
    with pytest.raises(ProblemError, match="flops_per_s"):
        roofline_serving_profile(MODEL, "x", flops_per_s=0, bytes_per_s=1)
    with pytest.raises(ProblemError, match="W5"):
        profile(schemes=("W5",))


def test_prompts_beyond_the_plan_are_refused():
    WORKLOAD.check([[1] * 64] * 8)
    with pytest.raises(ProblemError, match="prompt 1 has 65 tokens"):
        WORKLOAD.check([[1], [1] * 65])
    with pytest.raises(ProblemError, match="9 prompts"):
        WORKLOAD.check([[1]] * 9)


def test_options_and_assumed_harm():
    options = default_microbatches(6)
    assert [(o.prefill, o.decode) for o in options] == [(1, 1), (4, 1), (2, 2), (4, 2), (4, 4)]
    harm = rounding_harm(MODEL, ("W4", "W8", "W16"))
    assert sum(values["W4"] for values in harm.values()) == pytest.approx(1)
    assert all(values["W16"] == 0 and values["W4"] == 256 * values["W8"] for values in harm.values())
    shares = harm["0.mlp"]["W4"] / harm["0.attn"]["W4"]
    assert shares == pytest.approx(MODEL.parameters("mlp") / MODEL.parameters("attn"))
    with pytest.raises(ProblemError, match="named by its bits"):
        rounding_harm(MODEL, ("int4",))


def test_harm_files(tmp_path):
    harm = Harm(model="m", measure="output error", tokens=300, groups={"0.attn": {"W4": 0.25}})
    harm.save(tmp_path / "harm.json")
    assert load_harm(tmp_path / "harm.json") == harm
    data = {**harm.to_json(), "groups": {"0.attn": {"W4": -1.0}}}
    with pytest.raises(ProblemError, match="at least 0"):
        Harm.from_json(data)
    with pytest.raises(ProblemError, match="groups is empty"):
        Harm.from_json({**data, "groups": {}})


def test_the_page_of_a_plan(tmp_path):
    model = dataclasses.replace(MODEL, name="<b>&")
    result = plan_serving(model, devices(model=model), WORKLOAD)
    measured = ServingMeasurement(
        label="planned", prefill_tokens_per_s=1e3, decode_tokens_per_s=1e2, memory_kib={"fast": 30_000, "slow": 2_000}
    )
    size = write_serving_report(result, tmp_path / "page.html", measured=measured, note="made in a test")
    text = (tmp_path / "page.html").read_text()
    assert size == len(text.encode())
    assert "&lt;b&gt;&amp;" in text and "<b>" not in text
    for words in ("than predicted", "Micro-batches", "made in a test", *(f"on {s.device}" for s in result.plan.stages)):
        assert words in text
    assert "<script" not in text and "http" not in text.replace("Content-Security-Policy", "").replace("http-equiv", "")


def test_kinds_are_those_of_the_groups():
    assert {name.partition(".")[2] for name in MODEL.groups} == set(KINDS)
