"""What is generated and kept in the repository is what the generators make."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATORS = ROOT / "docs" / "generators"


@pytest.fixture(autouse=True)
def generators_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(GENERATORS))


def test_the_table_of_readme_is_that_of_the_results():
    import figures

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(figures.BEGIN)
    shown, end, _ = rest.partition(figures.END)
    assert end, "README.md has lost the marks of its table"
    assert shown.strip() == figures.readme_table().strip(), "run python docs/generators/figures.py"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_that_of_the_recorded_plan(theme):
    import picture

    kept = (ROOT / "docs" / "assets" / f"plan-{theme}.svg").read_text(encoding="utf-8")
    assert kept == picture.picture(theme), "run python docs/generators/picture.py"


def test_a_page_cannot_ask_for_an_unknown_figure():
    import figures

    assert figures.with_figures("a {{ b.c }} d", {"b.c": "1 ms"}) == "a 1 ms d"
    with pytest.raises(KeyError, match=r"no\.such"):
        figures.with_figures("{{ no.such }}", {})


def test_every_result_file_is_on_the_page_with_its_provenance():
    import results_pages

    page = results_pages.results_page()
    results = results_pages.load_results()
    assert len(results) >= 5
    for name, data in results.items():
        assert f"File `benchmarks/results/{name}`. Hardware: " in page
        found = results_pages.environment(data)
        assert not found["hardware"].startswith("not recorded"), name
        assert not found["versions"].startswith("not recorded"), name


def test_an_unknown_kind_of_result_becomes_tables():
    import results_pages

    data = {
        "format": "something/1",
        "hardware": "a card",
        "versions": {"torch": "2"},
        "rows": [{"name": "x|y", "time": {"median_ms": 1.23456}, "good": True, "none": None}] * 70,
    }
    text = results_pages.section("new.json", data)
    assert "## new\n" in text
    assert "Hardware: a card. Versions: torch 2. Date: not recorded in the file." in text
    assert "| name | time.median_ms | good | none |" in text
    assert "| x\\|y | 1.235 | yes | – |" in text
    assert "10 more rows stand in the file." in text


def test_sections_of_a_result_file_keep_their_own_provenance():
    import results_pages

    def part(card, rows):
        return {"date": "2026-01-02", "hardware": card, "versions": {"cuda": "13"}, "command": "run", "records": rows}

    rows = [{"shape": 1, "seconds": 0.5}] * 3 + [{"mean": 1.5}]
    data = {"format": "kernels/1", "sections": {"products": part("card A", rows), "casts": part("card B", rows[:1])}}
    text = results_pages.section("kernels.json", data)
    assert "### products\n\nHardware: card A. Versions: cuda 13. Date: 2026-01-02. Command: `run`." in text
    assert "### casts\n\nHardware: card B." in text
    assert text.index("| mean |") < text.index("| shape | seconds |")  # the smaller table first


def test_formulas_become_mathml():
    import mathematics

    page = 'a <span class="arithmatex">\\(x &lt; y^2\\)</span> <div class="arithmatex">\n\\[\\sum_i w_i\\]\n</div>'
    made = mathematics.with_mathml(page)
    assert made.count("<math ") == 2
    assert "arithmatex" not in made
    assert 'aria-label="x &lt; y^2"' in made


def test_every_command_is_on_the_page_of_the_command_line():
    import command_line_page

    from qsync_opt.cli import COMMANDS

    page = command_line_page.command_line_page()
    for command in COMMANDS:
        assert f"## qsync-opt {command}\n" in page
    assert "| `PROBLEM` | problem file" in page
    assert "Usage:" not in page
    assert sys.prefix not in page  # no path of the machine that builds the site


def test_files_that_the_tour_of_the_code_names_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:qsync_opt|formulations|runtimes|kernels)/[\w/.]*)`", text))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists() and name != "qsync_opt/systems.py"]
