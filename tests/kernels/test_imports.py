"""Importing a package once more, elsewhere: no way in which it fails may take this process along."""

import pytest
from fake_kernels import write_fakes

from hf_speedkit.kernels.imports import ImportStatus, import_outcomes, installed_version, is_installed

FUNCTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


@pytest.fixture
def outcome_of(tmp_path, monkeypatch):
    def outcome(source, **settings):
        write_fakes(tmp_path, convolution=source)
        monkeypatch.syspath_prepend(str(tmp_path))
        return import_outcomes("causal_conv1d", FUNCTIONS, **settings)

    return outcome


def test_a_package_that_cannot_be_found_costs_no_process():
    outcomes = import_outcomes("causal_conv1d", FUNCTIONS)
    assert {outcome.status for outcome in outcomes.values()} == {ImportStatus.ABSENT}


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("import os; os.abort()", "the import ends the process with SIGABRT"),
        ("import os; print('CUDA error', file=__import__('sys').stderr, flush=True); os._exit(3)", "exit code 3"),
        ("raise SystemExit('no GPU')", "SystemExit: no GPU"),
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
    ],
    ids=["abort", "exit", "system_exit", "exception"],
)
def test_however_an_import_ends_it_is_reported(outcome_of, source, detail):
    for outcome in outcome_of(source).values():
        assert outcome.status is ImportStatus.FAILS
        assert detail in outcome.detail
        assert outcome.version == "1.7.0"


def test_the_last_words_of_a_process_that_died_are_kept(outcome_of):
    source = "import os, sys; print('CUDA error 35', file=sys.stderr, flush=True); os._exit(3)"
    assert "CUDA error 35" in outcome_of(source)["causal_conv1d_fn"].detail


def test_an_import_that_hangs_is_given_up(outcome_of):
    outcome = outcome_of("import time; time.sleep(60)", timeout_s=1.0)["causal_conv1d_fn"]
    assert (outcome.status, outcome.detail) == (ImportStatus.FAILS, "the import did not end within 1 s")


def test_functions_of_one_package_are_told_apart_and_chatter_is_ignored(outcome_of):
    outcomes = outcome_of("print('loading'); causal_conv1d_fn = lambda x, seq_idx=None: x")
    assert outcomes["causal_conv1d_fn"].status is ImportStatus.WORKS
    assert outcomes["causal_conv1d_fn"].parameters == ("x", "seq_idx")
    assert outcomes["causal_conv1d_update"].status is ImportStatus.LACKS
    assert outcomes["causal_conv1d_update"].detail == "causal_conv1d.causal_conv1d_update"


def test_a_package_without_metadata_has_no_version():
    assert installed_version("causal_conv1d") is None
    assert installed_version("torch") is not None


def test_finding_a_package_does_not_import_it():
    assert is_installed("torch")
    assert not is_installed("causal_conv1d")
