"""Which documents share a row: a pure function of lengths, seed and epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from hf_speedkit.core.errors import PackingError
from hf_speedkit.core.records import PackingPlan
from hf_speedkit.packing.strategies import Packs, best_fit_decreasing, fifo_close, next_fit

_STRATEGIES: dict[str, Callable[[Sequence[int], Sequence[int], int], Packs]] = {
    "fifo_close": fifo_close,
    "best_fit_decreasing": best_fit_decreasing,
    "next_fit": next_fit,
}

STRATEGIES = ("auto", *_STRATEGIES)
"""Names that `plan_packing` takes."""

# Where fifo_close is within 0.1 % of the smallest number of rows possible, a second plan cannot gain more than that.
_CLOSE_ENOUGH = 1000


def plan_packing(
    lengths: Sequence[int],
    *,
    tokens_per_batch: int,
    strategy: str = "auto",
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
) -> PackingPlan:
    """Plan which documents share a row of `tokens_per_batch` slots.

    The plan depends on the arguments alone: every process that calls this gets the same one, and so does a resumed run.

    Args:
        lengths: tokens of each document; a list, an array.array, a numpy array or a 1-D tensor of integers.
        tokens_per_batch: slots of one row; the cap is on input tokens.
        strategy: "fifo_close", "best_fit_decreasing" (in windows), "next_fit", or "auto": the one of the first two that
            needs fewer rows (fifo_close on a tie, and where it is within 0.1 % of the smallest number possible).
        seed: of the document order.
        epoch: each epoch has its own document order, hence its own packs.
        shuffle: False keeps the dataset's order (evaluation).

    Returns:
        A plan that holds every document exactly once; empty for no documents.

    Raises:
        PackingError: a document longer than a row or without tokens, an unknown strategy, a row without slots.

    Cost: 2.4 to 4.8 microseconds a document of one core: 207,865 in 0.5 s by fifo_close, 10 million in 48 s
    (benchmarks/results/2026-11-29_packing_table.json).
    """
    if strategy not in STRATEGIES:
        raise PackingError(
            f"packing strategy {strategy!r} is not known", mend=f"use one of: {', '.join(map(repr, STRATEGIES))}"
        )
    counts = checked_lengths(lengths, tokens_per_batch)
    order = document_order(len(counts), seed=seed, epoch=epoch) if shuffle else list(range(len(counts)))
    real_tokens = sum(counts)
    fewest = -(-real_tokens // tokens_per_batch)
    name = "fifo_close" if strategy == "auto" else strategy
    packs = _STRATEGIES[name](counts, order, tokens_per_batch)
    if strategy == "auto" and (len(packs) - fewest) * _CLOSE_ENOUGH > len(packs):
        other = best_fit_decreasing(counts, order, tokens_per_batch)
        if len(other) < len(packs):
            name, packs = "best_fit_decreasing", other
    return PackingPlan(
        packs=tuple(packs),
        tokens_per_batch=tokens_per_batch,
        strategy=name,
        documents=len(counts),
        real_tokens=real_tokens,
    )


def document_order(documents: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of range(documents), the same for the same (seed, epoch) on every machine and Python version.

    `random.shuffle` may change between Python versions; the sequence of `Random.random()` for a seed is guaranteed not
    to. Seeding with text keeps (seed 1, epoch 0) apart from (seed 0, epoch 1), which `seed + epoch` would not.
    """
    draw = random.Random(f"hf_speedkit {seed} {epoch}").random
    order = list(range(documents))
    for last in range(documents - 1, 0, -1):
        chosen = int(draw() * (last + 1))
        order[last], order[chosen] = order[chosen], order[last]
    return order


def count_padded_batches(lengths: Sequence[int], tokens_per_batch: int) -> int:
    """Batches that 2-D padding needs for the same documents: dataset order, rows x longest row <= tokens_per_batch.

    This is the baseline that packing is compared with. Raises PackingError as `plan_packing` does.
    """
    batches, rows, longest = 0, 0, 0
    for length in checked_lengths(lengths, tokens_per_batch):
        longest = max(longest, length)
        rows += 1
        if rows * longest > tokens_per_batch:
            batches += 1
            rows, longest = 1, length
    return batches + (rows > 0)


def checked_lengths(lengths: Sequence[int], tokens_per_batch: int) -> list[int]:
    """The lengths as Python integers, each between 1 and `tokens_per_batch`.

    Raises:
        PackingError: names how many documents do not fit, the worst one, and the ways out.
    """
    check_slots(tokens_per_batch)
    if not isinstance(lengths, Iterable):
        raise PackingError(
            f"document lengths are {lengths!r}, which is no list", mend="pass the number of tokens of each document"
        )
    # Elements of a numpy array are slower to add than Python integers.
    tolist: Callable[[], list[int]] = getattr(lengths, "tolist", lambda: list(lengths))
    counts = tolist()
    kinds = set(map(type, counts))
    if kinds - {int}:
        # numpy scalars in a list are integers; floats, nested lists and None are not.
        try:
            counts = [count.__index__() for count in counts]
        except AttributeError:
            raise PackingError(
                "document lengths must be integers",
                evidence=(f"found {', '.join(sorted(kind.__name__ for kind in kinds - {int}))}",),
                mend="pass the number of tokens of each document",
            ) from None
    if not counts:
        return counts
    if min(counts) < 1:
        _refuse_empty(counts)
    if max(counts) > tokens_per_batch:
        _refuse_overlong(counts, tokens_per_batch)
    return counts


def check_slots(tokens_per_batch: object) -> None:
    """Refuse what is no number of slots.

    Raises:
        PackingError: anything but a whole number from 1 up.
    """
    if not isinstance(tokens_per_batch, int) or isinstance(tokens_per_batch, bool) or tokens_per_batch < 1:
        raise PackingError(
            f"tokens_per_batch={tokens_per_batch!r} is not a number of slots",
            mend="tokens_per_batch is a whole number (an int) from 1 up, 8192 for example",
        )


def _refuse_empty(counts: list[int]) -> None:
    worst = [index for index, count in enumerate(counts) if count < 1]
    raise PackingError(
        f"{len(worst):,} of {len(counts):,} documents have no tokens",
        evidence=(f"the first is document {worst[0]}, of length {counts[worst[0]]}",),
        mend="hf_speedkit.packing.documents.prepare_documents drops empty documents and counts them",
    )


def _refuse_overlong(counts: list[int], tokens_per_batch: int) -> None:
    longest = max(counts)
    overlong = sum(count > tokens_per_batch for count in counts)
    raise PackingError(
        f"{overlong:,} of {len(counts):,} documents are longer than a row of {tokens_per_batch:,} slots",
        evidence=(f"the longest is document {counts.index(longest)}, with {longest:,} tokens",),
        mend=f'tokens_per_batch={longest}, or overlong="split", "truncate" or "drop"',
    )
