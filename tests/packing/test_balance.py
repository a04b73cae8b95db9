from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speedkit import plan_packing
from hf_speedkit.core.errors import PackingError
from hf_speedkit.packing.balance import Slot, deal_packs, straggler_share

Lengths = Callable[..., list[int]]

# 27B Qwen3.5: 196,608 FLOPs a token pair of attention, 51.5 GFLOPs a token elsewhere (forward).
QUADRATIC_PER_TOKEN = 196_608 / 51.5e9


def documents_of(slots: Sequence[Slot]) -> Counter[int]:
    return Counter(document for slot in slots for pack in slot for document in pack)


def steps_of(slots: Sequence[Slot], accumulation: int) -> list[Sequence[Slot]]:
    return [slots[first : first + accumulation] for first in range(0, len(slots), accumulation)]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=120),
    world_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    spare_steps=st.integers(0, 3),
    window_steps=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_every_document_is_dealt_once_every_step_has_some_and_ranks_are_equal(
    lengths: list[int], world_size: int, accumulation: int, spare_steps: int, window_steps: int
) -> None:
    packs = plan_packing(lengths, tokens_per_batch=50).packs
    fewest = -(-len(packs) // (world_size * accumulation))
    steps = min(fewest + spare_steps, len(lengths))
    slots = deal_packs(
        packs,
        lengths,
        tokens_per_batch=50,
        steps=steps,
        world_size=world_size,
        gradient_accumulation_steps=accumulation,
        window_steps=window_steps,
    )
    assert len(slots) == steps * accumulation
    assert all(len(slot) == world_size for slot in slots)
    assert documents_of(slots) == Counter(range(len(lengths)))
    assert all(documents_of(step) for step in steps_of(slots, accumulation))
    assert all(sum(lengths[document] for document in pack) <= 50 for slot in slots for pack in slot)


def test_sorting_inside_a_step_changes_no_steps_documents() -> None:
    lengths = [50, 1, 40, 7, 30, 20, 10, 45] * 6
    packs = [(document,) for document in range(48)]
    slots = deal_packs(packs, lengths, tokens_per_batch=50, steps=3, world_size=4, gradient_accumulation_steps=4)
    for place, step in enumerate(steps_of(slots, 4)):
        assert documents_of(step) == Counter(range(16 * place, 16 * place + 16))


def test_packs_of_like_cost_run_at_the_same_time() -> None:
    # One document of 40 costs 1,600 + 10 x 10 of padding, four of 10 cost 400 + 100: pairs of a kind go together.
    lengths = [40, 40, *[10] * 8]
    packs = [(0,), (2, 3, 4, 5), (1,), (6, 7, 8, 9)]
    slots = deal_packs(packs, lengths, tokens_per_batch=50, steps=1, world_size=2, gradient_accumulation_steps=2)
    assert [sorted(map(len, slot)) for slot in slots] == [[1, 1], [4, 4]]


def test_the_costliest_pack_does_not_always_go_to_the_same_rank() -> None:
    lengths = [50, 45, 40, 30]
    slots = deal_packs(
        [(0,), (1,), (2,), (3,)], lengths, tokens_per_batch=50, steps=1, world_size=2, gradient_accumulation_steps=2
    )
    assert slots == [[(0,), (1,)], [(3,), (2,)]]


def test_a_window_of_steps_wastes_less_where_attention_is_dear(long_chat_lengths: Lengths) -> None:
    lengths = long_chat_lengths(12_000, longest=65_536)
    plan = plan_packing(lengths, tokens_per_batch=65_536)
    shares = [
        straggler_share(
            deal_packs(
                plan.packs,
                lengths,
                tokens_per_batch=65_536,
                steps=-(-len(plan.packs) // 8),
                world_size=8,
                gradient_accumulation_steps=1,
                window_steps=window_steps,
            ),
            lengths,
            tokens_per_batch=65_536,
            quadratic_per_token=QUADRATIC_PER_TOKEN,
        )
        for window_steps in (1, 8)
    ]
    assert shares[0] > 0.05
    assert shares[1] < shares[0] / 2


def test_at_8192_slots_stragglers_are_not_worth_a_window(chat_lengths: Lengths) -> None:
    lengths = chat_lengths(20_000)
    plan = plan_packing(lengths, tokens_per_batch=8192)
    slots = deal_packs(
        plan.packs,
        lengths,
        tokens_per_batch=8192,
        steps=-(-len(plan.packs) // 8),
        world_size=8,
        gradient_accumulation_steps=1,
    )
    share = straggler_share(slots, lengths, tokens_per_batch=8192, quadratic_per_token=QUADRATIC_PER_TOKEN)
    assert 0 < share < 0.01


def test_one_rank_waits_for_nobody() -> None:
    lengths = [5, 9, 3]
    slots = deal_packs(
        [(0,), (1,), (2,)], lengths, tokens_per_batch=10, steps=3, world_size=1, gradient_accumulation_steps=1,
        window_steps=8,
    )  # fmt: skip
    assert slots == [[(0,)], [(1,)], [(2,)]]
    assert straggler_share(slots, lengths, tokens_per_batch=10, quadratic_per_token=1.0) == 0
    assert straggler_share([], lengths, tokens_per_batch=10, quadratic_per_token=1.0) == 0


def test_time_order_inside_a_window_is_not_cost_order() -> None:
    lengths = list(range(1, 65))
    packs = [(document,) for document in range(64)]
    slots = deal_packs(
        packs, lengths, tokens_per_batch=64, steps=32, world_size=2, gradient_accumulation_steps=1, window_steps=32
    )
    longest = [max(lengths[document] for pack in slot for document in pack) for slot in slots]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)


def test_more_packs_than_rows_are_refused() -> None:
    with pytest.raises(PackingError, match="5 packs do not fit into 4 rows"):
        deal_packs([(0,)] * 5, [1], tokens_per_batch=4, steps=2, world_size=2, gradient_accumulation_steps=1)


def test_fewer_documents_than_steps_are_refused() -> None:
    with pytest.raises(PackingError, match="2 documents cannot fill 3 optimizer steps"):
        deal_packs([(0, 1)], [1, 1], tokens_per_batch=4, steps=3, world_size=1, gradient_accumulation_steps=1)
