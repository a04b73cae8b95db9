"""The picture of a step: a trace's timeline as stacked bars. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_speedkit.core.trace_records import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """Bars of one device over the step.

    Args:
        bin_ns: time one bar stands for.
        length_ns: time of all bars.
        top: highest bar; 1.0 is a device that is busy all the time, more is several streams at once.
        bars: per group, (index of the bar, lower edge, upper edge) as shares of the bar's time.
        totals: per group, its time; largest first.
        idle_ns: time in no group's bar, at most one stream's worth.
    """

    bin_ns: int
    length_ns: int
    top: float
    bars: Mapping[str, tuple[tuple[int, float, float], ...]]
    totals: Mapping[str, int]
    idle_ns: int


def step_picture(timeline: Timeline, *, most_bins: int) -> StepPicture:
    """Stack the groups of a timeline, largest at the bottom.

    Args:
        timeline: of `TraceSummary`.
        most_bins: bars at most; bins are added up until they are that few.
    """
    totals = {group: sum(bins) for group, bins in timeline.groups.items()}
    order = sorted(totals, key=lambda group: -totals[group])
    count = max((len(bins) for bins in timeline.groups.values()), default=0)
    factor = max(1, -(-count // most_bins))
    bin_ns, count = timeline.bin_ns * factor, -(-count // factor)
    heights = [0] * count
    bars: dict[str, list[tuple[int, float, float]]] = {group: [] for group in order}
    for group in order:
        bins = timeline.groups[group]
        for index in range(count):
            time = sum(bins[index * factor : (index + 1) * factor])
            if time > 0:
                bars[group].append((index, heights[index] / bin_ns, (heights[index] + time) / bin_ns))
                heights[index] += time
    return StepPicture(
        bin_ns=bin_ns,
        length_ns=max(1, bin_ns * count),
        top=max(1.0, max(heights, default=0) / bin_ns),
        bars={group: tuple(rows) for group, rows in bars.items()},
        totals={group: totals[group] for group in order},
        idle_ns=sum(max(0, bin_ns - height) for height in heights),
    )
