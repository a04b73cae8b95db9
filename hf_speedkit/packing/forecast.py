"""What a job will come to, from the lengths of its documents alone: batches, steps, and time lost to waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_speedkit.core.flops import ModelFlops
from hf_speedkit.packing.balance import deal_packs, straggler_share
from hf_speedkit.packing.planner import checked_lengths, count_padded_batches, plan_packing
from hf_speedkit.packing.sampler import PackedBatchSampler
from hf_speedkit.packing.strategies import best_fit_decreasing

TRL_BLOCK_DOCUMENTS = 1_000
"""Documents that TRL 1.16's bfd packs together: datasets' default batch of a mapped function."""

COST_WINDOW_STEPS = 8
"""Steps whose packs are sorted by cost together, where that is chosen."""

WORTH_IT = 0.01
"""Share of time that a cost window must be predicted to save before it is recommended."""

# Straggling is a matter of the distribution: more documents only take longer to plan.
_SAMPLE_DOCUMENTS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """One way to batch documents.

    Args:
        name: of the way.
        batches: rows, or padded batches, of one epoch; all ranks together.
        full: real tokens / (batches x tokens_per_batch), 0..1.
        steps: optimizer steps of one epoch.
    """

    name: str
    batches: int
    full: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerForecast:
    """Time lost to waiting for the rank with the costliest row; a model of compute alone.

    Args:
        quadratic_per_token: attention FLOPs of one token pair / all other FLOPs of one token.
        share: lost time / time, with packs sorted by cost inside each optimizer step (changes no step's documents).
        windowed_share: the same with `COST_WINDOW_STEPS` steps sorted together.
    """

    quadratic_per_token: float
    share: float
    windowed_share: float

    @property
    def window_pays(self) -> bool:
        """Whether sorting over several steps is predicted to save more than `WORTH_IT`."""
        return self.share - self.windowed_share > WORTH_IT

    def sentence(self) -> str:
        """Coefficients and prediction in one line."""
        advice = f"cost_window_steps={COST_WINDOW_STEPS} would make it {self.windowed_share:.1%}"
        if self.window_pays:
            advice += ": worth setting"
        return (
            f"attention costs {self.quadratic_per_token:.2e} of a token's other work per token pair; "
            f"predicted wait for the slowest rank {self.share:.1%} of the time, {advice}"
        )


def quadratic_per_token(flops: ModelFlops) -> float:
    """Attention FLOPs of one pair of a document's length squared / FLOPs of one token elsewhere (forward).

    Attention with a sliding window is left out: beyond the window it is linear in the length.
    """
    pairs = flops.per_pair / 2 if flops.causal else flops.per_pair
    return pairs / (flops.linear_per_token + flops.core_per_token + flops.head_per_token + flops.adapter_per_token)


def compare_batchings(
    lengths: Sequence[int],
    *,
    tokens_per_batch: int,
    world_size: int = 1,
    gradient_accumulation_steps: int = 1,
    strategy: str = "auto",
    seed: int = 0,
) -> tuple[Batching, ...]:
    """Padded batches, TRL's bfd and our packs of the same documents, in this order.

    TRL's is computed by our best-fit decreasing in blocks of 1,000 documents; benchmarks/packing_table.py shows it
    beside TRL's own. A padded step is counted as if its batches could be dealt out to ranks one by one.

    Raises:
        PackingError: documents that do not fit; see `planner.plan_packing`.
    """
    counts = checked_lengths(lengths, tokens_per_batch)
    per_step = world_size * gradient_accumulation_steps
    sampler = PackedBatchSampler(
        counts,
        tokens_per_batch=tokens_per_batch,
        world_size=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        strategy=strategy,
        seed=seed,
    )
    plan = sampler.plan(0)
    ways = (
        ("2-D padded", count_padded_batches(counts, tokens_per_batch)),
        ("TRL bfd", len(best_fit_decreasing(counts, range(len(counts)), tokens_per_batch, TRL_BLOCK_DOCUMENTS))),
    )
    slots = plan.real_tokens / tokens_per_batch
    found = [
        Batching(name=name, batches=batches, full=slots / batches, steps=-(-batches // per_step))
        for name, batches in ways
    ]
    ours = len(plan.packs)
    return (
        *found,
        Batching(name=f"hf_speedkit {plan.strategy}", batches=ours, full=slots / ours, steps=sampler.steps_per_epoch),
    )


def forecast_stragglers(
    lengths: Sequence[int],
    *,
    tokens_per_batch: int,
    world_size: int,
    gradient_accumulation_steps: int,
    quadratic_per_token: float,
    strategy: str = "auto",
    seed: int = 0,
) -> StragglerForecast:
    """Predict the time that ranks wait for one another, with and without a cost window.

    Looks at the first 200,000 documents: 1.5 s on one core.
    """
    counts = checked_lengths(lengths[:_SAMPLE_DOCUMENTS], tokens_per_batch)
    packs = plan_packing(counts, tokens_per_batch=tokens_per_batch, strategy=strategy, seed=seed).packs
    shares = [
        straggler_share(
            deal_packs(
                packs,
                counts,
                tokens_per_batch=tokens_per_batch,
                steps=-(-len(packs) // (world_size * gradient_accumulation_steps)),
                world_size=world_size,
                gradient_accumulation_steps=gradient_accumulation_steps,
                window_steps=window,
            ),
            counts,
            tokens_per_batch=tokens_per_batch,
            quadratic_per_token=quadratic_per_token,
        )
        for window in (1, COST_WINDOW_STEPS)
    ]
    return StragglerForecast(quadratic_per_token=quadratic_per_token, share=shares[0], windowed_share=shares[1])
