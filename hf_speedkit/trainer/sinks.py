"""Where step records go besides the trackers: one JSON line a step."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.records import Environment, StepRecord, to_dict
from hf_speedkit.measure.environment import collect_environment

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file's lines; a reader refuses a number it does not know."""


@runtime_checkable
class WindowSink(Protocol):
    """A sink that wants more than step records: where a session begins, each window's metrics, and the end."""

    def begin(self, step: int, environment: Environment) -> None:
        """A session begins after `step` optimizer steps."""

    def window(self, step: int, metrics: Mapping[str, float]) -> None:
        """What was logged at `step`: the metrics of `hf_speedkit.core.metrics`, and the Trainer's own numbers."""

    def close(self) -> None:
        """Training is over."""


class JsonlSink:
    """Writes a step log: one JSON object a line.

    {"kind": "session", "format": 1, "step": 0, "environment": {...}} where a run begins or goes on,
    {"kind": "step", ...StepRecord of rank 0} for every optimizer step, and
    {"kind": "window", "step": n, "metrics": {...}} at every logging step, all ranks together.
    A resumed run is appended: steps after the checkpoint stand twice, and the later session holds. The file holds no
    path, host or user name, and numbers that are not finite are written as null.

    Lines are written together at each logging step, and the file is open only then: a run that is killed leaves whole
    lines. An error while writing is reported once and ends the log, not the training.

    Args:
        path: the file; it and its directory are made when the first line is written.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lines: list[str] = []
        self._broken = False

    def begin(self, step: int, environment: Environment) -> None:
        """Note where the session begins; written with its first step."""
        self._lines = [_line("session", {"format": FORMAT, "step": step, "environment": to_dict(environment)})]

    def __call__(self, record: StepRecord) -> None:
        """Add one step."""
        self._lines.append(_line("step", to_dict(record)))

    def window(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a window's metrics and write what has come together."""
        self._lines.append(_line("window", {"step": step, "metrics": dict(metrics)}))
        self._write()

    def close(self) -> None:
        """Write what is left, for example the steps after the last logging step."""
        if any('"kind": "step"' in line for line in self._lines):
            self._write()
        self._lines = []

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if self._broken:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            self._broken = True
            logger.warning("the step log %s ends here: %s", self._path.name, error.strerror or error)


class SinkGroup:
    """Several sinks as one.

    Args:
        sinks: callables that take a StepRecord; those that are a WindowSink get the rest as well.

    Raises:
        ConfigurationError: one that cannot be called.
    """

    def __init__(self, sinks: Iterable[Callable[[StepRecord], object]]) -> None:
        given: Any = sinks
        self._sinks: tuple[Any, ...] = (
            tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
        )
        strange = [sink for sink in self._sinks if not callable(sink)]
        if strange:
            raise ConfigurationError(
                f"sinks are functions that take a StepRecord, not {strange[0]!r}",
                mend='sinks=[JsonlSink("steps.jsonl")] of hf_speedkit.trainer.sinks, or sinks=[records.append]',
            )

    def begin(self, step: int) -> None:
        """A session begins. The environment is looked up for those who want it only."""
        windowed = self._windowed()
        if windowed:
            environment = collect_environment()
            for sink in windowed:
                sink.begin(step, environment)

    def steps(self, records: Iterable[StepRecord]) -> None:
        """Hand on steps, in order."""
        for record in records:
            for sink in self._sinks:
                sink(record)

    def window(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on a window."""
        for sink in self._windowed():
            sink.window(step, metrics)

    def close(self) -> None:
        """Training is over."""
        for sink in self._windowed():
            sink.close()

    def _windowed(self) -> list[WindowSink]:
        return [sink for sink in self._sinks if isinstance(sink, WindowSink)]


def _line(kind: str, values: Mapping[str, object]) -> str:
    return json.dumps({"kind": kind, **{key: _finite(value) for key, value in values.items()}}, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return value
