"""Packing a streaming dataset: rows made online from a bounded buffer, in an order that a resumed run repeats.

Nobody knows how many documents a stream holds, so nothing can be planned ahead and ranks cannot agree on a number of
rows. Two rules replace the plan. Each rank packs the documents it reads itself, by fifo_close, which looks at a window
of 128 of them. And a rank never ends: behind its last document come rows without documents, which train nothing and
keep it in step, until whoever drives the stream sees that no rank has any left.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from hf_speedkit.core.document_records import DocumentReport
from hf_speedkit.core.errors import ConfigurationError, PackingError
from hf_speedkit.packing.collator import PackedCollator
from hf_speedkit.packing.strategies import FIFO_WINDOW_DOCUMENTS, close_row, fill_in_order
from hf_speedkit.packing.stream_documents import StreamDocument, no_documents, read_document
from hf_speedkit.packing.stream_source import keeps_its_place

# Rows of the source between two notes of where it stood. The oldest waiting document is at most two windows behind,
# so a resumed run reads some 300 documents again.
_NOTE_EVERY = 32

# Where documents without targets come first: a mask that masks everything must not read a whole stream to be found.
_SAMPLED_ROWS = 10_000

_KEY_SHIFT = 40
"""Bits for a document's number below its length, one of them to spare: 5 x 10^11 documents an epoch and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Where a stream stands behind one of its rows: enough to go on with the very next one.

    Args:
        epoch: passes over the data that are complete.
        rows: rows with documents that were made in this one.
        source: `state_dict()` of the dataset at document `base`; None is its beginning.
        base: documents read before `source`.
        base_report: what had been counted there.
        taken: numbers of the documents from `base` on that are in rows already.
        arrived: documents read.
        placed: documents in rows.
        report: what has been counted.
    """

    epoch: int
    rows: int
    source: Mapping[str, Any] | None
    base: int
    base_report: DocumentReport
    taken: tuple[int, ...]
    arrived: int
    placed: int
    report: DocumentReport

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> StreamState:
        """The state that `to_dict` wrote.

        Raises:
            PackingError: it did not.
        """
        try:
            reports = {name: DocumentReport(**saved[name]) for name in ("base_report", "report")}
            return cls(**{**saved, **reports, "taken": tuple(saved["taken"])})
        except (KeyError, TypeError) as error:
            raise PackingError(
                f"a saved stream state cannot be read: {error}", mend="resume from a checkpoint of this version"
            ) from error


class StreamRow(NamedTuple):
    """One row to train on: its documents (none: a row that keeps a rank in step) and where the stream stands then."""

    documents: tuple[dict[str, Any], ...]
    state: StreamState


class PackedStream(IterableDataset):  # type: ignore[type-arg]
    """Packs a tokenized streaming dataset of one rank into rows; never ends (see the module's first lines).

    Args:
        source: a `datasets.IterableDataset` with input_ids and labels, this rank's share of the data.
        tokens_per_batch: slots of a row.
        overlong: "error", "split", "truncate" or "drop", as in `documents.prepare_documents`.
        window_documents: documents that a row is chosen from.

    Raises:
        DatasetError, PackingError: while iterating, for a document that cannot be packed.

    Every pass calls `source.set_epoch`, so a source that was shuffled comes in another order each time. Memory: the
    window's documents. Resuming reads the window again and nothing else, except behind a shuffle buffer or a batched
    map, whose contents datasets (5.2) does not save: there a resumed run reads the pass from its beginning.
    """

    def __init__(
        self,
        source: Any,
        *,
        tokens_per_batch: int,
        overlong: str = "error",
        window_documents: int = FIFO_WINDOW_DOCUMENTS,
    ) -> None:
        self.source = source
        self.tokens_per_batch = tokens_per_batch
        self.overlong = overlong
        self.window_documents = window_documents
        self.epoch = 0
        self._first_epoch = 0
        self._start: StreamState | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass over the data that the next `iter()` makes, counted from where a loaded state stands."""
        self.epoch = self._first_epoch + epoch

    def load_state(self, state: StreamState | None) -> None:
        """Go on behind the row that `state` came with; None begins anew."""
        self._start = state
        self.epoch = self._first_epoch = 0 if state is None else state.epoch

    @property
    def resumed(self) -> bool:
        """Whether the next `iter()` goes on in the middle of a pass."""
        return self._start is not None and self._start.epoch == self.epoch

    def begin_next_pass(self) -> None:
        """Give up the rest of the pass under way; later `set_epoch` calls count from the next one."""
        self._start, self._first_epoch = None, self.epoch + 1
        self.epoch = self._first_epoch

    def first_documents(self, count: int) -> list[dict[str, Any]]:
        """The first documents of the data; the position of the stream does not change."""
        return self.sample(count)[0]

    def sample(self, count: int) -> tuple[list[dict[str, Any]], DocumentReport]:
        """The first documents of the data and what was counted while they were read, in at most 10,000 rows."""
        self.source.load_state_dict(None)
        reader = _Reader(self.source.take(_SAMPLED_ROWS), no_documents(self.tokens_per_batch, self.overlong))
        return [document.as_row() for document in islice(reader, count)], reader.report

    def __iter__(self) -> Iterator[StreamRow]:
        self.source.set_epoch(self.epoch)
        packer = self._packer(self._start if self.resumed else None)
        state = packer.state()
        for row in packer:
            state = row.state
            yield row
        while True:
            yield StreamRow((), state)

    def _packer(self, start: StreamState | None) -> _Packer:
        exact = keeps_its_place(self.source)
        packer = _Packer(self, start if exact else None)
        if start is not None and not exact:
            for _ in range(start.rows):
                if next(packer, None) is None:
                    raise PackingError(
                        "the stream ended before the row where the saved run stood",
                        mend="resume with the data and settings of the saved run",
                    )
        return packer


class _Reader:
    """Documents of a source, numbered as they arrive, with notes of where the source stood."""

    def __init__(self, source: Any, report: DocumentReport, arrived: int = 0) -> None:
        self.report = report
        self.arrived = arrived
        # (documents read, state of the source, counts) every few rows; the first says where reading began.
        self.notes: deque[tuple[int, Mapping[str, Any] | None, DocumentReport]] = deque()
        self._source = source
        self._rows = iter(source)
        self._read = 0
        self._pieces: deque[StreamDocument] = deque()

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> StreamDocument:
        while not self._pieces:
            if self._read and self._read % _NOTE_EVERY == 0:
                self.notes.append((self.arrived, self._source.state_dict(), self.report))
            row = next(self._rows)
            self._read += 1
            pieces, self.report = read_document(row, self.report)
            self._pieces.extend(pieces)
        self.arrived += 1
        return self._pieces.popleft()


class _Packer:
    """fifo_close over a reader: the `Window` of strategies.py with documents behind it."""

    def __init__(self, stream: PackedStream, start: StreamState | None) -> None:
        self.shift = _KEY_SHIFT
        self.size = stream.window_documents
        self.ranked: list[int] = []
        self.tokens = 0
        self.oldest = 0 if start is None else start.base
        self.taken: set[int] = set()
        self._slots = stream.tokens_per_batch
        self._epoch = stream.epoch
        self._rows = 0 if start is None else start.rows
        self._placed = 0 if start is None else start.placed
        self._documents: dict[int, StreamDocument] = {}
        base = 0 if start is None else start.base
        source = None if start is None else start.source
        report = no_documents(stream.tokens_per_batch, stream.overlong) if start is None else start.base_report
        # datasets keeps a loaded state for every later pass: None takes it back.
        stream.source.load_state_dict(None if source is None else dict(source))
        self._reader = _Reader(stream.source, report, base)
        self._reader.notes.append((base, source, report))
        if start is None:
            self._fill()
        else:
            self._restore(start)

    def __iter__(self) -> _Packer:
        return self

    def __next__(self) -> StreamRow:
        if not self.ranked:
            raise StopIteration
        pack: list[int] = []
        room = fill_in_order(self, pack, self._slots)
        close_row(self, pack, room, self._placed)
        self._placed += len(pack)
        self._rows += 1
        return StreamRow(tuple([self._documents.pop(number).as_row() for number in pack]), self.state())

    def state(self) -> StreamState:
        """Where the stream stands now."""
        notes = self._reader.notes
        while len(notes) > 1 and notes[1][0] <= self.oldest:
            notes.popleft()
        base, source, report = notes[0]
        self.taken = {number for number in self.taken if number >= base}
        return StreamState(
            epoch=self._epoch,
            rows=self._rows,
            source=source,
            base=base,
            base_report=report,
            taken=tuple(sorted(self.taken)),
            arrived=self._reader.arrived,
            placed=self._placed,
            report=self._reader.report,
        )

    def take(self, key: int) -> int:
        """Remove the document of `key`, let the next one in, and return its length."""
        length, number = key >> self.shift, self.document(key)
        del self.ranked[bisect_left(self.ranked, key)]
        self.tokens -= length
        self.taken.add(number)
        while self.oldest in self.taken:
            self.oldest += 1
        self._admit()
        return length

    def document(self, key: int) -> int:
        """Number of the document of `key`."""
        return key & ((1 << self.shift) - 1)

    def oldest_key(self) -> int:
        """Key of the document that waits longest."""
        return len(self._documents[self.oldest].input_ids) << self.shift | self.oldest

    def _fill(self) -> None:
        while len(self.ranked) < self.size and self._admit():
            pass

    def _restore(self, start: StreamState) -> None:
        self.taken = set(start.taken)
        while self._reader.arrived < start.arrived:
            if not self._admit():
                raise PackingError(
                    f"the stream has {self._reader.arrived:,} documents where the saved run had {start.arrived:,}",
                    mend="resume with the data and settings of the saved run",
                )
        while self.oldest in self.taken:
            self.oldest += 1

    def _admit(self) -> bool:
        document = next(self._reader, None)
        if document is None:
            return False
        number, length = self._reader.arrived - 1, len(document.input_ids)
        if number not in self.taken:  # else it came by a second time, after a resume
            self._documents[number] = document
            insort(self.ranked, length << self.shift | number)
            self.tokens += length
        return True


@dataclass(frozen=True, slots=True)
class StreamCollator:
    """A PackedCollator that also takes rows of a PackedStream, and hands on where the stream stands.

    The batch of a stream's row holds `stream_state` (a StreamState) beside PackedCollator's keys; take it out before
    the model's forward.
    """

    collator: PackedCollator

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Collate one StreamRow, or documents as PackedCollator does."""
        if not rows or not isinstance(rows[0], StreamRow):
            return self.collator(rows)
        if len(rows) != 1:
            raise ConfigurationError(
                f"{len(rows)} rows of a packed stream in one batch",
                evidence=("a micro-batch is one row of tokens_per_batch slots",),
                mend="set the loader's batch size to 1, and raise tokens_per_batch",
            )
        return {**self.collator(rows[0].documents), "stream_state": rows[0].state}
