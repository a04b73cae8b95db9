"""Counting launches inside a real training loop: which steps, what is logged, and what stays out of the rates."""

import json
import logging

import pytest
from plain_trainer import documents, make_trainer, training_rows
from trace_files import FakeProfiler, TraceFile
from transformers import TrainerControl

from hf_speedkit.measure.launches import LaunchCounter
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.metrics.counted_steps import FIRST, CountedSteps
from hf_speedkit.trainer.sinks import JsonlSink
from hf_speedkit.trainer.throughput_callback import ThroughputCallback
from hf_speedkit.trainer.trace_callback import TraceCallback

RECORDED = TraceFile(schemaVersion=1).launch(1, "gemm", 5, 10).launch(2, "gemm", 20, 10)


class OnACpu(ThroughputCallback):
    """Counts on this machine, by a profiler that has seen two kernels."""

    def __init__(self, *, every, profiler=None, **settings):
        super().__init__(**settings)
        self.every = every
        self.profiler = profiler or FakeProfiler(RECORDED)

    def _start_helpers(self, args):
        counter = LaunchCounter(profiler=lambda: self.profiler, mark=lambda: None)
        self._counted = CountedSteps(self.every, counter=counter, say=self._report.warn_once, alone=True)


def run(tmp_path, callback, *, attached=True, more=(), **settings):
    trainer = make_trainer(tmp_path, data=documents((5,) * 16), per_device_train_batch_size=2, **settings)
    if attached:
        attach(trainer, callback, *more)
    else:
        trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == 8
    return trainer


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(
    "pauses",
    [
        {"logging_steps": 4},
        {"logging_steps": 1},
        {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
    ],
    ids=["no pause before", "a log before", "log, evaluation and checkpoint before"],
)
def test_every_fourth_step_is_counted_and_kept_out_of_the_rates(tmp_path, pauses, attached):
    log = tmp_path / "steps.jsonl"
    callback = OnACpu(every=4, sinks=[JsonlSink(log)])
    trainer = run(tmp_path, callback, attached=attached, eval_data=documents((5,) * 2), **pauses)
    assert callback.profiler.done == ["prepare", "start", "stop"] * 2
    steps = [one for one in map(json.loads, log.read_text().splitlines()) if one["kind"] == "step"]
    assert [one["step"] for one in steps if one["excluded"] == "counted"] == [3, 4, 7, 8]
    assert {one["step"]: one["launches"] for one in steps if one["launches"] is not None} == {4: 2, 8: 2}
    rows = [row for row in training_rows(trainer) if "speed/launches" in row]
    assert [row["step"] for row in rows] == [4, 8]
    for row in rows:
        assert (row["speed/launches"], row["speed/launch_calls"], row["speed/kernels"]) == (2, 2, 2)
        assert row["speed/count_cost_s"] > 0
    assert callback.run_totals().rates["speed/launches"] == 2
    assert callback.run_totals().tokens.documents == 16  # counted steps train as others do


def test_reading_a_count_is_in_no_steps_time(tmp_path):
    class Slow(FakeProfiler):
        def export_chrome_trace(self, path):
            import time

            time.sleep(1.0)
            super().export_chrome_trace(path)

    records = []
    callback = OnACpu(every=4, profiler=Slow(RECORDED), sinks=[records.append])
    run(tmp_path, callback, logging_steps=8)
    assert sum(record.step_time_s for record in records[1:]) < 1.0  # any leak would add a second; the first imports
    assert callback.run_totals().log_time_s >= 2.0


def test_a_traced_step_is_not_counted_and_said_so_once(tmp_path, caplog):
    callback = OnACpu(every=4)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, callback, more=[TraceCallback(4)], logging_steps=4)
    assert callback.profiler.done == ["prepare", "start", "stop"]  # step 8
    assert caplog.text.count("a count of launches is left out: a trace is recorded at that step") == 1


def test_a_broken_cupti_is_said_once_and_no_step_is_kept_out_any_more(tmp_path, caplog):
    callback = OnACpu(every=4, profiler=FakeProfiler(RECORDED, fails="prepare"))
    with caplog.at_level(logging.WARNING):
        trainer = run(tmp_path, callback, logging_steps=4)
    assert caplog.text.count("no launches are counted: CUPTI cannot be used") == 1
    assert [row["speed/excluded_steps"] for row in training_rows(trainer)] == [2, 0]  # first step and one warm-up
    assert not [row for row in training_rows(trainer) if "speed/launches" in row]


def steps_of(*, every, alone, fails=None, until):
    """The steps kept out, by number."""
    counter = LaunchCounter(profiler=lambda: FakeProfiler(RECORDED, fails=fails), mark=lambda: None)
    counted = CountedSteps(every, counter=counter, say=lambda text: None, alone=alone)
    kept_out = []
    for number in range(1, until + 1):
        if counted.step_begins(number, excluded=False):
            kept_out.append(number)
        counted.step_ends(number, TrainerControl())
        counted.through("step_end")
    return kept_out


def test_the_first_count_waits_for_the_warm_up_and_then_one_comes_every_hundred():
    assert steps_of(every=100, alone=True, until=250) == [19, 20, 119, 120, 219, 220]
    assert FIRST == 20


def test_ranks_keep_the_same_steps_out_even_if_one_cannot_count():
    working, broken = (steps_of(every=10, alone=False, fails=fails, until=30) for fails in (None, "prepare"))
    assert working == broken == [9, 10, 19, 20, 29, 30]


def test_every_step_cannot_be_counted_since_each_needs_a_warm_up():
    assert steps_of(every=1, alone=True, until=6) == steps_of(every=2, alone=True, until=6) == [1, 2, 3, 4, 5, 6]
