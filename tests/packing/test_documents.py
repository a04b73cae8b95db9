from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, Features, IterableDataset, LargeList, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speedkit import PackedCollator, plan_packing
from hf_speedkit.core.errors import DatasetError, PackingError
from hf_speedkit.core.records import DocumentReport, to_json
from hf_speedkit.packing import document_columns
from hf_speedkit.packing.documents import OVERLONG, document_lengths, prepare_documents

IGNORED = -100
Tokens = Counter[tuple[int, int]]


def dataset_of(*rows: tuple[Sequence[int], Sequence[int] | None], **columns: list[Any]) -> Dataset:
    """Rows of (input_ids, labels); labels None in all rows leaves the column out."""
    table = {"input_ids": pa.array([list(ids) for ids, _ in rows], pa.list_(pa.int32()))}
    if any(labels is not None for _, labels in rows):
        table["labels"] = pa.array([list(labels or []) for _, labels in rows], pa.list_(pa.int64()))
    return Dataset(pa.table({**table, **columns}))


def of_lengths(*lengths: int) -> Dataset:
    return dataset_of(*[(range(1000 * row, 1000 * row + length), None) for row, length in enumerate(lengths)])


def tokens_of(dataset: Dataset) -> Counter[int]:
    return Counter(token for row in dataset for token in row["input_ids"])


def assert_accounted(report: DocumentReport) -> None:
    """Every token found is kept, cut or dropped; every document found is kept or dropped."""
    assert report.tokens_found == report.real_tokens + report.cut_tokens + report.dropped_tokens
    assert report.documents_found == (
        report.documents
        - (report.fragments - report.overlong_documents if report.overlong == "split" else 0)
        + report.empty_documents
        + report.targetless_documents
        + report.dropped_documents
    )


def test_documents_that_fit_are_passed_on_untouched() -> None:
    dataset = dataset_of(([1, 2, 3], [IGNORED, 2, 3]), ([4, 5], [4, 5]))
    prepared, report = prepare_documents(dataset, tokens_per_batch=4)
    assert prepared.to_dict() == dataset.to_dict()
    assert prepared._indices is None  # no index mapping: reading stays as fast as it was
    assert report == DocumentReport(
        tokens_per_batch=4,
        overlong="error",
        documents_found=2,
        tokens_found=5,
        documents=2,
        real_tokens=5,
        target_tokens=3,
    )
    assert_accounted(report)


def test_only_the_columns_that_training_reads_are_passed_on() -> None:
    dataset = dataset_of(([1, 2], [1, 2]), text=["a"], messages=[[{"role": "user"}]])
    assert prepare_documents(dataset, tokens_per_batch=4)[0].column_names == ["input_ids", "labels"]
    assert prepare_documents(of_lengths(2, 3), tokens_per_batch=4)[0].column_names == ["input_ids"]


def test_empty_documents_and_those_without_targets_are_dropped_and_counted() -> None:
    dataset = dataset_of(
        ([], []),
        ([1, 2, 3], [IGNORED] * 3),
        ([4, 5], [4, IGNORED]),  # the first token is no target
        ([6], [6]),  # nor is a lone one
        ([7, 8, 9], [IGNORED, IGNORED, 9]),
        ([], []),
    )
    prepared, report = prepare_documents(dataset, tokens_per_batch=4)
    assert prepared["input_ids"][:] == [[7, 8, 9]]
    assert (report.empty_documents, report.targetless_documents) == (2, 3)
    assert (report.tokens_found, report.dropped_tokens, report.real_tokens, report.target_tokens) == (9, 6, 3, 1)
    assert report.target_share == pytest.approx(1 / 3)
    assert_accounted(report)


def test_target_tokens_are_those_that_the_collator_counts() -> None:
    dataset = dataset_of(([1, 2, 3], [1, 2, 3]), ([4, 5, 6, 7], [4, IGNORED, 6, 7]), ([8], [8]))
    prepared, report = prepare_documents(dataset, tokens_per_batch=8)
    counts = PackedCollator(0, 8)(list(prepared))["token_counts"]
    assert (counts.real, counts.target, counts.documents) == (
        report.real_tokens,
        report.target_tokens,
        report.documents,
    )


def test_overlong_documents_are_an_error_by_default_that_names_the_choices() -> None:
    with pytest.raises(PackingError) as error:
        prepare_documents(of_lengths(11, 2, 9), tokens_per_batch=6)
    text = str(error.value)
    assert "2 of 3 documents are longer than a row of 6 slots" in text
    assert "the longest has 11 tokens; 8 tokens (36.4%) lie beyond the row" in text
    assert "tokens_per_batch=11" in text
    assert all(f'"{choice}"' in text for choice in ("truncate", "split", "drop"))


def test_overlong_documents_without_targets_are_no_error() -> None:
    dataset = dataset_of(([1, 2], [1, 2]), (range(9), [IGNORED] * 9))
    _, report = prepare_documents(dataset, tokens_per_batch=6)
    assert (report.overlong_documents, report.targetless_documents, report.dropped_tokens) == (0, 1, 9)


def test_v17_truncated_tokens_are_counted() -> None:
    dataset = of_lengths(11, 2, 3, 6)
    prepared, report = prepare_documents(dataset, tokens_per_batch=6, overlong="truncate")
    assert [len(ids) for ids in prepared["input_ids"]] == [6, 2, 3, 6]
    assert prepared["input_ids"][0] == [0, 1, 2, 3, 4, 5]
    assert (report.cut_tokens, report.overlong_documents, report.real_tokens) == (5, 1, 17)
    assert report.lost_share == pytest.approx(5 / 22)
    assert report.sentence() == (
        "4 documents with 17 tokens, 76.5% of them targets. Of 4 found 1 truncated to 6: 5 of 22 tokens (22.73%) lost."
    )
    assert_accounted(report)


def test_v17_dropped_documents_are_counted() -> None:
    prepared, report = prepare_documents(of_lengths(11, 2, 3, 6), tokens_per_batch=6, overlong="drop")
    assert [len(ids) for ids in prepared["input_ids"]] == [2, 3, 6]
    assert (report.dropped_documents, report.dropped_tokens, report.cut_tokens) == (1, 11, 0)
    assert "1 dropped as longer than 6: 11 of 22 tokens (50.00%) lost" in report.sentence()
    assert_accounted(report)


def test_v18_fragments_without_their_beginning_are_counted() -> None:
    prepared, report = prepare_documents(of_lengths(14), tokens_per_batch=9, overlong="split")
    assert prepared["input_ids"][:] == [list(range(9)), list(range(9, 14))]
    assert (report.overlong_documents, report.orphan_fragments, report.orphan_tokens) == (1, 1, 5)
    assert (report.documents, report.real_tokens, report.target_tokens) == (2, 14, 12)
    assert "1 split, leaving 1 fragments (5 tokens) without their beginning" in report.sentence()
    assert_accounted(report)


def test_v18_splitting_is_not_the_default() -> None:
    with pytest.raises(PackingError):
        prepare_documents(of_lengths(14), tokens_per_batch=9)


def test_fragments_without_targets_are_dropped() -> None:
    # Prompt of 5, answer of 4, rows of 4: the first piece is all prompt; the last holds one token, never a target.
    dataset = dataset_of((range(9), [IGNORED] * 5 + [5, 6, 7, 8]))
    prepared, report = prepare_documents(dataset, tokens_per_batch=4, overlong="split")
    assert prepared.to_dict() == {"input_ids": [[4, 5, 6, 7]], "labels": [[IGNORED, 5, 6, 7]]}
    assert (report.orphan_fragments, report.dropped_tokens, report.target_tokens) == (1, 5, 3)


def test_v20_documents_whose_answers_do_not_fit_are_dropped_before_packing() -> None:
    long_prompt = (range(25), [IGNORED] * 20 + [1] * 5)
    short = ([1, 2, 3], [IGNORED, 2, 3])
    prepared, report = prepare_documents(
        dataset_of(*[long_prompt] * 4, *[short] * 4), tokens_per_batch=12, overlong="truncate"
    )
    assert report.targetless_documents == 4
    assert "4 documents dropped without targets" in report.sentence()
    plan = plan_packing(document_lengths(prepared), tokens_per_batch=12)
    assert len(plan.packs) == 1
    assert_accounted(report)


def test_v31_no_targets_at_all_stops_the_run() -> None:
    dataset = dataset_of(*[(range(50), [IGNORED] * 40 + [1] * 10)] * 6)
    with pytest.raises(DatasetError, match=r"(?s)0 of 6 documents have targets.*none keeps one in rows of 24 tokens"):
        prepare_documents(dataset, tokens_per_batch=24, overlong="truncate")


def test_v31_masks_that_cover_everything_stop_the_run() -> None:
    with pytest.raises(DatasetError, match=r"(?s)0 of 2 documents have targets.*1 are empty"):
        prepare_documents(dataset_of(([1, 2], [IGNORED] * 2), ([], [])), tokens_per_batch=24)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    limit=st.integers(2, 25),
    overlong=st.sampled_from(["split", "truncate", "drop"]),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_v19_no_token_is_lost_or_repeated(lengths: list[int], limit: int, overlong: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, found = [], []
    for number, length in enumerate(lengths):
        ids = np.arange(100 * number, 100 * number + length)
        labels = np.where(rng.random(length) < 0.5, IGNORED, ids)
        rows.append((ids.tolist(), labels.tolist()))
        found.append((ids.tolist(), labels.tolist()))
    try:
        prepared, report = prepare_documents(dataset_of(*rows), tokens_per_batch=limit, overlong=overlong)
    except DatasetError:
        assert not expected_documents(found, limit, overlong)
        return
    assert list(prepared) == [
        {"input_ids": ids, "labels": labels} for ids, labels in expected_documents(found, limit, overlong)
    ]
    assert report.real_tokens == sum(map(len, prepared["input_ids"]))
    assert report.documents == len(prepared)
    assert_accounted(report)


def has_target(labels: list[int]) -> bool:
    return any(label != IGNORED for label in labels[1:])


def expected_documents(
    found: list[tuple[list[int], list[int]]], limit: int, overlong: str
) -> list[tuple[list[int], list[int]]]:
    """The slow, plain way."""
    expected = []
    for ids, labels in found:
        if not has_target(labels) or (len(ids) > limit and overlong == "drop"):
            continue
        ends = range(0, len(ids), limit) if overlong == "split" else [0]
        pieces = [(ids[start : start + limit], labels[start : start + limit]) for start in ends]
        expected += [piece for piece in pieces if has_target(piece[1])]
    return expected


def test_v19_every_token_survives_the_whole_way_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1,700 documents of 3 tokens each, written in batches of 500, read in blocks of 300: slices with offsets.
    monkeypatch.setattr(document_columns, "BLOCK_ROWS", 300)
    rows = [list(range(3 * row, 3 * row + 3)) for row in range(1700)]
    parts = [Dataset.from_dict({"input_ids": rows[first : first + 500]}) for first in range(0, 1700, 500)]
    prepared, report = prepare_documents(concatenate_datasets(parts), tokens_per_batch=7)
    lengths = document_lengths(prepared)
    plan = plan_packing(lengths, tokens_per_batch=7)
    packed = Counter()
    for pack in plan.packs:
        batch = PackedCollator(10**6, 7)([prepared[index] for index in pack])
        packed.update(token for token in batch["input_ids"].flatten().tolist() if token != 10**6)
    assert packed == Counter(range(5100))
    assert report.real_tokens == 5100


@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_v19_slices_and_index_mappings_are_followed(overlong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_columns, "BLOCK_ROWS", 4)
    rows = [list(range(100 * n, 100 * n + n)) for n in range(20)]
    whole = dataset_of(*[(ids, [IGNORED if token % 3 else token for token in ids]) for ids in rows])
    views = [whole.select(range(5, 17)), whole.shuffle(seed=0), whole.filter(lambda row: len(row["input_ids"]) % 2)]
    for view in views:
        found = [(row["input_ids"], row["labels"]) for row in view]
        expected = expected_documents(found, 6, overlong)
        prepared, report = prepare_documents(view, tokens_per_batch=6, overlong=overlong)
        assert [(row["input_ids"], row["labels"]) for row in prepared] == expected
        assert report.target_tokens == sum(label != IGNORED for _, labels in expected for label in labels[1:])
        assert document_lengths(view).tolist() == [len(ids) for ids, _ in found]
        assert_accounted(report)


@pytest.mark.parametrize(
    "features",
    [
        {"input_ids": List(Value("int32")), "labels": List(Value("int64"))},
        {"input_ids": List(Value("int64")), "labels": List(Value("int16"))},
        {"input_ids": LargeList(Value("int64")), "labels": LargeList(Value("int32"))},
    ],
)
@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_column_types_stay_what_they_were(features: dict[str, Any], overlong: str) -> None:
    data = {"input_ids": [list(range(9)), [1, 2]], "labels": [list(range(9)), [1, 2]]}
    dataset = Dataset.from_dict(data, features=Features(features))
    prepared, _ = prepare_documents(dataset, tokens_per_batch=5, overlong=overlong)
    assert prepared.features == dataset.features
    assert prepared["input_ids"][0] == [0, 1, 2, 3, 4]
    assert prepared["input_ids"][-1] == [1, 2]


def test_lists_of_one_fixed_length_can_be_cut() -> None:
    features = Features({"input_ids": List(Value("int32"), length=6)})
    dataset = Dataset.from_dict({"input_ids": [list(range(6)), list(range(10, 16))]}, features=features)
    prepared, report = prepare_documents(dataset, tokens_per_batch=4, overlong="split")
    assert prepared["input_ids"][:] == [[0, 1, 2, 3], [4, 5], [10, 11, 12, 13], [14, 15]]
    assert report.orphan_fragments == 2


def test_the_same_data_gives_the_same_fingerprint() -> None:
    # Caches of datasets hang on it.
    dataset = of_lengths(9, 2)
    prints = {prepare_documents(dataset, tokens_per_batch=5, overlong="split")[0]._fingerprint for _ in range(2)}
    other = prepare_documents(dataset, tokens_per_batch=4, overlong="split")[0]._fingerprint
    assert len(prints) == 1
    assert other not in prints


def test_the_format_of_the_dataset_is_kept() -> None:
    dataset = of_lengths(9, 2).with_format("numpy")
    prepared, _ = prepare_documents(dataset, tokens_per_batch=5, overlong="split")
    assert isinstance(prepared[0]["input_ids"], np.ndarray)


def test_preparing_a_large_dataset_makes_no_python_lists() -> None:
    # 50,000 documents of 200 tokens. As Python lists 10 M tokens and labels take some 2 s to build; here about 0.1 s.
    lengths = np.full(50_000, 200)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    values = pa.ListArray.from_arrays(offsets, pa.array(np.arange(lengths.sum(), dtype=np.int64)))
    dataset = Dataset(pa.table({"input_ids": values, "labels": values}))
    started = time.process_time()
    _, report = prepare_documents(dataset, tokens_per_batch=8192)
    assert time.process_time() - started < 1.0
    assert report.target_tokens == 50_000 * 199


def test_a_report_that_lost_nothing_says_so_in_one_sentence() -> None:
    _, report = prepare_documents(of_lengths(3, 4), tokens_per_batch=8)
    assert report.sentence() == "2 documents with 7 tokens, 71.4% of them targets."
    assert json.loads(to_json(report))["real_tokens"] == 7


def test_a_report_without_tokens_claims_no_share() -> None:
    report = DocumentReport(
        tokens_per_batch=8,
        overlong="error",
        documents_found=0,
        tokens_found=0,
        documents=0,
        real_tokens=0,
        target_tokens=0,
    )
    assert report.target_share is None
    assert report.lost_share is None
    assert report.sentence() == "0 documents with 0 tokens."


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"text": ["a"]}), r"(?s)no column input_ids.*text"),
        (Dataset.from_dict({"input_ids": []}), "holds no documents"),
        (Dataset.from_dict({"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]}), "packed already"),
        (Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1]]}), "2 input_ids and 1 labels"),
        (Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [[1, 2], None]}), "1 input_ids and 0 labels"),
        (Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, None]]}), "without a value"),
        (DatasetDict(train=Dataset.from_dict({"input_ids": [[1, 2]]})), r"(?s)got DatasetDict.*\[\"train\"\]"),
        (IterableDataset.from_generator(lambda: iter([{"input_ids": [1, 2]}])), "got IterableDataset"),
        ([{"input_ids": [1, 2]}], "got list"),
    ],
)
def test_data_that_cannot_be_packed_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        prepare_documents(dataset, tokens_per_batch=8)


def test_an_unknown_choice_is_refused_before_anything_is_read() -> None:
    with pytest.raises(PackingError, match="overlong is one of: error, split, truncate, drop"):
        prepare_documents(of_lengths(3), tokens_per_batch=8, overlong="wrap")
    assert OVERLONG[0] == "error"


@pytest.mark.parametrize("prepare", [document_lengths])
def test_lengths_are_read_without_the_tokens(prepare: Callable[[Dataset], Any]) -> None:
    assert prepare(of_lengths(3, 0, 7)).tolist() == [3, 0, 7]
    assert (
        prepare(Dataset.from_dict({"input_ids": []}, features=Features({"input_ids": List(Value("int32"))}))).tolist()
        == []
    )
