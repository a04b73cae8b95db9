"""Bad values of accelerate's variables and of fsdp_config are told before accelerate answers with a KeyError."""

import os
import re
from types import SimpleNamespace

import pytest

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer import launcher_rules
from hf_speedkit.trainer.launcher_rules import check_fsdp_config, check_launcher
from hf_speedkit.trainer.launching import take_launchers_compilation
from hf_speedkit.trainer.optional_packages import require_deepspeed, require_packages

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
# What `accelerate launch` with accelerate_configs/fsdp2.yaml and its two-host sister leaves, as it spells it.
LAUNCHED = {
    **FSDP2, **MESH, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "WORLD_SIZE": "16",
    "ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_CPU_AFFINITY": "1",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_SHARDING_STRATEGY": "1",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "RANK": "3",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8", "PARALLELISM_CONFIG_CP_BACKEND": "torch", "LOCAL_RANK": "3",
}  # fmt: skip


def job(**settings):
    return SimpleNamespace(**{"fsdp": False, "fsdp_config": None, "gradient_accumulation_steps": 2, **settings})


def test_what_accelerate_itself_leaves_passes_without_a_word(caplog):
    check_launcher(job(), LAUNCHED)
    check_launcher(job(fsdp=True), {**FSDP2, "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"})
    check_launcher(job(), {})
    # Off is off in every reader; one process does not read the port, which Kubernetes writes for a service "master".
    check_launcher(
        job(), {"ACCELERATE_USE_FSDP": "0", "ACCELERATE_USE_DEEPSPEED": "no", "MASTER_PORT": "tcp://10.0.0.1:80"}
    )
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "value", "beside", "said"),
    [
        ("ACCELERATE_MIXED_PRECISION", "int7", {}, "no, fp16, bf16, fp8"),
        ("ACCELERATE_MIXED_PRECISION", "BF16", {}, "no, fp16, bf16, fp8"),
        ("ACCELERATE_USE_FSDP", "1", {}, "one of: true, false"),  # half on: see _TRUTH
        ("ACCELERATE_USE_DEEPSPEED", "maybe", {}, "one of: true, false"),
        ("ACCELERATE_USE_CPU", "maybe", {}, "true or false"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductr", {}, "inductor"),
        ("ACCELERATE_DYNAMO_MODE", "quick", {}, "max-autotune"),
        ("LOCAL_RANK", "x", {}, "a whole number from 0 up"),
        ("WORLD_SIZE", "0", {}, "a whole number from 1 up"),
        ("MASTER_PORT", "tcp://10.0.0.1:80", {"WORLD_SIZE": "2"}, "a whole number from 0 up"),
        ("FSDP_VERSION", "two", FSDP2, "one of: 1, 2"),
        ("FSDP_STATE_DICT_TYPE", "WHOLE", FSDP2, "FULL_STATE_DICT, SHARDED_STATE_DICT"),
        ("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD", FSDP2, "true or false"),
        ("FSDP_OFFLOAD_PARAMS", "none", FSDP2, "one of: true, false"),
        ("PARALLELISM_CONFIG_TP_SIZE", "x", MESH, "a whole number from 1 up"),
    ],
)
def test_a_variable_that_accelerate_cannot_take_is_named_with_what_it_may_be(name, value, beside, said):
    with pytest.raises(ConfigurationError, match=f"(?s){name}='{value}' in the env.*{said}.*unset {name}"):
        check_launcher(job(), {**beside, name: value})


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "loops of its own"),
        ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "nothing to offload"),
        ({**MESH, "WORLD_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"}, "for 8 processes, and there are 4"),
    ],
    ids=["megatron", "offload", "mesh"],
)
def test_what_cannot_work_together_is_refused(environment, said):
    with pytest.raises(ConfigurationError, match=said):
        check_launcher(job(), environment)


def test_the_words_are_those_of_the_installed_accelerate_and_transformers():
    import inspect

    from accelerate.utils import constants
    from transformers import TrainingArguments

    rules = {key: rule for _, key, rule in launcher_rules._FSDP if key}
    for key, words in (
        ("state_dict_type", constants.FSDP_STATE_DICT_TYPE),
        ("auto_wrap_policy", constants.FSDP_AUTO_WRAP_POLICY),
        ("backward_prefetch", constants.FSDP_BACKWARD_PREFETCH),
    ):
        assert all(map(rules[key][0], words))
    assert all(map(launcher_rules._STRATEGY[0], constants.FSDP_SHARDING_STRATEGY))
    read = inspect.getsource(TrainingArguments._process_fsdp_args)
    assert all(f'"{key}"' in read for key in (*rules, *launcher_rules._OTHER_KEYS))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"verson": 2}, "no key verson.*did you mean version"),
        ({"fsdp_offload_params": True}, "did you mean cpu_offload"),
        ({"version": 3}, "version: 3 cannot be used"),
        ({"state_dict_type": "WHOLE"}, "SHARDED_STATE_DICT"),
        ({"cpu_offload": "false"}, "without quotes"),  # transformers takes it for yes
        ({"min_num_params": 1e8}, "a whole number"),
        ({"reshard_after_forward": "FULL_SHARD"}, "true or false"),
        ("nowhere.json", "FileNotFoundError"),
        ("[1]", "no JSON file"),
    ],
    ids=str,
)
def test_a_key_of_fsdp_config_that_nothing_reads_or_that_cannot_be_used_is_named(given, said):
    with pytest.raises(ConfigurationError, match=f"(?s){said}"):
        check_fsdp_config(job(fsdp=True, fsdp_config=given))
    check_fsdp_config(job(fsdp=False, fsdp_config=given))


def test_what_the_recipe_and_transformers_own_spellings_say_passes(caplog):
    check_fsdp_config(
        job(fsdp="full_shard auto_wrap", fsdp_config={"fsdp_version": 1, "reshard_after_forward": "full_shard"})
    )
    check_fsdp_config(job(fsdp=True, fsdp_config='{"version": 2, "transformer_layer_cls_to_wrap": ["A"]}'))
    with pytest.raises(ConfigurationError, match="or fsdp: full_shard"):
        check_fsdp_config(job(fsdp="full_shart"))
    assert caplog.text == ""
    check_fsdp_config(job(fsdp=True, fsdp_config={"use_orig_params": True}))
    assert "FSDP2 does not read these keys of fsdp_config, which do nothing: use_orig_params" in caplog.text


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}, "does nothing: gradient_accumulation_steps=2 of the job's"),
        # accelerate launch --cpu --num_processes 2
        (
            {"ACCELERATE_USE_CPU": "True", "KMP_BLOCKTIME": "1", "MASTER_PORT": "29500", "MASTER_ADDR": "127.0.0.1"},
            "started this one alone.*accelerate_configs/cpu.yaml",
        ),
        ({"ACCELERATE_USE_CPU": "True", "KMP_BLOCKTIME": "1"}, None),
        ({"MASTER_PORT": "29500", "MASTER_ADDR": "10.0.0.1"}, None),
    ],
    ids=["accumulation", "one process on a CPU", "asked for one", "a shell's leftover"],
)
def test_what_a_launcher_asked_for_and_nobody_does_is_said(caplog, environment, said):
    check_launcher(job(), environment)
    assert re.search(said, caplog.text) if said else not caplog.text


def test_a_package_that_the_launcher_asks_for_is_named():
    with pytest.raises(ConfigurationError, match=r"ACCELERATE_USE_DEEPSPEED is set.*not installed"):
        require_deepspeed(job(deepspeed=None), {"ACCELERATE_USE_DEEPSPEED": "true"})
    require_deepspeed(job(deepspeed=None), {"ACCELERATE_USE_DEEPSPEED": "false"})
    args = job(report_to=[], optim="adamw_torch", use_liger_kernel=False, mixed_precision="fp8")
    with pytest.raises(ConfigurationError, match="asks for fp8, and the package 'transformer_engine'"):
        require_packages(args)


def test_compilation_that_only_the_launcher_asks_for_is_in_the_settings_and_said(tmp_path, caplog, monkeypatch):
    args = job(torch_compile=False, torch_compile_backend=None, local_process_index=0)
    take_launchers_compilation(args, {"ACCELERATE_DYNAMO_BACKEND": "NO"})
    assert (args.torch_compile, caplog.text) == (False, "")
    monkeypatch.setitem(os.environ, "ACCELERATE_DYNAMO_BACKEND", "EAGER")
    made = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert (made.torch_compile, made.torch_compile_backend) == (True, "eager")
    assert "ACCELERATE_DYNAMO_BACKEND=eager), so it is on although the settings say torch_compile=False" in caplog.text


def test_the_checks_are_those_of_every_config(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "int7")
    with pytest.raises(ConfigurationError, match="int7"):
        SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    with pytest.raises(ConfigurationError, match="no key verson"):
        SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, fsdp=True, fsdp_config={"verson": 2})


BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"load_best_model_at_end": True}, "there is no best model to load"),
        ({**BEST, "eval_strategy": "no"}, "there is no best model to load"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "no checkpoint would be written"),
        ({"save_strategy": "best", "eval_strategy": "steps"}, 'metric_for_best_model="loss"'),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "when the rate is to fall"),
        ({**BEST, "save_strategy": "epoch"}, 'save_strategy="steps" as well'),
        ({**BEST, "save_steps": 50, "eval_steps": 20}, "save_steps=20 or a multiple"),
        ({"dataloader_persistent_workers": True}, "dataloader_num_workers=2"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_num_workers=2"),
        ({"accelerator_config": {"split_batchs": True}}, "did you mean split_batches"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_without_the_one_that_it_needs_is_refused(given, said, tmp_path):
    with pytest.raises(ConfigurationError, match=f"(?s){said}"):
        SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)


@pytest.mark.parametrize(
    "given", [{"eval_strategy": "epoch"}, {"eval_on_start": True}], ids=lambda given: next(iter(given))
)
def test_an_evaluation_without_rows_is_refused_before_anything_is_loaded(given, tmp_path):
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    with pytest.raises(ConfigurationError, match=f"{next(iter(given))}=.*there is no eval_dataset"):
        SpeedSFTTrainer("no/model", args)


def test_settings_that_go_together_pass(tmp_path):
    for given in (
        BEST,
        {**BEST, "eval_steps": 0.1, "save_steps": 0.2},
        {**BEST, "save_steps": 40, "logging_steps": 20},
    ):
        SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
