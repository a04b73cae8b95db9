"""The link between tracing and metrics: traced steps stay out of the rates, and a trace knows its step's tokens."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_speedkit.trainer.throughput_callback import ThroughputCallback
from hf_speedkit.trainer.trace_callback import TraceCallback


class TracedSteps(TrainerCallback):  # type: ignore[misc]
    """Stands before both callbacks; `attach` puts it there when a trainer has both.

    Args:
        trace: records steps.
        throughput: makes the rates.
    """

    attached_in_front = True  # as `attach` marks what it puts there

    def __init__(self, trace: TraceCallback, throughput: ThroughputCallback) -> None:
        self.trace = trace
        self.throughput = throughput

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep the step out of all rates if a profiler slows it, on every rank alike."""
        step = state.global_step + 1
        if self.trace.excluded(step) or self.trace.excluded(step + 1):
            self.throughput.hold_counting("a trace is recorded at that step, and only one profiler can run")
        reason = self.trace.excluded(step)
        if reason is not None:
            self.throughput.exclude(reason)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Tell the recording what the step computed, before its file is written."""
        if not self.trace.is_recording:
            return
        tokens = self.throughput.step_tokens
        facts = {"real_tokens": tokens.real, "slots": tokens.slots}
        self.trace.annotate(**{name: value for name, value in facts.items() if value is not None})
