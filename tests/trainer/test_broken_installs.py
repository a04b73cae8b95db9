"""A package that is installed and does not import is named with its version and the command that mends it."""

import importlib
import sys

import pytest
from typer.testing import CliRunner

import hf_speedkit
from hf_speedkit.cli import main
from hf_speedkit.core.errors import ConfigurationError, DatasetError, InstallationError
from hf_speedkit.trainer.broken_installs import broken_install, refusals_told


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put packages into a folder of installed ones: name -> code of its `__init__.py`; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # The real one reads the records of every installed package, 0.4 s a call; the last test below asks it.
    known = {name: [name] for name in ("outer", "inner", "trl", "hf_speedkit")}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: known)

    def write(**packages):
        for name, code in packages.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(code)
            (tmp_path / f"{name}-1.2.dist-info").mkdir()
            (tmp_path / f"{name}-1.2.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.2\n")
            (tmp_path / f"{name}-1.2.dist-info" / "top_level.txt").write_text(name)
        importlib.invalidate_caches()

    yield write
    for name in ("outer", "inner"):
        sys.modules.pop(name, None)


LAZY = """
def __getattr__(name):
    try:
        import inner
    except Exception as error:
        raise RuntimeError("look up") from error
"""


@pytest.mark.parametrize(
    ("outer", "inner", "said", "named"),
    [
        (
            "import ctypes; ctypes.CDLL('libnone.so.9')",
            "",
            "outer OSError: libnone",
            "--force-reinstall --no-deps outer",
        ),
        ("import inner; inner.gone", "", "outer AttributeError", "--force-reinstall --no-deps outer inner"),
        ("from inner import gone", "", "outer ImportError: cannot", "--force-reinstall --no-deps outer inner"),
        ("import nowhere_at_all", "", "outer ModuleNotFoundError: No", "outer"),
        ("import inner", "1 / 0", "inner ZeroDivisionError", "--force-reinstall --no-deps inner"),
        (LAZY, "1 / 0", "inner ZeroDivisionError", "--force-reinstall --no-deps inner"),
    ],
    ids=["library", "attribute", "name", "dependency", "below", "lazy"],
)
def test_whatever_a_broken_package_raises_a_public_name_names_it(install, monkeypatch, outer, inner, said, named):
    install(outer=outer, inner=inner)
    monkeypatch.setitem(hf_speedkit._HOMES, "Thing", "outer")
    with pytest.raises(InstallationError) as told:
        from hf_speedkit import Thing  # noqa: F401
    assert told.value.what.startswith(said.replace(" ", " 1.2 is installed and cannot be imported: ", 1))
    assert told.value.mend == f"pip install {named}"
    assert "1.2: " in told.value.evidence[0]


def test_a_file_in_a_packages_place_is_to_be_renamed_and_a_requirement_has_its_range(
    install, tmp_path_factory, monkeypatch
):
    install(outer="from trl import gone")
    with pytest.raises(ImportError) as caught:
        import outer
    assert broken_install(caught.value).mend.startswith('pip install --force-reinstall --no-deps outer "trl')
    here = tmp_path_factory.mktemp("here")
    (here / "outer.py").write_text("import ctypes; ctypes.gone")
    monkeypatch.syspath_prepend(str(here))
    with pytest.raises(AttributeError) as caught:
        import outer  # noqa: F401
    assert broken_install(caught.value).mend.startswith(f"rename {here / 'outer.py'},")


def test_what_is_no_failed_import_is_left_as_it_is(install, monkeypatch):
    install(outer="def ask():\n    raise ImportError('install bitsandbytes')")
    outer = importlib.import_module("outer")
    for error, act in ((ImportError, outer.ask), (ZeroDivisionError, lambda: 1 / 0)):
        with pytest.raises(error) as caught:
            act()
        assert broken_install(caught.value) is None
        with pytest.raises(error), refusals_told():
            act()


def test_script_command_line_and_doctor_end_with_it(install, monkeypatch, capsys):
    install(outer="import ctypes; ctypes.CDLL('libnone.so.9')")
    with pytest.raises(SystemExit), refusals_told():
        raise ConfigurationError("refused")
    assert capsys.readouterr().err == "\nConfigurationError: refused\n"
    stop = KeyboardInterrupt()
    stop.add_note("checkpoint-2 is complete")
    with pytest.raises(SystemExit) as ended, refusals_told():
        raise stop
    assert ended.value.code == 130
    said = capsys.readouterr().err
    assert said.startswith("\ncheckpoint-2 is complete\n  it was at ")
    assert "Traceback" not in said
    with pytest.raises(SystemExit), refusals_told():
        import outer  # noqa: F401
    assert capsys.readouterr().err.endswith("Mend it:  pip install --force-reinstall --no-deps outer\n")
    monkeypatch.setattr(main, "app", lambda: importlib.import_module("outer"))
    with pytest.raises(SystemExit):
        main.main()
    assert "outer 1.2 is installed and cannot be imported: OSError" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "trl", None)
    shown = CliRunner().invoke(main.app, ["doctor", "any"])
    assert shown.exit_code == 1
    assert "trl 1." in shown.output
    assert 'install --force-reinstall --no-deps "trl' in shown.output


@pytest.mark.parametrize(
    ("mend", "more"),
    [("dataset = dataset.map(f)", True), ('roles = {"gpt": "b"}; dataset = dataset.map(f)', True), ("lr: 1", False)],
)
def test_a_script_says_where_a_line_of_python_that_mends_its_data_belongs(capsys, mend, more):
    with pytest.raises(SystemExit), refusals_told():
        raise DatasetError("no column to train on", mend=mend)
    said = capsys.readouterr().err
    assert f"Mend it:  {mend}" in said
    assert ("--dataset_name mended.jsonl" in said) is more
