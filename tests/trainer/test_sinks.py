"""The step log."""

import json
import logging
import math

import pytest
from plain_trainer import documents, make_trainer

from hf_speedkit.core.metrics import METRICS
from hf_speedkit.core.records import Environment, StepRecord, TokenCounts
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.sinks import JsonlSink, SinkGroup
from hf_speedkit.trainer.throughput_callback import ThroughputCallback

ENVIRONMENT = Environment(python="3.11", packages={"torch": "2.13"}, devices=(), driver=None, cpu_count=2, commit=None)


def record(step):
    counts = TokenCounts(slots=8, real=6, target=4, documents=2)
    return StepRecord(step=step, micro_batches=1, tokens=counts, step_time_s=0.5)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(directory, path, *, resume=None, **more):
    trainer = make_trainer(directory, data=documents((5,) * 8), logging_steps=2, **more)
    attach(trainer, ThroughputCallback(sinks=[JsonlSink(path)]))
    trainer.train(resume_from_checkpoint=resume)


def test_a_run_leaves_a_session_its_steps_and_its_windows(tmp_path):
    path = tmp_path / "log" / "steps.jsonl"
    train(tmp_path / "run", path)
    found = lines(path)
    assert [line["kind"] for line in found] == ["session", "step", "step", "window", "step", "step", "window"]
    assert found[0]["format"] == 1
    assert found[0]["environment"]["packages"]["torch"]
    assert [line["step"] for line in found if line["kind"] == "step"] == [1, 2, 3, 4]
    assert found[1]["excluded"] == "warm-up"
    counted = {"slots": 10, "real": 10, "target": 6, "documents": 2, "squared_lengths": 50, "window_pairs": None}
    assert found[1]["tokens"] == counted
    metrics = found[-1]["metrics"]
    assert {key for key in metrics if key.startswith("speed/")} <= set(METRICS)
    assert metrics["loss"] > 0


def test_a_resumed_run_is_appended_with_a_new_session(tmp_path):
    path = tmp_path / "steps.jsonl"
    settings = {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path / "run", path, max_steps=3, **settings)
    train(tmp_path / "run", path, resume=str(tmp_path / "run" / "checkpoint-2"), **settings)
    found = lines(path)
    assert [line["step"] for line in found if line["kind"] == "session"] == [0, 2]
    assert [line["step"] for line in found if line["kind"] == "step"] == [1, 2, 3, 3, 4]
    assert [line["excluded"] for line in found if line["kind"] == "step"][3] == "resume"


def test_steps_after_the_last_window_are_written_at_the_end(tmp_path):
    path = tmp_path / "steps.jsonl"
    train(tmp_path / "run", path, max_steps=3)
    assert [line["step"] for line in lines(path) if line["kind"] == "step"] == [1, 2, 3]


def test_the_log_holds_no_path_user_host_or_token(tmp_path, monkeypatch):
    planted = {"HF_TOKEN": "hf_planted", "WANDB_API_KEY": "planted-key", "USER": "planted-user"}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "steps.jsonl"
    train(tmp_path / "run", path)
    text = path.read_text()
    assert str(tmp_path) not in text
    assert not [value for value in planted.values() if value in text]


def test_nothing_is_made_before_the_first_line(tmp_path):
    path = tmp_path / "log" / "steps.jsonl"
    sink = JsonlSink(path)
    sink.begin(0, ENVIRONMENT)
    sink.close()
    assert not path.parent.exists()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "steps.jsonl"
    sink = JsonlSink(path)
    sink.begin(0, ENVIRONMENT)
    sink(record(1))
    sink.window(1, {"loss": math.nan, "grad_norm": math.inf, "speed/mfu": 40.0})
    assert lines(path)[-1]["metrics"] == {"loss": None, "grad_norm": None, "speed/mfu": 40.0}


def test_a_killed_run_leaves_whole_lines(tmp_path):
    path = tmp_path / "steps.jsonl"
    sink = JsonlSink(path)
    sink.begin(0, ENVIRONMENT)
    sink(record(1))
    sink.window(1, {})
    sink(record(2))  # killed here: never written, nothing half written
    assert [line["kind"] for line in lines(path)] == ["session", "step", "window"]


def test_a_log_that_cannot_be_written_is_reported_once_and_does_not_stop_training(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a directory should be")
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "run", blocked / "steps.jsonl")
    assert caplog.text.count("the step log steps.jsonl ends here") == 1


def test_a_plain_callable_is_a_sink_too():
    seen = []
    group = SinkGroup([seen.append])
    group.begin(0)
    group.steps([record(1), record(2)])
    group.window(2, {})
    group.close()
    assert [entry.step for entry in seen] == [1, 2]


@pytest.mark.parametrize("world_zero", [True, False])
def test_only_world_rank_zero_writes(tmp_path, world_zero):
    path = tmp_path / "steps.jsonl"
    trainer = make_trainer(tmp_path / "run", data=documents((5,) * 4))
    trainer.is_world_process_zero = lambda: world_zero
    attach(trainer, ThroughputCallback(sinks=[JsonlSink(path)]))
    trainer.train()
    assert path.exists() is world_zero
