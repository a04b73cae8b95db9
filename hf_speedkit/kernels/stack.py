"""The machine as the compatibility table wants it: versions, GPU, compiler. The only reader of either."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

from hf_speedkit.core.devices import SHORT_NAMES, compute_capability
from hf_speedkit.kernels.compatibility import Stack

DISTRIBUTIONS = (
    "apache-tvm-ffi",
    "causal-conv1d",
    "fla-core",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flash-linear-attention",
    "flash-qla",
    "kernels",
    "liger-kernel",
    "mamba-ssm",
    "tilelang",
    "torch",
    "transformers",
    "triton",
)
"""Every distribution that a row of the table names."""

# Nightly builds of torch and other platforms bring triton under another name.
_OTHER_NAMES = {"triton": ("pytorch-triton", "triton-windows", "pytorch-triton-rocm", "pytorch-triton-xpu")}


def read_stack(*, architecture: str | None = None) -> Stack:
    """Read versions from metadata, the GPU and its CUDA from torch, and look for nvcc.

    Imports torch and no kernel package. Works without a GPU, and with a torch that does not import.

    Args:
        architecture: pretend that the GPU is this one ("sm90", "h200"), for a machine that only builds an image.

    Raises:
        ValueError: an architecture or a GPU that is not known.
    """
    capability, cuda = _gpu()
    return Stack(
        capability=capability if architecture is None else parse_architecture(architecture),
        versions={name: version for name in DISTRIBUTIONS if (version := _version_by_any_name(name)) is not None},
        python=platform.python_version(),
        cuda=cuda,
        nvcc=has_nvcc(),
    )


def parse_architecture(text: str) -> tuple[int, int]:
    """(9, 0) from "sm90", "sm_90a", "9.0" or "h200".

    Raises:
        ValueError: anything else; the message lists what is known.
    """
    named = compute_capability(text)
    if named is not None:
        return named
    digits = text.lower().removeprefix("sm").removeprefix("_").rstrip("af").replace(".", "")
    if not digits.isdigit() or not 2 <= len(digits) <= 3:
        raise ValueError(
            f"{text!r} is no GPU that is known here; write its architecture as sm90 or 9.0, or one of "
            f"{', '.join(SHORT_NAMES)}"
        )
    return int(digits[:-1]), int(digits[-1])


def has_nvcc() -> bool:
    """Whether a CUDA compiler is on the path or under CUDA_HOME."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return shutil.which("nvcc") is not None or any(home and (Path(home) / "bin/nvcc").is_file() for home in homes)


def _version_by_any_name(name: str) -> str | None:
    names = (name, *_OTHER_NAMES.get(name, ()))
    return next((version for each in names if (version := _version(each)) is not None), None)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> tuple[tuple[int, int] | None, str | None]:
    """Compute capability of the current device (not device 0: boxes can be mixed), and torch's CUDA version."""
    try:
        import torch
    except Exception:  # noqa: BLE001 (a torch that does not import has no GPU to speak of; doctor reports the import)
        return None, None
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return capability, torch.version.cuda
