"""Two sharded gloo processes under torchrun: a rank that fails ends both, and a rank that stands still is named."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_speedkit.trainer.rank_watch import RankWatch, describe_frame

HERE = Path(__file__).resolve().parent


def torchrun(mode, folder, port):
    """What the job printed, and how long it went on after rank 1 had acted."""
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}",
         str(HERE / "failing_rank.py"), mode, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert job.returncode != 0
    return job.stdout + job.stderr, time.time() - (folder / "began").stat().st_mtime


@pytest.mark.two_process
def test_an_exception_on_one_rank_ends_both_within_30_seconds_with_its_error_first(tmp_path, free_port):
    said, seconds = torchrun("fail", tmp_path, free_port)
    assert seconds < 30
    assert "Connection closed by peer" not in said
    assert said.index("boom in the loader") < said.index("another rank failed first, so this one stops")
    assert "rank 1 failed after step 0: RuntimeError: boom in the loader" in said, "rank 0 says who"
    assert "traceback : Traceback" in said[said.index("Root Cause") :], "torchrun's summary has it too"


@pytest.mark.two_process
def test_a_rank_that_stands_still_is_named_with_its_line_and_ends_the_run(tmp_path, free_port):
    said, seconds = torchrun("stand", tmp_path, free_port)
    assert seconds < 30, "6 s without progress, and the end of two processes"
    assert "1 of 2 ranks have waited" in said
    assert "for rank 1" in said
    assert "failing_rank.py:" in said
    assert " dawdle" in said
    assert "so the run ends" in said
    assert "a longer stuck_rank_timeout_s (now 6)" in said
    assert "Connection closed by peer" not in said


def test_a_single_process_is_not_watched():
    watch = RankWatch(600)
    with watch.running():
        assert watch._store is None


def test_a_thread_is_described_by_its_innermost_line_and_the_users():
    import threading

    began, end = threading.Event(), threading.Event()

    def wait_here():
        began.set()
        end.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    began.wait()
    time.sleep(0.05)
    where, waits = describe_frame(sys._current_frames()[thread.ident])
    end.set()
    thread.join()
    assert "threading.py:" in where
    assert "called at trainer/test_rank_watch.py:" in where
    assert where.endswith("wait_here")
    assert not waits
    assert describe_frame(None) == ("an unknown line", False)
