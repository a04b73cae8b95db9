"""The machine as the compatibility table wants it: versions, GPU, compiler. The only reader of either."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_speedkit.core.devices import SHORT_NAMES, compute_capability
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.imports import version_in_its_source

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

# Nightly builds of torch and other platforms bring triton under another name; fla was one distribution before fla-core.
_TRITONS = "pytorch-triton triton-windows pytorch-triton-rocm pytorch-triton-xpu triton-rocm triton-xpu triton-nightly"
_OTHER_NAMES = {"triton": tuple(_TRITONS.split()), "fla-core": ("flash-linear-attention",)}
# What is imported tells more than metadata: a clone on PYTHONPATH has none, and two tritons write into one folder.
_IMPORTED_AS = {"triton": "triton", "fla-core": "fla", "causal-conv1d": "causal_conv1d"}

# fla/backends.py of 0.6.0: a backend is left out where its own switch is "0", and all of them with the other one.
_SWITCHES = {"tilelang": "FLA_TILELANG", "flash-qla": "FLA_FLASH_QLA"}
_VARIABLES = ("TRITON_INTERPRET", "TRITON_PTXAS_PATH")


def read_stack(*, architecture: str | None = None) -> Stack:
    """Read versions from metadata, the GPU and its CUDA from torch, and look for nvcc.

    Imports torch and no kernel package. Works without a GPU, and with a torch that does not import.

    Args:
        architecture: pretend that the GPU is this one ("sm90", "h200"), for a machine that only builds an image.

    Raises:
        ValueError: an architecture or a GPU that is not known.
    """
    torch = _torch()
    capability = _capability(torch)
    here = architecture is None
    return Stack(
        capability=capability if architecture is None else parse_architecture(architecture),
        versions={name: version for name in DISTRIBUTIONS if (version := _version_by_any_name(name)) is not None},
        python=platform.python_version(),
        cuda=torch.version.cuda if torch is not None else None,
        nvcc=has_nvcc(),
        amd=_amd(torch) if here and capability is not None else None,
        unused=_unused(os.environ),
        variables=frozenset(name for name in _VARIABLES if os.environ.get(name, "0") not in ("", "0")),
        torch_lacks=()
        if not here or capability is None or torch.version.hip
        else lacking(capability, torch.cuda.get_arch_list()),
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


def lacking(capability: tuple[int, int], built_for: Iterable[str]) -> tuple[str, ...]:
    """What torch was built for, where that leaves out a GPU: every kernel of torch would fail on it.

    Machine code runs on the minor versions from its own on, PTX ("compute_90") on everything newer.

    Args:
        capability: of the GPU.
        built_for: `torch.cuda.get_arch_list()`.
    """
    names = tuple(built_for)
    for name in names:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            return ()  # a spelling that is not known: nothing is claimed
        built = (int(digits[:-1]), int(digits[-1]))
        if (kind == "compute" or built[0] == capability[0]) and built <= capability:
            return ()
    return names


def _version_by_any_name(name: str) -> str | None:
    imported = version_in_its_source(_IMPORTED_AS[name]) if name in _IMPORTED_AS else None
    names = (name, *_OTHER_NAMES.get(name, ()))
    return imported or next((version for each in names if (version := _version(each)) is not None), None)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unused(environment: Mapping[str, str]) -> frozenset[str]:
    if environment.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return frozenset(_SWITCHES)
    return frozenset(name for name, switch in _SWITCHES.items() if environment.get(switch) == "0")


def _torch() -> Any:
    try:
        import torch
    except Exception:  # noqa: BLE001 (a torch that does not import has no GPU to speak of; doctor reports the import)
        return None
    return torch


def _capability(torch: Any) -> tuple[int, int] | None:
    """Compute capability of the current device (not device 0: boxes can be mixed)."""
    if torch is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def _amd(torch: Any) -> str | None:
    """An MI250 calls its capability 9.0 as well, and nothing that is known of Hopper holds there."""
    if torch.version.hip is None:
        return None
    name = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "gcnArchName", "amd"))
    return name.partition(":")[0]
