import base64
import hashlib
import itertools
import json
import random
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import qsync_opt
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.report import Measured, MeasuredDevice, load_measured, make_report, report_html, write_report
from qsync_opt.report.contents import POINTS
from qsync_opt.report.markup import (
    better_words,
    gain_words,
    measured_words,
    peak_words,
    proof_words,
    slot,
    time_words,
    verdict,
)
from qsync_opt.report.page import KINDS, ROLES, report_json
from qsync_opt.testing import chain, no_memory, random_plan, random_problem, shared_casts, stacked_problem
from qsync_opt.training import (
    MEMORY_KEY,
    OPERATORS_KEY,
    Explainer,
    Plan,
    evaluate,
    memory_breakdown,
    memory_timeline,
    replay,
    solve,
    uniform_plan,
)


class _Page(HTMLParser):
    """Scripts, text and attributes of a page, as a parser sees them."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.text, self.elements, self._kind = [], [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self._kind = dict(attributes).get("type", "code")
            self.scripts.append([self._kind, ""])

    def handle_endtag(self, tag):
        if tag == "script":
            self._kind = None

    def handle_data(self, data):
        if self._kind is None:
            self.text.append(data)
        else:
            self.scripts[-1][1] += data

    @property
    def data(self):
        (found,) = [text for kind, text in self.scripts if kind == "application/json"]
        return json.loads(found)


@pytest.fixture(scope="module")
def stacked():
    problem = stacked_problem(2, devices=("T4", "L4"))
    return problem, solve(problem).plan


def _uniform_report(instance, precision="FP16", **options):
    problem = instance.problem
    return make_report(problem, uniform_plan(problem, precision), front="none", **options)


def test_the_data_in_the_page_is_what_evaluating_the_plan_gives(stacked):
    problem, plan = stacked
    data = _Page(report_html(make_report(problem, plan))).data
    evaluation = evaluate(problem, plan)
    assert (data["objective"], data["iteration_ns"]) == (evaluation.objective, evaluation.iteration_ns)
    assert (data["feasible"], data["latency_limit_ns"]) == (True, problem.latency_limit_ns)
    assert data["operators"]["name"] == [operator.name for operator in problem.operators]
    for shown, device in zip(data["devices"], evaluation.devices.values(), strict=True):
        columns = shown["operators"]
        assert (shown["memory_kib"], shown["sensitivity"]) == (device.memory_kib, device.sensitivity)
        assert sum(columns["memory_kib"]) + sum(columns["buffer_kib"]) == device.memory_kib
        spent = sum(map(sum, (columns["forward_ns"], columns["backward_ns"], columns["cast_ns"])))
        assert spent == device.backward_end_ns == shown["backward_end_ns"]
        for position, time in enumerate(device.operators):
            assert data["formats"][columns["precision"][position]] == time.precision
            assert columns["forward_ns"][position] == time.forward_ns


def test_the_reasons_and_exchanges_are_the_explainers(stacked):
    problem, plan = stacked
    data = report_json(make_report(problem, plan, front="none"))
    explainer = Explainer(problem, plan)
    for shown in data["devices"]:
        for position, operator in enumerate(problem.operators):
            found = explainer.explain(operator.name, shown["name"])
            assert shown["operators"]["reason"][position] == found.reason
            assert [
                (data["formats"][row[0]], *row[1:5], row[6]) for row in shown["operators"]["alternatives"][position]
            ] == [
                (
                    a.precision,
                    a.iteration_change_ns,
                    a.compute_change_ns,
                    a.memory_change_kib,
                    a.sensitivity_change,
                    len(a.pushed),
                )
                for a in found.alternatives
            ]


def test_the_lanes_hold_every_event_of_the_replay(stacked):
    problem, plan = stacked
    data = report_json(make_report(problem, plan, front="none"))
    shown = [
        (lane["stream"], KINDS[kind], start, duration)
        for lane in data["timeline"]
        for kind, start, duration in zip(lane["kind"], lane["start_ns"], lane["duration_ns"], strict=True)
    ]
    events = replay(problem, plan).events
    assert sorted(shown) == sorted((e.stream, e.kind, e.start_ns, e.duration_ns) for e in events)
    for lane in data["timeline"]:
        assert lane["start_ns"] == sorted(lane["start_ns"])
        for kind, what, label in zip(lane["kind"], lane["what"], lane["label"], strict=True):
            assert (label != "") == KINDS[kind].endswith("cast")
            assert what < (len(problem.operators) if lane["stream"] == "compute" else 99)


@pytest.mark.parametrize("front", ["greedy", "exact"])
def test_fronts_are_plans_that_fall_and_never_pass_their_bounds(stacked, front):
    problem, plan = stacked
    report = make_report(problem, plan, front=front)
    assert len(report.fronts.latency) > 5
    for found in (report.fronts.latency, *report.fronts.memory.values()):
        assert found.points
        for slower, faster in itertools.pairwise(found.points):
            assert slower.use > faster.use
            assert slower.objective < faster.objective
        assert all(p.bound <= p.objective * (1 + 1e-9) for p in found.points)
    assert report.fronts.best.objective == pytest.approx(report.evaluation.objective, rel=2e-3)


def test_formats_of_unknown_names_get_colours_of_their_own():
    formats = ["INT4", "INT8", "NF4", "FP32"]
    assert [slot(formats, name) for name in formats] == [6, 0, 7, 5]


def test_the_memory_timeline_ends_at_nothing_and_peaks_at_the_evaluated_memory(stacked):
    problem, plan = stacked
    for name, device in evaluate(problem, plan).devices.items():
        timeline = memory_timeline(problem, device)
        parts = memory_breakdown(problem, device)
        constant = parts.total_bytes - parts.activations_bytes - parts.casts_bytes
        assert max(timeline.live_bytes) + constant == device.memory_kib * 1024
        assert (timeline.live_bytes[0], timeline.live_bytes[-1]) == (0, 0)
        assert (timeline.times_ns[0], timeline.times_ns[-1]) == (0, device.backward_end_ns)
        assert (
            timeline.times_ns[timeline.live_bytes.index(max(timeline.live_bytes))]
            <= timeline.peak_ns
            == device.forward_end_ns
        )
        assert problem.extras["devices", name, MEMORY_KEY]["peak_operator"] == timeline.peak_operator


def test_notes_survive_the_file_and_a_problem_without_them_knows_totals_only(stacked, tmp_path):
    problem, plan = stacked
    problem.save(tmp_path / "p.json")
    loaded = qsync_opt.load_problem(tmp_path / "p.json")
    device = evaluate(loaded, plan).devices["T4"]
    assert memory_timeline(loaded, device) == memory_timeline(problem, device)
    for key in (MEMORY_KEY, OPERATORS_KEY):
        less = {path: value for path, value in problem.extras.items() if path[-1] != key}
        bare = replace(problem, extras=less)
        assert memory_timeline(bare, device) is None
    report = make_report(bare, plan, front="none")
    assert "Only totals per operator are known" in peak_words(report, device)[0]
    assert report_json(report)["devices"][0]["memory"] is None


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (["embed"], "it must map operators to bytes"),
        ({"embed/embedding": -1}, "must be an integer of at least 0"),
        ({"embed/embeddng": 1}, "no operator 'embed/embeddng'; did you mean 'embed/embedding'"),
        ({"embed/embedding": 1}, "adds up to 1 bytes, but x-memory to"),
    ],
)
def test_notes_that_contradict_the_problem_are_refused(stacked, note, message):
    problem, plan = stacked
    spoiled = replace(problem, extras={**problem.extras, ("devices", "T4", OPERATORS_KEY): note})
    with pytest.raises(ProblemError, match=message):
        memory_timeline(spoiled, evaluate(problem, plan).devices["T4"])


def test_hostile_names_stay_text():
    name = "</script><script>window.stolen = 1</script><img src=x onerror=alert(1)>"
    problem = chain().problem
    operators = tuple(
        replace(o, name=name if o.name == "a" else o.name, inputs=tuple(name if i == "a" else i for i in o.inputs))
        for o in problem.operators
    )
    tables = {name if key == "a" else key: value for key, value in problem.devices[0].operators.items()}
    device = replace(problem.devices[0], name="{{data}}<b>", operators=tables)
    problem = replace(problem, name=name, operators=operators, devices=(device,))
    text = report_html(make_report(problem, uniform_plan(problem, "FP16"), front="none"), note=name)
    page = _Page(text)
    assert [kind for kind, _ in page.scripts] == ["application/json", "code"]
    assert page.data["operators"]["name"][0] == name
    assert "stolen" not in page.scripts[1][1]
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "b", "iframe", "object", "link "}
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on") or a == "style"]
    assert name in "".join(page.text)
    assert "{{data}}<b>" in "".join(page.text)


def test_the_policy_allows_the_pages_own_code_and_style_only():
    page = _Page(report_html(_uniform_report(chain())))
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    code = page.scripts[-1][1]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "XMLHttp"):
        assert word not in code
    links = [a.get("href", a.get("src", "")) for _, a in page.elements if "href" in a or "src" in a]
    assert links
    assert all(link.startswith(("#", "data:,")) for link in links)


def test_every_link_has_its_target():
    page = _Page(report_html(_uniform_report(chain())))
    identities = [a["id"] for _, a in page.elements if "id" in a]
    assert len(identities) == len(set(identities))
    assert {a["href"][1:] for tag, a in page.elements if tag == "a"} <= set(identities)


def test_words_about_limits_and_gains():
    report = _uniform_report(chain())
    assert verdict(report) == "The plan keeps every limit."
    assert time_words(report) == "One iteration takes 9 µs of the 15 µs allowed: 6 µs (40 %) are left."
    against = gain_words(report, "T4")
    assert against[0].startswith("Against FP32 everywhere: 50 % less computing time, 50 % less memory and sensitivity")
    assert against[0].endswith("; that plan breaks a limit.")
    assert against[1] == (
        "Against the lowest precision everywhere: the same computing time, the same memory and the same sensitivity. "
        "That plan keeps every limit."
    )


def test_an_infeasible_plan_is_said_to_be():
    report = _uniform_report(chain(), "FP32")
    assert verdict(report) == (
        "The plan is not feasible: it breaks the memory limit of T4, 50 KiB, by 10 KiB and the latency limit of "
        "15 µs by 3 µs."
    )
    assert proof_words(report) == "A plan that breaks limits has no distance from the best one."


def test_the_distance_from_the_best_plan_names_its_source():
    problem = chain().problem
    best = solve(problem, "exact").plan
    assert "not checked" in proof_words(make_report(problem, best, front="none"))
    proved = make_report(problem, best, front="greedy")
    assert proof_words(proved).startswith("Proved optimal: no plan within the limits has a lower sensitivity (bound co")
    assert better_words(proved) is None
    worse = make_report(problem, uniform_plan(problem, "FP16"), front="greedy")
    assert better_words(worse).startswith("greedy finds a plan within the limits with sensitivity 0.25")
    assert proof_words(make_report(problem, uniform_plan(problem, "FP16"), front="none")).endswith("none was computed.")


@pytest.mark.parametrize(
    "claim", [{"objective": 7.0, "bound": 7.0}, {"objective": 10**400, "bound": 1}, {"bound": True}]
)
def test_claims_of_a_plan_file_that_do_not_hold_are_not_repeated(claim):
    problem = chain().problem
    plan = Plan(problem="chain", devices=uniform_plan(problem, "FP16").devices, solution=claim)
    words = proof_words(make_report(problem, plan, front="none"))
    assert "not used" in words or "not known" in words


def test_no_plan_at_all_is_said():
    problem = no_memory().problem
    report = make_report(problem, uniform_plan(problem, "FP16"))
    assert better_words(report).startswith("No plan keeps the limits: the memory limit of device 'T4'")
    assert len(report.fronts.memory["T4"]) > 0
    assert len(report.fronts.latency) == 0
    assert "no front" not in report_html(report).lower().split("<script>")[0]


def test_measurements_stand_beside_predictions(tmp_path):
    path = tmp_path / "m.json"
    data = {
        "format": "qsync-measured/1",
        "source": "two machines",
        "iteration_ns": 10000,
        "devices": {"T4": {"iteration_ns": 8000, "peak_memory_bytes": 20480}},
    }
    path.write_text(json.dumps(data))
    measured = load_measured(path)
    report = _uniform_report(chain(), measured=measured)
    assert measured_words(report) == [
        "Measured: two machines.",
        "The iteration: measured 10 µs, predicted 9 µs (-10.0 %).",
        "T4 alone: measured 8 µs, predicted 9 µs (+12.5 %).",
        "Peak memory of T4: measured 20 KiB, predicted 30 KiB (+50.0 %).",
    ]
    assert report_json(report)["measured"] == {"iteration_ns": 10000, "peak_memory_bytes": [20480]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iteration_ns": -1}, "iteration_ns is -1, but it must be an integer of at least 1"),
        ({"iteration_ns": 1.5}, "iteration_ns is 1.5"),
        ({"source": ""}, "source is ''"),
        ({"itertion_ns": 1}, "unknown key 'itertion_ns'; did you mean 'iteration_ns'"),
        ({"format": "qsync-plan/1"}, "allowed is 'qsync-measured/1'"),
        ({"devices": {"T4": {"peak": 1}}}, "unknown key 'peak'"),
    ],
)
def test_measurements_are_checked(tmp_path, change, message):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"format": "qsync-measured/1", "source": "x", **change}))
    with pytest.raises(ProblemError, match=message):
        load_measured(path)


def test_measurements_of_other_devices_are_refused():
    measured = Measured(source="x", iteration_ns=None, devices={"P4": MeasuredDevice(iteration_ns=1)})
    with pytest.raises(ProblemError, match="no device type 'P4'; it has T4"):
        _uniform_report(chain(), measured=measured)


def test_estimates_are_labelled():
    problem = replace(chain().problem, extras={("x-estimates",): {"costs": {"T4": "a roofline <3"}}})
    text = report_html(make_report(problem, uniform_plan(problem, "FP16"), front="none"))
    assert "Costs of T4 are estimates: a roofline &lt;3." in text


def test_progress_counts_every_limit_of_every_front(stacked):
    problem, plan = stacked
    seen = []
    make_report(problem, plan, progress=lambda done, total, label: seen.append((done, total, label)))
    assert {total for _, total, _ in seen} == {3 * POINTS}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {label for _, _, label in seen} == {
        "front against time",
        "front against memory of T4",
        "front against memory of L4",
    }


def test_an_unknown_front_is_refused():
    problem = chain().problem
    with pytest.raises(UnsupportedError, match="front is 'best', but allowed are greedy, exact, none"):
        make_report(problem, uniform_plan(problem), front="best")


def test_writing_is_whole_or_not_at_all(tmp_path):
    report = _uniform_report(shared_casts())
    size = write_report(report, tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size == size
    with pytest.raises(ProblemError, match="cannot write"):
        write_report(report, tmp_path / "none" / "r.html")


def test_roles_and_kinds_are_those_of_the_problem_and_the_replay(stacked):
    problem, plan = stacked
    assert {operator.role for operator in problem.operators} == set(ROLES)
    assert {event.kind for event in replay(problem, plan).events} <= set(KINDS)


@pytest.mark.parametrize("seed", range(30))
def test_any_problem_and_plan_have_a_report(seed):
    source = random.Random(seed)
    problem = random_problem(source)
    plan = random_plan(source, problem)
    data = _Page(report_html(make_report(problem, plan, front="greedy" if seed % 3 == 0 else "none"))).data
    evaluation = evaluate(problem, plan)
    assert data["feasible"] == evaluation.feasible
    for shown, device in zip(data["devices"], evaluation.devices.values(), strict=True):
        assert sum(shown["operators"]["memory_kib"]) + sum(shown["operators"]["buffer_kib"]) == device.memory_kib
