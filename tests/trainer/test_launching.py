"""What is told to accelerate through the environment, for launchers that do not."""

from types import SimpleNamespace

import pytest

from hf_speedkit.core.errors import ConfigurationError, HardwareError
from hf_speedkit.trainer.launching import (
    announce_ranks,
    announce_sharding,
    refuse_lost_fp8,
    refuse_optimizer,
    refuse_split_model,
    refuse_split_recurrence,
    refuse_split_rows,
    warn_of_first_fsdp,
)

JOB = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
TWO_HOSTS = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


def announced(job, environment):
    before = dict(environment)
    announce_sharding(job, environment)
    return {key: value for key, value in environment.items() if before.get(key) != value}


def test_a_sharded_job_says_so_before_the_process_group_stands():
    said = announced(JOB, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert said == {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }  # fmt: skip
    offloaded = {**JOB, "fsdp_config": {"cpu_offload": True}}  # its clipping needs gloo beside NCCL
    assert announced(offloaded, dict(TWO_HOSTS))["FSDP_OFFLOAD_PARAMS"] == "true"


@pytest.mark.parametrize(
    ("job", "environment"),
    [
        (JOB, {}),  # one process
        ({**JOB, "fsdp": "false"}, TWO_HOSTS),  # as the command line gives it
        ({**JOB, "use_cpu": True}, TWO_HOSTS),
        ({}, TWO_HOSTS),
    ],
)
def test_nothing_is_said_for_a_job_that_is_not_sharded(job, environment):
    assert announced(job, dict(environment)) == {}


def test_what_the_launcher_said_is_kept():
    launcher = {**TWO_HOSTS, "ACCELERATE_USE_FSDP": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
                "FSDP_VERSION": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4"}  # fmt: skip
    assert announced({**JOB, "hybrid_sharding": True}, launcher) == {}


def test_hybrid_sharding_puts_one_copy_on_every_host():
    said = announced({**JOB, "hybrid_sharding": True}, dict(TWO_HOSTS))
    assert said["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert (said["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"], said["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == ("2", "8")


def test_hybrid_sharding_needs_something_to_shard():
    with pytest.raises(ConfigurationError, match="hybrid_sharding without fsdp"):
        announce_sharding({"hybrid_sharding": True}, dict(TWO_HOSTS))


def test_hosts_of_different_size_are_refused():
    with pytest.raises(ConfigurationError, match="the hosts differ in size"):
        announce_sharding({**JOB, "hybrid_sharding": True}, {"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8"})


@pytest.mark.parametrize("local", [{}, {"LOCAL_WORLD_SIZE": "1"}], ids=["not said", "one"])
def test_hybrid_sharding_over_hosts_of_one_process_is_refused_since_nothing_would_be_sharded(local):
    """srun without torchrun sets no LOCAL_WORLD_SIZE: every GPU would have held all of a 27B."""
    with pytest.raises(ConfigurationError, match="every GPU would hold the whole model") as refused:
        announce_sharding({**JOB, "hybrid_sharding": True}, {"WORLD_SIZE": "16", **local})
    assert "torchrun" in str(refused.value)


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "tp_size"])
def test_v05_rows_that_the_launcher_would_split_are_refused(name):
    launched = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", f"PARALLELISM_CONFIG_{name.upper()}": "2"}
    with pytest.raises(ConfigurationError, match=f"{name}=2"):
        refuse_split_rows(None, launched)
    refuse_split_rows(None, {**launched, "ACCELERATE_USE_PARALLELISM_CONFIG": "false"})
    refuse_split_rows(None, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"})


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_v05_rows_of_recurrent_layers_are_not_cut_without_packing_either(tmp_path, name):
    from accelerate import ParallelismConfig
    from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized

    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    split = ParallelismConfig(**{name: 2})
    args = SpeedSFTConfig(str(tmp_path), use_cpu=True, bf16=False, packing=False, parallelism_config=split)
    with pytest.raises(ConfigurationError, match=rf"(?s)Qwen3_5GatedDeltaNet layers.*{name}=2"):
        SpeedSFTTrainer(tiny_hybrid(), args, train_dataset=tokenized([5]), processing_class=tiny_tokenizer())
    refuse_split_recurrence(tiny_llama().config, split)
    refuse_split_recurrence(tiny_hybrid().config, ParallelismConfig(tp_size=2))  # every rank sees the whole row


@pytest.mark.parametrize(
    ("model", "loading"),
    [(SimpleNamespace(_tp_size=2), None), ("org/model", {"tp_plan": "auto"}), ("org/model", {"distributed_config": 1})],
    ids=["loaded so", "plan", "distributed_config"],
)
def test_v05_a_model_that_is_spread_by_tensor_parallelism_gets_no_packed_rows(model, loading):
    with pytest.raises(ConfigurationError, match="tensor parallelism"):
        refuse_split_model(model, loading)
    refuse_split_model(SimpleNamespace(_tp_size=None), {"dtype": "bfloat16"})


def test_fp8_that_the_settings_turned_into_bf16_is_refused(monkeypatch, tmp_path):
    from hf_speedkit import SpeedSFTConfig

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigurationError, match="asked for fp8, and the job would train in bf16"):
        SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True)
    SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    refuse_lost_fp8(None, "bf16")
    refuse_lost_fp8("bf16", "bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
def test_v38_mixed_precision_that_only_the_launcher_asks_for_is_in_the_settings_and_the_plan(
    monkeypatch, tmp_path, caplog, precision
):
    """accelerate's own config files ask for bf16, and it then holds fp32 weights whatever `bf16: false` says."""
    from hf_speedkit import SpeedSFTConfig
    from hf_speedkit.trainer.hardware import require_hardware
    from hf_speedkit.trainer.memory.settings import setting_of

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, fsdp=True)
    mixed = precision != "no"
    assert (args.bf16, bool(args.fp16)) == (precision == "bf16", precision == "fp16")
    assert ("the launcher asks for" in caplog.text) is mixed
    planned = setting_of(args, lora=False, quantized=False, dtype="bfloat16")
    assert planned.name == ("fp32 master weights" if mixed else "pure bf16")
    job = {"expected_parameters": 26.9e9, "dtype": "bfloat16", "bf16": False, "fsdp": True}
    with pytest.raises(HardwareError, match=r"400\.8 GiB" if mixed else r"200\.4 GiB"):
        require_hardware(job, command="", world_size=2)


@pytest.mark.parametrize(
    ("optim", "said"),
    [("adamw_8bit", "bitsandbytes"), ("paged_lion_32bit", "bitsandbytes"), ("rmsprop_bnb", "bitsandbytes"),
     ("adafactor", "first step"), ("adagrad", "first checkpoint")],
)  # fmt: skip
def test_an_optimizer_that_cannot_update_shards_is_refused_before_anything_is_loaded(optim, said, tmp_path):
    from hf_speedkit import SpeedSFTConfig

    fsdp = {"fsdp": True, "fsdp_config": {"version": 2}}
    with pytest.raises(ConfigurationError, match=f"optim={optim} cannot update") as refused:
        SpeedSFTConfig(output_dir=str(tmp_path), optim=optim, bf16=False, **fsdp)
    assert said in str(refused.value)
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    with pytest.raises(ConfigurationError, match=f"optim={optim} cannot update"):
        refuse_optimizer(optim, None, launched)
    refuse_optimizer(optim, None, {})
    refuse_optimizer(optim, 1, launched)
    refuse_optimizer(optim, 0, launched)


@pytest.mark.parametrize(
    ("version", "launched", "said"),
    [
        (1, {}, True),
        (None, {"ACCELERATE_USE_FSDP": "true"}, True),  # accelerate's config file without fsdp_version
        (None, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, False),
        (2, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, False),  # the job's own settings go first
        (None, {}, False),
        (0, {"ACCELERATE_USE_FSDP": "true"}, False),
    ],
)
def test_fsdps_first_version_is_named_wherever_it_was_asked_for(caplog, version, launched, said):
    warn_of_first_fsdp(version, launched)
    assert ("FSDP version 1 was asked for" in caplog.text) is said


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "sgd", "rmsprop"])
def test_torchs_own_optimizers_update_shards(optim):
    refuse_optimizer(optim, 2, {})


RANK_1_OF_4 = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29999"}


def test_ranks_that_no_launcher_of_torchs_started_are_said_before_they_are_waited_for(caplog):
    announce_ranks({**RANK_1_OF_4, "TORCHELASTIC_RUN_ID": "none"})
    announce_ranks({})
    assert caplog.text == ""
    announce_ranks(RANK_1_OF_4)
    assert "waiting for 4 processes at 10.0.0.1:29999, as WORLD_SIZE=4 and RANK=1 in the environment say" in caplog.text
    assert "unset WORLD_SIZE RANK LOCAL_RANK" in caplog.text


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_ranks_that_cannot_meet_are_refused(missing):
    with pytest.raises(ConfigurationError, match=r"(?s)do not say where they meet.*unset WORLD_SIZE RANK LOCAL_RANK"):
        announce_ranks({key: value for key, value in RANK_1_OF_4.items() if key != missing})
