"""What only one rank is told to do is told to that rank, before its first collective."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from transformers import IntervalStrategy, TrainerControl, TrainerState

from hf_speedkit.core.errors import SpeedkitError
from hf_speedkit.core.ranks import COMPUTING, LEFT, LOADING, SAVING, Beat
from hf_speedkit.trainer.ranks.meeting import Meetings, wanted


def beat(rank, *, step=3, doing=LOADING, waits=False, sent=1):
    return Beat(
        rank=rank, host="h", sent=sent, progress=9, step=step, warm=True, doing=doing, still_s=1.0, where="file.py:1",
        waits=waits,
    )  # fmt: skip


def meetings(store, rank, *, other=None):
    """Of two ranks; `other` gives the beats of the other one, the last of them for good. Each look lasts 2 s."""
    beats = itertools.chain(other or [], itertools.repeat((other or [None])[-1]))
    ticks = itertools.count(step=2)
    return Meetings(store, rank, 2, beat_of=lambda _: next(beats), clock=lambda: next(ticks))


def test_ranks_that_come_to_the_same_go_on_time_after_time():
    store = dist.HashStore()
    both = [meetings(store, rank, other=[beat(1 - rank, step=2)]) for rank in range(2)]
    for step, wants in ((3, ["save"]), (6, ["evaluate", "save"]), (7, ["end training"])):
        threads = [
            threading.Thread(target=one.meet, args=(wants,), kwargs={"step": step, "timeout_s": 60}) for one in both
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    "other",
    [
        [beat(1, doing=COMPUTING)],
        [beat(1, step=4)],
        [beat(1, doing=LEFT)],
        # Behind step 2 yet, then in a collective between the steps, where two beats must find it.
        [beat(1, step=2), beat(1, waits=True, sent=5), beat(1, waits=True, sent=5), beat(1, waits=True, sent=6)],
    ],
    ids=["in the next step", "a step ahead", "left", "between steps"],
)
def test_v34_a_rank_that_alone_is_told_to_save_stop_or_evaluate_is_told_so(other):
    with pytest.raises(SpeedkitError, match=r"rank 0 was told to save after step 3(.|\n)*rank 1 on h(.|\n)*_save"):
        meetings(dist.HashStore(), 0, other=other).meet(["save"], step=3, timeout_s=1e9)


def test_v34_a_rank_that_may_come_yet_is_waited_for_until_the_time_limit():
    slow = [beat(1, step=2, doing=COMPUTING), beat(1), beat(1, waits=True), beat(1, doing=SAVING)]
    with pytest.raises(SpeedkitError, match="writing a checkpoint"):
        meetings(dist.HashStore(), 0, other=slow).meet(["save"], step=3, timeout_s=30)


def test_v34_ranks_that_are_told_different_things_are_all_told_so():
    store = dist.HashStore()
    store.set("meeting/1/1", "evaluate")
    store.add("meeting/1", 1)
    with pytest.raises(SpeedkitError, match=r"told to end training after step 3(.|\n)*rank 1: evaluate"):
        meetings(store, 0).meet(["end training"], step=3, timeout_s=60)


def test_a_store_that_is_gone_is_not_waited_for():
    class Gone:
        def set(self, *_):
            raise dist.DistNetworkError

    meetings(Gone(), 0).meet(["save"], step=3, timeout_s=60)


@pytest.mark.parametrize(
    ("step", "flags", "wants"),
    [
        (4, ["should_log"], []),
        (4, [], ["leave out a log"]),
        (2, [], []),  # logged already, and its epoch ends
        (5, ["should_log"], ["log"]),
        (1, ["should_log"], []),
        (9, ["should_log", "should_training_stop"], ["end training"]),
        (5, ["should_save", "should_evaluate"], ["evaluate", "save"]),
        (5, ["should_epoch_stop"], ["end training"]),
        (5, [], []),
    ],
)
def test_a_log_that_the_settings_bring_is_no_meeting_and_all_else_is(step, flags, wants):
    control, state = TrainerControl(), TrainerState(global_step=step, max_steps=9, logging_steps=2)
    for flag in flags:
        setattr(control, flag, True)
    args = SimpleNamespace(logging_first_step=True, logging_strategy=IntervalStrategy.STEPS)
    assert wanted(args, state, control, logged=2) == wants
