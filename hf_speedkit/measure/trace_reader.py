"""Stream the events of a Chrome trace file in pieces, with the few top-level facts that matter.

Reading rule: behind the `[` of `traceEvents`, cut at the last `}, {` of what is at hand, decode that much, keep the
rest. A whole-file decode of 0.6 GB of JSON took 1.6 GB of memory (a first look), this 0.4 GB at the same CPU time
(benchmarks/results/trace_reading.json). The container is an object, or a bare array in the oldest files; metadata may
come before or after.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import TraceError
from hf_speedkit.measure.trace_bytes import DEFAULT_LIMIT_BYTES, ByteStream
from hf_speedkit.measure.trace_events import Event, SlowDecoder, fast_decoder, last_cut

KEPT_KEYS = frozenset({"deviceProperties", "distributedInfo", "hf_speedkit", "schemaVersion"})
"""Top-level keys that are read. Others hold host names, user names and paths (`host_name`, `username`, `traceName`)."""

_METADATA_LIMIT = 64 << 20
_EVENT_LIMIT = 64 << 20
_ARRAY_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_ENDS_EARLY = "the file ends inside the event list"
_OPEN, _CLOSE = b"[]"
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Piece:
    """Events decoded together, and the way to decode them again with exact fractions."""

    events: list[Any]
    exactly: Callable[[], list[Any]]


class TraceStream:
    """Iterate over the events of one trace file.

    Args:
        path: a trace, .json or .json.gz.
        limit_bytes: JSON read at most, decompressed.

    After iteration: `metadata` (kept top-level keys), `partial` (why the file is not whole), `dropped` (array
    entries that are not events), `count` (array entries that are).

    Raises:
        TraceError: no file, no trace, or more than `limit_bytes`.
    """

    def __init__(self, path: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._name = path.name
        self._bytes = ByteStream(path, limit_bytes=limit_bytes)
        self._pieces = iter(self._bytes)
        self._buffer = bytearray()
        self._ended = False
        self._fast = fast_decoder()
        self._slow = SlowDecoder()
        self.metadata: dict[str, Any] = {}
        self.partial: list[str] = []
        self.count = 0

    @property
    def dropped(self) -> int:
        """Array entries that could not be decoded."""
        return self._slow.dropped

    def __iter__(self) -> Iterator[Piece]:
        in_object = self._find_events()
        yield from self._events()
        if in_object and not self.partial:
            self._read_metadata(b"{" + self._buffer.lstrip(b", \t\r\n") + self._rest())
        self._buffer.clear()
        if self._bytes.broken:  # says more than what follows from it
            self.partial = [self._bytes.broken, *(reason for reason in self.partial if reason != _ENDS_EARLY)]

    # The head of the file.

    def _find_events(self) -> bool:
        """Consume everything up to the events; True when they lie in an object."""
        self._more()
        self._buffer = self._buffer.removeprefix(b"\xef\xbb\xbf").lstrip()
        if self._buffer[:1] == b"[":
            return False
        if self._buffer[:1] != b"{":
            raise TraceError(
                f"{self._name} is not a Chrome trace: it begins with {bytes(self._buffer[:16])!r}",
                mend="give a file written by torch.profiler's export_chrome_trace (.json or .json.gz)",
            )
        while (start := _ARRAY_START.search(self._buffer)) is None:
            if len(self._buffer) > _METADATA_LIMIT or not self._more():
                raise TraceError(
                    f"{self._name} holds no traceEvents",
                    evidence=(self._bytes.broken,) if self._bytes.broken else (),
                    mend="give a file written by torch.profiler's export_chrome_trace (.json or .json.gz)",
                )
        self._read_metadata(self._buffer[: start.start()])
        self._buffer = self._buffer[start.end() - 1 :]
        return True

    def _read_metadata(self, text: bytes | bytearray) -> None:
        """Kept keys of `{"key": value, ...`; reading ends at the first value that is not JSON.

        Windows paths with bare backslashes and raw newlines occur here (pytorch#98432): not worth a partial mark.
        """
        decoder = json.JSONDecoder(strict=False)
        body = text.decode("utf-8", "replace")
        position = 1
        try:
            while True:
                position = _skip_space(body, position)
                if body[position : position + 1] == ",":
                    position = _skip_space(body, position + 1)
                if body[position : position + 1] != '"':
                    return
                key, position = decoder.raw_decode(body, position)
                position = _skip_space(body, position)
                if body[position : position + 1] != ":":
                    return
                value, position = decoder.raw_decode(body, _skip_space(body, position + 1))
                if key in KEPT_KEYS:
                    self.metadata.setdefault(key, value)
        except (ValueError, RecursionError):
            return

    # The events.

    def _events(self) -> Iterator[Piece]:
        """Decode piece by piece. The buffer begins with the `[` of the array or with the `,` of the last cut."""
        final = False
        while True:
            cut = len(self._buffer) if final else last_cut(self._buffer)
            if cut < 0:
                if len(self._buffer) > _EVENT_LIMIT:
                    self.partial.append(f"an event of more than {_EVENT_LIMIT >> 20} MiB ends the reading")
                    return
                final = not self._more()
                continue
            events = None if final or self._fast is None else self._decode_fast(cut)
            if events is not None:
                self.count += len(events)
                yield Piece(events, lambda end=cut: _decode_exactly(self._text(end)))  # type: ignore[misc]
                del self._buffer[:cut]
                continue
            text = self._text(cut)
            patient = self._slow.decode(text, final=final)
            self.count += len(patient.events)
            yield Piece(list(patient.events), lambda known=text: _decode_exactly(known))  # type: ignore[misc]
            unused = text[patient.position :].encode("utf-8", "replace")
            self._buffer[:cut] = unused if patient.closed else b"," + unused if unused else b""
            if patient.closed:
                return
            if self._slow.exhausted:
                self.partial.append("too much of the file is damaged: reading stopped")
                return
            if final:
                self.partial.append(_ENDS_EARLY)
                return
            if unused:  # the same cut would come again
                final = not self._more()

    def _decode_fast(self, cut: int) -> list[Any] | None:
        """Decode the buffer up to the comma at `cut` in place, without copies of its bytes."""
        assert self._fast is not None
        first, comma = self._buffer[0], self._buffer[cut]
        self._buffer[0], self._buffer[cut] = _OPEN, _CLOSE
        try:
            with memoryview(self._buffer) as whole, whole[: cut + 1] as array:
                return self._fast(array)
        except (ValueError, RecursionError):
            return None  # something msgspec does not take: the patient decoder says what
        finally:
            self._buffer[0], self._buffer[cut] = first, comma

    def _text(self, cut: int) -> str:
        return self._buffer[1:cut].decode("utf-8", "replace")

    def _more(self) -> bool:
        """Put one more piece into the buffer; False at the end of the file."""
        if self._ended:
            return False
        piece = next(self._pieces, None)
        if piece is None:
            self._ended = True
            return False
        self._buffer += piece
        return True

    def _rest(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        for piece in self._pieces:
            if size < _METADATA_LIMIT:
                pieces.append(piece)
                size += len(piece)
        return b"".join(pieces)


def _decode_exactly(text: str) -> list[Event]:
    return list(SlowDecoder(exact=True).decode(text, final=True).events)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def whole_number(value: object) -> int | None:
    """A non-negative integer from a file, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def device_names(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Product name per device index."""
    found: dict[str, str] = {}
    properties = metadata.get("deviceProperties")
    for entry in properties if isinstance(properties, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            found[str(entry.get("id"))] = entry["name"][:128]
    return found
