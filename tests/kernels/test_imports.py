"""Importing a package once more, elsewhere: no way in which it fails may take this process along."""

import pytest
from fake_kernels import write_fakes

from hf_speedkit.kernels.imports import ImportOutcome, ImportStatus, import_outcomes, installed_version, is_installed
from hf_speedkit.kernels.requirements import FUNCTIONS as KERNELS
from hf_speedkit.kernels.verdicts import command_that_mends, why_not_bound

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
        ("raise RuntimeError('driver\\ntoo old')", "RuntimeError: driver too old"),
        ("import os; os.write(2, b'\\xff driver'); os.abort()", "driver)"),
        ("input('licence?')", "EOFError"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E"),
    ],
    ids=["abort", "exit", "system_exit", "exception", "bytes_that_are_no_text", "a_question", "an_error_without_words"],
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


def test_functions_of_one_package_are_told_apart_and_nothing_else_that_it_does_matters(outcome_of):
    """Chatter that is no text, a closed output, a thread, a child that outlives it and an end that aborts."""
    outcomes = outcome_of(
        "import atexit, os, subprocess, threading, time\n"
        "os.write(1, b'loading \\xff')\nos.close(1)\natexit.register(os.abort)\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\nsubprocess.Popen(['sleep', '60'])\n"
        "causal_conv1d_fn = lambda x, seq_idx=None: x",
        timeout_s=20.0,
    )
    assert outcomes["causal_conv1d_fn"].status is ImportStatus.WORKS
    assert outcomes["causal_conv1d_fn"].parameters == ("x", "seq_idx")
    assert outcomes["causal_conv1d_update"].status is ImportStatus.LACKS
    assert outcomes["causal_conv1d_update"].detail == "causal_conv1d.causal_conv1d_update"


def test_a_file_of_the_packages_name_is_named_and_not_taken_for_a_version_without_the_function(tmp_path, monkeypatch):
    (tmp_path / "causal_conv1d.py").write_text("print('my experiments with it')")
    monkeypatch.syspath_prepend(str(tmp_path))
    outcome = import_outcomes("causal_conv1d", FUNCTIONS)["causal_conv1d_fn"]
    assert (outcome.status, outcome.shadow) == (ImportStatus.LACKS, str(tmp_path / "causal_conv1d.py"))
    requirement = KERNELS["causal_conv1d_fn"]
    assert why_not_bound("causal_conv1d", outcome).startswith(f"{outcome.shadow} is imported in the place of")
    assert command_that_mends(requirement, outcome) == f"rename {outcome.shadow}: its name is taken by a package"


def test_a_folder_of_the_packages_name_is_no_package_and_the_working_folder_takes_no_name(
    outcome_of, tmp_path, monkeypatch
):
    here = tmp_path / "here"
    (here / "fla").mkdir(parents=True)
    (here / "causal_conv1d.py").write_text("raise RuntimeError('imported from the working folder')")
    monkeypatch.chdir(here)
    assert outcome_of("def causal_conv1d_fn(x): ...")["causal_conv1d_fn"].status is ImportStatus.WORKS
    monkeypatch.syspath_prepend(str(here))
    assert not is_installed("fla")


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("selective_scan_cuda", "pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation"),
        ("a_module_nobody_knows", 'pip install --no-build-isolation "mamba-ssm"'),
        ("einops.layers", 'pip install "einops"'),
        ("causal_conv1d", 'pip install --no-build-isolation "causal-conv1d>=1.7"'),
    ],
)
def test_a_missing_module_is_installed_by_name_only_where_pip_is_known_to_know_it(missing, command):
    """selective_scan_cuda is compiled with mamba-ssm: on PyPI nobody has that name, or a stranger."""
    outcome = ImportOutcome(status=ImportStatus.FAILS, detail=f"ModuleNotFoundError: No module named '{missing}'")
    assert command_that_mends(KERNELS["selective_scan_fn"], outcome).startswith(command)


def test_v52_an_import_without_a_driver_is_mended_by_no_installation():
    detail = "RuntimeError: 0 active drivers ([]). There should only be one."
    outcome = ImportOutcome(status=ImportStatus.FAILS, detail=detail)
    assert command_that_mends(KERNELS["chunk_gated_delta_rule"], outcome).startswith("nvidia-smi")


def test_a_package_without_metadata_has_no_version():
    assert installed_version("causal_conv1d") is None
    assert installed_version("torch") is not None


def test_a_package_that_another_distribution_brings_has_that_ones_version(tmp_path, monkeypatch):
    """fla-core without flash-linear-attention, which only adds layers and models to it."""
    write_fakes(tmp_path, fla="def chunk_gated_delta_rule(q): ...")
    (tmp_path / "flash_linear_attention-0.6.0.dist-info").rename(tmp_path / "fla_core-0.6.0.dist-info")
    folder = tmp_path / "fla_core-0.6.0.dist-info"
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fla-core\nVersion: 0.6.0\n")
    (folder / "top_level.txt").write_text("fla")
    monkeypatch.syspath_prepend(str(tmp_path))
    outcome = import_outcomes("fla", ("chunk_kda",))["chunk_kda"]
    assert (outcome.status, outcome.version, outcome.shadow) == (ImportStatus.LACKS, "0.6.0", None)


def test_finding_a_package_does_not_import_it():
    assert is_installed("torch")
    assert not is_installed("causal_conv1d")
