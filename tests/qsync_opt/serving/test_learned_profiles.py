"""Profiles of devices that were measured in part or not at all, and what plans say of them."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.costs import estimate_lines
from qsync_opt.costs.learned import known_device, shipped_model
from qsync_opt.errors import ProblemError
from qsync_opt.report import serving_report_html
from qsync_opt.serving import (
    KINDS,
    Plan,
    Problem,
    ServeModel,
    ServeWorkload,
    ServingDevice,
    ServingProfile,
    build_serving_problem,
    fill_serving_profile,
    learned_serving_profile,
    plan_serving,
    roofline_serving_profile,
)
from qsync_opt.testing import make_device_vector, without_laws

MODEL = ServeModel(
    name="small", layers=6, hidden=512, inner=1536, heads=8, kv_heads=2, head_size=64, vocabulary=4000
)  # fmt: skip
WORKLOAD = ServeWorkload(prompts=8, prompt_tokens=64, new_tokens=32)
XEON = known_device("Intel Xeon, 1 thread")
SCHEMES = ("W4", "W8", "W16", "W32")


def measured(factor=1.0, schemes=SCHEMES, model=MODEL):
    """A profile as if measured, a factor slower than the laws say."""
    profile = learned_serving_profile(model, XEON, WORKLOAD, schemes=schemes, name="this CPU")
    return dataclasses.replace(profile, source="measured", estimates={}, costs=scaled(profile, factor))


def scaled(profile, factor):
    def table(each):
        return dataclasses.replace(
            each, values=tuple(tuple(round(factor * value) for value in line) for line in each.values)
        )

    return {
        kind: {
            scheme: dataclasses.replace(costs, prefill=table(costs.prefill), decode=table(costs.decode))
            for scheme, costs in schemes.items()
        }
        for kind, schemes in profile.costs.items()
    }


def without(profile, scheme, kinds=KINDS):
    def rest(tables):
        return {k: {s: x for s, x in t.items() if s != scheme or k not in kinds} for k, t in tables.items()}

    return dataclasses.replace(profile, costs=rest(profile.costs), weights_kib=rest(profile.weights_kib))


def entries(profile, kind, scheme):
    """Phase, rows, length and nanoseconds of every entry."""
    costs = profile.costs[kind][scheme]
    for phase, table in (("prefill", costs.prefill), ("decode", costs.decode)):
        for rows, line in zip(table.rows, table.values, strict=True):
            for length, value in zip(table.lengths, line, strict=True):
                yield phase, rows, length, value


def test_a_profile_without_holes_comes_back_as_it_is():
    profile = measured()
    assert fill_serving_profile(profile, XEON, schemes=SCHEMES) is profile


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_hole_agrees_with_what_was_measured_beside_it(scheme):
    whole = measured(1.7)
    filled = fill_serving_profile(without(whole, scheme), XEON, schemes=[scheme])
    for kind in KINDS:
        assert "corrected by what was measured" in filled.estimates[kind][scheme]
        assert filled.weights_kib[kind][scheme] == MODEL.weights_kib(kind, scheme)
        for one, other in zip(entries(whole, kind, scheme), entries(filled, kind, scheme), strict=True):
            assert one[-1] == pytest.approx(other[-1], rel=1e-3)
        for known in set(SCHEMES) - {scheme}:
            assert filled.costs[kind][known] == whole.costs[kind][known]
    assert ServingProfile.from_json(filled.to_json()) == filled


def test_prefilling_is_scaled_as_the_other_kind():
    whole = measured()
    # W8 is three times as slow as W4 in both kinds, which no law says.
    for kind in KINDS:
        costs = {**whole.costs[kind], "W8": scaled(measured(schemes=("W4",)), 3.0)[kind]["W4"]}
        whole = dataclasses.replace(whole, costs={**whole.costs, kind: costs})
    filled = fill_serving_profile(without(whole, "W8", kinds=["mlp"]), XEON, schemes=["W8"])
    assert filled.estimates.keys() == {"mlp"}
    assert filled.estimates["mlp"]["W8"].startswith("prefill scaled from W4 as attn, decode learned")
    for phase, *_, one, other in (
        (*a, b[-1]) for a, b in zip(entries(whole, "mlp", "W8"), entries(filled, "mlp", "W8"), strict=True)
    ):
        assert phase == "decode" or one == pytest.approx(other, rel=1e-3)


def test_without_a_law_there_is_the_roofline_corrected_too():
    profile = roofline_serving_profile(
        MODEL, "card", flops_per_s=1e14, bytes_per_s=3e11, schemes=("W4", "W16")
    )  # fmt: skip
    slow = dataclasses.replace(profile, source="measured", estimates={}, costs=scaled(profile, 5.0))
    vector = make_device_vector("card", peak_flops={"FP32": 1e14}, bandwidth_bytes_per_s=3e11, cache_bytes=1.0)
    filled = fill_serving_profile(slow, vector, without_laws(shipped_model()), schemes=["W8"])
    assert filled.estimates["attn"]["W8"] == "roofline of card, corrected by what was measured"
    for kind in KINDS:
        decode = [filled.costs[kind][s].decode.at(1, 16) for s in ("W4", "W8", "W16")]
        assert decode[0] < decode[1] < decode[2]
    nothing = learned_serving_profile(MODEL, known_device("T4"), WORKLOAD, without_laws(shipped_model()))
    assert nothing.estimated_by == "roofline of T4"


def test_cards_prefill_by_laws_and_decode_by_the_roofline():
    card = known_device("H200")
    profile, bare = (
        learned_serving_profile(MODEL, card, WORKLOAD, model) for model in (None, without_laws(shipped_model()))
    )
    for kind in KINDS:
        for scheme in ("W4", "W16"):
            text = profile.estimates[kind][scheme]
            assert text.startswith(f"prefill learned for {card.name}") and text.endswith(
                f", decode roofline of {card.name}"
            )
            own, floor = profile.costs[kind][scheme], bare.costs[kind][scheme]
            assert own.decode == floor.decode and own.prefill != floor.prefill
    # What was measured corrects it.
    known = dataclasses.replace(bare, costs=scaled(bare, 2.0), estimates={})
    filled = fill_serving_profile(without(known, "W8"), card, schemes=["W8"])
    assert "decode roofline of" in filled.estimates["mlp"]["W8"] and "corrected" in filled.estimates["mlp"]["W8"]
    decode = filled.costs["mlp"]["W8"].decode
    assert decode.at(8, 96) == pytest.approx(2 * bare.costs["mlp"]["W8"].decode.at(8, 96), rel=0.01)


@st.composite
def models(draw):
    size = draw(st.sampled_from([16, 64, 128]))
    kv_heads = draw(st.integers(1, 4))
    return ServeModel(
        name="any",
        layers=draw(st.integers(1, 80)),
        hidden=draw(st.integers(32, 8192)),
        inner=draw(st.integers(32, 20000)),
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_size=size,
        vocabulary=draw(st.integers(16, 200000)),
    )


@settings(max_examples=25, deadline=None)
@given(models(), st.sampled_from(["Intel Xeon, 1 thread", "AMD EPYC, 1 thread, AVX2 only", "T4", "H100"]), st.data())
def test_learned_times_rise_with_all_sizes_and_are_above_the_roofline(model, name, data):
    vector = known_device(name)
    workload = ServeWorkload(
        prompts=data.draw(st.integers(1, 64)),
        prompt_tokens=data.draw(st.integers(1, 2000)),
        new_tokens=data.draw(st.integers(1, 500)),
    )
    schemes = ("W4", "W8", "W16") if vector.kind == "cuda" else ("W4", "W8", "W32")
    profile = learned_serving_profile(model, vector, workload, schemes=schemes)
    form = next(f for f in ("BF16", "FP16") if f in vector.peak_flops) if vector.kind == "cuda" else "FP32"
    rate = max(vector.bandwidth_bytes_per_s, vector.cache_bytes_per_s)
    least = roofline_serving_profile(
        model, "least", flops_per_s=vector.peak(form), bytes_per_s=rate, schemes=schemes
    )  # fmt: skip
    for kind in KINDS:
        for phase, rows, length, value in entries(profile, kind, "W8"):
            table = getattr(least.costs[kind]["W8"], phase)
            assert value >= math.floor(table.at(rows, length))
        for narrow, wide in itertools.pairwise(schemes):
            pairs = zip(entries(profile, kind, narrow), entries(profile, kind, wide), strict=True)
            assert all(one[-1] <= other[-1] for one, other in pairs)
    build_serving_problem(model, [ServingDevice(name="d", memory_kib=1 << 30, profile=profile)], workload)


@settings(max_examples=15, deadline=None)
@given(models(), st.floats(0.1, 10))
def test_a_device_in_other_units_has_the_same_times_in_these_units(model, scale):
    one, other = (
        learned_serving_profile(model, make_device_vector("unseen", s), WORKLOAD, schemes=("W8",)) for s in (1.0, scale)
    )
    for kind in KINDS:
        for a, b in zip(entries(one, kind, "W8"), entries(other, kind, "W8"), strict=True):
            assert a[-1] / scale == pytest.approx(b[-1], rel=1e-6, abs=2 / min(scale, 1))


def test_problem_plan_and_page_say_what_was_estimated():
    part = fill_serving_profile(without(measured(), "W8"), XEON, schemes=["W8"])
    devices = [
        ServingDevice(name="one", memory_kib=60_000, profile=part),
        ServingDevice(name="two", memory_kib=60_000, profile=measured()),
    ]
    result = plan_serving(MODEL, devices, WORKLOAD, schemes=("W8",))
    (line,) = estimate_lines(result.problem.extras)
    assert line.startswith("costs of one are estimates: attn W8, mlp W8: learned for Intel Xeon, 1 thread")
    assert line.endswith("unlike the training data")
    assert estimate_lines(result.plan.extras) == (line,)
    assert Problem.from_json(result.problem.to_json()).extras == result.problem.extras
    assert estimate_lines(Plan.from_json(result.plan.to_json()).extras) == (line,)
    assert estimate_lines(qsync_opt.solve(result.problem, "exact").plan.extras) == (line,)
    assert "Costs of one are estimates" in serving_report_html(result)
    silent = plan_serving(MODEL, devices[1:], WORKLOAD, schemes=("W8",))
    assert not silent.problem.extras and not silent.plan.extras


def test_wrong_input_is_named():
    profile = without(measured(), "W8")
    with pytest.raises(ProblemError, match=r"scheme is 'W5'.*allowed are W4, W8, W16, W32"):
        fill_serving_profile(profile, XEON, schemes=["W5"])
    with pytest.raises(ProblemError, match="scheme is 'W5'"):
        learned_serving_profile(MODEL, XEON, WORKLOAD, schemes=["W5"])
    with pytest.raises(ProblemError, match="has no costs at all"):
        nothing = {kind: {} for kind in KINDS}
        empty = dataclasses.replace(profile, costs=nothing, weights_kib=nothing)
        fill_serving_profile(empty, XEON, schemes=["W8"])
    with pytest.raises(ProblemError, match=r"'W8'; it has W4, W16, W32: .*--costs learned"):
        profile.check_scheme("W8")
    with pytest.raises(ProblemError, match="estimates names kind 'attn' and scheme 'W8'"):
        dataclasses.replace(profile, estimates={"attn": {"W8": "learned"}})
