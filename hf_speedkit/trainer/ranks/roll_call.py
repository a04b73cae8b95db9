"""A call that every rank must make, and one makes alone: named in seconds instead of by `ddp_timeout` (30 minutes).

`if trainer.is_world_process_zero(): trainer.save_model()` is right with whole models, and with sharded ones the rank
waits for weights that nobody sends. Before the first collective the ranks say in the launcher's store that they have
come; a rank whose process ends says that too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hf_speedkit.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_SAID_AFTER_S = 10.0
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 0.5


def note_end(store: Any, rank: int) -> None:
    """Say in the store that a rank can be waited for, and have it said when its process ends by itself.

    Args:
        store: the ranks' common one; it is kept until then.
        rank: this process.
    """
    store.set(f"here/{rank}", "1")
    atexit.register(partial(leave, store, rank))


def leave(store: Any, rank: int) -> None:
    """Say that a rank has ended."""
    with contextlib.suppress(RuntimeError):  # the launcher may have gone first, and its store with it
        store.set(f"ended/{rank}", "1")
        store.add("ended", 1)


class RollCall:
    """The ranks that have come to one kind of call. Every rank counts its own calls.

    Args:
        what: the call, as the user writes it.
        timeout_s: how long to wait for the others where none of them has ended.
        why: what makes it every rank's.
        instead: what one rank does of it, and how to go on where nothing can be mended any more.
        clock: seconds.
    """

    def __init__(
        self,
        what: str,
        *,
        timeout_s: float,
        why: str = "the weights are spread over all",
        instead: tuple[str, str | None] = (
            "one rank writes",
            "hf-speedkit export CHECKPOINT FOLDER makes a model of the run's last checkpoint",
        ),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._timeout_s, self._clock = what, timeout_s, clock
        self._why, self._instead = why, instead
        self._calls = 0

    def answer(self, store: Any, rank: int, ranks: int) -> None:
        """Wait until all ranks have come. A store that does not answer is not waited for: the collective will be.

        Args:
            store: the ranks' common one.
            rank: this process, of `ranks`.

        Raises:
            CheckpointError: a rank has ended, or has not come in time.
        """
        self._calls += 1
        call = f"{self._what}/{self._calls}"
        try:
            store.set(f"{call}/{rank}", "1")
            store.add(call, 1)
            self._wait(store, call, rank, ranks)
        except RuntimeError as error:  # DistStoreError is one
            if isinstance(error, CheckpointError):
                raise
            logger.debug("the ranks' store did not answer: %s", error)

    def _wait(self, store: Any, call: str, rank: int, ranks: int) -> None:
        began, pause_s, said = self._clock(), _SHORTEST_POLL_S, False
        while store.add(call, 0) < ranks:  # two small questions a poll, whatever the number of ranks
            waited_s = self._clock() - began
            late = waited_s > _SAID_AFTER_S and not said
            if late or waited_s > self._timeout_s or store.add("ended", 0):
                missing = [other for other in range(ranks) if not store.check([f"{call}/{other}"])]
                if not all(store.check([f"here/{other}"]) for other in missing):
                    return  # it never had a connection to the store, and may be in the collective already
                ended = [other for other in missing if store.check([f"ended/{other}"])]
                if ended:
                    raise self._alone(f"{_named(ended)} of {ranks} ended without it")
                if waited_s > self._timeout_s:
                    raise self._alone(f"{_named(missing)} of {ranks} did not come in {waited_s:.0f} s")
                if late and rank == min(set(range(ranks)) - set(missing)):  # one speaks
                    logger.warning(
                        "%s waits for %s of %d: every rank must make this call, for %s; "
                        "without `if trainer.is_world_process_zero()`", self._what, _named(missing), ranks, self._why,
                    )  # fmt: skip
                said = said or late
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _alone(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._what} must be called by every rank, for {self._why}, and {why}",
            mend=f"call trainer.{self._what} without `if trainer.is_world_process_zero()`: {self._instead[0]}",
            regardless=self._instead[1],
        )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" + (", ..." if len(ranks) > 8 else "")
