"""A job that cannot fit into its GPUs is refused from its settings, before a weight is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
import yaml
from geometry import qwen27b_config
from support import tiny_llama, tokenized
from trl import ModelConfig

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, HardwareError
from hf_speedkit.core.memory_choice import Fit
from hf_speedkit.core.memory_sizes import EIGHT_BIT_ADAMW, FP32_MASTER, LORA, PURE_BF16, QLORA
from hf_speedkit.kernels.memory_trace import TracedSizes
from hf_speedkit.measure import environment
from hf_speedkit.measure.environment import GpuInfo
from hf_speedkit.trainer.memory.check import bits_of, judge, require_memory, require_memory_of
from hf_speedkit.trainer.memory.settings import job_of, planned_job, setting_of

RECIPES = Path(__file__).parents[3] / "recipes"
H100 = GpuInfo(name="NVIDIA H100 80GB HBM3", memory_gib=79.6, compute_capability="9.0")
H200 = GpuInfo(name="NVIDIA H200", memory_gib=139.8, compute_capability="9.0")


@dataclass
class OnGpu(SpeedSFTConfig):
    """Settings of a process with a GPU."""

    @property
    def device(self):
        started = super().device  # asking for it starts accelerate's state
        return torch.device("cuda") if started.type == "cpu" else started


@dataclass
class Lora:
    """What is read of peft's LoraConfig."""

    r: int = 8
    target_modules: object = None


def settings(tmp_path, kind=SpeedSFTConfig, **changes):
    values = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "tokens_per_batch": 8192}
    values["model_init_kwargs"] = {"dtype": "bfloat16"}
    return kind(**{**values, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The 27B's configuration alone, without weights: whatever loads it fails."""
    folder = tmp_path_factory.mktemp("27b")
    qwen27b_config(64).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def gpus(monkeypatch):
    def show(*found):
        monkeypatch.setattr(environment, "visible_gpus", lambda: found)

    return show


SIZES = TracedSizes(qwen27b_config(64), 8192)  # traces nothing yet; one for all tests, each precision once


def plan(model, args, **changes):
    planned = planned_job(model, args, peft_config=None, weight_bits=16, dtype=None, revision=None)
    return replace(planned, job=replace(planned.job, **changes), sizes=SIZES)


def test_the_trainer_refuses_a_model_id_that_cannot_fit_before_it_loads_anything(tmp_path, model, gpus):
    gpus(H100)
    args = settings(tmp_path, OnGpu, kernel_assertion="off")  # a CPU has none to assert
    with pytest.raises(HardwareError) as caught:
        SpeedSFTTrainer(model=model, args=args, train_dataset=tokenized([5, 9, 7]))
    text = str(caught.value)
    assert "27B, a full fine-tune in pure bf16, does not fit on 1 x NVIDIA H100 80GB HBM3." in text
    assert "GiB per GPU, found 79.6 GiB" in text
    assert "highest in the" in text
    assert "fits:    4 x NVIDIA H100 80GB HBM3 with fsdp: true: " in text
    assert "fits:    use_peft: true, LoRA on 1 x NVIDIA H100 80GB HBM3: " in text
    assert "Mend it:  " in text
    assert text.endswith('memory_check="warn"')


@pytest.mark.parametrize("mode", ["warn", "off"])
def test_there_is_a_way_to_go_on(tmp_path, model, gpus, caplog, mode):
    gpus(H100)
    with caplog.at_level(logging.WARNING):
        choice = require_memory(model, settings(tmp_path, OnGpu, memory_check=mode))
    if mode == "off":
        assert choice is None
        assert not caplog.records
    else:
        assert choice.fit is Fit.TOO_BIG
        assert "does not fit" in caplog.text


def test_an_unknown_gpu_is_said_and_the_job_goes_on(tmp_path, model, gpus, caplog):
    gpus()
    with caplog.at_level(logging.INFO):
        assert require_memory(model, settings(tmp_path, OnGpu)) is None
    assert "NVML shows no GPU" in caplog.text


def test_a_cpu_is_not_asked(tmp_path, model, gpus):
    gpus(H100)
    assert require_memory(model, settings(tmp_path)) is None


def test_a_job_that_fits_is_planned_in_the_log(tmp_path, model, caplog):
    planned = plan(model, settings(tmp_path, fsdp=True), gpus=2, fsdp=True)
    with caplog.at_level(logging.INFO):
        choice = judge(planned, name=H200.name, memory_gib=H200.memory_gib, strict=True)
    assert choice.fit is Fit.FITS
    assert "27B full fine-tune, 2 x NVIDIA H200, pure bf16: 105 GiB per GPU, fits" in caplog.text


def test_v37_accumulation_that_keeps_whole_gradients_is_named_with_the_setting_that_ends_it(tmp_path, model):
    args = settings(tmp_path, fsdp=True, gradient_accumulation_steps=4)
    planned = plan(model, args, gpus=2, fsdp=True)
    with pytest.raises(HardwareError, match="sync_each_batch: true") as caught:
        judge(planned, name=H200.name, memory_gib=H200.memory_gib, strict=True)
    assert "sync_each_batch" in caught.value.mend
    synced = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    args = settings(tmp_path, fsdp=True, gradient_accumulation_steps=4, accelerator_config=synced)
    planned = plan(model, args, gpus=2, fsdp=True)
    assert judge(planned, name=H200.name, memory_gib=H200.memory_gib, strict=True).fit is Fit.FITS


def test_v38_the_fp32_upcast_is_named_with_what_it_costs_and_the_setting_without_it(tmp_path, model):
    planned = plan(model, settings(tmp_path, fsdp=True, bf16=True), gpus=2, fsdp=True)
    assert planned.setting == FP32_MASTER
    with pytest.raises(HardwareError, match="fp32 master weights") as caught:
        judge(planned, name=H200.name, memory_gib=H200.memory_gib, strict=True)
    assert "bf16: false with dtype: bfloat16" in caught.value.mend
    assert "8bit" not in str(caught.value), "FSDP2's shards are nothing that bitsandbytes can update"
    assert "fits:    4 x NVIDIA H200" in str(caught.value)


def test_checkpointing_that_is_off_is_turned_on_first(tmp_path, model):
    planned = plan(model, settings(tmp_path, fsdp=True, activation_checkpointing=False), gpus=2, fsdp=True)
    with pytest.raises(HardwareError) as caught:
        judge(planned, name=H200.name, memory_gib=H200.memory_gib, strict=True)
    assert caught.value.mend.startswith("activation_checkpointing: true")


def test_where_nothing_would_fit_shorter_rows_are_advised(tmp_path, model):
    with pytest.raises(HardwareError, match="shorter rows"):
        judge(plan(model, settings(tmp_path)), name="tiny", memory_gib=4.0, strict=True)


@pytest.mark.parametrize(
    ("changes", "lora", "quantized", "setting"),
    [
        ({}, False, False, PURE_BF16),
        ({"bf16": True}, False, False, PURE_BF16),  # without FSDP nothing is upcast
        ({"bf16": True, "fsdp": True}, False, False, FP32_MASTER),
        ({"bf16": True, "model_init_kwargs": None}, False, False, FP32_MASTER),  # TRL loads fp32 unless told otherwise
        ({"optim": "adamw_8bit"}, False, False, replace(EIGHT_BIT_ADAMW, moment_bytes=2.0)),
        ({"optim": "adamw_torch"}, False, False, replace(PURE_BF16, step_bytes=2)),
        ({}, True, False, LORA),
        ({}, True, True, QLORA),
        ({"model_init_kwargs": None}, False, False, "arithmetic is fp32"),
        ({"model_init_kwargs": None, "bf16": True}, True, False, "a frozen model in fp32 is not modelled"),
    ],
    ids=str,
)
def test_the_setting_follows_the_job(tmp_path, changes, lora, quantized, setting):
    assert setting_of(settings(tmp_path, **changes), lora=lora, quantized=quantized, dtype=None) == setting


def test_of_an_unknown_optimizer_no_moments_are_counted(tmp_path):
    assert (
        setting_of(settings(tmp_path, optim="galore_adamw"), lora=False, quantized=False, dtype=None).moment_bytes == 0
    )


def test_how_a_job_is_spread_out_is_read_from_its_settings(tmp_path, monkeypatch):
    config = tiny_llama().config  # two layers
    assert job_of(settings(tmp_path), config).unchecked == 0
    assert job_of(settings(tmp_path, activation_checkpointing=False), config).unchecked == 2
    assert job_of(settings(tmp_path, activation_checkpointing_layers="1"), config).unchecked == 1
    every = {"every_n_layers": 2}
    assert job_of(settings(tmp_path, activation_checkpointing_kwargs=every), config).every_n_layers == 2
    assert not job_of(settings(tmp_path, activation_checkpointing_kwargs={"use_reentrant": True}), config).zero_copy
    plain = job_of(settings(tmp_path), config)
    assert (plain.fsdp, plain.reshard, plain.shards, plain.head) == (False, True, None, "speedkit")
    assert plain.zero_copy
    kept = job_of(settings(tmp_path, fsdp=True, fsdp_config={"reshard_after_forward": False}, loss_head="trl"), config)
    assert (kept.fsdp, kept.reshard, kept.head) == (True, False, "trl")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8")
    assert job_of(settings(tmp_path), config).fsdp
    assert job_of(settings(tmp_path), config).shards == 8


@pytest.mark.parametrize(
    ("changes", "peft_config", "words"),
    [
        ({"packing": False}, None, "no fixed size"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, None, "host memory"),
        ({}, Lora(target_modules=".*_proj"), "not modelled"),
        ({}, object(), "not modelled"),
    ],
    ids=["unpacked", "cpu_offload", "target_pattern", "unknown_adapter"],
)
def test_what_cannot_be_planned_says_why(tmp_path, model, changes, peft_config, words):
    args = settings(tmp_path, **changes)
    planned = planned_job(model, args, peft_config=peft_config, weight_bits=16, dtype=None, revision=None)
    assert words in planned


def test_adapters_are_planned_with_their_rank_and_targets(tmp_path, model):
    lora = Lora(r=8, target_modules={"q_proj", "v_proj"})
    planned = planned_job(model, settings(tmp_path), peft_config=lora, weight_bits=16, dtype=None, revision=None)
    traced = planned.sizes(planned.setting, planned.job)
    # q 5120 -> 2 x 24 x 256, v 5120 -> 4 x 256, on 16 layers of full attention
    assert traced.trained == 16 * 8 * (5120 + 12_288 + 5120 + 1024)


def test_a_folder_without_a_configuration_is_left_to_the_loading(tmp_path):
    planned = planned_job(
        str(tmp_path), settings(tmp_path), peft_config=None, weight_bits=16, dtype=None, revision=None
    )
    assert "no configuration can be read" in planned


def test_a_word_that_is_no_choice_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="memory_check='maybe'"):
        settings(tmp_path, memory_check="maybe")


def test_a_recipes_model_settings_say_what_is_trained(tmp_path, model, gpus):
    gpus(H100)
    args = settings(tmp_path, OnGpu, memory_check="warn", model_init_kwargs=None)
    full = require_memory_of(ModelConfig(model_name_or_path=model, dtype="bfloat16"), args)
    lora = ModelConfig(
        model_name_or_path=model, dtype="bfloat16", use_peft=True, lora_target_modules=["q_proj", "v_proj"]
    )
    adapted = require_memory_of(lora, args)
    assert full.plan.setting == PURE_BF16
    assert full.fit is Fit.TOO_BIG
    assert adapted.plan.setting == LORA
    assert adapted.fit is not Fit.TOO_BIG


def test_the_27b_recipe_fits_on_two_h200s_as_it_is_written(tmp_path, model):
    job = yaml.safe_load((RECIPES / "qwen27b_sft.yaml").read_text())
    names = {field.name for field in fields(SpeedSFTConfig)}
    given = {key: value for key, value in job.items() if key in names}
    args = SpeedSFTConfig(**{**given, "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"})
    planned = planned_job(model, args, peft_config=None, weight_bits=16, dtype=job["dtype"], revision=None)
    planned = replace(planned, job=replace(planned.job, gpus=2), sizes=SIZES)
    assert judge(planned, name=H200.name, memory_gib=H200.memory_gib, strict=True).fit is Fit.FITS


def test_eight_bit_weights_are_not_taken_for_sixteen(tmp_path, model, gpus, caplog):
    gpus(H100)
    settings_of_model = ModelConfig(model_name_or_path=model, use_peft=True, load_in_8bit=True)
    with caplog.at_level(logging.INFO):
        assert require_memory_of(settings_of_model, settings(tmp_path, OnGpu)) is None
    assert "8-bit weights are not modelled" in caplog.text
    assert [bits_of(x) for x in (None, ModelConfig(load_in_4bit=True), settings_of_model)] == [16, 4, 8]
