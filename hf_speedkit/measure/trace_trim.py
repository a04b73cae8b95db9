"""Cut a trace down to one step: small enough to keep in a repository, with the same answers for that step.

How a golden trace is made: record with `TraceCallback(steps=(20,))` on the GPU, then

    from hf_speedkit.measure.trace_trim import trim_trace
    trim_trace("trace_rank0_step20.json.gz", "tests/data/fast_h200.json.gz", share=0.25)
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import TraceError
from hf_speedkit.measure.trace_columns import ABSENT, DEVICE_KINDS, STEP_PREFIX, Columns, Table, read_columns
from hf_speedkit.measure.trace_reader import TraceStream
from hf_speedkit.measure.trace_steps import short_line, step_of_events, steps_that_did_something
from hf_speedkit.measure.trace_work import Mask, Steps, Work, find_steps, join_work

_HOST_CATEGORIES = {
    "op": "cpu_op",
    "annotation": "user_annotation",
    "call": "cuda_runtime",
    "python": "python_function",
    "overhead": "overhead",
}
_DEVICE_CATEGORIES = dict(zip(DEVICE_KINDS, ("kernel", "gpu_memcpy", "gpu_memset"), strict=True))


def trim_trace(path: str | Path, out: str | Path, step: int = 0, *, share: float = 1.0, python: bool = True) -> Path:
    """Write one step of a trace, with the device work it launched, as a new .json.gz file.

    Kept: complete events of the host that begin in the step (cut off at its end), the device events those started,
    device names, rank, and our own facts. Dropped: everything before and after, flows, counters, shapes and every
    other argument, host and user names, all but the last two parts of paths. Times count from the start of the step.

    Args:
        path: a trace.
        out: file to write, gzip.
        step: which of the marked steps that did something, counted from 0.
        share: keep only the first part of the step, 0 < share <= 1; the step mark is shortened with it.
        python: keep Python functions (traces with stacks).

    Returns:
        `out`.

    Raises:
        TraceError: no such step, or `path` is no trace.
        ValueError: `share` out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    stream = TraceStream(Path(path))
    columns = read_columns(stream)
    work, steps = join_work(columns), find_steps(columns)
    index = _index_of(Path(path), columns, work, steps, step)
    start, end = int(steps.start[index]), int(steps.end[index])
    end = start + max(1, round((end - start) * share))
    events = [
        *_mark(steps.label[index], end - start),
        *_host_events(columns, start, end, python),
        *_device_events(columns, work, (step_of_events(work, steps) == index) & (work.launched_at() < end), start),
    ]
    text = json.dumps(
        {"schemaVersion": 1, **_metadata(stream, columns), "traceEvents": events}, separators=(",", ":"), sort_keys=True
    )
    Path(out).write_bytes(gzip.compress(text.encode(), mtime=0))
    return Path(out)


def _index_of(path: Path, columns: Columns, work: Work, steps: Steps, wanted: int) -> int:
    full = steps_that_did_something(columns, work, steps).nonzero()[0]
    if not 0 <= wanted < len(full):
        raise TraceError(
            f"{path.name} has no step {wanted}: {len(full)} marked steps did anything",
            mend="count from 0, or record with TraceCallback, which marks steps",
        )
    return int(full[wanted])


def _metadata(stream: TraceStream, columns: Columns) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    properties = stream.metadata.get("deviceProperties")
    if isinstance(properties, list):
        used = {device for device, _ in columns.places}
        kept["deviceProperties"] = [
            {"id": one.get("id"), "name": one.get("name")}
            for one in properties
            if isinstance(one, dict) and str(one.get("id")) in used
        ]
    info = stream.metadata.get("distributedInfo")
    if isinstance(info, dict):
        kept["distributedInfo"] = {key: info[key] for key in ("backend", "rank", "world_size") if key in info}
    if isinstance(stream.metadata.get("hf_speedkit"), dict):
        kept["hf_speedkit"] = stream.metadata["hf_speedkit"]
    return kept


def _mark(label: str, length_ns: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "X", "cat": "user_annotation", "name": label, "pid": 1, "tid": 1, "ts": 0, "dur": _us(length_ns)}


def _host_events(columns: Columns, start: int, end: int, python: bool) -> Iterator[dict[str, Any]]:
    for kind, category in _HOST_CATEGORIES.items():
        if kind == "python" and not python:
            continue
        table = columns.table(kind)
        table = table.where((table.start >= start) & (table.start < end))
        for event, i in _common(columns, table, category, start):
            if event["name"].startswith(STEP_PREFIX):
                continue
            if kind == "python":
                event["name"] = short_line(event["name"])
            event["dur"] = _us(min(int(table.duration[i]), end - int(table.start[i])))
            pid, tid = columns.places[table.place[i]]
            event.update(pid=pid, tid=tid)
            _argument(event, "correlation", int(table.correlation[i]))
            _argument(event, "Sequence number", int(table.sequence[i]))
            yield event


def _device_events(columns: Columns, work: Work, chosen: Mask, start: int) -> Iterator[dict[str, Any]]:
    table, kinds = work.events.where(chosen), work.kind[chosen]
    for event, i in _common(columns, table, "", start):
        device, stream = columns.places[table.place[i]]
        event.update(cat=_DEVICE_CATEGORIES[DEVICE_KINDS[kinds[i]]], pid=device, tid=stream)
        event["args"] = {"device": device, "stream": stream}
        _argument(event, "correlation", int(table.correlation[i]))
        yield event


def _common(columns: Columns, table: Table, category: str, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    for i in range(len(table)):
        yield (
            {
                "ph": "X",
                "cat": category,
                "name": columns.names[table.name[i]],
                "ts": _us(int(table.start[i]) - start),
                "dur": _us(int(table.duration[i])),
            },
            i,
        )


def _argument(event: dict[str, Any], name: str, value: int) -> None:
    if value != ABSENT:
        event.setdefault("args", {})[name] = value


def _us(nanoseconds: int) -> float | int:
    whole, rest = divmod(nanoseconds, 1000)
    return nanoseconds / 1000 if rest else whole
