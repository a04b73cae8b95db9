"""What a run came to, as one record; the arithmetic is here, the table is drawn in trainer/summary.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_speedkit.core.records import DocumentReport, IsolationReport, KernelCheck, PackingPlan
from hf_speedkit.core.throughput import RunTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSummary:
    """How the documents of one epoch became rows, beside padding the same documents.

    Args:
        strategy: the planner that made the plan.
        packs: rows of the epoch.
        tokens_per_batch: slots of a row.
        real_tokens: tokens of the documents.
        padded_batches: batches of the same documents in the data set's order, padded in two dimensions (rows x longest
            <= tokens_per_batch).
    """

    strategy: str
    packs: int
    tokens_per_batch: int
    real_tokens: int
    padded_batches: int

    @property
    def packing_efficiency(self) -> float:
        """Real tokens / slots of the packed rows, 0..1."""
        return self.real_tokens / (self.packs * self.tokens_per_batch)

    @property
    def padded_efficiency(self) -> float:
        """Real tokens / slots of as many full-size padded batches, 0..1."""
        return self.real_tokens / (self.padded_batches * self.tokens_per_batch)

    @property
    def fewer_batches(self) -> float:
        """Share of batches saved by packing, 0..1."""
        return 1.0 - self.packs / self.padded_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSummary:
    """First and last logged training loss: the means over the first and the last logging window."""

    first: float
    last: float
    first_step: int
    last_step: int

    @property
    def change(self) -> float:
        """(last - first) / first; negative when the model learned."""
        return (self.last - self.first) / self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Everything the closing table says. `None` = not measured or not asked for.

    Args:
        world_size: ranks that trained.
        documents: what became of the training documents.
        packing: how they were packed, where that was planned for all of them.
        packed_slots: of a packed row, planned or packed online; None without packing.
        totals: tokens, steps, times and steady rates.
        loss: first and last loss.
        kernels: verdict of each function.
        isolation: the proof.
        changed_layers: what was put in place for packed rows.
        startup_s: seconds that each proof took before step 1, compilation of kernels included.
        resumed_at: optimizer step at which this session went on; 0 for a new run.
        traces: files of traced steps.
        output_dir: where the model and the step log are.
        step_log: name of the step log inside it.
        report_to: trackers that got the metrics.
    """

    world_size: int
    documents: DocumentReport | None
    packing: PackingSummary | None
    packed_slots: int | None
    totals: RunTotals | None
    loss: LossSummary | None
    kernels: tuple[KernelCheck, ...]
    isolation: IsolationReport | None
    changed_layers: tuple[str, ...]
    startup_s: Mapping[str, float]
    resumed_at: int
    traces: tuple[str, ...]
    output_dir: str
    step_log: str | None
    report_to: tuple[str, ...]


def packing_summary(plan: PackingPlan, padded_batches: int) -> PackingSummary:
    """A plan beside the number of padded batches for the same documents."""
    return PackingSummary(
        strategy=plan.strategy,
        packs=len(plan.packs),
        tokens_per_batch=plan.tokens_per_batch,
        real_tokens=plan.real_tokens,
        padded_batches=padded_batches,
    )


def loss_summary(log_history: Sequence[Mapping[str, float]], *, after_step: int = 0) -> LossSummary | None:
    """First and last training loss after `after_step` (where a resumed session began); None without one."""
    losses = [(int(e["step"]), float(e["loss"])) for e in log_history if "loss" in e and int(e["step"]) > after_step]
    if not losses:
        return None
    (first_step, first), (last_step, last) = losses[0], losses[-1]
    return LossSummary(first=first, last=last, first_step=first_step, last_step=last_step)
