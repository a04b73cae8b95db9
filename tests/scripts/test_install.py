"""What scripts/install.py decides and does, on machines of every kind; pip, venv and GPUs are fakes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install.py"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_NEEDS = ["filelock", 'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"']


@pytest.fixture(scope="module")
def install():
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeMachine:
    """Stands for python, venv and pip: answers like them, keeps what was asked."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.commands: list[list[str]] = []
        self.pythons = {sys.executable: "3.11.7"}
        self.venv_python = "3.11.7"
        self.venv_works = True
        self.pip = "26.1"
        self.has_ensurepip = True
        self.torch: str | None = None
        self.plan = {"version": "2.13.0", "requires_dist": CUDA_NEEDS}
        self.failing: str | None = None
        self.warning = ""

    def run(self, command):
        words = [str(word) for word in command]
        self.commands.append(words)
        if self.failing and self.failing in words:
            return subprocess.CompletedProcess(words, 1, "", f"ERROR: {self.failing} went wrong")
        answer = self._answer(words)
        if answer is None:
            return subprocess.CompletedProcess(words, 1, "", "fake failure")
        return subprocess.CompletedProcess(words, 0, answer, self.warning)

    def _answer(self, words: list[str]) -> str | None:
        if words[1:3] == ["-m", "venv"]:
            return self._make_venv()
        if "platform" in words[-1]:
            in_venv = words[0].startswith(str(self.venv))
            return (self.venv_python if self.venv_works else None) if in_venv else self.pythons.get(words[0])
        if "version('torch')" in words[-1]:
            return self.torch
        if words[1:3] == ["-m", "ensurepip"]:
            self.pip = "26.1" if self.has_ensurepip else None
            return "" if self.has_ensurepip else None
        if words[3] == "--version":
            return f"pip {self.pip} from here" if self.pip else None
        if "--dry-run" in words:
            return json.dumps({"install": [{"metadata": {"name": "torch", **self.plan}}]})
        if words[-1] == "torch":
            self.torch = "2.13.0+cpu"
        return ""

    def _make_venv(self) -> str:
        (self.venv / "bin").mkdir(parents=True, exist_ok=True)
        (self.venv / "bin" / "python").touch()
        (self.venv / "pyvenv.cfg").touch()
        self.venv_works = True
        return ""

    def pip_installs(self) -> list[str]:
        return [
            " ".join(words[6:])
            for words in self.commands
            if words[1:6] == ["-m", "pip", "install", "--quiet", "--no-compile"] and "--dry-run" not in words
        ]


@pytest.fixture
def machine(tmp_path) -> FakeMachine:
    return FakeMachine(tmp_path / "venv")


@pytest.fixture
def constraints(tmp_path) -> Path:
    path = tmp_path / "constraints.txt"
    path.write_text("numpy==2.4.6\ntorch==2.13.0\n")
    return path


@pytest.fixture
def bring_up(install, machine, constraints):
    def bring_up(*, extras="demo", system="Linux", has_gpu=False, torch_index=None, package=None) -> None:
        install.Installer(
            venv=machine.venv,
            extras=extras,
            constraints=constraints,
            system=system,
            has_gpu=has_gpu,
            torch_index=torch_index,
            run=machine.run,
            package=package,
        ).install()

    return bring_up


def test_a_wheel_is_installed_in_place_of_the_checkout(machine, bring_up):
    bring_up(extras="lora", package="dist/made.whl")
    packages = machine.commands[-1]
    assert packages[-1] == "dist/made.whl[lora]"
    assert "-e" not in packages


def test_linux_without_a_gpu_takes_torch_from_the_cpu_index_where_pip_would_choose_cuda(machine, bring_up, constraints):
    bring_up()
    assert machine.pip_installs()[0] == f"--index-url {CPU_INDEX} --no-deps -c {constraints} torch"


def test_linux_without_a_gpu_takes_pips_choice_where_that_is_a_cpu_build(machine, bring_up, constraints):
    machine.plan = {"version": "2.13.0+cpu", "requires_dist": ["filelock"]}
    bring_up()
    assert machine.pip_installs()[0] == f"-c {constraints} torch"


@pytest.mark.parametrize(("system", "has_gpu"), [("Linux", True), ("Darwin", False)], ids=["gpu", "mac"])
def test_elsewhere_torch_is_installed_plainly_and_pip_is_not_asked(machine, bring_up, constraints, system, has_gpu):
    bring_up(system=system, has_gpu=has_gpu)
    assert machine.pip_installs()[0] == f"-c {constraints} torch"
    assert not any("--dry-run" in words for words in machine.commands)


def test_torch_index_url_wins_on_any_machine(machine, bring_up, constraints):
    bring_up(has_gpu=True, torch_index="https://mirror/whl")
    assert machine.pip_installs()[0] == f"--index-url https://mirror/whl --no-deps -c {constraints} torch"


@pytest.mark.parametrize(
    ("metadata", "is_cpu_build"),
    [
        ({"version": "2.13.0+cpu"}, True),
        ({"version": "2.13.0+cu130"}, False),
        ({"version": "2.13.0+rocm7.0"}, False),
        ({"version": "2.13.0", "requires_dist": CUDA_NEEDS}, False),
        ({"version": "2.13.0", "requires_dist": ["cuda-toolkit[cublas]==13.0.3"]}, False),
        ({"version": "2.13.0", "requires_dist": ["sympy", "triton==3.7.1"]}, False),
        ({"version": "2.13.0", "requires_dist": ["sympy", "networkx"]}, True),
        ({"version": "2.13.0"}, True),
    ],
    ids=str,
)
def test_a_cpu_build_is_known_by_its_label_or_by_what_it_asks_for(install, metadata, is_cpu_build):
    report = json.dumps({"install": [{"metadata": {"name": "torch", **metadata}}]})
    assert install.read_plan(report) == (metadata["version"], is_cpu_build)


@pytest.mark.parametrize("present", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_the_pinned_torch_is_left_where_it_is(machine, bring_up, present):
    machine.torch = present
    bring_up()
    assert len(machine.pip_installs()) == 1


def test_another_torch_than_the_pinned_one_is_replaced(machine, bring_up):
    machine.torch = "2.12.1+cpu"
    bring_up()
    assert machine.pip_installs()[0].endswith("torch")


def test_everything_is_installed_with_the_constraints_and_the_extras(machine, bring_up, constraints):
    bring_up(extras="dev, demo")
    assert machine.pip_installs()[-1] == f"-c {constraints} -e {ROOT}[demo,dev]"


def test_a_second_run_asks_for_the_python_version_and_nothing_else(machine, bring_up, capsys):
    bring_up()
    machine.commands.clear()
    capsys.readouterr()
    bring_up()
    assert len(machine.commands) == 1
    assert "up to date" in capsys.readouterr().out


def test_extras_add_up_so_that_test_and_demo_do_not_undo_each_other(machine, bring_up):
    bring_up(extras="dev")
    bring_up(extras="demo")
    machine.commands.clear()
    bring_up(extras="dev")
    bring_up(extras="demo")
    assert len(machine.commands) == 2


@pytest.mark.parametrize("change", ["constraints", "python", "index", "extras", "stamp"])
def test_a_change_installs_again(machine, bring_up, constraints, install, change):
    bring_up()
    machine.commands.clear()
    settings = {}
    if change == "constraints":
        constraints.write_text("numpy==2.4.7\ntorch==2.13.0\n")
    elif change == "python":
        machine.venv_python = "3.11.8"
    elif change == "index":
        settings = {"torch_index": "https://mirror/whl"}
    elif change == "extras":
        settings = {"extras": "dev"}
    else:
        (machine.venv / install.STAMP).write_text('{"fingerprint": ')
    bring_up(**settings)
    assert machine.pip_installs()[-1].startswith("-c")


def test_a_broken_environment_is_made_anew(machine, bring_up, capsys):
    machine._make_venv()
    machine.venv_works = False
    (machine.venv / "lib").mkdir()
    bring_up()
    assert [sys.executable, "-m", "venv", str(machine.venv)] in machine.commands
    assert not (machine.venv / "lib").exists()
    assert "because it is broken" in capsys.readouterr().out


def test_an_environment_whose_repair_was_interrupted_is_still_taken_for_one(install, machine, bring_up):
    machine._make_venv()
    machine.venv_works = False
    (machine.venv / "lib").mkdir()
    machine.failing = "venv"
    with pytest.raises(install.InstallError, match="No virtual environment could be made"):
        bring_up()
    machine.failing = None
    bring_up()


def test_an_environment_without_pip_gets_one(machine, bring_up):
    machine._make_venv()
    machine.pip = None
    bring_up()
    assert machine.pip == "26.1"


def test_an_environment_that_cannot_get_pip_is_explained(install, machine, bring_up):
    machine.pip, machine.has_ensurepip = None, False
    with pytest.raises(install.InstallError, match="apt install python3-venv"):
        bring_up()


@pytest.mark.parametrize(
    ("version", "upgraded"), [("21.2.3", True), ("22.0.2", True), ("23.2.1", True), ("26.1", False)]
)
def test_a_pip_too_old_to_report_its_plan_or_slow_is_upgraded(machine, bring_up, version, upgraded):
    machine.pip = version
    bring_up()
    assert ("--upgrade pip" in machine.pip_installs()) is upgraded


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_something_else_in_the_place_of_the_environment_is_left_alone(install, machine, bring_up, kind):
    if kind == "file":
        machine.venv.write_text("precious")
    else:
        machine.venv.mkdir()
        (machine.venv / "precious").touch()
    with pytest.raises(install.InstallError, match="left alone"):
        bring_up()
    assert machine.commands == []


def test_a_python_too_old_gives_way_to_a_newer_one_on_path(install, machine, bring_up):
    machine.pythons = {sys.executable: "3.9.18", "python3.12": "3.12.1"}
    bring_up()
    assert ["python3.12", "-m", "venv", str(machine.venv)] in machine.commands


def test_without_a_newer_python_the_oldest_that_works_is_named(install, machine, bring_up):
    machine.pythons = {sys.executable: "3.9.18"}
    with pytest.raises(install.InstallError, match=r"(?s)too old.*make demo PYTHON="):
        bring_up()


def test_an_environment_of_an_old_python_is_explained(install, machine, bring_up):
    machine._make_venv()
    machine.venv_python = "3.9.18"
    with pytest.raises(install.InstallError, match=r"(?s)has Python 3\.9\.18.*rm -r"):
        bring_up()


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("venv", r"(?s)venv went wrong.*apt install python3-venv"),
        ("--index-url", r"(?s)from https://download.pytorch.org/whl/cpu.*index-url went wrong.*TORCH_INDEX_URL="),
        ("--dry-run", r"(?s)pip finds no torch.*dry-run went wrong.*Python 3\.11\.7"),
        ("-e", r"(?s)could not be installed.*-e went wrong.*rm -r"),
    ],
)
def test_a_failing_stage_is_explained_and_leaves_no_stamp(install, machine, bring_up, failing, message):
    machine.failing = failing
    with pytest.raises(install.InstallError, match=message):
        bring_up()
    assert not (machine.venv / install.STAMP).exists()


def test_an_extra_that_does_not_exist_is_an_error_and_not_a_warning(install, machine, bring_up):
    machine.warning = "WARNING: hf-speedkit 0.1.0 does not provide the extra 'dmeo'"
    with pytest.raises(install.InstallError, match="no extra 'dmeo'"):
        bring_up(extras="dmeo")


def test_a_missing_constraints_file_is_named(install, machine, bring_up, constraints):
    constraints.unlink()
    with pytest.raises(install.InstallError, match="no constraints file"):
        bring_up()


def test_a_failure_ends_in_one_message_and_exit_1(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--venv", str(tmp_path / "venv"), "--constraints", str(tmp_path / "none.txt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().startswith("install stopped: There is no constraints file")
    assert "Traceback" not in done.stderr


def test_commands_run_without_pythonpath_and_may_be_missing(install, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    done = install.run_command([sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"])
    assert done.stdout.strip() == "None"
    assert install.run_command([tmp_path / "python"]).returncode == 127


def test_a_gpu_is_seen_by_the_driver_that_lists_it(install, monkeypatch, tmp_path):
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has one")
    listing = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for said, seen in (("GPU 0: NVIDIA H200 (UUID: GPU-1)", True), ("No devices were found", False)):
        listing.write_text(f"#!/bin/sh\necho '{said}'\n")
        listing.chmod(0o755)
        assert install.nvidia_gpu() is seen


def test_constraints_pin_exact_versions_that_every_platform_can_find():
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert all("==" in pin and "+" not in pin and "@" not in pin and not pin.startswith("-e") for pin in pins)
    assert len(pins) == len({pin.partition("==")[0].lower() for pin in pins})
