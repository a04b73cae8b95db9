"""Where the time of a training loop goes, step by step, without waiting for the device.

The clock cuts the loop's time into segments at the points where the Trainer calls back, and gives each segment to one
bucket, so the parts of a step add up to its time by construction:

    data wait   loop goes on after the previous step -> step begins
    host        step begins -> step ends, less the waits for the device that were timed inside
    device wait those waits, and the drain at the end of a window
    other       callbacks between the end of a step and the loop going on, and the time from `batches_ready` on
    eval, save, log   pauses: not part of any step's time

The host runs ahead of the device, so a host reading says when work was issued, not when it was done. With a device, a
step's time is therefore taken between the marks that end two steps on the device's own clock, and a window ends with
the device idle: `settle` sees to that, at a logging step, where the Trainer has just waited for the loss anyway. The
parts are host times; they add up to the step time over a window, not step by step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Pause = Literal["eval", "save", "log"]


class DeviceTimer(Protocol):
    """What the clock needs of a device; marks are opaque."""

    def mark(self) -> Any:
        """Queue a time stamp behind the work issued so far. Must not wait."""

    def wait(self, mark: Any) -> None:
        """Wait until the device has passed `mark`."""

    def elapsed_s(self, start: Any, end: Any) -> float | None:
        """Device seconds between two marks; None if the device has not passed them yet. Must not wait."""


class CudaTimer:
    """Marks by CUDA events on the current stream.

    Cost: two events a step and one a pause; an event is one small command in the stream and never blocks the host.
    """

    def mark(self) -> Any:
        """Record an event on the current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Wait for one event, not for the whole device: other streams may go on."""
        mark.synchronize()

    def elapsed_s(self, start: Any, end: Any) -> float | None:
        """Seconds between two events that are done."""
        if not end.query():
            return None
        return float(start.elapsed_time(end)) / 1e3


def device_timer(device_type: str) -> DeviceTimer | None:
    """The timer of a kind of device ("cuda", which AMD GPUs are called as well); None where there is none for it."""
    return CudaTimer() if device_type == "cuda" else None


@dataclass(slots=True)
class StepTimes:
    """Times of one optimizer step, in seconds; see the module's text for the parts."""

    data_wait_s: float = 0.0
    host_time_s: float = 0.0
    device_wait_s: float = 0.0
    other_s: float = 0.0
    eval_time_s: float = 0.0
    save_time_s: float = 0.0
    log_time_s: float = 0.0
    device_time_s: float | None = None
    end_to_end_s: float | None = None
    marks: tuple[Any, Any, Any, Any] | None = field(default=None, repr=False)

    @property
    def step_time_s(self) -> float:
        """End of the previous step to end of this one, pauses left out; on the device's clock where there is one."""
        if self.end_to_end_s is not None:
            return self.end_to_end_s
        return self.data_wait_s + self.host_time_s + self.device_wait_s + self.other_s


class StepClock:
    """Measures the parts of each step; told by its owner what the loop is doing.

    Args:
        now: a clock in seconds that never goes back.
        device: the device's timer; None where all work is done on the host.
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter, device: DeviceTimer | None = None) -> None:
        self._now = now
        self._device = device
        self._finished: list[StepTimes] = []
        self._next = StepTimes()
        self._at = now()
        self._base_mark: Any = None
        self._start_mark: Any = None
        self._waited_s = 0.0
        self._fetched = False
        self.in_step = False

    @property
    def has_device(self) -> bool:
        """Whether work is queued on a device."""
        return self._device is not None

    def start(self) -> None:
        """Training begins now; whatever came before is forgotten."""
        self._finished.clear()
        self._next = StepTimes()
        self._waited_s = 0.0
        self._fetched = False
        self.in_step = False
        self._at = self._now()
        self._mark_base()

    def batches_ready(self) -> None:
        """The loader has given this rank its batches: what comes between here and the step's begin is no data wait.

        Optional. Without it data wait lasts until the step begins, which includes the Trainer's count of target tokens
        over all ranks, so that every rank shows the wait of the slowest.
        """
        if not self.in_step:
            self._next.data_wait_s += self._segment()
            self._fetched = True

    def begin_step(self) -> None:
        """The batches are there, the step's work begins: the time since the loop went on was data wait."""
        if self.in_step:
            # The last step never ended (an epoch that stops inside an accumulation window): its work joins this one.
            self._next.host_time_s += self._segment()
            return
        if self._fetched:
            self._next.other_s += self._segment()
        else:
            self._next.data_wait_s += self._segment()
        self._fetched = False
        self._waited_s = 0.0
        self.in_step = True
        if self._device is not None:
            self._start_mark = self._device.mark()

    def end_step(self) -> None:
        """The optimizer step was issued."""
        step, self._next = self._next, StepTimes()
        step.host_time_s += max(0.0, self._segment() - self._waited_s)
        step.device_wait_s += self._waited_s
        self._waited_s = 0.0
        self.in_step = False
        if self._device is not None:
            end_mark = self._device.mark()
            step.marks = (self._base_mark, self._start_mark, end_mark, end_mark)
            self._base_mark = end_mark
        self._finished.append(step)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Put around a call inside a step that is known to wait for the device: its time is no host time."""
        began = self._now()
        try:
            yield
        finally:
            if self.in_step:
                self._waited_s += self._now() - began

    def loop_goes_on(self, *, last: bool = False) -> None:
        """The callbacks of a step's end are through.

        Args:
            last: what they did belongs to the step that ended, not to the next one.
        """
        if not (last and self._finished):
            self._next.other_s += self._segment()
            return
        step = self._finished[-1]
        step.other_s += self._segment()
        self._mark_base()
        if step.marks is not None:
            step.marks = (*step.marks[:3], self._base_mark)

    def pause(self, kind: Pause) -> None:
        """The time since the last call went into evaluation, saving or logging."""
        name = f"{kind}_time_s"
        setattr(self._next, name, getattr(self._next, name) + self._segment())
        self._mark_base()

    def settle(self) -> None:
        """Wait until the device has done the last finished step, and count that wait as part of it.

        Call it only where the loop waits for the device anyway, before it logs, evaluates or saves: without it, work
        that is still queued would be counted as that pause, and the rate would be too high. Without a device nothing is
        queued: the time since the last call stays where the next call puts it.
        """
        if self._device is None or not self._finished:
            return
        last = self._finished[-1]
        if last.marks is not None:
            self._device.wait(last.marks[2])
        last.device_wait_s += self._segment()

    def take(self) -> list[StepTimes]:
        """The steps finished since the last call, device spans filled in where the device has passed them."""
        taken, self._finished = self._finished, []
        for step in taken:
            if self._device is not None and step.marks is not None:
                base, start, end, through = step.marks
                step.device_time_s = self._device.elapsed_s(start, end)
                step.end_to_end_s = self._device.elapsed_s(base, through)
            step.marks = None
        return taken

    @property
    def pauses_since_last_step(self) -> StepTimes:
        """Pauses after the last finished step; they go to the next one, if there is one."""
        after = self._next
        return StepTimes(eval_time_s=after.eval_time_s, save_time_s=after.save_time_s, log_time_s=after.log_time_s)

    def _mark_base(self) -> None:
        """The next step's time counts from here; without a pause in between, from the end of the step before."""
        if self._device is not None:
            self._base_mark = self._device.mark()

    def _segment(self) -> float:
        before, self._at = self._at, self._now()
        return self._at - before
