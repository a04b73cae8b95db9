"""Marked steps in numbers, and the blocking calls inside them with the code that made them."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from hf_speedkit.core.trace_records import StepDevice, StepSummary
from hf_speedkit.core.trace_rows import SyncRow
from hf_speedkit.measure.trace_columns import ABSENT, Columns
from hf_speedkit.measure.trace_intervals import Nesting, union
from hf_speedkit.measure.trace_tables import Operators
from hf_speedkit.measure.trace_work import Host, Steps, Work

Ints = npt.NDArray[np.int64]

_EXPLAINED_SYNCS = 50_000
_CHAIN_LIMIT = 32
_AUTOGRAD_ENGINE = "autograd::engine::evaluate_function"


def steps_that_did_something(columns: Columns, work: Work, steps: Steps) -> npt.NDArray[np.bool_]:
    """Per step, whether an operator or a launch began in it."""
    operators = _per_step(steps, columns.table("op").start)
    launches = _per_step(steps, work.calls.start[work.launches])
    return np.asarray((operators > 0) | (launches > 0))


def step_of_events(work: Work, steps: Steps) -> Ints:
    """Step per device event, by the start of its launch call; -1 for none.

    By the kernel's own time, steps of a device that runs two steps behind counted 783, 539 and 483 launches instead
    of 895 each (TraceLens' public trace of a ResNet under DDP on MI300). It is all there is in a file that pairs none.
    """
    if not (work.call >= 0).any():
        return steps.of(work.events.start)
    return np.where(work.call >= 0, steps.of(work.launched_at()), -1)


def step_summaries(
    columns: Columns, work: Work, steps: Steps, host: Host, step_of_event: Ints, origin: int
) -> tuple[StepSummary, ...]:
    """All marked steps, empty ones included."""
    operators = _per_step(steps, columns.table("op").start)
    launch_calls = _per_step(steps, work.calls.start[work.launches])
    launched = _count(step_of_event, len(steps))
    seen = _per_step(steps, work.events.start)
    waits = union(np.concatenate([host.sync.start, host.data.start]), np.concatenate([host.sync.end, host.data.end]))
    data = host.data.overlap(steps.start, steps.end)
    waited = waits.overlap(steps.start, steps.end)
    devices = _devices_by_step(work, steps, step_of_event)
    return tuple(
        StepSummary(
            label=steps.label[i],
            start_ns=int(steps.start[i]) - origin,
            duration_ns=int(steps.end[i] - steps.start[i]),
            cpu_ops=int(operators[i]),
            launch_calls=int(launch_calls[i]),
            launches=int(launched[i]) if work.known else None,
            launches_in_window=int(seen[i]) if work.known else None,
            sync_wait_ns=int(waited[i] - data[i]),
            data_wait_ns=int(data[i]),
            host_ns=int(steps.end[i] - steps.start[i] - waited[i]),
            devices=devices[i],
        )
        for i in range(len(steps))
    )


def _devices_by_step(work: Work, steps: Steps, step_of_event: Ints) -> list[tuple[StepDevice, ...]]:
    rows: list[list[StepDevice]] = [[] for _ in range(len(steps))]
    for index, device in enumerate(work.devices):
        in_window = work.busy(work.device == index).overlap(steps.start, steps.end)
        own = _busy_by_step(work, step_of_event, index)
        for i in {*own, *np.flatnonzero(in_window).tolist()}:
            rows[i].append(StepDevice(device=device, busy_ns=own.get(i, 0), busy_in_window_ns=int(in_window[i])))
    return list(map(tuple, rows))


def _busy_by_step(work: Work, step_of_event: Ints, device: int) -> dict[int, int]:
    """Busy time on one device by the steps that launched work on it."""
    chosen = np.flatnonzero((work.device == device) & (step_of_event >= 0))
    chosen = chosen[np.argsort(step_of_event[chosen], kind="stable")]
    present, first = np.unique(step_of_event[chosen], return_index=True)
    parts = np.split(chosen, first[1:])
    return {
        step: union(work.events.start[mine], work.events.end[mine]).total
        for step, mine in zip(present.tolist(), parts, strict=False)
    }


def _per_step(steps: Steps, times: Ints) -> Ints:
    return _count(steps.of(times), len(steps))


def _count(step: Ints, steps: int) -> Ints:
    return np.bincount(step[step >= 0], minlength=steps).astype(np.int64)


def sync_rows(
    columns: Columns, operators: Operators, host: Host, steps: Steps, after_sync: Ints
) -> tuple[SyncRow, ...]:
    """Blocking calls inside the steps by cause, costliest first.

    Outside: a profiler ends every recording with a device synchronisation of its own. Without step marks that one is
    the last blocking call outside any operator, and left out likewise.
    """
    sync = host.sync
    operator = operators.around(sync.place, sync.start)
    inside = steps.of(sync.start) >= 0 if len(steps) else _all_but_the_profilers(columns, operator, host)
    sources = _Sources(columns)
    found: dict[tuple[str, str | None, str | None], list[int]] = {}
    for count, i in enumerate(np.flatnonzero(inside).tolist()):
        around = int(operator[i])
        explained = count < _EXPLAINED_SYNCS
        key = (
            columns.names[sync.name[i]],
            _cause(columns, operators, around) if explained and around >= 0 else None,
            sources.of(int(sync.place[i]), int(sync.start[i]), operators, around) if explained else None,
        )
        row = found.setdefault(key, [0, 0, 0])
        row[0] += 1
        row[1] += int(sync.duration[i])
        row[2] += int(after_sync[i])
    rows = [
        SyncRow(call=call, cause=cause, source=source, calls=calls, wait_ns=wait, idle_after_ns=idle)
        for (call, cause, source), (calls, wait, idle) in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.idle_after_ns, -row.wait_ns)))


def _all_but_the_profilers(columns: Columns, operator: Ints, host: Host) -> npt.NDArray[np.bool_]:
    wanted = np.ones(len(host.sync), dtype=bool)
    if len(wanted) and operator[-1] < 0 and columns.names[host.sync.name[-1]].endswith("DeviceSynchronize"):
        wanted[-1] = False
    return wanted


def _cause(columns: Columns, operators: Operators, innermost: int) -> str:
    """The operators around a call, outermost first: at most the outer two and the innermost one."""
    chain: list[str] = []
    at = innermost
    while at >= 0 and len(chain) < _CHAIN_LIMIT:
        name = columns.names[operators.table.name[at]]
        if not name.startswith(_AUTOGRAD_ENGINE):
            chain.append(name)
        at = int(operators.nesting.parent[at])
    chain.reverse()
    return " > ".join(chain if len(chain) <= 3 else [*chain[:2], chain[-1]])


_LINE = re.compile(r"\.py\(\d+\): ")
_NOT_THE_USERS = re.compile(
    r"(^|/)(torch|threading\.py|contextlib\.py|functools\.py)(/|\()|site-packages/torch/|^<built-in|^nn\.Module"
)


class _Sources:
    """Python lines around a moment, where the file holds stacks (`with_stack`, or "Call stack" in 2021 files)."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        table = columns.table("python")
        wanted = np.array([_is_user_line(name) for name in columns.names], dtype=bool)
        self._python = table.where(wanted[table.name]) if len(table) else table
        self._nesting: dict[int, tuple[Ints, Nesting]] = {}

    def of(self, place: int, time: int, operators: Operators, operator: int) -> str | None:
        """The innermost line outside torch, shortened to two path parts: no user's home directory leaves the file."""
        if len(self._python):
            if place not in self._nesting:
                mine = np.flatnonzero(self._python.place == place)
                self._nesting[place] = mine, Nesting(self._python.start[mine], self._python.end[mine])
            mine, nesting = self._nesting[place]
            found = int(nesting.enclosing(np.array([time], dtype=np.int64))[0])
            return short_line(self._columns.names[self._python.name[mine[found]]]) if found >= 0 else None
        while operator >= 0:
            stack = int(operators.table.stack[operator])
            if stack != ABSENT:
                lines = [line for line in self._columns.names[stack].split(";") if _is_user_line(line)]
                return short_line(lines[0]) if lines else None
            operator = int(operators.nesting.parent[operator])
        return None


def _is_user_line(name: str) -> bool:
    return _LINE.search(name) is not None and _NOT_THE_USERS.search(name) is None


def short_line(line: str) -> str:
    """A source line with the last two parts of its path: no one's home directory leaves the file."""
    return "/".join(line.replace("\\", "/").split("/")[-2:])
