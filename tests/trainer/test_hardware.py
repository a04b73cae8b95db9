"""The check of the machine before anything heavy (trainer/hardware.py)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from hf_speedkit.core.errors import ConfigurationError, HardwareError
from hf_speedkit.trainer import hardware
from hf_speedkit.trainer.hardware import find_missing_hardware, launched_here, launched_processes, require_hardware

TINY = "accelerate launch recipes/qwen27b_sft.py --config recipes/tiny_sft.yaml"
JOB = {"expected_parameters": "26.9e9", "dtype": "bfloat16", "bf16": False, "fsdp": True}


@dataclass(frozen=True)
class FakeGpu:
    name: str
    memory_gib: float


H200 = FakeGpu("NVIDIA H200", 139.8)
H100 = FakeGpu("NVIDIA H100 80GB HBM3", 79.6)


def find(settings, *gpus, processes=1, local=None) -> HardwareError | None:
    return find_missing_hardware(
        settings, gpus=gpus, world_size=processes, local_world_size=local or processes, command=TINY
    )


def test_no_gpu_is_said_with_what_the_job_needs_and_the_tiny_command_last():
    error = find(JOB)
    assert "needs an NVIDIA GPU" in error.what
    assert "200.4 GiB" in str(error)
    assert "3 GPUs of 80 GiB" in str(error)
    assert "Mend it:" in str(error)
    assert str(error).endswith(TINY)


def test_no_gpu_is_said_without_a_known_model_size_too():
    assert "needs an NVIDIA GPU" in find({"fsdp": True}).what


@pytest.mark.parametrize("on", [True, "true", "True", "1"])
def test_a_job_for_the_cpu_needs_no_gpu(on):
    assert find({"use_cpu": on, "bf16": False}) is None


@pytest.mark.parametrize("off", [False, "false", None, "no", ""])
def test_a_job_not_for_the_cpu_needs_one(off):
    assert find({"use_cpu": off}) is not None


def test_with_hybrid_sharding_one_host_has_to_hold_a_copy():
    hosts = {"processes": 8, "local": 2}
    assert find(JOB, H100, H100, **hosts) is None  # 8 x 80 GB together
    error = find({**JOB, "hybrid_sharding": True}, H100, H100, **hosts)
    assert "2 used: 159 GiB" in str(error)
    assert "hybrid_sharding: false" in str(error)
    assert find({**JOB, "hybrid_sharding": True}, *[H100] * 4, processes=8, local=4) is None


def test_enough_gpus_pass():
    assert find(JOB, H200, H200, processes=2) is None
    assert find(JOB, *[H100] * 4, processes=4) is None


def test_gpus_too_small_are_named_with_the_number_that_would_do():
    error = find(JOB, H100, H100, processes=2)
    assert "too small" in error.what
    assert "2 x NVIDIA H100 80GB HBM3 (80 GiB)" in str(error)
    assert "200.4 GiB of GPU memory (weights 50.1 + gradients 50.1 + optimizer 100.2)" in str(error)
    assert "use 3 or more such GPUs" in error.mend
    assert str(error).endswith(TINY)


def test_only_the_gpus_in_use_count():
    assert find(JOB, *[H100] * 4, processes=2, local=2) is not None


def test_gpus_of_other_hosts_count_as_like_those_here():
    assert find(JOB, H100, H100, processes=4, local=2) is None


def test_one_process_on_a_machine_with_enough_gpus_lacks_processes_not_memory():
    error = find(JOB, H200, H200)
    assert "only one process" in error.what
    assert "--num_processes 2" in error.mend
    assert str(error).endswith(TINY)


def test_fsdp_with_one_process_is_refused_on_a_single_gpu_and_on_a_cpu():
    small = {**JOB, "expected_parameters": 1e6}
    assert "only one process" in find(small, H200).what
    assert "fsdp: false" in find(small, H200).mend
    assert "only one process" in find({"use_cpu": True, "fsdp": "full_shard"}).what
    assert find({**small, "fsdp": False}, H200) is None


def test_more_processes_than_gpus_are_refused():
    error = find(JOB, H200, H200, processes=8, local=8)
    assert "8 processes" in error.what
    assert "--num_processes 2" in error.mend
    assert find({**JOB, "use_cpu": True}, H200, processes=8, local=8) is None


def test_without_fsdp_each_gpu_must_hold_all_of_it():
    settings = {**JOB, "fsdp": False}
    error = find(settings, *[H200] * 8, processes=8)
    assert "without FSDP every GPU holds all of it" in str(error)
    assert "fsdp: true" in error.mend
    assert find({**settings, "expected_parameters": 5.6e9}, *[H200] * 8, processes=8) is None


@pytest.mark.parametrize(
    ("change", "needed_gib"),
    [
        ({}, "200.4"),
        ({"dtype": None, "torch_dtype": "torch.bfloat16"}, "200.4"),
        ({"dtype": None, "model_init_kwargs": {"dtype": "bfloat16"}}, "200.4"),
        ({"dtype": "float32"}, "400.8"),
        ({"dtype": None}, "400.8"),  # TRL loads fp32 unless told otherwise
        ({"bf16": True}, "400.8"),  # accelerate upcasts under FSDP with mixed precision
        ({"bf16": None}, "400.8"),  # TRL turns bf16 on
        ({"bf16": "false"}, "200.4"),
        ({"optim": "adamw_8bit"}, "150.3"),
        ({"optim": "galore_adamw"}, "50.1"),  # unknown moments: weights only, a lower bound
        ({"use_peft": True}, "50.1"),
        ({"use_peft": "true", "load_in_4bit": True}, "12.5"),
        ({"use_peft": True, "load_in_8bit": True}, "25.1"),
        ({"expected_parameters": 26_900_000_000}, "200.4"),
    ],
    ids=str,
)
def test_the_need_follows_the_settings(change, needed_gib):
    tiny_gpu = FakeGpu("tiny", 1.0)
    assert f"{needed_gib} GiB of GPU memory" in str(find({**JOB, **change}, tiny_gpu, tiny_gpu, processes=2))


@pytest.mark.parametrize(
    "change",
    [
        {"expected_parameters": None},
        {"deepspeed": "zero3.json"},
        {"fsdp_config": {"cpu_offload": True}},
        {"fsdp": "full_shard offload"},
    ],
    ids=str,
)
def test_memory_is_not_judged_where_nothing_certain_is_known(change):
    assert find({**JOB, **change}, H100, H100, processes=2) is None


@pytest.mark.parametrize("value", ["many", "nan", -1, 0])
def test_a_model_size_that_is_no_number_is_refused(value):
    with pytest.raises(ConfigurationError, match="expected_parameters"):
        find({**JOB, "expected_parameters": value}, H200)


@pytest.mark.parametrize("parameters", ["26.9e9", None])
@pytest.mark.parametrize("dtype", ["bfloat61", "bf16"])  # of the second transformers 5.23 makes an AttributeError
def test_an_unknown_precision_is_refused_by_its_name(dtype, parameters):
    with pytest.raises(ConfigurationError, match=f"dtype='{dtype}'.*\n.*bfloat16, float16, float32"):
        find({**JOB, "dtype": dtype, "expected_parameters": parameters}, H200)


def test_the_environment_of_the_launcher_is_read(monkeypatch):
    from hf_speedkit.measure import environment

    monkeypatch.setattr(environment, "visible_gpus", lambda: (H200, H200))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    require_hardware(JOB, command=TINY)
    require_hardware(JOB, command=TINY, world_size=2)
    with pytest.raises(HardwareError, match="only one process"):
        require_hardware(JOB, command=TINY, world_size=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(HardwareError, match="3 processes"):
        require_hardware(JOB, command=TINY)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "three")
    with pytest.raises(ConfigurationError, match="LOCAL_WORLD_SIZE='three'"):
        require_hardware(JOB, command=TINY)


def test_processes_on_this_host_are_those_of_the_launcher_or_of_mpi():
    assert launched_here({}) == launched_processes({}) == 1
    mpi = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert launched_here(mpi) == 4
    assert launched_here({**mpi, "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}) == 8
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE='0'.*\n.*unset WORLD_SIZE"):
        launched_processes({"WORLD_SIZE": "0"})


def test_the_check_imports_nothing_heavy():
    program = (
        "import sys\n"
        "from hf_speedkit.trainer.hardware import require_hardware\n"
        "try:\n    require_hardware({'fsdp': True}, command='x')\n"
        "except RuntimeError:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'trl', 'accelerate', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_name_the_recipe_imports_is_here():
    assert hardware.exit_with.__module__ == "hf_speedkit.trainer.ranks.last_words"
