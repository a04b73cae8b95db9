"""Which layers are checkpointed, and that the choice changes no number."""

from unittest.mock import patch

import pytest
import torch
from support import tiny_hybrid, tokenized
from test_sft import trainer_for
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.memory import GIB, Kept, StepPeaks, layers_that_fit, room_for_tensors
from hf_speedkit.trainer.memory.peak_watch import PeakWatch
from hf_speedkit.trainer.memory.recompute import checkpointed_layers


def forwards_in_a_step(path, **changes):
    """How often each layer's MLP ran in one training step, and the final weights."""
    model = tiny_hybrid()
    trainer = trainer_for(path, model=model, max_steps=1, isolation_check=False, **changes)
    counts = [0] * 4
    for number, layer in enumerate(model.model.layers):

        def count(module, *_, number=number):
            counts[number] += module.training  # what start-up proves of the head is in evaluation mode

        layer.mlp.register_forward_pre_hook(count)  # recomputation stops inside the last module
    trainer.train()
    assert all(layer.gradient_checkpointing == bool(trainer.recompute.total) for layer in model.model.layers)
    return counts, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", [2, 2, 2, 2]), ("auto", [2, 2, 2, 2]), ("2", [2, 2, 1, 1]), (3, [2, 2, 2, 1]), (0, [1, 1, 1, 1])],
    ids=str,
)
def test_the_last_layers_are_left_alone_and_the_weights_come_out_the_same(tmp_path, layers, expected):
    plain = forwards_in_a_step(tmp_path / "plain")
    assert plain[0] == [1, 1, 1, 1]
    counts, weights = forwards_in_a_step(
        tmp_path / "chosen", activation_checkpointing=True, activation_checkpointing_layers=layers
    )
    assert counts == expected
    assert torch.equal(weights, plain[1])


@pytest.mark.parametrize("layers", ["most", "-1", "1.5"])
def test_a_choice_that_is_none_is_refused(tmp_path, layers):
    with pytest.raises(ConfigurationError, match="auto, all, or a number"):
        trainer_for(tmp_path, activation_checkpointing_layers=layers)


def test_more_layers_than_there_are_is_refused_before_step_1(tmp_path):
    trainer = trainer_for(tmp_path, activation_checkpointing=True, activation_checkpointing_layers=5)
    with pytest.raises(ConfigurationError, match="4 layers are checkpointed"):
        trainer.train()


def test_layers_under_fsdps_wrapper_can_be_switched_too():
    model = tiny_hybrid().train()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    found = checkpointed_layers(model)
    assert len(found) == 4
    assert len({layer.kind for layer in found}) == 2
    calls = []
    model.model.layers[3].mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    ids = torch.arange(2, 10)[None]
    for on, times in ((False, 1), (True, 2)):
        found[3].switch(on)
        calls.clear()
        model(input_ids=ids, labels=ids).loss.backward()
        assert calls.count("mlp") == times


def test_without_checkpointing_there_is_nothing_to_choose(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.train()
    assert (trainer.recompute.total, trainer.recompute.checkpointed) == (0, 0)


def test_padded_rows_are_never_measured(tmp_path):
    def memory(device):
        raise AssertionError("looked at")

    trainer = trainer_for(tmp_path, packing=False, activation_checkpointing=True, max_steps=1)
    trainer.recompute._memory_of = memory
    trainer.train()
    assert trainer.recompute.checkpointed == 4


@pytest.mark.parametrize(
    ("kept", "forward", "backward", "already", "expected"),
    [
        ([3, 3, 3], 1, [1, 1, 1], (), 3),
        ([3, 3, 3], 2, [1, 1, 1], (), 2),
        ([5, 1], 6, [1, 1], (), 1),  # the last layer first
        ([], 10, [], (), 0),
        ([1, 1], 11, [1, 1], (), 0),
        ([0, 0], 10, [1, 1], (), 2),
        # Memory is highest in the first layers' backward passes: what the last layers keep is gone by then.
        ([3, 3, 3, 3], 1, [10, 9, 3, 3], (), 3),
        ([3, 3, 3, 3], 1, [10, 9, 8, 3], (), 2),
        # What a layer keeps instead of making it again is in its own backward pass once, not twice.
        ([3, 3], 1, [1, 10], (), 1),
        # What layers kept already in the step that was watched is not counted again.
        ([3, 3, 3], 8, [2, 5, 8], (1, 2), 2),
        ([3, 3, 3], 8, [2, 5, 8], (), 0),
        ([3, 3, 3], 4, [5, 7, 7], (1, 2), 3),
    ],
    ids=str,
)
def test_as_many_of_the_last_layers_as_fit_keep_their_activations(kept, forward, backward, already, expected):
    assert layers_that_fit(kept, StepPeaks(forward, backward), already=already, room=10) == Kept(expected)


def test_room_leaves_a_margin_and_does_not_count_on_an_unused_reserve():
    assert room_for_tensors(100 * GIB, others=2 * GIB, unused=20 * GIB) == 74 * GIB


class FakeMemory:
    """A GPU of 100 bytes: tensors take what they are said to, and memory is searched for while more than fits is kept.

    Args:
        trainer: whose layers take memory. kept: bytes of one layer. peak: bytes of tensors in every part of a step.
        fits: layers that really fit.
    """

    def __init__(self, trainer, *, kept, peak, fits):
        self.trainer, self.kept, self.peak, self.fits = trainer, kept, peak, fits
        self.now = self.found = self.emptied = 0

    def allocated(self):
        self.now += self.kept  # called before a layer's forward pass and after it
        return self.now

    def reset_peak(self):
        self.found = 0

    def peak_allocated(self):
        return self.peak

    def peak_reserved(self):
        return self.peak + 5

    def total(self):
        return 100

    def others(self):
        return 6

    def searches(self):
        choice = self.trainer.recompute
        self.found += choice.total - choice.checkpointed > self.fits
        return self.found

    def give_back_cache(self):
        self.emptied += 1


@pytest.mark.parametrize(
    ("peak", "kept", "fits", "expected"),
    [
        (40, 10, 4, 0),  # room for 100 - 4 - 6 - 5 = 85 bytes; two of four layers kept theirs in the step of 40
        (85, 10, 4, 2),
        (96, 10, 4, 4),
        (40, 10, 1, 3),  # the choice was wrong: four left alone, then two, then one
        (40, 10, 0, 4),
    ],
)
def test_auto_measures_chooses_and_corrects_itself(tmp_path, peak, kept, fits, expected):
    trainer = trainer_for(
        tmp_path, activation_checkpointing=True, activation_checkpointing_keep="nothing", max_steps=12,
        num_train_epochs=20,
    )  # fmt: skip
    memory = FakeMemory(trainer, kept=kept, peak=peak, fits=fits)
    trainer.recompute._memory_of = lambda device: memory
    trainer.train()
    assert set(trainer.recompute.kept_bytes.values()) == {kept}
    assert trainer.recompute.checkpointed == expected
    assert trainer.recompute.line() == f"activation checkpointing: {expected} of 4 layers"
    assert memory.emptied >= 1
    assert trainer.recompute.line() in trainer.summary().changed_layers


def test_peaks_are_those_of_a_step_with_optimizer_state_each_in_its_part_and_without_evaluations(tmp_path):
    parts = []

    class Grows(FakeMemory):
        def peak_allocated(self):
            return 40 if self.trainer.state.global_step < 1 else 85

        def allocated(self):
            self.now += self.kept if torch.is_grad_enabled() else 1
            return self.now

    trainer = trainer_for(
        tmp_path, activation_checkpointing=True, activation_checkpointing_keep="nothing", max_steps=3,
        num_train_epochs=20, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=1, eval_dataset=tokenized([9, 4, 17]),
    )  # fmt: skip
    memory = Grows(trainer, kept=10, peak=0, fits=4)
    trainer.recompute._memory_of = lambda device: memory
    enter = PeakWatch._enter

    def noted(self, part):
        parts.append(part)
        enter(self, part)

    with patch.object(PeakWatch, "_enter", noted):
        trainer.train()
    assert set(trainer.recompute.kept_bytes.values()) == {10}
    assert trainer.recompute.checkpointed == 2
    # Two micro-batches of step 2; the evaluation after step 1 has a forward pass only, and so has the end.
    assert parts == [-1, -1, 3, 2, 1, 0, -1, 3, 2, 1, 0, -1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_auto_leaves_every_layer_of_a_small_model_alone_on_a_gpu(tmp_path):
    trainer = trainer_for(
        tmp_path, use_cpu=False, kernel_assertion="warn", activation_checkpointing=True, max_steps=4, num_train_epochs=4
    )
    trainer.train()
    assert (trainer.recompute.total, trainer.recompute.checkpointed) == (4, 0)
    assert all(size > 0 for size in trainer.recompute.kept_bytes.values())
