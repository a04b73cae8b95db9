"""Loader workers ignore stop signals while training runs, and obey them afterwards."""

import multiprocessing
import time
from types import SimpleNamespace

import pytest

from hf_speedkit.trainer.ranks.stop_signal import StopSignal


def stuck(worker_init, ready):
    worker_init(0)
    ready.set()
    time.sleep(60)


@pytest.fixture
def worker():
    """A worker that does not leave by itself."""
    stop = StopSignal(["SIGTERM"])
    loader = SimpleNamespace(num_workers=1, worker_init_fn=None)
    stop.spare_workers(loader)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=stuck, args=(loader.worker_init_fn, ready), daemon=True)
    process.start()
    assert ready.wait(30)
    yield stop, process
    process.kill()
    process.join()


def test_a_worker_that_does_not_leave_can_be_ended_once_training_is_over(worker):
    """Python terminates what is left at exit and waits for it without a limit: an ignored signal would hang the job."""
    stop, process = worker
    with stop.installed():
        process.terminate()
        process.join(0.5)
        assert process.is_alive()
    process.terminate()
    process.join(30)
    assert not process.is_alive()
