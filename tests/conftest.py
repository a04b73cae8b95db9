"""Fixtures for every test."""

import gc
import os
import socket
import sys
import warnings
from contextlib import suppress
from importlib import import_module

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, when the first test module imports it

# pytest makes errors of warnings while it collects, and a package whose import fails then is absent for transformers
# from there on: on a GPU machine every kernel would be the fallback.
for package in ("fla", "causal_conv1d"):
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        import_module(package)


def pytest_collection_modifyitems(items):
    """An address in a test's name differs from process to process: pytest-xdist then refuses to run anything."""
    changing = [item.nodeid for item in items if " object at 0x" in item.nodeid]
    if changing:
        raise pytest.UsageError(f"give these parameters ids of their own: {changing}")


def pytest_collection_finish():
    """Every training collects garbage, which goes through all that torch and transformers hold: 0.27 s each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # of 700, 10, 10: a tenth less time for trainers that are made and dropped


@pytest.fixture(autouse=True)
def _no_network_and_no_trackers(monkeypatch):
    """Tests never leave the machine, and no tracker or token of the developer is used."""
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture(autouse=True)
def _torch_keeps_its_threads():
    """The recipe gives torch all cores; in the tests after it two processes would then spin on the same two.

    Measured: a step of a tiny model took 4 to 40 times the CPU time beside other work from there on.
    """
    torch = sys.modules.get("torch")
    threads = torch and torch.get_num_threads()
    yield
    if torch and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture
def free_port():
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
