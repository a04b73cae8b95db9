"""A signal to end (a spot node going away, a time limit) that all ranks obey at the same step.

Each rank that is told to end adds a flag to a number that all ranks exchange in every step anyway: the count of target
tokens that the loss is divided by. No collective is added and no queue is drained.

transformers 5.23 has `enable_jit_checkpoint` for this (trainer_jit_checkpoint.py). It holds for one process only: every
rank waits three seconds by a clock of its own and saves at whichever hook comes next, so two ranks may save at two
different steps, inside collectives that do not match.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Any

import torch

from hf_speedkit.trainer.ranks.agreement import runs_alone

# Counts of target tokens stay far below: 2**40 of them in one step would be 4 TiB of ids.
_FLAG_BIT = 40
_HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


class StopSignal:
    """Remembers that this process was told to end, and finds out at which step all ranks know.

    Args:
        names: signals to listen to, such as "SIGTERM", which the config has checked; none for no listening.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        self._numbers = [signal.Signals[name] for name in names or ()]
        self.received: str | None = None
        """The signal that this process got."""
        self.stopped_by: str | None = None
        """What ended training; set on all ranks at the same step."""
        self._ended = multiprocessing.Event()
        self._ended.set()
        self._wanted = False
        self._heard: list[signal.Signals] | None = None
        self._flags: torch.Tensor | None = None
        self._arrived: Any = None
        self._launcher: int | None = None

    @contextmanager
    def installed(self, wanted: bool = True) -> Iterator[None]:
        """Listen while training runs, from `listen` on."""
        self.received = self.stopped_by = self._flags = self._arrived = None
        # From the settings alone: all ranks must agree on what their numbers carry.
        self._wanted = wanted and bool(self._numbers)
        self._launcher = os.getppid() if started_alone_by_accelerate(os.environ) else None
        self._ended.clear()
        try:
            yield
        finally:
            self._ended.set()
            self._wanted = False
            self._release()

    def listen(self) -> None:
        """Take the signals; belongs at the beginning of every step. A handler that somebody else has set is left alone.

        Before the first step there is nothing to save, and a process that waits in a collective for one that failed
        while it started must end when its launcher says so. A repeated signal changes nothing: torchrun and Slurm may
        both deliver one.
        """
        if self._heard is not None or not self._wanted:
            return
        # Python allows handlers in the main thread only.
        main_thread = threading.current_thread() is threading.main_thread()
        numbers = self._numbers if main_thread else []
        self._heard = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._heard:
            signal.signal(number, self._receive)

    def _release(self) -> None:
        for number in self._heard or ():
            signal.signal(number, signal.SIG_DFL)
        self._heard = None

    def spare_workers(self, loader: Any) -> Any:
        """Let a loader's workers ignore the signals while training runs; must come before the loader is iterated.

        Slurm signals every process of a job step. A worker that died of it would raise "DataLoader worker is killed by
        signal" in the middle of this process's step, and no checkpoint would be written. Afterwards they obey: that is
        how torch and Python end a worker that does not leave by itself, and Python waits for it without a limit.
        """
        inner = getattr(loader, "base_dataloader", loader)  # accelerate (1.15, data_loader.py:583) iterates that one
        if self._numbers and getattr(inner, "num_workers", 0) > 0:
            inner.worker_init_fn = partial(
                _ignore_while_training, tuple(map(int, self._numbers)), self._ended, inner.worker_init_fn
            )
        return loader

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == _HANGUP:
            leave_terminal()

    @contextmanager
    def riding_on(self, accelerator: Any) -> Iterator[None]:
        """Let the flags of all ranks travel with the numbers that `accelerator.gather` exchanges inside the block.

        Trainer (5.23, trainer.py:2342) sums what it gathers at once and divides it, and offers no hook between; so the
        instance's `gather` is wrapped for the time of that call.
        """
        if accelerator.num_processes == 1 or not self._wanted:
            yield
            return
        original, own = accelerator.gather, vars(accelerator).get("gather")

        def gather(counts: torch.Tensor) -> torch.Tensor:
            flag = 0 if self.received is None else 1 << _FLAG_BIT
            gathered: torch.Tensor = original(counts.long() + flag)
            self._keep((gathered >> _FLAG_BIT).sum())
            return (gathered & ((1 << _FLAG_BIT) - 1)).to(counts.dtype)

        accelerator.gather = gather
        try:
            yield
        finally:
            del accelerator.gather  # the class's method shows again
            if own is not None:
                accelerator.gather = own

    def _keep(self, flags: torch.Tensor) -> None:
        """Send the flags to the host without waiting for them."""
        if self._flags is None:
            self._flags = torch.zeros((), dtype=torch.int64, pin_memory=flags.is_cuda)
        self._flags.copy_(flags, non_blocking=True)
        if flags.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def agreed(self, *, meets_anyway: bool = False) -> bool:
        """Whether any rank was told to end; all ranks get the same answer when they ask at the same step's end.

        Args:
            meets_anyway: the ranks read numbers from one another at this step in any case (a logging step). Used where
                nothing is exchanged in every step: `average_tokens_across_devices=False`, or a model that takes no
                loss arguments.

        Cost: on a GPU the host waits until the device has begun this step, of which all is queued then: the device does
        not run dry. Where a step starts more than about 1,000 kernels there is nothing to wait for, since a host cannot
        get further ahead than that. Call it inside `StepClock.waiting`.
        """
        import torch.distributed as dist

        if not self._wanted:
            return False
        if runs_alone():
            if self._launcher is not None and os.getppid() != self._launcher:
                self.received = self.received or "the end of accelerate launch"
            return self.received is not None
        if self._flags is not None:
            if self._arrived is not None and not self._arrived.query():
                self._arrived.synchronize()  # see "Cost"; not every rank may have the answer, so none goes on without
            return bool(self._flags.numpy() > 0)  # host memory: nothing is read from the device
        if not meets_anyway:
            return False
        told: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(told, self.received is not None)
        return any(told)

    def note_stop(self) -> None:
        """Training ends here."""
        self.stopped_by = self.received or "a signal on another rank"


def started_alone_by_accelerate(environment: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` started this process alone.

    Of one process it hands no signal on: told to end it is gone, and the process would train on, seen by nobody
    (accelerate 1.15, commands/launch.py:997). Several are torchrun's, which hands signals on.
    """
    return "ACCELERATE_MIXED_PRECISION" in environment and "TORCHELASTIC_RUN_ID" not in environment


def leave_terminal(streams: Sequence[int] = (1, 2)) -> None:
    """Send what this process writes to nowhere where its terminal is gone: every write, a progress bar's, would raise.

    So is a pipe's: its reader (`| tee log`) gets the signal as well. A file stays, and so does a terminal that is still
    there, as after `kill -HUP`.

    Args:
        streams: file descriptors.
    """
    for stream in streams:
        try:
            gone = stat.S_ISFIFO(os.fstat(stream).st_mode)
            os.write(stream, b"" if gone else b"\n")
        except OSError:  # also of a stream that is closed: this runs in the middle of a step
            gone = True
        nowhere = os.open(os.devnull, os.O_WRONLY) if gone else stream
        if nowhere != stream:
            os.dup2(nowhere, stream)
            os.close(nowhere)


def _ignore_while_training(
    numbers: tuple[int, ...], ended: Event, then: Callable[[int], None] | None, worker: int
) -> None:
    def obey_afterwards(number: int, _frame: FrameType | None) -> None:
        if ended.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in numbers:
        signal.signal(number, obey_afterwards)
    if then is not None:
        then(worker)
