"""Three ways to put documents together, as functions of their lengths alone.

Each takes `lengths` (tokens of every document), `order` (document indices in arrival order) and the slots of a row, and
returns packs of document indices. None checks its input: `planner.plan_packing` does, once for all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Protocol

Packs = list[tuple[int, ...]]

FIFO_WINDOW_DOCUMENTS = 128
"""Documents that fifo_close looks at; 128 of them hold 8,128 pairs, about one for each sum up to 8,192. On 207,865
chat-like lengths in rows of 8,192 (32,020 rows at the least) windows of 64, 128, 256 need 32,032, 32,026, 32,026."""

FIFO_RESERVE = 2.6
"""fifo_close keeps this many mean documents of room for closing a row. On the same lengths 1.4, 1.8, 2.2, 2.6, 3.0 need
32,114, 32,053, 32,034, 32,026, 32,024 rows; on nine other length sets 2.6 was within 3 rows of the best of them."""

BEST_FIT_WINDOW_DOCUMENTS = 32_768
"""Documents that best_fit_decreasing sorts at once. Where documents are half a row (10,008 rows at the least) windows
of 1,000, 8,192, 32,768 need 10,242, 10,116, 10,070 rows."""


def next_fit(lengths: Sequence[int], order: Sequence[int], tokens_per_batch: int) -> Packs:
    """Pack documents strictly in order; a document that does not fit opens a new row.

    Nothing moves, so about 10 % of the slots stay empty on chat data (half a document at the end of every row).
    """
    packs: Packs = []
    pack: list[int] = []
    room = tokens_per_batch
    for document in order:
        length = lengths[document]
        if length > room:
            packs.append(tuple(pack))
            pack, room = [], tokens_per_batch
        pack.append(document)
        room -= length
    if pack:
        packs.append(tuple(pack))
    return packs


def best_fit_decreasing(
    lengths: Sequence[int],
    order: Sequence[int],
    tokens_per_batch: int,
    window_documents: int = BEST_FIT_WINDOW_DOCUMENTS,
) -> Packs:
    """Pack the longest documents first, each into the fullest row that still has room, window by window.

    Packs of a window come out in the arrival order of their longest document, not by size: sorted by size, the steps of
    an epoch would go from long documents to short ones.
    """
    windows = -(-len(order) // window_documents)
    packs: Packs = []
    for window in range(windows):
        # Windows of equal size: a short last one would be packed badly.
        block = order[len(order) * window // windows : len(order) * (window + 1) // windows]
        packs.extend(_best_fit_block(lengths, block, tokens_per_batch))
    return packs


def _best_fit_block(lengths: Sequence[int], block: Sequence[int], tokens_per_batch: int) -> Packs:
    shift = len(block).bit_length()
    row_mask = (1 << shift) - 1
    rooms: list[int] = []  # sorted; room << shift | row, so that one integer carries both
    rows: list[list[int]] = []  # arrival positions
    for position in sorted(range(len(block)), key=lambda position: -lengths[block[position]]):
        length = lengths[block[position]]
        tightest = bisect_left(rooms, length << shift)
        if tightest == len(rooms):
            row, room = len(rows), tokens_per_batch - length
            rows.append([position])
        else:
            key = rooms.pop(tightest)
            row, room = key & row_mask, (key >> shift) - length
            rows[row].append(position)
        if room:
            insort(rooms, room << shift | row)
    rows.sort(key=lambda row: row[0])
    return [tuple([block[position] for position in row]) for row in rows]


def fifo_close(
    lengths: Sequence[int],
    order: Sequence[int],
    tokens_per_batch: int,
    window_documents: int = FIFO_WINDOW_DOCUMENTS,
) -> Packs:
    """Fill rows in arrival order and close each with the document or pair of the window that fits tightest.

    A row starts with the oldest document of the window and goes on in order while the room left exceeds `FIFO_RESERVE`
    mean documents; then singles and pairs close it. No document ends up more than 2 x window places from where it
    arrived, so the composition of steps stays that of a random order. O(window) per row.
    """
    window = _Window(lengths, order, window_documents)
    packs: Packs = []
    placed = 0
    while window.ranked:
        pack: list[int] = []
        room = fill_in_order(window, pack, tokens_per_batch)
        close_row(window, pack, room, placed)
        placed += len(pack)
        packs.append(tuple(pack))
    return packs


class Window(Protocol):
    """What the two halves of fifo_close ask of the documents they choose from; see `_Window`."""

    ranked: list[int]
    shift: int
    size: int
    tokens: int
    oldest: int

    def take(self, key: int) -> int:
        """Remove the document of `key`, let the next one in, and return its length."""

    def document(self, key: int) -> int:
        """The document of `key`, as it is named in a pack."""

    def oldest_key(self) -> int:
        """Key of the document that waits longest."""


class _Window:
    """The documents that fifo_close may choose from: in arrival order and ranked by length.

    `ranked` holds length << shift | arrival position, sorted: one bisection finds a length or a document. The shift
    leaves a bit to spare, so that the sum of two keys still starts with the sum of their lengths.
    """

    __slots__ = ("arrived", "lengths", "oldest", "order", "ranked", "shift", "size", "taken", "tokens")

    def __init__(self, lengths: Sequence[int], order: Sequence[int], window_documents: int) -> None:
        self.lengths = lengths
        self.size = window_documents
        self.order = order
        self.shift = len(order).bit_length() + 1
        self.taken = bytearray(len(order) + 1)
        self.oldest = 0
        self.arrived = 0
        self.tokens = 0
        self.ranked: list[int] = []
        for _ in range(min(window_documents, len(order))):
            self._admit()

    def _admit(self) -> None:
        length = self.lengths[self.order[self.arrived]]
        insort(self.ranked, length << self.shift | self.arrived)
        self.tokens += length
        self.arrived += 1

    def take(self, key: int) -> int:
        """Remove the document of `key`, let the next one in, and return its length."""
        length = key >> self.shift
        position = key & ((1 << self.shift) - 1)
        del self.ranked[bisect_left(self.ranked, key)]
        self.tokens -= length
        self.taken[position] = 1
        while self.taken[self.oldest]:  # one spare entry at the end stops it
            self.oldest += 1
        if self.arrived < len(self.order):
            self._admit()
        return length

    def document(self, key: int) -> int:
        """Index of the document of `key`."""
        return self.order[key & ((1 << self.shift) - 1)]

    def oldest_key(self) -> int:
        """Key of the document that waits longest."""
        return self.lengths[self.order[self.oldest]] << self.shift | self.oldest


def fill_in_order(window: Window, pack: list[int], room: int) -> int:
    """Put the oldest documents into `pack`, at least one, and return the room left for closing it."""
    reserve = FIFO_RESERVE * window.tokens / len(window.ranked)
    while True:
        key = window.oldest_key()
        if key >> window.shift > room:
            return room
        pack.append(window.document(key))
        room -= window.take(key)
        if room <= reserve or not window.ranked:
            return room


def close_row(window: Window, pack: list[int], room: int, placed: int) -> None:
    """Add the tightest single or pair to `pack` until nothing in the window fits any more."""
    while True:
        fitting = bisect_right(window.ranked, ((room + 1) << window.shift) - 1)
        if not fitting:
            return
        # Behind a window of giants, short documents could pass a long one for ever: here it stays within 2 x window.
        allowed = window.oldest + 2 * window.size - placed - len(pack)
        if allowed < 2:
            key = window.oldest_key()
            if key >> window.shift > room:
                return
            closing: tuple[int, ...] = (key,)
        else:
            closing = _tightest(window.ranked, fitting, room, window.shift)
        for key in closing:
            pack.append(window.document(key))
            room -= window.take(key)


def _tightest(ranked: Sequence[int], fitting: int, room: int, shift: int) -> tuple[int, ...]:
    """The document or pair among the first `fitting` ranked ones whose tokens come closest to `room`."""
    too_much, perfect = (room + 1) << shift, room << shift
    low, high = 0, fitting - 1
    best: tuple[int, ...] = (ranked[high],)
    closest = ranked[high]
    while closest < perfect and low < high:
        # Keys are added with their lengths: two positions never carry into the length (see `_Window`).
        total = ranked[low] + ranked[high]
        if total >= too_much:
            high -= 1
            continue
        if total > closest:
            closest = total
            best = (ranked[high], ranked[low])
        low += 1
    return best
