"""A call that every rank must make: the rank that makes it alone is told who is missing, in seconds."""

import itertools
import threading

import pytest
import torch.distributed as dist

from hf_speedkit.core.errors import CheckpointError
from hf_speedkit.trainer.ranks import roll_call
from hf_speedkit.trainer.ranks.roll_call import RollCall, leave, note_end


@pytest.fixture
def store(monkeypatch):
    """Of three ranks that are there, and of no process that ends."""
    monkeypatch.setattr(roll_call.atexit, "register", lambda act: None)
    monkeypatch.setattr(roll_call, "_LONGEST_POLL_S", 0.02)
    made = dist.HashStore()
    for rank in range(3):
        note_end(made, rank)
    return made


def call(step_s=0.0):
    """A roll call whose clock goes on by so much whenever it is looked at."""
    ticks = itertools.count()
    return RollCall("save_model()", timeout_s=60, clock=lambda: step_s * next(ticks))


def test_ranks_that_all_come_go_on_call_after_call(store):
    calls = [call() for _ in range(3)]
    for _ in range(2):
        threads = [threading.Thread(target=calls[rank].answer, args=(store, rank, 3)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("call_of_rank", [1, 2], ids=["the first call", "a later one"])
def test_a_rank_that_has_ended_is_named_and_the_way_out(store, call_of_rank):
    store.add("save_model()/1", 3 * (call_of_rank - 1))  # all came to the first
    one = call()
    for _ in range(call_of_rank - 1):
        one.answer(store, 0, 3)
    store.set(f"save_model()/{call_of_rank}/1", "1")
    leave(store, 2)
    with pytest.raises(CheckpointError, match=r"rank 2 of 3 ended without it\n.*\n.*hf-speedkit export"):
        one.answer(store, 0, 3)


def test_ranks_that_may_come_yet_are_named_once_and_waited_for_until_the_time_limit(store, caplog):
    with pytest.raises(CheckpointError, match="ranks 0, 2 of 3 did not come in 63 s"):
        call(step_s=7.0).answer(store, 1, 3)
    assert caplog.text.count("save_model() waits for ranks 0, 2 of 3") == 1


def test_a_store_that_not_all_reach_is_not_waited_for():
    lonely = dist.HashStore()
    lonely.set("here/0", "1")
    call(step_s=7.0).answer(lonely, 0, 2)

    class Gone:
        """The launcher's store, with the launcher gone."""

        def set(self, *_):
            raise dist.DistNetworkError

    call().answer(Gone(), 0, 2)
    leave(Gone(), 0)


def test_a_call_of_another_kind_says_what_makes_it_every_ranks(store):
    one = RollCall("evaluate()", timeout_s=60, why="each has a share", instead=("all get the metrics", None))
    leave(store, 2)
    with pytest.raises(
        CheckpointError, match=r"evaluate\(\) must be called by every rank, for each has a share"
    ) as told:
        one.answer(store, 0, 3)
    assert str(told.value).endswith("all get the metrics")
