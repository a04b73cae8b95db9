"""Settings of the process that must be made before torch is imported."""

import os

import pytest

from hf_speedkit.trainer.machine import prepare_process


@pytest.fixture
def _clean(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "x")  # so that what the test leaves behind is undone
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_clean")
def test_threads_sleep_and_the_allocator_grows_its_segments():
    prepare_process()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_users_own_setting_is_kept(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    prepare_process()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == ("max_split_size_mb:512" if name == "PYTORCH_ALLOC_CONF" else None)
