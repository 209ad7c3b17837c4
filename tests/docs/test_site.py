"""The built site: every public name is documented, nothing is fetched from elsewhere, pages can be read by everyone."""

import ast
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import qsync_opt

ROOT = Path(__file__).resolve().parents[2]
SIBLINGS = ("formulations", "runtimes", "kernels")
FOLDERS = {"qsync_opt": "qsync_opt", **{name: f"qsync_opt.{name}" for name in SIBLINGS}}

pytestmark = pytest.mark.timeout(900)


def public_names():
    """Import path of everything public, read from the sources: modules, what they define, and members of classes."""
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder)
            if folder == "qsync_opt" and relative.parts[0] in SIBLINGS:
                continue  # a sibling folder, seen through its link
            if any(part.startswith("_") and part != "__init__.py" for part in relative.parts):
                continue
            module = ".".join([package, *(part for part in relative.with_suffix("").parts if part != "__init__")])
            yield module
            yield from names_in(ast.parse(path.read_text(encoding="utf-8")).body, module)


def names_in(body, owner):
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        for name in names:
            if name.startswith("_"):
                continue
            yield f"{owner}.{name}"
            if isinstance(node, ast.ClassDef):
                yield from names_in(node.body, f"{owner}.{name}")


def test_every_public_name_is_in_the_reference(site):
    mkdocstrings = pytest.importorskip("mkdocstrings")
    with (site / "objects.inv").open("rb") as file:
        documented = set(mkdocstrings.Inventory.parse_sphinx(file))
    exported = {f"qsync_opt.{name}" for name in qsync_opt.__all__ if name != "__version__"}
    wanted = exported | set(public_names())
    assert len(wanted) > 1000  # the walk has seen the package
    missing = sorted(wanted - documented)
    assert not missing, f"{len(missing)} of {len(wanted)} public names are not in the reference: {missing[:20]}"


class Page(HTMLParser):
    """What the checks need to know of a page."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.ids, self.links, self.problems = [], [], [], []
        self.headings, self.language, self.mains, self.titles = [], None, 0, 0
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.ids.append(found["id"])
        for name in ("src", "srcset", "data", "poster"):
            if found.get(name):
                self.addresses.append(found[name])
        if tag == "link" and found.get("href"):
            self.addresses.append(found["href"])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "img" and "alt" not in found:
            self.problems.append(f"image {found.get('src')} without a text")
        if tag == "html":
            self.language = found.get("lang")
        if tag == "main" or found.get("role") == "main":
            self.mains += 1
        if tag == "title":
            self.titles += 1
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))


def pages(site):
    return {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_nothing_is_fetched_from_elsewhere(site):
    found = pages(site)
    assert len(found) > 100
    outside = {
        (name, address)
        for name, page in found.items()
        for address in page.addresses
        if re.match(r"(?:https?:)?//", address)
    }
    assert not outside
    for style in site.rglob("*.css"):
        assert not re.findall(
            r"url\(\s*['\"]?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", style.read_text(encoding="utf-8")
        )
    for path in site.rglob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"(?:href|src)=\"(?:https?:)?//|<script|@import", text), path


def test_links_to_other_sites_are_few_and_known(site):
    known = (
        "https://ui.perfetto.dev",
        "https://keepachangelog.com",
        "https://arxiv.org/",
        "https://doi.org/",
        "https://onnxruntime.ai",
    )
    for name, page in pages(site).items():
        outside = [link for link in page.links if re.match(r"(?:https?:)?//", link)]
        assert all(link.startswith(known) for link in outside), (name, outside)


def test_pages_have_the_marks_that_a_screen_reader_needs(site):
    for name, page in pages(site).items():
        assert page.language == "en", name
        assert page.titles == 1, name
        assert page.mains == 1, name
        assert not page.problems, (name, page.problems)
        assert len(page.ids) == len(set(page.ids)), (name, sorted({i for i in page.ids if page.ids.count(i) > 1})[:5])
        if name != "404.html":
            assert page.headings.count(1) == 1, (name, page.headings)


def test_formulas_need_no_script(site):
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "background").glob("*.html"))
    assert text.count("<math ") > 20
    assert "arithmatex" not in text


def channel(value):
    value /= 255
    return value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4


def contrast(first, second):
    """Contrast ratio of two colours given as #rrggbb. Source: WCAG 2.2, relative luminance."""
    luminances = []
    for colour in (first, second):
        red, green, blue = (channel(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        luminances.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    low, high = sorted(luminances)
    return (high + 0.05) / (low + 0.05)


def test_colours_of_the_style_sheet_can_be_read():
    style = (ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8")
    pairs = re.findall(r"/\* contrast: (#[0-9a-f]{6}) on (#[0-9a-f]{6}) \*/", style)
    assert len(pairs) >= 4
    for text, ground in pairs:
        assert style.count(text) > 1, f"{text} is not in the style sheet"
        assert contrast(text, ground) >= 4.5, (text, ground, contrast(text, ground))
