"""Dense peak TFLOP/s and memory bandwidth of GPUs, one vendor source per row. An unknown GPU has no peak: no guess.

Peaks are dense (half of what NVIDIA's sheets show "with sparsity") with fp32 accumulation, the mode training uses: for
GeForce cards that is half of the headline. Names are matched whole, so that a MIG slice, a laptop chip or a cut-down
export variant does not inherit the peak of its larger sibling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_A100 = "https://www.nvidia.com/en-us/data-center/a100/"
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_BLACKWELL = "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703"
# NVIDIA's own table of peaks to measure against, half of each sparse figure. It takes 2,450 for GB200 and GB300, 2 %
# less than both data sheets (360 PFLOP/s of sparse bf16 for 72 GPUs: 2,500 dense), which hold here as they do for
# every other GPU. Bandwidth of both Blackwell Ultra:
# https://developer.nvidia.com/blog/inside-nvidia-blackwell-ultra-the-chip-powering-the-ai-factory-era
_NEMO_RL = (
    "https://github.com/NVIDIA-NeMo/RL/blob/a965f842571d2d2c46e9805fed53045ef9f0844e/nemo_rl/utils/flops_tracker.py"
)
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_RTX_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
# "NVIDIA H100 Tensor Core GPU Architecture", table 2: boost clock for tensor core operations 1,830 MHz (SXM5),
# 1,620 MHz (PCIe). It agrees with the peak: 132 SMs x 4,096 FLOP per clock x 1,830 MHz = 989.4 TFLOP/s.
_HOPPER_SXM_CLOCK, _HOPPER_PCIE_CLOCK = 1830.0, 1620.0
_INSTINCT = "https://www.amd.com/en/products/accelerators/instinct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of GPU.

    Args:
        name: a pattern for the whole name as the driver reports it.
        tflops: dense peak by dtype ("bfloat16", "float16", "tf32", "float32", "float8"); a dtype that is missing runs
            without tensor cores or is not published.
        bandwidth_gb_per_s: peak memory bandwidth, 10**9 bytes a second.
        source: where the numbers stand.
        tensor_clock_mhz: SM clock at which the tensor peaks are stated; None where the maker does not say.
    """

    name: str
    tflops: Mapping[str, float]
    bandwidth_gb_per_s: float
    source: str
    tensor_clock_mhz: float | None = None


def _tensor(half: float, tf32: float | None, float32: float, float8: float | None = None) -> dict[str, float]:
    peaks = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": float32, "float8": float8}
    return {dtype: peak for dtype, peak in peaks.items() if peak is not None}


_HOPPER_SXM = _tensor(989.5, 494.7, 67.0, 1979.0)
_HOPPER_NVL = _tensor(835.5, 417.5, 60.0, 1670.5)
_AMPERE = _tensor(312.0, 156.0, 19.5)
_CDNA3 = _tensor(1307.4, 653.7, 163.4, 2614.9)

DEVICES: tuple[Device, ...] = (
    Device(
        name=r"NVIDIA H100 80GB HBM3",
        tflops=_HOPPER_SXM,
        bandwidth_gb_per_s=3350,
        source=_H100,
        tensor_clock_mhz=_HOPPER_SXM_CLOCK,
    ),
    Device(name=r"NVIDIA H100 NVL", tflops=_HOPPER_NVL, bandwidth_gb_per_s=3900, source=_H100),
    Device(
        name=r"NVIDIA H100 PCIe",
        tflops=_tensor(756.5, 378.0, 51.0, 1513.0),
        bandwidth_gb_per_s=2000,
        source="https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306",
        tensor_clock_mhz=_HOPPER_PCIE_CLOCK,
    ),
    Device(
        name=r"NVIDIA H200",
        tflops=_HOPPER_SXM,
        bandwidth_gb_per_s=4800,
        source=_H200,
        tensor_clock_mhz=_HOPPER_SXM_CLOCK,
    ),
    Device(name=r"NVIDIA H200 NVL", tflops=_HOPPER_NVL, bandwidth_gb_per_s=4800, source=_H200),
    Device(
        name=r"NVIDIA GH200 480GB",
        tflops=_HOPPER_SXM,
        bandwidth_gb_per_s=4000,
        source="https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/",
        tensor_clock_mhz=_HOPPER_SXM_CLOCK,
    ),
    Device(
        name=r"NVIDIA B200", tflops=_tensor(2250.0, 1100.0, 80.0, 4500.0), bandwidth_gb_per_s=8000, source=_BLACKWELL
    ),
    Device(
        name=r"NVIDIA GB200",
        tflops=_tensor(2500.0, 1250.0, 80.0, 5000.0),
        bandwidth_gb_per_s=8000,
        source="https://www.nvidia.com/en-us/data-center/gb200-nvl72/",
    ),
    Device(
        name=r"NVIDIA B300( SXM6 AC)?",
        tflops=_tensor(2250.0, 1100.0, 80.0),
        bandwidth_gb_per_s=8000,
        source=_NEMO_RL,
    ),
    Device(
        name=r"NVIDIA GB300",
        tflops=_tensor(2500.0, 1250.0, 80.0),
        bandwidth_gb_per_s=8000,
        source="https://www.nvidia.com/en-us/data-center/gb300-nvl72/",
    ),
    Device(name=r"(NVIDIA )?A100-(SXM4|PCIE)-40GB", tflops=_AMPERE, bandwidth_gb_per_s=1555, source=_A100),
    Device(name=r"(NVIDIA )?A100-SXM4-80GB", tflops=_AMPERE, bandwidth_gb_per_s=2039, source=_A100),
    Device(name=r"NVIDIA A100 80GB PCIe", tflops=_AMPERE, bandwidth_gb_per_s=1935, source=_A100),
    Device(
        name=r"NVIDIA A40",
        tflops=_tensor(149.7, 74.8, 37.4),
        bandwidth_gb_per_s=696,
        source="https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf",
    ),
    Device(
        name=r"NVIDIA A10",
        tflops=_tensor(125.0, 62.5, 31.2),
        bandwidth_gb_per_s=600,
        source="https://www.nvidia.com/en-us/data-center/products/a10-gpu/",
    ),
    Device(
        name=r"NVIDIA A30",
        tflops=_tensor(165.0, 82.0, 10.3),
        bandwidth_gb_per_s=933,
        source="https://www.nvidia.com/en-us/data-center/products/a30-gpu/",
    ),
    Device(name=r"NVIDIA RTX A6000", tflops=_tensor(154.8, 77.4, 38.7), bandwidth_gb_per_s=768, source=_GA102),
    Device(name=r"NVIDIA GeForce RTX 3090", tflops=_tensor(71.0, 35.6, 35.6), bandwidth_gb_per_s=936, source=_GA102),
    Device(
        name=r"NVIDIA L40",
        tflops=_tensor(181.05, 90.5, 90.5, 362.0),
        bandwidth_gb_per_s=864,
        source="https://www.nvidia.com/en-us/data-center/l40/",
    ),
    Device(
        name=r"NVIDIA RTX 6000 Ada Generation",
        tflops=_tensor(364.2, 182.1, 91.1, 728.5),
        bandwidth_gb_per_s=960,
        source="https://images.nvidia.com/aem-dam/en-zz/Solutions/technologies/"
        "NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf",
    ),
    Device(
        name=r"NVIDIA L40S",
        tflops=_tensor(362.05, 183.0, 91.6, 733.0),
        bandwidth_gb_per_s=864,
        source="https://www.nvidia.com/en-us/data-center/l40s/",
    ),
    Device(
        name=r"NVIDIA L4",
        tflops=_tensor(121.0, 60.0, 30.3, 242.5),
        bandwidth_gb_per_s=300,
        source="https://www.nvidia.com/en-us/data-center/l4/",
    ),
    Device(
        name=r"NVIDIA GeForce RTX 4090",
        tflops=_tensor(165.2, 82.6, 82.6, 330.3),
        bandwidth_gb_per_s=1008,
        source=_ADA,
    ),
    Device(
        name=r"NVIDIA GeForce RTX 5090",
        tflops=_tensor(209.5, 104.8, 104.8, 419.0),
        bandwidth_gb_per_s=1792,
        source=_RTX_BLACKWELL,
    ),
    Device(
        name=r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        tflops=_tensor(503.8, 251.9, 126.0, 1007.6),
        bandwidth_gb_per_s=1792,
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
        "NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf",
    ),
    Device(
        name=r"Tesla V100-SXM2-(16|32)GB",
        tflops={"float16": 125.0, "float32": 15.7},
        bandwidth_gb_per_s=900,
        source="https://images.nvidia.com/content/technologies/volta/pdf/tesla-volta-v100-datasheet-letter-fnl-web.pdf",
    ),
    Device(
        name=r"Tesla T4",
        tflops={"float16": 65.0, "float32": 8.1},
        bandwidth_gb_per_s=320,
        source="https://www.nvidia.com/en-us/data-center/tesla-t4/",
    ),
    Device(
        name=r"AMD Instinct MI300X( .*)?",
        tflops=_CDNA3,
        bandwidth_gb_per_s=5300,
        source=f"{_INSTINCT}/mi300/mi300x.html",
    ),
    Device(
        name=r"AMD Instinct MI325X( .*)?",
        tflops=_CDNA3,
        bandwidth_gb_per_s=6000,
        source=f"{_INSTINCT}/mi300/mi325x.html",
    ),
)


def find_device(name: str) -> Device | None:
    """The row of a GPU by the name its driver gives it; None for one that is not in the table."""
    matches = [device for device in DEVICES if re.fullmatch(device.name, name.strip())]
    return matches[0] if matches else None


def peak_tflops(name: str, dtype: str) -> float | None:
    """Dense peak TFLOP/s of one GPU.

    Args:
        name: the device's name, for example "NVIDIA H200".
        dtype: "bfloat16", "float16", "tf32", "float32" or "float8"; a "torch." before it is understood.

    Returns:
        None where the GPU or the dtype is not in the table: then there is no MFU.
    """
    device = find_device(name)
    return None if device is None else device.tflops.get(dtype.removeprefix("torch."))


def tensor_clock_mhz(name: str) -> float | None:
    """SM clock at which the tensor peaks of one GPU are stated; None where that is not in the table."""
    device = find_device(name)
    return None if device is None else device.tensor_clock_mhz


def bandwidth_gb_per_s(name: str) -> float | None:
    """Peak memory bandwidth of one GPU in 10**9 bytes a second; None where it is not in the table."""
    device = find_device(name)
    return None if device is None else device.bandwidth_gb_per_s


_CAPABILITIES: Mapping[str, tuple[int, int]] = {
    "v100": (7, 0),
    "t4": (7, 5),
    "a100": (8, 0),
    "a800": (8, 0),
    "a30": (8, 0),
    "a10": (8, 6),
    "a40": (8, 6),
    "rtx3090": (8, 6),
    "l4": (8, 9),
    "l40": (8, 9),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "gh200": (9, 0),
    "h100": (9, 0),
    "h200": (9, 0),
    "h800": (9, 0),
    "h20": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "b300": (10, 3),
    "gb300": (10, 3),
    "rtx5090": (12, 0),
}  # https://developer.nvidia.com/cuda-gpus; A800, H800 and H20 are the chips of A100 and H100 with parts switched off

SHORT_NAMES = tuple(_CAPABILITIES)
"""GPUs that `compute_capability` knows."""


def compute_capability(name: str) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU by the name people use; None for one that is not in the table.

    Args:
        name: "h200", "H100 SXM", "NVIDIA A100-SXM4-80GB", "RTX 4090".
    """
    words = re.split(r"[\s_-]+", name.lower().strip().removeprefix("nvidia").replace("geforce", ""))
    words = [word for word in words if word]
    joined = "".join(words[:2]) if words[:1] == ["rtx"] else "".join(words[:1])
    return _CAPABILITIES.get(joined)
