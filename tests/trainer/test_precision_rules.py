"""Mixed precision that a machine cannot compute is told before anything is loaded; the machines here are fakes."""

import logging
from types import SimpleNamespace

import pytest
import torch
from support import tiny_tokenizer, tokenized
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, HardwareError
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.trainer.precision_rules import check_precision, refuse_half_weights

no_gpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without a GPU")


def job(device="cuda", **settings):
    given = {
        "bf16": False,
        "fp16": False,
        "kernel_assertion": "auto",
        "local_process_index": 0,
        "fsdp": False,
        "deepspeed": None,
    }
    return SimpleNamespace(device=torch.device(device), **{**given, **settings})


@no_gpu
@pytest.mark.parametrize("given", [{}, {"bf16": True}, {"bf16_full_eval": True, "bf16": False}], ids=str)
def test_a_machine_without_a_gpu_is_told_what_to_write(tmp_path, given):
    with pytest.raises(HardwareError, match="use_cpu=True trains on the CPU"):
        SpeedSFTConfig(output_dir=str(tmp_path), **given)


@no_gpu
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bf16": True}, "bf16=True on a CPU"),
        ({"fp16": True}, "fp16=True does nothing on a CPU"),
        ({"bf16": False}, ""),
    ],
    ids=["bf16", "fp16", "neither"],
)
def test_what_mixed_precision_does_on_a_cpu_is_one_line(tmp_path, caplog, given, said):
    SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, tokens_per_batch=32, **given)
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == bool(said)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("capability", "settings", "refused"),
    [((7, 0), {"bf16": True}, True), ((7, 5), {"bf16": True}, True), ((8, 0), {"bf16": True}, False),
     ((7, 5), {"fp16": True}, False), ((7, 5), {"bf16": True, "kernel_assertion": "warn"}, False)],
    ids=["V100", "T4", "A100", "T4 in fp16", "T4 all the same"],
)  # fmt: skip
def test_bf16_on_a_gpu_that_emulates_it_is_refused(monkeypatch, caplog, capability, settings, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla")
    if refused:
        with pytest.raises(HardwareError, match=r"no bf16 arithmetic(.|\n)*bf16=False, fp16=True"):
            check_precision(job(**settings))
        return
    check_precision(job(**settings))
    assert ("torch emulates it" in caplog.text) is ("kernel_assertion" in settings)


@pytest.mark.parametrize("dtype", ["float16", torch.float16, "torch.bfloat16"])
def test_a_loss_scaler_over_weights_of_16_bits_is_refused_with_the_dtype_to_load(dtype, caplog):
    with pytest.raises(ConfigurationError, match="dtype: float32"):
        refuse_half_weights(job(fp16=True), [torch.float32, dtype])
    refuse_half_weights(job(fp16=True), [torch.float32, "auto", None])
    refuse_half_weights(job(bf16=True), [dtype])
    refuse_half_weights(job(fp16=True, fsdp=True), [dtype])
    refuse_half_weights(job("cpu", fp16=True), [dtype])
    assert ("in float16, and nothing scales the loss" in caplog.text) is (dtype != "torch.bfloat16")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(580)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp16_trains_on_a_gpus_fast_kernels_and_says_where_it_cannot(tmp_path, dtype):
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, layer_types=["linear_attention"] * 3 + ["full_attention"], use_cache=False,
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config).to(dtype)
    args = SpeedSFTConfig(
        output_dir=str(tmp_path), fp16=True, tokens_per_batch=256, max_steps=12, logging_steps=1, learning_rate=1e-3,
        save_strategy="no", report_to="none", warmup_steps=0, lr_scheduler_type="constant",
    )  # fmt: skip
    made = {"args": args, "train_dataset": tokenized([40] * 64), "processing_class": tiny_tokenizer()}
    if dtype is torch.bfloat16:
        with pytest.raises(ConfigurationError, match="dtype: float32"):
            SpeedSFTTrainer(model, **made)
        return
    trainer = SpeedSFTTrainer(model, **made)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    assert {check.verdict for check in trainer.summary().kernels} == {KernelVerdict.FUSED}
