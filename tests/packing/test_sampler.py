from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader, skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_speedkit import PackedBatchSampler
from hf_speedkit.core.errors import PackingError
from hf_speedkit.packing import sampler as sampler_module
from hf_speedkit.packing.planner import plan_packing

Lengths = Callable[..., list[int]]
SLOTS = 8192


def ranks(lengths: list[int], world_size: int, **settings: Any) -> list[PackedBatchSampler]:
    settings = {"tokens_per_batch": SLOTS, **settings}
    return [PackedBatchSampler(lengths, world_size=world_size, rank=rank, **settings) for rank in range(world_size)]


def epoch_of(sampler: PackedBatchSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=150),
    world_size=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    epochs=st.integers(1, 4),
    strategy=st.sampled_from(["auto", "fifo_close", "best_fit_decreasing", "next_fit"]),
)
@settings(max_examples=100, deadline=None)
def test_ranks_make_equal_steps_and_see_every_document_once_in_every_epoch(
    lengths: list[int], world_size: int, accumulation: int, epochs: int, strategy: str
) -> None:
    samplers = ranks(
        lengths,
        world_size,
        tokens_per_batch=60,
        gradient_accumulation_steps=accumulation,
        epochs=epochs,
        strategy=strategy,
    )
    length = len(samplers[0])
    assert length % accumulation == 0
    for epoch in range(epochs):
        rows = [epoch_of(sampler, epoch) for sampler in samplers]
        assert {len(own) for own in rows} == {length} == {len(sampler) for sampler in samplers}
        assert Counter(i for own in rows for row in own for i in row) == Counter(range(len(lengths)))
        for first in range(0, length, accumulation):
            assert any(row for own in rows for row in own[first : first + accumulation])


def test_transformers_and_accelerate_find_what_they_look_for() -> None:
    sampler = PackedBatchSampler([5, 6, 7], tokens_per_batch=10, gradient_accumulation_steps=2)
    assert isinstance(sampler, BatchRebalanceSampler)
    assert not hasattr(sampler, "batch_size")  # accelerate would cut gathered values of the last batch by it
    assert not hasattr(sampler, "sampler")  # accelerate would set another epoch through it
    assert list(sampler.lengths) == [5, 6, 7]
    assert len(sampler) == sampler.micro_batches_per_epoch == 4
    assert sampler.steps_per_epoch == 2


def test_the_number_of_micro_batches_is_that_of_the_fullest_epoch() -> None:
    lengths = [int(length) for length in np.random.default_rng(0).integers(1, 60, 40)]
    sampler = PackedBatchSampler(lengths, tokens_per_batch=60, epochs=12, strategy="next_fit")
    packs = [len(sampler.plan(epoch).packs) for epoch in range(12)]
    assert min(packs) < max(packs)  # else this data set tests nothing
    assert len(sampler) == max(packs)
    assert all(len(epoch_of(sampler, epoch)) == max(packs) for epoch in range(12))


def test_a_shorter_epoch_is_filled_so_that_no_step_is_without_documents() -> None:
    lengths = [int(length) for length in np.random.default_rng(0).integers(1, 60, 40)]
    sampler = PackedBatchSampler(lengths, tokens_per_batch=60, epochs=12, strategy="next_fit")
    for epoch in range(12):
        assert all(epoch_of(sampler, epoch))


def test_v34_rows_over_are_empty_and_never_repeat_a_document() -> None:
    # 9 packs on 2 ranks x 2 micro-batches: 3 steps of 4 rows, 3 rows over, one in each step.
    samplers = ranks([SLOTS] * 9, 2, gradient_accumulation_steps=2)
    rows = [epoch_of(sampler, 0) for sampler in samplers]
    assert [len(own) for own in rows] == [6, 6]
    assert Counter(i for own in rows for row in own for i in row) == Counter(range(9))
    for first in (0, 2, 4):
        step = [row for own in rows for row in own[first : first + 2]]
        assert step.count([]) == 1


def test_epochs_differ_and_repeat_exactly(chat_lengths: Lengths) -> None:
    lengths = chat_lengths(300)
    sampler = PackedBatchSampler(lengths, tokens_per_batch=SLOTS, epochs=3)
    epochs = [epoch_of(sampler, epoch) for epoch in (0, 1, 2)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epoch_of(sampler, 1) == epochs[1]
    assert epoch_of(PackedBatchSampler(lengths, tokens_per_batch=SLOTS, epochs=3), 1) == epochs[1]
    assert epoch_of(PackedBatchSampler(lengths, tokens_per_batch=SLOTS, epochs=3, seed=1), 1) != epochs[1]


def test_without_shuffling_documents_stay_in_order_in_every_epoch(chat_lengths: Lengths) -> None:
    sampler = PackedBatchSampler(
        chat_lengths(100), tokens_per_batch=SLOTS, epochs=5, shuffle=False, strategy="next_fit"
    )
    assert [i for row in epoch_of(sampler, 3) for i in row] == list(range(100))


def test_an_iterator_under_way_stays_in_its_epoch(chat_lengths: Lengths) -> None:
    sampler = PackedBatchSampler(chat_lengths(100), tokens_per_batch=SLOTS, epochs=2)
    expected = epoch_of(sampler, 0)
    iterator = iter(sampler)
    got = [next(iterator)]
    sampler.set_epoch(1)
    assert [*got, *iterator] == expected


def test_the_caller_cannot_change_the_plan(chat_lengths: Lengths) -> None:
    sampler = PackedBatchSampler(chat_lengths(50), tokens_per_batch=SLOTS)
    expected = [list(row) for row in sampler]
    for row in sampler:
        row.clear()
    assert list(sampler) == expected


def test_an_epoch_beyond_those_counted_that_needs_more_rows_reuses_the_packs_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [int(length) for length in np.random.default_rng(0).integers(1, 60, 40)]
    packs = [len(plan_packing(lengths, tokens_per_batch=60, strategy="next_fit", epoch=e).packs) for e in range(40)]
    sampler = PackedBatchSampler(lengths, tokens_per_batch=60, strategy="next_fit", epochs=1)
    longer = [epoch for epoch in range(40) if packs[epoch] > packs[0]]
    assert longer
    for epoch in longer[:3]:
        rows = epoch_of(sampler, epoch)
        assert len(rows) == len(sampler) == packs[0]
        assert Counter(i for row in rows for i in row) == Counter(range(40))
        assert rows != epoch_of(sampler, 0)
    assert epoch_of(sampler, longer[0]) != epoch_of(sampler, longer[1])


def test_counting_the_epochs_is_bounded_for_large_data(monkeypatch: pytest.MonkeyPatch, chat_lengths: Lengths) -> None:
    planned: list[int] = []

    def counting_planner(*args: Any, **settings: Any) -> Any:
        planned.append(settings["epoch"])
        return plan_packing(*args, **settings)

    monkeypatch.setattr(sampler_module, "plan_packing", counting_planner)
    monkeypatch.setattr(sampler_module, "_COUNTED_DOCUMENTS", 1000)
    sampler = PackedBatchSampler(chat_lengths(400), tokens_per_batch=SLOTS, epochs=1_000_000)
    assert planned == [1, 0]
    # One row in a thousand, and at least one, is kept free for epochs that were not counted.
    assert len(sampler) == max(len(sampler.plan(0).packs), len(sampler.plan(1).packs)) + 1
    for epoch in (5, 999_999):
        assert Counter(i for row in epoch_of(sampler, epoch) for i in row) == Counter(range(400))


def test_only_the_latest_plan_is_kept(chat_lengths: Lengths) -> None:
    small, large = (
        len(pickle.dumps(PackedBatchSampler(chat_lengths(1000), tokens_per_batch=SLOTS, epochs=epochs).__dict__))
        for epochs in (1, 20)
    )
    assert large < small * 1.1


def test_it_travels_to_a_worker_without_its_plan(chat_lengths: Lengths) -> None:
    sampler = PackedBatchSampler(chat_lengths(1000), tokens_per_batch=SLOTS, epochs=2)
    expected = epoch_of(sampler, 1)
    sent = pickle.dumps(sampler)
    assert len(sent) < 1000 * 8 + 2000  # 8 bytes a document and the settings
    assert list(pickle.loads(sent)) == expected


# ---- resuming through accelerate ------------------------------------------------------------------------------------


class _Indices:
    """A dataset whose rows are their own indices, so that a loader shows what the sampler chose."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def prepared_loader(lengths: list[int], rank: int, world_size: int) -> tuple[Any, PackedBatchSampler]:
    """The loader as transformers 5.23 prepares it: accelerate's shard round the sampler, made to pass it through."""
    sampler = PackedBatchSampler(
        lengths, tokens_per_batch=SLOTS, epochs=3, world_size=world_size, rank=rank, gradient_accumulation_steps=2
    )
    loader = prepare_data_loader(
        DataLoader(_Indices(len(lengths)), batch_sampler=sampler, collate_fn=list),
        num_processes=world_size,
        process_index=rank,
        put_on_device=False,
    )
    if world_size > 1:
        assert isinstance(loader.batch_sampler, BatchSamplerShard)
        loader.batch_sampler.num_processes = 1
        loader.batch_sampler.process_index = 0
    return loader, sampler


def start_epoch_as_the_trainer_does(loader: Any, epoch: int) -> None:
    """transformers 5.23, trainer.py:1848-1858: the loader, then one wrapper deep."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    inner = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    if hasattr(inner, "set_epoch"):
        inner.set_epoch(epoch)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("done", [0, 4])
def test_the_order_after_a_resume_equals_the_uninterrupted_run(
    world_size: int, epoch: int, done: int, chat_lengths: Lengths
) -> None:
    lengths = chat_lengths(200)
    for rank in range(world_size):
        whole, whole_sampler = prepared_loader(lengths, rank, world_size)
        for earlier in range(epoch + 1):
            start_epoch_as_the_trainer_does(whole, earlier)
            expected = list(whole)
        assert len(expected) == len(whole)

        resumed, sampler = prepared_loader(lengths, rank, world_size)
        rest = skip_first_batches(resumed, done)
        sampler.set_epoch(epoch)  # from a callback's on_epoch_begin
        start_epoch_as_the_trainer_does(rest, epoch)
        assert list(rest) == expected[done:]
        # The epoch after it runs through the loader that skips nothing.
        for loader, own in ((whole, whole_sampler), (resumed, sampler)):
            own.set_epoch(epoch + 1)
            start_epoch_as_the_trainer_does(loader, epoch + 1)
        assert list(resumed) == list(whole)


def test_without_the_callback_a_resume_on_two_ranks_would_start_in_the_wrong_epoch(chat_lengths: Lengths) -> None:
    # The trap itself: if this fails, transformers or accelerate reach the sampler now and the callback can go.
    loader, sampler = prepared_loader(chat_lengths(200), 0, 2)
    start_epoch_as_the_trainer_does(skip_first_batches(loader, 2), 1)
    assert sampler.epoch == 0


def test_empty_rows_pass_through_accelerate(chat_lengths: Lengths) -> None:
    lengths = [SLOTS] * 3
    for rank in range(2):
        loader, sampler = prepared_loader(lengths, rank, 2)
        assert list(loader) == list(sampler)
        assert len(list(loader)) == 2


def test_state_goes_through_a_checkpoint(chat_lengths: Lengths) -> None:
    lengths = chat_lengths(200)
    sampler = PackedBatchSampler(lengths, tokens_per_batch=SLOTS, epochs=3)
    expected = epoch_of(sampler, 2)
    other = PackedBatchSampler(lengths, tokens_per_batch=SLOTS, epochs=3)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == expected


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"tokens_per_batch": 9000}, "tokens_per_batch: saved 8192, now 9000"),
        ({"gradient_accumulation_steps": 3}, "packs_per_step: saved 4, now 6"),
        ({"strategy": "next_fit"}, "strategy"),
        ({"shuffle": False}, "shuffle"),
        ({"cost_window_steps": 2}, "cost_window_steps: saved 1, now 2"),
    ],
)
def test_state_of_a_run_with_another_order_is_refused(
    changed: dict[str, Any], named: str, chat_lengths: Lengths
) -> None:
    settings: dict[str, Any] = {
        "tokens_per_batch": SLOTS, "world_size": 2, "gradient_accumulation_steps": 2, "epochs": 2,
    }  # fmt: skip
    lengths = chat_lengths(60)
    state = PackedBatchSampler(lengths, **settings).state_dict()
    with pytest.raises(PackingError, match=named):
        PackedBatchSampler(lengths, **{**settings, **changed}).load_state_dict(state)


def test_state_of_other_data_is_refused(chat_lengths: Lengths) -> None:
    state = PackedBatchSampler(chat_lengths(60), tokens_per_batch=SLOTS).state_dict()
    with pytest.raises(PackingError, match="another order"):
        PackedBatchSampler(chat_lengths(60, seed=1), tokens_per_batch=SLOTS).load_state_dict(state)
    with pytest.raises(PackingError, match="epoch None"):
        PackedBatchSampler(chat_lengths(60), tokens_per_batch=SLOTS).load_state_dict({**state, "epoch": None})


def test_as_many_ranks_of_half_the_accumulation_may_go_on(chat_lengths: Lengths) -> None:
    # 2 ranks x 2 and 4 ranks x 1 make steps of the same documents.
    lengths = chat_lengths(100)
    state = ranks(lengths, 2, gradient_accumulation_steps=2)[0].state_dict()
    for sampler in ranks(lengths, 4):
        sampler.load_state_dict(state)
    before = {name: value for name, value in state.items() if "window" not in name}
    ranks(lengths, 4)[0].load_state_dict(before)


def test_another_number_of_ranks_is_refused_where_it_decides_what_documents_make_a_step(chat_lengths: Lengths) -> None:
    lengths = chat_lengths(100)
    few = ranks(lengths, 2, gradient_accumulation_steps=2, cost_window_steps=2)[0]
    many = ranks(lengths, 4, cost_window_steps=2)[0]
    first_step = [
        {document for slot in sampler.slots(0)[:micro_batches] for pack in slot for document in pack}
        for sampler, micro_batches in ((few, 2), (many, 1))
    ]
    assert first_step[0] != first_step[1]
    with pytest.raises(PackingError, match="ranks_of_a_cost_window: saved 2, now 4"):
        many.load_state_dict(few.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "no documents"),
        ({"lengths": [9]}, "longer than a row"),
        ({"lengths": [0]}, "have no tokens"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2 ranks"),
        ({"rank": -1}, "rank -1"),
        ({"rank": "0"}, "rank '0' is not one of"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"world_size": 0}, "world_size=0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"cost_window_steps": 0}, "cost_window_steps=0"),
        ({"strategy": "bfd"}, "not known"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        PackedBatchSampler(**{"lengths": [3, 4], "tokens_per_batch": 8, **settings})
