"""Why a package's function is not there: the real exception behind a silent fallback.

transformers catches every exception when it looks for a fast implementation and then says that the package "is not
installed" (5.23, integrations/hub_kernels.py:1017). The import is repeated here in a process of its own, because some
of these packages abort the interpreter when they do not fit the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util

from hf_speedkit.kernels.requirements import FUNCTIONS, INTERNAL_PATHS

IMPORT_TIMEOUT_S = 120.0
"""A hanging import must not hang the job; one that works takes seconds."""

_MARK = "speedkit-import-result:"
_SCRIPT = f"""
import importlib, inspect, json, sys
def find(package, path, name):
    found = importlib.import_module(package)
    for part in (path.split(".") if path else []) + [name]:
        found = getattr(found, part, None)
    if found is None and path:
        found = getattr(importlib.import_module(package + "." + path), name, None)
    return found
package, paths = json.loads(sys.argv[1])
results = {{}}
for name, path in paths.items():
    where = ".".join([package] + ([path] if path else []) + [name])
    try:
        function = find(package, path, name)
        if function is None:
            results[name] = ["lacks", where, None]
        else:
            results[name] = ["works", None, list(inspect.signature(function).parameters)]
    except BaseException as error:
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing == package:
            results[name] = ["absent", None, None]
        elif missing.split(".")[0] == package:
            results[name] = ["lacks", where, None]
        else:
            results[name] = ["fails", type(error).__name__ + ": " + str(error), None]
print({_MARK!r} + json.dumps(results))
"""


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
    """

    status: ImportStatus
    version: str | None = None
    detail: str | None = None
    parameters: tuple[str, ...] | None = None


def import_outcomes(
    package: str, functions: Sequence[str], *, timeout_s: float = IMPORT_TIMEOUT_S
) -> Mapping[str, ImportOutcome]:
    """Import `functions` of `package` the way transformers does, in a process of its own.

    Args:
        package: import name.
        functions: names in `requirements.FUNCTIONS`.
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
            detail=detail,
            parameters=None if parameters is None else tuple(parameters),
        )
        for name, (status, detail, parameters) in results.items()
    }


def is_installed(package: str) -> bool:
    """Whether a top-level package can be found, without importing it. Says nothing about whether it works."""
    try:
        return util.find_spec(package) is not None
    except ValueError:  # already imported, by something that gave it no spec
        return True


def installed_version(package: str) -> str | None:
    """Version of the distribution that a package comes from; None if there is no metadata for it."""
    names = {row.distribution.split(">")[0] for row in FUNCTIONS.values() if row.package == package}
    for name in (*sorted(names), package):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _import_elsewhere(
    package: str, paths: Mapping[str, str | None], timeout_s: float
) -> dict[str, tuple[str, str | None, list[str] | None]] | str:
    """The results by function, or in words why the process gave none."""
    command = [sys.executable, "-c", _SCRIPT, json.dumps([package, paths])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"the import did not end within {timeout_s:.0f} s"
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            results: dict[str, tuple[str, str | None, list[str] | None]] = json.loads(line.removeprefix(_MARK))
            return results
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    if done.returncode < 0:
        return f"the import ends the process with {signal.Signals(-done.returncode).name} ({last})"
    return f"the import ends the process with exit code {done.returncode} ({last})"
