import doctest

import pytest

import qsync_opt.io.units
from qsync_opt.io import format_gap, format_memory, format_sensitivity, format_time


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1 µs"),
        (999_499, "999 µs"),
        (999_500, "1 ms"),
        (12_345_678, "12.3 ms"),
        (-900, "-900 ns"),
        (1_230_000_000, "1.23 s"),
        (5_000_000_000_000, "5000 s"),
    ],
)
def test_times_take_the_unit_that_suits_their_size(time_ns, text):
    assert format_time(time_ns) == text


@pytest.mark.parametrize(
    ("memory_kib", "text"), [(0, "0 KiB"), (512, "512 KiB"), (1024, "1 MiB"), (1536 * 1024, "1.5 GiB"), (-3, "-3 KiB")]
)
def test_memory_counts_in_powers_of_1024(memory_kib, text):
    assert format_memory(memory_kib) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.123456, "0.1235"),
        (0.000534, "0.000534"),
        (1.17e-5, "1.17e-5"),
        (10530.0, "10530"),
        (123456.0, "123500"),
        (1234567.0, "1.235e6"),
        (-2.5, "-2.5"),
    ],
)
def test_sensitivity_has_four_digits_and_no_unit(value, text):
    assert format_sensitivity(value) == text


@pytest.mark.parametrize(
    ("gap", "text"),
    [
        (0.0, "0 %"),
        (1.47e-16, "0 %"),
        (1e-10, "under 0.001 %"),
        (9.9e-6, "under 0.001 %"),
        (1e-5, "0.001 %"),
        (0.0099612, "0.996 %"),
        (0.5, "50 %"),
    ],
)
def test_a_gap_is_zero_only_where_bound_and_objective_are_equal(gap, text):
    assert format_gap(gap) == text


def test_examples_in_docstrings_hold():
    result = doctest.testmod(qsync_opt.io.units)
    assert (result.failed, result.attempted > 0) == (0, True)
