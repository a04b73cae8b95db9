"""Scales, ticks and paths: exact numbers, and gaps that stay gaps."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_speedkit.core.plot import (
    Scale,
    bar_path,
    duration,
    level_path,
    number,
    pixel,
    rounded_up,
    thin,
    ticks,
    time_ticks,
)
from hf_speedkit.core.run_report import Level

X = Scale(0, 100, 0, 100)
Y = Scale(0, 10, 100, 0)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, (0, 20, 40, 60, 80, 100)),
        (0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (2.4, 4.1, (2.5, 3, 3.5, 4)),
        (3, 3, (3,)),
    ],
)
def test_ticks_are_round_numbers_inside_the_axis(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@given(st.floats(-1e17, 1e17), st.floats(1e-9, 1e17), st.integers(1, 12))
def test_ticks_never_leave_the_axis_and_are_few(low, length, count):
    high = low + length
    marks = ticks(low, high, count)
    assert len(marks) <= 2 * count + 2
    slack = 1e-6 * length + 1e-15 * abs(high)  # a float near 287 is no nearer than 6e-14
    assert all(low - slack <= mark <= high + slack for mark in marks) or high == low


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (60, (0, 10, 20, 30, 40, 50, 60)),
        (3600, (0, 600, 1200, 1800, 2400, 3000, 3600)),
        (3, (0, 0.5, 1, 1.5, 2, 2.5, 3)),
    ],
)
def test_time_ticks_are_round_times(seconds, expected):
    assert time_ticks(seconds) == pytest.approx(expected)


def test_the_smallest_number_there_is_has_an_axis():
    assert rounded_up(5e-324) > 0
    assert ticks(0, 5e-324)[0] == 0


def test_time_ticks_of_a_month_are_days():
    assert all(mark % 86400 == 0 for mark in time_ticks(30 * 86400.0))


@pytest.mark.parametrize(("high", "expected"), [(3700, 4000), (100, 100), (0, 1), (0.037, 0.04), (101, 150)])
def test_an_axis_ends_at_a_round_number_that_holds_the_values(high, expected):
    assert rounded_up(high) == pytest.approx(expected)


@given(st.floats(1e-6, 1e17), st.integers(2, 8))
def test_the_last_tick_of_such_an_axis_is_its_end(high, count):
    end = rounded_up(high, count)
    assert end >= high * (1 - 1e-7)
    assert ticks(0, end, count)[-1] == pytest.approx(end)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (12.345, "12.3"),
        (0.00139, "0.00139"),
        (1e-7, "1.00e-07"),
        (-2.5, "-2.5"),
        (90, "90"),
    ],
)
def test_numbers_read_well(value, words):
    assert number(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.25, "0.25 s"), (59, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (100800, "1 d 4 h"), (60, "1 min")],
)
def test_times_read_well(seconds, words):
    assert duration(seconds) == words


def test_values_outside_the_axis_end_at_its_edge():
    assert (Y(-5), Y(0), Y(5), Y(10), Y(1e9)) == (100, 100, 50, 0, 0)
    assert Scale(3, 3, 10, 20)(3) == 10


def test_a_missing_value_breaks_the_path():
    levels = [Level(0, 10, 1), Level(10, 20, None), Level(20, 30, 2), Level(30, 40, 3)]
    path = level_path(thin(levels, X, 100), X, Y)
    assert path == "M0 90H10M20 80H30V70H40"


def test_time_that_no_level_covers_breaks_the_path():
    path = level_path(thin([Level(0, 10, 1), Level(15, 20, 1)], X, 100), X, Y)
    assert path == "M0 90H10M15 90H20"


def test_ten_thousand_levels_are_thinned_and_their_peaks_stay():
    levels = [Level(i / 100, (i + 1) / 100, 9.0 if i == 5_432 else 1.0 + (i % 7) / 10) for i in range(10_000)]
    stretches = thin(levels, X, 100)
    assert len(stretches) == 1
    assert len(stretches[0]) <= 4 * 101
    assert max(level.value for level in stretches[0]) == 9.0
    assert stretches[0][0] == levels[0]
    assert stretches[0][-1] == levels[-1]


@given(st.lists(st.one_of(st.none(), st.floats(0, 10)), max_size=60))
def test_a_path_has_as_many_pieces_as_there_are_stretches_of_values(values):
    levels = [Level(i, i + 1, value) for i, value in enumerate(values)]
    pieces = len(re.findall("x+", "".join("." if value is None else "x" for value in values)))
    assert level_path(thin(levels, X, 100), X, Y).count("M") == pieces


def test_bars_without_height_are_left_out():
    assert bar_path([(0, 5, 100, 100), (5, 10, 100, 40)]) == "M5 100V40H10V100Z"


def test_pixels_are_short_and_never_minus_zero():
    assert [pixel(value) for value in (0, -0.01, 12.04, 12.06, 7)] == ["0", "0", "12", "12.1", "7"]
