"""What to do about a kernel that raised, where the machine and not the package is at fault."""

from __future__ import annotations

import re

_CACHE = "export TRITON_CACHE_DIR=/tmp/triton-$USER  # a folder on a local disk, for this user and node alone"
_COMPILER = "apt-get install -y gcc python3-dev  # Triton compiles a launcher for each kernel; or set CC"
_DRIVER = "nvidia-smi  # fails where the driver is not in this container (docker run --gpus all) or not on this machine"
_NO_DRIVER = r"0 active drivers|libcuda\.so|libnvidia-ml|CUDA driver version is insufficient|driver .* too old"
_FAULTS: tuple[tuple[str, str], ...] = (
    # Triton without a C compiler, or with one and no Python.h: every slim container image.
    (r"Failed to find C compiler|CalledProcessError.*(gcc|cc|clang)|Python\.h", _COMPILER),
    # Shared folders: triton issue 11512, pytorch issue 173679; full, foreign, read-only or mounted noexec ones.
    (
        r"PermissionError|FileNotFoundError|Stale file handle|resource busy|No space left|Read-only file system"
        r"|failed to map segment|cannot stat shared object|Disk quota",
        _CACHE,
    ),
    (_NO_DRIVER, _DRIVER),
    (
        r"no kernel image is available",
        'pip install --force-reinstall "torch>=2.11"  # a build that holds kernels for this GPU: its CUDA decides',
    ),
    # flash-attn and several rules of fla take 16 bits only.
    (r"does not support float32|only supports? (fp16|bf16|half)", "bf16=True, or load the model in bfloat16"),
    (
        r"out of memory|OutOfMemoryError",
        "a smaller max_length, or end what else runs on this GPU: the probe needs one layer's row beside the model",
    ),
)
_COMPILED = tuple((re.compile(pattern, re.IGNORECASE), way) for pattern, way in _FAULTS)


def way_out_of(detail: str) -> str | None:
    """The command or setting for an error that another version of the package would not mend; None for any other.

    Args:
        detail: what a probe said, with class and first line of the error.
    """
    return next((way for pattern, way in _COMPILED if pattern.search(detail)), None)


def way_to_the_driver(detail: str) -> str | None:
    """What to do about an import that found no GPU driver, which no installation mends; None for any other error."""
    return _DRIVER if re.search(_NO_DRIVER, detail, re.IGNORECASE) else None
