"""Calls and tools in the forms that data sets keep them in, and columns beside conversations."""

import json
from contextlib import nullcontext

import pytest
from chat_rows import PLAIN, chat, tokenizer_with, trainer_for
from datasets import Dataset, IterableDataset

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.trainer.data.raw_rows import one_format
from hf_speedkit.trainer.data.templates import TemplateChecks


def checks(template, mode="strict"):
    return TemplateChecks(tokenizer_with(template), None, mode, False)


def tool(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(arguments, content=""):
    calls = [{"type": "function", "function": {"name": "call", "arguments": arguments}}]
    return [*chat("w1"), {"role": "assistant", "content": content, "tool_calls": calls}]


WRITES_TOOLS = "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}" + PLAIN.replace(
    "m.content +", "m.content + (m.tool_calls|tojson if m.tool_calls else '') +"
)
STRICT = [{**tool("call"), "strict": strict} for strict in (None, True)]
TWO_TOOLS = [[tool("call", a="string")], [tool("call", b="string")]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"messages": chat("w1", "w2"), "tools": tools} for tools in TWO_TOOLS], "2 of 2 tools have fields .*\n.*'b'"),
        ([{"messages": chat("w1", "w2"), "tools": json.dumps(tools)} for tools in TWO_TOOLS], None),
        ([{"messages": chat("w1", "w2"), "tools": [tool("call", a={"default": one})]} for one in (None, "x")], None),
        ([{"messages": chat("w1", "w2"), "tools": [{**tool("call"), "strict": None}]}], None),  # OpenAI's client does
        ([{"messages": called({"a": {"b": 1}})}, {"messages": called({"a": {"c": 1}})}], "arguments without .*\n.*'c'"),
        ([{"messages": called('{"a": "ü"}')}], "quotes once more, in 1 of 1"),
        ([{"messages": called({"a": 1})}, {"messages": called({"a": 2})}], None),
        ([{"messages": called("w1")}], None),
        ([{"messages": chat("w1", "w2"), "tools": json.dumps(STRICT)}], None),
        ([{"messages": [{**chat("w1")[0], "tool_calls": '[{"a": 1}]'}]}], None),
    ],
    ids=["tools", "tools of JSON", "a default", "nowhere a value", "inside arguments", "JSON", "objects", "a text",
         "a null in JSON", "calls of JSON"],
)  # fmt: skip
def test_calls_and_tools_that_a_template_writes_in_another_form_are_refused(rows, message):
    with nullcontext() if message is None else pytest.raises(DatasetError, match=message):
        checks(WRITES_TOOLS).before(Dataset.from_list(rows), "train")


NULLS = [{"messages": called({"a": 1, "b": None})}, {"messages": called({"b": 2})}]


@pytest.mark.parametrize(
    ("rows", "refused"),
    [
        (Dataset.from_list(NULLS), True),
        (Dataset.from_list(NULLS, on_mixed_types="use_json"), False),
        (Dataset.from_list([NULLS[0], {"messages": called({"a": 1, "b": 2})}], on_mixed_types="use_json"), False),
        (IterableDataset.from_generator(lambda: iter(NULLS)), False),
    ],
    ids=["Arrow", "JSON", "JSON of one form", "a generator"],
)
def test_nulls_that_rows_were_given_are_no_faults_where_nothing_has_filled_them_in(rows, refused):
    with pytest.raises(DatasetError, match="arguments without") if refused else nullcontext():
        checks(WRITES_TOOLS).before(rows, "train")


@pytest.mark.parametrize(
    ("arguments", "written", "mend"),
    [
        ('{"a": 1}', "{% for k, v in c.function.arguments|items %}{{ k }}{% endfor %}", r"json\.loads"),
        ('{"a": 1}', "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}", r"json\.loads"),
        ({"a": 1}, "{{ 'call ' + c.function.arguments }}", r"json\.dumps"),
        ({"a": 1}, "{{ raise_exception('no calls') }}", "change or filter"),
    ],
)
def test_arguments_of_another_type_than_a_template_takes_are_told_with_the_line_that_mends_them(
    arguments, written, mend
):
    template = PLAIN.replace("' <eos> ' }}", "' <eos> ' }}{% for c in m.tool_calls or [] %}" + written + "{% endfor %}")
    with pytest.raises(DatasetError, match=mend):
        checks(template).before(Dataset.from_list([{"messages": called(arguments)}]), "train")


UNREAD = {"system": "w20 w21", "id": 7}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": chat("w1", "w2"), **UNREAD}, '"role": "system", "content": row["system"]'),
        (
            {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}], **UNREAD},
            '"from": "sy',
        ),
        ({"prompt": "w1", "completion": " w2", **UNREAD}, "at the beginning of each prompt"),
        (
            {"messages": called({"a": 1}), "tool_defs": json.dumps([tool("call")])},
            'rename_column("tool_defs", "tools")',
        ),
        ({"messages": [{"role": "system", "content": "w20  w21"}, *chat("w1", "w2")], **UNREAD}, None),
        ({"messages": chat("use call", "w2"), "functions": json.dumps([tool("call")])}, None),
        ({"messages": called({"a": 1}), "tools": [tool("call")], "functions": json.dumps([tool("other")])}, None),
        ({"messages": chat("w1", "w2"), "functions": "def call(): ..."}, None),
        ({"messages": chat("w1", "w2"), "system": "", "functions": "[]"}, None),
        ({"messages": chat("w1", "w2"), "system": "a-system-of-ours"}, None),
        ({"text": "w1", **UNREAD}, None),
    ],
    ids=["system", "sharegpt", "pair", "tools", "said", "told", "read", "code", "empty", "a name", "text"],
)
def test_columns_that_belong_into_the_prompt_and_are_read_by_nothing_are_said(row, said, caplog):
    checks(WRITES_TOOLS, mode="warn").before(Dataset.from_list([row]), "train")
    assert ("is read by nothing" in caplog.text) is (said is not None)
    assert said is None or said in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_tools_of_blank_text_are_no_tools(streaming):
    rows = Dataset.from_list([{"messages": chat("w1", "w2"), "tools": tools} for tools in ("", json.dumps([1]), None)])
    rows = rows.to_iterable_dataset() if streaming else rows
    formatted = one_format(rows, "text")
    assert [row["tools"] for row in formatted] == ["[]", "[1]", None]
    assert formatted.column_names == rows.column_names
    if not streaming:
        one_format(rows.with_transform(lambda batch: {"messages": batch["messages"]}), "text")


def test_tools_that_are_no_json_in_a_row_that_no_sample_held_are_told_as_such(tmp_path):
    rows = [{"messages": chat("w1", "w2"), "tools": "[]"}] * 200
    rows[101] = {"messages": chat("w1", "w2"), "tools": "w7"}
    with pytest.raises(DatasetError, match="no JSON"):
        trainer_for(tmp_path, Dataset.from_list(rows), PLAIN)
