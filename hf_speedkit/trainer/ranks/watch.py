"""Names a stuck rank within minutes, and ends the others when one has failed; no collective, nothing per step.

Every rank has a thread that says every few seconds, in the key-value store the launcher runs for the job, where its
training thread is. Only when a rank stands still does it read what the others said. NCCL and gloo themselves would wait
`ddp_timeout` seconds (1,800 by default) and then name no rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_speedkit.core.errors import ConfigurationError, SpeedkitError
from hf_speedkit.core.ranks import (
    COMPUTING,
    FINISHING,
    LEFT,
    LOADING,
    SAVING,
    STARTING,
    UPDATING,
    Beat,
    ending,
    missing_ranks,
)  # fmt: skip
from hf_speedkit.trainer.ranks.agreement import runs_alone
from hf_speedkit.trainer.ranks.frames import describe_frame
from hf_speedkit.trainer.ranks.meeting import Meetings
from hf_speedkit.trainer.ranks.roll_call import RollCall, note_end

logger = logging.getLogger(__name__)

_LONGEST_POLL_S = 5.0
_NAMED_AFTER_S = 120.0
_LEFT_TO_END_S = 20.0
"""How long a rank may take to end by itself after a failure: with the poll, all are gone within 30 s."""
_STORE_TIMEOUT = timedelta(seconds=10)
_FAILED = "failed"


class RankWatch(TrainerCallback):  # type: ignore[misc]
    """Tells the ranks where each of them is, from a thread of its own.

    Args:
        timeout_s: seconds without progress after which a run is ended; 0 neither names nor ends. A stuck rank is named
            after two minutes, or half of `timeout_s` if that is less. A checkpoint being written and the first step
            (kernels compile) are named but not ended.

    Raises:
        ConfigurationError: a negative time.

    As a callback it takes note of what training does; `running` starts and stops the thread.
    """

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s >= 0:
            raise ConfigurationError(
                f"stuck_rank_timeout_s={timeout_s} is no time", mend="set seconds, more than a step takes; 0 is never"
            )
        self._timeout_s = timeout_s
        self._named_after_s = min(_NAMED_AFTER_S, timeout_s / 2)
        self._poll_s = min(_LONGEST_POLL_S, timeout_s / 10) if timeout_s else _LONGEST_POLL_S
        self._doing, self._step, self._progress, self._since = STARTING, 0, 0, time.monotonic()
        self._first_step: int | None = None
        self._control: TrainerControl | None = None
        self._sent = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._last_named: tuple[tuple[int, ...], set[int]] | None = None
        self._stop = threading.Event()
        self._store: Any = None
        self._meetings: Meetings | None = None
        self._prefix = ""
        self._rank, self._ranks, self._main = 0, 1, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch for the time of the context; an exception that leaves it is told to the other ranks.

        Raises:
            SpeedkitError: in place of an error that another rank's failure brought about, naming that rank.
        """
        self._main = threading.get_ident()
        self._stop.clear()  # a trainer may train more than once
        self._first_step, self._heard, self._last_named = None, {}, None
        self._begin(STARTING)
        if not self._connect():
            yield
            return
        thread = threading.Thread(target=self._watch, name="hf_speedkit ranks", daemon=True)
        thread.start()
        try:
            yield
            self._doing = LEFT
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code and self._part() == FINISHING:
                self._doing = LEFT  # as `hf-speedkit bench` does: a rank 0 that still writes is not to be ended
            else:
                self._failed(error)
            raise
        finally:
            self._stop.set()
            thread.join(timeout=_LONGEST_POLL_S)
            if self._doing == LEFT:
                with contextlib.suppress(RuntimeError):  # the launcher may have gone first, and its store with it
                    self._say()

    def call(self, roll_call: RollCall) -> None:
        """Answer a roll call over the ranks' store; at once where there is none (one process, or no training yet)."""
        if self._store is not None:
            roll_call.answer(self._store, self._rank, self._ranks)

    def meet(self, wants: Sequence[str], *, step: int, timeout_s: float) -> None:
        """Wait for the ranks before what all must do behind the same step; see `Meetings.meet`."""
        if self._meetings is not None:
            self._meetings.meet(wants, step=step, timeout_s=timeout_s)

    # What training does: one assignment each, no lock; a torn read would be off by one part of a step.

    def _begin(self, doing: str, state: TrainerState | None = None) -> None:
        self._doing, self._since = doing, time.monotonic()
        self._progress += 1
        if state is not None:
            self._step = state.global_step

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The batches of a step are there."""
        if self._first_step is None:
            self._first_step = self._step = state.global_step
        self._begin(COMPUTING)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One more micro-batch is done."""
        self._begin(COMPUTING)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Gradients are there."""
        self._begin(UPDATING)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A step is done: what follows is a checkpoint, an evaluation, or the next batches."""
        self._control = control
        self._begin(LOADING, state)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """One more evaluation batch is done."""
        self._begin("evaluating")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """An evaluation is done."""
        self._begin(LOADING)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A checkpoint is written."""
        self._begin(LOADING)

    def _part(self) -> str:
        """The part of a step training is in; what callbacks ask for at the end of a step may still change."""
        if self._doing != LOADING or self._control is None:
            return self._doing
        if self._control.should_evaluate:
            return "evaluating"
        if self._control.should_save:
            return SAVING
        return FINISHING if self._control.should_training_stop else LOADING

    # The thread.

    def _connect(self) -> bool:
        import torch.distributed as dist

        if runs_alone():
            return False
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        try:
            store = self._open()
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            # Each rank counts its own trainings, so all come to the same number without a collective.
            number = store.add(f"hf_speedkit/{attempt}/trainings/{self._rank}", 1)
            self._prefix = f"hf_speedkit/{attempt}/{number}"
            self._store = dist.PrefixStore(self._prefix, store)  # type: ignore[attr-defined]
            self._say()
            note_end(self._store, self._rank)
            self._meetings = Meetings(self._store, self._rank, self._ranks, beat_of=self._beat_of)
        except (RuntimeError, ValueError) as error:  # DistStoreError is a RuntimeError
            logger.warning("stuck ranks cannot be named: no connection to the launcher's store (%s)", error)
            return False
        return True

    def _open(self) -> Any:
        """A connection of its own: the process group's is locked while training waits in it."""
        import torch.distributed as dist

        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        return dist.TCPStore(  # type: ignore[attr-defined]
            str(address), int(str(port)), is_master=False, timeout=_STORE_TIMEOUT
        )

    def _open_again(self) -> None:
        """Connect anew: a launcher that did not answer in time may answer the old connection yet."""
        import torch.distributed as dist

        with contextlib.suppress(RuntimeError, ValueError):
            self._store = dist.PrefixStore(self._prefix, self._open())  # type: ignore[attr-defined]

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                self._say()
                if self._store.check([_FAILED]):
                    self._end(json.loads(self._store.get(_FAILED)))
                    return
                # After the last step no rank waits for another: one may upload for an hour that the others have left.
                late = self._timeout_s and self._still_s() >= self._named_after_s
                if late and self._part() != FINISHING:
                    self._look()
            except RuntimeError as error:
                # It was busy for long, or the launcher has ended, and then this process is about to.
                logger.debug("the ranks' store did not answer: %s", error)
                self._open_again()

    def _still_s(self) -> float:
        return time.monotonic() - self._since

    def _say(self) -> None:
        self._sent += 1
        where, waits = describe_frame(sys._current_frames().get(self._main))
        beat = Beat(
            rank=self._rank,
            host=socket.gethostname(),
            sent=self._sent,
            progress=self._progress,
            step=self._step,
            warm=self._first_step is not None and self._step > self._first_step,
            doing=self._part(),
            still_s=self._still_s(),
            where=where,
            waits=waits,
        )
        self._store.set(f"beat/{self._rank}", beat.to_json())

    def _look(self) -> None:
        """Read everybody's beats; the first rank that is not missing speaks."""
        beats = [self._beat_of(rank) for rank in range(self._ranks)]
        silent = self._silent(beats)
        missing = missing_ranks(beats, silent=silent)
        if self._rank != next((rank for rank in range(self._ranks) if rank not in missing.ranks), None):
            return
        if missing.may_end and self._still_s() >= self._timeout_s:
            text = ending(missing, self._timeout_s)
            if self._tell({"rank": self._rank, "stuck": True, "text": text})["text"] == text:
                # At once: the others leave as soon as they read it, and this rank's own error would come first.
                sys.stderr.write(f"\n{text}\n")
                sys.stderr.flush()
        elif self._last_named != (missing.ranks, silent):
            self._last_named = (missing.ranks, silent)
            logger.warning("%s\n  %s", missing.message, "\n  ".join(missing.evidence))

    def _beat_of(self, rank: int) -> Beat:
        key = f"beat/{rank}"
        if self._store.check([key]):
            return Beat.from_json(self._store.get(key))
        return Beat(
            rank=rank, host="an unknown host", sent=0, progress=-1, step=0, warm=False, doing="not yet in training",
            still_s=self._still_s(), where="an unknown line", waits=False,
        )  # fmt: skip

    def _silent(self, beats: list[Beat]) -> set[int]:
        """Ranks that have said nothing since we began to look."""
        now = time.monotonic()
        for beat in beats:
            if beat.sent and self._heard.get(beat.rank, (None, 0.0))[0] != beat.sent:
                self._heard[beat.rank] = (beat.sent, now)
        limit_s = max(3 * self._poll_s, self._named_after_s / 4)
        return {rank for rank, (_, since) in self._heard.items() if now - since > limit_s}

    def _tell(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Leave a failure in the store unless there is one; returns the one that is there."""
        told: dict[str, Any] = json.loads(self._store.compare_set(_FAILED, "", json.dumps(failure)))
        return told

    # A failure.

    def _failed(self, error: BaseException) -> None:
        """Tell the others, and see to it that this process ends soon once it has begun to."""
        atexit.register(faulthandler.dump_traceback_later, _LEFT_TO_END_S, exit=True)
        text = f"rank {self._rank} failed after step {self._step}: {type(error).__name__}: {error}"
        try:
            first = self._tell({"rank": self._rank, "stuck": False, "text": text})
        except RuntimeError:
            return  # the launcher is gone, and everybody with it
        if first["stuck"]:
            self._end(first)
        elif first["rank"] != self._rank and _of_the_connection(error):
            # Where this rank was when the other one left it alone says nothing: 60 lines less above what does.
            raise SpeedkitError("another rank failed first, so this one stops", evidence=(first["text"],)) from None
        else:
            _record(error)

    def _end(self, failure: dict[str, Any]) -> None:
        """End this process, after a while in which it may end by itself: by its own error, or the launcher's signal."""
        if failure["stuck"]:
            try:
                raise SpeedkitError(failure["text"]) from None
            except SpeedkitError as error:
                _record(error)
        else:
            logger.error("%s; this rank ends too", failure["text"])
            if self._stop.wait(_LEFT_TO_END_S):
                return
        # A thread cannot raise in another one that waits inside NCCL: only the end of the process gets it out.
        os._exit(1)


def _of_the_connection(error: BaseException) -> bool:
    """Whether an error says no more than that another rank has gone: gloo's is a plain RuntimeError, NCCL's is not."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _record(error: BaseException) -> None:
    """Leave the error being handled where torchrun's summary shows it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with contextlib.suppress(OSError):
        get_error_handler().record_exception(error)
