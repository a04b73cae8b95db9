"""The callbacks for an existing Trainer, in one place; each lives in a module of its own."""

from __future__ import annotations

from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.kernel_callback import KernelAssertionCallback
from hf_speedkit.trainer.throughput_callback import ThroughputCallback
from hf_speedkit.trainer.trace_callback import TraceCallback

__all__ = ["KernelAssertionCallback", "ThroughputCallback", "TraceCallback", "attach"]
