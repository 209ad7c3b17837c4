"""The report in a real browser: it opens, runs clean, can be used, and can be read by everybody."""

from dataclasses import replace

import pytest

from qsync_opt.io import format_memory, format_sensitivity, format_time
from qsync_opt.report import Measured, MeasuredDevice, make_report, write_report
from qsync_opt.testing import chain, no_memory, operator, stacked_problem
from qsync_opt.training import evaluate, solve, uniform_plan

pytestmark = pytest.mark.browser
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 800}
HOSTILE = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"
ROWS = 25
"""Operators on a page of the table."""


@pytest.fixture(scope="module")
def chromium(browser_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers run tests as root, where Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def stacked():
    problem = stacked_problem(8, devices=("T4", "L4"))
    return problem, solve(problem).plan


def _write(problem, plan, folder):
    measured = Measured(
        source="two machines",
        iteration_ns=11_000_000,
        devices={"T4": MeasuredDevice(peak_memory_bytes=6 * 2**20)},
    )
    write_report(make_report(problem, plan, measured=measured), folder / "report.html", note="From a test.")
    return folder / "report.html"


@pytest.fixture(scope="module")
def report_file(stacked, tmp_path_factory):
    return _write(*stacked, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def short_report_file(tmp_path_factory):
    """The same kinds of elements, few of each: every one of them is checked."""
    problem = stacked_problem(2, devices=("T4", "L4"))
    return _write(problem, solve(problem).plan, tmp_path_factory.mktemp("report"))


@pytest.fixture
def open_page(chromium):
    """Open a file; at the end, any message, error or request but that for the file itself fails the test."""
    opened = []

    def open_one(path, viewport=DESKTOP, fragment="", **options):
        context = chromium.new_context(viewport=viewport, **options)
        page = context.new_page()
        page.set_default_timeout(120_000)
        seen = []
        page.on("console", lambda message: seen.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("request", lambda request: seen.append(f"request: {request.url}"))
        page.goto(f"{path.as_uri()}{fragment}")
        opened.append((context, seen, f"request: {path.as_uri()}"))
        return page

    yield open_one
    for context, seen, own in opened:
        assert [text for text in seen if not text.startswith(own)] == []
        context.close()


def _names(page):
    return page.locator(".operators-table > tbody > tr:not(.more) > th bdi").all_text_contents()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_no_accessibility_violation_and_nothing_runs_over_the_edge(
    open_page, accessibility_violations, short_report_file, viewport, scheme
):
    page = open_page(short_report_file, viewport, color_scheme=scheme)
    page.get_by_role("button", name="Unfold all").click()
    page.locator("td.why button").nth(2).click()
    page.locator("details summary").first.click()
    assert accessibility_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_an_infeasible_plan_and_a_problem_with_totals_only_open_too(open_page, accessibility_violations, tmp_path):
    problem = no_memory().problem
    write_report(make_report(problem, uniform_plan(problem)), tmp_path / "r.html")
    page = open_page(tmp_path / "r.html")
    assert "not feasible" in page.locator(".verdict").text_content()
    assert "Only totals per operator are known" in page.locator("#memory").text_content()
    assert accessibility_violations(page) == []


def test_figures_are_those_of_the_evaluation(open_page, report_file, stacked):
    problem, plan = stacked
    device = evaluate(problem, plan).devices["T4"]
    page = open_page(report_file)
    rows = page.locator(".operators-table > tbody > tr:not(.more)")
    for position in (0, 2, 7):
        time = device.operators[position]
        cost = problem.device("T4").operators[time.name][time.precision]
        cells = [text.replace("\u00a0", " ") for text in rows.nth(position).locator("td").all_text_contents()]
        total_ns = time.forward_total_ns + time.backward_total_ns
        assert cells[:5] == [
            str(position + 1),
            time.precision,
            format_time(total_ns),
            format_memory(cost.memory_kib),
            format_sensitivity(cost.sensitivity),
        ]


def test_quantities_are_written_as_the_package_writes_them(open_page, report_file):
    page = open_page(report_file)
    values = [0, 1, 999, 999.4, 999.6, 1000, 12345, 999_499, 999_500, 123_456_789, 5e12, -900, -12345]
    for name, form in (("formatTime", format_time), ("formatMemory", format_memory)):
        shown = page.evaluate(f"values => values.map({name})", values)
        assert shown == [form(value).replace("-", "−") for value in values]
    values = [0, 0.123456, 0.000534, 1.17e-5, 10530.0, 123456.0, 1234567.0, -2.5, 99999.6, 1e-4]
    shown = page.evaluate("values => values.map(formatNumber)", values)
    assert [text.replace("−", "-") for text in shown] == [format_sensitivity(value) for value in values]


def test_search_filters_and_pages(open_page, report_file, stacked):
    problem, plan = stacked
    names = [operator.name for operator in problem.operators]
    page = open_page(report_file)
    assert _names(page) == names[:ROWS]
    page.get_by_role("button", name="Next page").click()
    assert _names(page) == names[ROWS : 2 * ROWS]
    page.get_by_label("Search", exact=True).fill("blocks.3 LINEAR")
    wanted = [name for name in names if name.startswith("blocks.3") and "linear" in name]
    assert _names(page) == wanted
    assert page.locator(".count").first.text_content() == f"{len(wanted)} of {len(names)} operators"
    page.get_by_label("Search", exact=True).fill("no such operator")
    assert _names(page) == []
    page.get_by_label("Search", exact=True).fill("")
    page.get_by_label("Precision", exact=True).select_option("INT8")
    resolved = plan.resolve(problem)
    assert _names(page) == [name for name in names if resolved["T4"][name] == "INT8"][:ROWS]
    page.get_by_label("Device", exact=True).select_option("L4")
    assert _names(page) == [name for name in names if resolved["L4"][name] == "INT8"][:ROWS]
    page.get_by_label("Precision", exact=True).select_option("All")
    page.get_by_label("Role", exact=True).select_option("fixed")
    assert _names(page) == [o.name for o in problem.operators if o.role == "fixed"][:ROWS]


def test_headings_sort_both_ways(open_page, report_file, stacked):
    problem, plan = stacked
    device = evaluate(problem, plan).devices["T4"]
    totals = {time.name: time.forward_total_ns + time.backward_total_ns for time in device.operators}
    names = [operator.name for operator in problem.operators]
    page = open_page(report_file)
    heading = page.get_by_role("columnheader", name="Time", exact=True)
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert _names(page) == sorted(names, key=lambda name: -totals[name])[:ROWS]
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert _names(page) == sorted(names, key=totals.__getitem__)[:ROWS]
    page.get_by_role("columnheader", name="Operator", exact=True).get_by_role("button").click()
    assert _names(page) == sorted(names)[:ROWS]


def test_modules_fold_and_their_links_lead_to_the_table(open_page, report_file):
    page = open_page(report_file)
    tree = page.locator(".tree")
    link = tree.get_by_role("link", name="gelu, blocks.7.mlp/gelu")
    page.get_by_role("button", name="Fold all", exact=True).click()
    assert link.count() == 0 or not link.is_visible()
    page.get_by_role("button", name="Unfold all").click()
    assert link.is_visible()
    fold = tree.get_by_role("button", name="blocks 80 operators")
    fold.press("Enter")
    assert fold.get_attribute("aria-expanded") == "false"
    assert not link.is_visible()
    fold.press("Enter")
    page.get_by_label("Search", exact=True).fill("hidden by this")
    link.click()
    found = page.locator("tr.found th bdi")
    found.wait_for()
    assert found.text_content() == "blocks.7.mlp/gelu"
    assert page.evaluate("document.activeElement.textContent") == "Less"
    page.locator("tr.more").get_by_role("link", name="blocks.7.mlp.up/linear").click()
    page.locator("tr.found th bdi", has_text="blocks.7.mlp.up/linear").wait_for()
    page.go_back()
    page.locator("tr.found th bdi", has_text="blocks.7.mlp/gelu").wait_for()


def test_names_without_modules_are_folded_into_runs(open_page, tmp_path):
    operators = tuple(operator(f"op{i}", [f"op{i - 1}"] if i else []) for i in range(60))
    base = chain().problem
    table = base.devices[0].operators["a"]
    device = replace(base.devices[0], operators={o.name: table for o in operators})
    problem = replace(base, operators=operators, devices=(device,))
    write_report(make_report(problem, uniform_plan(problem), front="none"), tmp_path / "r.html")
    page = open_page(tmp_path / "r.html")
    folds = page.locator(".fold bdi").all_text_contents()
    assert folds == ["Operators 1 to 25", "Operators 26 to 50", "Operators 51 to 60"]
    page.get_by_role("button", name="Operators 51 to 60").click()
    assert page.locator(".tree").get_by_role("link").all_text_contents() == [f"op{i}" for i in range(50, 60)]


def test_a_link_from_outside_opens_its_operator(open_page, report_file):
    page = open_page(report_file, fragment="#op-80")
    assert page.locator("tr.found td").first.text_content() == "80"
    assert page.locator("tr.more").count() == 1


def test_more_about_an_operator_shows_its_exchange(open_page, report_file):
    page = open_page(report_file)
    row = page.locator("#op-3")
    row.get_by_role("button").click()
    table = page.get_by_role("table", name="Other precisions of blocks.0.attention.qkv/linear")
    assert table.get_by_role("row").count() == 3
    assert page.evaluate("document.activeElement.textContent") == "Less"
    page.keyboard.press("Enter")
    assert table.count() == 0


def test_every_link_of_the_page_leads_somewhere(open_page, report_file):
    page = open_page(report_file)
    for link in page.locator("nav a, .skip").all():
        assert page.locator(link.get_attribute("href")).count() == 1


def test_the_theme_follows_the_system_until_it_is_chosen(open_page, report_file):
    page = open_page(report_file, color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    button = page.locator("#theme")
    button.click()
    light = page.evaluate(paper)
    assert (button.text_content(), light) == ("Theme: light", "rgb(255, 255, 255)")
    button.click()
    assert (button.text_content(), page.evaluate(paper)) == ("Theme: dark", dark)
    button.click()
    page.emulate_media(color_scheme="light")
    assert (button.text_content(), page.evaluate(paper)) == ("Theme: system", light)


def test_the_timeline_zooms_by_keyboard_and_button(open_page, report_file):
    page = open_page(report_file)
    shown = page.locator("#timeline .count")
    whole = shown.text_content()
    lanes = page.locator(".lanes")
    assert lanes.locator("text", has_text="waiting").count() > 0
    lanes.focus()
    for key in ("+", "+", *["ArrowLeft"] * 6):
        page.keyboard.press(key)
    assert shown.text_content() not in (whole, "")
    assert shown.text_content().startswith("Shown: 0 ns to ")
    page.get_by_role("button", name="Whole iteration").click()
    assert shown.text_content() == whole
    assert page.locator("#timeline text", has_text="measured 11 ms").count() == 1


def test_drawings_have_names_and_their_figures_as_tables(open_page, report_file):
    page = open_page(report_file)
    drawings = page.locator("svg[role=img]").all()
    assert len(drawings) > 8
    assert all(drawing.get_attribute("aria-label") for drawing in drawings)
    page.locator("#front details").first.locator("summary").click()
    table = page.get_by_role("table", name="Figures of this drawing").first
    table.wait_for()
    assert table.get_by_role("row").count() > 5
    assert table.get_by_role("row").nth(1).get_by_role("rowheader").text_content() == "This plan"


def test_paper_gets_every_row(open_page, report_file, stacked):
    problem, _ = stacked
    page = open_page(report_file)
    assert len(page.pdf()) > 10_000
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert _names(page) == [operator.name for operator in problem.operators]
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert len(_names(page)) == ROWS
    page.emulate_media(media="print")
    assert not page.locator(".top").is_visible()
    assert not page.locator("#operators .controls").is_visible()


def test_hostile_names_are_shown_and_never_run(open_page, tmp_path):
    problem = chain().problem

    def renamed(name):
        return HOSTILE if name == "a" else name

    operators = tuple(
        replace(o, name=renamed(o.name), type=HOSTILE, inputs=tuple(map(renamed, o.inputs))) for o in problem.operators
    )
    tables = {renamed(name): table for name, table in problem.devices[0].operators.items()}
    device = replace(problem.devices[0], name=f"T4{HOSTILE}", operators=tables)
    problem = replace(problem, name=HOSTILE, operators=operators, devices=(device,))
    write_report(make_report(problem, uniform_plan(problem, "FP16")), tmp_path / "r.html", note=HOSTILE)
    page = open_page(tmp_path / "r.html", fragment="#op-1")
    assert page.evaluate("window.stolen") is None
    assert page.title() == f"{HOSTILE} – precision plan"
    assert page.locator("h1").text_content() == HOSTILE
    assert _names(page)[0] == HOSTILE
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.evaluate("JSON.parse(document.getElementById('data').textContent).name") == HOSTILE


def test_the_policy_stops_code_that_is_put_in(browser_path, chromium, report_file, tmp_path):
    spoiled = tmp_path / "spoiled.html"
    script = "<script>window.stolen = 1</script><p onclick='window.stolen = 2' id='trap'>x</p>"
    spoiled.write_text(report_file.read_text().replace("<main", f"{script}<main", 1))
    page = chromium.new_page()
    messages = []
    page.on("console", lambda message: messages.append(message.text))
    page.goto(spoiled.as_uri())
    page.locator("#trap").click()
    assert page.evaluate("window.stolen") is None
    assert any("Content Security Policy" in text for text in messages)
    assert page.locator(".operators-table").count() == 1  # the page's own code ran
    page.close()


def test_without_code_the_summary_can_still_be_read(open_page, report_file):
    page = open_page(report_file, java_script_enabled=False)
    assert "The plan keeps every limit." in page.locator("#summary").text_content()
    assert page.locator("noscript").text_content()
    assert "Throughout the iteration stay parameters" in page.locator("#memory").text_content()


def test_a_thousand_operators_make_a_light_page(open_page, tmp_path):
    """The time until it is there goes by its elements."""
    problem = stacked_problem(100, devices=("T4", "L4"))
    write_report(make_report(problem, uniform_plan(problem, "BF16"), front="none"), tmp_path / "r.html")
    page = open_page(tmp_path / "r.html")
    assert len(problem.operators) >= 1000
    assert page.locator(".operators-table > tbody > tr:not(.more)").count() <= ROWS * len(problem.devices)
    assert page.evaluate("document.querySelectorAll('*').length") < 10_000
