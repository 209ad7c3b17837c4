"""Records, features, fits and predictions of learned costs."""

import gzip
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qsync_opt.cluster import DATA_SHEETS
from qsync_opt.costs.learned import (
    CostRecord,
    Leaf,
    LeafKind,
    LearnedModel,
    Phase,
    Program,
    Sample,
    Split,
    Workload,
    check_same_devices,
    check_times,
    class_name,
    fit_law,
    fit_laws,
    group_keys,
    interval_quantile,
    kernel_of,
    load_model,
    load_record,
    merge_records,
    outliers,
    parts,
    predict_samples,
    programs_of,
    reference_ns,
    sheet_vector,
    shipped_model,
    summary,
    with_observed_rates,
)
from qsync_opt.errors import ProblemError
from qsync_opt.model import Role, TensorSpec
from qsync_opt.numerics import formats_for
from qsync_opt.testing import linear_workload, make_cost_record, make_device_vector, pointwise_workload

pytest.importorskip("scipy")
FORMATS = formats_for(("INT8", "BF16", "FP32"), "BF16")


@pytest.fixture(scope="module")
def record() -> CostRecord:
    return make_cost_record()


@pytest.fixture(scope="module")
def model(record: CostRecord) -> LearnedModel:
    return fit_laws(record, errors=False, rounds=2)


def test_a_record_survives_its_file_and_equal_records_give_equal_bytes(record: CostRecord, tmp_path: Path) -> None:
    record.save(tmp_path / "a.gz")
    record.save(tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert load_record(tmp_path / "a.gz") == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format="qsync-cost-record/9"), "qsync-cost-record/9"),
        (lambda data: data["samples"][0].update(ns=0), "above zero"),
        (lambda data: data["samples"][0].update(ns=-1), "-1"),
        (lambda data: data["samples"][0].update(workload=10**6), "1000000"),
        (lambda data: data["devices"][0].update(wings=2), "wings"),
        (lambda data: data["devices"][0].update(bandwidth_bytes_per_s=0), "bandwidth_bytes_per_s"),
        (lambda data: data["devices"][0]["peak_flops"].pop("FP32"), "FP32"),
        (lambda data: data["samples"][0].update(phase="sideways"), "sideways"),
    ],
)
def test_a_spoiled_record_is_refused_by_name(record: CostRecord, tmp_path: Path, change, message: str) -> None:
    record.save(tmp_path / "r.gz")
    data = json.loads(gzip.decompress((tmp_path / "r.gz").read_bytes()))
    change(data)
    (tmp_path / "r.gz").write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(ProblemError, match=message):
        load_record(tmp_path / "r.gz")


def test_nan_and_damaged_files_are_refused(record: CostRecord, tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    path.write_bytes(gzip.compress(b'{"format": "qsync-cost-record/1", "samples": [NaN]}'))
    with pytest.raises(ProblemError, match="NaN"):
        load_record(path)
    record.save(path)
    whole = path.read_bytes()
    for content in (whole[:100], b"no gzip", b""):
        path.write_bytes(content)
        with pytest.raises(ProblemError, match=r"cannot read|not valid"):
            load_record(path)


def test_times_that_are_all_equal_or_too_few_cannot_be_fitted(record: CostRecord) -> None:
    equal = replace(record, samples=tuple(replace(sample, ns=1000) for sample in record.samples))
    with pytest.raises(ProblemError, match=r"all .* times"):
        check_times(equal)
    with pytest.raises(ProblemError, match="at least 40"):
        fit_laws(record.select(range(10)))


def test_a_changed_device_is_refused() -> None:
    slow = make_device_vector(bandwidth_bytes_per_s=1e10)
    with pytest.raises(ProblemError, match="differ by 50 %"):
        check_same_devices([make_device_vector(), slow])
    with pytest.raises(ProblemError, match="differ by 50 %"):
        merge_records([make_cost_record(3), make_cost_record(3, (slow,))])


def test_merging_keeps_every_sample_and_shares_workloads(record: CostRecord) -> None:
    other = make_cost_record(30, (make_device_vector("other", 3.0),))
    merged = merge_records([record, other])
    assert len(merged) == len(record) + len(other)
    assert merged.workloads == record.workloads
    assert [device.name for device in merged.devices] == ["device", "other"]
    assert merged.program(merged.samples[-1]) == other.program(other.samples[-1])


def test_an_outlier_stands_out(record: CostRecord) -> None:
    place = 7
    samples = list(record.samples)
    samples[place] = replace(samples[place], ns=20 * samples[place].ns)
    assert outliers(replace(record, samples=tuple(samples)))[0] == place


def test_empty_tensors_have_no_time_to_predict() -> None:
    empty = replace(linear_workload(4, 4, 4), outputs=(TensorSpec(shape=(0, 4), dtype="float32"),))
    with pytest.raises(ProblemError, match="size zero"):
        programs_of(empty, "FP32", FORMATS["FP32"])


def test_leaves_of_a_linear_operator_by_hand() -> None:
    forward, backward = programs_of(linear_workload(8, 16, 32), "INT8", FORMATS["INT8"])
    assert [leaf.kind for leaf in forward.leaves] == [LeafKind.QUANTIZE, LeafKind.QUANTIZE, LeafKind.PRODUCT]
    product = forward.leaves[-1]
    assert (product.rows, product.columns, product.depth) == (8, 32, 16)
    assert product.num_bytes == 8 * 16 + 16 * 32 + 8 * 32 * 2  # codes in, BF16 out
    # One product for the input's gradient, one for the weight's, in BF16; then the weight's gradient becomes FP32.
    assert [leaf.kind for leaf in backward.leaves] == [LeafKind.PRODUCT, LeafKind.PRODUCT, LeafKind.CAST]
    assert {leaf.number_format for leaf in backward.leaves} == {"BF16"}
    assert [(leaf.rows, leaf.columns, leaf.depth) for leaf in backward.leaves[:2]] == [(8, 16, 32), (32, 16, 8)]


def test_a_backward_pass_in_8_bits_has_the_forward_pass_of_its_sibling_and_8_bit_products() -> None:
    formats = formats_for(("INT8", "INT8-BWD8", "BF16", "FP32"), "BF16")
    work = linear_workload(8, 16, 32)
    plain, both = (programs_of(work, precision, formats[precision]) for precision in ("INT8", "INT8-BWD8"))
    assert kernel_of(both[0]) == kernel_of(plain[0])
    assert both[0].leaves == plain[0].leaves
    assert [leaf.number_format for leaf in both[1].leaves] == ["BF16", "INT8", "INT8", "INT8"]
    assert class_name(both[1]) == class_name(plain[0])
    assert class_name(plain[1]) == "product BF16 backward"


def _passes(kind: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], **changes: Any) -> tuple[float, float]:
    """Bytes that both passes of an operator in BF16 move; gradients flow into all inputs unless ``changes`` say so."""
    specs = tuple(TensorSpec(shape=shape, dtype="float32") for shape in inputs)
    result = (TensorSpec(shape=output, dtype="float32"),)
    work = Workload(
        kind=kind, role=Role.DEPENDENT, inputs=specs, outputs=result, **({"gradients": len(inputs)} | changes)
    )
    forward, backward = programs_of(work, "BF16", FORMATS["BF16"])
    return forward.num_bytes, backward.num_bytes


def test_bytes_are_those_that_a_pass_must_move() -> None:
    """By hand, for tensors of 32 elements of two bytes."""
    x, n = (4, 8), 32
    assert _passes("add", [x, x], x) == (6 * n, 0)  # the gradient is handed on
    assert _passes("add", [x, (8,)], x) == (4 * n + 16, 2 * n + 16)  # and summed where an operand was repeated
    assert _passes("add", [x, (8,)], x, gradients=1) == (4 * n + 16, 0)
    assert _passes("cat", [x, x], (8, 8)) == (8 * n, 0)  # views of the gradient
    assert _passes("sum", [x], (4,)) == (2 * n + 8, 0)  # the gradient, repeated
    assert _passes("mean", [x], (4,)) == (2 * n + 8, 2 * n + 8)
    assert _passes("dropout", [x], x) == (5 * n, 5 * n)  # with a mask of one byte
    assert _passes("max_pool2d", [(1, 1, *x)], (1, 1, 2, 4)) == (2 * n + 10 * 8, 2 * n + 10 * 8)  # with indices
    assert _passes("relu", [x], x) == (4 * n, 6 * n)  # from its result
    assert _passes("gelu", [x], x) == (4 * n, 6 * n)  # from its input
    assert _passes("mul", [x, x], x) == (6 * n, 10 * n)
    assert _passes("mul", [x, (1,)], x, gradients=1) == (4 * n + 2, 4 * n + 2)
    assert _passes("gather", [(100, 8)], x) == (4 * n, 2 * n + 2 * 800)


def test_a_gradient_is_handed_on_once_or_as_a_view_per_operand() -> None:
    x = pointwise_workload("add", 4, 8)
    for kind, views in (("add", 1), ("cat", 3)):
        work = replace(x, kind=kind, inputs=x.inputs * 3, gradients=3)
        _, backward = programs_of(work, "BF16", FORMATS["BF16"])
        assert [leaf.kind for leaf in backward.leaves] == [LeafKind.VIEW] * views
        assert class_name(backward) == "view"
        assert kernel_of(backward) == f"{kind} BF16 backward view"


def test_rows_of_a_table_that_are_read_again_are_in_the_cache() -> None:
    inputs = TensorSpec(shape=(3, 4), dtype="float32"), TensorSpec(shape=(10,), dtype="int64")
    outputs = (TensorSpec(shape=(10, 4), dtype="float32"),)
    work = Workload(kind="embedding", role=Role.DEPENDENT, inputs=inputs, outputs=outputs, weight_elements=12)
    forward, backward = programs_of(work, "BF16", FORMATS["BF16"])
    assert forward.num_bytes == 40 * (4 + 2) + 80
    assert forward.least_bytes == 12 * 4 + 40 * 2 + 80
    cleared = 12 * 4
    assert backward.num_bytes == 40 * (2 + 2 * 4) + cleared
    assert backward.least_bytes == 40 * 2 + 2 * 12 * 4 + cleared


def test_operations_that_kernels_save_do_not_count_for_the_roofline() -> None:
    """A causal mask halves attention, and Winograd's convolutions need a quarter at best."""
    device = make_device_vector()
    x, weight = (TensorSpec(shape=shape, dtype="float32") for shape in ((2, 32, 8, 8), (32, 32, 3, 3)))
    work = replace(linear_workload(1, 1, 1), kind="conv2d", inputs=(x, weight), outputs=(x,), flops=2**40)
    full_ns = 1e9 * 2**40 / device.peak("FP32")
    assert device.computed_ns(programs_of(work, "FP32", FORMATS["FP32"])[0]) == pytest.approx(full_ns / 4)
    narrow = TensorSpec(shape=(32, 32, 1, 1), dtype="float32")
    plain = replace(work, inputs=(x, narrow))
    assert device.computed_ns(programs_of(plain, "FP32", FORMATS["FP32"])[0]) == pytest.approx(full_ns)
    attention = replace(work, kind="scaled_dot_product_attention", inputs=(x, x, x), weight_elements=0)
    assert device.computed_ns(programs_of(attention, "FP32", FORMATS["FP32"])[0]) == pytest.approx(full_ns / 2)


RECORDS = sorted((Path(__file__).parents[4] / "benchmarks" / "records").glob("costs-*.json.gz"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_no_recorded_time_is_below_the_roofline(path: Path) -> None:
    record = load_record(path)
    slack = 1 + 1e-9
    assert all(device.floor_ns(program) <= slack * sample.ns for program, device, sample in record.programs())


def test_laws_of_processors_are_the_same_with_and_without_a_card() -> None:
    """In weights and in intervals."""
    processors = make_cost_record(30, (make_device_vector(), make_device_vector("other", 2.0)))
    card = make_cost_record(30, (make_device_vector("card", 100.0, kind="cuda"),), seed=1)
    alone = fit_laws(processors, errors=False, rounds=2)
    both = fit_laws(merge_records([processors, card]), errors=False, rounds=2)
    places = [both.places[name] for name in alone.names]
    assert len(both.names) > len(places)
    np.testing.assert_array_equal(both.weights_LT[places], alone.weights_LT)
    np.testing.assert_array_equal(both.ends_LS2[places], alone.ends_LS2)
    assert predict_samples(both, processors) == predict_samples(alone, processors)


def test_the_model_of_the_package_is_fitted_to_the_records() -> None:
    card = shipped_model().card
    assert card.training_digest == merge_records([load_record(path) for path in RECORDS]).digest()
    assert {vector.kind for vector in card.vectors} == {"cpu", "cuda"}
    assert {"workload, cpu", "workload, cuda"} <= set(card.errors)


def test_splits_share_no_part_and_leak_nothing(record: CostRecord) -> None:
    devices = (make_device_vector(), make_device_vector("other", 2.0))
    both = make_cost_record(20, devices)
    for split in Split:
        keys = group_keys(both, split)
        tested: list[int] = []
        for _, train, test in parts(both, split):
            assert not {keys[i] for i in train} & {keys[i] for i in test}
            tested += test
        expected = [i for i, s in enumerate(both.samples) if split is not Split.MODEL or s.model != "sweep"]
        assert sorted(tested) == expected
    # The operators of a model that is held out are not trained on as parts of another one.
    shapes = group_keys(both, Split.WORKLOAD)
    for _, train, test in parts(both, Split.MODEL):
        assert not {shapes[i] for i in train} & {shapes[i] for i in test}


def test_a_model_that_memorises_rows_gains_nothing_on_held_out_parts() -> None:
    """With times drawn at random per workload, errors on held-out workloads must be those of guessing."""
    record = make_cost_record(24)
    rng = np.random.default_rng(0)
    factor = {w: math.exp(rng.normal(0, 0.7)) for w in range(len(record.workloads))}
    noisy = replace(record, samples=tuple(replace(s, ns=factor[s.workload] * 10 * s.ns) for s in record.samples))
    _, train, test = next(parts(noisy, Split.WORKLOAD))
    model = fit_laws(noisy.select(train), errors=False, rounds=1)

    def error(places: list[int]) -> float:
        held = noisy.select(places)
        return summary([s.ns for s in held.samples], predict_samples(model, held))["median"]

    assert error(test) > 0.25
    assert error(test) > 0.9 * error(train)


def test_the_fit_finds_the_formula_and_its_intervals_cover(record: CostRecord) -> None:
    _, train, test = next(parts(record, Split.WORKLOAD))
    held = record.select(test)
    errors = summary([s.ns for s in held.samples], predict_samples(fit_laws(record.select(train), errors=False), held))
    assert errors["median"] < 0.1
    assert errors["coverage"] > 0.8


def test_equal_records_give_equal_models(record: CostRecord, model: LearnedModel, tmp_path: Path) -> None:
    model.save(tmp_path / "a.npz")
    fit_laws(record, errors=False, rounds=2).save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_law_is_found_through_disturbed_times() -> None:
    rng = np.random.default_rng(0)
    terms = np.exp(rng.uniform(0, 6, (200, 4)))
    truth = np.array([2.0, 0.0, 0.5, 1.5])
    clean = terms @ truth
    disturbed = clean * np.where(rng.random(200) < 0.2, rng.uniform(1.5, 5.0, 200), 1.0)
    found = fit_law(terms, disturbed)
    assert (found >= 0).all()
    assert np.median(np.abs(terms @ found / clean - 1)) < 0.02


def test_few_times_move_a_law_little_and_many_decide_it() -> None:
    rng = np.random.default_rng(1)
    terms, prior, truth = np.exp(rng.uniform(0, 4, (100, 3))), np.array([1.0, 1.0, 1.0]), np.array([4.0, 0.5, 1.0])
    ns = terms @ truth

    def distance(count: int) -> float:
        return float(np.median(np.abs(np.log(terms @ fit_law(terms[:count], ns[:count], prior) / ns))))

    # One time sets half of the level; the shape stays that of the wider law.
    one = fit_law(terms[:1], ns[:1], prior)
    assert np.ptp(one / one.mean()) < np.ptp(truth / truth.mean())
    assert distance(100) < 0.1
    assert distance(100) < distance(1)


def test_a_model_survives_its_file(model: LearnedModel, record: CostRecord, tmp_path: Path) -> None:
    model.save(tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    assert again.card == model.card
    assert predict_samples(again, record) == predict_samples(model, record)


def _rewritten(path: Path, change) -> None:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    change(arrays)
    with path.open("wb") as stream:
        np.savez(stream, **arrays)


def _with_card(change):
    def apply(arrays) -> None:
        card = json.loads(arrays["card"].tobytes())
        change(card)
        arrays["card"] = np.frombuffer(json.dumps(card).encode(), np.uint8)

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_card(lambda card: card.update(feature_version=99)), "version 99"),
        (_with_card(lambda card: card.update(format="other/1")), "other/1"),
        (lambda arrays: arrays.update(weights_LT=arrays["weights_LT"] + 1), "not those that were written"),
        (lambda arrays: arrays.pop("ends_LS2"), "not those that were written"),
        (lambda arrays: arrays.pop("card"), "no model of costs"),
        (lambda arrays: arrays.update(card=np.array([{}], dtype=object)), "no model of costs"),
    ],
)
def test_spoiled_models_are_refused(model: LearnedModel, tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "m.npz"
    model.save(path)
    _rewritten(path, change)
    with pytest.raises(ProblemError, match=message):
        load_model(path)


def test_a_model_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.npz").write_bytes(b"PK nothing")
    for name in ("m.npz", "absent.npz"):
        with pytest.raises(ProblemError):
            load_model(tmp_path / name)


sizes = st.integers(1, 3000)


@given(sizes, sizes, sizes, st.sampled_from(["INT8", "BF16", "FP32"]))
@settings(max_examples=40, deadline=None)
def test_no_prediction_is_below_the_roofline(model: LearnedModel, rows: int, depth: int, columns: int, p: str) -> None:
    device = make_device_vector()
    programs = programs_of(linear_workload(rows, depth, columns), p, FORMATS[p])
    for program, estimate in zip(programs, model.predict(programs, device), strict=True):
        assert estimate.low_ns >= device.floor_ns(program)
        assert estimate.low_ns <= estimate.ns <= estimate.high_ns


@given(st.permutations(range(3)), sizes, sizes)
@settings(max_examples=20, deadline=None)
def test_the_order_of_leaves_does_not_matter(model: LearnedModel, order: list[int], rows: int, depth: int) -> None:
    program, _ = programs_of(linear_workload(rows, depth, 64), "INT8", FORMATS["INT8"])
    shuffled = replace(program, leaves=tuple(program.leaves[i] for i in order))
    first, second = model.predict([program, shuffled], make_device_vector())
    assert first == second


@given(st.sampled_from([0.125, 0.5, 4.0, 1024.0]), sizes, sizes)
@settings(max_examples=20, deadline=None)
def test_other_units_of_time_give_the_same_prediction(model: LearnedModel, scale: float, rows: int, depth: int) -> None:
    programs = programs_of(linear_workload(rows, depth, 64), "BF16", FORMATS["BF16"])
    plain = model.predict(programs, make_device_vector())
    scaled = model.predict(programs, make_device_vector(scale=scale))
    for one, other in zip(plain, scaled, strict=True):
        assert other.ns * scale == pytest.approx(one.ns)
        assert other.in_domain == one.in_domain


def test_what_is_unlike_the_training_data_is_said(model: LearnedModel) -> None:
    device = make_device_vector()
    known = programs_of(linear_workload(48, 100, 256), "FP32", FORMATS["FP32"])
    assert all(estimate.in_domain for estimate in model.predict(known, device))
    huge, _ = model.predict(programs_of(linear_workload(2**16, 2**14, 2**14), "FP32", FORMATS["FP32"]), device)
    assert not huge.in_domain
    assert "unlike the training data" in huge.reason
    strange, _ = model.predict(programs_of(pointwise_workload("mish", 64, 64), "FP32", FORMATS["FP32"]), device)
    assert "family mish" in strange.reason
    elsewhere, _ = model.predict(known, make_device_vector(multiprocessors=64))
    assert "multiprocessors" in elsewhere.reason


def test_intervals_are_wider_beyond_the_training_data() -> None:
    """Of two devices that differ by a factor of three in what no vector tells, a third could be either."""
    record = make_cost_record(8, (make_device_vector(), make_device_vector("other", 2.0)))
    slower = tuple(replace(s, ns=3 * s.ns) if s.device else s for s in record.samples)
    model = fit_laws(replace(record, samples=slower), errors=False, rounds=2)
    programs = programs_of(linear_workload(48, 100, 256), "FP32", FORMATS["FP32"])
    known = model.predict(programs, make_device_vector())
    unknown = model.predict(programs, make_device_vector("third", 1.5))
    for near, far in zip(known, unknown, strict=True):
        assert near.in_domain
        assert "device third" in far.reason
        assert far.high_ns / far.low_ns > 2 * near.high_ns / near.low_ns


@given(
    st.sampled_from(["INT8", "BF16", "FP32"]), st.tuples(sizes, sizes, sizes), st.integers(0, 2), st.integers(1, 2000)
)
@settings(max_examples=60, deadline=None)
def test_no_time_falls_when_a_size_grows(
    model: LearnedModel, precision: str, shape: tuple[int, int, int], axis: int, more: int
) -> None:
    larger = list(shape)
    larger[axis] += more
    device = make_device_vector()
    small, large = (
        model.predict(programs_of(linear_workload(*s), precision, FORMATS[precision]), device)
        for s in (shape, tuple(larger))
    )
    for a, b in zip(small, large, strict=True):
        assert a.ns <= b.ns * (1 + 1e-9)


def test_rows_of_element_wise_passes_do_not_matter(model: LearnedModel) -> None:
    """Images have short rows where sentences have long ones; elements next to each other are the same to them."""
    wide, narrow = (
        programs_of(pointwise_workload("relu", *shape), "FP32", FORMATS["FP32"]) for shape in ((64, 512), (4096, 8))
    )
    for one, other in zip(*(model.predict(p, make_device_vector()) for p in (wide, narrow)), strict=True):
        assert one == other


def test_few_held_out_times_of_a_kernel_take_the_interval_of_its_kind() -> None:
    """Times of one kind are scattered: its intervals are wide in every precision, those of other kinds are not."""
    record = make_cost_record(30)
    rng = np.random.default_rng(0)
    kinds = [work.kind for work in record.workloads]
    scattered = tuple(
        replace(s, ns=s.ns * math.exp(rng.uniform(0, 1.5))) if kinds[s.workload] == "linear" else s
        for s in record.samples
    )
    model = fit_laws(replace(record, samples=scattered), errors=False)
    works = linear_workload(48, 100, 256), pointwise_workload("gelu", 200, 64)
    wide, narrow = (
        model.predict(programs_of(work, "FP32", FORMATS["FP32"])[:1], make_device_vector())[0] for work in works
    )
    assert math.log(wide.high_ns / wide.low_ns) > 1.5 * math.log(narrow.high_ns / narrow.low_ns)


def test_an_unseen_device_is_corrected_by_a_few_times(record: CostRecord, model: LearnedModel) -> None:
    """A device that takes 2.5 times as long for what runs in one format: some operators correct the others."""
    strange = make_device_vector("strange", 1.0)
    other = make_cost_record(30, (strange,), seed=3)
    classes = [class_name(program) for program, _, _ in other.programs()]
    slower = (replace(s, ns=2.5 * s.ns) if "BF16" in c else s for s, c in zip(other.samples, classes, strict=True))
    slow = replace(other, samples=tuple(slower))
    chosen = [i for i, s in enumerate(slow.samples) if s.workload % 3 == 0]
    rest = [i for i, s in enumerate(slow.samples) if s.workload % 3 and "BF16" in classes[i]]
    known, held = slow.select(chosen), slow.select(rest)
    corrected = model.corrected(
        strange, [program for program, _, _ in known.programs()], [sample.ns for sample in known.samples]
    )
    actual = [sample.ns for sample in held.samples]
    before, after = (summary(actual, predict_samples(m, held)) for m in (model, corrected))
    assert before["median"] > 5 * after["median"]
    assert after["median"] < 0.1
    assert after["coverage"] > 0.7
    assert model.corrected(strange, [], []) == model


@pytest.mark.parametrize("share", [0.1, 10.0])
def test_what_a_cache_of_another_size_changes_is_not_guessed(model: LearnedModel, share: float) -> None:
    """All of the training data have caches of one size: another one counts for the roofline only."""
    programs = programs_of(linear_workload(480, 1000, 2560), "BF16", FORMATS["BF16"])
    size = make_device_vector().cache_bytes
    same, other = (model.predict(programs, make_device_vector("any", cache_bytes=s)) for s in (size, share * size))
    assert same == other


def test_a_changed_device_is_no_known_one(model: LearnedModel) -> None:
    programs = programs_of(linear_workload(48, 100, 256), "FP32", FORMATS["FP32"])
    throttled = make_device_vector(peak_flops={"INT8": 1e11, "BF16": 5e10, "FP32": 2.5e10})
    assert all("has changed" in estimate.reason for estimate in model.predict(programs, throttled))


def test_a_kind_of_device_without_laws_is_named(model: LearnedModel) -> None:
    card = sheet_vector(DATA_SHEETS["H100"])
    programs = programs_of(linear_workload(8, 8, 8), "FP32", FORMATS["FP32"])
    assert not any(model.knows(program, card) for program in programs)
    with pytest.raises(ProblemError, match="measured on a cuda"):
        model.predict(programs, card)


def test_groups_of_a_convolution_are_a_batch() -> None:
    x, weight = (TensorSpec(shape=shape, dtype="float32") for shape in ((2, 32, 8, 8), (32, 1, 3, 3)))
    flops = 2 * 2 * 32 * 64 * 9
    plain = linear_workload(1, 1, 1)
    work = replace(plain, kind="conv2d", inputs=(x, weight), outputs=(x,), weight_elements=288, flops=flops)
    product = programs_of(work, "FP32", FORMATS["FP32"])[0].leaves[-1]
    assert (product.batch, product.rows, product.columns, product.depth) == (32, 128, 1, 9)


def test_a_format_that_the_device_lacks_is_named(model: LearnedModel) -> None:
    device = make_device_vector(peak_flops={"FP32": 1e11})
    with pytest.raises(ProblemError, match="no peak for INT8"):
        model.predict(programs_of(linear_workload(8, 8, 8), "INT8", FORMATS["INT8"]), device)


def test_a_program_without_leaves_takes_no_time(model: LearnedModel) -> None:
    nothing = Program(family="input", precision="FP32", phase=Phase.BACKWARD, elements=4)
    assert model.predict([nothing], make_device_vector())[0].ns == 0


@given(st.floats(1, 1e6), st.floats(1, 3), st.floats(1, 3))
def test_quantiles_grow_through_the_interval(middle: float, down: float, up: float) -> None:
    low, high = middle / down, middle * up
    values = [interval_quantile(middle, low, high, q) for q in (0.05, 0.3, 0.5, 0.9, 0.95, 0.99)]
    assert values[0] == pytest.approx(low)
    assert values[2] == pytest.approx(middle)
    assert values[4] == pytest.approx(high)
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_quantiles_outside_are_refused(quantile: float) -> None:
    with pytest.raises(ProblemError, match="quantile"):
        interval_quantile(1.0, 0.5, 2.0, quantile)


def test_every_data_sheet_has_a_vector() -> None:
    for sheet in DATA_SHEETS.values():
        assert sheet_vector(sheet).peak_flops == sheet.peak_flops


def test_the_roofline_grows_with_every_size() -> None:
    device = make_device_vector()
    base = linear_workload(64, 64, 64)
    floor = device.floor_ns(programs_of(base, "FP32", FORMATS["FP32"])[0])
    for work in (linear_workload(128, 64, 64), linear_workload(64, 128, 64), linear_workload(64, 64, 128)):
        assert device.floor_ns(programs_of(work, "FP32", FORMATS["FP32"])[0]) > floor


@given(st.lists(st.tuples(st.integers(8, 2048), st.floats(1e2, 1e7)), min_size=1, max_size=8))
@example([(168, 100.0), (358, 100.0)])  # a rate was raised by one program, and again by a larger one
def test_observed_rates_make_the_roofline_a_floor(seen: list[tuple[int, float]]) -> None:
    """And no rate is raised by more than the largest factor by which a program beat it."""
    device = make_device_vector()
    times = [(programs_of(linear_workload(n, n, n), "FP32", FORMATS["FP32"])[0], ns) for n, ns in seen]
    raised = with_observed_rates(device, times)
    worst = max(1.0, *(device.floor_ns(program) / ns for program, ns in times))
    assert all(raised.floor_ns(program) <= ns * (1 + 1e-9) for program, ns in times)
    for before, after in (
        (device.bandwidth_bytes_per_s, raised.bandwidth_bytes_per_s),
        (device.cache_bytes_per_s, raised.cache_bytes_per_s),
        (device.peak("FP32"), raised.peak("FP32")),
    ):
        assert before <= after <= before * worst * (1 + 1e-9)


def test_leaves_refuse_what_has_no_meaning() -> None:
    for changes in ({"flops": math.nan}, {"num_bytes": -1.0}, {"rows": 0}):
        with pytest.raises(ProblemError):
            Leaf(kind=LeafKind.PRODUCT, number_format="FP32", **changes)
    with pytest.raises(ProblemError):
        Sample(device=0, workload=0, precision="FP32", phase=Phase.FORWARD, ns=math.nan)


def test_reference_is_roofline_plus_launches() -> None:
    device = make_device_vector()
    program, _ = programs_of(linear_workload(64, 64, 64), "INT8", FORMATS["INT8"])
    assert reference_ns(program, device) == device.floor_ns(program) + 3 * device.launch_ns
