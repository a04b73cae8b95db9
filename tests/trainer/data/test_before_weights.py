"""What is wrong with the rows, the template or the tokens is told while the weights are still to be read."""

from pathlib import Path

import pytest
import qwen27b_sft
from datasets import Dataset
from support import tiny_hybrid, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, DatasetError

CHAT = [{"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]}]
TEXT = [{"text": "w3 w4"}]
TEMPLATE = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
LINE = "{% if enable_thinking is undefined %}{{ 'Reasoning effort is set to xhigh ' }}{% endif %}" + TEMPLATE


@pytest.fixture
def folder(tmp_path):
    """A model without weights: whatever looks for them ends in an OSError."""
    config = tiny_hybrid().config
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def tokenizer(template=TEMPLATE):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def ask(folder, tmp_path, rows, template=TEMPLATE, **changes):
    given = {"use_cpu": True, "bf16": False, "tokens_per_batch": 32, "report_to": "none", **changes}
    SpeedSFTTrainer(
        model=folder,
        args=SpeedSFTConfig(output_dir=str(tmp_path / "run"), **given),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(template),
    )


@pytest.mark.parametrize(
    ("rows", "template", "changes", "said"),
    [
        ([{"body": "w3"}], TEMPLATE, {}, "no column to train on"),
        (CHAT, None, {}, "no chat template"),
        (CHAT, LINE, {}, "enable_thinking"),
        (CHAT, TEMPLATE, {"assistant_only_loss": True}, "does not mark what the assistant says"),
        (TEXT, TEMPLATE, {"assistant_only_loss": True}, "are no conversations"),
        (TEXT, TEMPLATE, {"eos_token": "<nope>"}, "leave eos_token unset, for '<eos>'"),
        (TEXT, TEMPLATE, {"eval_strategy": "epoch"}, 'eval_dataset=.*or eval_strategy="no"'),
        (TEXT, TEMPLATE, {"use_liger_kernel": True}, 'pip install "liger-kernel>='),
        (TEXT, TEMPLATE, {"optim": "paged_adamw_8bit"}, r'pip install "bitsandbytes>=.*\n.*adamw_torch_fused'),
        (TEXT, TEMPLATE, {"optim": "stable_adamw"}, "pip install torch-optimi"),
        (CHAT, TEMPLATE, {"chat_template_path": "/no/chat.jinja"}, "no file or folder '/no/chat.jinja'"),
        (TEXT, TEMPLATE, {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, "packed_attention="),
        (TEXT, TEMPLATE, {"model_init_kwargs": {"attn_implementation": "owner/kernel"}}, r'pip install "kernels>=0\.'),
        (TEXT, TEMPLATE, {"model_init_kwargs": {"attn_implementation": "flex_attention"}}, "no backward on a CPU"),
        (TEXT, TEMPLATE, {"model_init_kwargs": {"use_kernels": True}}, r'(?s)fused_layers=True.*"kernels>=0\.'),
        (TEXT, TEMPLATE, {"model_init_kwargs": {"attn_implementation": "spda"}}, "attn_implementation: sdpa; "),
        (TEXT, TEMPLATE, {"push_to_hub": True, "hub_model_id": "me/it"}, "hf auth login"),
        (TEXT, TEMPLATE, {"report_to": "dagshub"}, "pip install dagshub"),
        (TEXT, TEMPLATE, {"report_to": "wandbb"}, "report_to: wandb$"),
    ],
    ids=["column", "template", "line", "markers", "plain", "eos", "evaluation", "liger", "optimizer", "optimi",
         "template file", "flash", "kernel", "flex", "use_kernels", "attention", "push", "tracker", "misspelt"],
)  # fmt: skip
def test_a_trainer_given_a_name_refuses_before_it_reads_weights(folder, tmp_path, rows, template, changes, said):
    with pytest.raises((ConfigurationError, DatasetError), match=said):
        ask(folder, tmp_path, rows, template, **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rows", "template", "changes"),
    [
        (CHAT, TEMPLATE, {}),
        (TEXT, TEMPLATE, {"eos_token": "w7"}),
        (CHAT, LINE, {"template_check": "warn"}),
        (CHAT, LINE, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, None, {"chat_template_path": "elsewhere"}),
    ],
    ids=["good", "token", "warn", "kwargs", "another"],
)
def test_what_is_right_gets_as_far_as_the_weights(folder, tmp_path, rows, template, changes):
    with pytest.raises(ConfigurationError, match=r"(?s)no model can be loaded from.*no file named"):
        ask(folder, tmp_path, rows, template, **changes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "model is a NoneType"),
        ({"model": LlamaConfig()}, r"AutoModelForCausalLM.from_config\(config\)"),
        ({"model": LlamaForCausalLM}, "model is the class LlamaForCausalLM"),
        ({"model": ""}, "the name is empty"),
        ({"model": "./no-such-model"}, "is no folder of a model\n  nothing is there"),
        ({"model": str(Path(__file__).parent)}, "it holds no config.json"),
        ({"processing_class": "gpt2"}, "is a text, not a tokenizer"),
        ({"processing_class": None}, "there is no tokenizer"),
        ({"tokenizer": None}, "Mend it:  processing_class=tokenizer"),
        ({"max_seq_length": 9}, r"belongs into args=SpeedSFTConfig\(...\), there called tokens_per_batch"),
        ({"packing": True}, "there called packing"),
        ({"train_data": None}, "did you mean train_dataset"),
    ],
    ids=["nothing", "config", "class", "empty", "nowhere", "no model", "text", "no tokenizer", "tokenizer", "length",
         "packing", "near"],
)  # fmt: skip
def test_a_trainer_made_as_in_other_tutorials_says_what_to_write(given, said):
    made = {"model": tiny_hybrid(), "train_dataset": Dataset.from_list(TEXT), "processing_class": tokenizer()}
    with pytest.raises(ConfigurationError, match=said):
        SpeedSFTTrainer(**{**made, **given})


def test_the_recipe_looks_at_the_rows_before_it_reads_weights(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(qwen27b_sft, "use_all_cores", lambda args: 1)  # the cores of the other tests
    tokenizer().save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text('{"body": "w3"}\n')
    (tmp_path / "job.yaml").write_text(
        f"model_name_or_path: {folder}\ndataset_name: {tmp_path / 'rows.jsonl'}\noutput_dir: {tmp_path / 'run'}\n"
        "use_cpu: true\nbf16: false\ntokens_per_batch: 32\nreport_to: none\n"
    )
    with pytest.raises(DatasetError, match=r"no column to train on\n  columns: body"):
        qwen27b_sft.main(["--config", str(tmp_path / "job.yaml")])
