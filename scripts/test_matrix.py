#!/usr/bin/env python3
"""Run the CPU tests on each Python, and on the lowest and the newest versions, that pyproject.toml allows.

    python scripts/test_matrix.py --list                      # the environments, and which this machine can make
    python scripts/test_matrix.py                             # all of them, one after another
    python scripts/test_matrix.py lowest newest -- tests/trainer -q

`make test-matrix` calls it; CI does not: an environment takes 2 to 7 GB of disk and minutes. Each is made by
scripts/install.py and removed when it passed. With --write the result replaces the table in docs/versions.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import install

ROOT = Path(__file__).resolve().parent.parent
PINNED = ROOT / ".ci" / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")
STACK = ("torch", "transformers", "trl", "accelerate", "datasets")
BEGIN, END = "<!-- matrix: begin, made by `make test-matrix` -->", "<!-- matrix: end -->"


@dataclass(frozen=True)
class Row:
    """One environment.

    Args:
        name: what it is called on the command line.
        python: "3.12".
        constraints: lines of its constraints file.
    """

    name: str
    python: str
    constraints: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of one environment: versions that were installed, and pytest's last line or why there is none."""

    row: Row
    versions: dict[str, str]
    passed: bool
    said: str


def rows():
    """The environments: every Python with CI's pins, then the lowest and the newest versions of the stack."""
    pins = tuple(line for line in PINNED.read_text(encoding="utf-8").splitlines() if "==" in line)
    found = [Row(f"python{version}", version, pins) for version in PYTHONS]
    # The rest as pip chooses: CI's pins are of today, and an older datasets asks for an older dill.
    found.append(Row("lowest", PYTHONS[0], tuple(f"{name}=={low}" for name, low in lower_bounds().items())))
    # As `pip install hf-speedkit` would choose today: nothing is pinned.
    found.append(Row("newest", PYTHONS[-1], ()))
    return found


def lower_bounds():
    """What pyproject.toml names as the lowest version of each package of the stack."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.match(r"([\w-]+)>=([\d.]+)", need) for need in project["dependencies"])
    return {match[1]: match[2] for match in found if match and match[1] in STACK}


def interpreter(version):
    """A Python of this version on PATH or under pyenv; None where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python3"))]
    for place in filter(None, places):
        said = install.run_command([place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout.strip()
        if said == version:
            return str(place)
    return None


def run(row, folder, arguments):
    """Make the environment, run the tests in it, and remove it if they passed."""
    python = interpreter(row.python)
    if python is None:
        return Outcome(row, {}, False, f"not run: no Python {row.python} here")
    venv, constraints = folder / row.name, folder / f"{row.name}.txt"
    constraints.write_text("\n".join(row.constraints) + "\n", encoding="utf-8")
    maker = install.Installer(
        venv=venv, extras="dev", constraints=constraints, system="Linux", has_gpu=install.nvidia_gpu(),
        torch_index=os.environ.get("TORCH_INDEX_URL"), run=install.run_command, base_python=python,
    )  # fmt: skip
    try:
        maker.install()
    except install.InstallError as stop:
        print(stop, flush=True)
        return Outcome(row, {}, False, f"could not be installed: {str(stop).splitlines()[0]}")
    versions = installed(maker.python)
    code, said = pytest(maker.python, arguments)
    if code == 0:
        shutil.rmtree(venv)
    return Outcome(row, versions, code == 0, said)


def installed(python):
    """Versions of Python and the stack in an environment."""
    code = (
        "import platform; from importlib.metadata import version; print(platform.python_version(), "
        f"*(version(name) for name in {STACK!r}))"
    )
    return dict(zip(("Python", *STACK), install.run_command([python, "-c", code]).stdout.split(), strict=False))


def pytest(python, arguments):
    """Run the tests; gives the exit code and pytest's closing line."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    kept |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [
        str(python),
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-rfE",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    done = subprocess.Popen(command, cwd=ROOT, env=kept, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in done.stdout:
        print(line, end="", flush=True)
        last = line.strip("= \n") or last
    code = done.wait()
    closing = re.search(r"\d+ (passed|failed|error).*?(?= in [\d.]+s)", last)
    return code, closing[0] if closing else f"ended without a result, exit {code}"


def table(outcomes, what):
    """The outcomes as Markdown."""
    head = ["environment", "Python", *STACK, "result"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for one in outcomes:
        cells = [one.row.name, *(one.versions.get(name, "-") for name in ("Python", *STACK)), one.said]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"Tests: `{what}`, {time.strftime('%Y-%m-%d')}, no GPU.", "", *lines])


def written(document, text):
    """`document` with `text` between its markers."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"no place for the table: {BEGIN} ... {END} is missing")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(arguments):
    """Run what was asked for; 0 if every environment passed."""
    ours, _, theirs = " ".join(arguments).partition(" -- ") if "--" in arguments else (" ".join(arguments), "", "")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments; all of them by default")
    parser.add_argument("--list", action="store_true", help="name the environments and run nothing")
    parser.add_argument("--folder", type=Path, help="where environments are made; a temporary folder by default")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table between the markers of this file")
    given = parser.parse_args(ours.split())
    known = {row.name: row for row in rows()}
    unknown = sorted(set(given.names) - set(known))
    if unknown:
        parser.error(f"no such environment: {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = [known[name] for name in given.names or known]
    if given.list:
        for row in chosen:
            stack = [pin for pin in row.constraints if pin.split("==")[0] in STACK]
            print(f"{row.name:<11} {interpreter(row.python) or 'no Python ' + row.python:<40} "
                  f"{', '.join(stack) or 'the newest of everything'}")  # fmt: skip
        return 0
    folder = given.folder or Path(tempfile.mkdtemp(prefix="speedkit_matrix_"))
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = [run(row, folder, theirs.split()) for row in chosen]
    text = table(outcomes, f"pytest {theirs}".strip())
    print(f"\n{text}")
    if given.write:
        given.write.write_text(written(given.write.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0 if all(one.passed for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
