"""FSDP2 without its copies: the numbers of torch's own, in every way of sharding, and fewer copies."""

import inspect
import json
import re
import socket
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from rank_processes import start_ranks
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torchs
from zero_copy_run import STEPS, VARIANTS, rank_main

from hf_speedkit.trainer.sharded import zero_copy, zero_copy_proof
from hf_speedkit.trainer.sharded.ahead import _drop
from hf_speedkit.trainer.sharded.gradient_memory import ReduceScatterInOneMemory
from hf_speedkit.trainer.sharded.put_back import _is_known

two = pytest.mark.two_process

# what stays with torch's own code, and why
GATHERED_BY_TORCH = {"second dimension", "on the host", "hybrid of single ranks"}  # the last gathers nothing
REDUCED_BY_TORCH = {
    *GATHERED_BY_TORCH,
    "hybrid",  # summed over the copies behind it
    "uneven",  # gradients of a dimension that the ranks do not divide are padded
    "mixed precision",  # summed in another precision
    "fp16",  # divided before the sum
    "hooked",  # hooks get what torch's code hands them
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero_copy")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_ranks(rank_main, port, str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@two
@pytest.mark.parametrize("name", VARIANTS)
def test_without_copies_training_gives_the_numbers_of_torchs_own_bit_for_bit(ranks, name):
    for said in ranks:
        copied, direct = said[name]["copied"], said[name]["direct"]
        assert direct["losses"] == copied["losses"]
        assert direct["weights"] == copied["weights"]
        assert direct["hooks"] == copied["hooks"]
        assert (copied["gathers"], copied["reductions"]) == (0, 0)
        assert len(set(copied["losses"])) >= STEPS, "it trained"


@two
@pytest.mark.parametrize("name", VARIANTS)
def test_only_what_needs_a_copy_is_copied(ranks, name):
    for said in ranks:
        copied, direct = said[name]["copied"], said[name]["direct"]
        assert bool(direct["gathers"]) is (name not in GATHERED_BY_TORCH)
        assert bool(direct["copies out"]) is (name in GATHERED_BY_TORCH - {"hybrid of single ranks"})
        assert bool(direct["copies in"]) is (name in REDUCED_BY_TORCH)
        assert direct["reductions"] + direct["copies in"] == copied["copies in"]
        without_copies = [line for line in direct["lines"] if "without copies" in line]
        assert bool(without_copies) is bool(direct["gathers"] + direct["reductions"]), "said where it is so"
        assert ["torch copies the others" in line for line in without_copies] in ([], [name in REDUCED_BY_TORCH])
        assert not any("without copies" in line for line in copied["lines"])


@two
def test_what_is_copied_is_said_by_groups(ranks):
    said = {name: ranks[0][name]["direct"]["lines"][-1] for name in ("uneven", "hybrid", "fp16", "second dimension")}
    some = "without copies, weights of 5 of 5 groups are gathered into the parameters and gradients of {} of 5 reduced"
    # A width of nine over two ranks: the rows of the embedding, 12, are divided.
    assert said["uneven"].startswith(some.format(1))
    assert said["hybrid"].startswith(some.format(0))
    assert said["fp16"].startswith(some.format(0))


@two
@pytest.mark.parametrize("name", ["broken gathers", "broken gathers, hybrid", "broken sums", "another torch"])
def test_what_does_it_wrong_if_on_one_rank_only_is_found_out_and_all_ranks_copy(ranks, name):
    expected = ranks[0]["hybrid" if "hybrid" in name else "as it is"]["copied"]["weights"]
    for said in ranks:
        assert (said[name]["gathers"], said[name]["reductions"]) == (0, 0)
        assert not any("without copies" in line for line in said[name]["lines"])
    assert ranks[0][name]["weights"] == expected


@two
@pytest.mark.parametrize("how", ["copied", "direct"])
def test_behind_a_pass_in_which_layers_did_not_run_nothing_is_held_and_weights_that_changed_are_used(ranks, how):
    """Ahead of them they were gathered: torch would take those for their weights whenever they run."""
    for said in ranks:
        cases = {
            "stops early",
            "leaves one out",
            "fails",
            "fails, before 2.13",
            "below the root",
            "twice",
            "aims behind",
        }
        assert said["not run"][how].keys() >= cases
        for name, (held, wrong) in said["not run"][how].items():
            assert held == [], name
            assert wrong == [], name


def test_memory_is_let_go_of_behind_the_gathers_also_where_torch_has_forgotten_one():
    """On two H200, torch's own wait for it did not hold, and others' tensors were written over."""
    did = []
    training = SimpleNamespace(wait_stream=lambda other: did.append(f"training waits for {other}"))
    weight = SimpleNamespace(all_gather_outputs=[torch.ones(4)], free_unsharded_param=lambda: did.append("freed"))
    group = SimpleNamespace(
        _all_gather_result=None, is_sharded=True, fsdp_params=[weight],
        comm_ctx=SimpleNamespace(all_gather_stream="gathers"),
        device_handle=SimpleNamespace(current_stream=lambda: training),
    )  # fmt: skip
    _drop(group)
    assert did == ["training waits for gathers", "freed"]
    did.clear()
    group.is_sharded = False  # in use
    _drop(group)
    assert did == []


def test_a_torch_with_other_private_parts_is_not_put_back_by_hand():
    group = SimpleNamespace(_partial_reduce_output=None, _training_state=0, _to_sharded=id, finalize_backward=id)
    one_pass = SimpleNamespace(all_states=[], iter_forward_root=None, post_backward_final_callback_queued=True)
    root = SimpleNamespace(_state_ctx=one_pass, _comm_ctx=SimpleNamespace(all_gather_state=None, post_forward_order=[]))
    assert _is_known(root, [group])
    del group.finalize_backward
    assert not _is_known(root, [group])
    del root._comm_ctx
    assert not _is_known(root, [])


@two
@pytest.mark.parametrize("ended_by", ["backward", "interrupted", "backward, before 2.13", "interrupted, before 2.13"])
def test_a_training_that_failed_leaves_nothing_behind_and_the_next_one_is_right_with_other_settings(ranks, ended_by):
    for said in ranks:
        held, communicates_as_before, *wrong = said["after"][ended_by]
        assert held == []
        assert communicates_as_before
        assert wrong == [[], [], []]  # without the context; with torch's copies and two passes; without copies


@two
def test_a_vision_tower_as_long_as_the_decoder_is_no_part_of_its_chain(ranks):
    body = "base_model"
    decoder = [f"{body}.embed", *(f"{body}.layers.{number}" for number in range(3)), "head"]
    for ahead, vision in ((1, 3), (2, 5)):
        tower = [f"visual.{number}" for number in range(vision)]
        expected = {
            name: chain[place + 1 : place + 1 + ahead]
            for chain in (decoder, tower)
            for place, name in enumerate(chain[:-1])
        }
        assert ranks[0]["chains"][f"{vision} and {ahead} ahead"] == expected
        assert ranks[0]["chains"][f"{vision} and {ahead} ahead, behind"] == {}


@two
def test_reentrant_checkpointing_gathers_nothing_ahead_and_says_so_in_one_line(ranks):
    ahead, lines, said = ranks[0]["chains"]["reentrant"]
    assert ahead == {}
    assert not any("ahead" in line or "without copies" in line for line in lines)
    assert [line.partition(",")[0] for line in said] == [
        "FSDP2 gathers ahead what it does by itself",
        "FSDP2 copies weights and gradients",
    ]


def test_results_begin_where_sixteen_bytes_can_be_moved_at_once():
    class Param:
        def __init__(self, *size):
            self.sharded_size = torch.Size(size)

    memory = ReduceScatterInOneMemory(torch.device("cpu"))
    rooms = zero_copy._rooms(
        [Param(6), Param(5, 3), Param(4)], zero_copy.ZeroCopyReduceScatter(memory), torch.bfloat16, torch.device("cpu")
    )
    assert [tuple(room.shape) for room in rooms] == [(6,), (5, 3), (4,)]
    assert [(room.data_ptr() - rooms[0].data_ptr()) % 128 for room in rooms] == [0, 0, 0]
    assert all(room.is_contiguous() for room in rooms)


@pytest.mark.parametrize("begin", [0, 3, 20])
def test_known_gradients_take_no_more_memory_than_they_are(begin):
    """Of a head they are gigabytes, and the optimizer's state of a resumed run is there already."""
    made = zero_copy_proof._ramp(begin, torch.Size((50, 40)), torch.bfloat16, torch.device("cpu"))
    assert torch.equal(made.flatten(), (torch.arange(begin, begin + 2000) % 7).bfloat16())
    assert made.untyped_storage().nbytes() < 2 * (2000 + 7)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("foreach_all_gather", lambda fsdp_params, group: None, "foreach_all_gather of torch .* takes other arguments"),
        ("foreach_reduce", "one result fewer", "foreach_reduce of torch .* gives other results"),
        ("foreach_all_gather_copy_out", None, "gathers in another way"),
        ("AllGatherResult", namedtuple("Result", "output event"), "a gather's result of torch .* has other parts"),
    ],
)
def test_a_torch_that_gathers_in_another_way_is_left_alone(monkeypatch, name, other, message):
    assert zero_copy.obstacle() is None
    if other is None:
        monkeypatch.delattr(torchs, name)
    elif callable(other):
        monkeypatch.setattr(torchs, name, other)
    else:

        def reduce(*_):
            return ()

        reduce.__signature__ = inspect.signature(torchs.foreach_reduce).replace(return_annotation=tuple[int, int])
        monkeypatch.setattr(torchs, name, reduce)
    assert re.search(message, zero_copy.obstacle())


def test_torchs_functions_are_back_when_training_ends_also_by_an_error():
    names = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
    before = [getattr(torchs, name) for name in names]
    with pytest.raises(RuntimeError, match="in training"), zero_copy.zero_copy():
        assert [getattr(torchs, name) for name in names] != before
        raise RuntimeError("in training")
    assert [getattr(torchs, name) for name in names] == before
