"""End a script with one message that stays the last thing on the screen, under a launcher too.

`accelerate launch` and torchrun turn any exit code of a script into their own traceback, printed below the script's
message (accelerate 1.15 commands/launch.py:993-1001). There the message is said at once, and a small process of its own
session waits for the launcher to end and says it once more, in short. That process is this file, run as a script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

_LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun")
_LAUNCHER_MODULES = ("accelerate.commands", "accelerate/commands", "torch.distributed", "torch/distributed")
_LONGEST_WAIT_S = 20.0
"""How long the watcher waits for the launcher; torchrun gives its workers up to 30 s, but ours end by themselves."""
_POLL_S = 0.02
_ABOVE = "(evidence: above the launcher's traceback)"
_RANK_0_SPEAKS_FIRST_S = 5.0
"""Time for local rank 0 to say the same and for the launcher to stop us; after it, nobody else has said it."""


def exit_with(error: BaseException | str, code: int = 2) -> NoReturn:
    """Print a message to stderr as the last thing this script prints, and exit.

    Args:
        error: the message, or the exception whose text it is.
        code: the script's exit code. `accelerate launch` and torchrun make 1 of it.

    Under a launcher the message is said at once (where the launcher is a container's first process, nothing outlives
    it), and once more below the launcher's own traceback, without its evidence: two tables would read as two refusals.
    Of several processes on a host only local rank 0 speaks, as long as it fails as well.
    """
    message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    if not speaks:
        time.sleep(_RANK_0_SPEAKS_FIRST_S)
    sys.stdout.flush()
    _say(message)
    launcher = _launcher() if speaks else None
    if launcher is not None:
        _say_again_after(*launcher, _in_short(error))
    raise SystemExit(code)


def _in_short(error: BaseException | str) -> str:
    """The message without its evidence."""
    from hf_speedkit.core.errors import SpeedkitError  # here: the watcher is this file without the package

    if not isinstance(error, SpeedkitError) or not error.evidence:
        return error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    short = SpeedkitError(error.what, evidence=(_ABOVE,), mend=error.mend, regardless=error.regardless)
    return f"{type(error).__name__}: {short}"


def _say(message: str) -> None:
    sys.stderr.write(f"\n{message}\n")
    sys.stderr.flush()


def _launcher() -> tuple[int, float] | None:
    """Process id and start time of the launcher that is our parent; None where there is none."""
    if not any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ):
        return None
    import psutil  # type: ignore[import-untyped]  # accelerate requires it

    try:
        parent = psutil.Process(os.getppid())
        return (parent.pid, parent.create_time()) if _is_launcher(parent.cmdline()) else None
    except psutil.Error:  # it ended, or its command line may not be read: the message has been said once
        return None


def _is_launcher(command: Sequence[str]) -> bool:
    """Whether a command line starts accelerate or torchrun: `[python [-m]] launcher [launch] ...`."""
    for argument in command[:4]:
        path = argument.replace("\\", "/")
        if path.rsplit("/", 1)[-1].removesuffix(".exe") in _LAUNCHERS or any(m in path for m in _LAUNCHER_MODULES):
            return True
    return False


def _say_again_after(pid: int, started: float, message: str) -> None:
    # -P (Python 3.11): the modules beside this file must not be found in place of others.
    python = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    try:
        watcher = subprocess.Popen(
            [*python, __file__, str(pid), repr(started)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # launchers stop their workers by process group; this one must outlive them
        )
        with watcher.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(message.encode())
    except OSError:  # no process to be had: the message has been said once
        return
    watcher.returncode = 0  # nobody waits for it; left None, Popen would warn that it still runs


def _watch(pid: int, started: float) -> None:
    """Wait until a process has ended, a bounded time at most, then print what stands on stdin."""
    import psutil

    message = sys.stdin.buffer.read().decode()
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < deadline:
        try:
            launcher = psutil.Process(pid)
            # A zombie has ended: whoever started it may be reading our stderr to its end before it reaps.
            if launcher.create_time() != started or launcher.status() == psutil.STATUS_ZOMBIE:
                break
        except psutil.NoSuchProcess:
            break
        time.sleep(_POLL_S)
    _say(message)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]))
