"""One run at a time writes into an output_dir: a second one would remove the first one's save while it is written."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hf_speedkit.core.errors import ConfigurationError

logger = logging.getLogger(__name__)

LOCK_NAME = "_running"  # what begins with "_" is not pushed to the Hub (transformers 5.23, trainer.py)
_WAIT_S = 150.0
"""A requeued job may begin while the one before still writes its last checkpoint, and an NFS server lets go of a lock
90 s after its machine is gone."""
_POLL_S = 2.0


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold a directory for the time of the context; waits a while for another process that holds it.

    The lock is the operating system's (POSIX, per process) and ends with the process, however that ends. Where the file
    system knows no locks there is none.

    Args:
        run_dir: the run's directory; made if it is not there.

    Raises:
        ConfigurationError: another run still holds it, with that run's host and process.
    """
    file = _held_file(run_dir / LOCK_NAME)
    try:
        yield
    finally:
        if file is not None:
            # First the name, then the lock: whoever waits for this file sees that it has lost its name.
            with suppress(OSError):
                (run_dir / LOCK_NAME).unlink()
            file.close()


def _held_file(path: Path) -> IO[str] | None:
    """The open, locked file; None where nothing can be locked."""
    until = time.monotonic() + _WAIT_S
    told = False
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            logger.debug("%s cannot be locked: %s", path, error)
            return None
        taken = _lock(file)
        if taken is None:
            file.close()
            return None
        if taken and _still_named(file, path):
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
            file.flush()
            return file
        file.seek(0)
        holder = file.read()
        file.close()
        if taken:
            continue
        if time.monotonic() >= until:
            raise _refusal(path, holder)
        if not told:
            logger.warning("waiting for another run that writes into %s: %s", path.parent, _who(holder))
            told = True
        time.sleep(_POLL_S)


def _lock(file: IO[str]) -> bool | None:
    """Whether this process holds the file now; None where the system or the file system has no locks."""
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either of the two for a lock that is taken
        return False
    except (ImportError, OSError) as error:
        logger.debug("%s cannot be locked: %s", file.name, error)
        return None
    return True


def _still_named(file: IO[str], path: Path) -> bool:
    """Whether the file locked is the one that others will open: its former holder may have removed it since."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _who(holder: str) -> str:
    try:
        saved = json.loads(holder)
        return f"process {saved['pid']} on {saved['host']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said its name"


def _refusal(path: Path, holder: str) -> ConfigurationError:
    return ConfigurationError(
        f"another run is writing into output_dir {str(path.parent)!r}",
        evidence=(f"{path.name} is locked by {_who(holder)}; this one has waited {_WAIT_S:.0f} s for it",),
        mend="let it end, or choose another output_dir",
        regardless=f"rm {path} (two runs in one directory remove each other's checkpoints)",
    )
