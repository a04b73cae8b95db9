"""What lives behind step 1 is out of the garbage collector's sight while a run trains, and only then."""

import gc

import pytest
from test_sft import trainer_for
from transformers import TrainerCallback

from hf_speedkit.trainer.step.garbage import QuietGarbage


class Watches(TrainerCallback):
    def __init__(self, fails_at=None):
        self.frozen, self.fails_at = [], fails_at

    def on_step_begin(self, args, state, control, **_):
        self.frozen.append(gc.get_freeze_count() > 0)
        if state.global_step == self.fails_at:
            raise RuntimeError("stops here")


@pytest.fixture
def unfrozen():
    """As in a process of its own: conftest.py freezes what the tests import."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("fails_at", [None, 2])
def test_objects_are_frozen_from_step_2_until_training_ends_or_fails(tmp_path, fails_at):
    watch = Watches(fails_at)
    trainer = trainer_for(tmp_path, max_steps=3, callbacks=[watch])
    if fails_at is None:
        trainer.train()
    else:
        with pytest.raises(RuntimeError, match="stops here"):
            trainer.train()
    assert watch.frozen == [False, True, True]
    assert gc.get_freeze_count() == 0


def test_a_collector_that_someone_else_looks_after_is_left_alone(tmp_path):
    held = gc.get_freeze_count()
    assert held
    trainer_for(tmp_path, max_steps=2).train()
    assert 0 < gc.get_freeze_count() <= held


@pytest.mark.parametrize(("frozen", "entered"), [(0, 1), (375, 1), (100_000, 0)])
def test_what_python_itself_has_frozen_is_nobody_elses_care(monkeypatch, frozen, entered):
    """Python 3.12.1 counts 375 objects when it starts."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    contexts = []
    quiet = QuietGarbage(contexts.append)
    quiet.on_train_begin(None, None, None)
    quiet.on_step_end(None, None, None)
    assert len(contexts) == entered
