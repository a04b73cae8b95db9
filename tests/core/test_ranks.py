"""Which rank the others wait for, from what each has said."""

import pytest

from hf_speedkit.core.ranks import FINISHING, SAVING, Beat, missing_ranks

ALL_REDUCE = "torch/distributed/distributed_c10d.py:2901 all_reduce"


def beat(rank, **changes):
    values = {
        "rank": rank, "host": f"node{rank // 8}", "sent": 30, "progress": 7, "step": 3, "warm": True,
        "doing": "forward and backward", "still_s": 120.0, "where": ALL_REDUCE, "waits": True,
    }  # fmt: skip
    return Beat(**{**values, **changes})


def behind(rank, **changes):
    return beat(rank, **{"progress": 6, "doing": "loading the next batches", "where": "my/collator.py:12 __call__",
                         "waits": False, "still_s": 121.0, **changes})  # fmt: skip


def test_a_beat_survives_the_store():
    assert Beat.from_json(beat(3).to_json()) == beat(3)
    assert Beat.from_json(beat(3).to_json().encode()) == beat(3)


def test_the_rank_that_came_less_far_is_missing_and_its_line_is_shown():
    missing = missing_ranks([beat(0), behind(1), beat(2)])
    assert missing.ranks == (1,)
    assert missing.message == "2 of 3 ranks have waited 120 s for rank 1"
    assert missing.evidence[0] == (
        "rank 1 on node0: loading the next batches after step 3, for 121 s, at my/collator.py:12 __call__"
    )
    assert missing.evidence[1].startswith("rank 0 on node0: forward and backward")
    assert missing.may_end


def test_in_the_same_part_of_a_step_the_rank_that_does_not_wait_is_missing():
    missing = missing_ranks([beat(0), beat(1, waits=False, where="my/loss.py:3 loss"), beat(2)])
    assert missing.ranks == (1,)


def test_a_process_that_is_gone_comes_before_ranks_that_wait_for_it():
    missing = missing_ranks([beat(0), behind(1), beat(2)], silent={2})
    assert missing.ranks == (2,)
    assert "rank 2, not heard of any more" in missing.message


@pytest.mark.parametrize("waits", [True, False])
def test_where_all_are_alike_nobody_is_blamed(waits):
    missing = missing_ranks([beat(rank, waits=waits) for rank in range(4)])
    assert missing.ranks == ()
    assert "none of the 4 stands out" in missing.message


@pytest.mark.parametrize(
    "change",
    [{"doing": SAVING}, {"doing": FINISHING}, {"warm": False}],
    ids=["a checkpoint", "the end", "the first step"],
)
def test_a_run_is_not_ended_during(change):
    assert not missing_ranks([beat(0), behind(1, **change)]).may_end
    assert not missing_ranks([beat(0, **change), behind(1)]).may_end


def test_of_many_missing_ranks_a_few_are_shown():
    missing = missing_ranks([beat(0), *(behind(rank) for rank in range(1, 64))])
    assert "for ranks 1, 2, 3, 4, 5, 6, 7, 8, ..." in missing.message
    assert len(missing.evidence) == 5
