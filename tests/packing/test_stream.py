"""Packing a stream: the plan's rows without a plan, no token lost, and a resumed run that goes on with the next row."""

import json
from itertools import islice

import pytest
import torch
from datasets import Dataset, IterableDataset
from support import token_documents, tokenized

from hf_speedkit.core.errors import ConfigurationError, DatasetError, PackingError
from hf_speedkit.packing.collator import PackedCollator
from hf_speedkit.packing.documents import prepare_documents
from hf_speedkit.packing.planner import plan_packing
from hf_speedkit.packing.stream import PackedStream, StreamCollator, StreamState
from hf_speedkit.packing.stream_documents import no_documents
from hf_speedkit.packing.stream_source import keeps_its_place, refuse_other_orders, share_of_rank, shuffles_of

SLOTS = 64


def lengths_of(documents, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 40, (documents,), generator=generator).tolist()


def stream_of(dataset, *, num_shards=1, **options):
    return PackedStream(dataset.to_iterable_dataset(num_shards=num_shards), tokens_per_batch=SLOTS, **options)


def rows_of(stream, limit=10_000):
    """The rows of one pass."""
    rows = []
    for row in islice(stream, limit):
        if not row.documents:
            break
        rows.append(row)
    return rows


def content(rows):
    return [[document["input_ids"].tolist() for document in row.documents] for row in rows]


def counted(row):
    state = row.state
    return state.epoch, state.rows, state.arrived, state.placed, state.report


@pytest.mark.parametrize("documents", [1, 5, 128, 129, 700])
def test_the_rows_are_those_that_the_planner_makes_of_the_same_order(documents):
    dataset = tokenized(lengths_of(documents))
    plan = plan_packing(lengths_of(documents), tokens_per_batch=SLOTS, strategy="fifo_close", shuffle=False)
    expected = [[dataset[index]["input_ids"] for index in pack] for pack in plan.packs]
    assert content(rows_of(stream_of(dataset))) == expected


def test_v19_v23_every_token_comes_once_and_other_columns_do_not_come_along():
    ids = iter(range(10**6))
    documents = [[next(ids) for _ in range(n)] for n in lengths_of(300)]
    dataset = Dataset.from_dict({"input_ids": documents, "src": [f"file {i}" for i in range(300)]})
    rows = rows_of(stream_of(dataset, num_shards=7))
    found = [tuple(document["input_ids"].tolist()) for row in rows for document in row.documents]
    assert sorted(found) == sorted(map(tuple, documents))
    assert len(rows) != len(dataset)
    assert {key for row in rows for document in row.documents for key in document} == {"input_ids", "labels"}
    assert "src" not in StreamCollator(PackedCollator(0, SLOTS))([rows[0]])


@pytest.mark.parametrize("documents", [0, 3])
def test_behind_the_last_document_come_empty_rows_for_ever(documents):
    source = IterableDataset.from_generator(lambda: iter(tokenized([30] * documents).to_list() if documents else []))
    rows = list(islice(PackedStream(source, tokens_per_batch=SLOTS), 50))
    assert [len(row.documents) for row in rows] == [2, 1][: (documents + 1) // 2] + [0] * (50 - (documents + 1) // 2)
    batch = StreamCollator(PackedCollator(0, SLOTS))([rows[-1]])
    assert batch["input_ids"].shape == (1, SLOTS)
    assert (batch["token_counts"].real, batch["token_counts"].target) == (0, 0)


@pytest.mark.parametrize("stop", [1, 2, 17, 60, 10**6])
@pytest.mark.parametrize("shape", ["one shard", "five shards", "mapped and filtered", "shuffled", "fragments"])
def test_a_resumed_stream_goes_on_with_the_very_next_row(stop, shape):
    def build():
        options = {"overlong": "split"} if shape == "fragments" else {}
        lengths = lengths_of(600) if shape != "fragments" else [n * 5 for n in lengths_of(300)]
        source = tokenized(lengths).to_iterable_dataset(num_shards=5 if shape == "five shards" else 1)
        if shape == "mapped and filtered":
            source = source.filter(lambda row: len(row["input_ids"]) % 3).map(lambda row: {"labels": row["input_ids"]})
        if shape == "shuffled":
            source = source.shuffle(seed=3, buffer_size=50)
        return PackedStream(source, tokens_per_batch=SLOTS, **options)

    whole = rows_of(build())
    stop = min(stop, len(whole))
    state = StreamState.from_dict(json.loads(json.dumps(whole[stop - 1].state.to_dict())))
    assert state == whole[stop - 1].state
    resumed = build()
    resumed.first_documents(2)  # the isolation probe looks first
    resumed.load_state(state)
    rest = rows_of(resumed)
    assert content(rest) == content(whole[stop:])
    assert [counted(row) for row in rest] == [counted(row) for row in whole[stop:]]
    assert keeps_its_place(build().source) is (shape != "shuffled")


def test_resuming_reads_no_more_than_the_window_again():
    read = []

    def numbers():
        for document in token_documents([8] * 5000):
            read.append(1)
            yield {"input_ids": document}

    source = IterableDataset.from_generator(numbers)
    state = next(islice(PackedStream(source, tokens_per_batch=SLOTS), 400, None)).state
    assert state.arrived - state.base <= 2 * 128 + 2 * 32
    assert len(state.taken) <= 3 * 128


def test_a_resumed_stream_makes_the_following_passes_in_full():
    def build():
        return PackedStream(
            tokenized(lengths_of(200)).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=10),
            tokens_per_batch=SLOTS,
        )

    whole = []
    first = build()
    for epoch in range(3):
        first.set_epoch(epoch)
        whole.append(rows_of(first))
    assert content(whole[0]) != content(whole[1])
    resumed = build()
    resumed.load_state(whole[1][4].state)
    passes = []
    for epoch in range(2):  # the Trainer counts from where it resumed
        resumed.set_epoch(epoch)
        passes.append(rows_of(resumed))
    assert content(passes[0]) == content(whole[1][5:])
    assert content(passes[1]) == content(whole[2])


def test_other_data_than_the_saved_runs_is_refused():
    state = rows_of(stream_of(tokenized(lengths_of(300))))[-1].state
    other = stream_of(tokenized(lengths_of(150)))
    other.load_state(state)
    with pytest.raises(PackingError, match="saved run"):
        next(iter(other))


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_v17_v18_the_counts_are_those_of_a_dataset_that_is_prepared_as_a_whole(overlong):
    lengths = [0, 1, 5, 64, 65, 200, 129, 30, 0, 64, 63, 300]
    documents = token_documents(lengths)
    # every third document has targets in its first 40 tokens only, every fifth none
    labels = [
        [-100 if i % 5 == 4 or (i % 3 == 2 and at > 40) else token for at, token in enumerate(document)]
        for i, document in enumerate(documents)
    ]
    dataset = Dataset.from_dict({"input_ids": documents, "labels": labels})
    kept, report = prepare_documents(dataset, tokens_per_batch=SLOTS, overlong=overlong)
    rows = rows_of(stream_of(dataset, overlong=overlong))
    assert rows[-1].state.report == report
    found = sorted(tuple(document["labels"].tolist()) for row in rows for document in row.documents)
    assert found == sorted(map(tuple, kept["labels"][:]))


def test_an_overlong_document_stops_the_stream_unless_asked_for():
    with pytest.raises(PackingError, match="document 2 of the stream has 65 tokens"):
        rows_of(stream_of(tokenized([8, 65, 8])))


@pytest.mark.parametrize(
    ("row", "message"), [({"text": "a"}, "no input_ids"), ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1")]
)
def test_rows_that_are_no_documents_are_refused(row, message):
    with pytest.raises(DatasetError, match=message):
        rows_of(stream_of(Dataset.from_list([row])))


def test_v21_a_document_of_exactly_a_row_keeps_all_its_targets():
    batch = StreamCollator(PackedCollator(0, SLOTS))([rows_of(stream_of(tokenized([SLOTS])))[0]])
    assert batch["token_counts"].target == SLOTS - 1


@pytest.mark.parametrize("shards", [1, 4, 5])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_documents_and_each_row_is_tokenized_once(shards, world_size):
    documents = token_documents(lengths_of(40))
    tokenized_rows = []

    def tokenize(row):
        tokenized_rows.append(1)
        return {"input_ids": row["raw"]}

    found = []
    for rank in range(world_size):
        source = Dataset.from_dict({"raw": documents}).to_iterable_dataset(num_shards=shards)
        share = share_of_rank(source, rank=rank, world_size=world_size).map(tokenize)
        found += [row["input_ids"] for row in share]
    assert sorted(found) == sorted(documents)
    assert len(tokenized_rows) == len(documents)


def test_a_dataset_that_its_user_split_is_not_split_again():
    from datasets.distributed import split_dataset_by_node

    source = split_dataset_by_node(tokenized([4] * 8).to_iterable_dataset(), rank=1, world_size=2)
    assert share_of_rank(source, rank=1, world_size=2) is source


def test_more_than_one_row_a_micro_batch_is_refused():
    rows = rows_of(stream_of(tokenized([40, 40])))
    with pytest.raises(ConfigurationError, match="batch size to 1"):
        StreamCollator(PackedCollator(0, SLOTS))(rows)


def test_the_collator_still_takes_documents():
    batch = StreamCollator(PackedCollator(0, SLOTS))([{"input_ids": [1, 2, 3]}])
    assert "stream_state" not in batch
    assert batch["token_counts"].real == 3


def test_a_state_of_another_version_is_refused():
    state = rows_of(stream_of(tokenized([4])))[0].state.to_dict()
    del state["taken"]
    with pytest.raises(PackingError, match="cannot be read"):
        StreamState.from_dict(state)
    assert no_documents(SLOTS, "error").documents == 0


@pytest.mark.parametrize("change", [lambda stream: stream, lambda stream: stream.filter(bool).map(dict)])
def test_v34_ranks_that_shuffle_a_stream_without_a_seed_are_refused(change):
    def shuffled(**seed):
        return shuffles_of(change(IterableDataset.from_generator(rows_of_text).shuffle(buffer_size=4, **seed)))

    refuse_other_orders([shuffled(seed=3), shuffled(seed=3)])
    refuse_other_orders([shuffles_of(change(IterableDataset.from_generator(rows_of_text))) for _ in range(2)])
    with pytest.raises(DatasetError, match="1 of 2 ranks would read the stream in another order"):
        refuse_other_orders([shuffled(seed=3), shuffled(seed=4)])
    with pytest.raises(DatasetError, match="the same seed on every rank"):
        refuse_other_orders([shuffled(), shuffled()])


def rows_of_text():
    yield from ({"text": str(index)} for index in range(8))
