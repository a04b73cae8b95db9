"""What becomes of a window's metrics: the Trainer's log, the sinks, and a few sentences on the console."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import TrainerState, TrainingArguments

from hf_speedkit.core.records import Severity, StepRecord
from hf_speedkit.core.throughput import EARLY_STEPS, JobWindow
from hf_speedkit.core.window_findings import still_compiling, window_findings
from hf_speedkit.trainer.metrics.nonfinite import NonFinite, find_nonfinite
from hf_speedkit.trainer.metrics.notices import stray_run
from hf_speedkit.trainer.sinks import SinkGroup

# Under the callback's name: that is what a reader can look up.
logger = logging.getLogger("hf_speedkit.trainer.throughput_callback")


_NO_TOKENS = (
    "no rates of tokens and no MFU: batches have neither input_ids nor inputs_embeds; tell what one holds with "
    "ThroughputCallback.count(TokenCounts(...)) before its forward pass"
)
_NO_TARGETS = (
    "no rates of target tokens: labels, one a position, do not reach the model (label_smoothing_factor and losses of "
    "one's own take them out before); tell what a batch holds with ThroughputCallback.count(TokenCounts(...))"
)


class WindowReport:
    """Reports the windows of a run.

    Args:
        sinks: get step records, and windows if they take them, on world rank 0.
    """

    def __init__(self, sinks: Iterable[Callable[[StepRecord], object]]) -> None:
        self._sinks = SinkGroup(sinks)
        self._said: set[str] = set()
        self._speaks = True
        self._steps = self._late_steps = 0
        self._late_compilations = 0.0

    def begin(self, state: TrainerState) -> None:
        """A session begins."""
        self._said = set()
        self._steps = self._late_steps = 0
        self._late_compilations = 0.0
        self._speaks = state.is_world_process_zero
        if self._speaks:
            self._sinks.begin(state.global_step)
        elif (stray := stray_run()) is not None:
            logger.warning("%s", stray)

    def end(self, records: tuple[StepRecord, ...]) -> None:
        """Training is over; these are the steps after the last window."""
        if self._speaks:
            self._sinks.steps(records)
            self._sinks.close()

    def window(
        self, records: tuple[StepRecord, ...], metrics: dict[str, float], logs: dict[str, Any], state: TrainerState
    ) -> None:
        """Put the metrics into the Trainer's log and the sinks, and say what follows from them."""
        own = {key: value for key, value in logs.items() if isinstance(value, (int, float))}
        logs.update(metrics)
        # The Trainer has stored its copy of `logs` before callbacks ran: complete it, for trainer_state.json.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)
        self._note_compilations(len(records), metrics)
        if not any(record.tokens.slots for record in records):
            self.warn_once(_NO_TOKENS)
        elif all(record.tokens.target is None for record in records):
            self.warn_once(_NO_TARGETS)
        self._say_findings(metrics)
        if self._speaks:
            self._sinks.steps(records)
            self._sinks.window(state.global_step, {**own, **metrics})

    def nonfinite(
        self,
        window: JobWindow,
        metrics: dict[str, float],
        logs: dict[str, Any],
        args: TrainingArguments,
        state: TrainerState,
    ) -> NonFinite | None:
        """Count and name steps that are not finite, and keep the log from showing a loss that was not measured."""
        found = find_nonfinite(window.everything, logs, state.global_step)
        if found is None:
            return None
        metrics["speed/nonfinite_steps"] = found.steps
        routine = args.fp16 and not found.losses  # the loss scaler skips a step whose scaled gradient overflows
        if args.logging_nan_inf_filter and not routine:
            # The Trainer's filter counts such a loss as 0, or as less than the mean of those before it in the window;
            # what the others' mean was can no longer be told.
            logs["loss"] = float("nan")
            if state.log_history and "loss" in state.log_history[-1]:
                state.log_history[-1]["loss"] = logs["loss"]
        if self._speaks:
            words = f"{found.sentence()}; fp16's loss scaler skips them" if routine else found.sentence()
            logger.log(logging.INFO if routine else logging.WARNING, "%s", words)
        return found

    def warn_once(self, text: str) -> None:
        """A sentence for the console, once a session and on world rank 0."""
        self._once(text, logging.WARNING, text)

    def _note_compilations(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Add those of a window behind the warm-up; evaluation in it may have compiled for shapes of its own."""
        if self._steps >= EARLY_STEPS and "speed/eval_time_s" not in metrics:
            self._late_steps += steps
            self._late_compilations += metrics.get("speed/compiled_kernels", 0.0)
        self._steps += steps

    def _say_findings(self, metrics: Mapping[str, float]) -> None:
        """What a window shows, each conclusion once a session; on the console, since trackers take numbers only."""
        late = still_compiling(self._late_compilations, self._late_steps)
        for finding in (*window_findings(metrics), *([late] if late is not None else [])):
            level = logging.INFO if finding.severity is Severity.NOTE else logging.WARNING
            self._once(
                finding.rule, level, f"{finding.message} ({'; '.join(finding.evidence)}) Advice: {finding.advice}"
            )

    def _once(self, key: str, level: int, text: str) -> None:
        if self._speaks and key not in self._said:
            self._said.add(key)
            logger.log(level, "%s", text)
