"""What a number was measured on: versions, GPUs, driver, commit. No torch import, no GPU needed, no secrets."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_speedkit.core.records import Environment
from hf_speedkit.measure.nvml import NvmlUnavailableError, nvml_session, optional, text, visible_handles

PACKAGES = (
    "accelerate",
    "causal-conv1d",
    "datasets",
    "fla-core",
    "flash-attn",
    "flash-attn-4",
    "flash-linear-attention",
    "flash-qla",
    "hf-speedkit",
    "kernels",
    "liger-kernel",
    "nvidia-ml-py",
    "peft",
    "tilelang",
    "torch",
    "transformers",
    "triton",
    "trl",
    "wandb",
)
"""Distributions whose version can change a result or a speed."""

_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One visible GPU, as NVML describes it.

    Args:
        name: product name.
        memory_gib: total memory.
        compute_capability: (major, minor); None where the driver does not say.
    """

    name: str
    memory_gib: float
    compute_capability: tuple[int, int] | None = None


def collect_environment(*, nvml: Any = None) -> Environment:
    """Describe the machine and the installed stack.

    Versions come from the installed distributions' metadata, so nothing heavy is imported. The record holds no path,
    host or user name, environment variable or token. A machine without NVML has no devices and no driver.

    Args:
        nvml: a module with pynvml's functions; pynvml itself by default.
    """
    driver: str | None = None
    devices: tuple[GpuInfo, ...] = ()
    try:
        with nvml_session(nvml) as session:
            driver = text(session.nvmlSystemGetDriverVersion())
            devices = _describe(session)
    except NvmlUnavailableError:
        # Not measured, which is what None and () say.
        driver, devices = None, ()
    return Environment(
        python=platform.python_version(),
        packages=_versions(),
        devices=tuple(device.name for device in devices),
        driver=driver,
        cpu_count=_usable_cores(),
        commit=_commit(),
    )


def visible_gpus(*, nvml: Any = None) -> tuple[GpuInfo, ...]:
    """The GPUs this process may use, by NVML and without torch; empty where there is none or NVML cannot tell.

    Honours CUDA_VISIBLE_DEVICES. Takes milliseconds, so it can stand before any heavy import.

    Args:
        nvml: a module with pynvml's functions; pynvml itself by default.
    """
    try:
        with nvml_session(nvml) as session:
            return _describe(session)
    except NvmlUnavailableError:
        return ()


def _describe(nvml: Any) -> tuple[GpuInfo, ...]:
    return tuple(
        GpuInfo(
            name=text(nvml.nvmlDeviceGetName(handle)),
            memory_gib=nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30,
            compute_capability=_capability(nvml, handle),
        )
        for handle in visible_handles(nvml)
    )


def _capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    found = optional(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return None if found is None else (int(found[0]), int(found[1]))


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # absent packages are left out
    return versions


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str | None:
    """Commit of the checkout this package runs from; None where it is installed, or git is missing."""
    root = Path(__file__).resolve().parents[2]
    # A virtual environment inside someone's repository must not pass for a checkout of ours.
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+" if changed else head


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
