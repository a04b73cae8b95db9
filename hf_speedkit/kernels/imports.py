"""Why a package's function is not there: the real exception behind a silent fallback.

transformers catches every exception when it looks for a fast implementation and then says that the package "is not
installed" (5.23, integrations/hub_kernels.py:1017). The import is repeated here in a process of its own, because some
of these packages abort the interpreter when they do not fit the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path

from hf_speedkit.kernels.requirements import FUNCTIONS, INTERNAL_PATHS

IMPORT_TIMEOUT_S = 120.0
"""A hanging import must not hang the job; one that works takes seconds."""

_SCRIPT = """
import importlib, inspect, json, os, sys
def find(package, path, name):
    found = importlib.import_module(package)
    for part in (path.split(".") if path else []) + [name]:
        found = getattr(found, part, None)
    if found is None and path:
        found = getattr(importlib.import_module(package + "." + path), name, None)
    return found
def words(error):
    try:
        return type(error).__name__ + ": " + str(error)
    except BaseException:
        return type(error).__name__
package, paths, file = json.loads(sys.argv[1])
results = {}
for name, path in paths.items():
    where = ".".join([package] + ([path] if path else []) + [name])
    try:
        function = find(package, path, name)
        if function is None:
            place = getattr(sys.modules[package], "__file__", None)
            results[name] = ["lacks", where, None, place]
        else:
            results[name] = ["works", None, list(inspect.signature(function).parameters), None]
    except BaseException as error:
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing == package:
            results[name] = ["absent", None, None, None]
        elif missing.split(".")[0] == package:
            results[name] = ["lacks", where, None, getattr(sys.modules.get(package), "__file__", None)]
        else:
            results[name] = ["fails", words(error), None, None]
with open(file, "w", encoding="utf-8") as stream:
    stream.write(json.dumps(results))
os._exit(0)  # threads that it started, and what it does at exit, are not the question
"""

_SHOWN_CHARACTERS = 400
_SAY_THEIR_VERSION = ("triton", "fla", "causal_conv1d")


class ImportStatus(StrEnum):
    """What became of importing a function."""

    WORKS = "works"
    ABSENT = "absent"
    """The package cannot be found (by a new process, where this one once imported it)."""
    FAILS = "fails"
    """The package is there, and importing it raises, hangs or ends the process."""
    LACKS = "lacks"
    """The package imports, but does not hold the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOutcome:
    """What became of importing one function of a package.

    Args:
        status: see `ImportStatus`.
        version: of the distribution; None where there is no metadata.
        detail: the exception (FAILS) or the full name that is missing (LACKS); None otherwise.
        parameters: names of the function's parameters; None unless it works.
        shadow: file that was imported in the package's name and is not the package's (LACKS); None otherwise.
    """

    status: ImportStatus
    version: str | None = None
    detail: str | None = None
    parameters: tuple[str, ...] | None = None
    shadow: str | None = None


def import_outcomes(
    package: str, functions: Sequence[str], *, timeout_s: float = IMPORT_TIMEOUT_S
) -> Mapping[str, ImportOutcome]:
    """Import `functions` of `package` the way transformers does, in a process of its own.

    Args:
        package: import name.
        functions: names in `requirements.FUNCTIONS`, or of what the package itself holds.
        timeout_s: seconds after which an import counts as failed.

    Returns:
        One outcome per function. An absent package costs nothing, another one a start of Python plus the import.
    """
    if not is_installed(package):
        return dict.fromkeys(functions, ImportOutcome(status=ImportStatus.ABSENT))
    version = installed_version(package)
    results = _import_elsewhere(package, {name: INTERNAL_PATHS.get(name) for name in functions}, timeout_s)
    if isinstance(results, str):
        failed = ImportOutcome(status=ImportStatus.FAILS, version=version, detail=results)
        return dict.fromkeys(functions, failed)
    return {
        name: ImportOutcome(
            status=ImportStatus(status),
            version=version,
            detail=None if detail is None else _one_line(detail),
            parameters=None if parameters is None else tuple(parameters),
            shadow=place if place is not None and not is_of_the_package(place, package) else None,
        )
        for name, (status, detail, parameters, place) in results.items()
    }


def is_installed(package: str) -> bool:
    """Whether a top-level package can be found, without importing it. Says nothing about whether it works.

    A folder of that name without an `__init__.py` (a clone, an output folder) is no package.
    """
    try:
        spec = util.find_spec(package)
    except ValueError:  # already imported, by something that gave it no spec
        return True
    return spec is not None and spec.origin is not None


def installed_version(package: str) -> str | None:
    """Version of a package: what its source says, else its distribution's; None if neither says."""
    found = version_in_its_source(package)
    if found is not None:
        return found
    distribution = _distribution(package)
    return distribution.version if distribution is not None else None


def version_in_its_source(package: str) -> str | None:
    """`__version__` as a kernel package's own file spells it, without importing it; None where it does not say.

    A clone on the path has no metadata, or hides an installed one whose metadata is another version's.
    """
    if package not in _SAY_THEIR_VERSION:
        return None
    try:
        spec = util.find_spec(package)
        text = Path(str(spec.origin)).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    except (ValueError, OSError):
        return None
    found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    return found.group(1) if found else None


def _distribution(package: str) -> metadata.Distribution | None:
    names = {row.distribution.split(">")[0] for row in FUNCTIONS.values() if row.package == package}
    # Another distribution may hold the package as well: fla-core alone is enough for the functions of fla.
    for found in ((*sorted(names), package), metadata.packages_distributions().get(package, ())):
        for name in found:
            try:
                return metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
    return None


def is_of_the_package(file: str, package: str) -> bool:
    """Whether a file lies where the package's distribution was installed, or is built in place (an editable one)."""
    found = _distribution(package)
    return found is not None and is_of_the_distribution(file, found)


def is_of_the_distribution(file: str, found: metadata.Distribution) -> bool:
    """Whether a file lies where a distribution was installed, or the distribution is built in place."""
    editable = '"editable": true' in (found.read_text("direct_url.json") or "")
    return editable or Path(file).resolve().is_relative_to(Path(str(found.locate_file(""))).resolve())


_Results = dict[str, tuple[str, str | None, list[str] | None, str | None]]


def _import_elsewhere(package: str, paths: Mapping[str, str | None], timeout_s: float) -> _Results | str:
    """The results by function, or in words why the process gave none."""
    # Results and last words go through files: a package may print what it likes, close its output, or leave a child
    # behind that holds a pipe open.
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+b") as errors:
        file = Path(folder) / "results"
        # -P: what lies in the working folder must not take a package's name, unless it does so here as well.
        command = [sys.executable, "-P", "-c", _SCRIPT, json.dumps([package, paths, str(file)])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"the import did not end within {timeout_s:.0f} s"
        finally:
            _end(process)
        if file.is_file():
            results: _Results = json.loads(file.read_text(encoding="utf-8"))
            return results
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    last = _one_line(lines[-1]) if lines else "it printed nothing"
    if code < 0:
        return f"the import ends the process with {signal.Signals(-code).name} ({last})"
    return f"the import ends the process with exit code {code} ({last})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it has not ended, with everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _one_line(text: str) -> str:
    """A message of several lines would tear the table that it is put in."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]} ..."
