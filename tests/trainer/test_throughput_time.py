"""ThroughputCallback: what counts as training time, and where the rest goes."""

import time

import pytest
from plain_trainer import LENGTHS, Slow, as_tuple, documents, expected, make_trainer, tiny_llama, train, training_rows
from transformers import TrainerCallback

from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.throughput_callback import ThroughputCallback


@pytest.mark.parametrize(("attached", "eval_steps", "evaluations"), [(True, 3, 3), (False, 4, 2)])
def test_evaluation_is_not_counted_and_its_time_is_no_training_time(tmp_path, attached, eval_steps, evaluations):
    callback = ThroughputCallback()
    trainer = make_trainer(
        tmp_path, eval_data=Slow(documents(LENGTHS[:4]), 0.1), eval_strategy="steps", eval_steps=eval_steps,
        eval_on_start=True, callbacks=None if attached else [callback],
    )  # fmt: skip
    totals = (train(trainer, callback) if attached else trainer.train() and callback).run_totals()
    assert as_tuple(totals.tokens) == expected(LENGTHS, 2)
    assert totals.eval_time_s >= evaluations * 0.4  # at the start as well
    assert totals.rates["speed/step_time_s"] < 0.2
    assert training_rows(trainer)[eval_steps]["speed/eval_time_s"] >= 0.4


class SlowReporter(TrainerCallback):
    def on_log(self, args, state, control, **keywords):
        time.sleep(0.15)

    def on_save(self, args, state, control, **keywords):
        time.sleep(0.25)


def test_slow_trackers_and_checkpoints_are_neither_training_nor_data_wait(tmp_path):
    trainer = make_trainer(
        tmp_path, callbacks=[SlowReporter()], save_strategy="steps", save_steps=2, report_to="tensorboard"
    )
    callback = train(trainer)
    totals = callback.run_totals()
    assert totals.log_time_s >= 5 * 0.15
    assert totals.save_time_s >= 2 * 0.25
    assert totals.rates["speed/step_time_s"] < 0.14  # any leak would add 0.15 s
    assert totals.rates["speed/data_wait_s"] < 0.1


def test_a_slow_tracker_before_an_unattached_callback_is_no_training_time_either(tmp_path):
    callback = ThroughputCallback()
    make_trainer(tmp_path, callbacks=[SlowReporter(), callback], max_steps=3).train()
    assert callback.run_totals().log_time_s >= 2 * 0.15
    assert callback.run_totals().rates["speed/step_time_s"] < 0.14


class SettlesBehindStepOne(TrainerCallback):
    def on_step_end(self, args, state, control, **keywords):
        if state.global_step == 1:
            time.sleep(1.0)


def test_what_callbacks_do_once_behind_the_first_step_is_warm_up(tmp_path):
    records = []
    trainer = make_trainer(tmp_path, callbacks=[SettlesBehindStepOne()], max_steps=2)
    train(trainer, ThroughputCallback(sinks=[records.append]))
    first, second = records
    assert first.step_time_s > 1.0 > second.step_time_s
    assert first.excluded == "warm-up"


def test_v68_a_slow_data_set_shows_as_data_wait_inside_the_step_time(tmp_path):
    data = Slow(documents((4,) * 8), 0.15)
    trainer = make_trainer(tmp_path, data=data, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    callback = train(trainer)
    # The loader reads one batch ahead, so the last step has nothing left to wait for.
    for row in training_rows(trainer)[1:-1]:
        assert row["speed/data_wait_s"] >= 0.28
        assert row["speed/step_time_s"] >= row["speed/data_wait_s"]
    rates = callback.run_totals().rates
    assert "speed/device_time_s" not in rates  # no device, so not measured: left out, not 0
    assert "speed/device_wait_s" not in rates


class WallClock(TrainerCallback):
    """When steps end, by a clock that knows nothing of ours."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **keywords):
        self.ends.append(time.perf_counter())


def test_parts_of_a_step_add_up_to_the_wall_time_within_three_percent(tmp_path):
    wall = WallClock()
    trainer = make_trainer(tmp_path, data=Slow(documents(), 0.08), logging_steps=6, callbacks=[wall])
    rates = train(trainer).run_totals().rates
    assert rates["speed/data_wait_s"] + rates["speed/host_time_s"] == pytest.approx(
        rates["speed/step_time_s"], rel=0.03
    )
    (row,) = training_rows(trainer)
    parts = row["speed/part_data_wait_s"] + row["speed/part_host_only_s"]
    assert row["speed/steady_steps"] == 5  # all but the first, so from its end to the last one's
    assert 5 * parts == pytest.approx(wall.ends[-1] - wall.ends[0], rel=0.03)


def test_v59_the_first_step_is_excluded_and_marked(tmp_path):
    records = []
    train(make_trainer(tmp_path), ThroughputCallback(sinks=[records.append]))
    assert records[0].excluded == "warm-up"
    assert any(record.excluded is None for record in records[1:])


class QueuedDevice:
    """A device that works through what the model queues, in real seconds, while the host goes on at once."""

    def __init__(self, model, *, first_s, later_s):
        self.next_s = first_s
        self.later_s = later_s
        self.busy_until = 0.0
        # Evaluation reads its losses and a checkpoint the weights, so both wait for what is queued.
        model.register_forward_hook(lambda module, *_: self.issue() if module.training else self.wait(self.busy_until))
        model.register_state_dict_pre_hook(lambda *_: self.wait(self.busy_until))

    def issue(self):
        self.busy_until = max(self.busy_until, time.perf_counter()) + self.next_s
        self.next_s = self.later_s

    def mark(self):
        return max(self.busy_until, time.perf_counter())

    def wait(self, mark):
        time.sleep(max(0.0, mark - time.perf_counter()))

    def elapsed_s(self, start, end):
        return end - start if end <= time.perf_counter() else None


class AsksForCheckpoints(TrainerCallback):
    """A callback of the user's, behind ours, that wants a checkpoint after every step."""

    def on_step_end(self, args, state, control, **keywords):
        control.should_save = True


@pytest.mark.parametrize(
    "pauses",
    [
        {},
        {"callbacks": [AsksForCheckpoints()]},
        {"eval_strategy": "steps", "eval_steps": 1},
        {"eval_strategy": "epoch", "save_strategy": "epoch"},
    ],
)
@pytest.mark.parametrize("logging_steps", [1, 4])
def test_v70_work_still_queued_counts_as_training_and_not_as_log_evaluation_or_checkpoint(
    tmp_path, monkeypatch, pauses, logging_steps
):
    # A step keeps the device for 0.1 s, the first for 0.6 s; the host needs some 10 ms to issue one.
    model = tiny_llama()
    device = QueuedDevice(model, first_s=0.6, later_s=0.1)
    monkeypatch.setattr("hf_speedkit.trainer.throughput_callback.device_timer", lambda kind: device)
    trainer = make_trainer(
        tmp_path,
        model=model,
        data=documents((5,) * 8),
        logging_steps=logging_steps,
        eval_data=documents((2, 2)) if "eval_strategy" in pauses else None,
        **pauses,
    )
    records = []
    totals = train(trainer, ThroughputCallback(sinks=[records.append])).run_totals()
    assert [record.excluded for record in records] == ["warm-up", None, None, None]
    assert records[0].step_time_s >= 0.6
    for record in records[1:]:
        assert 0.0999 < record.step_time_s < 0.3
        assert 0.0999 < record.device_time_s < 0.3
    # Evaluation takes some 10 ms; had it waited for the step's work, it would have been 0.1 s and more each time.
    assert totals.eval_time_s < 0.1 * 3
    # What the host was seen to do and to wait for adds up to the steps' time on the device's clock, within 10 ms a
    # step: the host issues a step's work some milliseconds after the step began.
    parts = sum(totals.rates[f"speed/{part}_s"] for part in ("data_wait", "host_time", "device_wait"))
    assert parts == pytest.approx(totals.rates["speed/step_time_s"], abs=0.03)


class Excluder(TrainerCallback):
    def __init__(self, throughput):
        self.throughput = throughput

    def on_step_begin(self, args, state, control, **keywords):
        if state.global_step == 3:
            self.throughput.exclude("traced")


def test_another_callback_can_keep_a_step_out_of_the_rates(tmp_path):
    records = []
    callback = ThroughputCallback(sinks=[records.append])
    trainer = make_trainer(tmp_path)
    attach(trainer, Excluder(callback))
    train(trainer, callback)
    assert records[3].excluded == "traced"
    assert "speed/slots_per_second" not in training_rows(trainer)[3]
    assert as_tuple(callback.run_totals().tokens) == expected(LENGTHS, 2)
