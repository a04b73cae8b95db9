from contextlib import nullcontext

import pytest
from datasets import Dataset, Features, IterableDataset, List, Value

from hf_speedkit import SpeedSFTConfig
from hf_speedkit.core.errors import DatasetError
from hf_speedkit.trainer.inputs import check_dataset, check_packing_request, check_vocabulary, with_template_kwargs

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
        pytest.param([{"text": "a"}], "datasets.Dataset", id="a list"),
        pytest.param(None, "is NoneType", id="nothing"),
        pytest.param(Dataset.from_dict({"text": []}), "no rows", id="empty"),
        pytest.param(Dataset.from_dict({"body": ["a"]}), "columns: body", id="no usable column"),
        pytest.param(Dataset.from_dict({"prompt": ["a"]}), '"prompt" and "completion"', id="prompt alone"),
        pytest.param(Dataset.from_dict({"messages": ["hi"]}), "not conversations", id="messages of text"),
        pytest.param(
            Dataset.from_dict({"messages": [TURN, [], TURN, []]}), r"2 of 4 rows .*\n.*\[1, 3\]", id="empty messages"
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_instructions(dataset, message):
    with pytest.raises(DatasetError, match=message):
        check_dataset(dataset, text_field="text")


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


def test_a_prompt_column_beside_messages_is_left_out(args):
    both = Dataset.from_dict({"prompt": ["hi"], "prompt_id": ["1"], "messages": [TURN]})
    assert "prompt" not in with_template_kwargs(both, args).column_names


def test_a_stream_without_rows_is_refused():
    with pytest.raises(DatasetError, match="no rows"):
        check_dataset(IterableDataset.from_generator(lambda: iter([])), text_field="text")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("wanted", "refused"), [(None, True), (True, False), (False, False)])
def test_a_completion_mask_that_nobody_applies_is_refused(tmp_path, streaming, wanted, refused):
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3]], "completion_mask": [[0, 0, 1]]})
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    settings = SpeedSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, completion_only_loss=wanted, max_steps=1
    )
    with pytest.raises(DatasetError, match="nothing applies") if refused else nullcontext():
        check_packing_request(settings, None, dataset, None, "no model is loaded for this")


@pytest.mark.parametrize(("ids", "named"), [([3, 64], "token id 64"), ([3, -1], "token id -1")])
def test_token_ids_without_an_embedding_are_refused_before_a_gpu_asserts(ids, named):
    from support import tiny_llama

    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 2000 + [ids]})
    with pytest.raises(DatasetError, match=named):
        check_vocabulary(dataset, tiny_llama(), "train")
    check_vocabulary(dataset.select(range(2000)), tiny_llama(), "train")


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length", "batch_rebalance"])
def test_a_sampling_strategy_that_packing_does_not_follow_is_named(tmp_path, caplog, strategy):
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, train_sampling_strategy=strategy)
    check_packing_request(args, None, Dataset.from_dict({"text": ["a"]}), None, "model")
    assert (f"train_sampling_strategy='{strategy}' does nothing with packing" in caplog.text) == ("_" in strategy)
