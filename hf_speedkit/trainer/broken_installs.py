"""A package that is installed and cannot be imported: which one, its version, and the command that mends it. Light.

Such a failure surfaces anywhere: `from trl import ...` runs code of six packages, their lazy modules answer with a
RuntimeError that names none of them, and an AttributeError below `from hf_speedkit import ...` is shown by Python as
"cannot import name".
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import FrameType, ModuleType

from hf_speedkit.core.errors import InstallationError, SpeedkitError
from hf_speedkit.kernels.imports import is_installed, is_of_the_package
from hf_speedkit.trainer.hardware import exit_with
from hf_speedkit.trainer.installed_versions import distribution_of, imported_file, untested_versions, wanted

_SHOWN_CHARACTERS = 400
_INTERRUPTED = 130  # as shells have it: 128 and the signal's number
_OWN = "hf_speedkit"
_FOLDERS = f"{os.sep}__init__.py"


def broken_install(error: BaseException) -> InstallationError | None:
    """Say which package a failed import is to blame on; None for an error that is no failed import.

    One is: a package's own code raised while it was imported, or a name was asked of a package that has not got it.

    Args:
        error: as it was caught.

    Source: `__cause__` (trl's and transformers' lazy modules raise from it), the traceback's frames, and the names
    that ImportError and AttributeError carry.
    """
    homes = metadata.packages_distributions()
    for cause in _causes(error):
        found = _importing(cause, homes)
        if found is not None:
            return _explained(cause, *found, homes)
    return None


@contextmanager
def refusals_told() -> Iterator[None]:
    """Around a script's `main`: what we refuse ends it with a message alone, a broken package with one as last words.

    Exits with code 2; after Ctrl-C with 130, where it was and what is saved of the run. See `exit_with`.
    """
    try:
        yield
    except SpeedkitError as stop:
        exit_with(_for_a_script(stop))
    except KeyboardInterrupt as stop:
        frame = traceback.extract_tb(stop.__traceback__)[-1]
        place = f"  it was at {frame.filename}:{frame.lineno}, in {frame.name}"
        exit_with("\n".join([*getattr(stop, "__notes__", ["Interrupted."]), place]), _INTERRUPTED)
    except Exception as error:
        broken = broken_install(error)
        if broken is None:
            raise
        traceback.print_exception(error)  # whose fault it is gets guessed at; a report needs the whole
        exit_with(broken)


def _for_a_script(stop: SpeedkitError) -> SpeedkitError:
    """A line of Python that mends `dataset` with what makes a file of it: a recipe's user has settings alone."""
    if stop.mend is None or re.match(r"(roles = .*; )?dataset = ", stop.mend) is None:
        return stop
    then = '          in Python, on the rows of dataset_name; then dataset.to_json("mended.jsonl"), and here '
    mend = f"{stop.mend}\n{then}--dataset_name mended.jsonl"
    return type(stop)(stop.what, evidence=stop.evidence, mend=mend, regardless=stop.regardless)


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, the first cause first."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.insert(0, cause)
        cause = cause.__cause__
    return chain


def _importing(error: BaseException, homes: Mapping[str, object]) -> tuple[str, str] | None:
    """The package whose import failed, and the one that lies at the bottom of it; None where nothing was imported."""
    frames = [(_top(str(f.f_globals.get("__name__"))), f) for f, _ in traceback.walk_tb(error.__traceback__)]
    frames = [(name, frame) for name, frame in frames if name != "importlib"]
    others = [(name, frame) for name, frame in frames if name in homes and name != _OWN]
    running = [name for name, frame in others if _is_a_module_that_runs(frame)]
    asked = _asked_of(error)
    if asked not in homes and not isinstance(error, ModuleNotFoundError):
        asked = None
    if running:
        return running[-1], asked or others[-1][0]
    # `from trl import Missing` in our own code: the import statement itself raised.
    by_us = bool(frames) and not others and frames[-1][0] == _OWN
    return (asked, asked) if asked is not None and asked != _OWN and by_us and isinstance(error, ImportError) else None


def _is_a_module_that_runs(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>"


def _asked_of(error: BaseException) -> str | None:
    """The package that a name was asked of and that has not got it, as the exception says."""
    if isinstance(error, ImportError):
        return _top(error.name) if error.name else None
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return _top(error.obj.__name__)
    # torch's own __getattr__ raises with the words alone.
    named = re.match(r"module '([\w.]+)' has no attribute", str(error)) if isinstance(error, AttributeError) else None
    return _top(named[1]) if named else None


def _top(module: str) -> str:
    return module.partition(".")[0]


def _explained(
    error: BaseException, importing: str, culprit: str, homes: Mapping[str, Sequence[str]]
) -> InstallationError:
    missing = isinstance(error, ModuleNotFoundError) and culprit not in homes and not is_installed(culprit)
    packages = [importing] if missing else list(dict.fromkeys((importing, culprit)))
    pip = "pip install"
    wanted = " ".join(_wanted(name, homes) for name in packages)
    if missing and importing == culprit:
        return InstallationError(f"the package {culprit} is not installed", mend=f"{pip} {wanted}")
    files = {name: imported_file(name) for name in packages}
    shadows = [file for name, file in files.items() if file is not None and not is_of_the_package(file, name)]
    rename = f"rename {shadows[0].removesuffix(_FOLDERS)}, which is imported in a package's place" if shadows else None
    # pip completes what a package needs where it is asked for one that is there. Torch's libraries are packages too.
    how = "" if missing else "--force-reinstall " if "torch" in packages else "--force-reinstall --no-deps "
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN_CHARACTERS]}"
    lines = [f"{name} {_version(name, homes)}: {file}" for name, file in files.items()]
    # transformers looks at a few of its own packages as it is imported, and says what it asks for.
    asked = re.match(r"([\w.-]+[<>=!~]\S*) is required", str(error))
    how, wanted = ("", f'"{asked[1]}"') if asked else (how, wanted)
    return InstallationError(
        f"{importing} {_version(importing, homes)} is installed and cannot be imported: {said}",
        evidence=tuple(filter(None, (*lines, untested_versions()))),
        mend=rename or f"{pip} {how}{wanted}",
    )


def _version(package: str, homes: Mapping[str, Sequence[str]]) -> str:
    return metadata.version(homes[package][0]) if package in homes else "(of no known version)"


def _wanted(package: str, homes: Mapping[str, Sequence[str]]) -> str:
    return wanted(homes[package][0] if package in homes else distribution_of(package))
