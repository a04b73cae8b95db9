"""Two sharded gloo processes under torchrun: a rank that fails ends both, and a rank that stands still is named."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import TrainerControl, TrainerState

from hf_speedkit.core.errors import ConfigurationError, SpeedkitError
from hf_speedkit.core.ranks import FINISHING, SAVING
from hf_speedkit.trainer.ranks.frames import describe_frame
from hf_speedkit.trainer.ranks.watch import RankWatch

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
    assert seconds < 60, "15 s without progress, and the end of two processes on a busy machine"
    assert "1 of 2 ranks have waited" in said
    assert "for rank 1" in said
    assert "failing_rank.py:" in said
    assert " dawdle" in said
    assert "so the run ends" in said
    assert "a longer stuck_rank_timeout_s (now 15)" in said
    assert "Connection closed by peer" not in said


def test_a_single_process_is_not_watched():
    watch = RankWatch(600)
    with watch.running():
        assert watch._store is None


@pytest.fixture
def watch_of():
    """Watches of three ranks that share a store in memory, at step 5, without their threads."""
    store = dist.HashStore()

    def make(rank):
        watch = RankWatch(600)
        watch._store, watch._rank, watch._ranks, watch._main = store, rank, 3, threading.get_ident()
        watch.on_step_begin(None, state_at(4), TrainerControl())
        watch.on_step_end(None, state_at(5), TrainerControl())
        return watch

    return make


def stands_for(watch, seconds):
    watch._since = time.monotonic() - seconds
    watch._say()


def test_one_rank_speaks_and_ends_only_after_the_timeout(watch_of, caplog, capsys):
    watches = [watch_of(rank) for rank in range(3)]
    for watch in (watches[1], watches[2]):
        watch.on_step_begin(None, state_at(5), TrainerControl())
    for watch in watches:
        stands_for(watch, 130)
    for watch in watches:
        watch._look()
        watch._look()
    assert caplog.text.count("2 of 3 ranks have waited 130 s for rank 0") == 1, "rank 1, and once"
    assert "loading the next batches after step 5" in caplog.text
    assert not watches[0]._store.check(["failed"])
    for watch in watches:
        stands_for(watch, 601)
    for watch in watches:
        watch._look()
    assert json.loads(watches[0]._store.get("failed"))["rank"] == 1
    assert capsys.readouterr().err.count("2 of 3 ranks have waited 601 s for rank 0, so the run ends") == 1


def test_a_second_training_is_watched_like_the_first(monkeypatch):
    watch = RankWatch(1)
    watch._store, watch._ranks = dist.HashStore(), 2
    monkeypatch.setattr(watch, "_connect", lambda: True)
    for _ in range(2):
        before = watch._sent
        with watch.running():
            assert watch._part() == "start-up checks"
            time.sleep(0.45)  # beats come every 0.1 s
        assert watch._sent > before + 1
        assert watch._beat_of(0).doing == "has left training"


def test_a_rank_that_fails_while_its_model_is_prepared_tells_the_others(tmp_path, monkeypatch):
    """Before the start-up checks: out of memory while sharding, a checkpoint that does not load."""
    from checkpoint_run import build
    from support import tiny_llama

    monkeypatch.setattr("atexit.register", lambda *_, **__: None)  # this process is not to end soon
    trainer = build(tmp_path, model=tiny_llama(), max_steps=1, save_strategy="no")
    watch = trainer.startup._watch
    watch._store, watch._ranks = dist.HashStore(), 2
    monkeypatch.setattr(watch, "_connect", lambda: True)
    monkeypatch.setattr(trainer, "create_optimizer", lambda *_: (_ for _ in ()).throw(MemoryError("planted")))
    with pytest.raises(MemoryError):
        trainer.train()
    assert watch._store.check(["failed"])
    assert "rank 0 failed after step 0: MemoryError: planted" in json.loads(watch._store.get("failed"))["text"]


@pytest.mark.parametrize(("code", "finished", "failed"), [(0, True, False), (0, False, True), (1, True, True)])
def test_a_process_that_exits_well_after_its_last_step_has_left_and_did_not_fail(monkeypatch, code, finished, failed):
    monkeypatch.setattr("atexit.register", lambda *_, **__: None)  # this process is not to end soon
    watch = RankWatch(600)
    watch._store, watch._ranks = dist.HashStore(), 2
    monkeypatch.setattr(watch, "_connect", lambda: True)
    control = TrainerControl()
    with pytest.raises(SystemExit), watch.running():
        watch.on_step_end(None, state_at(5), control)
        control.should_training_stop = finished
        raise SystemExit(code)
    assert watch._store.check(["failed"]) is failed
    assert (watch._doing == "has left training") is not failed


def test_a_rank_that_was_told_alone_to_stop_is_named_as_such_and_the_run_ends(watch_of, capsys):
    watches = [watch_of(rank) for rank in range(3)]
    for watch in watches[:2]:
        watch.on_step_begin(None, state_at(5), TrainerControl())
    watches[2]._doing = "has left training"
    watches[2]._first_step = None  # it had trained for less than a poll when it last spoke
    for watch in watches:
        stands_for(watch, 601)
    watches[0]._look()
    said = capsys.readouterr().err
    assert "2 of 3 ranks have waited 601 s for rank 2: training was ended there alone" in said
    assert "has left training after step 5\n" in said
    assert watches[0]._store.check(["failed"])


def test_a_rank_that_writes_a_checkpoint_does_not_end_the_run(watch_of):
    watches = [watch_of(rank) for rank in range(3)]
    watches[0]._control.should_save = True
    for watch in watches:
        stands_for(watch, 5000)
    for watch in watches:
        watch._look()
    assert not watches[0]._store.check(["failed"])


def test_a_rank_that_uploads_after_the_last_step_is_neither_ended_nor_calls_the_others_gone(watch_of, caplog):
    watch, _left = watch_of(0), watch_of(1)
    watch._control.should_training_stop = True
    watch._poll_s = 0.01
    stands_for(watch, 5000)
    thread = threading.Thread(target=watch._watch)
    thread.start()
    time.sleep(0.2)
    watch._stop.set()
    thread.join()
    assert not watch._store.check(["failed"])
    assert "waited" not in caplog.text


def test_a_store_that_did_not_answer_once_is_asked_again(watch_of, monkeypatch):
    """A launcher that was busy for ten seconds would have left the ranks unwatched for the rest of the run."""

    class Busy:
        def set(self, *_):
            raise RuntimeError("Timed out after 10 seconds")

    watch, answers = watch_of(0), dist.HashStore()
    watch._store, watch._poll_s, watch._prefix = Busy(), 0.01, "a"
    opened = [RuntimeError("busy still"), answers]

    def open_again():
        if isinstance(opened[0], RuntimeError):
            raise opened.pop(0)
        return opened[0]

    monkeypatch.setattr(watch, "_open", open_again)
    thread = threading.Thread(target=watch._watch)
    thread.start()
    deadline = time.monotonic() + 10
    while not answers.check(["a/beat/0"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    watch._stop.set()
    thread.join()
    assert answers.check(["a/beat/0"])


def test_a_process_that_says_nothing_any_more_and_one_that_never_began_are_named(watch_of, caplog, monkeypatch):
    watch, stopped = watch_of(0), watch_of(2)
    for each in (watch, stopped):
        each.on_step_begin(None, state_at(5), TrainerControl())
        stands_for(each, 130)
    watch._look()
    assert "for rank 1" in caplog.text
    assert "rank 1 on an unknown host: not yet in training" in caplog.text
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    watch._say()
    watch._look()
    assert "for rank 2, not heard of any more" in caplog.text


def test_the_first_failure_is_the_one_that_all_are_told_of(watch_of, monkeypatch):
    monkeypatch.setattr("atexit.register", lambda *_, **__: None)  # this process is not to end soon
    first, second, third = (watch_of(rank) for rank in range(3))
    first._failed(ValueError("boom"))
    second._failed(ValueError("its own"))  # a real error of its own stays what it is
    with pytest.raises(SpeedkitError, match="rank 0 failed after step 5: ValueError: boom"):
        third._failed(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))


def test_a_time_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="stuck_rank_timeout_s=-1"):
        RankWatch(-1)


def state_at(step):
    return TrainerState(global_step=step)


def test_what_callbacks_ask_for_at_the_end_of_a_step_is_what_a_rank_is_doing():
    watch, control = RankWatch(600), TrainerControl()
    assert watch._part() == "start-up checks"
    watch.on_step_begin(None, state_at(4), control)
    assert watch._part() == "forward and backward"
    watch.on_step_end(None, state_at(5), control)
    assert watch._part() == "loading the next batches"
    control.should_save = True  # by a callback that comes later, as after a stop signal
    assert watch._part() == SAVING
    control.should_evaluate = True
    assert watch._part() == "evaluating"
    watch.on_prediction_step(None, state_at(5), control)
    assert watch._part() == "evaluating"
    control.should_evaluate = False
    watch.on_evaluate(None, state_at(5), control)
    assert watch._part() == SAVING
    control.should_save = False
    watch.on_save(None, state_at(5), control)
    assert watch._part() == "loading the next batches"
    control.should_training_stop = True
    assert watch._part() == FINISHING


def test_a_thread_is_described_by_its_innermost_line_and_the_users():
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
    assert "called at ranks/test_rank_watch.py:" in where
    assert where.endswith("wait_here")
    assert not waits
    assert describe_frame(None) == ("an unknown line", False)
