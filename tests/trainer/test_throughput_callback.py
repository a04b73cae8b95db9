"""ThroughputCallback on a plain Trainer: what it counts, logs and says."""

import logging
import math
import sys

import pytest
import torch
from plain_trainer import LENGTHS, as_tuple, documents, expected, make_trainer, pad, tiny_llama, train, training_rows
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl.trainer.utils import add_fused_lm_head

from hf_speedkit.core.flops import model_flops
from hf_speedkit.core.metrics import METRICS
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.metrics import job_ledger, micro_batches
from hf_speedkit.trainer.metrics.micro_batches import MicroBatchCounter
from hf_speedkit.trainer.throughput_callback import ThroughputCallback


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


def test_v65_labels_that_never_reach_the_model_are_said_and_not_counted_as_none(tmp_path, caplog):
    trainer = make_trainer(tmp_path, label_smoothing_factor=0.1)
    assert as_tuple(train(trainer).run_totals().tokens)[:3] == (*expected(LENGTHS, 2)[:2], None)
    assert "speed/target_tokens_per_second" not in training_rows(trainer)[-1]
    assert caplog.text.count("no rates of target tokens: labels, one a position, do not reach the model") == 1


def test_v63_an_accumulated_step_counts_all_its_micro_batches(tmp_path):
    lengths = (10, 20, 30, 40, 10, 20, 30, 40)
    trainer = make_trainer(
        tmp_path, data=documents(lengths), per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    records = []
    train(trainer, ThroughputCallback(sinks=[records.append]))
    assert [record.tokens.real for record in records] == [100, 100]
    # What the host knows (slots, documents) and what the device counts (the rest) are added up apart.
    assert [as_tuple(record.tokens) for record in records] == [expected(lengths[:4], 1)] * 2
    assert [record.micro_batches for record in records] == [4, 4]
    row = training_rows(trainer)[-1]
    assert row["speed/real_tokens_per_second"] == pytest.approx(100 / records[1].step_time_s)


def test_metrics_stand_in_the_row_of_the_loss_and_nowhere_else(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_data=documents(LENGTHS[:4]), eval_strategy="steps", eval_steps=2, logging_steps=3
    )
    train(trainer)
    assert len([row for row in trainer.state.log_history if "eval_loss" in row]) == 3
    for row in trainer.state.log_history:
        keys = [key for key in row if key.startswith("speed/")]
        assert bool(keys) == ("loss" in row)
        assert set(keys) <= set(METRICS)


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


def test_what_the_hook_saw_before_the_first_count_is_dropped():
    model = tiny_llama()
    counter = MicroBatchCounter()
    counter.watch(model, counting=lambda: True)
    for _ in range(2):  # a trainer that counts after the forward pass
        model(**pad(documents((5, 3))))
        counter.count(TokenCounts(slots=7, real=6, target=5, documents=2))
    counter.end_step(1, excluded=None)
    counter.unwatch()
    ((_, step),) = counter.take()
    assert (step.micro_batches, step.tokens.slots, step.tokens.real) == (2, 14, 12)


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


def test_v63_a_second_forward_pass_over_one_batch_is_no_new_tokens_and_claims_no_flops(tmp_path):
    records = []
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2)
    once = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **more: once(model, dict(inputs), **more) + once(model, inputs, **more)
    totals = train(trainer, ThroughputCallback(sinks=[records.append])).run_totals()
    assert as_tuple(totals.tokens)[:4] == expected(LENGTHS, 2)[:4]
    assert [(record.micro_batches, record.flops) for record in records] == [(2, None)] * 3


def test_v63_a_model_that_trains_in_evaluation_mode_is_counted(tmp_path):
    """Dropout and batch norm switched off by hand."""
    trainer = make_trainer(tmp_path)
    trainer.model.train = lambda mode=True: trainer.model
    trainer.model.eval()
    assert as_tuple(train(trainer).run_totals().tokens) == expected(LENGTHS, 2)


def test_forward_passes_outside_a_step_are_not_counted(tmp_path):
    trainer = make_trainer(tmp_path)
    attach(trainer, Prober())
    callback = train(trainer)
    assert as_tuple(callback.run_totals().tokens) == expected(LENGTHS, 2)


def test_steps_after_the_last_log_are_in_the_totals(tmp_path):
    trainer = make_trainer(tmp_path, logging_steps=4)
    records = []
    callback = train(trainer, ThroughputCallback(sinks=[records.append]))
    assert len(training_rows(trainer)) == 1
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert as_tuple(callback.run_totals().tokens) == expected(LENGTHS, 2)


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


@pytest.mark.parametrize("filtered", [True, False])
def test_v30_a_window_with_a_nan_step_has_no_mean_loss_and_says_so(tmp_path, caplog, filtered):
    # transformers' filter would count step 3 as less than the mean of the two before it, and a first step as 0.
    trainer = make_trainer(tmp_path, kind=NanAt, max_steps=3, logging_steps=3, logging_nan_inf_filter=filtered)
    with caplog.at_level(logging.WARNING):
        train(trainer)
    assert math.isnan(training_rows(trainer)[-1]["loss"])
    assert training_rows(trainer)[-1]["speed/nonfinite_steps"] == 1
    assert "1 of the last 3 steps had a NaN or infinite loss or gradient, the first was step 3" in caplog.text


def test_v81_an_empty_report_to_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(make_trainer(tmp_path, max_steps=2))
    assert caplog.text.count("console only; set report_to") == 1


class LogsItsOwnLoss(Trainer):
    """As people do who look at a loss from inside: often on rank 0 alone, which must not wait for the others."""

    def compute_loss(self, *arguments, **keywords):
        loss = super().compute_loss(*arguments, **keywords)
        self.log({"loss": float(loss.detach())})
        return loss


def test_v80_a_loss_that_is_logged_inside_a_step_is_no_window(tmp_path):
    trainer = make_trainer(tmp_path, kind=LogsItsOwnLoss, max_steps=4, logging_steps=2, gradient_accumulation_steps=2)
    train(trainer)
    rows = [row for row in training_rows(trainer) if "speed/total_slots" in row]
    # A step beside other work may be taken for warm-up.
    steps = [(row["step"], row["speed/steady_steps"] + row["speed/excluded_steps"]) for row in rows]
    assert steps == [(2, 2), (4, 2)]


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
    torch._dynamo.utils.counters.clear()
    callback = train(trainer)
    assert as_tuple(callback.run_totals().tokens) == expected((6,) * 8, 2)
    assert torch._dynamo.utils.counters["frames"]["total"] == 1  # as without the callback
    torch._dynamo.reset()


@pytest.mark.parametrize(("compiles_at", "said"), [(range(24), 1), (range(12), 0), ([16, 23], 0)])
def test_v58_shapes_that_compile_behind_the_warm_up_are_said_once(tmp_path, caplog, monkeypatch, compiles_at, said):
    class Compiles(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            torch._dynamo.utils.counters["stats"]["unique_graphs"] += state.global_step in compiles_at

    train(make_trainer(tmp_path, data=documents((3,) * 24), per_device_train_batch_size=1, callbacks=[Compiles()]))
    assert sum("Still compiling" in record.message for record in caplog.records) == said


def test_v62_nothing_of_ours_reads_the_device_between_logging_steps(tmp_path, monkeypatch):
    reads = []

    def watched(name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *arguments, **keywords):
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "training_step":  # we listen to what it returns
                if "/hf_speedkit/" in frame.f_code.co_filename:
                    reads.append(name)
                    break
                frame = frame.f_back
            return original(tensor, *arguments, **keywords)

        return read

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    gathers, gather = [], job_ledger.gather_over_ranks
    monkeypatch.setattr(job_ledger, "gather_over_ranks", lambda *given: gathers.append(1) or gather(*given))
    trainer = make_trainer(tmp_path, data=documents((5,) * 40), logging_steps=10)
    train(trainer)
    assert trainer.state.global_step == 20
    assert reads == ["tolist"] * 2  # one a logging step; nothing is left for the end of training
    assert len(gathers) == 2


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


def test_a_sliding_window_has_an_mfu_in_a_plain_trainer(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = MistralForCausalLM(MistralConfig(**sizes, vocab_size=32, num_key_value_heads=2, sliding_window=4))
    records = []
    train(make_trainer(tmp_path, model=model), ThroughputCallback(peak_tflops=1.0, sinks=[records.append]))
    formula = model_flops(model.config.to_dict())
    assert [record.flops for record in records] == [formula.training(LENGTHS[at : at + 2]) for at in range(0, 12, 2)]


@pytest.mark.parametrize("scores_targets", [True, False])
def test_v71_trls_fused_head_costs_what_it_scores(tmp_path, monkeypatch, scores_targets):
    """On a GPU the target positions only, and their product once more in backward; elsewhere all positions."""
    monkeypatch.setattr(micro_batches, "_HEAD_ON_TARGETS", ("cpu",) if scores_targets else ("cuda",))
    records = []
    trainer = make_trainer(tmp_path)
    add_fused_lm_head(trainer.model)
    trainer.compute_loss = lambda model, inputs, **_: model(**inputs, fused_lm_head=True).loss
    train(trainer, ThroughputCallback(peak_tflops=1.0, sinks=[records.append]))
    formula = model_flops(trainer.model.config.to_dict(), head_on="target" if scores_targets else "real")
    first, targets = LENGTHS[:2], records[0].tokens.target
    assert records[0].flops == formula.training(first, target=targets)
    assert records[0].recomputed_flops == (formula.head_per_token * targets if scores_targets else 0)


class Regression(torch.nn.Module):
    """A model whose batches have no tokens."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": ((self.line(x) - labels) ** 2).mean()}


def test_batches_without_tokens_have_no_rate_of_zero_and_the_console_says_what_to_do(tmp_path, caplog):
    data = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(8)]
    trainer = Trainer(
        Regression(),
        TrainingArguments(tmp_path, max_steps=4, logging_steps=2, use_cpu=True, save_strategy="no", report_to="none"),
        train_dataset=data,
    )
    train(trainer)
    row = training_rows(trainer)[-1]
    assert row["speed/step_time_s"] > 0
    assert not [key for key in row if "slots" in key or "tokens" in key]
    assert caplog.text.count("batches have neither input_ids nor inputs_embeds; tell what one holds with") == 1
