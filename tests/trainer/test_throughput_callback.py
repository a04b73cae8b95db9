"""ThroughputCallback on a plain Trainer: what it counts, what it leaves out, what it survives."""

import json
import logging
import math
import sys
import time

import pytest
import torch
from plain_trainer import LENGTHS, documents, expected, make_trainer, pad, tiny_llama, training_rows
from transformers import Trainer, TrainerCallback

from hf_speedkit.core.metrics import METRICS
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.throughput_callback import ThroughputCallback


def train(trainer, callback=None, **more):
    callback = callback or ThroughputCallback()
    attach(trainer, callback)
    trainer.train(**more)
    return callback


def as_tuple(counts):
    return counts.slots, counts.real, counts.target, counts.documents, counts.squared_lengths


class Slow(torch.utils.data.Dataset):
    """Documents that take their time."""

    def __init__(self, rows, seconds):
        self.rows = rows
        self.seconds = seconds

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.rows[index]


class SlowStream(torch.utils.data.IterableDataset):
    """The same as a stream: what is skipped on resume is read all the same."""

    def __init__(self, rows, seconds):
        self.rows = rows
        self.seconds = seconds

    def __iter__(self):
        for row in self.rows:
            time.sleep(self.seconds)
            yield row


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_v65_a_padded_run_counts_slots_real_and_target_tokens(tmp_path, accumulation):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=accumulation)
    callback = train(trainer)
    assert as_tuple(callback.run_totals().tokens) == expected(LENGTHS, 2)
    last = training_rows(trainer)[-1]
    slots, real, target, rows, _ = expected(LENGTHS, 2)
    assert last["speed/total_slots"] == slots
    assert last["speed/total_real_tokens"] == real
    assert last["speed/total_target_tokens"] == target
    assert last["speed/total_documents"] == rows


def test_v63_an_accumulated_step_counts_all_its_micro_batches(tmp_path):
    lengths = (10, 20, 30, 40, 10, 20, 30, 40)
    trainer = make_trainer(
        tmp_path, data=documents(lengths), per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    records = []
    train(trainer, ThroughputCallback(sinks=[records.append]))
    assert [record.tokens.real for record in records] == [100, 100]
    assert [record.micro_batches for record in records] == [4, 4]
    row = training_rows(trainer)[-1]
    assert row["speed/real_tokens_per_second"] == pytest.approx(100 / records[1].step_time_s)


def test_metrics_stand_in_the_row_of_the_loss_and_nowhere_else(tmp_path):
    trainer = make_trainer(tmp_path, eval_data=documents(LENGTHS[:4]), eval_strategy="steps", eval_steps=2)
    train(trainer)
    for row in trainer.state.log_history:
        keys = [key for key in row if key.startswith("speed/")]
        assert bool(keys) == ("loss" in row)
        assert set(keys) <= set(METRICS)


def test_evaluation_is_not_counted_and_its_time_is_no_training_time(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_data=Slow(documents(LENGTHS[:4]), 0.1), eval_strategy="steps", eval_steps=2, eval_on_start=True
    )
    callback = train(trainer)
    totals = callback.run_totals()
    assert as_tuple(totals.tokens) == expected(LENGTHS, 2)
    assert totals.eval_time_s >= 4 * 0.4  # at the start and after steps 2, 4 and 6
    assert totals.rates["speed/step_time_s"] < 0.2
    assert training_rows(trainer)[2]["speed/eval_time_s"] >= 0.4


class SlowReporter(TrainerCallback):
    def on_log(self, args, state, control, **keywords):
        time.sleep(0.15)

    def on_save(self, args, state, control, **keywords):
        time.sleep(0.25)


def test_slow_trackers_and_checkpoints_are_neither_training_nor_data_wait(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[SlowReporter()], save_strategy="steps", save_steps=2)
    callback = train(trainer)
    totals = callback.run_totals()
    assert totals.log_time_s >= 5 * 0.15
    assert totals.save_time_s >= 2 * 0.25
    assert totals.rates["speed/step_time_s"] < 0.1
    assert totals.rates["speed/data_wait_s"] < 0.05


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


def test_parts_of_a_step_add_up(tmp_path):
    trainer = make_trainer(tmp_path, data=Slow(documents(), 0.02))
    rates = train(trainer).run_totals().rates
    parts = rates["speed/data_wait_s"] + rates["speed/host_time_s"]
    assert parts == pytest.approx(rates["speed/step_time_s"], rel=0.03)


def test_v59_the_first_step_is_excluded_and_marked(tmp_path):
    records = []
    train(make_trainer(tmp_path), ThroughputCallback(sinks=[records.append]))
    assert records[0].excluded == "warm-up"
    assert any(record.excluded is None for record in records[1:])


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


class Fed(Trainer):
    """A trainer that knows its counts, as SpeedSFTTrainer does; it also counts evaluation, which must not matter."""

    throughput = None
    counts = TokenCounts(slots=100, real=90, target=50, documents=3, squared_lengths=2700)

    def compute_loss(self, model, inputs, *arguments, **keywords):
        self.throughput.count(self.counts)
        return super().compute_loss(model, inputs, *arguments, **keywords)


def test_counts_given_by_the_trainer_are_not_counted_twice(tmp_path):
    trainer = make_trainer(tmp_path, kind=Fed, eval_data=documents(LENGTHS[:2]), eval_strategy="steps", eval_steps=2)
    trainer.throughput = ThroughputCallback()
    totals = train(trainer, trainer.throughput).run_totals()
    assert as_tuple(totals.tokens) == (600, 540, 300, 18, 16_200)


def pad_with_counts(rows):
    batch = pad(rows)
    batch["token_counts"] = TokenCounts(slots=50, real=40, target=30, documents=len(rows), squared_lengths=800)
    return batch


@pytest.mark.parametrize("evaluate", [False, True])
def test_counts_in_the_batch_are_used_and_kept_from_the_model(tmp_path, evaluate):
    seen = []
    model = tiny_llama()
    forward = model.forward
    model.forward = lambda *a, **k: seen.append(set(k)) or forward(*a, **k)
    more = {"eval_data": documents(LENGTHS[:2]), "eval_on_start": True, "eval_strategy": "epoch"} if evaluate else {}
    trainer = make_trainer(tmp_path, model=model, collator=pad_with_counts, **more)
    totals = train(trainer).run_totals()
    assert as_tuple(totals.tokens) == (300, 240, 180, 12, 4800)
    assert seen
    assert not [keys for keys in seen if "token_counts" in keys]


class Prober(TrainerCallback):
    """Runs the model before step 1 and between steps, as an isolation probe would."""

    def on_train_begin(self, args, state, control, model=None, **keywords):
        model(**pad(documents((5, 5)))).loss.backward()
        model.zero_grad()

    def on_step_end(self, args, state, control, model=None, **keywords):
        model(**pad(documents((5, 5))))


def test_forward_passes_outside_a_step_are_not_counted(tmp_path):
    trainer = make_trainer(tmp_path)
    attach(trainer, Prober())
    callback = train(trainer)
    assert as_tuple(callback.run_totals().tokens) == expected(LENGTHS, 2)


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


def test_steps_after_the_last_log_are_in_the_totals(tmp_path):
    trainer = make_trainer(tmp_path, logging_steps=4)
    records = []
    callback = train(trainer, ThroughputCallback(sinks=[records.append]))
    assert len(training_rows(trainer)) == 1
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert as_tuple(callback.run_totals().tokens) == expected(LENGTHS, 2)


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


def test_an_epoch_that_stops_inside_an_accumulation_window_loses_no_tokens(tmp_path):
    class ShortEpoch(TrainerCallback):
        done = False

        def on_substep_end(self, args, state, control, **keywords):
            if state.global_step == 1 and not self.done:
                self.done = control.should_epoch_stop = True

    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, num_train_epochs=2, callbacks=[ShortEpoch()])
    records = []
    train(trainer, ThroughputCallback(sinks=[records.append]))
    assert [record.micro_batches for record in records] == [2, 3, 2, 2]
    assert [record.tokens.documents for record in records] == [4, 6, 4, 4]


class NanAt(Trainer):
    """The loss of one step is not a number."""

    step = 3
    seen = 0

    def compute_loss(self, *arguments, **keywords):
        loss = super().compute_loss(*arguments, **keywords)
        self.seen += 1
        return loss * math.nan if self.seen == self.step else loss


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_v30_a_nan_step_is_counted_and_named_and_not_shown_as_zero(tmp_path, caplog, clip):
    trainer = make_trainer(tmp_path, kind=NanAt, max_steps=5, max_grad_norm=clip, logging_nan_inf_filter=True)
    shown = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **keywords):
            shown.append(dict(logs))

    trainer.add_callback(Tracker())
    with caplog.at_level(logging.WARNING):
        callback = train(trainer)
    rows = training_rows(trainer)
    assert [row["speed/nonfinite_steps"] for row in rows[:3]] == [0, 0, 1]
    assert "the first was step 3" in caplog.text
    assert math.isnan(shown[2]["loss"])  # the Trainer's filter makes it 0.0
    assert callback.run_totals().nonfinite_steps == 3  # the weights are NaN from then on


def test_v30_a_window_with_a_nan_step_keeps_the_mean_of_the_others_and_says_so(tmp_path, caplog):
    trainer = make_trainer(tmp_path, kind=NanAt, max_steps=3, logging_steps=3, logging_nan_inf_filter=True)
    with caplog.at_level(logging.WARNING):
        train(trainer)
    assert training_rows(trainer)[-1]["speed/nonfinite_steps"] == 1
    assert "1 of the last 3 steps had a NaN or infinite gradient, the first was step 3" in caplog.text


def test_v81_an_empty_report_to_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(make_trainer(tmp_path, max_steps=2))
    assert caplog.text.count("console only; set report_to") == 1


def test_a_callback_behind_the_trackers_says_how_to_put_it_right(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=2, report_to="tensorboard", callbacks=[ThroughputCallback()])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "use attach(trainer, ThroughputCallback())" in caplog.text


def test_unattached_it_still_measures(tmp_path):
    callback = ThroughputCallback()
    trainer = make_trainer(tmp_path, callbacks=[callback])
    trainer.train()
    assert as_tuple(callback.run_totals().tokens) == expected(LENGTHS, 2)
    assert "speed/slots_per_second" in callback.run_totals().rates


def test_a_compiled_model_is_counted_and_not_recompiled(tmp_path):
    data = documents((6,) * 8)
    trainer = make_trainer(tmp_path, data=data, torch_compile=True, torch_compile_backend="eager")
    torch._dynamo.reset()
    callback = train(trainer)
    assert as_tuple(callback.run_totals().tokens) == expected((6,) * 8, 2)
    # As many frames as without the callback, or a few more at the break before the model; not some for every step.
    assert torch._dynamo.utils.counters["frames"]["ok"] <= 4
    torch._dynamo.reset()


def test_v62_nothing_of_ours_reads_the_device_between_logging_steps(tmp_path, monkeypatch):
    reads = []

    def watched(name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *arguments, **keywords):
            frame = sys._getframe(1)
            while frame is not None:
                if "/hf_speedkit/" in frame.f_code.co_filename:
                    reads.append(name)
                    break
                frame = frame.f_back
            return original(tensor, *arguments, **keywords)

        return read

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    trainer = make_trainer(tmp_path, data=documents((5,) * 40), logging_steps=10)
    train(trainer)
    assert trainer.state.global_step == 20
    assert reads == ["tolist"] * 2  # one a logging step; nothing is left for the end of training


def test_rows_without_labels_or_a_mask_are_counted_as_far_as_they_say(tmp_path):
    class Sum(torch.nn.Module):
        """No transformers model: its own loss, no labels, no configuration."""

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(32, 4)

        def forward(self, input_ids):
            return {"loss": self.embedding(input_ids).square().mean()}

    trainer = make_trainer(tmp_path, model=Sum(), collator=lambda rows: {"input_ids": pad(rows)["input_ids"]})
    totals = train(trainer).run_totals()
    slots = expected(LENGTHS, 2)[0]
    assert (totals.tokens.slots, totals.tokens.real, totals.tokens.target) == (slots, slots, None)
    assert "speed/target_tokens_per_second" not in totals.rates


def test_mfu_needs_a_peak_and_flops(tmp_path):
    with_peak = train(make_trainer(tmp_path), ThroughputCallback(peak_tflops=0.01)).run_totals().rates
    assert with_peak["speed/mfu"] == pytest.approx(with_peak["speed/model_tflops_per_device"] / 0.01 * 100)
    given = train(make_trainer(tmp_path), ThroughputCallback(flops=lambda counts: 1e9 * counts.real, peak_tflops=1.0))
    assert given.run_totals().rates["speed/model_tflops_per_device"] == pytest.approx(
        given.run_totals().rates["speed/real_tokens_per_second"] * 1e-3
    )
    without = train(make_trainer(tmp_path)).run_totals().rates
    assert "speed/mfu" not in without
