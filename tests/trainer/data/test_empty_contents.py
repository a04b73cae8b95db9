"""Messages without a word: which rows hold them, and the line of code that leaves them out."""

import pytest
from chat_rows import PLAIN, chat, tokenizer_with, trainer_for
from datasets import Dataset, IterableDataset

from hf_speedkit import SpeedSFTConfig
from hf_speedkit.core.errors import DatasetError
from hf_speedkit.trainer.data.before_weights import check_rows
from hf_speedkit.trainer.data.empty_contents import blank_contents, refuse_null_contents
from hf_speedkit.trainer.data.raw_rows import checked_stream
from hf_speedkit.trainer.data.templates import TemplateChecks

CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "w1"}
PARTS = [{"type": "text", "text": "w1"}]

GOOD = {
    "messages": [chat("w1", "w2")],
    "calls": [[chat("w1")[0], CALL], chat("w1", "w2")],
    "thoughts": [[chat("w1")[0], THOUGHT]],
    "JSON": [[{"role": "user", "content": PARTS}, CALL], chat("w1", "w2"), [chat("w1")[0], THOUGHT]],
}


def rows_of(conversations):
    return Dataset.from_list([{"messages": one} for one in conversations], on_mixed_types="use_json")


def as_sharegpt(dataset):
    names = {"user": "human", "assistant": "gpt"}
    return dataset.map(
        lambda row: {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in row["messages"]]},
        remove_columns="messages",
    )


@pytest.mark.parametrize("shape", [*GOOD, "ShareGPT", "pairs"])
def test_rows_with_nulls_and_blanks_are_counted_named_and_left_out_by_the_line_that_is_shown(shape):
    good = GOOD.get(shape, [chat("w1", "w2")])
    bad = [chat("w1", "w2", "w3", None), chat("w1", " \n", "w3", "w4"), chat("", "w2"), chat("w1", "")]
    dataset = rows_of(good * 600 + bad)
    first = len(good) * 600
    if shape == "ShareGPT":
        dataset = as_sharegpt(dataset)
    if shape == "pairs":
        dataset = dataset.map(lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]})
    with pytest.raises(DatasetError, match=rf"1 of {len(dataset):,} rows .*is null\n  first rows: \[{first}\]") as told:
        refuse_null_contents(dataset, "train")
    names = {"dataset": dataset}
    exec(told.value.mend, names)
    assert len(names["dataset"]) == len(dataset) - 1, "calls and thoughts stay"
    refuse_null_contents(names["dataset"], "train")
    said = blank_contents(dataset, "train", "text")
    answers = next(sentence for sentence in said if "an answer" in sentence)
    rows = [first, first + 3] if shape == "pairs" else [first, first + 1, first + 3]
    assert answers.startswith(f"{len(rows)} of {len(dataset):,} rows of the train dataset (first rows: {rows}) hold")
    assert f"{2 if shape == 'pairs' else 1} of them hold no other answer" in answers
    for sentence in said:
        exec(sentence.split("To leave them out: ")[1], names)
    assert len(names["dataset"]) == first + (shape == "pairs"), "an answer within a prompt is not trained on"
    assert blank_contents(names["dataset"], "train", "text") == []


@pytest.mark.parametrize("row", [{"text": " "}, {"prompt": "w1", "completion": ""}], ids=["text", "completion"])
def test_blank_texts_are_counted(row):
    dataset = Dataset.from_list([dict.fromkeys(row, "w1 w2"), row])
    (said,) = blank_contents(dataset, "train", "text")
    assert said.startswith(f'1 of 2 rows of the train dataset (first rows: [1]) have a blank "{[*row][-1]}"')
    names = {"dataset": dataset}
    exec(said.split("To leave them out: ")[1], names)
    assert len(names["dataset"]) == 1


def test_a_run_refuses_nulls_before_its_weights_or_says_so_and_says_what_is_blank(tmp_path, caplog):
    null, blank = rows_of([chat("w1", "w2"), chat("w1", None)]), rows_of([chat("w1", "w2"), chat("w1", "")])
    settings = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True, "tokens_per_batch": 64}
    with pytest.raises(DatasetError, match=r"first rows: \[1\]"):
        check_rows([("train", null)], SpeedSFTConfig(**settings))
    check_rows([("train", null)], SpeedSFTConfig(**settings, template_check="warn"))
    TemplateChecks(tokenizer_with("{% for m in messages %}{{ m.content }}{% endfor %}"), None, "warn", False).before(
        null, "train"
    )
    assert "1 of 2 rows of the train dataset have a message whose content is null" in caplog.text
    trainer_for(tmp_path, blank, PLAIN)
    assert "1 of 2 rows of the train dataset (first rows: [1]) hold an answer without a word" in caplog.text


def test_of_a_stream_the_row_with_a_null_is_named_and_blanks_of_its_first_rows_are_said(caplog):
    stream = IterableDataset.from_generator(
        lambda: iter([{"messages": chat("w1", "")}, {"messages": chat("w1", None)}])
    )
    with pytest.raises(DatasetError, match="row 1 of the stream has a message whose content is null"):
        list(checked_stream(stream, "text"))
    assert len(list(checked_stream(stream, "text", nulls=True))) == 2
    TemplateChecks(tokenizer_with(PLAIN), None, "warn", False).before(stream, "train")
    assert "2 of the first 2 rows of the train stream (rows [0, 1])" in caplog.text
