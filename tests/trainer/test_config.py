import copy
import dataclasses
import re

import pytest
import torch
from datasets import Dataset
from support import tokenized
from trl import SFTConfig

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.number_rules import warn_of_long_warmup


def config(tmp_path, **kwargs):
    return SpeedSFTConfig(**{"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, **kwargs})


def test_every_setting_of_sft_config_is_there():
    theirs = {field.name for field in dataclasses.fields(SFTConfig)}
    assert theirs <= {field.name for field in dataclasses.fields(SpeedSFTConfig)}


def test_packing_proof_and_metrics_are_on_by_default(tmp_path):
    made = config(tmp_path)
    assert (made.packing, made.isolation_check, made.throughput, made.kernel_assertion) == (True, True, True, "auto")
    assert made.logging_nan_inf_filter is False


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 1024 * 8),
        ({"max_length": 512, "per_device_train_batch_size": 2}, 1024),
        ({"tokens_per_batch": 300, "per_device_train_batch_size": 4}, 300),
    ],
    ids=["SFTConfig's defaults", "v09 rows of a batch become one row", "given"],
)
def test_a_micro_batch_is_one_row_of_tokens_per_batch(tmp_path, given, tokens):
    made = config(tmp_path, **given)
    assert (made.tokens_per_batch, made.per_device_train_batch_size, made.max_length) == (tokens, 1, None)


def test_making_one_emits_no_deprecation_warning(tmp_path, recwarn):
    config(tmp_path)
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
@pytest.mark.parametrize("on", [True, False])
def test_checkpointing_can_be_set_by_either_name(tmp_path, name, on):
    made = config(tmp_path, **{name: on})
    assert (made.activation_checkpointing, made.gradient_checkpointing) == (on, on)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"packing_strategy": "wrapped"}, "attend to one another"),
        ({"packing_strategy": "knapsack"}, "is not a choice"),
        ({"overlong": "cut"}, "error, split, truncate, drop"),
        ({"kernel_assertion": "maybe"}, "auto, strict, warn, off"),
        ({"packed_attention": "on"}, "auto, keep"),
        ({"padding_free": True}, "packing=True is enough"),
        ({"max_length": None}, "set tokens_per_batch"),
        ({"tokens_per_batch": 1}, "no token to predict"),
        ({"tokens_per_batch": 5}, "three documents in a row"),
        ({"tokens_per_batch": 1, "isolation_check": False}, "no token to predict"),
        ({"per_device_eval_batch_size": 8}, "per_device_eval_batch_size=1"),
        ({"auto_find_batch_size": True}, "lower tokens_per_batch"),
        ({"packing": False, "eval_packing": True}, "set packing=True as well"),
        ({"truncation_mode": "keep_end"}, "not known to packing"),
        ({"packing": "false"}, "packing is True or False"),
        ({"eval_packing": "false"}, "True, False or None"),
        ({"cost_window_steps": "2"}, "a whole number of steps"),
        ({"trace_steps": [0]}, "a list of optimizer steps"),
        ({"peak_tflops": "989"}, "a number of TFLOP/s"),
        ({"stuck_rank_timeout_s": -1}, "a number of seconds"),
        pytest.param(
            {"activation_offloading": True, "activation_checkpointing": True},
            "leave activation_offloading out",
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU"),
        ),
        ({"tokens_per_batch": 1024.5}, "a whole number of slots"),
        ({"fused_layers_exclude": ["qk_rotery"]}, "split_convolution.*qk_rotary"),
        ({"fused_layers_exclude": "qk_rotary"}, "a list of names"),
        ({"stop_signals": "SIGTERM"}, "a list of signals that can be caught"),
        ({"stop_signals": ["SIGNOTHING"]}, "a list of signals that can be caught"),
        ({"stop_signals": ["SIGKILL"]}, "a list of signals that can be caught"),
        ({"chat_template_kwargs": "enable_thinking"}, "a dict, chat_template_kwargs="),
        ({"lr_scheduler_kwargs": "min_lr"}, "a dict, lr_scheduler_kwargs="),
        ({"fp16": "false"}, "fp16 is True or False, without quotes"),
        ({"fsdp_zero_copy": "false"}, "True or False"),
        ({"peak_tflops": float("inf")}, "a number of TFLOP/s"),
        ({"per_device_train_batch_size": 0}, "tokens_per_batch is what sizes a batch"),
        ({"per_device_train_batch_size": "2", "packing": False}, "a whole number from 1 up"),
        ({"gradient_accumulation_steps": 0}, "a whole number from 1 up"),
        ({"max_length": 0, "packing": False}, "from 2 up, or None"),
        ({"max_length": -5}, "from 2 up, or None"),
        ({"max_steps": 1.5}, "a whole number of optimizer steps"),
        ({"num_train_epochs": 0}, "nothing would be trained"),
        ({"num_train_epochs": "two"}, "passes over the data"),
        ({"learning_rate": -1e-4}, "not negative, 2e-5"),
        ({"learning_rate": "1e-4"}, "not negative, 2e-5"),
        ({"learning_rate": float("nan")}, "not negative, 2e-5"),
        ({"weight_decay": "0.1"}, "weight_decay is a number"),
        ({"adam_beta2": 1.0}, "from 0 up and below 1"),
        ({"warmup_steps": "5"}, "a share of them below 1"),
        ({"logging_steps": 0}, r'a share of all steps below 1\nGo on .*logging_strategy="no"'),
        ({"logging_steps": 1.5}, "a whole number from 1 up"),
        ({"save_steps": -1, "save_strategy": "steps"}, 'save_strategy="no" for no checkpoints'),
        ({"seed": -1}, "from 0 to 4294967295"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, '"min_lr_rate": 0.1'),
        ({"lr_scheduler_type": "cosin"}, 'lr_scheduler_type="cosine"; '),
        ({"optim": "adamw_torch_fuse"}, 'optim="adamw_torch_fused"; '),
        ({"log_level": "loud"}, "log_level is one of: .*warning"),
        ({"loss_type": "ce"}, "loss_type is one of: nll, dft"),
        ({"save_strategy": False}, 'write "no" in quotes'),
        ({"hub_strategy": "allways"}, "hub_strategy is one of: end, every_save"),
        ({"ddp_backend": "ncl"}, 'ddp_backend="nccl"; '),  # a choice on the command line alone
        ({"torch_compile_backend": "inductr"}, 'torch_compile_backend="inductor"; '),
        ({"torch_compile_mode": "quick"}, "torch_compile_mode is one of: .*max-autotune"),
        ({"dataloader_multiprocessing_context": "thread"}, "is one of: .*spawn"),
        ({"train_sampling_strategy": "sorted"}, "is one of: random, sequential"),
        ({"save_total_limit": "2"}, "or None for all"),
        ({"eval_accumulation_steps": 0}, "from 1 up, or None"),
        ({"torch_empty_cache_steps": 0}, "from 1 up, or None"),
        ({"ddp_timeout": "30m"}, "a number of seconds"),
        (
            {"max_grad_norm": None},
            "or 0 for no clipping",
        ),  # transformers 5.23 compares it with 0 behind the first backward pass
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "needs num_decay_steps\nMend it:  lr_scheduler_kwargs={'num_decay",
        ),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 1}},
            "takes no num_cycle\n.*takes: num_cycles",
        ),
        ({"fp16": True, "bf16": True}, "fp16=True beside bf16=True"),
        ({"output_dir": ""}, "names no folder"),
        ({"parallelism_config": {"tp_size": 2}}, "accelerate.ParallelismConfig"),
        ({"optim_args": "rank 8", "optim": "galore_adamw"}, "optim_args='rank 8' cannot be read"),
        ({"accelerator_config": "nowhere.json"}, "accelerator_config='nowhere.json' is no dict"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"steps": 2}}},
            "kwargs has no key steps\n.*num_steps",
        ),
        ({"activation_checkpointing_kwargs": {"reentrant": True}}, "kwargs has no key reentrant\n.*use_reentrant"),
        pytest.param(
            {"tf32": True},
            "leave tf32 out",
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU"),
        ),
        ({"deepspeed": "zero3.json"}, "pip install deepspeed"),
        ({"max_seq_length": 512}, "did you mean tokens_per_batch"),
        ({"warmup_ratio": 0.03}, "warmup_steps=0.03"),
        (
            {"learning_rat": 1.0, "zzzz": 1},
            r"no setting learning_rat, zzzz\n.*learning_rat: did you mean learning_rate[?]",
        ),
        ({"group_by_length": True}, "Mend it:  leave it out: packed rows have one length"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode:FutureWarning")
def test_settings_that_cannot_work_are_refused_with_the_one_to_change(tmp_path, given, message):
    with pytest.raises(ConfigurationError, match=message):
        config(tmp_path, **given)
    assert not (tmp_path / "out").exists()


def test_settings_that_are_not_read_are_not_judged_and_subclasses_take_what_they_like(tmp_path):
    made = config(tmp_path, logging_steps=0, logging_strategy="no", max_steps=4, num_train_epochs=0, warmup_steps=0.5,
                  lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2},
                  activation_checkpointing_kwargs={"preserve_rng_state": False, "every_n_layers": 2},
                  # As transformers takes them: of 0 checkpoints and less all are kept, and the loss tells the best.
                  save_total_limit=-1, ddp_timeout=1800.0, eval_strategy="epoch", save_strategy="best",
                  load_best_model_at_end=True)  # fmt: skip
    assert dataclasses.replace(made, max_steps=5).max_steps == 5

    class Mine(SpeedSFTConfig):
        def __init__(self, *, extra, **given):
            super().__init__(**given)
            self.extra = extra

    assert copy.deepcopy(Mine(extra=3, output_dir=str(tmp_path), use_cpu=True, bf16=False)).extra == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"packing": False, "tokens_per_batch": 64, "overlong": "split"},
            "without packing=True .*_batch=64, overlong='sp",
        ),
        (
            {"fused_layers": False, "fused_layers_exclude": ["swiglu"]},
            "without fused_layers=True .*fused_layers_exclude",
        ),
        ({"throughput": False, "peak_tflops": 989.0}, "without throughput=True .*peak_tflops=989.0"),
        (
            {"activation_checkpointing": False, "activation_offloading_layers": "auto"},
            "without activation_checkpointing=True .*offloading_layers='auto'",
        ),
        ({"fsdp_prefetch_layers": 2}, "without fsdp=True .*fsdp_prefetch_layers=2"),
        ({"fsdp_config": {"version": 2}}, "without fsdp=True .*fsdp_config="),
        ({"eval_steps": 5, "do_eval": True}, "without eval_strategy=.steps. .*do_eval=True, eval_steps=5"),
        ({"hub_model_id": "me/it"}, "without push_to_hub=True .*hub_model_id='me/it'"),
        ({"liger_kernel_config": {"rope": True}}, "without use_liger_kernel=True .*liger_kernel_config"),
        ({"optim_args": "beta1=0.8"}, "without an optim other than AdamW .*optim_args='beta1=0.8'"),
        (
            {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"power": 2}},
            "without a schedule other than constant .*lr_scheduler_kwargs={'power': 2}",
        ),
        ({"optim_target_modules": "all-linear"}, "without optim=.galore_adamw. .*optim_target_modules"),
        (
            {"tokens_per_batch": 64, "per_device_train_batch_size": 4},
            "batch_size=4 does nothing beside tokens_per_batch=64",
        ),
        ({"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=true"}, None),
        ({"packing": False, "packing_strategy": "bfd"}, None),
        ({"tokens_per_batch": 64, "per_device_train_batch_size": 8}, None),
    ],
    ids=[
        "packing",
        "layers",
        "throughput",
        "checkpointing",
        "fsdp",
        "fsdp_config",
        "evaluation",
        "hub",
        "liger",
        "optim_args",
        "schedule",
        "galore",
        "batch",
        "8 bits",
        "TRL's strategy",
        "TRL's batch",
    ],
)
def test_settings_that_do_nothing_beside_another_are_said(tmp_path, caplog, given, said):
    config(tmp_path, **given)
    assert re.search(said, caplog.text) if said else not caplog.text


@pytest.mark.parametrize(("warmup", "steps", "said"), [(10, 5, True), (10, 10, True), (4, 5, False), (0.5, 1, False)])
def test_a_warmup_that_outlasts_the_run_is_said(tmp_path, caplog, warmup, steps, said):
    warn_of_long_warmup(config(tmp_path, warmup_steps=warmup), steps)
    assert ("is all of this run" in caplog.text) is said
    assert ("last step has a learning rate of 8e-06, not 2e-05" in caplog.text) is ((warmup, steps) == (10, 5))


def test_v22_padding_free_without_packing_is_stopped_with_both_fixes_where_a_length_is_set(tmp_path):
    both = r"(?s)max_length=512 would not.*packing=True.*max_length=None"
    with pytest.raises(ConfigurationError, match=both):
        config(tmp_path, padding_free=True, packing=False, max_length=512)
    plain = SFTConfig(str(tmp_path), padding_free=True, max_length=512, use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ConfigurationError, match=both):
        SpeedSFTTrainer("no/model", plain, train_dataset=tokenized([5]))


@pytest.mark.parametrize("rows", [{}, {"packing": False, "padding_free": True, "max_length": None}])
def test_images_cannot_share_rows(tmp_path, rows):
    pictures = Dataset.from_dict({"messages": [[{"role": "user", "content": "a"}]], "images": [["a.png"]]})
    with pytest.raises(ConfigurationError, match="the train dataset holds images"):
        SpeedSFTTrainer("no/model", config(tmp_path, **rows), train_dataset=pictures)


@pytest.mark.parametrize(("max_length", "said"), [(512, True), (None, False), (8192, False)])
def test_v17_a_length_that_cuts_nothing_is_named(tmp_path, caplog, max_length, said):
    config(tmp_path, tokens_per_batch=8192, max_length=max_length)
    config(tmp_path, tokens_per_batch=8192)
    assert ("max_length=512 cuts nothing" in caplog.text) is said


def test_v22_padding_free_beside_packing_names_the_fix(tmp_path):
    with pytest.raises(ConfigurationError, match="leave padding_free unset"):
        config(tmp_path, padding_free=True, max_length=512)


@pytest.mark.parametrize(
    ("strategy", "ours", "overlong"),
    [("bfd", "best_fit_decreasing", "error"), ("bfd_split", "best_fit_decreasing", "split")],
)
def test_trl_strategies_are_understood(tmp_path, strategy, ours, overlong):
    made = config(tmp_path, packing_strategy=strategy)
    assert (made.packing_strategy, made.overlong) == (ours, overlong)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("packing", [True, False])
def test_an_sft_config_is_taken_over_as_its_user_wrote_it(tmp_path, packing):
    theirs = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, packing=packing, max_length=256,
        per_device_train_batch_size=2, learning_rate=3e-4, gradient_checkpointing=False, hub_token="t0ken",
    )  # fmt: skip
    ours = SpeedSFTConfig.from_sft_config(theirs)
    assert (ours.packing, ours.learning_rate, ours.activation_checkpointing) == (packing, 3e-4, False)
    assert ours.hub_token == "t0ken"
    assert (ours.tokens_per_batch, ours.max_length) == ((512, None) if packing else (None, 256))


@pytest.mark.parametrize(("word", "meant"), [("false", False), ("False", False), ("true", True)])
def test_fsdp_can_be_turned_on_and_off_on_the_command_line(tmp_path, monkeypatch, word, meant):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # TrainingArguments write it: put back afterwards
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, tokens_per_batch=32, fsdp=word)
    assert args.fsdp is meant
