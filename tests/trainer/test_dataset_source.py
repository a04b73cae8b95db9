"""Where rows come from: files, folders, other encodings, and what is said of those that cannot be read."""

import gzip

import pyarrow as pa
import pytest
from datasets import DatasetDict
from pyarrow import parquet

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.trainer import dataset_source
from hf_speedkit.trainer.dataset_source import load_rows


def test_rows_come_from_a_file_or_a_saved_dataset_and_a_wrong_split_is_named(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert load_rows(str(file), split="train[:1]")["text"] == ["a"]
    DatasetDict(first=load_rows(str(file))).save_to_disk(tmp_path / "saved")
    assert len(load_rows(str(tmp_path / "saved"), split="first")) == 2
    for place, there in ((file, "train"), (tmp_path / "saved", "first")):
        with pytest.raises(DatasetError, match=f"(?s)no split 'trian'.*dataset_train_split: {there}"):
            load_rows(str(place), split="trian")


@pytest.mark.parametrize(
    ("text", "told"),
    [('{"text": "a"}\n{"text": "b"\n', "line 2 is no JSON: .*\nMend it:  correct that line"), ("", "is empty"),
     (None, "no such file: .*rows.jsonl\nMend it:  did you mean .*rows.json[?]"),
     ('{"text": "a"}\n'.encode("utf-16"), "not UTF-8 .line 1.*\nMend it:  iconv -f UTF-16 "),
     ('{"text": "a"}\n{"text": "é"}\n'.encode("latin1"), "not UTF-8 .line 2: byte 0xe9.\nMend it:  iconv -f LATIN1 ")],
    ids=["broken", "empty", "misspelt", "utf-16", "latin-1"],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_told_with_the_line_or_the_file_that_was_meant(tmp_path, text, told):
    (tmp_path / "rows.json").touch()
    if text is not None:
        (tmp_path / "rows.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DatasetError, match=told):
        load_rows(str(tmp_path / "rows.jsonl"))


def test_a_packed_file_is_read_and_what_a_folder_holds_beside_what_is_read_is_said(tmp_path, caplog):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.md").touch()
    with pytest.raises(DatasetError, match=r"(?s)no data in the folder.*it holds notes.md.*\.jsonl"):
        load_rows(str(tmp_path / "none"))
    both = tmp_path / "both"
    both.mkdir()
    with gzip.open(both / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n')
    assert load_rows(str(both / "a.jsonl.gz"))["text"] == ["a"]
    for name in ("b.parquet", "c.parquet"):  # datasets 5.1 leaves CSV files open
        parquet.write_table(pa.table({"text": ["b"]}), both / name)
    assert load_rows(str(both))["text"] == ["b", "b"]
    assert "only parquet was read (2 rows), not json" in caplog.text


def test_a_disk_without_room_for_the_cache_of_datasets_is_not_taken_for_a_wrong_name():
    full = OSError("Not enough disk space. Needed: Unknown size")  # datasets 5.2, builder.py: without an errno
    assert "HF_DATASETS_CACHE" in dataset_source._unreadable("rows.jsonl", full).mend


def test_no_more_of_a_large_file_is_decoded_than_a_second_takes(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xe9\n")
    monkeypatch.setattr(dataset_source, "_READ_BYTES", 0)
    dataset_source._refuse_other_encoding(file)
