"""The table of GPUs."""

import re

import pytest

from hf_speedkit.core.devices import DEVICES, bandwidth_gb_per_s, find_device, peak_tflops


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 3350),
        ("NVIDIA H100 PCIe", 756.5, 2000),
        ("NVIDIA H100 NVL", 835.5, 3900),
        ("NVIDIA H200", 989.5, 4800),
        ("NVIDIA B200", 2250.0, 8000),
        ("NVIDIA GB200", 2500.0, 8000),
        ("NVIDIA B300 SXM6 AC", 2250.0, 8000),
        ("NVIDIA GB300", 2500.0, 8000),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2039),
        ("A100-SXM4-40GB", 312.0, 1555),
        ("NVIDIA L40S", 362.05, 864),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("NVIDIA GeForce RTX 5090", 209.5, 1792),
        ("NVIDIA GeForce RTX 3090", 71.0, 936),  # 142 is with fp16 accumulation
        ("NVIDIA RTX A6000", 154.8, 768),
        ("NVIDIA L40", 181.05, 864),
        ("NVIDIA RTX 6000 Ada Generation", 364.2, 960),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 1792),
        ("AMD Instinct MI300X", 1307.4, 5300),
    ],
)
def test_known_gpus_have_a_dense_peak(name, bf16, bandwidth):
    assert peak_tflops(name, "bfloat16") == bf16
    assert peak_tflops(name, "torch.bfloat16") == bf16
    assert bandwidth_gb_per_s(name) == bandwidth


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA A10G",
        "NVIDIA H20",
        "Tesla P100-PCIE-16GB",
        "",
    ],
)
def test_an_unknown_gpu_has_no_peak(name):
    assert find_device(name) is None
    assert peak_tflops(name, "bfloat16") is None
    assert bandwidth_gb_per_s(name) is None


def test_a_dtype_without_a_published_peak_has_none():
    assert peak_tflops("Tesla V100-SXM2-16GB", "bfloat16") is None
    assert peak_tflops("Tesla V100-SXM2-16GB", "float16") == 125.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float8") is None


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_row_has_a_source_and_sane_numbers(device):
    assert re.fullmatch(r"https://[^\s]+", device.source)
    # tf32 runs at half the rate of 16-bit formats on every tensor core; the sheets round to a few per mille.
    if "tf32" in device.tflops:
        assert device.tflops["tf32"] == pytest.approx(device.tflops["bfloat16"] / 2, rel=0.03)
    if "float8" in device.tflops:
        assert device.tflops["float8"] == pytest.approx(device.tflops["bfloat16"] * 2, rel=0.03)
    assert 100 < device.bandwidth_gb_per_s < 10_000
