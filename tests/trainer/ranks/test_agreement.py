"""Two gloo processes: one rank's failure stops both, at once and with the same message."""

import os
import time

import pytest
from rank_processes import rank_queue, start_ranks

from hf_speedkit.core.errors import PackingError, SpeedkitError
from hf_speedkit.trainer.ranks.agreement import agree, say_once


def failing():
    raise PackingError("rank 1 has no documents", mend="check its shard")


def run(rank, port, queue):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    queue.put((rank, "result", agree(lambda: rank + 10)))
    say_once(lambda text: queue.put((rank, "says", text)), ["slow here", "wrong"] if rank == 1 else ["slow here"])
    try:
        agree(failing if rank == 1 else lambda: None)
    except SpeedkitError as error:
        queue.put((rank, type(error).__name__, str(error)))
    dist.destroy_process_group()


@pytest.mark.two_process
def test_a_failure_on_one_rank_is_raised_on_all(free_port):
    queue = rank_queue()
    began = time.monotonic()
    start_ranks(run, free_port, queue)
    assert time.monotonic() - began < 60
    said = {}
    while not queue.empty():
        rank, kind, value = queue.get()
        said.setdefault(rank, []).append((kind, value))
    assert said[0][:3] == [("result", 10), ("says", "slow here"), ("says", "rank 1 of 2: wrong")]
    assert said[1] == [("result", 11), ("PackingError", "rank 1 has no documents\nMend it:  check its shard")]
    kind, message = said[0][3]
    assert kind == "SpeedkitError"
    assert "rank 1 of 2 cannot train" in message
    assert "rank 1 has no documents" in message


def test_a_single_process_just_runs_the_check():
    assert agree(lambda: 3) == 3
    with pytest.raises(PackingError):
        agree(failing)


def test_a_single_process_says_all_it_has_to_say():
    said = []
    say_once(said.append, ["one", "two"])
    assert said == ["one", "two"]
