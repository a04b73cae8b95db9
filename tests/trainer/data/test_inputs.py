from contextlib import nullcontext

import pytest
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value

from hf_speedkit import PackedCollator, SpeedSFTConfig
from hf_speedkit.core.errors import ConfigurationError, DatasetError, PackingError
from hf_speedkit.trainer.data.before_weights import check_rows
from hf_speedkit.trainer.data.inputs import (
    check_dataset,
    check_packing_request,
    check_pad_token,
    check_vocabulary,
    with_template_kwargs,
)
from hf_speedkit.trainer.data.raw_rows import checked_stream, formatted, one_format

TURN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    "columns",
    [
        {"text": ["a"]},
        {"messages": [TURN]},
        {"conversations": [TURN]},
        {"prompt": ["a"], "completion": ["b"]},
        {"input_ids": [[1, 2]]},
    ],
    ids=lambda columns: "+".join(columns),
)
def test_what_trl_can_tokenize_passes(columns):
    check_dataset(Dataset.from_dict(columns), text_field="text")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        pytest.param([{"text": "a"}], "Dataset.from_list", id="a list"),
        pytest.param("rows.jsonl", 'data_files="rows.jsonl"', id="a path"),
        pytest.param(None, "is NoneType", id="nothing"),
        pytest.param(Dataset.from_dict({"text": []}), "no rows", id="empty"),
        pytest.param(
            Dataset.from_dict({"body": ["a"]}), 'columns: body\\n.*dataset_text_field="body"', id="another name"
        ),
        pytest.param(Dataset.from_dict({"body": ["a"], "id": [1]}), '"messages" .chat.', id="no usable column"),
        pytest.param(
            Dataset.from_dict({"q": ["a"]}).with_transform(lambda rows: {"messages": [[TURN]]}),
            "dataset.map.dict, ",
            id="made as they are read",
        ),
        pytest.param(Dataset.from_dict({"prompt": ["a"]}), '"prompt" and "completion"', id="prompt alone"),
        pytest.param(Dataset.from_dict({"messages": ["hi"]}), "not conversations", id="messages of text"),
        pytest.param(Dataset.from_dict({"messages": ['[{"a": 1}]']}), "json.loads", id="messages of JSON"),
        pytest.param(Dataset.from_dict({"messages": [["hi"]]}), "a list of string, not", id="messages of texts"),
        pytest.param(Dataset.from_dict({"messages": [[TURN]]}), "a list of lists, not", id="messages of lists"),
        pytest.param(Dataset.from_dict({"messages": [TURN[0]]}), r"\[row\[.messages.\]\]", id="one message a row"),
        pytest.param(Dataset.from_dict({"messages": [[{"role": "user", "text": "a"}]]}), "no content", id="no content"),
        pytest.param(
            Dataset.from_dict({"prompt": [["a"]], "completion": [["b"]]}), '"prompt" column holds a list', id="pair"
        ),
        pytest.param(DatasetDict(valid=Dataset.from_dict({"text": ["a"]})), r'dataset\["valid"\]', id="all splits"),
        pytest.param(
            Dataset.from_dict({"messages": [TURN, [], TURN, []]}), r"2 of 4 rows .*\n.*\[1, 3\]", id="empty messages"
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_instructions(dataset, message):
    with pytest.raises(DatasetError, match=message):
        check_dataset(dataset, text_field="text")


@pytest.mark.parametrize(
    ("row", "renamed"),
    [
        ({"chat": TURN}, True),
        ({"instruction": "a", "output": "b"}, True),
        ({"question": "a", "answer": "b"}, True),
        ({"prompt": "a", "response": "b"}, True),
        ({"prompt": TURN, "chosen": TURN, "rejected": TURN}, True),  # and never the prompt alone
        ({"instruction": "a", "input": "", "output": "b"}, None),  # in other rows the input holds something: a map
        ({"chat": []}, False),
    ],
    ids=["chat", "instruction", "question", "response", "preferences", "with an input", "an empty chat"],
)
def test_columns_of_other_names_are_renamed_by_the_line_that_is_given(row, renamed):
    names = {"dataset": Dataset.from_list([row])}
    with pytest.raises(DatasetError) as refused:
        check_dataset(names["dataset"], text_field="text")
    assert ("rename_column" in refused.value.mend) is bool(renamed)
    if renamed is not False:
        assert ("chosen" in refused.value.mend) is ("chosen" in row)
        exec(refused.value.mend, names)
        check_dataset(names["dataset"], text_field="text")


def test_a_formatting_function_may_use_any_columns():
    check_dataset(Dataset.from_dict({"body": ["a"]}), text_field="text", formatting_func=lambda row: row["body"])


def test_null_messages_count_as_empty():
    features = Features({"messages": List({"role": Value("string"), "content": Value("string")})})
    with pytest.raises(DatasetError, match="1 of 2 rows"):
        check_dataset(Dataset.from_dict({"messages": [TURN, None]}, features=features), text_field="text")


@pytest.fixture
def args(tmp_path):
    return SpeedSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, chat_template_kwargs={"enable_thinking": False}
    )


def test_template_arguments_go_onto_every_row(args):
    dataset = with_template_kwargs(Dataset.from_dict({"messages": [TURN, TURN]}), args)
    assert dataset["chat_template_kwargs"][:] == [{"enable_thinking": False}] * 2


def test_a_dataset_that_brings_its_own_template_arguments_keeps_them(args):
    mine = Dataset.from_dict({"messages": [TURN], "chat_template_kwargs": [{"enable_thinking": True}]})
    assert with_template_kwargs(mine, args)["chat_template_kwargs"][:] == [{"enable_thinking": True}]


def test_streaming_rows_get_template_arguments_too(args):
    stream = IterableDataset.from_generator(lambda: iter([{"messages": TURN}]))
    assert next(iter(with_template_kwargs(stream, args)))["chat_template_kwargs"] == {"enable_thinking": False}


FORMATS = {
    "a prompt beside messages": ({"prompt": "hi", "messages": TURN}, {"messages"}),
    "a completion beside messages": ({"completion": "hi", "messages": TURN}, {"messages"}),
    "text beside a pair": ({"text": "hi", "prompt": "a", "completion": "b"}, {"prompt", "completion"}),
    "messages beside a pair": ({"messages": TURN, "prompt": "a", "completion": "b"}, {"prompt", "completion"}),
    "a prompt beside text": ({"text": "hi", "prompt": "a"}, {"text"}),
    "labels of texts": ({"text": "hi", "labels": 1}, {"text"}),
    "roles under conversations": ({"conversations": TURN}, {"messages"}),
    "from and value under messages": ({"messages": [{"from": "user", "value": "hi"}]}, {"conversations"}),
    "tokens": ({"input_ids": [1], "text": "hi", "prompt": "a"}, {"input_ids", "text", "prompt"}),
    "what nobody knows": ({"body": "hi"}, {"body"}),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize(("row", "left"), FORMATS.values(), ids=FORMATS)
def test_the_columns_of_one_format_are_left_for_trl(row, left, streaming):
    rows = [{**row, "id": 1}] * 2
    dataset = IterableDataset.from_generator(lambda: iter(rows)) if streaming else Dataset.from_list(rows)
    assert set(next(iter(one_format(dataset, "text")))) == left | {"id"}


def test_a_weight_that_weighs_nothing_is_named(caplog):
    one_format(Dataset.from_list([{"text": "hi", "sample_weight": 0.5}]), "text")
    assert "'sample_weight' weighs nothing" in caplog.text


PAIR = {"prompt": "a", "completion": "b"}
WRONG_ROWS = {
    "no text": ([{"text": "a"}, {"text": None}], '1 of 2 rows .* no "text"', 'row 1 .* has a NoneType for "text"'),
    "a number for a text": ([{"text": 3}], "is Value.'int64'., not text", 'row 0 .* has a int for "text"'),
    "texts for a text": ([{"text": ["a"]}], "List.* not text", 'row 0 .* has a list for "text"'),
    "no completion": ([PAIR, {**PAIR, "completion": None}], 'no "completion"', 'row 1 .* has no "completion"'),
    "text and messages": ([{**PAIR, "prompt": TURN}], "one of prompt and completion", "a text and a conversation"),
    "no tokens": ([{"input_ids": [1]}, {"input_ids": None}], 'no "input_ids"', "row 1 .* has no input_ids"),
    "no messages": ([{"messages": TURN}, {"messages": []}], 'empty "messages"', 'row 1 .* has an empty "messages"'),
    "arguments for one": (
        [{"text": "a", "chat_template_kwargs": {"a": 1}}, {"text": "a", "chat_template_kwargs": None}],
        'no "chat_template_kwargs"', "row 1 .* has no chat_template_kwargs",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "message", "streamed"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_rows_that_trl_would_stumble_over_are_counted_or_named_in_a_stream(rows, message, streamed):
    with pytest.raises(DatasetError, match=message):
        check_dataset(Dataset.from_list(rows), text_field="text")
    stream = checked_stream(IterableDataset.from_generator(lambda: iter(rows)), "text")
    with pytest.raises(DatasetError, match=streamed):
        list(stream)


def test_messages_without_roles_are_refused():
    with pytest.raises(DatasetError, match="have no role"):
        check_dataset(Dataset.from_list([{"messages": [{"content": "hi"}]}]), text_field="text")


def test_what_a_formatting_function_writes_is_all_that_is_left():
    rows = Dataset.from_list([{"messages": TURN, "body": "hi"}])
    assert formatted(rows, lambda row: row["body"], "body")[:] == {"body": ["hi"]}
    with pytest.raises(DatasetError, match="returned a list, not a text"):
        formatted(rows, lambda row: [row["body"]], "text")


def test_a_stream_without_rows_is_refused():
    with pytest.raises(DatasetError, match="no rows"):
        check_dataset(IterableDataset.from_generator(lambda: iter([])), text_field="text")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("mask", "wanted", "refused"),
    [
        ("completion_mask", None, True),
        ("completion_mask", True, False),
        ("completion_mask", False, False),
        ("assistant_masks", None, False),
        ("loss_mask", None, True),
        ("response_mask", True, True),
    ],
)
def test_v82_a_mask_that_nobody_applies_is_refused(streaming, mask, wanted, refused):
    rows = [{"input_ids": [1, 2, 3], mask: [0, 0, 1]}]
    dataset = IterableDataset.from_generator(lambda: iter(rows)) if streaming else Dataset.from_list(rows)
    with pytest.raises(DatasetError, match="nothing applies") if refused else nullcontext():
        check_dataset(dataset, text_field="text", completion_only_loss=wanted)


@pytest.mark.parametrize(
    ("ids", "labels", "named"),
    [
        ([3, 64], [3, 3], "token id 64"),
        ([3, -1], [3, 3], "token id -1"),
        ([3, 4], [3, 64], "label 64"),
        ([3, 4], [-1, 4], "label -1(?s:.*)has the label -100"),
    ],
)
def test_tokens_and_labels_without_an_embedding_are_refused_before_a_gpu_asserts(ids, labels, named):
    from support import tiny_llama

    with pytest.raises(PackingError, match=named.split("(")[0]):
        PackedCollator(0, 8, vocabulary=64)([{"input_ids": ids, "labels": labels}])
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 2000 + [ids], "labels": [[-100, 2, 3]] * 2000 + [labels]})
    with pytest.raises(DatasetError, match=named):
        check_vocabulary(dataset, tiny_llama(), "train")
    check_vocabulary(dataset.select(range(2000)), tiny_llama(), "train")
    model = tiny_llama().requires_grad_(False)  # as below adapters
    with pytest.raises(DatasetError) as refused:
        check_vocabulary(dataset, model, "train")
    assert ("trainable_token_indices" in str(refused.value)) is ("resize_token_embeddings" in str(refused.value))


def test_v33_ranks_are_not_weighed_alike_whatever_their_targets(tmp_path, monkeypatch):
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, average_tokens_across_devices=False)
    rows = Dataset.from_dict({"text": ["a"]})
    check_packing_request(args, None, rows, None, "model")
    monkeypatch.setattr(SpeedSFTConfig, "world_size", 2)
    with pytest.raises(ConfigurationError, match="leave average_tokens_across_devices at its default"):
        check_packing_request(args, None, rows, None, "model")


def test_a_padding_token_that_the_model_does_not_know_is_refused():
    from support import tiny_llama

    check_pad_token(63, tiny_llama())
    with pytest.raises(ConfigurationError, match="id 64, and the model's embedding has 64 rows"):
        check_pad_token(64, tiny_llama())


@pytest.mark.parametrize("refused", ["rows made as they are read", "reentrant checkpointing of the user's own"])
def test_packing_refuses_what_it_cannot_plan_or_prove(tmp_path, refused):
    from support import tiny_llama

    model, rows = tiny_llama(), Dataset.from_dict({"input_ids": [[1, 2, 3]]})
    if refused.startswith("rows"):
        rows = rows.with_transform(lambda batch: batch)
    else:
        model.activation_checkpointing_enable({"use_reentrant": True})
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises((DatasetError, ConfigurationError), match=r"with_transform|use_reentrant"):
        check_packing_request(args, None, rows, None, model)


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length", "batch_rebalance"])
def test_a_sampling_strategy_that_packing_does_not_follow_is_named(tmp_path, caplog, strategy):
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, train_sampling_strategy=strategy)
    check_packing_request(args, None, Dataset.from_dict({"text": ["a"]}), None, "model")
    assert (f"train_sampling_strategy='{strategy}' does nothing with packing" in caplog.text) == ("_" in strategy)


@pytest.mark.parametrize(
    "changes", [{}, {"packing": False, "padding_free": True, "max_length": None}, {"packing": False}]
)
def test_v09_rows_that_dataparallel_would_cut_are_refused(tmp_path, changes):
    """It cuts each tensor of a batch in parts: of `cu_seq_lens_q` and `target_positions` one GPU would get half."""
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **changes)
    args._n_gpu = 2
    shared = "packing" not in changes or "padding_free" in changes
    rows = [("train", Dataset.from_dict({"text": ["a"]}))]
    with pytest.raises(ConfigurationError, match="launch --num_processes 2") if shared else nullcontext():
        check_rows(rows, args)
    args._n_gpu, args.fsdp = 1, True
    with pytest.raises(ConfigurationError, match="no launcher has started this process"):
        check_rows(rows, args)
