"""Interval arithmetic against the slow and obvious way."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speedkit.measure.trace_intervals import Lanes, Nesting, union

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=25)


def arrays(spans):
    start = np.array([start for start, _ in spans], dtype=np.int64)
    return start, start + np.array([length for _, length in spans], dtype=np.int64)


def covered(spans):
    return {moment for start, length in spans for moment in range(start, start + length)}


@given(SPANS, SPANS)
@settings(max_examples=100, deadline=None)
def test_union_gaps_and_overlap_agree_with_counting_every_moment(spans, others):
    one, two = union(*arrays(spans)), union(*arrays(others))
    assert one.total == len(covered(spans))
    assert one.overlap_total(two) == len(covered(spans) & covered(others))
    gaps = one.gaps(5, 45)
    assert gaps.total == len(set(range(5, 45)) - covered(spans))
    assert one.clipped(5, 45).total + gaps.total == 40
    times = np.arange(60, dtype=np.int64)
    assert one.covered_until(times).tolist() == [len([m for m in covered(spans) if m < time]) for time in times]


def parent_by_walking(events):
    """Innermost event around each, by a stack, the way it is usually done."""
    order = sorted(range(len(events)), key=lambda i: (events[i][0], -events[i][1]))
    parents, stack = [-1] * len(events), []
    for i in order:
        while stack and events[stack[-1]][1] <= events[i][0]:
            stack.pop()
        parents[i] = stack[-1] if stack else -1
        if events[i][1] > events[i][0]:
            stack.append(i)
    return parents


@st.composite
def nested_events(draw, low=0, high=60, depth=0):
    """Events that nest cleanly, as those of one thread do."""
    events, at = [], low
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(at, high))
        end = draw(st.integers(start, high))
        events.append((start, end))
        if depth < 3:
            events += draw(nested_events(low=start, high=end, depth=depth + 1))
        at = end
    return events


@given(nested_events(), st.lists(st.integers(-1, 61), max_size=8))
@settings(max_examples=100, deadline=None)
def test_nesting_finds_the_same_parents_as_a_stack(events, times):
    start = np.array([one[0] for one in events], dtype=np.int64)
    end = np.array([one[1] for one in events], dtype=np.int64)
    nesting = Nesting(start, end)

    def spans(parents):  # equal events are interchangeable, so compare what they span
        return [events[parent] if parent >= 0 else None for parent in parents]

    assert spans(nesting.parent.tolist()) == spans(parent_by_walking(events))
    found = nesting.enclosing(np.array(times, dtype=np.int64)).tolist()
    for time, index in zip(times, found, strict=True):
        around = [event for event in events if event[0] <= time < event[1]]
        smallest = min(around, key=lambda event: event[1] - event[0], default=None)
        assert (events[index] if index >= 0 else None) == smallest


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12)), max_size=25))
@settings(max_examples=60, deadline=None)
def test_lanes_keep_threads_apart(events):
    place = np.array([one[0] for one in events], dtype=np.int64)
    start = np.array([one[1] for one in events], dtype=np.int64)
    end = start + np.array([one[2] for one in events], dtype=np.int64)
    lanes = Lanes(4, start, end)
    nesting = Nesting(lanes.shift(place, start), lanes.shift(place, end))
    for child, parent in enumerate(nesting.parent.tolist()):
        assert parent < 0 or place[parent] == place[child]


def test_lanes_survive_times_that_would_overflow():
    place = np.array([0, 1, 1, 1], dtype=np.int64)
    start = np.array([-(4 << 60), 0, 5, 4 << 60], dtype=np.int64) // 1
    end = start + np.array([10, 20, 5, 1], dtype=np.int64)
    lanes = Lanes(1000, start, end)
    nesting = Nesting(lanes.shift(place, start), lanes.shift(place, end))
    assert nesting.parent.tolist() == [-1, -1, 1, -1]
