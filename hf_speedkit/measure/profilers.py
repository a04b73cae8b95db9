"""Whether a profiler already runs in this process: CUPTI has one user at a time, and torch does not keep two apart."""

from __future__ import annotations

import gc
from typing import Any


def another_profiler_runs(within_steps: int = 0) -> bool:
    """Whether a profiler records this thread, warms up in this process, or will within the coming steps.

    A recording torch knows of itself. One that warms up it does not: a second one started then ends the process with a
    segmentation fault (torch 2.13, CPU), or both lose their events; and a schedule that begins to warm up beside ours
    does the same. So the objects in memory are asked, which takes some 20 ms for 300,000 of them: for use once before
    a recording, not per step.

    Private to torch: `torch.autograd._profiler_enabled`, `profile.profiler`, `profile.current_action`,
    `profile.step_rec_fn` (None before its start and, since 2.13, after its end), `profile.schedule` and
    `profile.step_num` (checked with 2.11 and 2.13; tests/measure/test_profilers.py fails when they change). Before 2.13
    one that was stopped early is taken for one that waits, as long as it is in memory.

    Args:
        within_steps: steps to look ahead, where the other profiler follows a schedule and counts the same steps.
    """
    import torch
    from torch.profiler import profile

    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    if enabled is not None and enabled():
        return True
    kinds = [profile]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An instance refers to its class.
    found = (other for kind in kinds for other in gc.get_referrers(kind) if type(other) is kind)
    return any(_acts(other, within_steps) for other in found)


def _acts(other: Any, within_steps: int) -> bool:
    from torch.profiler import ProfilerAction

    if getattr(other, "step_rec_fn", None) is None:  # not started, or stopped: in its warm-up it keeps that action
        return False
    # `profiler` is None in one that was made and not started, or waits.
    if other.profiler is not None and other.current_action is ProfilerAction.WARMUP:
        return True
    coming = range(other.step_num + 1, other.step_num + 1 + within_steps)
    return any(other.schedule(step) is not ProfilerAction.NONE for step in coming)
