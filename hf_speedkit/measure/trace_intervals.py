"""Interval arithmetic on int64 nanoseconds: unions, gaps, overlaps, nesting. Pure; cost n log n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint half-open intervals [start, end) in ascending order."""

    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        """Time covered."""
        return int((self.end - self.start).sum())

    def covered_until(self, times: Ints) -> Ints:
        """Time covered before each of `times`."""
        before = np.concatenate([[0], np.cumsum(self.end - self.start)])
        index = np.searchsorted(self.start, times, side="right")
        over = np.where(index > 0, np.maximum(self.end[index - 1] - times, 0), 0) if len(self) else 0
        return np.asarray(before[index] - over, dtype=np.int64)

    def overlap(self, start: Ints, end: Ints) -> Ints:
        """Time covered inside each [start, end)."""
        return self.covered_until(end) - self.covered_until(start)

    def overlap_total(self, other: Intervals) -> int:
        """Time covered by both."""
        return int(self.overlap(other.start, other.end).sum())

    def gaps(self, start: int, end: int) -> Intervals:
        """What is not covered between `start` and `end`."""
        inside = self.clipped(start, end)
        starts = np.concatenate([[start], inside.end]).astype(np.int64)
        ends = np.concatenate([inside.start, [end]]).astype(np.int64)
        real = ends > starts
        return Intervals(starts[real], ends[real])

    def clipped(self, start: int, end: int) -> Intervals:
        """The part between `start` and `end`."""
        starts, ends = np.maximum(self.start, start), np.minimum(self.end, end)
        real = ends > starts
        return Intervals(starts[real], ends[real])


def union(start: Ints, end: Ints) -> Intervals:
    """The union of any intervals; empty ones vanish, touching ones join."""
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > end[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Intervals(start[first], end[last])


class Lanes:
    """Moves times apart by place, so that the events of all threads can be nested in one go.

    Args:
        count: number of places.
        times: all times that will be nested (not the ones only looked up).
    """

    def __init__(self, count: int, *times: Ints) -> None:
        filled = [some for some in times if len(some)]
        low = min((int(some.min()) for some in filled), default=0)
        high = max((int(some.max()) for some in filled), default=0)
        self._low, self._high = low - 1, high  # a time looked up may lie before all others
        self._stride = high - low + 2
        self._known: Ints | None = None
        if self._stride * (count + 1) >= 1 << 62:
            # Absurd times in a damaged file: ranks keep the order, and the products small.
            self._known = np.unique(np.concatenate(filled))
            self._stride = len(self._known) + 1

    def shift(self, place: Ints, times: Ints) -> Ints:
        """The times, moved into the lane of their place."""
        if self._known is not None:
            return np.asarray(place * self._stride + np.searchsorted(self._known, times), dtype=np.int64)
        return place * self._stride + (np.clip(times, self._low, self._high) - self._low)


class Nesting:
    """Who lies inside whom among events of one lane (or of several, moved apart by `Lanes`).

    Args:
        start: starts.
        end: ends.

    An event lies inside the last one begun before it that is still open at its start. Events of one thread nest
    cleanly; where a file has them overlap, the later one hangs below the earlier and may stick out of it. Everything
    is sorting and searching: no walk over the depth, which a hostile file can make as large as itself.
    """

    def __init__(self, start: Ints, end: Ints) -> None:
        count = len(start)
        self._order = np.lexsort((-end, start))
        self._start, ends = start[self._order], end[self._order]
        real = ends > self._start
        self._ends = np.sort(ends[real])
        self._empty_before = np.concatenate([[0], np.cumsum(~real)]).astype(np.int64)
        self._stride = count + 1
        position = np.arange(count, dtype=np.int64)
        depth = self._depth(self._start, position)
        # An event's parent is the last one before it that is one level up; empty ones are parents of nothing.
        self._ranked = np.sort(np.where(real, depth, -1) * self._stride + position)
        self.depth = np.empty(count, dtype=np.int64)
        self.depth[self._order] = depth
        self.parent = np.empty(count, dtype=np.int64)
        self.parent[self._order] = self._last_above(depth, position)

    def enclosing(self, times: Ints) -> Ints:
        """Index of the innermost event around each of `times`, -1 for none."""
        begun = np.searchsorted(self._start, times, side="right").astype(np.int64)
        return self._last_above(self._depth(times, begun), begun)

    def _depth(self, times: Ints, begun: Ints) -> Ints:
        """Events open at `times`, of which `begun` have begun: those, less the closed and the empty ones."""
        return np.asarray(
            begun - np.searchsorted(self._ends, times, side="right") - self._empty_before[begun], dtype=np.int64
        )

    def _last_above(self, depth: Ints, position: Ints) -> Ints:
        if not len(self._ranked):
            return np.full(len(depth), -1, dtype=np.int64)
        found = np.searchsorted(self._ranked, (depth - 1) * self._stride + position, side="left") - 1
        candidate = self._ranked[np.maximum(found, 0)]
        valid = (depth > 0) & (found >= 0) & (candidate // self._stride == depth - 1)
        return np.where(valid, self._order[np.where(valid, candidate % self._stride, 0)], -1)
