"""The lines of a step log -> what a run did. The lines are strangers' text: each is checked, none is trusted.

Written by `hf_speedkit.trainer.sinks.JsonlSink`. A resumed run stands in one file: steps after its checkpoint stand
twice, and the later session holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hf_speedkit.core.errors import StepLogError
from hf_speedkit.core.records import Environment, StepRecord, TokenCounts

FORMAT = 1
"""The version of the lines that this reader knows."""

LARGEST = 1e18
"""Numbers beyond are damage: no count or time of a training run comes near, and pictures would overflow."""

_TIMES = ("data_wait_s", "host_time_s", "device_time_s", "device_wait_s", "exposed_comm_s", "flops", "recomputed_flops")
_PAUSES = ("eval_time_s", "save_time_s", "log_time_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One stretch of training, from a start or a checkpoint.

    Args:
        step: optimizer steps done before it.
        environment: where it ran; None where the line does not say.
    """

    step: int
    environment: Environment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedWindow:
    """What was logged at one logging step, all ranks together.

    Args:
        step: the step it was logged at.
        metrics: numbers by key; those that were not finite are left out.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """A step log, the steps that a later session repeated left out.

    Args:
        sessions: in order, those of which steps are left.
        steps: rank 0's steps, ascending.
        windows: ascending.
        repeated: steps that were run again by a later session.
        notes: what a reader should know of the file.
    """

    sessions: tuple[Session, ...]
    steps: tuple[StepRecord, ...]
    windows: tuple[LoggedWindow, ...]
    repeated: int
    notes: tuple[str, ...]


def parse_step_log(lines: Iterable[str], *, name: str = "the step log") -> StepLog:
    """Read a step log.

    Args:
        lines: its lines.
        name: how messages call it.

    Raises:
        StepLogError: no line is one of a step log, the format is not known, or no step is in it.
    """
    log = _Reader(name)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            log.read(number, line)
    return log.finish()


class _Reader:
    """The log so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sessions: list[Session] = []
        self._steps: dict[int, StepRecord] = {}
        self._windows: dict[int, LoggedWindow] = {}
        self._repeated = 0
        self._bad: list[int] = []
        self._last_is_cut = False
        self._lines = 0

    def read(self, number: int, line: str) -> None:
        self._lines += 1
        self._last_is_cut = False
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            self._last_is_cut = not line.endswith("\n")
            self._bad.append(number)
            return
        if not (isinstance(values, dict) and self._take(values)):
            self._bad.append(number)

    def _take(self, values: Mapping[str, Any]) -> bool:
        kind = values.get("kind")
        if kind == "session":
            return self._session(values)
        if not self._sessions:
            return False  # its format is not known
        if kind == "step":
            record = read_step(values)
            if record is not None:
                self._steps[record.step] = record
            return record is not None
        if kind == "window":
            step, metrics = _count(values.get("step")), values.get("metrics")
            if step is None or not isinstance(metrics, dict):
                return False
            known = {str(key): _number(value) for key, value in metrics.items()}
            kept = {key: value for key, value in known.items() if value is not None}
            self._windows[step] = LoggedWindow(step=step, metrics=kept)
            return True
        return False

    def _session(self, values: Mapping[str, Any]) -> bool:
        if values.get("format") != FORMAT:
            raise StepLogError(
                f"{self._name} has format {str(values.get('format'))[:40]!r}; this version reads format {FORMAT}.",
                mend="report with the hf-speedkit version that wrote it, or a newer one: pip install -U hf-speedkit",
            )
        step = _count(values.get("step"))
        if step is None:
            return False
        before = len(self._steps)
        self._steps = {at: record for at, record in self._steps.items() if at <= step}
        self._windows = {at: window for at, window in self._windows.items() if at <= step}
        self._repeated += before - len(self._steps)
        self._sessions = [session for session in self._sessions if session.step < step]
        self._sessions.append(Session(step=step, environment=read_environment(values.get("environment"))))
        return True

    def finish(self) -> StepLog:
        if not self._lines:
            raise StepLogError(
                f"{self._name} is empty.",
                mend="wait for the first logging step (logging_steps): lines are written then",
            )
        if not self._sessions:
            raise StepLogError(
                f"{self._name} is not a step log: no line says where a session begins.",
                mend="give the run's directory, or the speedkit_steps.jsonl in it",
            )
        if not self._steps:
            raise StepLogError(
                f"{self._name} holds no steps.",
                evidence=self._notes(()),
                mend="wait for the first logging step (logging_steps): lines are written then",
            )
        steps = tuple(self._steps[step] for step in sorted(self._steps))
        windows = tuple(self._windows[step] for step in sorted(self._windows))
        return StepLog(
            sessions=tuple(self._sessions),
            steps=steps,
            windows=windows,
            repeated=self._repeated,
            notes=self._notes(steps),
        )

    def _notes(self, steps: tuple[StepRecord, ...]) -> tuple[str, ...]:
        notes, bad = [], list(self._bad)
        if self._last_is_cut:
            bad.pop()
            notes.append("the last line is cut off and left out: the run was stopped while it wrote, or still writes")
        if bad:
            lines = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            notes.append(f"{_some(len(bad), 'line')} left out, which could not be read: {lines}")
        if self._repeated:
            notes.append(
                f"{_some(self._repeated, 'step')} left out, run again by a later session; the later run is shown"
            )
        if steps:
            expected = steps[-1].step - self._sessions[0].step
            if expected > len(steps):
                notes.append(f"{_some(expected - len(steps), 'step')} missing; the time is not known")
        if steps and not self._windows:
            notes.append("no logging step was reached: rates of all ranks are not known")
        return tuple(notes)


def read_step(values: Mapping[str, Any]) -> StepRecord | None:
    """A step record from its JSON form; None where it is damaged."""
    step, tokens, time_s = _count(values.get("step")), values.get("tokens"), _time(values.get("step_time_s"))
    slots = _count(tokens.get("slots")) if isinstance(tokens, dict) else None
    if step is None or slots is None or time_s is None or not isinstance(tokens, dict):
        return None
    excluded, nonfinite = values.get("excluded"), values.get("nonfinite")
    counts: dict[str, Any] = {field.name: _count(tokens.get(field.name)) for field in fields(TokenCounts)}
    times: dict[str, Any] = {name: _time(values.get(name)) for name in _TIMES}
    times |= {name: _time(values.get(name)) or 0.0 for name in _PAUSES}
    return StepRecord(
        step=step,
        micro_batches=_count(values.get("micro_batches")) or 1,
        tokens=TokenCounts(**{**counts, "slots": slots}),
        step_time_s=time_s,
        **times,
        launches=_count(values.get("launches")),
        compiled_kernels=_count(values.get("compiled_kernels")),
        nonfinite=nonfinite if isinstance(nonfinite, bool) else None,
        excluded=str(excluded)[:40] if excluded is not None else None,
    )


def read_environment(values: object) -> Environment | None:
    """An environment from its JSON form; None for anything else."""
    if not isinstance(values, dict):
        return None
    packages, devices = values.get("packages"), values.get("devices")
    return Environment(
        python=str(values.get("python", "?"))[:80],
        packages={str(key)[:80]: str(value)[:80] for key, value in packages.items()}
        if isinstance(packages, dict)
        else {},
        devices=tuple(str(device)[:80] for device in devices[:64]) if isinstance(devices, list) else (),
        driver=None if values.get("driver") is None else str(values["driver"])[:80],
        cpu_count=_count(values.get("cpu_count")) or 0,
        commit=None if values.get("commit") is None else str(values["commit"])[:80],
    )


def _some(count: int, what: str) -> str:
    return f"1 {what} is" if count == 1 else f"{count:,} {what}s are"


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # An integer of JSON can be too long for a float, so it is compared before it is converted.
    return float(value) if -LARGEST < value < LARGEST and math.isfinite(value) else None


def _time(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and number >= 0 else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST else None
