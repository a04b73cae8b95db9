"""A second profiler must not start beside a first one, whatever state that is in."""

import gc

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


@pytest.mark.parametrize(("within", "seen"), [(0, False), (2, False), (3, True)])
def test_v76_a_profiler_that_waits_is_seen_from_as_far_as_asked(within, seen):
    """Its schedule beginning to warm up beside a recording ends the process with a segmentation fault."""
    waits = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=3, warmup=1, active=1, repeat=1))
    assert not another_profiler_runs(within_steps=9)  # made, never started
    waits.start()
    found = another_profiler_runs(within_steps=within)
    waits.stop()
    assert found is seen
    # Before torch 2.13 nothing tells a profiler that was stopped from one that waits.
    assert another_profiler_runs(within_steps=9) is (waits.step_rec_fn is not None)
    del waits
    gc.collect()
    assert not another_profiler_runs(within_steps=9)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_profiler_that_was_stopped_in_its_warm_up_is_not_taken_for_one_that_warms_up():
    """Trainer's auto_find_batch_size begins training anew: the trace of the second try was lost."""
    stopped = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
    stopped.start()
    assert another_profiler_runs()
    stopped.stop()
    assert another_profiler_runs() is (stopped.step_rec_fn is not None)  # None since torch 2.13
