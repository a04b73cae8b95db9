"""ThroughputCallback: checkpoints, resumed runs, a callback used twice."""

import json
import logging

import pytest
from plain_trainer import (
    LENGTHS,
    SlowStream,
    as_tuple,
    documents,
    expected,
    make_trainer,
    tiny_llama,
    train,
    training_rows,
)
from transformers import TrainerCallback, TrainerState

from hf_speedkit.core.records import TokenCounts
from hf_speedkit.trainer.metrics.saved_totals import STATE_KEY, load_totals
from hf_speedkit.trainer.throughput_callback import ThroughputCallback


@pytest.mark.parametrize("resume", [True, "path"])
@pytest.mark.parametrize("save_steps", [3, 2])
def test_v67_totals_go_on_after_a_resume(tmp_path, resume, save_steps):
    # Saving at 2 with logs at 3 and 6 saves totals that no log has brought up to date.
    settings = {"save_strategy": "steps", "save_steps": save_steps, "logging_steps": 3}
    whole = train(make_trainer(tmp_path / "whole", **settings)).run_totals()
    callback = ThroughputCallback()
    stopped = make_trainer(tmp_path / "cut", max_steps=save_steps, **settings)
    train(stopped, callback)
    checkpoint = str(tmp_path / "cut" / f"checkpoint-{save_steps}")
    # The same callback object again: what it counted before must not be added to what the checkpoint holds.
    resumed = make_trainer(tmp_path / "cut", **settings)
    train(resumed, callback, resume_from_checkpoint=True if resume is True else checkpoint)
    assert resumed.state.global_step == 6
    assert callback.run_totals().tokens == whole.tokens
    assert callback.run_totals().session.documents == 2 * (6 - save_steps)
    assert training_rows(resumed)[-1]["speed/total_real_tokens"] == whole.tokens.real


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_v67_totals_are_saved_by_every_save_strategy(tmp_path, strategy):
    best = {"metric_for_best_model": "loss", "eval_strategy": "epoch"} if strategy == "best" else {}
    trainer = make_trainer(tmp_path, eval_data=documents(LENGTHS[:4]), save_strategy=strategy, logging_steps=4, **best)
    callback = train(trainer)
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["hf_speedkit.throughput"]
    assert saved["step"] == 6
    assert TokenCounts(**saved["tokens"]) == callback.run_totals().tokens


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        ({"slots": 9, "real": 7, "of_a_later_version": 1}, TokenCounts(slots=9, real=7, target=None, documents=None)),
        ({"slots": 9, "real": "7"}, TokenCounts(slots=9, real=None, target=None, documents=None)),
        ({"real": 7}, None),
        ("nine", None),
    ],
)
def test_totals_of_another_version_are_read_as_far_as_they_are_known(saved, found):
    state = TrainerState(global_step=3, stateful_callbacks=[])
    state.stateful_callbacks = {STATE_KEY: {"step": 3, "tokens": saved}}
    assert load_totals(state) == found


def test_a_checkpoint_made_without_the_callback_gives_unknown_totals_and_still_saves(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path, max_steps=3, **settings).train()
    resumed = make_trainer(tmp_path, **settings)
    with caplog.at_level(logging.WARNING):
        callback = train(resumed, resume_from_checkpoint=True)
    assert "does not hold the run's token totals" in caplog.text
    assert callback.run_totals().tokens is None
    assert callback.run_totals().session.documents == 6
    assert "speed/total_slots" not in training_rows(resumed)[-1]
    assert "speed/slots_per_second" in training_rows(resumed)[-1]


def test_restoring_callback_states_leaves_the_callback_in_its_place(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "restore_callback_states_from_checkpoint": True}
    train(make_trainer(tmp_path, max_steps=3, **settings))
    resumed = make_trainer(tmp_path, **settings)
    records = []
    callback = train(resumed, ThroughputCallback(sinks=[records.append]), resume_from_checkpoint=True)
    assert callback in resumed.callback_handler.callbacks
    assert [record.step for record in records] == [4, 5, 6]
    assert callback.run_totals().tokens.documents == 12


def test_v69_the_first_step_after_a_resume_enters_no_rate_and_is_marked(tmp_path):
    rows = documents((4,) * 40)
    settings = {"per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 30}
    make_trainer(tmp_path, data=SlowStream(rows, 0.0), max_steps=30, **settings).train()
    records = []
    resumed = make_trainer(tmp_path, data=SlowStream(rows, 0.02), max_steps=40, **settings)
    callback = train(resumed, ThroughputCallback(sinks=[records.append]), resume_from_checkpoint=True)
    assert records[0].excluded == "resume"
    assert records[0].data_wait_s >= 0.6  # the skipped rows are read here
    assert all(row.get("speed/data_wait_s", 0.0) < 0.3 for row in training_rows(resumed))
    assert callback.run_totals().rates["speed/data_wait_s"] < 0.1


def test_a_run_that_fails_leaves_nothing_behind_for_the_next(tmp_path):
    model = tiny_llama()

    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **keywords):
            if state.global_step == 2:
                raise RuntimeError("planted")

    callback = ThroughputCallback()
    failing = make_trainer(tmp_path, model=model, callbacks=[Failing()])
    with pytest.raises(RuntimeError, match="planted"):
        train(failing, callback)
    train(make_trainer(tmp_path, model=model), callback)
    assert as_tuple(callback.run_totals().tokens) == expected(LENGTHS, 2)
    assert not model._forward_pre_hooks
