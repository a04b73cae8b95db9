"""Training on a stream: nothing lost, resumed exactly, read again where it is short, refused where it cannot work."""

import multiprocessing

import pytest
from datasets import IterableDataset
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from test_gradients import GradientRecorder, one_at_a_time, relative_error
from test_sft import LENGTHS, Recorder, trainer_for
from transformers import TrainerCallback

from hf_speedkit import SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, DatasetError, PackingError
from hf_speedkit.trainer.data import preparation
from hf_speedkit.trainer.data.resume import ROWS_KEY, STREAMED


def stream(lengths=LENGTHS, num_shards=1, **options):
    return tokenized(lengths, **options).to_iterable_dataset(num_shards=num_shards)


def tokens_of(rows):
    return sorted(token for row in rows for token in row if token != 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_every_token_of_a_pass_is_trained_on_once(tmp_path, workers):
    recorder = Recorder()
    trainer = trainer_for(tmp_path, dataset=stream(), max_steps=6, callbacks=[recorder], dataloader_num_workers=workers)
    trainer.train()
    assert not multiprocessing.active_children(), "a worker that is left to the garbage collector takes 5 s to leave"
    assert tokens_of(recorder.rows) == tokens_of(tokenized(LENGTHS)["input_ids"][:])
    assert {len(row) for row in recorder.rows} == {32}
    report = trainer.summary().documents
    assert (report.documents, report.real_tokens) == (len(LENGTHS), sum(LENGTHS))
    assert trainer.summary().isolation.passed
    assert trainer.throughput.run_totals().session.real == sum(LENGTHS)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_short_stream_is_read_again_until_max_steps(tmp_path, accumulation):
    recorder = Recorder()
    trainer = trainer_for(
        tmp_path, dataset=stream(), max_steps=18, callbacks=[recorder], gradient_accumulation_steps=accumulation
    )
    trainer.train()
    assert trainer.state.global_step == 18
    found = [token for row in recorder.rows for token in row if token != 0]
    one_pass = [token for document in tokenized(LENGTHS)["input_ids"][:] for token in document]
    passes = len(found) // len(one_pass)
    assert passes >= 2
    assert sorted(found[: passes * len(one_pass)]) == sorted(one_pass * passes)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert min(logged) > 0, "a step without a single target was taken"


@pytest.mark.parametrize(
    ("stop", "workers"), [(2, 0), (9, 0), (9, 1)], ids=["in the first pass", "in the second pass", "with a worker"]
)
def test_a_resumed_streaming_run_sees_the_same_rows_in_the_same_order(tmp_path, stop, workers):
    settings = {"max_steps": 14, "save_strategy": "steps", "save_steps": stop, "dataloader_num_workers": workers}
    whole = Recorder()
    reference = trainer_for(tmp_path / "whole", dataset=stream(num_shards=3), callbacks=[whole], **settings)
    reference.train()

    class StopAt(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == stop

    first, rest = Recorder(), Recorder()
    trainer_for(tmp_path / "half", dataset=stream(num_shards=3), callbacks=[first, StopAt()], **settings).train()
    resumed = trainer_for(tmp_path / "half", dataset=stream(num_shards=3), callbacks=[rest], **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.stateful_callbacks[ROWS_KEY] == STREAMED
    assert first.rows + rest.rows == whole.rows
    last = [[e for e in t.state.log_history if "loss" in e][-1] for t in (reference, resumed)]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], abs=1e-6)
    for key in ("num_tokens", "speed/total_real_tokens", "speed/total_documents"):
        assert last[0][key] == last[1][key]


def test_v25_the_gradient_of_a_streamed_step_is_that_of_the_documents_alone(tmp_path):
    lengths = (3, 11, 5, 8)
    expected = one_at_a_time(tiny_hybrid(), tokenized(lengths))
    recorder = GradientRecorder()
    trainer = trainer_for(
        tmp_path, dataset=stream(lengths), max_steps=1, tokens_per_batch=12, max_grad_norm=0.0,
        gradient_accumulation_steps=4, callbacks=[recorder],
    )  # fmt: skip
    trainer.train()
    assert relative_error(recorder.gradient, expected) <= 1e-5


def test_the_gradient_after_a_resume_is_that_of_the_uninterrupted_run(tmp_path):
    gradients = []
    for resume in (False, True):
        recorder = GradientRecorder()
        trainer = trainer_for(
            tmp_path, dataset=stream(), max_steps=5, save_strategy="steps", save_steps=3, callbacks=[recorder],
            allow_existing_output=True,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if resume else None)
        gradients.append(recorder.gradient)
    assert relative_error(gradients[1], gradients[0]) <= 1e-5


def test_conversations_are_streamed_tokenized_and_packed(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' <eos> ' }}{% endfor %}"
    rows = [{"messages": [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": "w3 w4"}]}
            for i in range(3, 20)]  # fmt: skip
    trainer = SpeedSFTTrainer(
        model=tiny_llama(),
        args=trainer_for(tmp_path, max_steps=2).args,
        train_dataset=IterableDataset.from_generator(lambda: iter(rows)),
        processing_class=tokenizer,
    )
    trainer.train()
    assert trainer.summary().documents.real_tokens == 17 * 5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, ConfigurationError, "max_steps"),
        ({"max_steps": 1, "dataloader_num_workers": 2}, ConfigurationError, "dataloader_num_workers=1"),
        ({"max_steps": 1, "eval_dataset": stream()}, DatasetError, "stream.take"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_before_anything_is_read(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        trainer_for(tmp_path, dataset=stream(), **changes)


def test_a_checkpoint_without_a_stream_state_is_not_resumed(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    streaming = {"dataset": stream(), "max_steps": 3, "allow_existing_output": True}
    with pytest.raises(ConfigurationError, match="does not say where the stream"):
        trainer_for(tmp_path, **streaming).train(resume_from_checkpoint=True)
    trainer_for(tmp_path, ignore_data_skip=True, **streaming).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"dataset": stream(seed=1)}, PackingError, "other documents"),
        ({"dataset": stream(targets_from=1)}, PackingError, "other documents"),
        ({"dataset": stream(), "tokens_per_batch": 64}, ConfigurationError, "tokens_per_batch: saved 32, now 64"),
    ],
    ids=["other data", "other targets", "other rows"],
)
def test_a_stream_that_is_not_the_saved_one_is_refused_with_a_way_on(tmp_path, changes, error, said):
    trainer_for(tmp_path, dataset=stream(), max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(error, match=said) as refused:
        trainer_for(tmp_path, max_steps=2, **changes).train(resume_from_checkpoint=True)
    assert "ignore_data_skip=True" in str(refused.value)


def test_v36_dispatched_batches_are_turned_off(tmp_path, caplog):
    trainer = trainer_for(tmp_path, dataset=stream(), max_steps=1, accelerator_config={"dispatch_batches": True})
    assert trainer.accelerator.dispatch_batches is False
    trainer.train()
    with pytest.raises(ConfigurationError, match="leave split_batches unset"):
        trainer_for(tmp_path, dataset=stream(), max_steps=1, accelerator_config={"split_batches": True})


def test_v34_a_stream_that_another_rank_shuffles_otherwise_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "gather_agreed", lambda find: [find(), "another rank's"])
    with pytest.raises(DatasetError, match="1 of 2 ranks would read the stream in another order"):
        trainer_for(tmp_path, dataset=stream().shuffle(buffer_size=4), max_steps=2)


def test_an_empty_stream_stops_with_a_message(tmp_path):
    source = IterableDataset.from_generator(lambda: iter([{"input_ids": [3], "labels": [3]}]))
    with pytest.raises(DatasetError, match="no document"):
        trainer_for(tmp_path, dataset=source, max_steps=1).train()


def test_training_again_begins_the_stream_anew(tmp_path):
    recorder = Recorder()
    trainer = trainer_for(tmp_path, dataset=stream(), max_steps=3, callbacks=[recorder])
    trainer.train()
    trainer.train()
    assert recorder.rows[:3] == recorder.rows[3:]


def test_a_padded_stream_that_ends_within_what_a_resume_skips_is_said(tmp_path, caplog):
    trainer = trainer_for(tmp_path, dataset=stream(), max_steps=4, packing=False, tokens_per_batch=None)
    trainer.startup.resumed_at = trainer.state.global_step = 3
    for said in (0, 1):  # transformers begins the next epoch where the first gave no batch
        trainer.startup.on_epoch_begin(trainer.args, trainer.state, trainer.control)
        assert caplog.text.count("is read again") == said
