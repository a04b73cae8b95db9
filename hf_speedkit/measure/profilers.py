"""Whether a profiler already runs in this process: CUPTI has one user at a time, and torch does not keep two apart."""

from __future__ import annotations

import gc


def another_profiler_runs() -> bool:
    """Whether a profiler records this thread, or warms up in this process.

    A recording torch knows of itself. One that warms up it does not: a second one started then ends the process with a
    segmentation fault (torch 2.13, CPU), or both lose their events. So the objects in memory are asked, which takes
    some 20 ms for 300,000 of them: for use once before a recording, not per step.

    Private to torch: `torch.autograd._profiler_enabled`, `profile.profiler` and `profile.current_action` (checked with
    2.13; tests/measure/test_profilers.py fails when they change).
    """
    import torch
    from torch.profiler import ProfilerAction, profile

    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    if enabled is not None and enabled():
        return True
    kinds = [profile]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An instance refers to its class. `profiler` is None in one that was made and not started.
    found = (other for kind in kinds for other in gc.get_referrers(kind) if type(other) is kind)
    return any(p.profiler is not None and p.current_action is ProfilerAction.WARMUP for p in found)
