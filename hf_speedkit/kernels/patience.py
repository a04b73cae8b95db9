"""A word about a kernel that does not come back: on a GPU nothing raises when it hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Compiling and tuning one function takes a minute when nothing is cached (V50); fla issues 947, 999 and 618 are about
rules that hang on B200 and H200, in tuning or much later, with the GPU at 100 %."""


@contextmanager
def said_if_slow(what: str) -> Iterator[None]:
    """Log one warning if the context takes longer than `PATIENCE_S`; it goes on all the same.

    Args:
        what: function and place, for the sentence.
    """
    timer = threading.Timer(PATIENCE_S, _say, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    logger.warning(
        "the probe of %s has run for %.0f s: it still compiles, or the kernel hangs (fla issues 947, 999: newer triton"
        " and fla; `py-spy dump --pid PID` shows where). KernelAssertionCallback(probe=False) leaves it out",
        what,
        PATIENCE_S,
    )
