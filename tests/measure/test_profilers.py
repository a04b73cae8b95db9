"""A second profiler must not start beside a first one, whatever state that is in."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from hf_speedkit.measure.profilers import another_profiler_runs


class Derived(profile):
    """What a user's own profiler class is."""


@pytest.mark.parametrize("kind", [profile, Derived])
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_profiler_is_seen_while_it_warms_up_and_records_and_not_before_or_after(kind):
    assert not another_profiler_runs()
    first = kind(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1, repeat=1))
    made = kind(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
    seen = []
    first.start()  # waits
    for _ in range(3):
        seen.append(another_profiler_runs())
        torch.ones(2).add(1)
        first.step()
    seen.append(another_profiler_runs())
    first.stop()
    assert seen == [False, True, True, False]
    assert not another_profiler_runs()
    assert made.profiler is None  # made, never started: nothing to be afraid of
