"""What is older than pyproject.toml asks for, or absent, is refused in one message, wherever one comes in."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_tested_versions import fake_distribution

from hf_speedkit.core.errors import ConfigurationError, InstallationError
from hf_speedkit.core.needed_versions import is_below, needs_in
from hf_speedkit.kernels.compatibility_rows import ROWS
from hf_speedkit.kernels.requirements import FUNCTIONS
from hf_speedkit.trainer import installed_versions, optional_packages, trackers
from hf_speedkit.trainer.adapters import require_adapters
from hf_speedkit.trainer.installed_versions import needed, old_versions_told, require_versions, too_old

ROOT = Path(__file__).parents[2]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a distribution and its package in front of the installed ones, as if nothing had imported it."""

    def write(name, version, package=None):
        package = package or name
        fake_distribution(tmp_path, name, version)
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    return write


@pytest.mark.parametrize(
    ("version", "below"),
    [
        ("5.22.9", True), ("5.23.0", False), ("5.23.0.dev0", False), ("5.23rc1", False), ("6", False), ("5.9", True),
        ("5.23.0+nv26.4", False), ("1!5.23", False), ("4.57.1", True), ("2026.1.0", False),
        ("0.0.0", False), ("0+unknown", False), ("0.1", True),
    ],
)  # fmt: skip
def test_a_release_is_below_another_by_its_numbers(version, below):
    assert is_below(version, "5.23") is below


def test_a_line_with_an_extra_and_a_marker_is_read_as_pip_reads_it():
    found = needs_in(["Py_YAML[c] >=6.0", "wandb<1,>=0.31; extra == 'wandb'", "rich", "hf-speedkit[lora]"])
    assert {name: (need.lowest, need.optional) for name, need in found.items()} == {
        "py-yaml": ("6.0", False), "wandb": ("0.31", True), "rich": (None, False), "hf-speedkit": (None, False),
    }  # fmt: skip


def test_bounds_are_the_checkouts_own_else_the_installations_else_none(tmp_path, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = needed()
    assert {need.line for need in own.values() if not need.optional} == set(project["dependencies"])
    assert own["bitsandbytes"].optional
    # A package that was copied, or lies in site-packages beside some other project's file.
    monkeypatch.setattr(installed_versions, "__file__", str(tmp_path / "a" / "b" / "any.py"))
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\ndependencies = ["torch>=99"]\n')
    lines = ["torch>=2.11", "peft>=0.20; extra == 'lora'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    assert {name: need.optional for name, need in needed().items()} == {"torch": False, "peft": True}
    monkeypatch.undo()
    monkeypatch.setattr(installed_versions, "__file__", str(tmp_path / "a" / "b" / "any.py"))
    monkeypatch.setattr(installed_versions, "_OWN", "hf-speedkit-that-is-not-installed")
    assert needed() == {}
    require_versions()


def test_all_that_is_too_old_or_absent_is_one_message_and_one_command(install, monkeypatch):
    install("accelerate", "1.14.2")
    install("nvidia-ml-py", "11.5", package="pynvml")
    monkeypatch.setattr(installed_versions, "is_installed", lambda package: package != "trl")
    monkeypatch.setattr(installed_versions, "_version", without("trl", "msgspec"))
    with pytest.raises(InstallationError) as refused:
        require_versions()
    told = refused.value
    assert told.what.endswith(
        ": accelerate is 1.14.2, older than 1.15, nvidia-ml-py is 11.5, older than 12.560, trl is not installed"
    )
    assert [line.partition(" in ")[0] for line in told.evidence] == ["accelerate: 1.14.2", "nvidia-ml-py: 11.5"]
    assert told.mend == 'pip install "accelerate>=1.15,<2" "nvidia-ml-py>=12.560" "trl>=1.16,<2"'
    require_versions("transformers")


def test_what_fails_inside_is_told_as_the_old_package_that_it_is_due_to_and_else_as_it_is(install):
    with pytest.raises(AttributeError), old_versions_told():
        None.any  # noqa: B018
    install("accelerate", "1.14.2")
    with pytest.raises(InstallationError, match="accelerate is") as told, old_versions_told():
        None.any  # noqa: B018
    assert isinstance(told.value.__cause__, AttributeError)
    with pytest.raises(ConfigurationError, match="ours"), old_versions_told():
        raise ConfigurationError("ours")


def without(*names):
    real = installed_versions._version
    return lambda name: None if name in names else real(name)


def test_a_clone_that_is_imported_in_an_old_packages_place_is_not_judged(install, tmp_path_factory, monkeypatch):
    install("peft", "0.18.0")
    assert too_old("peft") == "is 0.18.0, older than 0.20"
    clone = tmp_path_factory.mktemp("clone")
    (clone / "peft").mkdir()
    (clone / "peft/__init__.py").write_text("")
    monkeypatch.syspath_prepend(clone)
    assert too_old("peft") is None


def test_the_kernels_room_names_the_same_bounds():
    own = needed()
    old = [row for row in ROWS if row.source == "pyproject.toml"]
    for pin in {pin for row in old for pin in row.pins} | {row.distribution for row in FUNCTIONS.values()}:
        name = re.match(r"[\w-]+", pin)[0]
        assert name not in own or own[name].line == pin
    lowest = {"fla-core" if name == "flash-linear-attention" else name: need.lowest for name, need in own.items()}
    assert [row.versions for row in old] == [{name: f"<{lowest[name]}" for name in row.versions} for row in old]


@pytest.mark.parametrize(
    ("name", "version", "asks"),
    [
        ("peft", "0.18.0", lambda: require_adapters({"use_peft": True})),
        ("bitsandbytes", "0.47.0", lambda: optional_packages.require_packages(settings(optim="adamw_8bit"))),
        ("liger-kernel", "0.6.1", lambda: optional_packages.require_packages(settings(use_liger_kernel=True))),
        ("wandb", "0.20.1", lambda: trackers.require_tracker_packages("wandb")),
    ],
)
def test_an_optional_package_that_is_too_old_is_refused_where_it_is_asked_for(install, name, version, asks):
    install(name, version, package=name.replace("-", "_"))
    with pytest.raises(ConfigurationError, match=f"is {version}, older than") as refused:
        asks()
    assert refused.value.mend == f'pip install "{needed()[name].line}"'


def settings(**given):
    class Settings:
        report_to, optim, use_liger_kernel, mixed_precision = "none", "adamw_torch", False, "no"

    for name, value in given.items():
        setattr(Settings, name, value)
    return Settings


WAYS_IN = """
import json, sys
sys.path[:0] = [{folder!r}, {recipes!r}]
import hf_speedkit
said = {{}}
for name in set(hf_speedkit.__all__) - {{"PackedCollator"}}:  # that one imports torch, which costs 2 s
    try:
        getattr(hf_speedkit, name)
    except ImportError as error:
        said[name] = [type(error).__name__, str(error)]
import qwen27b_sft
try:
    qwen27b_sft.main(["--config", {tiny!r}])
except ImportError as error:
    said["recipe"] = [type(error).__name__, str(error)]
from typer.testing import CliRunner
from hf_speedkit.cli.main import app
for command in (["plan", "any"], ["bench", {tiny!r}], ["export", ".", "out"], ["doctor", "any", "--json"]):
    ended = CliRunner().invoke(app, command)
    told = ended.output if command[0] == "doctor" else str(ended.exception)
    said[command[0]] = [type(ended.exception).__name__, told]
said["imported"] = [name for name in ("torch", "trl", "transformers", "datasets") if name in sys.modules]
print(json.dumps(said))
"""


def test_an_old_transformers_is_refused_at_every_way_in_before_anything_is_imported(tmp_path):
    """A machine had 5.17 beside a new TRL: the recipe died of an AttributeError in SpeedSFTConfig."""
    fake_distribution(tmp_path, "transformers", "5.17.0")
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    tiny = str(ROOT / "recipes" / "tiny_sft.yaml")
    code = WAYS_IN.format(folder=str(tmp_path), recipes=str(ROOT / "recipes"), tiny=tiny)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [name for name in said.pop("imported") if name != "torch"] == []
    doctor = json.loads(said.pop("doctor")[1])
    assert "transformers is 5.17.0, older than 5.23" in doctor["remarks"][0]
    assert doctor["commands"][0].endswith('pip install "transformers>=5.23,<6"')
    need_it = {"SpeedSFTConfig", "SpeedSFTTrainer", "KernelAssertionCallback", "ThroughputCallback", "TraceCallback"}
    need_it |= {"attach", "PackedBatchSampler", "check_kernels", "assert_kernels", "recipe", "plan", "bench", "export"}
    assert said.keys() == need_it
    for name, (kind, text) in said.items():
        assert kind == "InstallationError", name
        assert "transformers is 5.17.0, older than 5.23" in text
        assert text.splitlines()[-1] == 'Mend it:  pip install "transformers>=5.23,<6"'
