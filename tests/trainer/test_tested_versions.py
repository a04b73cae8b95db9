"""What is said where the installed stack is outside the range that was tested."""

import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_speedkit import KernelAssertionCallback
from hf_speedkit.core.tested_versions import TESTED, outside_tested, range_tested
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.installed_versions import untested_versions
from hf_speedkit.trainer.throughput_callback import ThroughputCallback

ROOT = Path(__file__).parents[2]


def fake_distribution(folder, name, version):
    """Installed, as far as metadata can tell."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1", "2.14.0.dev20261101"])
def test_a_release_inside_the_range_is_not_spoken_of(version):
    assert outside_tested({"torch": version}) is None


@pytest.mark.parametrize("version", ["2.10.2", "2.99.0", "3.0.0rc1"])
def test_a_release_outside_is_named_with_the_range(version):
    said = outside_tested({"torch": version, "trl": "1.16.0"})
    assert f"torch {version} (tested: {range_tested('torch')})" in said
    assert "trl" not in said


def test_the_range_begins_where_pyproject_allows_and_holds_what_ci_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], f"Python{project['requires-python']}"]
    lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", need).groups() for need in wanted)
    assert {name: low for name, (low, _) in TESTED.items()} == {name: lowest[name] for name in TESTED}
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE))
    assert outside_tested({name: pins[name] for name in TESTED if name in pins}) is None


def test_attach_warns_once_and_goes_on(tmp_path, monkeypatch, caplog):
    from plain_trainer import make_trainer

    fake_distribution(tmp_path, "trl", "9.9.0")
    monkeypatch.syspath_prepend(tmp_path)
    trainer = make_trainer(tmp_path)
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        attach(trainer, KernelAssertionCallback())
        attach(trainer, ThroughputCallback())
    said = [record.getMessage() for record in caplog.records if "was not tested" in record.getMessage()]
    assert len(said) == 1
    assert "trl 9.9.0 (tested: 1.16)" in said[0]


def test_an_import_that_fails_on_such_a_version_names_the_range_and_ends_with_the_command(tmp_path):
    fake_distribution(tmp_path, "trl", "9.9.0")
    (tmp_path / "trl.py").write_text("")  # no SFTConfig in it
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hf_speedkit; hf_speedkit.SpeedSFTConfig"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "cannot import name 'SFTConfig'" in done.stderr
    assert "trl 9.9.0 (tested: 1.16)" in done.stderr
    assert 'pip install --force-reinstall --no-deps "trl' in done.stderr.rstrip().splitlines()[-1]


def test_python_is_judged_as_well(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert "Python 3.99.0 (tested: 3.11 to 3.13)" in untested_versions()
