"""Settings of the process that must be made before torch is imported."""

import importlib
import os
import subprocess
import sys

import pytest

from hf_speedkit.trainer.machine import prepare_process, slow_imports


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


@pytest.mark.parametrize(
    ("no_bytecode", "why"), [(True, "PYTHONDONTWRITEBYTECODE is set"), (False, "cannot be written")]
)
def test_packages_that_every_process_compiles_are_told_with_the_command_that_ends_it(
    tmp_path, monkeypatch, no_bytecode, why
):
    package = tmp_path / "slow_to_import"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", no_bytecode)
    importlib.invalidate_caches()
    told = slow_imports(["slow_to_import", "not_there"])
    assert told.startswith("Python compiles slow_to_import anew in every process")
    assert why in told
    command = told.partition("in the image: ")[2].split()
    subprocess.run(command, check=True)
    assert slow_imports(["slow_to_import"]) is None
