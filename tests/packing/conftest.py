"""Document lengths that stand for real data, made from quantiles so that tests need no files."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable

import pytest

# Tokens per conversation of a 207,865-row chat set, rebuilt from its mean (1,259) and the measured cost of padding it.
CHAT = {
    0: 139, 0.01: 390, 0.05: 535, 0.1: 630, 0.2: 771, 0.3: 892, 0.4: 1010, 0.5: 1134, 0.6: 1275, 0.7: 1442, 0.8: 1665,
    0.9: 2037, 0.95: 2404, 0.98: 2900, 0.99: 3294, 0.999: 4683, 1: 9857,
}  # fmt: skip

# Whole shared conversations, measured: a heavy tail.
LONG_CHAT = {
    0: 16, 0.01: 35, 0.05: 136, 0.1: 235, 0.2: 377, 0.3: 539, 0.4: 736, 0.5: 1028, 0.6: 1482, 0.7: 2118, 0.8: 3603,
    0.9: 6499, 0.95: 10751, 0.98: 17941, 0.99: 27496, 0.999: 93197, 1: 224841,
}  # fmt: skip


def draw_lengths(quantiles: dict[float, int], documents: int, *, longest: int, seed: int = 0) -> list[int]:
    """Draw lengths by interpolating uniform numbers through quantiles, cut at `longest`."""
    levels, values = list(quantiles), list(quantiles.values())
    draw = random.Random(seed).random
    lengths = []
    for _ in range(documents):
        level = draw()
        upper = bisect_right(levels, level)
        share = (level - levels[upper - 1]) / (levels[upper] - levels[upper - 1])
        length = values[upper - 1] + share * (values[upper] - values[upper - 1])
        lengths.append(max(1, min(longest, int(length))))
    return lengths


@pytest.fixture(scope="session")
def chat_lengths() -> Callable[..., list[int]]:
    """`chat_lengths(documents, longest=8192, seed=0)`: short and even, 1,259 tokens on average."""

    def draw(documents: int, longest: int = 8192, seed: int = 0) -> list[int]:
        return draw_lengths(CHAT, documents, longest=longest, seed=seed)

    return draw


@pytest.fixture(scope="session")
def long_chat_lengths() -> Callable[..., list[int]]:
    """`long_chat_lengths(documents, longest=65536, seed=0)`: a tail of documents 100 times the median."""

    def draw(documents: int, longest: int = 65_536, seed: int = 0) -> list[int]:
        return draw_lengths(LONG_CHAT, documents, longest=longest, seed=seed)

    return draw
