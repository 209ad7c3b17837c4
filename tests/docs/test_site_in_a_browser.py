"""The site in a real browser: nothing is fetched from elsewhere, the console is clean, axe finds no violation."""

import functools
import http.server
import threading

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]  # the site is built first
PAGES = ("index", "tutorial", "background/problem", "how-to/infeasible", "results", "command-line", "limits")
REFERENCE = ("reference/index", "reference/qsync_opt.training.planner")
ROWS = 3
"""Rows of a table that are checked: the others are made alike, and the page of results has a thousand."""
SHORTEN = f"document.querySelectorAll('tbody tr:nth-child(n+{ROWS + 1})').forEach(row => row.remove())"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def chromium(browser_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers run tests as root, where Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])  # colours and widths are apart
def test_pages_are_clean_and_can_be_read_by_everyone(chromium, address, accessibility_violations, scheme, width):
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    for name in (*PAGES, *REFERENCE):
        page.goto(f"{address}/{name}.html")
        page.wait_for_function("document.querySelectorAll('.md-code__nav:not([aria-label])').length === 0")
        page.evaluate(SHORTEN)
        violations = accessibility_violations(page)
        assert not violations, (name, violations)
    assert not messages
    assert all(url.startswith((address, "data:", "blob:")) for url in requests)
    context.close()


def test_search_finds_a_public_name(chromium, address):
    page = chromium.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{address}/index.html")
    page.locator(".md-search__input").click()
    page.keyboard.type("FastestPlan")
    page.locator(".md-search-result__link").first.wait_for()
    assert "FastestPlan" in page.locator(".md-search-result__list").text_content()
    page.close()
