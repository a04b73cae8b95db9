"""What a training leaves on its model: nothing, however it ends, so that the next one is as the first would be."""

from types import SimpleNamespace

import pytest
import torch
from support import tiny_hybrid
from test_offload import FakeTimer
from test_recompute import FakeMemory
from test_sft import trainer_for
from transformers import TrainerCallback

from hf_speedkit.trainer.memory import offload
from hf_speedkit.trainer.memory.offload_choice import OffloadChoice

# accelerate's mark; transformers' hook on the embedding, one more each time; speed metrics', until the next training
OTHERS = ("_is_accelerate_prepared",), ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Storages of a tiny model count as large."""
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 64)


class Fails(TrainerCallback):
    """Fails in a step: in the forward or backward pass of the third layer, or before the optimizer steps."""

    def __init__(self, model):
        self.at = self.where = self.step = None
        model.model.layers[2].mlp.register_forward_hook(self.ran)

    def on_step_begin(self, args, state, control, **_):
        self.step = state.global_step

    def ran(self, module, given, output):
        if self.at is None or self.step != self.at or not module.training:
            return
        if self.where == "forward":
            self.stop()
        elif self.where == "backward" and output.requires_grad:
            output.register_hook(self.stop)

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.step == self.at:
            self.stop()

    def stop(self, *_):
        raise RuntimeError("stops here")


def state_of(model):
    """Of every module its attributes, and how many hooks, parameters and parts it has; forwards that lie over it."""
    plain = (bool, int, float, str)
    return {
        (name, key): len(value) if isinstance(value, dict) else value if isinstance(value, plain) else None
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in OTHERS[0] and not (key in OTHERS[1] and name in ("", "model.embed_tokens"))
    }


def left_behind(model, before):
    now = state_of(model)
    return {key for key in now.keys() | before.keys() if now.get(key, "none") != before.get(key, "none")}


def numbers(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained_alone(path, start, **changes):
    """Weights of a training of a model of its own, which computes everything twice."""
    model = tiny_hybrid()
    model.load_state_dict(start)
    settings = {"activation_checkpointing_keep": "nothing", "isolation_check": False, **changes}
    trainer_for(path, model=model, activation_checkpointing=True, **settings).train()
    return numbers(model)


@pytest.mark.parametrize(
    ("auto", "failures"),
    [
        (False, [(0, "forward"), (0, "backward"), (2, "backward"), (2, "optimizer")]),
        (True, [(1, "forward"), (1, "backward"), (4, "optimizer")]),  # in what is measured, and in what is timed
    ],
    ids=["a number", "auto"],
)
def test_a_training_that_fails_leaves_the_layers_as_they_were_and_the_next_one_goes_on_with_them(
    tmp_path, auto, failures
):
    model = tiny_hybrid()
    model.activation_checkpointing_enable()
    start, fails = {name: value.clone() for name, value in model.state_dict().items()}, Fails(model)
    values = {"max_steps": 6, "num_train_epochs": 20, "isolation_check": False}
    chosen = {"activation_offloading_layers": "auto" if auto else 1}
    chosen |= {} if auto else {"activation_checkpointing_layers": 3}
    trainer = trainer_for(
        tmp_path / "fails", model=model, callbacks=[fails], activation_checkpointing=True,
        activation_checkpointing_keep="products", **chosen, **values,
    )  # fmt: skip
    if auto:
        memory = FakeMemory(trainer, kept=10**9, peak=10, fits=4)
        trainer.recompute._memory_of = lambda device: memory
        trainer.offloading._timer_of = lambda device: FakeTimer(trainer.recompute, 0.9)
    trainer.recompute.kept_bytes["another model's layer"] = 10**12
    before = state_of(model)
    for fails.at, fails.where in failures:
        with pytest.raises(RuntimeError, match="stops here"):
            trainer.train()
        assert left_behind(model, before) == set(), (fails.at, fails.where)
        assert trainer.offloading._arena.total_bytes == 0
    fails.at = trainer.optimizer = trainer.lr_scheduler = None  # they go on in the next training
    model.load_state_dict(start)
    trainer.train()
    assert trainer.recompute.total == 4
    assert 10**12 not in trainer.recompute.kept_bytes.values()
    assert left_behind(model, before) == set()
    assert torch.equal(numbers(model), trained_alone(tmp_path / "alone", start, **values))


SETTINGS = [
    {
        "activation_checkpointing_keep": "products", "activation_checkpointing_layers": 3,
        "activation_offloading_layers": 1,
    },
    {"activation_checkpointing_keep": "nothing", "activation_offloading_layers": 2},
]  # fmt: skip


def test_trainings_of_one_model_one_after_another_with_other_settings_come_out_as_without_any(tmp_path):
    """Products kept beside activations in host memory, by one trainer twice; then more activations, and no products."""
    model = tiny_hybrid()
    model.activation_checkpointing_enable()
    alone = tiny_hybrid()
    alone.activation_checkpointing_enable()
    values = {"max_steps": 3, "activation_checkpointing": True, "isolation_check": False}
    lines = []
    for place, changes in enumerate(SETTINGS):
        ours = trainer_for(tmp_path / f"{place}", model=model, **changes, **values)
        plain = trainer_for(tmp_path / f"plain {place}", model=alone, activation_checkpointing_keep="nothing", **values)
        before = state_of(model)
        for _ in range(2 - place):
            ours.train()
            plain.train()
            assert left_behind(model, before) == set()
            assert torch.equal(numbers(model), numbers(alone))
        lines.append(ours.recompute.line().partition(": ")[2])
    assert lines == [
        "2 of 4 layers, activations of 1 in host memory, with the products of 2 kept",
        "2 of 4 layers, activations of 2 in host memory",
    ]


def test_host_memory_is_given_back_also_where_the_device_is_lost(tmp_path):
    def lost():
        raise RuntimeError("unspecified launch failure")

    model, arena = tiny_hybrid(), offload.HostArena(pinned=False, chunk_bytes=64)
    tried = offload.HostArena(pinned=False, chunk_bytes=64)
    for one in (arena, tried):
        one.reserve(128)
    moved = offload.ActivationOffload(list(model.model.layers), [0], arena, torch.device("cpu"), copy_layers=1)
    moved._stream = SimpleNamespace(synchronize=lost)
    choice = OffloadChoice(1, None)
    choice._offload, choice._arena = moved, tried
    with pytest.raises(RuntimeError, match="launch failure"):
        choice.undo()
    assert (arena.total_bytes, tried.total_bytes) == (0, 0)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
