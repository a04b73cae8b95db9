"""`hf-speedkit plan` from the command line."""

import json

import pytest
from datasets import Dataset
from support import tiny_tokenizer, tokenized
from typer.testing import CliRunner

from hf_speedkit.cli.main import app
from hf_speedkit.cli.plan_view import histogram
from hf_speedkit.packing.planner import count_padded_batches, plan_packing

LENGTHS = [9, 4, 17, 2, 30, 8, 8, 21, 5, 13, 3, 28, 11, 6, 19, 2] * 20


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(LENGTHS))
    return path


@pytest.fixture
def model(tmp_path):
    """A folder with a tokenizer and the config of a tiny Llama."""
    from support import tiny_llama

    folder = tmp_path / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' <eos> ' }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    tiny_llama().config.save_pretrained(folder)
    return folder


def test_the_numbers_are_those_of_the_planner(lengths_file):
    result = run("--lengths", lengths_file, "--tokens-per-batch", 32, "--ranks", 4, "--accumulation", 2, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    padded, trl, ours = said["batchings"]
    packs = len(plan_packing(LENGTHS, tokens_per_batch=32).packs)
    assert padded["batches"] == count_padded_batches(LENGTHS, 32)
    assert ours["batches"] == packs <= trl["batches"]
    assert ours["full"] == pytest.approx(sum(LENGTHS) / (32 * packs))
    assert ours["steps"] == -(-packs // 8)
    assert said["documents"]["tokens"] == sum(LENGTHS)
    assert said["documents"]["quantiles"]["1"] == 30
    assert said["stragglers"] is None


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_of_80_columns_breaks_no_row_and_no_word_and_one_of_40_loses_no_number(tmp_path, columns):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([900, 1200, 300, 25_000, 9_000] * 20_000))
    many = ["--lengths", path, "--ranks", 64, "--accumulation", 16, "--epochs", 12, "--overlong", "truncate"]
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["plan", *map(str, many)]).output
    assert max(map(len, shown.splitlines())) <= 80  # the tables; a narrower terminal wraps them itself
    assert max(len(line) for line in shown.splitlines() if "#" in line) <= columns
    assert "…" not in shown
    (ours,) = [line for line in shown.splitlines() if "hf_speedkit" in line]
    assert ours.split()[1] in ("fifo_close", "best_fit_decreasing")
    assert len(ours.split()) == 7


def test_a_table_and_a_plot_are_printed(lengths_file):
    result = run("--lengths", lengths_file, "--tokens-per-batch", 32, "--epochs", 3)
    assert result.exit_code == 0
    for words in ("320 documents", "2-D padded", "TRL bfd", "hf_speedkit", "in 3 epochs", "###"):
        assert words in result.output


def test_the_histogram_counts_every_document_and_takes_equal_lengths():
    assert sum(int(line.split()[-1].replace(",", "")) for line in histogram(LENGTHS)) == len(LENGTHS)
    assert histogram([7, 7]) == [f"{7:>9,} {'#' * 40} 2"]


@pytest.mark.parametrize("kind", ["messages", "text", "prompt"])
def test_a_file_is_tokenized_as_trl_would(tmp_path, model, kind):
    rows = {
        "messages": {"messages": [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]},
        "text": {"text": "w3 w4 w5 w6"},
        "prompt": {"prompt": "w3 w4 w5", "completion": " w6"},
    }
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(rows[kind]) for _ in range(10)))
    result = run(model, path, "--tokens-per-batch", 16, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["documents"]["tokens"] == 10 * 5
    assert said["stragglers"]["quadratic_per_token"] > 0


@pytest.mark.parametrize(
    ("template", "roles", "said"),
    [("{{ messages[0].content }}", ("user", "assistant"), None), ("", ("user", "assistant"), "no chat template"),
     ("{{ '-' }}", ("human", "gpt"), "leaves out every message of 'human', 'gpt'"),
     ("-\n{{ messages | nope }}", ("user", "assistant"), "the chat template fails in line 2")],
)  # fmt: skip
def test_sharegpt_files_and_base_tokenizers_are_understood_or_refused(tmp_path, model, template, roles, said):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or None
    (model / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(model)
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"conversations": [{"from": role, "value": "w3 w4"} for role in roles]}))
    result = run(model, path, "--tokens-per-batch", 16, "--json")
    assert result.exit_code == (0 if said is None else 1), result.output
    assert said is None or said in result.output


def test_a_tokenized_dataset_needs_no_tokenizer(tmp_path):
    tokenized(LENGTHS).save_to_disk(tmp_path / "saved")
    result = run("./no-such-model", tmp_path / "saved", "--tokens-per-batch", 32, "--json")
    assert json.loads(result.stdout)["documents"]["tokens"] == sum(LENGTHS)


def test_rows_that_are_padded_or_packed_already_are_not_counted_as_documents(tmp_path):
    for number, column in enumerate(({"attention_mask": [1, 0]}, {"seq_lengths": [1, 1]})):
        Dataset.from_list([{"input_ids": [3, 4], **column}]).save_to_disk(tmp_path / str(number))
        result = run("./no-such-model", tmp_path / str(number), "--tokens-per-batch", 32)
        assert result.exit_code == 1
        assert next(iter(column)) in result.output


def test_a_line_on_reasoning_effort_is_pointed_out(tmp_path, model):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if enable_thinking is undefined %}{{ 'Reasoning effort is set to xhigh ' }}{% endif %}"
        "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    Dataset.from_list(
        [{"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]}]
    ).to_json(tmp_path / "data.jsonl")
    assert "--template-kwargs" in run(model, tmp_path / "data.jsonl").output
    silent = run(model, tmp_path / "data.jsonl", "--template-kwargs", '{"enable_thinking": false}', "--json")
    assert json.loads(silent.stdout)["findings"] == []


@pytest.mark.parametrize(
    ("overlong", "code", "batches"), [("error", 1, None), ("split", 0, 2), ("truncate", 0, 1), ("drop", 1, None)]
)
def test_documents_that_do_not_fit_make_the_subject_bad_unless_dealt_with(tmp_path, overlong, code, batches):
    path = tmp_path / "lengths.json"
    path.write_text('{"lengths": [60, 0]}')
    result = run("--lengths", path, "--tokens-per-batch", 32, "--overlong", overlong, "--json")
    assert result.exit_code == code
    said = json.loads(result.stdout)
    assert (said["error"] is None) is (code == 0)
    assert said["documents"]["empty"] == 1
    if batches:
        assert said["batchings"][-1]["batches"] == batches


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "DATASET"),
        (("model", "no-such-file.jsonl"), "DATASET"),
        (("--lengths", "no-such-file.json"), "--lengths"),
        (("model", "data", "--lengths", "x.json"), "DATASET"),
        (("--lengths", "LENGTHS", "--overlong", "guess"), "--overlong"),
        (("--lengths", "LENGTHS", "--template-kwargs", "{"), "--template-kwargs"),
        (("--lengths", "LENGTHS", "--tokens-per-batch", 0), "--tokens-per-batch"),
        (("./no-such-model", "./no-such-dataset"), "DATASET"),
        (("./no-such-model", "LENGTHS.jsonl"), "MODEL_OR_TOKENIZER"),
    ],
)
def test_wrong_use_is_exit_code_two_and_names_the_argument(arguments, named, lengths_file):
    rows = lengths_file.with_suffix(".jsonl")
    rows.write_text('{"text": "w3"}')
    there = {"LENGTHS": lengths_file, "LENGTHS.jsonl": rows}
    result = run(*[there.get(argument, argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert f"Invalid value for {named}" in result.output.replace("'", "")


def test_a_file_that_holds_something_else_is_wrong_use(tmp_path):
    for text in ("not json", '{"a": 1}', "[1.5]", "[true]", "[-3, 4]", f"[{10**30}]", "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        result = run("--lengths", tmp_path / "x.json")
        assert (result.exit_code, type(result.exception)) == (2, SystemExit)


def test_the_longest_document_that_kernels_can_state_is_still_a_length(tmp_path):
    (tmp_path / "x.json").write_text(f"[{2**31 - 1}]")
    assert run("--lengths", tmp_path / "x.json", "--overlong", "truncate").exit_code == 0


@pytest.mark.parametrize("name", ["empty.jsonl", "broken.jsonl", ""])
def test_a_dataset_that_cannot_be_read_is_wrong_use(tmp_path, monkeypatch, model, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"text": "w3"}\n{"text": \n')
    result = run(model, name)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)


def test_a_dataset_without_rows_is_refused(tmp_path, model):
    Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "saved")
    result = run(model, tmp_path / "saved")
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "no rows" in result.output


USER = {"role": "user", "content": "w3"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"foo": "w3"}, "no column to train on"),
        ({"messages": []}, "first rows: [1]"),
        ({"messages": None}, "first rows: [1]"),
        ({"messages": [USER, {**USER, "content": None}]}, "first rows: [1]"),
        ({"text": None}, 'rows of the train dataset have no "text"'),
        ({"messages": [{"speaker": "a", "text": "w3"}]}, "have no role"),
        ({"messages": [USER, USER]}, "refuses the conversation of row 1: roles must alternate"),
        ({"input_ids": "w3"}, "not a list of integers"),
    ],
)
def test_rows_that_cannot_be_counted_are_a_bad_subject_in_words_and_in_json(tmp_path, model, row, words):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content + ' ' }}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    good = (
        [{"messages": [USER, {**USER, "role": "assistant"}]}] if "messages" in row and words != "have no role" else []
    )
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, [*good, row])))
    result = run(model, tmp_path / "data.jsonl", "--json")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert words in result.stderr
    said = json.loads(result.stdout)
    assert words in said["error"]
    assert said.keys() == {"settings", "memory", "documents", "findings", "batchings", "stragglers", "error"}
