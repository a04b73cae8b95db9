"""What limited a run, window by window, and what its counted steps showed. Pure arithmetic on logged windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_speedkit.core.records import Finding
from hf_speedkit.core.step_log import LoggedWindow
from hf_speedkit.core.step_parts import PARTS
from hf_speedkit.core.window_findings import flop_gap, step_limit

COUNTED = ("launch_calls", "launches", "device_busy_s", "host_wait_s", "communication_s", "counted_step_time_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What limited the steps of a run.

    Args:
        windows: windows by the rule that names their limit; a window without a counted step has the limit of the last
            one that had, unless its own clock says it waited for data. Unknown ones are left out.
        last: the last finding.
        flop_gap: the last window in which formula and counter disagreed on FLOPs; None where they agree.
        counted: numbers of the last counted step, by metric key.
    """

    windows: Mapping[str, int]
    last: Finding | None
    flop_gap: Finding | None
    counted: Mapping[str, float]


def run_limits(windows: Sequence[LoggedWindow]) -> RunLimits:
    """What limited each window of a run."""
    found: Counter[str] = Counter()
    standing: Finding | None = None
    last: Finding | None = None
    gap: Finding | None = None
    counted: dict[str, float] = {}
    keys = (*(f"speed/{name}" for name in COUNTED), *(f"speed/part_{name}_s" for name in PARTS))
    for window in windows:
        own = step_limit(window.metrics)
        if "speed/part_device_only_s" in window.metrics or "speed/part_host_only_s" in window.metrics:
            standing = own
        last = own or standing or last
        if own or standing:
            found[(own or standing).rule] += 1  # type: ignore[union-attr]  # one of them is there
        gap = flop_gap(window.metrics) or gap
        counted |= {key: window.metrics[key] for key in keys if key in window.metrics}
    return RunLimits(windows=dict(found), last=last, flop_gap=gap, counted=counted)
