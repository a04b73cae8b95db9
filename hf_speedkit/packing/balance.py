"""Which pack goes to which rank, micro-batch and optimizer step: a pure function of the plan.

A step is as slow as its slowest rank. Rows have one fixed shape, so linear layers cost the same everywhere; attention
does not: it costs the sum over documents of length squared. Packs that run at the same time should be alike in that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from hf_speedkit.core.errors import PackingError

Pack = tuple[int, ...]
Slot = list[Pack]
"""The packs that all ranks run at the same time, one a rank; () is a row without documents."""


def deal_packs(
    packs: Sequence[Pack],
    lengths: Sequence[int],
    *,
    tokens_per_batch: int,
    steps: int,
    world_size: int,
    gradient_accumulation_steps: int,
    window_steps: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> list[Slot]:
    """Spread the packs of an epoch over its optimizer steps and over ranks.

    Every step gets the same number of packs, give or take one, so none is left without targets (its loss would be
    0 / 0); rows that stay over are empty. Inside a step packs are sorted by attention cost and neighbours run at the
    same time on different ranks, which changes no step's documents.

    Args:
        packs: document indices of each pack, in plan order; at most steps x world_size x gradient_accumulation_steps.
        lengths: tokens of each document.
        tokens_per_batch: slots of a row; the empty rest of a row is one padding document for the attention kernel.
        steps: optimizer steps of the epoch.
        world_size: ranks that each train on rows of their own.
        gradient_accumulation_steps: micro-batches of a step on one rank.
        window_steps: sort inside so many steps together. Above 1 documents change places between neighbouring steps;
            worth it for rows of 32k and more without gradient accumulation.
        seed: of the order of steps inside a window; used only for window_steps > 1.
        epoch: as `seed`.

    Returns:
        steps x gradient_accumulation_steps slots in time order, each with one pack a rank.

    Raises:
        PackingError: more packs than rows, or fewer documents than steps.
    """
    rows = steps * world_size * gradient_accumulation_steps
    if len(packs) > rows:
        raise PackingError(
            f"{len(packs):,} packs do not fit into {rows:,} rows", mend=f"plan {steps + 1} steps or more"
        )
    packs = _at_least(packs, steps)
    if world_size == 1:
        window_steps = 1  # no rank waits for another
    draw = random.Random(f"hf_speedkit deal {seed} {epoch}").random
    slots: list[Slot] = []
    for first in range(0, steps, window_steps):
        last = min(first + window_steps, steps)
        parts = [packs[len(packs) * step // steps : len(packs) * (step + 1) // steps] for step in range(first, last)]
        window = [pack for part in parts for pack in part]
        if len(window) < len(parts) * gradient_accumulation_steps:
            # Fewer packs than slots: sorted together, some step could end up with empty rows alone.
            for part in parts:
                slots += _slots(part, lengths, tokens_per_batch, gradient_accumulation_steps, world_size)
            continue
        ranked = _slots(window, lengths, tokens_per_batch, len(parts) * gradient_accumulation_steps, world_size)
        if window_steps > 1:
            # Time order must not be cost order, or documents would get shorter towards the end of every window.
            ranked = [slot for _, slot in sorted(((draw(), slot) for slot in ranked), key=lambda pair: pair[0])]
        slots += ranked
    return slots


def straggler_share(
    slots: Iterable[Slot], lengths: Sequence[int], *, tokens_per_batch: int, quadratic_per_token: float
) -> float:
    """Share of time lost to waiting for the slowest rank: sum of maxima / sum of means - 1.

    Args:
        slots: packs that run at the same time, as `deal_packs` returns them.
        lengths: tokens of each document.
        tokens_per_batch: slots of a row.
        quadratic_per_token: attention FLOPs of one token pair / all other FLOPs of one token, from the model's config.

    Returns:
        0 where every rank always does the same work. A model of compute alone: it knows no network and no host.
    """
    slowest = average = 0.0
    for slot in slots:
        costs = [tokens_per_batch + quadratic_per_token * _attention_cost(p, lengths, tokens_per_batch) for p in slot]
        slowest += max(costs)
        average += sum(costs) / len(costs)
    return slowest / average - 1 if average else 0.0


def _slots(
    packs: Sequence[Pack], lengths: Sequence[int], tokens_per_batch: int, count: int, world_size: int
) -> list[Slot]:
    """`count` slots of equal size from packs sorted by cost, empty rows last."""
    if world_size == 1:
        return [[pack] for pack in (*packs, *[()] * (count - len(packs)))]
    ranked = sorted(packs, key=lambda pack: -_attention_cost(pack, lengths, tokens_per_batch))
    slots: list[Slot] = []
    for index in range(count):
        slot: Slot = list(ranked[len(ranked) * index // count : len(ranked) * (index + 1) // count])
        slot += [()] * (world_size - len(slot))
        # Every other slot the other way round: no rank gets the costliest pack each time.
        slots.append(slot[::-1] if index % 2 else slot)
    return slots


def _attention_cost(pack: Pack, lengths: Sequence[int], tokens_per_batch: int) -> int:
    rest = tokens_per_batch
    cost = 0
    for document in pack:
        length = lengths[document]
        cost += length * length
        rest -= length
    return cost + rest * rest


def _at_least(packs: Sequence[Pack], count: int) -> Sequence[Pack]:
    """The packs, with the first ones of several documents cut in two until there are `count`."""
    missing = count - len(packs)
    if missing <= 0:
        return packs
    result: list[Pack] = []
    for pack in packs:
        while missing > 0 and len(pack) > 1:
            result.append(pack[:1])
            pack = pack[1:]
            missing -= 1
        result.append(pack)
    if missing > 0:
        raise PackingError(
            f"{len(result):,} documents cannot fill {count:,} optimizer steps", mend="plan no more steps than documents"
        )
    return result
