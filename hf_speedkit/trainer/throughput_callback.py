"""`ThroughputCallback`: honest tokens per second for any transformers Trainer. Glue; the arithmetic is in core."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_speedkit.core.records import NO_TOKENS, StepRecord, TokenCounts
from hf_speedkit.core.stepsum import decode, encode, of_step, over_ranks, rank_rows, total
from hf_speedkit.core.throughput import (
    JobWindow,
    Ledger,
    RunTotals,
    job_window,
    mark_warm_up,
    run_totals,
    window_metrics,
)
from hf_speedkit.measure.gpu_sampler import GpuSampler
from hf_speedkit.measure.step_clock import StepClock, device_timer
from hf_speedkit.trainer.mfu_inputs import device_peak_tflops, flops_of, missing_notices
from hf_speedkit.trainer.micro_batches import MicroBatchCounter, counts_its_batch
from hf_speedkit.trainer.reduction import gather_over_ranks
from hf_speedkit.trainer.saved_totals import load_totals, save_totals
from hf_speedkit.trainer.sinks import SinkGroup

logger = logging.getLogger(__name__)

_PAUSES: Mapping[str, Any] = {"log": "log", "evaluate": "eval", "save": "save"}


class ThroughputCallback(TrainerCallback):  # type: ignore[misc]
    """Adds tokens per second and where step time goes to every training log.

    Keys, units and formulas: `hf_speedkit.core.metrics.METRICS`. With `attach(trainer, ThroughputCallback())` they
    reach every tracker, in the same row as the loss. Batches are seen by a forward pre-hook on the model; a trainer
    that knows its counts calls `count` instead. Per step it reads the host clock and queues a few tiny operations: no
    host read, no wait, no collective. Per logging step: one host read and one all-gather of some 200 numbers, right
    after the Trainer's own read of the loss.

    Args:
        flops: model FLOPs of counted tokens, for example `hf_speedkit.core.flops.model_flops(...)`. None: from the
            model's configuration, where the family is known.
        peak_tflops: dense peak of one device. None: from the table in `hf_speedkit.core.devices`.
        sinks: called with each StepRecord on world rank 0; a `WindowSink` (`JsonlSink`) gets windows as well.
        sample_gpu: sample utilisation, power, clock and memory by NVML.
    """

    def __init__(
        self,
        *,
        flops: Callable[[TokenCounts], float | None] | None = None,
        peak_tflops: float | None = None,
        sinks: Iterable[Callable[[StepRecord], object]] = (),
        sample_gpu: bool = True,
    ) -> None:
        self.attached = False
        self._given_flops = flops
        self._given_peak = peak_tflops
        self._sinks = SinkGroup(sinks)
        self._sample_gpu = sample_gpu
        self._clock = StepClock()
        self._counter = MicroBatchCounter()
        self._sampler: GpuSampler | None = None
        self._ledger = Ledger()
        self._flops = flops
        self._peak = peak_tflops
        self._device = torch.device("cpu")
        self._first_step_reason = "warm-up"
        self._rank_zero = True
        self._running = False
        self._forward_expected = False
        self._said_inconsistent = False

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
        return run_totals(self._ledger, peak_tflops=self._peak)

    # ---- Trainer events ---------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Start afresh: a callback object may serve several `train()` calls."""
        self._stop_helpers()
        self._running = True
        self._forward_expected = False
        self._said_inconsistent = False
        self._device = args.device
        self._rank_zero = state.is_world_process_zero
        self._first_step_reason = "resume" if state.global_step > 0 else "warm-up"
        self._ledger = Ledger(world_size=args.world_size, before=load_totals(state))
        self._flops = self._given_flops if self._given_flops is not None else flops_of(model)
        self._peak = self._given_peak if self._given_peak is not None else device_peak_tflops(args, model)
        self._counter = MicroBatchCounter(own_batch=counts_its_batch(args, model))
        self._counter.watch(model, counting=lambda: self._forward_expected)
        self._clock = StepClock(device=device_timer(args.device.type))
        self._start_sampler(args)
        if self._rank_zero:
            for line in missing_notices(args, attached=self.attached, peak=self._peak, flops=self._flops):
                logger.warning(line)
            self._sinks.begin(state.global_step)
        self._clock.start()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The batches are there."""
        self._clock.begin_step()
        self._forward_expected = True

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
        first = self._ledger.session.steps + self._counter.steps_waiting == 0
        self._counter.end_step(state.global_step, excluded=self._first_step_reason if first else None)
        if first:
            # Once, so that what the first step left in the device's queue is not charged to the steady second one.
            self._clock.settle()
        self._settle_before_pause(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """An evaluation or a checkpoint may follow."""
        self._settle_before_pause(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Add the window's metrics to a training log, on every rank; evaluation's and the final log are left alone."""
        if not self._running or logs is None or "loss" not in logs:
            return
        self._clock.settle()
        records, window = self._reduce()
        if records:
            metrics = window_metrics(window, self._ledger, peak_tflops=self._peak)
            self._note_nonfinite(window, metrics, logs, state)
            self._report(records, metrics, logs, state)
            save_totals(state, self._ledger.run_tokens)
        self._clock.pause("log")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluation is over."""
        self._clock.pause("eval")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A checkpoint was written."""
        self._clock.pause("save")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the steps after the last log and close everything."""
        self._clock.settle()
        records, _window = self._reduce(last=True)
        if self._rank_zero:
            self._sinks.steps(records)
            self._sinks.close()
        self._stop_helpers()
        self._running = False

    def after_callbacks(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Every callback has handled `event` (told by the marker that `attach` puts last)."""
        if not self._running:
            return
        if event == "train_begin":
            self._clock.start()
        elif event in ("step_end", "epoch_end"):
            self._clock.loop_goes_on()
        else:
            self._clock.pause(_PAUSES[event])
        if self._is_followed_by_save(event, args, control):
            self._totals_into(state)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _settle_before_pause(self, control: TrainerControl) -> None:
        # Both wait for the device anyway: its remaining work must count as training and not as that pause. Where a log
        # comes first, `on_log` does this.
        if (control.should_save or control.should_evaluate) and not control.should_log:
            self._clock.settle()

    def _reduce(self, *, last: bool = False) -> tuple[tuple[StepRecord, ...], JobWindow]:
        """Finish this rank's steps, exchange sums with the others, enter them into the ledger. All ranks together."""
        records = self._records()
        usage = None if self._sampler is None else self._sampler.window()
        later, *others = rank_rows(records, self._ledger.early_left)
        if last:
            pauses = self._clock.pauses_since_last_step
            later = replace(
                later,
                eval_time_s=later.eval_time_s + pauses.eval_time_s,
                save_time_s=later.save_time_s + pauses.save_time_s,
                log_time_s=later.log_time_s + pauses.log_time_s,
            )
        mine = encode((later, *others), usage)
        rows, gpus = zip(*map(decode, gather_over_ranks(mine, self._device)), strict=True)
        window = job_window(rows, self._ledger, gpus)
        self._ledger = self._ledger.with_window(window)
        if not window.consistent and self._rank_zero and not self._said_inconsistent:
            self._said_inconsistent = True
            logger.warning("ranks report different steps: totals are right, rates are left out")
        return mark_warm_up(records, window), window

    def _records(self) -> tuple[StepRecord, ...]:
        # Waits for the device: logging steps and the end of training only, after `settle`.
        steps = self._counter.take()
        return tuple(
            StepRecord(
                step=number,
                micro_batches=counted.micro_batches,
                tokens=counted.tokens,
                step_time_s=times.step_time_s,
                data_wait_s=times.data_wait_s,
                host_time_s=times.host_time_s,
                device_time_s=times.device_time_s,
                device_wait_s=times.device_wait_s if self._clock.has_device else None,
                eval_time_s=times.eval_time_s,
                save_time_s=times.save_time_s,
                log_time_s=times.log_time_s,
                flops=None if self._flops is None else self._flops(counted.tokens),
                nonfinite=counted.nonfinite,
                excluded=counted.excluded,
            )
            for (number, counted), times in zip(steps, self._clock.take(), strict=True)
        )

    def _report(
        self, records: tuple[StepRecord, ...], metrics: dict[str, float], logs: dict[str, Any], state: TrainerState
    ) -> None:
        own = {key: value for key, value in logs.items() if isinstance(value, (int, float))}
        logs.update(metrics)
        # The Trainer has stored its copy of `logs` before callbacks ran: complete it, for trainer_state.json.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)
        if self._rank_zero:
            self._sinks.steps(records)
            self._sinks.window(state.global_step, {**own, **metrics})

    def _note_nonfinite(
        self, window: JobWindow, metrics: dict[str, float], logs: dict[str, Any], state: TrainerState
    ) -> None:
        everything = total([window.steady, window.excluded])
        count, first = everything.nonfinite or 0, everything.first_nonfinite
        norm = logs.get("grad_norm")
        if count == 0 and isinstance(norm, float) and not math.isfinite(norm):
            count, first = 1, state.global_step
            metrics["speed/nonfinite_steps"] = count
        if count == 0:
            return
        if count == everything.steps:
            # The Trainer's filter has put the mean of earlier losses there, or 0: nothing of it was measured.
            logs["loss"] = math.nan
        if self._rank_zero:
            logger.warning(
                "%d of the last %d steps had a NaN or infinite gradient, the first was step %s",
                count,
                everything.steps,
                first,
            )

    def _is_followed_by_save(self, event: str, args: TrainingArguments, control: TrainerControl) -> bool:
        """Whether a checkpoint comes next whose totals no log will bring up to date; the same answer on all ranks."""
        if self._counter.steps_waiting == 0:
            return False
        if event == "evaluate":
            return bool(args.save_strategy == SaveStrategy.BEST)  # decided after this callback
        return event in ("step_end", "epoch_end") and control.should_save and not control.should_log

    def _totals_into(self, state: TrainerState) -> None:
        """Bring the saved totals up to this step. One host read and one all-gather, where a checkpoint is written."""
        tokens = NO_TOKENS
        for _number, counted in self._counter.peek():
            tokens = tokens + counted.tokens
        row = of_step(StepRecord(step=state.global_step, micro_batches=0, tokens=tokens, step_time_s=0.0))
        ranks = [decode(vector)[0][0] for vector in gather_over_ranks(encode((row,), None), self._device)]
        before = self._ledger.run_tokens
        save_totals(state, None if before is None else before + over_ranks(ranks).tokens)

    def _start_sampler(self, args: TrainingArguments) -> None:
        if not self._sample_gpu or args.device.type != "cuda":
            return
        index = args.device.index or 0
        self._sampler = GpuSampler(index, uuid=f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        self._sampler.start()
        if self._sampler.reason is not None:
            logger.warning("no GPU utilisation will be logged: %s", self._sampler.reason)

    def _stop_helpers(self) -> None:
        self._counter.unwatch()
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
