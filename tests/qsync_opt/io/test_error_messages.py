"""Every wrong input gets one line that names the value, what is allowed and what to do; the page shows these lines."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def messages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "generators")
        yield importlib.import_module("error_messages")


def test_at_least_thirty_wrong_inputs(messages):
    assert len({case.what for case in messages.CASES}) == len(messages.CASES) >= 30


def test_every_message_has_its_three_parts(messages):
    with messages.inputs():
        said = {case: messages.message(case) for case in messages.CASES}
    lacking = {case.what: messages.lacking(case, text) for case, text in said.items()}
    assert {what: parts for what, parts in lacking.items() if parts} == {}


def test_the_page_is_what_the_program_says(messages):
    written = (ROOT / "docs" / "error-messages.md").read_text(encoding="utf-8")
    assert written == messages.page(), "run: python docs/generators/error_messages.py > docs/error-messages.md"
