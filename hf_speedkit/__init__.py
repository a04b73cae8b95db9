"""hf_speedkit: packed, proven and measured fine-tuning for the Hugging Face Trainer.

Names below are resolved on first use (PEP 562), so `import hf_speedkit` imports neither torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "IsolationError": "hf_speedkit.core.errors",
    "JsonlSink": "hf_speedkit.trainer.sinks",
    "KernelAssertionError": "hf_speedkit.core.errors",
    "KernelAssertionCallback": "hf_speedkit.trainer.callbacks",
    "PackedBatchSampler": "hf_speedkit.packing.sampler",
    "PackedCollator": "hf_speedkit.packing.collator",
    "SpeedSFTConfig": "hf_speedkit.trainer.config",
    "SpeedSFTTrainer": "hf_speedkit.trainer.sft",
    "SpeedkitError": "hf_speedkit.core.errors",
    "ThroughputCallback": "hf_speedkit.trainer.callbacks",
    "TraceCallback": "hf_speedkit.trainer.callbacks",
    "assert_isolation": "hf_speedkit.packing.isolation",
    "assert_kernels": "hf_speedkit.kernels.inspection",
    "attach": "hf_speedkit.trainer.callbacks",
    "check_kernels": "hf_speedkit.kernels.inspection",
    "diagnose": "hf_speedkit.core.diagnosis",
    "plan_packing": "hf_speedkit.packing.planner",
    "summarize_trace": "hf_speedkit.measure.trace",
}

# What is refused if it is older than pyproject.toml asks for, before a home is imported; empty: all that a job needs.
_NEEDS = {
    "hf_speedkit.kernels.inspection": ("torch", "transformers"),
    "hf_speedkit.measure.trace": ("numpy", "msgspec"),
    "hf_speedkit.packing.collator": ("torch", "numpy"),
    "hf_speedkit.packing.isolation": ("torch",),
    "hf_speedkit.packing.sampler": ("torch", "transformers"),
    "hf_speedkit.trainer.callbacks": ("torch", "transformers", "accelerate", "numpy"),
    "hf_speedkit.trainer.config": (),
    "hf_speedkit.trainer.sft": (),
}

__all__ = [
    "IsolationError",
    "JsonlSink",
    "KernelAssertionCallback",
    "KernelAssertionError",
    "PackedBatchSampler",
    "PackedCollator",
    "SpeedSFTConfig",
    "SpeedSFTTrainer",
    "SpeedkitError",
    "ThroughputCallback",
    "TraceCallback",
    "__version__",
    "assert_isolation",
    "assert_kernels",
    "attach",
    "check_kernels",
    "diagnose",
    "plan_packing",
    "summarize_trace",
]

if TYPE_CHECKING:
    from hf_speedkit.core.diagnosis import diagnose
    from hf_speedkit.core.errors import IsolationError, KernelAssertionError, SpeedkitError
    from hf_speedkit.kernels.inspection import assert_kernels, check_kernels
    from hf_speedkit.measure.trace import summarize_trace
    from hf_speedkit.packing.collator import PackedCollator
    from hf_speedkit.packing.isolation import assert_isolation
    from hf_speedkit.packing.planner import plan_packing
    from hf_speedkit.packing.sampler import PackedBatchSampler
    from hf_speedkit.trainer.callbacks import KernelAssertionCallback, ThroughputCallback, TraceCallback, attach
    from hf_speedkit.trainer.config import SpeedSFTConfig
    from hf_speedkit.trainer.sft import SpeedSFTTrainer
    from hf_speedkit.trainer.sinks import JsonlSink


def __getattr__(name: str) -> object:
    """Import the home of a public name on first use."""
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    if home in _NEEDS and home not in sys.modules:
        from hf_speedkit.trainer.installed_versions import require_versions

        require_versions(*_NEEDS[home])
    try:
        value = getattr(import_module(home), name)
    except Exception as error:
        from hf_speedkit.trainer.broken_installs import broken_install

        broken = broken_install(error)
        if broken is not None:
            raise broken from error
        if isinstance(error, AttributeError):  # Python would take it for a name that is not here, and hide it
            raise ImportError(f"{home} cannot be imported: {error}") from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
