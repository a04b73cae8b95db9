"""`ThroughputCallback`: honest tokens per second for any transformers Trainer. Glue; the arithmetic is in core."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_speedkit.core.errors import NonFiniteError
from hf_speedkit.core.flops import Part
from hf_speedkit.core.records import NO_TOKENS, StepRecord, TokenCounts
from hf_speedkit.core.throughput import JobWindow, RunTotals, run_totals
from hf_speedkit.core.window_metrics import window_metrics
from hf_speedkit.measure.compilations import CompilationCounter
from hf_speedkit.measure.gpu_sampler import GpuSampler, sampler_of
from hf_speedkit.measure.launches import LaunchCounter
from hf_speedkit.measure.step_clock import StepClock, device_timer
from hf_speedkit.trainer.metrics.counted_steps import CountedSteps, checked_interval
from hf_speedkit.trainer.metrics.job_ledger import JobLedger, step_records
from hf_speedkit.trainer.metrics.mfu_inputs import FlopsInputs
from hf_speedkit.trainer.metrics.micro_batches import MicroBatchCounter
from hf_speedkit.trainer.metrics.nonfinite import Mode, checked_mode, find_nonfinite, refusal
from hf_speedkit.trainer.metrics.notices import notices
from hf_speedkit.trainer.metrics.returned_losses import ReturnedLosses
from hf_speedkit.trainer.metrics.saved_totals import load_totals, save_totals
from hf_speedkit.trainer.metrics.window_report import WindowReport

_PAUSES: Mapping[str, Any] = {"log": "log", "evaluate": "eval", "save": "save"}


class ThroughputCallback(TrainerCallback):  # type: ignore[misc]
    """Adds tokens per second and where step time goes to every training log.

    Keys, units and formulas: `hf_speedkit.core.metrics.METRICS`. With `attach(trainer, ThroughputCallback())` they
    reach every tracker, in the same row as the loss. Batches are seen by a forward pre-hook on the model; a trainer
    that knows its counts calls `count` instead. Per step it reads the host clock and queues a few tiny operations: no
    host read, no wait, no collective. Per logging step: one host read and one all-gather of some 300 numbers.

    Args:
        flops: model FLOPs of counted tokens, as `hf_speedkit.core.flops.model_flops`. None: by its config, if known.
        peak_tflops: dense peak of one device. None: from the table in `hf_speedkit.core.devices`.
        recompute: what a checkpointed layer computes once more, for a selective policy: `LAYER_PARTS` of
            `hf_speedkit.core.flops` less what it keeps. None: everything, unless there is such a policy (no HFU then).
        sinks: called with each StepRecord on world rank 0; a `WindowSink` (`JsonlSink`) gets windows as well.
        sample_gpu: sample utilisation, power, clock, memory and, on Hopper and later, GPM counters by NVML.
        count_launches_every: on a GPU, count one step in so many through CUPTI (`hf_speedkit.measure.launches`); the
            first is step 20 of a session. That step and the one before stay out of the rates. 0: never. Where another
            profiler runs, or begins in those two steps by its schedule, none is counted.
        nonfinite: "strict" ends training at the logging step after a NaN or infinite loss or gradient (not with fp16,
            whose scaler skips such steps); "warn" counts and names them.

    Raises:
        ConfigurationError: an argument that is none of these.
        NonFiniteError: at a logging step, on all ranks.
    """

    only_one = "each step would be counted, logged and written twice"

    def __init__(
        self,
        *,
        flops: Callable[[TokenCounts], float | None] | None = None,
        peak_tflops: float | None = None,
        recompute: Collection[Part] | None = None,
        sinks: Iterable[Callable[[StepRecord], object]] = (),
        sample_gpu: bool = True,
        count_launches_every: int = 100,
        nonfinite: Mode = "warn",
    ) -> None:
        self.attached = False
        self.losses = ReturnedLosses(None)
        self._given = FlopsInputs(flops=flops, peak_tflops=peak_tflops, recompute=recompute)
        self._inputs = self._given
        self._report = WindowReport(sinks)
        self._sample_gpu = sample_gpu
        self._count_every = checked_interval(count_launches_every)
        self._nonfinite = checked_mode(nonfinite)
        self._clock = StepClock()
        self._counter = MicroBatchCounter()
        self._compilations = CompilationCounter()
        self._counted: CountedSteps | None = None
        self._sampler: GpuSampler | None = None
        self._job = JobLedger(world_size=1, device=torch.device("cpu"), before=NO_TOKENS)
        self._first_step_reason = "warm-up"
        self._running = False
        self._forward_expected = False
        self._error: NonFiniteError | None = None

    # ---- for trainers and other callbacks ---------------------------------------------------------------------------

    def count(self, counts: TokenCounts) -> None:
        """Count one micro-batch of training; call it before its forward pass.

        From the first call on the model's inputs are no longer looked at, so nothing counts twice. Outside a training
        step (evaluation, a probe) the call is ignored.
        """
        if self._forward_expected:
            self._counter.count(counts)

    def exclude(self, reason: str) -> None:
        """Keep the current step out of all rates ("traced", ...); its tokens still count. Call it on every rank."""
        self._counter.current.excluded = reason

    def hold_counting(self, reason: str) -> None:
        """Begin no count with the step that begins now: someone else records it or the next. Call it on every rank."""
        if self._counted is not None:
            self._counted.hold(reason)

    def look_at(self, number: object) -> None:
        """Note whether a loss of the current step is finite; nothing is read before the next logging step."""
        if self._forward_expected:
            self._counter.current.look_at_loss(number)

    def look_at_norm(self, norm: object) -> None:
        """Note whether the gradient's norm is finite; from then on no single gradient is looked at."""
        self._counter.look_at_norm(norm)

    @property
    def step_tokens(self) -> TokenCounts:
        """What the current step's micro-batches came to so far; what only the device knows is None."""
        current = self._counter.current
        unknown: dict[str, Any] = dict.fromkeys(current.on_device)
        return replace(current.tokens, **unknown)

    def waiting(self) -> AbstractContextManager[None]:
        """Put around a call that waits for the device: its time is reported as device wait, not as host time."""
        return self._clock.waiting()

    def batches_ready(self) -> None:
        """Say that the loader has given the step's batches; what follows until the step begins is no data wait.

        For a trainer that overrides `_get_num_items_in_batch`: the Trainer counts target tokens over all ranks there,
        so without this call every rank shows the data wait of the slowest.
        """
        self._clock.batches_ready()

    def run_totals(self) -> RunTotals:
        """Tokens of the run and steady rates of this session, up to the last logging step or the end of training."""
        return run_totals(self._job.ledger, peak_tflops=self._inputs.peak_tflops)

    def close(self) -> None:
        """Take off all hooks and end sampling; training's end does, and a trainer whose training failed should."""
        self._running = False
        self._counter.unwatch()
        self._compilations.stop()
        if self._counted is not None:
            self._counted.close()
            self._counted = None
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    # ---- Trainer events ---------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **given: Any
    ) -> None:
        """Start afresh: a callback object may serve several `train()` calls."""
        self.close()
        self._running, self._forward_expected, self._error = True, False, None
        self._first_step_reason = "resume" if state.global_step > 0 else "warm-up"
        self._job = JobLedger(world_size=args.world_size, device=args.device, before=load_totals(state))
        self._inputs = self._given.completed(args, model)
        self._counter = MicroBatchCounter.of(args, model, given.get("train_dataloader"))
        self._counter.watch(
            model, counting=lambda: self._forward_expected, window=self._inputs.window, losses=self.losses
        )
        self._compilations.start()
        self._clock = StepClock(device=device_timer(args.device.type))
        self._report.begin(state)
        for line in notices(args, attached=self.attached, inputs=self._inputs):
            self._report.warn_once(line)
        self._start_helpers(args)
        self._clock.start()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The batches are there."""
        self._clock.begin_step()
        self._forward_expected = True
        if self._counted is not None:
            current = self._counter.current
            reason = self._counted.step_begins(self._session_steps + 1, excluded=current.excluded is not None)
            current.excluded = current.excluded or reason

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Gradients are complete and clipped: queue a look at whether they are finite."""
        self._forward_expected = False  # what other callbacks run from here on is not training
        self._counter.look_at_gradient(model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The step was issued."""
        self._forward_expected = False
        self._clock.end_step()
        first = self._session_steps == 0
        self._counter.current.compiled = self._compilations.take()
        self._counter.end_step(state.global_step, excluded=self._first_step_reason if first else None)
        if first:
            # Once, so that what the first step left in the device's queue is not charged to the steady second one.
            self._clock.settle()
        if self._counted is not None and self._counted.step_ends(state.global_step, control):
            self._clock.pause("log")  # reading what CUPTI saw is no part of any step
        if not self.attached:
            self._settle_before_pause(control)
        self._passed("step_end", attached=False)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """An evaluation or a checkpoint may follow."""
        if not self.attached:
            self._settle_before_pause(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Add the window's metrics to a training log, on every rank; evaluation's and the final log are left alone."""
        # So is a log inside a step, of a loss function that calls `self.log`, perhaps on one rank alone.
        if not self._running or self._forward_expected or logs is None or "loss" not in logs:
            return
        self._clock.settle()
        records, window = self._enter()
        if records:
            peak, clock = self._inputs.peak_tflops, self._inputs.tensor_clock_mhz
            metrics = window_metrics(window, self._job.ledger, peak_tflops=peak, tensor_clock_mhz=clock)
            found = self._report.nonfinite(window, metrics, logs, args, state)
            if found is not None:
                self.losses.forget_nonfinite()
                self._error = refusal(found, logs) if self._stops(args) else None
            self._report.window(records, metrics, logs, state)
            save_totals(state, self._job.ledger.run_tokens)
        self._clock.pause("log")
        self._passed("log", attached=False)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluation is over."""
        self._clock.pause("eval")
        self._passed("eval", attached=False)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A checkpoint was written."""
        self._clock.pause("save")
        self._passed("save", attached=False)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the steps after the last log and close everything."""
        self._clock.settle()
        records, window = self._enter(last=True)
        self._report.end(records)
        found = find_nonfinite(window.everything, {}, state.global_step)
        if found is not None:
            self._report.warn_once(found.sentence())
        self.close()
        if found is not None and self._stops(args):
            raise refusal(found, {})  # in the steps after the last log: what is saved next would be NaN

    def after_callbacks(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Every callback has handled `event` (told by the marker that `attach` puts last)."""
        if not self._running or (event == "log" and self._forward_expected):
            return
        if event == "train_begin":
            self._clock.start()
        elif event in ("step_end", "epoch_end"):
            # Behind the first step callbacks settle what stays (gc, a look at memory), 0.6 s on an H200: warm-up.
            self._clock.loop_goes_on(last=self._session_steps == 1)
            self._settle_before_pause(control)  # here, because any callback may have asked for a checkpoint
        else:
            self._clock.pause(_PAUSES[event])
        if event != "epoch_end":
            self._passed(_PAUSES.get(event, event), attached=True)
        if self._is_followed_by_save(event, args, control):
            # One host read and one all-gather, where a checkpoint is written.
            tokens, everything = self._job.before_a_checkpoint(self._counter.peek())
            save_totals(state, tokens)
            found = find_nonfinite(everything, {}, state.global_step)
            if found is not None and self._stops(args):
                self.close()
                raise refusal(found, {})  # weights that are NaN must push no good checkpoint out

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _session_steps(self) -> int:
        return self._job.steps + self._counter.steps_waiting

    def _stops(self, args: TrainingArguments) -> bool:
        return self._nonfinite == "strict" and not args.fp16

    def _passed(self, event: str, *, attached: bool) -> None:
        """An event is through for every callback: told by the marker where there is one, else by this callback."""
        if attached is not self.attached or not self._running:
            return
        if event == "log" and self._error is not None:
            error, self._error = self._error, None
            self.close()
            raise error
        if self._counted is not None and event != "train_begin" and self._counted.through(event):
            self._clock.pause("log")

    def _settle_before_pause(self, control: TrainerControl) -> None:
        # Both wait for the device anyway: its remaining work must count as training and not as that pause. Where a log
        # comes first, `on_log` does this.
        if (control.should_save or control.should_evaluate) and not control.should_log:
            self._clock.settle()

    def _enter(self, *, last: bool = False) -> tuple[tuple[StepRecord, ...], JobWindow]:
        """Finish this rank's steps and enter them together with the other ranks'. Waits for the device: logging steps
        and the end of training only, after `settle`."""
        self._inputs = self._inputs.with_fused_head() if self._counter.head_on_targets else self._inputs
        records = step_records(
            self._counter.take(), self._clock.take(), self._inputs, has_device=self._clock.has_device
        )
        records, window = self._job.enter(
            records,
            usage=None if self._sampler is None else self._sampler.window(),
            counted=None if self._counted is None else self._counted.take(),
            pauses=self._clock.pauses_since_last_step if last else None,
        )
        if not window.consistent:
            self._report.warn_once("ranks report different steps: totals are right, rates are left out")
        return records, window

    def _is_followed_by_save(self, event: str, args: TrainingArguments, control: TrainerControl) -> bool:
        """Whether a checkpoint comes next whose totals no log will bring up to date; the same answer on all ranks."""
        if self._counter.steps_waiting == 0:
            return False
        if event == "evaluate":
            return bool(args.save_strategy == SaveStrategy.BEST)  # decided after this callback
        return event in ("step_end", "epoch_end") and control.should_save and not control.should_log

    def _start_helpers(self, args: TrainingArguments) -> None:
        if args.device.type != "cuda":
            return
        if self._count_every > 0:
            counter = LaunchCounter()
            self._counted = CountedSteps(
                self._count_every, counter=counter, say=self._report.warn_once, alone=args.world_size == 1
            )
        if self._sample_gpu:
            self._sampler = sampler_of(args.device)
            self._sampler.start()
            for reason, what in ((self._sampler.reason, "utilisation"), (self._sampler.gpm_reason, "GPM counters")):
                if reason is not None:
                    self._report.warn_once(f"no GPU {what} will be logged: {reason}")
