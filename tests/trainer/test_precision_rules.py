"""Mixed precision that a machine cannot compute is told before anything is loaded; the machines here are fakes."""

import logging
from types import SimpleNamespace

import pytest
import torch

from hf_speedkit import SpeedSFTConfig
from hf_speedkit.core.errors import ConfigurationError, HardwareError
from hf_speedkit.trainer.precision_rules import check_precision, refuse_half_weights

no_gpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without a GPU")


def job(device="cuda", **settings):
    given = {"bf16": False, "fp16": False, "kernel_assertion": "auto", "local_process_index": 0}
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


@pytest.mark.parametrize("dtype", ["float16", torch.float16, "torch.float16"])
def test_a_loss_scaler_over_fp16_weights_is_refused_with_the_dtype_to_load(dtype):
    with pytest.raises(ConfigurationError, match="dtype: float32"):
        refuse_half_weights(job(fp16=True), [torch.float32, dtype])
    refuse_half_weights(job(fp16=True), [torch.float32, "auto", None])
    refuse_half_weights(job(bf16=True), [dtype])
    refuse_half_weights(job("cpu", fp16=True), [dtype])
