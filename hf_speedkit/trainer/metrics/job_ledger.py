"""Steps of this rank joined with those of the other ranks, and the totals of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hf_speedkit.core.records import NO_TOKENS, GpuUsage, StepRecord, TokenCounts
from hf_speedkit.core.step_parts import StepActivity, with_activity
from hf_speedkit.core.stepsum import StepSum, decode, encode, over_ranks, rank_rows
from hf_speedkit.core.throughput import JobWindow, Ledger, job_window, mark_warm_up
from hf_speedkit.measure.step_clock import StepTimes
from hf_speedkit.trainer.metrics.mfu_inputs import FlopsInputs
from hf_speedkit.trainer.metrics.observation import CountedStep
from hf_speedkit.trainer.ranks.reduction import gather_over_ranks


def step_records(
    steps: Sequence[tuple[int, CountedStep]], times: Sequence[StepTimes], inputs: FlopsInputs, *, has_device: bool
) -> tuple[StepRecord, ...]:
    """One rank's steps as records.

    Args:
        steps: global step and counts.
        times: of the same steps.
        inputs: what FLOPs follow from.
        has_device: whether work is queued on a device, so that the host can wait for it.
    """
    return tuple(
        StepRecord(
            step=number,
            micro_batches=counted.micro_batches,
            tokens=counted.tokens,
            step_time_s=time.step_time_s,
            data_wait_s=time.data_wait_s,
            host_time_s=time.host_time_s,
            device_time_s=time.device_time_s,
            device_wait_s=time.device_wait_s if has_device else None,
            eval_time_s=time.eval_time_s,
            save_time_s=time.save_time_s,
            log_time_s=time.log_time_s,
            flops=inputs.model_flops(counted.tokens),
            recomputed_flops=inputs.recomputed_flops(counted.tokens),
            compiled_kernels=counted.compiled,
            nonfinite=counted.nonfinite,
            nonfinite_loss=counted.nonfinite_loss,
            excluded=counted.excluded,
        )
        for (number, counted), time in zip(steps, times, strict=True)
    )


class JobLedger:
    """Keeps the ledger of one `train()` call, the same on every rank.

    Args:
        world_size: number of ranks.
        device: where this rank trains.
        before: tokens of earlier sessions of the run; None where they are unknown.
    """

    def __init__(self, *, world_size: int, device: torch.device, before: TokenCounts | None) -> None:
        self._device = device
        self._world_size = world_size
        self.ledger = Ledger(world_size=world_size, before=before)

    @property
    def steps(self) -> int:
        """Steps of this session that were entered."""
        return self.ledger.session.steps

    def enter(
        self,
        records: Sequence[StepRecord],
        *,
        usage: GpuUsage | None = None,
        counted: tuple[int, StepActivity] | None = None,
        pauses: StepTimes | None = None,
    ) -> tuple[tuple[StepRecord, ...], JobWindow]:
        """Exchange sums of this rank's steps with the other ranks' and enter them. All ranks together.

        One all-gather of some 300 numbers; none at the end of a training whose last step was logged, where only pauses
        are left: those of this rank stand for all.

        Args:
            records: the steps since the last call; none on one rank is none on all.
            usage: this rank's GPU meanwhile.
            counted: the step that was counted through CUPTI, with its number.
            pauses: those after the last step, at the end of training.

        Returns:
            The records, those found to be warm-up marked so, and the window over all ranks.
        """
        if counted is not None:
            records = with_activity(records, *counted)
        later, *others = rank_rows(records, self.ledger.early_left)
        if pauses is not None:
            later = replace(
                later,
                eval_time_s=later.eval_time_s + pauses.eval_time_s,
                save_time_s=later.save_time_s + pauses.save_time_s,
                log_time_s=later.log_time_s + pauses.log_time_s,
            )
        mine = encode((later, *others), usage, None if counted is None else counted[1])
        everyone = gather_over_ranks(mine, self._device) if records or pauses is None else [mine] * self._world_size
        rows, gpus, activities = zip(*map(decode, everyone), strict=True)
        window = job_window(rows, self.ledger, gpus, activities)
        self.ledger = self.ledger.with_window(window)
        return mark_warm_up(records, window), window

    def before_a_checkpoint(self, steps: Sequence[tuple[int, CountedStep]]) -> tuple[TokenCounts | None, StepSum]:
        """Look at this rank's steps that were not entered yet. One all-gather; all ranks together.

        Returns:
            The run's tokens with these steps (None where earlier sessions are unknown), and the steps over all ranks:
            tokens, and which of them were not finite.
        """
        tokens = NO_TOKENS
        for _number, counted in steps:
            tokens = tokens + counted.tokens
        bad = [number for number, counted in steps if counted.nonfinite]
        mine = StepSum(steps=len(steps), tokens=tokens, nonfinite=len(bad), first_nonfinite=bad[0] if bad else None)
        everything = over_ranks([decode(row)[0][0] for row in gather_over_ranks(encode((mine,)), self._device)])
        before = self.ledger.run_tokens
        return None if before is None else before + everything.tokens, everything
