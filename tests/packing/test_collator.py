from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_speedkit import PackedBatchSampler, PackedCollator
from hf_speedkit.core.errors import PackingError
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.packing.boundaries import check_packed_batch, packed_documents

PAD = 0
IGNORED = -100

INT64_ROW = ("input_ids", "labels", "position_ids")


def document(length: int, first: int = 10) -> dict[str, Any]:
    return {"input_ids": list(range(first, first + length))}


def documents(*lengths: int) -> list[dict[str, Any]]:
    return [document(length, first=1000 * place + 10) for place, length in enumerate(lengths)]


def collate(rows: Sequence[dict[str, Any]], slots: int, **settings: Any) -> dict[str, Any]:
    return PackedCollator(PAD, slots, **settings)(rows)


def values(batch: dict[str, Any], key: str) -> list[int]:
    return batch[key].flatten().tolist()


def test_a_row_holds_every_key_and_nothing_else() -> None:
    batch = collate(documents(3, 2), 8)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 1010, 1011, PAD, PAD, PAD]]
    assert batch["labels"].tolist() == [[IGNORED, 11, 12, IGNORED, 1011, IGNORED, IGNORED, IGNORED]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 8]
    assert batch["max_length_q"] == batch["max_length_k"] == 8
    assert batch["chunk_indices"].tolist() == [[0, 0], [1, 0], [2, 0]]
    assert batch["token_counts"] == TokenCounts(slots=8, real=5, target=3, documents=2, squared_lengths=13)
    assert set(batch) == {
        "input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
        "max_length_k", "chunk_indices", "token_counts",
    }  # fmt: skip


def test_types_and_shapes_are_those_that_kernels_take() -> None:
    batch = collate(documents(3, 2), 8)
    assert all(batch[key].dtype == torch.int64 and batch[key].shape == (1, 8) for key in INT64_ROW)
    assert batch["seq_idx"].dtype == torch.int32
    assert batch["seq_idx"].shape == (1, 8)
    assert batch["seq_idx"].is_contiguous()
    assert batch["cu_seq_lens_q"].dtype == batch["cu_seq_lens_k"].dtype == batch["chunk_indices"].dtype == torch.int32
    assert type(batch["max_length_q"]) is type(batch["max_length_k"]) is int
    counts = batch["token_counts"]
    assert all(type(getattr(counts, name)) is int for name in ("slots", "real", "target", "documents"))


@given(st.lists(st.integers(1, 150), max_size=12), st.integers(0, 200), st.sampled_from([1, 16, 64, None]))
@settings(max_examples=100, deadline=None)
def test_the_row_says_where_documents_lie_and_loses_no_token(
    lengths: list[int], spare: int, chunk_size: int | None
) -> None:
    slots = max(1, sum(lengths) + spare)
    rows = documents(*lengths)
    batch = collate(rows, slots, chunk_size=chunk_size)
    segments = [*lengths, slots - sum(lengths)] if sum(lengths) < slots else lengths
    assert [place.length for place in check_packed_batch(batch, required=("seq_idx",))] == segments
    for row, place in zip(rows, packed_documents(batch), strict=False):
        tokens = row["input_ids"]
        assert values(batch, "input_ids")[place.start : place.stop] == tokens
        assert values(batch, "labels")[place.start : place.stop] == [IGNORED, *tokens[1:]]
        assert values(batch, "position_ids")[place.start : place.stop] == list(range(len(tokens)))
    padding = slice(sum(lengths), slots)
    assert set(values(batch, "labels")[padding]) <= {IGNORED}
    assert set(values(batch, "input_ids")[padding]) <= {PAD}
    assert values(batch, "seq_idx") == [number for number, length in enumerate(segments) for _ in range(length)]
    assert batch["max_length_q"] >= max(segments)
    assert batch["token_counts"] == TokenCounts(
        slots=slots,
        real=sum(lengths),
        target=sum(length - 1 for length in lengths),
        documents=len(lengths),
        squared_lengths=sum(length * length for length in lengths),
    )
    if chunk_size is None:
        assert "chunk_indices" not in batch
    else:
        # fla 0.6.0, ops/utils/index.py, prepare_chunk_indices: (sequence, chunk in sequence), sequences in order.
        expected = [[n, c] for n, length in enumerate(segments) for c in range(-(-length // chunk_size))]
        assert batch["chunk_indices"].tolist() == expected


def test_no_documents_make_a_row_of_padding_without_targets() -> None:
    batch = collate([], 8)
    assert batch["input_ids"].tolist() == [[PAD] * 8]
    assert batch["labels"].tolist() == [[IGNORED] * 8]
    assert batch["cu_seq_lens_q"].tolist() == [0, 8]
    assert batch["token_counts"] == TokenCounts(slots=8, real=0, target=0, documents=0, squared_lengths=0)
    assert set(batch) == set(collate(documents(3), 8))


def test_every_row_has_the_same_shape() -> None:
    shapes = {
        tuple(collate(documents(*lengths), 64)[key].shape) for lengths in ((1,), (64,), (9, 9, 9)) for key in INT64_ROW
    }
    assert shapes == {(1, 64)}


def test_the_empty_rest_is_one_document() -> None:
    # As documents of one token each, the 692 slots left would be 692 chunks instead of 11.
    batch = collate(documents(1500, 1500, 1500, 1500, 1500), 8192)
    assert len(batch["cu_seq_lens_q"]) == 7
    assert len(batch["chunk_indices"]) == 5 * 24 + 11


def test_a_full_row_has_no_padding_document() -> None:
    batch = collate(documents(5, 3), 8)
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8]
    assert batch["seq_idx"].max() == 1


def test_documents_of_one_token_keep_their_own_segment() -> None:
    batch = collate(documents(1, 1, 2), 4)
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 2, 4]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1]]
    assert batch["seq_idx"].tolist() == [[0, 1, 2, 2]]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, IGNORED, 2011]]
    assert batch["token_counts"].documents == 3


@pytest.mark.parametrize("empty", [[], np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int64)])
def test_documents_without_tokens_leave_no_segment(empty: Any) -> None:
    batch = collate([{"input_ids": empty}, document(2), {"input_ids": empty, "labels": empty}], 4)
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4]
    assert batch["token_counts"].documents == 1


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, dtype=np.int32)])
def test_lists_arrays_and_tensors_make_the_same_row(kind: Callable[[Any], Any]) -> None:
    rows = [{"input_ids": kind([5, 6, 7]), "labels": kind([IGNORED, 6, IGNORED])}, {"input_ids": kind([8, 9])}]
    batch = collate(rows, 6)
    assert values(batch, "input_ids") == [5, 6, 7, 8, 9, PAD]
    assert values(batch, "labels") == [IGNORED, 6, IGNORED, IGNORED, 9, IGNORED]
    assert batch["token_counts"].target == 2


def test_the_rows_given_are_not_changed() -> None:
    tokens = np.arange(5)
    labels = np.arange(5)
    collate([{"input_ids": tokens, "labels": labels}], 5)
    assert tokens.tolist() == labels.tolist() == [0, 1, 2, 3, 4]


def test_labels_of_none_mean_every_token() -> None:
    assert values(collate([{"input_ids": [5, 6], "labels": None}], 2), "labels") == [IGNORED, 6]


@pytest.mark.parametrize("eos", [PAD, 7])
def test_a_pad_id_that_equals_eos_changes_no_count(eos: int) -> None:
    rows = [{"input_ids": [5, eos, 6, eos]}, {"input_ids": [7, eos]}]
    batch = collate(rows, 10)
    assert batch["token_counts"] == TokenCounts(slots=10, real=6, target=4, documents=2, squared_lengths=20)
    assert values(batch, "labels")[:6] == [IGNORED, eos, 6, eos, IGNORED, eos]


def test_v09_all_rows_of_a_batch_become_one_row() -> None:
    batch = collate(documents(20, 18, 22), 60)
    assert batch["input_ids"].shape == (1, 60)
    assert batch["cu_seq_lens_q"].tolist() == [0, 20, 38, 60]


def test_v12_positions_restart_inside_rows_that_are_packed_already() -> None:
    rows = [{**document(7), "seq_lengths": [4, 3]}, {**document(6), "seq_lengths": [6]}]
    loader = DataLoader(Dataset.from_list(rows), batch_size=2, collate_fn=PackedCollator(PAD, 16))
    (batch,) = list(loader)
    assert values(batch, "position_ids") == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert values(batch, "labels")[4] == IGNORED
    assert batch["token_counts"].documents == 3


@pytest.mark.parametrize("lengths", [[4, 2], [4, 4], [7, 0], [8, -1]])
def test_v12_lengths_that_do_not_add_up_are_refused(lengths: list[int]) -> None:
    with pytest.raises(PackingError, match="seq_lengths of a packed row add up to"):
        collate([{**document(7), "seq_lengths": lengths}], 8)


def test_v08_positions_of_three_axes_are_refused_and_the_needed_shape_is_said() -> None:
    row = {**document(24), "position_ids": np.zeros((3, 1, 24), dtype=np.int64)}
    with pytest.raises(PackingError, match=r"(?s)shape \[3, 1, 24\].*\[4, 1, T\]"):
        collate([row], 24)


@pytest.mark.parametrize(("positions", "fits"), [([0, 1, 2], True), ([1, 2, 3], False), ([0, 0, 1], False)])
def test_v08_positions_of_one_axis_may_only_repeat_what_lengths_say(positions: list[int], fits: bool) -> None:
    row = {**document(3), "position_ids": positions}
    if fits:
        assert values(collate([row], 3), "position_ids") == positions
    else:
        with pytest.raises(PackingError, match="do not count from 0"):
            collate([row], 3)


def test_v13_there_is_one_source_of_boundaries() -> None:
    batch = collate([{**document(3), "attention_mask": [1, 1, 1]}], 4)
    assert "attention_mask" not in batch
    check_packed_batch(batch)
    with pytest.raises(PackingError, match="attention_mask beside document boundaries"):
        check_packed_batch({**batch, "attention_mask": torch.ones(1, 4)})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**document(3), "attention_mask": [1, 1]}, "attention_mask of shape"),
        ([1, 2, 3], "a row is a list"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids of a row is object"),
    ],
    ids=["v13 a mask of another length", "no columns", "lists of unequal length"],
)
def test_rows_that_are_no_documents_are_refused(row: Any, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        collate([row], 4)


def test_v13_a_mask_that_hides_tokens_is_refused_rather_than_dropped() -> None:
    with pytest.raises(PackingError, match="attention_mask with zeros"):
        collate([{**document(3), "attention_mask": [1, 1, 0]}], 4)


def test_v14_positions_may_start_where_the_model_wants() -> None:
    batch = collate(documents(3, 5), 8, first_position=2)
    assert values(batch, "position_ids") == [2, 3, 4, 2, 3, 4, 5, 6]
    assert [place.length for place in packed_documents({"position_ids": batch["position_ids"]})] == [3, 5]


@pytest.mark.parametrize(("real", "padding"), [(10, [4, 2]), (12, [4]), (15, [1]), (16, [])])
def test_padding_is_no_longer_than_the_positions_a_model_has(real: int, padding: list[int]) -> None:
    batch = collate(documents(*[4] * (real // 4), *[real % 4] * (real % 4 > 0)), 16, longest_segment=4)
    assert [place.length for place in packed_documents(batch)][-(-real // 4) :] == padding
    assert max(values(batch, "position_ids")) < 4
    assert batch["token_counts"].real == real


def test_v21_a_document_of_exactly_the_row_keeps_all_its_targets() -> None:
    batch = collate(documents(16), 16)
    assert batch["token_counts"].real == 16
    assert batch["token_counts"].target == 15
    assert values(batch, "labels")[-1] == values(batch, "input_ids")[-1] == 25


def test_v24_an_end_token_inside_a_document_does_not_end_it() -> None:
    batch = collate([{"input_ids": [5, 0, 6, 0]}, {"input_ids": [7, 0]}], 6)
    assert [place.length for place in packed_documents(batch)] == [4, 2]


def test_v25_labels_are_not_shifted() -> None:
    batch = collate([{"input_ids": [5, 6, 7], "labels": [IGNORED, IGNORED, 7]}], 3)
    assert values(batch, "labels") == [IGNORED, IGNORED, 7]


def test_v33_equal_tokens_with_few_and_many_targets_are_told_apart() -> None:
    def row(targets: int) -> list[dict[str, Any]]:
        labels = [IGNORED] * (4000 - targets) + [1] * targets
        return [{"input_ids": [1] * 4000, "labels": labels}]

    few, many = (collate(row(targets), 4096)["token_counts"] for targets in (120, 3600))
    assert few.real == many.real == 4000
    assert (few.target, many.target) == (120, 3600)


@pytest.mark.parametrize(
    ("longest", "slots", "bound"),
    [(1, 8192, 8192), (5000, 8192, 8192), (8192, 8192, 8192), (1025, 2049, 2048), (60, 100, 100), (100, 200, 128)],
)
def test_the_longest_length_is_a_power_of_two_that_no_segment_exceeds(longest: int, slots: int, bound: int) -> None:
    # The padding tail is a segment too: with one token in 8,192 slots it is the longest.
    assert collate(documents(longest), slots)["max_length_q"] == bound


def test_few_values_of_the_longest_length_reach_a_compiler() -> None:
    rng = np.random.default_rng(0)
    bounds = {collate(documents(*rng.integers(1, 1100, 7)), 8192)["max_length_q"] for _ in range(50)}
    assert len(bounds) <= 7


def test_rows_that_hold_more_than_the_slots_are_refused() -> None:
    with pytest.raises(PackingError, match="2 documents hold 9 tokens, the row has 8 slots"):
        collate(documents(4, 5), 8)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hello"}, "(?s)no input_ids.*text"),
        ({"input_ids": None}, "no input_ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
        ({"input_ids": [1, 2], "labels": [1, 2, 3]}, "2 input_ids and 3 labels"),
        ({"input_ids": [1, 2], "labels": []}, "2 input_ids and 0 labels"),
        ({"input_ids": [0.5, 1.0]}, "float64"),
        ({"input_ids": [[1, 2], [3, 4]]}, r"shape \[2, 2\]"),
        ({"input_ids": ["a"]}, "pass the token ids"),
    ],
)
def test_rows_that_are_not_documents_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        collate([row], 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pad_token_id": None}, "tokenizer.pad_token = tokenizer.eos_token"),
        ({"pad_token_id": -1}, "pad_token_id=-1"),
        ({"tokens_per_batch": 0}, "tokens_per_batch=0"),
        ({"tokens_per_batch": 8.0}, "tokens_per_batch=8.0"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"first_position": -1}, "first_position=-1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        PackedCollator(**{"pad_token_id": 0, "tokens_per_batch": 8, **settings})


def test_counts_and_lengths_stay_on_the_host_when_the_batch_moves() -> None:
    batch = send_to_device(collate(documents(3, 2), 8), "cpu")
    assert batch["token_counts"].real == 5
    assert type(batch["max_length_q"]) is int


def test_a_collator_travels_to_a_worker() -> None:
    collator = PackedCollator(PAD, 16, chunk_size=None, first_position=1)
    assert pickle.loads(pickle.dumps(collator)) == collator


def test_a_loader_with_the_sampler_trains_every_token_once() -> None:
    rng = np.random.default_rng(0)
    lengths = [int(length) for length in rng.integers(2, 40, 30)]
    rows = documents(*lengths)
    sampler = PackedBatchSampler(lengths, tokens_per_batch=64, gradient_accumulation_steps=4)
    loader = DataLoader(Dataset.from_list(rows), batch_sampler=sampler, collate_fn=PackedCollator(PAD, 64))
    batches = list(loader)
    assert len(batches) == len(sampler)
    seen = sorted(token for batch in batches for token in values(batch, "input_ids") if token != PAD)
    assert seen == sorted(token for row in rows for token in row["input_ids"])
    assert sum(batch["token_counts"].target for batch in batches) == sum(lengths) - len(lengths)


@pytest.mark.parametrize("kind", [list, np.array])
def test_collating_a_row_takes_less_than_three_milliseconds(kind: Callable[[Any], Any]) -> None:
    rows = [{"input_ids": kind(range(1170)), "labels": kind(range(1170))} for _ in range(7)]
    collator = PackedCollator(PAD, 8192)
    durations_s = []
    for _ in range(20):
        started = time.perf_counter()
        collator(rows)
        durations_s.append(time.perf_counter() - started)
    # 0.5 ms for lists on an idle core; the fastest of 20, because other tests run beside this one.
    assert min(durations_s) < 3e-3


def test_pairs_inside_a_sliding_window_are_counted_for_the_documents_and_not_for_padding():
    rows = [{"input_ids": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in (5, 2)]
    banded = sum(int(torch.ones(n, n).tril().triu(1 - 3).sum()) for n in (5, 2))
    assert PackedCollator(0, 12, sliding_window=3)(rows)["token_counts"].window_pairs == banded
    assert PackedCollator(0, 12)(rows)["token_counts"].window_pairs is None
