"""A signal ends training with a whole checkpoint, and nothing else hears it."""

import logging
import multiprocessing
import os
import signal
import subprocess
import time

import pytest
from checkpoint_run import SignalAt, losses, names, small
from test_sft import Recorder
from transformers import TrainerCallback


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_training_with_a_whole_checkpoint_and_the_resumed_run_is_the_uninterrupted_one(
    tmp_path, run, number, caplog
):
    recorder = Recorder()
    stopped = small(tmp_path, save_steps=50, callbacks=[SignalAt(2, number), recorder], eval_strategy="no")
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        stopped.train()
    assert stopped.stopped_by == number.name
    assert stopped.state.global_step == 3 == len(recorder.rows), "the step under way is finished"
    assert f"{number.name}: stopped after step 3 of 4, checkpoint-3 is complete" in caplog.text
    assert names(tmp_path) == ["checkpoint-3"]
    assert signal.getsignal(number) is signal.SIG_DFL
    resumed = small(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.stopped_by is None
    assert losses(resumed) == pytest.approx(run[1], abs=1e-6)


def test_ctrl_c_says_what_is_saved_and_how_the_run_goes_on(tmp_path):
    trainer = small(tmp_path, callbacks=[SignalAt(3, signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.train()
    assert stopped.value.__notes__ == [
        "Interrupted after step 3 of 4: checkpoint-2 is complete; 1 step behind it is lost. Go on with "
        "resume_from_checkpoint=True"
    ]
    trainer = small(tmp_path / "none", callbacks=[SignalAt(1, signal.SIGINT)], save_strategy="no")
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.train()
    assert "after step 1 of 4, and no checkpoint is in" in stopped.value.__notes__[0]
    assert "kill -TERM PID" in stopped.value.__notes__[0]


def test_a_signal_to_every_process_of_the_job_does_not_take_the_data_away(tmp_path):
    """Slurm's way; without the workers' deafness torch raises "DataLoader worker is killed by signal" in the step."""

    class ToAll(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                workers = multiprocessing.active_children()
                assert workers
                # By another process: torch's workers end quietly when the signal is their parent's.
                subprocess.run(
                    ["kill", "-TERM", *(str(worker.pid) for worker in workers), str(os.getpid())], check=True
                )
                time.sleep(0.5)  # long enough for a dead worker to be noticed

    stopped = small(tmp_path, max_steps=6, dataloader_num_workers=1, callbacks=[ToAll()])
    stopped.train()
    assert (stopped.stopped_by, stopped.state.global_step) == ("SIGTERM", 2)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("changes", [{"save_strategy": "no"}, {"stop_signals": []}])
def test_signals_are_left_alone_where_no_checkpoint_could_be_written_or_none_is_wanted(tmp_path, changes):
    seen = []

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(signal.getsignal(signal.SIGTERM))

    small(tmp_path, max_steps=1, callbacks=[Looks()], **changes).train()
    assert seen == [signal.SIG_DFL]


def test_a_signal_before_the_first_step_ends_the_process_as_ever_since_nothing_is_there_to_save(tmp_path):
    """Deaf to it, a rank that waits for one that failed while starting would outlive torchrun's SIGTERM by minutes."""
    seen = []

    class Looks(TrainerCallback):
        def on_train_begin(self, *_, **__):
            seen.append(signal.getsignal(signal.SIGTERM))

        def on_step_end(self, *_, **__):
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer = small(tmp_path, max_steps=2, save_steps=50, callbacks=[Looks()])
    trainer.train()
    assert seen == [signal.SIG_DFL, trainer.stop_signal._receive, trainer.stop_signal._receive]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_handler_stays(tmp_path):
    def handler(number, frame):
        """Not ours."""

    before = signal.signal(signal.SIGTERM, handler)
    try:
        small(tmp_path, max_steps=1).train()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
