"""Texts, notebook views, tables, figures and pictures of graphs, problems, plans, solutions and fronts."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from qsync_opt import Plan, pareto_front, solve, uniform_plan
from qsync_opt.costs import ESTIMATES_KEY
from qsync_opt.errors import NotInstalledError, UnsupportedError
from qsync_opt.numerics import FORMATS
from qsync_opt.report import display, figures
from qsync_opt.report.display import COLORS, OTHER_COLOR, color
from qsync_opt.testing import buckets, diamond, no_memory, residual_graph
from qsync_opt.training import evaluate

VOID = {"br", "hr", "img", "meta"}


class Balanced(HTMLParser):
    """Collects text and refuses tags that do not close."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def text_of(html):
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    return " ".join(parser.text)


@pytest.fixture
def problem():
    return diamond().problem


@pytest.fixture
def plan(problem):
    return uniform_plan(problem, "FP16")


def test_reprs_are_one_informative_line(problem, plan):
    graph = residual_graph()
    assert repr(graph) == "<OpGraph 'synthetic': 8 operators (4 adjustable, 2 dependent, 2 fixed), 344 k parameters>"
    assert repr(problem) == (
        "<Problem 'diamond': 5 operators (3 adjustable), 1 T4 up to 58 KiB, iteration up to 18.2 µs>"
    )
    assert repr(plan) == "<Plan for 'diamond': T4: 3 FP16>"
    solution = solve(problem)
    assert repr(solution).startswith("<Solution optimal by greedy: sensitivity 2 (gap 0 %), iteration 17.2 µs, Plan")
    assert "no plan, " in repr(solve(no_memory().problem))
    front = pareto_front(problem, points=None, method="exact")
    assert repr(front) == (
        "<Front of 'diamond' against iteration time: 3 points by exact, from 17.2 µs at sensitivity 2 to 10.2 µs at 7>"
    )
    assert repr(pareto_front(no_memory().problem)) == "<Front of 'no_memory' against iteration time: no point>"


def test_notebook_views_are_sound_html_and_escape(problem, plan):
    label = {(ESTIMATES_KEY,): {"sensitivity": "<b>guess</b>"}}
    named = Plan(problem="<i>x</i>", devices={"<T4>": {"<a>": "FP16", "b": "FP64"}}, extras=label)
    text = text_of(named._repr_html_())
    assert "Plan for '<i>x</i>': <T4>: 1 FP16, 1 FP64 from estimates" in text
    assert "sensitivities are estimates: <b>guess</b>" in text
    for thing in (residual_graph(), problem, plan, solve(problem), solve(no_memory().problem), pareto_front(problem)):
        assert repr(thing)[1:20] in text_of(thing._repr_html_()), thing


def test_the_plan_strip_has_a_box_per_operator_in_its_color(plan):
    html = plan._repr_html_()
    assert html.count(f"background:{COLORS['FP16']}") == 3 + 1  # and the legend
    assert "a: FP16" in html


def test_every_format_has_its_own_color():
    assert set(COLORS) == set(FORMATS)
    assert len({color(name) for name in FORMATS} | {color("FP4")}) == len(FORMATS) + 1
    assert color("FP4") == OTHER_COLOR


def test_tables_hold_the_numbers(problem, plan):
    pytest.importorskip("pandas")
    evaluation = evaluate(problem, plan)
    frame = evaluation.to_pandas()
    times = ["forward_ns", "backward_ns", "forward_casts_ns", "backward_casts_ns"]
    assert int(frame[times].to_numpy().sum()) == evaluation.devices["T4"].backward_end_ns
    assert list(plan.to_pandas()["precision"]) == ["FP16"] * 3
    costs = problem.to_pandas()
    assert len(costs) == sum(len(table) for table in problem.devices[0].operators.values())
    assert costs.groupby("precision")["sensitivity"].sum().to_dict() == {"FP16": 7.0, "FP32": 0.0}
    graph = residual_graph()
    assert list(graph.to_pandas()["operator"]) == [operator.name for operator in graph]
    front = pareto_front(problem, points=None, method="exact").to_pandas()
    assert list(front["iteration_ns"]) == [17200, 14200, 10200]
    assert pareto_front(no_memory().problem).to_pandas().columns[0] == "iteration_ns"


def test_missing_packages_are_named(problem, plan, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("pandas", "matplotlib") else real(name)
    )
    with pytest.raises(NotInstalledError, match=r"pandas.*pip install 'qsync-opt\[figures\]'"):
        plan.to_pandas()
    with pytest.raises(NotInstalledError, match=r"matplotlib.*pip install 'qsync-opt\[figures\]'"):
        figures.plan_figure(plan)
    assert display.__doc__


def test_figures_draw_what_they_should(problem, plan, tmp_path):
    pytest.importorskip("matplotlib")
    strip = figures.plan_figure(plan, problem)
    (ax,) = strip.axes
    assert len(ax.patches) == len(problem.operators)
    front = pareto_front(problem, points=None, method="exact")
    drawn = figures.front_figure(front)
    points = [line for line in drawn.axes[0].lines if line.get_marker() == "o"]
    assert sum(len(line.get_xdata()) for line in points) == 3
    timeline = figures.timeline_figure(buckets().problem, uniform_plan(buckets().problem, "FP16"))
    assert [label.get_text() for label in timeline.axes[0].get_yticklabels()] == [
        "T4 (one of 1)\ncompute",
        "T4 (one of 1)\ncommunication",
    ]
    assert timeline.axes[0].get_xlim()[1] == 10000
    memory = figures.memory_figure(problem, plan)
    assert memory.axes[0].patches[0].get_width() == 35.0
    for number, figure in enumerate((strip, drawn, timeline, memory)):
        figure.savefig(tmp_path / f"{number}.svg")
        ElementTree.parse(tmp_path / f"{number}.svg")


def test_the_front_as_svg_stays_within_itself(problem):
    from qsync_opt.report.figures import front_svg

    front = pareto_front(replace(problem, name='a "b" <c>'), points=None, method="exact")
    root = ElementTree.fromstring(front_svg(front))
    assert root.get("class") == "qsync-front"
    style = next(element for element in root.iter() if element.tag.endswith("style")).text
    assert all(rule.strip().startswith(".qsync-front") for rule in style.split("}") if rule.strip())
    assert ElementTree.fromstring(front_svg(pareto_front(no_memory().problem))) is not None


def test_a_front_refuses_what_makes_no_sense(problem):
    with pytest.raises(UnsupportedError, match="method of a front is 'ilp', but allowed are greedy, exact"):
        pareto_front(problem, method="ilp")
    with pytest.raises(UnsupportedError, match="against 'time' is not known; allowed are latency and memory"):
        pareto_front(problem, "time")


def test_a_front_is_saved_as_json(problem, tmp_path):
    front = pareto_front(problem, points=3, progress=lambda done, total, reused: None)
    front.save(tmp_path / "front.json")
    assert '"format": "qsync-front/1"' in (tmp_path / "front.json").read_text()
    assert len(front) == len(front.points)
