"""Masks: what would train on nothing, on everything, or on tokens that nobody meant."""

import logging
import re
from contextlib import nullcontext

import pytest
import transformers
from chat_rows import (
    BOILERPLATE,
    MARKED,
    PLAIN,
    chat,
    chats,
    completions,
    tokenizer_with,
    trainer_for,
)
from datasets import Dataset, IterableDataset
from support import tiny_llama
from tokenizers.processors import TemplateProcessing

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, DatasetError, SpeedkitError
from hf_speedkit.trainer.data.document_ends import say_what_is_odd

# huggingface/transformers issue 47325: 5.24 finds the token that a marked span ends in.
misses_ends = pytest.mark.skipif(
    tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24),
    reason="transformers marks ends right",
)
SHAREGPT = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]


@pytest.mark.parametrize(
    ("rows", "template", "said", "mend"),
    [
        (chats(1), PLAIN, "the chat template does not mark what the assistant says", "{% generation %}"),
        (chats(1), None, "the tokenizer has no chat template", "chat_template_path"),
        ([{"messages": chat("w1")}], MARKED, "none of 1 conversations of the train dataset has an answer", "assistant"),
        (
            [{"messages": [{"role": "User", "content": "w1"}, {"role": "model", "content": "w2"}]}],
            MARKED,
            "none of 1 conversations of the train dataset has an answer",
            '"model": "assistant"',
        ),
        pytest.param(
            [{"messages": chat("w1", "")}],
            MARKED,
            "marks no token of a conversation",
            'm["content"]',
            marks=misses_ends,
        ),
        (
            [{"conversations": SHAREGPT}],
            MARKED,
            '"conversations" of the train dataset are of "from"',
            '"conversations"',
        ),
        ([{"messages": SHAREGPT}], MARKED, '"messages" of the train dataset are of "from"', 'row["messages"]'),
        ([{"input_ids": [3, 4], "assistant_masks": [0, 1]}], MARKED, "are tokens already", "their assistant_masks"),
        ([{"text": "w1 w2"}], MARKED, "are no conversations", '"messages"'),
    ],
    ids=[
        "no_markers",
        "no_template",
        "no_answer",
        "other_roles",
        "empty",
        "from_value",
        "from_in_messages",
        "tokens",
        "text",
    ],
)
def test_v82_answers_that_cannot_be_told_are_refused_with_the_mend(tmp_path, rows, template, said, mend):
    """TRL's own errors come after the model is loaded, name no row and say nothing of what to do."""
    with pytest.raises(SpeedkitError, match=re.escape(said)) as refused:
        trainer_for(tmp_path, Dataset.from_list(list(rows)), template, assistant_only_loss=True)
    assert mend in refused.value.mend
    if refused.value.mend.startswith("roles ="):  # the line of code is right
        names = {"dataset": Dataset.from_list(list(rows))}
        exec(refused.value.mend, names)
        trainer_for(tmp_path, names["dataset"], template, assistant_only_loss=True)


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([0, 1, 1, 1, 1], "5 values"),  # TRL leaves its end out, wherever it was meant to begin
        ([0, 1], "2 values"),
        (None, "0 values"),
        ([0, 0.5, 1, 2], "0.5 in its"),
        ([0, 1, 1, 1], None),
        ([False, True, True, True], None),
    ],
    ids=["longer", "shorter", "none", "weights", "fits", "booleans"],
)
def test_v82_masks_that_are_not_one_0_or_1_a_token_are_refused(tmp_path, mask, said, streaming):
    rows = Dataset.from_list([{"input_ids": [3, 4, 5, 6], "assistant_masks": mask}] * 2)
    rows = rows.to_iterable_dataset() if streaming else rows
    with nullcontext() if said is None else pytest.raises(DatasetError, match=said):
        trainer_for(tmp_path, rows, MARKED)


def test_v82_conversations_of_roles_are_taken_by_either_name(tmp_path):
    rows = chats().rename_column("messages", "conversations")
    trainer = trainer_for(tmp_path, rows, MARKED, assistant_only_loss=True)
    assert 0.2 < trainer._reports["train"].target_share < 0.6
    config = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, assistant_only_loss=True)
    with pytest.raises(ConfigurationError, match="beside formatting_func"):
        SpeedSFTTrainer(tiny_llama(), config, None, rows, processing_class=tokenizer_with(MARKED), formatting_func=str)


def test_v82_a_template_with_markers_trains_on_the_answers(tmp_path):
    trainer = trainer_for(tmp_path, chats(), MARKED, assistant_only_loss=True)
    share = trainer._reports["train"].target_share
    assert 0.2 < share < 0.6
    trainer.train()


@pytest.mark.parametrize("streaming", [False, True])
def test_v82_a_mask_that_masks_nothing_is_refused(tmp_path, streaming):
    everything = MARKED.replace("m.role == 'assistant'", "true").replace("{{ m.role + ': ' }}", "")
    dataset = chats()
    if streaming:
        dataset = dataset.to_iterable_dataset()
    with pytest.raises(DatasetError, match="100 % of the train dataset's tokens are targets"):
        trainer_for(tmp_path, dataset, everything, assistant_only_loss=True, template_check="off")


@misses_ends
@pytest.mark.parametrize("streaming", [False, True])
def test_v82_a_mask_of_answers_that_holds_questions_is_refused(tmp_path, caplog, streaming):
    """transformers 5.23 marks all that follows a span whose last character is part of no token (issue 47325)."""
    spaced = MARKED.replace("' <eos>' }}{% endgeneration %}", "' <eos> ' }}{% endgeneration %}")
    rows = chats().to_iterable_dataset() if streaming else chats()
    with pytest.raises(DatasetError, match="6 of 15 tokens of questions are targets"):
        trainer_for(tmp_path, rows, spaced, assistant_only_loss=True)
    trainer_for(tmp_path, rows, spaced, assistant_only_loss=True, template_check="warn")
    assert "tokens of questions are targets" in caplog.text


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_v82_prompts_of_one_token_are_a_mask_and_prompts_of_none_are_not(tmp_path, packing, streaming):
    def dataset(prompt):
        rows = Dataset.from_list([{"prompt": prompt, "completion": " w4 w5"}] * 3)
        return rows.to_iterable_dataset() if streaming else rows

    changes = {"packing": packing, "max_length": 64, "max_steps": 1}
    trainer_for(tmp_path / "one", dataset("w3"), PLAIN, **changes)
    with pytest.raises(DatasetError, match="100 % of the train dataset's tokens are targets"):
        trainer_for(tmp_path / "none", dataset(""), PLAIN, **changes)


@pytest.mark.parametrize(
    ("streaming", "max_length", "message"),
    [
        (False, 4, "0 of 6 documents have targets in the train dataset"),
        (False, None, "0 of 6 documents have targets"),
        (True, 4, "no document with targets"),
    ],
)
def test_v31_answers_behind_the_cut_stop_a_padded_run_too(tmp_path, streaming, max_length, message):
    """TRL drops such documents without a word, and an empty dataset fails in torch's sampler."""
    answers_from = 9 if max_length is None else 5
    rows = [{"input_ids": [3] * 8, "labels": [-100] * min(8, answers_from) + [3] * (8 - answers_from)}] * 6
    dataset = Dataset.from_list(rows)
    if streaming:
        dataset = dataset.to_iterable_dataset()
    with pytest.raises(DatasetError, match=message):
        trainer_for(tmp_path, dataset, PLAIN, packing=False, max_length=max_length, max_steps=1)


def test_v31_padded_documents_without_targets_are_counted(tmp_path, caplog):
    rows = [{"input_ids": [3] * 8, "labels": [-100] * 5 + [3] * 3}, {"input_ids": [3] * 4, "labels": [-100, 3, 3, 3]}]
    trainer_for(tmp_path, Dataset.from_list(rows), PLAIN, packing=False, max_length=4)
    assert "75.0% of tokens are targets. 1 of 2 have none." in caplog.text


def test_every_token_may_be_a_target_where_no_mask_was_asked_for(tmp_path):
    trainer = trainer_for(tmp_path, chats(), PLAIN)
    assert trainer._reports["train"].target_tokens == trainer._reports["train"].real_tokens - 3


def test_completion_only_targets_survive_packing(tmp_path):
    trainer = trainer_for(tmp_path, completions(), PLAIN)
    report = trainer._reports["train"]
    assert (report.documents, report.target_tokens) == (5, 5 * 2)  # "ok" and the end
    trainer.train()
    assert trainer.throughput.run_totals().session.target == 10


@pytest.mark.parametrize("kind", ["packed", "padded", "stream"])
def test_a_token_that_text_and_tokenizer_both_write_is_named(tmp_path, caplog, kind):
    tokenizer = tokenizer_with(PLAIN)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    tokenizer.bos_token = "<unk>"
    args = SpeedSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, tokens_per_batch=64, report_to="none", max_steps=1,
        exclude_generation_prompt=True, packing=kind != "padded",
    )  # fmt: skip
    rows = Dataset.from_dict({"text": ["<unk> w1 w2"] * 2})
    SpeedSFTTrainer(
        tiny_llama(), args, train_dataset=rows.to_iterable_dataset() if kind == "stream" else rows,
        processing_class=tokenizer,
    )  # fmt: skip
    assert "2 of 2 begin with '<unk>' twice" in caplog.text
    assert "exclude_generation_prompt does nothing to the train dataset" in caplog.text


@pytest.mark.parametrize(
    ("ids", "labels", "said"),
    [
        ([20, 21, 1], [-100, 21, 1], None),
        ([20, 21, 1], [-100, 21, -100], "no end token ('<eos>', 'w0') is a target in any of 2"),
        ([20, 21], None, "their last target is mostly 'w3'"),
        ([20, 18], [-100, 18], None),  # generation stops at it too
        ([20, 21, 1, 1], None, "2 of 2 end with '<eos>' twice"),
        ([20, 21, 1, 2, 1], None, "2 of 2 end with '<eos>' twice"),  # a space between them
        ([20, 1, 21, 1], None, None),
    ],
)
def test_v82_ends_that_are_doubled_or_no_targets_are_named(caplog, ids, labels, said):
    tokenizer, model = tokenizer_with(PLAIN), tiny_llama()
    tokenizer.decode = lambda ids: " " if ids == [2] else "w"
    model.generation_config.eos_token_id = [1, 18]
    row = {"input_ids": ids} if labels is None else {"input_ids": ids, "labels": labels}
    say_what_is_odd(Dataset.from_list([row] * 2), tokenizer, model, "train")
    assert said in caplog.text if said else not caplog.records


def test_v82_a_stream_whose_first_documents_have_no_targets_is_refused_without_reading_it_all(tmp_path):
    read = []

    def rows():
        for _ in range(10**6):
            read.append(1)
            yield {"input_ids": [3, 4, 5], "labels": [-100] * 3}

    with pytest.raises(DatasetError, match="no document with targets among the first 10,000"):
        trainer_for(tmp_path, IterableDataset.from_generator(rows), PLAIN)
    assert len(read) < 11_000


@pytest.mark.parametrize(("exclude", "targets"), [(False, 3 + 1), (True, 1 + 1)])
@pytest.mark.parametrize("streaming", [False, True])
def test_v85_tokens_that_the_prompt_supplies_are_no_targets_on_request(tmp_path, caplog, exclude, targets, streaming):
    dataset = Dataset.from_list([{"messages": chat("w1", "ok", "w2 w3", "ok")}] * 2)
    with caplog.at_level(logging.INFO, logger="hf_speedkit"):
        trainer = trainer_for(
            tmp_path, dataset.to_iterable_dataset() if streaming else dataset, BOILERPLATE, assistant_only_loss=True,
            exclude_generation_prompt=exclude,
        )  # fmt: skip
    if streaming:
        report = trainer.train_dataset.sample(10)[1]
    else:
        report = trainer._reports["train"]
        assert ("8 tokens of generation prompts are no targets" in caplog.text) is exclude
    assert report.target_tokens == 2 * 2 * targets


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_v82_an_evaluation_set_is_masked_by_what_it_holds_and_not_by_the_training_data(tmp_path, packing):
    """TRL takes the training data's format for all; predictions are made of any set that can be evaluated."""
    trainer = trainer_for(tmp_path, Dataset.from_dict({"text": ["w1 w2 w3"]}), PLAIN, packing=packing, max_length=64)
    scored = {}
    for name, rows in {"pairs": completions(2), "text": Dataset.from_dict({"text": ["w1 w2"]})}.items():
        scored[name] = trainer.predict(rows)
        assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(scored[name].metrics["test_loss"])
    targets = {name: int((found.label_ids != -100).sum()) for name, found in scored.items()}
    assert targets == {"pairs": 2 * 2, "text": 2 if packing else 3}  # a collator of TRL's masks no first token


@pytest.mark.parametrize("streaming", [False, True])
def test_conversations_without_an_answer_are_left_out_and_not_the_end_of_the_run(tmp_path, caplog, streaming):
    rows = [*chats(2).to_list(), {"messages": chat("w1")}]
    dataset = Dataset.from_list(rows).to_iterable_dataset() if streaming else Dataset.from_list(rows)
    trainer = trainer_for(tmp_path, dataset, MARKED, assistant_only_loss=True)
    found = trainer.train_dataset.sample(9)[0] if streaming else trainer.train_dataset
    assert len(found) == 2
    assert ("1 of 3 conversations have no answer" in caplog.text) is not streaming


def test_v82_a_stream_without_any_answer_is_refused_and_no_stop_of_an_iteration(tmp_path):
    stream = Dataset.from_list([{"messages": chat("w1")}] * 2).to_iterable_dataset()
    with pytest.raises(DatasetError, match="no conversation of the train stream has an answer"):
        trainer_for(tmp_path, stream, MARKED, assistant_only_loss=True)


def test_v17_what_a_padded_run_cuts_is_counted(tmp_path, caplog):
    texts = Dataset.from_dict({"text": ["w1 w2 w3 w4 w5 w6", "w1"]})
    trainer = trainer_for(tmp_path, texts, PLAIN, packing=False, max_length=4)
    assert "1 of 2 are longer than max_length=4 and cut there; 3 of 9 tokens (33.3%) are lost" in caplog.text
    assert list(map(len, trainer.train_dataset["input_ids"])) == [4, 2]


def test_documents_that_were_prepared_by_the_user_are_checked_all_the_same(tmp_path):
    rows = [{"input_ids": [3, 4, 5], "labels": [-100] * 3}, {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows), PLAIN, dataset_kwargs={"skip_prepare_dataset": True})
    assert trainer.summary().documents.targetless_documents == 1
    with pytest.raises(DatasetError, match="no eos_token"):
        tokenizer = tokenizer_with(PLAIN)
        tokenizer.eos_token = None
        trainer._tokenizer = tokenizer
        trainer.evaluate(Dataset.from_dict({"text": ["w1"]}))


@pytest.mark.parametrize(
    ("zeros", "frozen", "said"),
    [([5], True, True), ([5], False, False), ([30], True, False), ([*range(5, 12)], True, True)],
)
def test_tokens_that_adapters_leave_unknown_are_said(zeros, frozen, said, caplog):
    model = tiny_llama().requires_grad_(not frozen)
    model.get_input_embeddings().weight.data[[0, *zeros]] = 1e-20  # padding has no embedding to miss
    rows = Dataset.from_dict({"input_ids": [[2, *range(5, 12), 0, 1], [2, 3, 1]]})
    say_what_is_odd(rows, tokenizer_with(PLAIN), model, "train")
    assert (f"embeddings of {len(zeros)} tokens are zero ('<t>'" in caplog.text) is said
    assert (f"trainable_token_indices={zeros} " in caplog.text) is said
