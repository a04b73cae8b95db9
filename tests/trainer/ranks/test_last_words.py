"""A message that stays the last thing on the screen (trainer/ranks/last_words.py)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hf_speedkit.trainer.ranks import last_words
from hf_speedkit.trainer.ranks.last_words import _is_launcher

MESSAGE = "HardwareError: no GPU\n  found: none\nMend it:  make demo"
LAST = "HardwareError: no GPU\n  (evidence: above the launcher's traceback)\nMend it:  make demo"
BIN = Path(sys.executable).parent


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(
        textwrap.dedent(
            """
            from hf_speedkit.core.errors import HardwareError
            from hf_speedkit.trainer.ranks.last_words import exit_with

            print("out", flush=False)
            exit_with(HardwareError("no GPU", evidence=("found: none",), mend="make demo"))
            """
        )
    )
    return path


@pytest.fixture
def launcher(tmp_path) -> Path:
    """A launcher by name: starts the script, and when that fails prints a traceback of its own and exits 1."""
    path = tmp_path / "torchrun"
    path.write_text(
        textwrap.dedent(
            """
            import subprocess, sys, time

            failed = subprocess.run([sys.executable, *sys.argv[1:]]).returncode
            time.sleep(0.3)
            raise SystemExit(f"Traceback of the launcher: exit status {failed}")
            """
        )
    )
    return path


def clean_environment(**extra: str) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        keep.pop(name, None)
    return {**keep, **extra}


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=clean_environment(**environment),
        timeout=120,
        check=False,
    )


def watchers_of(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(pid) in command and any(Path(part).name == "last_words.py" for part in command):
            found.append(process)
    return found


def test_a_plain_script_says_it_once_and_exits_2(script):
    done = run(sys.executable, script)
    assert (done.returncode, done.stdout) == (2, "out\n")
    assert done.stderr == f"\n{MESSAGE}\n"


def test_under_accelerate_launch_the_message_stands_below_the_launchers_traceback(script):
    done = run(BIN / "accelerate", "launch", "--cpu", "--num_processes", "1", script)
    assert done.returncode == 1
    assert done.stderr.endswith(f"\n{LAST}\n")
    assert (done.stderr.count(MESSAGE), done.stderr.count(LAST), done.stderr.count("found: none")) == (1, 1, 1)
    assert done.stderr.index("CalledProcessError") < done.stderr.rindex(LAST)


def test_with_a_launcher_as_parent_the_message_is_first_and_last(script, launcher):
    done = run(sys.executable, launcher, script, ACCELERATE_MIXED_PRECISION="no")
    assert done.stderr == f"\n{MESSAGE}\nTraceback of the launcher: exit status 2\n\n{LAST}\n"


def test_on_a_terminal_the_message_is_last_and_no_process_is_left(script, launcher):
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(launcher), str(script)],
        stdout=slave,
        stderr=slave,
        env=clean_environment(ACCELERATE_MIXED_PRECISION="no"),
    )
    os.close(slave)
    shown = b""
    seen = 0
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:  # Linux says so when the last writer, the watcher, has closed the terminal
            break
        seen = max(seen, len(watchers_of(process.pid)))
        if not block:
            break
        shown += block
    os.close(master)
    assert process.wait(timeout=10) == 1
    assert shown.decode().replace("\r\n", "\n").endswith(f"exit status 2\n\n{LAST}\n")
    gone_by = time.monotonic() + 5
    while watchers_of(process.pid) and time.monotonic() < gone_by:
        time.sleep(0.05)
    assert seen <= 1  # it is there for a moment only, so that it may come and go between two looks
    assert watchers_of(process.pid) == []


def test_without_the_launchers_environment_a_parent_of_that_name_is_no_launcher(script, launcher):
    assert run(sys.executable, launcher, script).stderr.count(MESSAGE) == 1


def test_with_the_environment_but_another_parent_it_is_said_once(script):
    assert run(sys.executable, script, ACCELERATE_MIXED_PRECISION="no").stderr == f"\n{MESSAGE}\n"


def test_the_other_ranks_of_a_host_leave_the_word_to_rank_0_for_a_while(monkeypatch, capsys):
    monkeypatch.setattr(last_words, "_RANK_0_SPEAKS_FIRST_S", 0.3)
    monkeypatch.setattr(last_words, "_launcher", lambda: pytest.fail("only rank 0 may start a watcher"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    started = time.monotonic()
    with pytest.raises(SystemExit) as stopped:
        last_words.exit_with("nobody stopped rank 1, so rank 0 has not spoken")
    assert time.monotonic() - started >= 0.3
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "\nnobody stopped rank 1, so rank 0 has not spoken\n"


@pytest.mark.parametrize(
    ("seconds_off", "longest_wait_s"), [(0.0, 0.3), (1.0, 60.0)], ids=["it still runs", "its number is another's now"]
)
def test_the_watcher_waits_a_bounded_time_for_that_process_and_no_other(
    monkeypatch, capsys, seconds_off, longest_wait_s
):
    monkeypatch.setattr(last_words, "_LONGEST_WAIT_S", longest_wait_s)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGE.encode())))
    me = psutil.Process()
    began = time.monotonic()
    last_words._watch(me.pid, me.create_time() + seconds_off)
    waited_s = time.monotonic() - began
    assert (waited_s >= longest_wait_s) is (seconds_off == 0)
    assert waited_s < 30
    assert capsys.readouterr().err == f"\n{MESSAGE}\n"


def test_a_message_can_be_plain_text_and_the_code_another(tmp_path):
    script = tmp_path / "job.py"
    script.write_text("from hf_speedkit.trainer.ranks.last_words import exit_with\nexit_with('enough', code=3)\n")
    done = run(sys.executable, script)
    assert (done.returncode, done.stderr) == (3, "\nenough\n")


@pytest.mark.parametrize(
    "command",
    [
        "/venv/bin/python3.11 /venv/bin/accelerate launch job.py",
        "/venv/bin/python3.11 /venv/bin/accelerate-launch job.py",
        "python -m accelerate.commands.launch job.py",
        "python /site-packages/accelerate/commands/launch.py job.py",
        "python /venv/bin/torchrun --nproc_per_node 2 job.py",
        "python -u -m torch.distributed.run job.py",
        r"C:\venv\Scripts\python.exe C:\venv\Scripts\accelerate.exe launch job.py",
    ],
)
def test_launchers_are_known_by_their_command_line(command):
    assert _is_launcher(command.split())


@pytest.mark.parametrize("command", ["bash -c true", "python job.py --launcher accelerate-free", "make demo", ""])
def test_other_parents_are_not_launchers(command):
    assert not _is_launcher(command.split())
