"""From JSON text to events: a typed decoder for good text, a patient one for the rest.

msgspec decodes 4 to 5 times faster than the standard library and skips what is not asked for, but refuses a whole
piece for one NaN, raw newline or bad escape. Such a piece, and every piece where msgspec is not installed, goes
through `json` event by event. Both give objects with the same attributes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple, Protocol

Scalar = int | float | str | None


class EventArgs(Protocol):
    """The arguments of an event that matter here; anything else in a file is skipped."""

    correlation: Scalar
    device: Scalar
    stream: Scalar
    sequence: Scalar
    stack: Scalar


class Event(Protocol):
    """One trace event."""

    ph: Any
    cat: Any
    name: Any
    ts: Any
    dur: Any
    pid: Any
    tid: Any
    args: EventArgs | None


class PlainArgs:
    """`EventArgs` from a decoded dict."""

    __slots__ = ("correlation", "device", "sequence", "stack", "stream")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.correlation: Scalar = fields.get("correlation")
        self.device: Scalar = fields.get("device")
        self.stream: Scalar = fields.get("stream")
        self.sequence: Scalar = fields.get("Sequence number")
        self.stack: Scalar = fields.get("Call stack")


class PlainEvent:
    """`Event` from a decoded dict."""

    __slots__ = ("args", "cat", "dur", "name", "ph", "pid", "tid", "ts")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.ph = fields.get("ph")
        self.cat = fields.get("cat")
        self.name = fields.get("name")
        self.ts = fields.get("ts")
        self.dur = fields.get("dur")
        self.pid = fields.get("pid")
        self.tid = fields.get("tid")
        args = fields.get("args")
        self.args: EventArgs | None = PlainArgs(args) if isinstance(args, dict) else None


def fast_decoder() -> Callable[[memoryview], list[Any]] | None:
    """A decoder for the JSON text of an array of events, or None without msgspec.

    The decoder raises ValueError or RecursionError for text it does not take.
    """
    try:
        import msgspec
    except ImportError:
        return None

    args = msgspec.defstruct(
        "FastArgs",
        [(name, Scalar, None) for name in ("correlation", "device", "stream", "sequence", "stack")],
        rename={"sequence": "Sequence number", "stack": "Call stack"},
        gc=False,
    )
    event = msgspec.defstruct(
        "FastEvent",
        [
            ("ph", str | None, None),
            ("cat", str | None, None),
            *((name, Scalar, None) for name in ("name", "ts", "dur", "pid", "tid")),
            ("args", args | None, None),
        ],
        gc=False,
    )
    decoder = msgspec.json.Decoder(list[event])  # type: ignore[valid-type]

    def decode(body: memoryview) -> list[Any]:
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error

    return decode


_BOUNDARY = re.compile(r"\}\s*,\s*\{")
_ARRAY_END = re.compile(r"\}\s*(?P<end>\])\s*(?:,|\}|$)")
_GAP = re.compile(r"[\s,]*")

_LONGEST_EVENT = 1 << 20
"""An event that does not decode counts as cut off, not as broken, while fewer characters than this follow it."""

_WINDOW = 1 << 14
"""Characters decoded from at a time. `json` counts the lines before every error, so each would cost the whole text."""

_RECURSION_COST = 50_000
"""Characters charged for an event nested too deeply or with a number too long: such errors have no position."""


class Decoded(NamedTuple):
    """Events, the position where undecoded text begins, and whether the array ended there."""

    events: list[PlainEvent]
    position: int
    closed: bool


class SlowDecoder:
    """Decode events one by one and step over what is broken, in time linear in the text.

    Args:
        exact: keep fractions as `Decimal`. A float resolves 0.25 us at 1.7e15 us, the absolute times of early 2024.

    A hostile text can make every event look long and fail at its end. `budget` bounds the characters scanned in vain;
    when it is spent, `exhausted` is set and the rest is left alone.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self._decoder = json.JSONDecoder(strict=False, parse_float=_exact_number if exact else None)
        self.budget = 64 << 20
        self.dropped = 0
        self.exhausted = False

    def decode(self, text: str, *, final: bool) -> Decoded:
        """The events of `text`, as far as it goes.

        Args:
            text: from the start of an event on.
            final: no more text follows.
        """
        events: list[PlainEvent] = []
        base, position, window = 0, 0, text[:_WINDOW]
        while True:
            position = _end_of_gap(window, position)
            if position >= len(window):
                base += position
                if base >= len(text):
                    return Decoded(events, len(text), False)
                position, window = 0, text[base : base + _WINDOW]
                continue
            if window[position] == "]":
                return Decoded(events, base + position + 1, True)
            try:
                value, position = self._decoder.raw_decode(window, position)
            except (ValueError, RecursionError, InvalidOperation) as error:
                base += position
                cut_off = _may_be_cut_off(error, len(window))
                if cut_off and base - position + len(window) < len(text):
                    position, window = 0, text[base : base + 16 * len(window)]
                    continue
                if cut_off and not final and len(text) - base < _LONGEST_EVENT:
                    return Decoded(events, base, False)
                resumed = self._step_over(text, base, _scanned_in_vain(window, position, error), final)
                if resumed is None:
                    return Decoded(events, len(text), False)
                base, position, window = resumed, 0, text[resumed : resumed + _WINDOW]
                continue
            if isinstance(value, dict):
                events.append(PlainEvent(value))
            else:
                self.dropped += 1

    def _step_over(self, text: str, position: int, in_vain: int, final: bool) -> int | None:
        """Where the next event begins, or None when nothing more can be had."""
        self.dropped += 1
        self.budget -= in_vain
        if self.budget < 0:
            self.exhausted = True
            return None
        boundary = _BOUNDARY.search(text, position)
        if boundary is not None:
            return boundary.end() - 1
        # Nothing follows but, at the end of a file, perhaps the end of the array behind a broken last event.
        closing = _ARRAY_END.search(text, position) if final else None
        return None if closing is None else closing.start("end")


def _may_be_cut_off(error: Exception, length: int) -> bool:
    """Whether more text could have mended it: it is wrong at the end only, or a string is open there."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos >= length - 16 or error.msg.startswith("Unterminated string")


def _scanned_in_vain(window: str, position: int, error: Exception) -> int:
    if not isinstance(error, json.JSONDecodeError):
        return _RECURSION_COST
    if error.msg.startswith("Unterminated string"):  # reported at its start, found out at the end of the text
        return len(window) - position
    return error.pos - position + 1


def _end_of_gap(text: str, position: int) -> int:
    match = _GAP.match(text, position)
    return match.end() if match else position


def _exact_number(digits: str) -> Decimal | float:
    return Decimal(digits) if len(digits) < 64 else float(digits)


_BOUNDARY_BYTES = re.compile(rb"\}\s*(?P<comma>,)\s*\{")


def last_cut(buffer: bytearray) -> int:
    """Position of the comma of the last `}, {` in `buffer`: the text before it ends with a whole event. -1: none.

    An event may hold such a place itself; the decoder then refuses the piece and the slow one sorts it out.
    """
    size = 1 << 16
    while True:
        start = max(0, len(buffer) - size)
        last = -1
        for match in _BOUNDARY_BYTES.finditer(buffer, start):
            last = match.start("comma")
        if last >= 0 or start == 0:
            return last
        size *= 8


def scalar_text(value: object, *, limit: int = 4096) -> str:
    """A name from a file as text that can be printed and compared: bounded, no lone surrogates."""
    text = value if isinstance(value, str) else "(no name)" if value is None else str(value)[:limit]
    text = text[:limit]
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def exact_ns(value: Any) -> int | None:
    """Microseconds from a file as integer nanoseconds; None for anything that is not a usable number."""
    if isinstance(value, bool) or value is None or (isinstance(value, str) and len(value) > 64):
        return None
    try:
        number = Decimal(value) if isinstance(value, (int, str, Decimal)) else Decimal(repr(float(value)))
        scaled = (number * 1000).to_integral_value()
        return int(scaled) if abs(scaled) <= LIMIT_NS else None
    except (InvalidOperation, ValueError, TypeError, OverflowError):
        return None


LIMIT_NS = 1000 << 52
"""Largest time taken, 142 years: two of them still add up in 64 bits."""
