"""The launch configs, read by accelerate's own launcher code, and what they make of FSDP2."""

import argparse
import os
from pathlib import Path

import pytest
import qwen27b_sft as recipe
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "accelerate_configs"
REAL = ROOT / "recipes" / "qwen27b_sft.yaml"
TINY = ROOT / "recipes" / "tiny_sft.yaml"
# What decides memory and speed of a sharded run.
FIELDS = ("fsdp_version", "reshard_after_forward", "auto_wrap_policy", "transformer_cls_names_to_wrap",
          "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing", "cpu_offload",
          "mixed_precision_policy")  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The launcher's environment for a config file, put in place, with its parsed arguments."""

    def launch(name, *options):
        for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
            monkeypatch.delenv(key)
        # As the second machine, if there are two: the first would look whether its port is free.
        words = ["--config_file", str(CONFIGS / name), "--machine_rank", "1" if "multinode" in name else "0"]
        given = launch_command_parser().parse_args([*words, *options, "script.py"])
        assert isinstance(given, argparse.Namespace)
        given, _, _ = _validate_launch_command(given)
        many = given.use_fsdp or given.multi_gpu
        environment = prepare_multi_gpu_env(given) if many else prepare_simple_launcher_cmd_env(given)[1]
        for key, value in environment.items():
            if os.environ.get(key) != value:
                monkeypatch.setenv(key, value)
        return given, environment

    return launch


def test_every_config_is_looked_at_here():
    assert {path.name for path in CONFIGS.iterdir()} == {
        "cpu.yaml", "fsdp2.yaml", "fsdp2_multinode.yaml", "single_gpu.yaml",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fsdp2.yaml", "fsdp2_multinode.yaml"])
def test_the_launchers_plugin_is_the_one_the_recipe_makes(launched, monkeypatch, name):
    given, _ = launched(name)
    monkeypatch.setenv("WORLD_SIZE", str(given.num_processes))  # torchrun's part of it
    by_launcher = FullyShardedDataParallelPlugin()
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")  # the recipe's settings write it as well
    _, args, _ = recipe.parse(REAL, [])
    by_recipe = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    assert {f: getattr(by_launcher, f) for f in FIELDS} == {f: getattr(by_recipe, f) for f in FIELDS}


@pytest.mark.parametrize("name", ["fsdp2.yaml", "fsdp2_multinode.yaml"])
def test_a_sharded_run_wraps_the_decoder_layers_in_pure_bf16(launched, name):
    _, environment = launched(name)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap == ["Qwen3_5DecoderLayer"]  # autodetection raises for the text model
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading is True
    assert plugin.activation_checkpointing is False  # the Trainer's own is on: both would be refused
    assert str(plugin.state_dict_type) == "StateDictType.SHARDED_STATE_DICT"  # docs/checkpoints.md
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"  # "bf16" would keep fp32 weights, gradients and moments
    assert environment["ACCELERATE_USE_FSDP"] == "true"


def test_many_machines_hold_one_copy_each(launched):
    given, environment = launched("fsdp2_multinode.yaml", "--main_process_ip", "10.0.0.1")
    sizes = ParallelismConfig()
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (2, 8)
    assert sizes.total_size == given.num_processes == 16
    assert sizes.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]  # replicated between, sharded inside
    assert (given.nproc_per_node, given.nnodes, given.node_rank) == ("8", "2", 1)
    assert given.rdzv_endpoint == "10.0.0.1:29500"


def test_one_machine_shards_over_all_of_its_gpus(launched):
    given, environment = launched("fsdp2.yaml", "--num_processes", "4")
    assert given.num_processes == 4
    assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in environment


def test_a_single_gpu_runs_one_process_without_fsdp(launched):
    given, environment = launched("single_gpu.yaml")
    assert (given.use_fsdp, given.multi_gpu, given.num_processes) == (False, False, 1)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert environment["ACCELERATE_USE_CPU"] == "False"


def test_the_cpu_config_starts_two_processes_that_stay_on_the_cpu(launched):
    given, environment = launched("cpu.yaml")
    assert given.multi_gpu  # the launcher of many processes: MULTI_CPU would need MPI
    assert given.nproc_per_node == "2"
    # Not handed on by this launcher: the tiny job's own use_cpu is what keeps it off a GPU.
    assert "ACCELERATE_USE_CPU" not in environment
    assert recipe.take_settings(TINY, [])["use_cpu"] is True
    assert "ACCELERATE_USE_FSDP" not in environment


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_the_command_in_a_configs_comment_names_files_that_exist(path):
    text = path.read_text()
    assert isinstance(yaml.safe_load(text), dict)
    words = [w.strip("()") for line in text.splitlines() if line.startswith("#") for w in line[1:].split()]
    for word in words:
        if word.startswith(("recipes/", "accelerate_configs/")):
            assert (ROOT / word).exists(), word
