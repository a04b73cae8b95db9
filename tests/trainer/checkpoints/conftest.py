"""A run with two checkpoints, trained once; tests change copies of it."""

import shutil

import pytest
from checkpoint_run import losses, small


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    trainer = small(path)
    trainer.processing_class.chat_template = "{{ messages[0]['content'] }}"
    trainer.train()
    return path, losses(trainer)


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "copy")
    return tmp_path / "copy"
