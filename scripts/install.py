#!/usr/bin/env python3
"""Install hf_speedkit and its pinned dependencies into a virtual environment; `make demo` and `make test` call it.

    python scripts/install.py --venv .venv --extras demo --constraints .ci/constraints.txt

Needs a Python that pyproject.toml allows and nothing else. On Linux without an NVIDIA GPU it installs the CPU build of
torch: what PyPI holds for Linux is the CUDA build, which pulls in 18 packages of CUDA libraries. TORCH_INDEX_URL names
another index for torch. Running it again when nothing has changed costs a fifth of a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PIP = (22, 2)  # the first with --dry-run and --report; Ubuntu 22.04 makes environments with 22.0
# Python 3.11 makes environments with 23.2, which needs 27 s of CPU time to choose the 110 packages; 26.3 needs 11 s.
QUICK_PIP = (26, 0)
# Modules are compiled where they are imported first: all 14,800 files at once cost 36 s of CPU time, most for nothing.
INSTALL = ("install", "--quiet", "--no-compile")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = "hf_speedkit_installed.json"
NEWER_PYTHONS = ("python3.13", "python3.12", "python3.11", "python3.10")  # looked for where python3 is too old
DEBIAN = "apt install python3-venv; then run the same command again."
CUDA_PARTS = re.compile(r"^(nvidia|cuda|triton|pytorch-triton)\b", re.IGNORECASE)


class InstallError(Exception):
    """Installing cannot go on; the text says why and what to do."""


class Installer:
    """The stages of an installation.

    Args:
        venv: folder of the virtual environment; made where it is missing.
        extras: names of optional dependency sets, comma-separated.
        constraints: file of pinned versions.
        system: "Linux", "Darwin" or "Windows".
        has_gpu: whether an NVIDIA GPU is in this machine.
        torch_index: index to take torch from whatever the machine; None chooses.
        base_python: interpreter that makes the environment; None chooses.
        run: runs a command and gives the finished process, output captured as text.
        package: a wheel to install instead of this checkout.
    """

    def __init__(self, *, venv, extras, constraints, system, has_gpu, torch_index, run, base_python=None, package=None):
        self.venv = Path(venv)
        self.extras = tuple(sorted(filter(None, (extra.strip() for extra in extras.split(",")))))
        self.constraints = Path(constraints)
        self.system = system
        self.has_gpu = has_gpu
        self.torch_index = torch_index
        self.base_python = base_python
        self.run = run
        self.package = package
        folder, name = ("Scripts", "python.exe") if system == "Windows" else ("bin", "python")
        self.python = self.venv / folder / name
        self.python_version = None  # of the environment, once known

    def install(self):
        """Bring the environment up to date.

        Raises:
            InstallError: with the reason and what to do.
        """
        started = time.monotonic()
        if not self.constraints.is_file():
            raise InstallError(
                f"There is no constraints file {self.constraints}. Run this from the checkout: make demo"
            )
        self.python_version = self._ask_python_version()
        if self.python_version and self._is_current():
            say("ready", f"{self.venv} is up to date ({', '.join(self.extras) or 'no extras'})")
            return
        if self.python_version is None:
            self._make_venv()
        self._require_python()
        self._require_pip()
        self._install_torch()
        self._install_packages()
        self._write_stamp()
        say("ready", f"{self.venv} is ready after {time.monotonic() - started:.0f} s")

    # ---- the environment

    def _ask_python_version(self, python=None):
        """Version of a Python as text, None where it does not run. By default the environment's."""
        if python is None and not self.python.exists():
            return None
        done = self.run([python or self.python, "-c", "import platform; print(platform.python_version())"])
        return done.stdout.strip() or None if done.returncode == 0 else None

    def _make_venv(self):
        ours = (self.venv / "pyvenv.cfg").is_file()
        if self.venv.exists() and not ours and (not self.venv.is_dir() or any(self.venv.iterdir())):
            raise InstallError(
                f"{self.venv} exists and is not a virtual environment; it is left alone.\n"
                f"Choose another folder (make demo VENV=other) or move it away."
            )
        why = "it is broken: its Python does not run" if ours else "there is none"
        base, version = self._base_python()
        say("venv", f"making {self.venv} with Python {version}, because {why}")
        # A broken one is emptied, pyvenv.cfg left: interrupted here, it still passes for an environment next time.
        for entry in [entry for entry in self.venv.iterdir() if entry.name != "pyvenv.cfg"] if ours else []:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        done = self.run([base, "-m", "venv", self.venv])
        self.python_version = self._ask_python_version()
        if done.returncode != 0 or self.python_version is None:
            raise InstallError(
                f"No virtual environment could be made in {self.venv}:\n{tail(done)}\nOn Debian and Ubuntu: {DEBIAN}"
            )

    def _base_python(self):
        """An interpreter that is new enough, and its version: the one that runs this, else one on PATH."""
        candidates = [self.base_python or sys.executable, *NEWER_PYTHONS]
        for candidate in candidates:
            version = self._ask_python_version(candidate)
            if version and numbers(version) >= oldest_python():
                return candidate, version
        raise InstallError(
            f"Python {platform.python_version()} is too old, and no {dotted(oldest_python())} or newer is on PATH.\n"
            f"Install one, then name it: make demo PYTHON=/path/to/python{dotted(oldest_python())}"
        )

    def _require_python(self):
        if numbers(self.python_version) < oldest_python():
            raise InstallError(
                f"{self.venv} has Python {self.python_version}; hf_speedkit needs {dotted(oldest_python())} or newer.\n"
                f"Remove it (rm -r {self.venv}) and run the same command again."
            )

    def _require_pip(self):
        version = self._pip_version()
        if version is None:
            say("pip", f"putting pip into {self.venv}, because its making was interrupted")
            done = self.run([self.python, "-m", "ensurepip", "--upgrade"])
            self._check(done, "pip could not be installed", f"On Debian and Ubuntu: {DEBIAN}")
            version = self._pip_version()
        if version is None:
            raise InstallError(f"{self.venv} has no pip that runs. Remove it (rm -r {self.venv}) and run this again.")
        if version < QUICK_PIP:
            why = "is slow" if version >= OLDEST_PIP else f"cannot say its plan ({dotted(OLDEST_PIP)} is the first)"
            say("pip", f"upgrading it, because {dotted(version)} {why}")
            done = self._pip(*INSTALL, "--upgrade", "pip")
            if version < OLDEST_PIP:  # a slow one does as well
                self._check(done, "pip could not be upgraded")

    def _pip_version(self):
        found = re.match(r"pip (\d+\.\d+)", self._pip("--version").stdout)
        return numbers(found.group(1)) if found else None

    # ---- torch

    def _install_torch(self):
        present = self._installed_torch()
        if present:
            say("torch", f"{present} is there already")
            return
        index, why = self._torch_index()
        where = f" from {index}" if index else ""
        say("torch", f"installing{where}, because {why}")
        # Without dependencies where it has an index of its own: that index lacks most of the pinned versions.
        source = ["--index-url", index, "--no-deps"] if index else []
        done = self._pip(*INSTALL, *source, "-c", self.constraints, "torch")
        self._check(
            done,
            f"torch could not be installed{where}",
            "Another index, a mirror for example: TORCH_INDEX_URL=https://... make demo"
            + ("\nWith the CUDA build instead: TORCH_INDEX_URL=https://pypi.org/simple make demo" if index else ""),
        )

    def _installed_torch(self):
        """Version of torch in the environment, None where it is missing or not the pinned one."""
        code = "from importlib.metadata import version; print(version('torch'))"
        version = self.run([self.python, "-c", code]).stdout.strip()
        pinned = re.search(r"^torch==([^\s;#]+)", self.constraints.read_text(encoding="utf-8"), re.MULTILINE)
        return version if version and (pinned is None or version.split("+")[0] == pinned.group(1)) else None

    def _torch_index(self):
        """Index to take torch from, None for pip's own choice, and why."""
        if self.torch_index:
            return self.torch_index, "TORCH_INDEX_URL says so"
        if self.system != "Linux":
            return None, f"on {self.system} it is a build without CUDA"
        if self.has_gpu:
            return None, "this machine has an NVIDIA GPU"
        plan = self._pip(
            "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", "--quiet",
            "-c", self.constraints, "torch",
        )  # fmt: skip
        self._check(plan, "pip finds no torch for this Python", f"{self.venv} has Python {self.python_version}.")
        version, is_cpu_build = read_plan(plan.stdout)
        if is_cpu_build:
            return None, f"pip's choice, {version}, is a CPU build and there is no NVIDIA GPU"
        return TORCH_CPU_INDEX, f"pip's choice, {version}, is a CUDA build and there is no NVIDIA GPU"

    # ---- the rest

    def _install_packages(self):
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        say("packages", f"installing hf-speedkit{extras} with the versions in {self.constraints} (a minute or two)")
        done = self._pip(*INSTALL, "-c", self.constraints, *self._source(extras))
        self._check(
            done,
            f"hf-speedkit{extras} could not be installed",
            f"If an earlier installation was interrupted, begin afresh: rm -r {self.venv}",
        )
        unknown = re.search(r"does not provide the extra '?([\w-]+)", done.stderr)  # to pip only a warning
        if unknown:
            raise InstallError(f"hf-speedkit has no extra {unknown.group(1)!r}; pyproject.toml lists them.")

    def _source(self, extras):
        return ["-e", f"{ROOT}{extras}"] if self.package is None else [f"{self.package}{extras}"]

    def _fingerprint(self):
        """Changes when anything does that the result depends on."""
        digest = hashlib.sha256()
        for path in (ROOT / "pyproject.toml", self.constraints, Path(__file__)):
            digest.update(path.read_bytes())
        digest.update(repr((self.python_version, str(ROOT), self.torch_index)).encode())
        return digest.hexdigest()

    def _is_current(self):
        stamp = self._read_stamp()
        return stamp["fingerprint"] == self._fingerprint() and set(self.extras) <= set(stamp["extras"])

    def _read_stamp(self):
        try:
            stamp = json.loads((self.venv / STAMP).read_text(encoding="utf-8"))
            return {"fingerprint": str(stamp["fingerprint"]), "extras": list(stamp["extras"])}
        except (OSError, ValueError, TypeError, KeyError):  # none yet, or not one of ours: install again
            return {"fingerprint": "", "extras": []}

    def _write_stamp(self):
        # Extras add up (`make test`, then `make demo`), so that the two do not undo each other's stamp.
        stamp = self._read_stamp()
        fingerprint = self._fingerprint()
        earlier = stamp["extras"] if stamp["fingerprint"] == fingerprint else ()
        new = self.venv / f"{STAMP}.new"
        new.write_text(json.dumps({"fingerprint": fingerprint, "extras": sorted({*earlier, *self.extras})}), "utf-8")
        new.replace(self.venv / STAMP)

    def _pip(self, *arguments):
        return self.run([self.python, "-m", "pip", *arguments])

    def _check(self, done, problem, advice=""):
        if done.returncode != 0:
            raise InstallError("\n".join(filter(None, (f"{problem}:", tail(done), advice))))


def read_plan(report):
    """The version of torch in a `pip install --report`, and whether it is a build without CUDA.

    A local label says it (2.13.0+cpu). Without one, as on PyPI, the libraries that the build asks for do.
    """
    chosen = next(item["metadata"] for item in json.loads(report)["install"] if item["metadata"]["name"] == "torch")
    label = chosen["version"].partition("+")[2]
    if label:
        return chosen["version"], label == "cpu"
    return chosen["version"], not any(CUDA_PARTS.match(name) for name in chosen.get("requires_dist", ()))


def nvidia_gpu():
    """Whether this machine has an NVIDIA GPU: a device file, or a driver that lists one (WSL has no device file)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    listed = run_command(["nvidia-smi", "-L"])
    return listed.returncode == 0 and "GPU" in listed.stdout


def run_command(command):
    """Run a command without PYTHONPATH, which would hide what the environment lacks."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    try:
        return subprocess.run(
            [str(part) for part in command], env=environment, capture_output=True, text=True, check=False
        )
    except OSError as error:  # an interpreter that is no program, a dangling link
        return subprocess.CompletedProcess(command, 127, "", str(error))


def tail(done, lines=12):
    """The last lines a command printed, indented; where pip and venv say what went wrong."""
    said = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.returncode}, no output"]
    return "\n".join(f"  {line}" for line in said[-lines:])


def oldest_python():
    """Oldest Python that pyproject.toml allows, as (3, 11)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return numbers(re.search(r'^requires-python = ">=([\d.]+)', text, re.MULTILINE).group(1))


def numbers(version):
    """The first two numbers of a version: "3.11.7" as (3, 11)."""
    return tuple(int(part) for part in version.split(".")[:2])


def dotted(version):
    """(3, 10) as 3.10."""
    return ".".join(str(part) for part in version)


def say(stage, text):
    """One line a stage."""
    print(f"install  {stage:<9}{text}", flush=True)


def main(arguments):
    """Install, and end a failure in one message."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", default=".venv", help="folder of the virtual environment")
    parser.add_argument("--extras", default="", help="optional dependency sets, comma-separated")
    parser.add_argument("--constraints", default=str(ROOT / ".ci" / "constraints.txt"), help="file of pinned versions")
    given = parser.parse_args(arguments)
    installer = Installer(
        venv=given.venv,
        extras=given.extras,
        constraints=given.constraints,
        system=platform.system(),
        has_gpu=nvidia_gpu(),
        torch_index=os.environ.get("TORCH_INDEX_URL"),
        run=run_command,
    )
    try:
        installer.install()
    except InstallError as stop:
        print(f"\ninstall stopped: {stop}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("\ninstall stopped: interrupted; the same command goes on from here", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
