"""Cases of step costs as text."""

import itertools

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.steps import Case


def test_a_case_is_read_back_from_its_text():
    formats = ("", "FP32", "BF16")
    inputs = [found for count in range(4) for found in itertools.product(formats, repeat=count)]
    cases = [Case(signature, "INT8", found) for signature in ("linear(a|b)", "relu") for found in inputs]
    assert [Case.parse(case.key()) for case in cases] == cases
    assert len({case.key() for case in cases}) == len(cases)


def test_a_text_that_is_no_case_is_refused():
    with pytest.raises(ProblemError, match=r"here: 'relu\|FP32' is no case"):
        Case.parse("relu|FP32", "here")
