"""Record consecutive training steps with torch.profiler into one Chrome trace.

One warm-up step always comes first: without it CUPTI starts inside the recorded step and every kernel can be dropped
as out of range (kineto#996). No shapes, no memory, no stacks unless asked for: they made a small trace 3.7 times
larger (case V74).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_speedkit.measure.profilers import another_profiler_runs

METADATA_KEY = "hf_speedkit"
"""Top-level key of the trace file under which the recording job's own facts lie."""

_PRIVATE = re.compile(rb'"(host_name|traceName)"\s*:\s*"(?:[^"\\]|\\.)*"')
_EDGE_BYTES = 1 << 20


class StepRecorder:
    """A profiler around one warm-up step and `steps` recorded ones.

    Args:
        steps: consecutive steps to record.
        with_stack: record Python stacks: names modules and lines, costs several times the size and time.

    Call `start`, then `mark` at the end of the warm-up step and of every recorded one, then `save`. `mark` adds no
    sync except the last one's: the profiler has to collect what the device did.

    Raises:
        RuntimeError: from `start`, when another profiler is running.
    """

    def __init__(self, *, steps: int, with_stack: bool = False) -> None:
        self._steps = steps
        self._with_stack = with_stack
        self._profiler: Any = None
        self._collected = False
        self.marks = 0
        self.facts: dict[str, Any] = {}

    @property
    def recorded(self) -> int:
        """Recorded steps that ended."""
        return max(0, self.marks - 1)

    @property
    def recording(self) -> bool:
        """Whether a recorded step is open."""
        return 1 <= self.marks <= self._steps

    def start(self) -> None:
        """Begin the warm-up step."""
        from torch.profiler import profile, schedule

        if another_profiler_runs(within_steps=self._steps + 1):
            raise RuntimeError("another profiler is running or about to begin by its schedule, and only one can")
        plan = schedule(wait=0, warmup=1, active=self._steps, repeat=1)
        profiler = profile(schedule=plan, on_trace_ready=self._on_ready, with_stack=self._with_stack)
        profiler.start()
        self._profiler = profiler

    def mark(self) -> None:
        """End the warm-up step or a recorded step."""
        if self.marks == self._steps:  # the trace is closed inside step(): its facts have to be in before
            self._write_facts()
        self._profiler.step()
        self.marks += 1

    def stop(self) -> None:
        """End the recording, whole or not. Does nothing before `start` or when called again."""
        profiler = self._profiler
        if profiler is None or self._collected:
            return
        if self.recording:
            self._write_facts()
        with contextlib.suppress(RuntimeError):  # torch's own stop raises when its start had failed half-way
            profiler.stop()

    def save(self, path: Path) -> None:
        """Write the trace as .json.gz, complete or not at all: under another name first, then renamed.

        Host name and paths that torch writes into the file are blanked.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
            plain, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
            self._profiler.export_chrome_trace(str(plain))
            _compress(plain, packed)
            packed.replace(path)

    def _on_ready(self, _: object) -> None:
        self._collected = True

    def _write_facts(self) -> None:
        self._profiler.add_metadata_json(METADATA_KEY, json.dumps(_known(self.facts), allow_nan=False))


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}


def _compress(source: Path, target: Path) -> None:
    """Compress at level 1: torch's level 9 took 9 times as long for a third less (a first look, a CPU trace)."""
    with source.open("rb") as reader, gzip.open(target, "wb", compresslevel=1) as writer:
        size = source.stat().st_size
        if size <= 2 * _EDGE_BYTES:
            writer.write(_blanked(reader.read()))
            return
        writer.write(_blanked(reader.read(_EDGE_BYTES)))
        left = size - 2 * _EDGE_BYTES
        while left:
            piece = reader.read(min(left, _EDGE_BYTES))
            writer.write(piece)
            left -= len(piece)
        writer.write(_blanked(reader.read()))


def _blanked(text: bytes) -> bytes:
    return _PRIVATE.sub(rb'"\1": ""', text)
