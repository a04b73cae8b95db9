"""Where `attach` puts callbacks."""

import pytest
from datasets import Dataset
from plain_trainer import make_trainer
from transformers import Trainer, TrainerCallback

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.packing.collator import PackedCollator
from hf_speedkit.trainer.attach import LoopMarker, attach
from hf_speedkit.trainer.kernel_callback import KernelAssertionCallback
from hf_speedkit.trainer.throughput_callback import ThroughputCallback


class First(TrainerCallback):
    pass


class Second(TrainerCallback):
    pass


def names(trainer):
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


@pytest.mark.parametrize("at_once", [True, False])
def test_callbacks_stand_before_the_trackers_in_the_order_given(tmp_path, at_once):
    trainer = make_trainer(tmp_path, report_to="tensorboard")
    if at_once:
        attach(trainer, First(), Second())
    else:
        attach(trainer, First())
        attach(trainer, Second())
    assert names(trainer) == [
        "DefaultFlowCallback", "First", "Second", "TensorBoardCallback", "PrinterCallback",
    ]  # fmt: skip


def test_v80_a_tracker_of_ones_own_gets_the_metrics_without_other_trackers_too(tmp_path):
    class OwnTracker(TrainerCallback):
        seen = ()

        def on_log(self, args, state, control, logs=None, **_):
            self.seen = self.seen or tuple(logs)

    tracker = OwnTracker()
    trainer = make_trainer(tmp_path, callbacks=[tracker], max_steps=1)
    attach(trainer, First())
    attach(trainer, ThroughputCallback())
    assert names(trainer)[:4] == ["DefaultFlowCallback", "First", "ThroughputCallback", "OwnTracker"]
    trainer.train()
    assert "speed/steady_steps" in tracker.seen


@pytest.mark.parametrize("attached", [True, False])
def test_v12_lengths_of_rows_that_are_packed_survive_the_removal_of_unused_columns(tmp_path, attached):
    rows = Dataset.from_list(
        [
            {"input_ids": [3] * 7, "seq_lengths": [4, 3], "more": "a"},
            {"input_ids": [4] * 6, "seq_lengths": [6], "more": "b"},
        ]
    )
    trainer = make_trainer(tmp_path, data=rows, collator=PackedCollator(0, 16), remove_unused_columns=True)
    if attached:
        attach(trainer, First())
    (batch,) = trainer.get_train_dataloader()
    restarts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert restarts == ([0, 4, 7, 13] if attached else [0, 7, 13])  # the Trainer's own way, of which nobody is told


def test_v12_a_trainer_that_keeps_its_columns_elsewhere_is_refused_with_the_setting(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, collator=PackedCollator(0, 16), remove_unused_columns=True)
    monkeypatch.delattr(Trainer, "_set_signature_columns_if_needed")
    with pytest.raises(ConfigurationError, match="remove_unused_columns=False"):
        attach(trainer, First())


def test_a_callback_the_trainer_already_has_is_moved(tmp_path):
    callback = ThroughputCallback()
    trainer = make_trainer(tmp_path, callbacks=[callback, First()], report_to="tensorboard")
    attach(trainer, callback)
    attach(trainer, callback)
    assert names(trainer) == [
        "DefaultFlowCallback", "ThroughputCallback", "TensorBoardCallback", "First", "PrinterCallback", "LoopMarker",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [ThroughputCallback, KernelAssertionCallback])
def test_a_second_one_of_a_kind_that_would_do_everything_twice_is_refused(tmp_path, kind):
    """Two of them wrote every row of a step log twice, and the second overwrote the first one's metrics."""
    first = kind()
    trainer = make_trainer(tmp_path, callbacks=[first])
    attach(trainer, first, first)
    before = names(trainer)
    with pytest.raises(ConfigurationError, match=rf"two {kind.__name__}s: .* twice"):
        attach(trainer, First(), type("Mine", (kind,), {})())
    assert names(trainer) == before
    trainer.remove_callback(kind)
    attach(trainer, kind())
    with pytest.raises(ConfigurationError, match="would have two"):
        attach(make_trainer(tmp_path), kind(), kind())


@pytest.mark.parametrize("again", [True, False], ids=["the_same", "another"])
def test_one_that_is_added_behind_attach_is_refused_as_training_begins(tmp_path, again):
    """The same object ended every step twice: half the step time, and a step without tokens behind each."""
    trainer, callback = make_trainer(tmp_path), ThroughputCallback()
    attach(trainer, callback)
    trainer.add_callback(callback if again else ThroughputCallback())
    with pytest.raises(ConfigurationError, match="two ThroughputCallbacks"):
        trainer.train()


def test_a_trainer_that_brings_its_own_takes_no_second_one_however_it_comes(tmp_path):
    from checkpoint_run import build

    with pytest.raises(ConfigurationError, match=r"(?s)two ThroughputCallbacks.*as trainer\.throughput"):
        build(tmp_path, callbacks=[ThroughputCallback()])
    trainer = build(tmp_path)
    trainer.add_callback(ThroughputCallback())
    with pytest.raises(ConfigurationError, match="two ThroughputCallbacks"):
        trainer.train()
    attach(build(tmp_path / "without", throughput=False), ThroughputCallback())


def test_an_observer_gets_a_marker_behind_everything(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[First()])
    callback = ThroughputCallback()
    attach(trainer, callback)
    assert callback.attached
    last = trainer.callback_handler.callbacks[-1]
    assert isinstance(last, LoopMarker)
    assert last.observer is callback


@pytest.mark.parametrize(
    ("wrong", "mend"),
    [
        (ThroughputCallback, "attach(trainer, ThroughputCallback(...))"),
        ([ThroughputCallback()], "attach(trainer, *callbacks)"),
        ("throughput", "attach(trainer, ThroughputCallback())"),
    ],
    ids=["class", "list", "text"],
)
def test_something_else_than_a_callback_is_refused_before_anything_is_changed(tmp_path, wrong, mend):
    trainer = make_trainer(tmp_path)
    before = names(trainer)
    with pytest.raises(ConfigurationError, match="callback instances") as refused:
        attach(trainer, First(), wrong)
    assert refused.value.mend == mend
    assert names(trainer) == before
    with pytest.raises(ConfigurationError, match="a transformers Trainer first, not a NoneType"):
        attach(None, ThroughputCallback())
    with pytest.raises(ConfigurationError, match="no callback, so nothing would be looked at"):
        attach(trainer)


def test_callbacks_that_come_behind_train_say_that_nothing_was_looked_at(tmp_path, caplog):
    trainer = make_trainer(tmp_path)
    attach(trainer, First())
    assert "behind train()" not in caplog.text
    trainer.state.global_step = 7
    attach(trainer, ThroughputCallback())
    assert "attach() comes behind train(): nothing of the 7 steps so far was looked at" in caplog.text


def test_a_tracing_and_a_metrics_callback_know_of_each_other_however_they_came(tmp_path):
    import json

    from plain_trainer import make_trainer

    from hf_speedkit import ThroughputCallback, TraceCallback
    from hf_speedkit.measure.trace import summarize_trace
    from hf_speedkit.trainer.sinks import JsonlSink

    trainer = make_trainer(tmp_path / "run")
    trace = TraceCallback(4)
    attach(trainer, trace)
    attach(trainer, ThroughputCallback(sinks=(JsonlSink(tmp_path / "steps.jsonl"),)))
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step" and line["excluded"] == "traced"] == [3, 4, 5]
    facts = summarize_trace(trace.files[0]).facts
    # padded rows: slots are known on the host, real tokens only on the device, and None is not 0
    assert facts.slots > 0
    assert facts.real_tokens is None
