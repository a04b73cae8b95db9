"""Losses and gradients that are NaN or infinite: counted, named, and the end of training in strict mode."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from plain_trainer import documents, make_trainer, train, training_rows
from transformers import Trainer, TrainerCallback

from hf_speedkit.core.errors import ConfigurationError, NonFiniteError
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.metrics.returned_losses import ReturnedLosses
from hf_speedkit.trainer.throughput_callback import ThroughputCallback


class NanAt(Trainer):
    """The loss of the third step is not a number."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * float("nan") if self.state.global_step == 2 else loss


class Rows(TrainerCallback):
    """A tracker behind the metrics."""

    def __init__(self):
        self.shown = []

    def on_log(self, args, state, control, logs=None, **keywords):
        self.shown.append(dict(logs))


@pytest.mark.parametrize("attached", [True, False])
def test_v30_strict_mode_ends_training_at_the_log_after_a_nan_step(tmp_path, attached):
    tracker = Rows()
    trainer = make_trainer(tmp_path, kind=NanAt, max_steps=6, logging_steps=2, save_strategy="steps", save_steps=4)
    trainer.add_callback(tracker)
    callback = ThroughputCallback(nonfinite="strict")
    if attached:
        attach(trainer, callback)
    else:
        trainer.add_callback(callback)
    with pytest.raises(NonFiniteError, match="the first was step 3") as stopped:
        trainer.train()
    assert trainer.state.global_step == 4  # the logging step, not the step itself: no read in between
    assert 'nonfinite="warn"' in str(stopped.value)
    assert "go on from a checkpoint before step 3" in str(stopped.value)
    assert not (tmp_path / "checkpoint-4").exists()  # weights that are NaN push no good checkpoint out
    assert training_rows(trainer)[-1]["speed/nonfinite_steps"] == 2
    if attached:
        assert tracker.shown[-1]["speed/nonfinite_steps"] == 2  # the last row reached the trackers before the end


def test_v30_a_nan_step_is_found_before_a_checkpoint_that_comes_without_a_log(tmp_path):
    trainer = make_trainer(
        tmp_path, kind=NanAt, max_steps=6, logging_steps=6, save_strategy="steps", save_steps=2, save_total_limit=1
    )
    with pytest.raises(NonFiniteError, match=r"2 of the last 4 steps .*the first was step 3"):
        train(trainer, ThroughputCallback(nonfinite="strict"))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]  # the good one is still there


def test_v30_a_nan_step_after_the_last_log_ends_training_too(tmp_path, caplog):
    trainer = make_trainer(tmp_path, kind=NanAt, max_steps=3, logging_steps=2)
    with caplog.at_level(logging.WARNING), pytest.raises(NonFiniteError, match="the first was step 3"):
        train(trainer, ThroughputCallback(nonfinite="strict"))
    assert caplog.text.count("the first was step 3") == 1


class NanReturned(Trainer):
    """What the third step hands to the Trainer is not a number; the gradients are."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        return loss * math.nan if self.state.global_step == 2 else loss


@pytest.mark.parametrize("filtered", [True, False])
def test_v30_a_loss_that_is_nan_only_where_the_trainer_gets_it_is_counted_and_soon_forgotten(
    tmp_path, caplog, filtered
):
    trainer = make_trainer(tmp_path, kind=NanReturned, max_steps=6, logging_steps=2, logging_nan_inf_filter=filtered)
    with caplog.at_level(logging.WARNING):
        train(trainer)
    rows = training_rows(trainer)
    assert [row["speed/nonfinite_steps"] for row in rows] == [0, 1, 0]
    assert [math.isnan(row["loss"]) for row in rows] == [False, True, False]  # NaN - NaN would be NaN for good
    assert "1 of the last 2 steps had a NaN or infinite loss or gradient, the first was step 3" in caplog.text
    assert "training_step" not in vars(trainer)


@pytest.mark.parametrize("patched", [False, True], ids=["as it was made", "patched by its user"])
def test_what_hears_a_trainers_losses_leaves_it_as_it_was(patched):
    class Told:
        def training_step(self, loss):
            return loss

    trainer, heard = Told(), []
    own = lambda loss: loss + 1  # noqa: E731
    if patched:
        trainer.training_step = own
    first, second = ReturnedLosses(trainer), ReturnedLosses(trainer)
    first.hear(heard.append)
    second.hear(heard.append)
    assert trainer.training_step(1) == 1 + patched
    first.stop()  # its wrapper is inside the other one
    trainer.training_step(2)
    second.stop()
    trainer.training_step(3)
    assert heard == [1 + patched, 1 + patched, 2 + patched]
    first.hear(heard.append)
    first.stop()
    assert trainer.training_step(4) == 4 + patched
    alone = Told()
    losses = ReturnedLosses(alone)
    losses.hear(heard.append)
    losses.stop()
    assert vars(alone) == {}


def test_v30_warn_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path, kind=NanAt, max_steps=4)
        train(trainer, ThroughputCallback(nonfinite="warn"))
    assert trainer.state.global_step == 4
    assert "the first was step 3" in caplog.text


def test_v30_an_infinite_loss_with_finite_gradients_is_counted(tmp_path, caplog):
    class InfiniteAtThree(Trainer):
        """What a model of transformers returns where a target's logit is -inf; the gradient stays finite."""

        def training_step(self, model, inputs, num_items_in_batch=None):
            if self.state.global_step == 2:
                handle = model.register_forward_hook(
                    lambda module, arguments, outputs: outputs.__setitem__("loss", outputs["loss"] + math.inf),
                    prepend=True,
                )
                try:
                    return super().training_step(model, inputs, num_items_in_batch)
                finally:
                    handle.remove()
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = make_trainer(tmp_path, kind=InfiniteAtThree, max_steps=4, logging_steps=1)
    with caplog.at_level(logging.WARNING):
        train(trainer)
    rows = training_rows(trainer)
    assert [row["speed/nonfinite_steps"] for row in rows] == [0, 0, 1, 0]
    assert math.isnan(rows[2]["loss"])  # the Trainer's filter shows the mean of what was before, or 0
    assert math.isfinite(rows[2]["grad_norm"])


@pytest.mark.parametrize("lost", ["gradient", "loss"])
def test_v30_with_fp16_the_scaler_skips_such_steps_and_training_goes_on(tmp_path, caplog, lost):
    class OverflowsAtThree(Trainer):
        """Step 3 has a gradient that is too large for fp16; `loss`: its loss is not a number."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if self.state.global_step != 2:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if lost == "loss":
                callback.look_at(loss * math.nan)
            loss.register_hook(lambda gradient: gradient * math.inf)
            return loss

    trainer = make_trainer(tmp_path, kind=OverflowsAtThree, max_steps=3)
    callback = ThroughputCallback(nonfinite="strict")
    attach(trainer, callback)
    trainer.args.fp16 = True  # after the Trainer was made: fp16 itself needs a GPU
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert trainer.state.global_step == 3
    last = training_rows(trainer)[-1]
    assert last["speed/nonfinite_steps"] == 1
    assert math.isnan(last["loss"]) is (lost == "loss")  # the scaler's overflow is no news, and its loss is a number
    assert ("WARNING" in [record.levelname for record in caplog.records if "step 3" in record.message]) is (
        lost == "loss"
    )


def test_the_norm_that_a_trainer_gives_tells_for_all_gradients(tmp_path):
    class GivesItsNorm(Trainer):
        def _get_grad_norm(self, model, grad_norm=None):
            norm = super()._get_grad_norm(model, grad_norm=grad_norm)
            self.callback.look_at_norm(torch.tensor(math.inf) if self.state.global_step == 1 else norm)
            return norm

    trainer = make_trainer(tmp_path, kind=GivesItsNorm, max_steps=4, logging_steps=4)
    trainer.callback = ThroughputCallback()
    train(trainer, trainer.callback)
    assert training_rows(trainer)[-1]["speed/nonfinite_steps"] == 1


def test_v30_finite_training_is_left_alone(tmp_path):
    trainer = make_trainer(tmp_path, data=documents((5,) * 8))
    train(trainer, ThroughputCallback(nonfinite="strict"))
    assert [row["speed/nonfinite_steps"] for row in training_rows(trainer)] == [0] * 4


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="nonfinite is one of: strict, warn"):
        ThroughputCallback(nonfinite="maybe")


def test_a_sharded_norm_is_looked_at_without_a_collective():
    from hf_speedkit.trainer.metrics.observation import Observation

    norm = torch.tensor(1.0)
    observation = Observation()
    observation.look_at_gradient(SimpleNamespace())  # no tensor: nothing to see
    assert observation.gradient_mark is None
    observation.look_at_gradient(norm.as_subclass(_Sharded))
    assert bool(observation.gradient_mark)


class _Sharded(torch.Tensor):
    """Stands for a DTensor whose share on this rank is infinite."""

    def detach(self):
        return self

    def to_local(self):
        return torch.tensor(math.inf)
