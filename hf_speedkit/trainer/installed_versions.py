"""The installed stack held against what is needed and what was tested. Reads metadata; imports nothing heavy."""

from __future__ import annotations

import logging
import platform
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hf_speedkit.core.errors import InstallationError, SpeedkitError
from hf_speedkit.core.needed_versions import Need, is_below, needs_in, same_name
from hf_speedkit.core.tested_versions import TESTED, outside_tested
from hf_speedkit.kernels.imports import is_installed, is_of_the_distribution

logger = logging.getLogger(__name__)

_OWN = "hf-speedkit"
# Those whose package is called otherwise.
_PACKAGES = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml", "flash-linear-attention": "fla"}
# A job has no command line, and does without the other two: no GPU utilisation, and traces are read slowly.
_NO_PART_OF_A_JOB = ("typer",)
_MAY_BE_ABSENT = ("msgspec", "nvidia-ml-py")


def require_versions(*names: str) -> None:
    """Refuse packages that are absent, or older than pyproject.toml asks for.

    Costs some 20 ms for all. A checkout's own pyproject.toml says what is needed, else the metadata of the installed
    package; where neither is there (a copied folder), nothing is refused.

    Args:
        names: distributions to look at; all that a job needs unless given.

    Raises:
        InstallationError: which they are, where they lie, and the pip command for all of them.
    """
    needs = needed()
    required = [name for name, need in needs.items() if not need.optional and name not in _NO_PART_OF_A_JOB]
    lacks = {name: said for name in names or required if (said := _lack(name, needs)) is not None}
    if lacks:
        raise InstallationError(
            f"hf_speedkit needs other packages than are installed: {', '.join(f'{n} {s}' for n, s in lacks.items())}",
            evidence=tuple(f"{name}: {place}" for name in lacks if (place := _place(name)) is not None),
            mend=f"pip install {' '.join(wanted(name, needs) for name in lacks)}",
        )


@contextmanager
def old_versions_told() -> Iterator[None]:
    """Tell what fails inside as the package that is too old for it, if there is one; costs nothing otherwise.

    Raises:
        InstallationError: see `require_versions`.
    """
    try:
        yield
    except SpeedkitError:
        raise
    except Exception as error:
        try:
            require_versions()
        except InstallationError as stop:
            raise stop from error
        raise


def too_old(name: str, needs: Mapping[str, Need] | None = None) -> str | None:
    """Say that a package is older than we ask for, as the end of a sentence about it; None where it is not.

    A package that is imported from elsewhere than its metadata says (a clone on PYTHONPATH) has no known version, and
    is not judged.

    Args:
        name: of the distribution.
        needs: `needed()` unless given.
    """
    need = (needed() if needs is None else needs).get(name)
    version, package = _version(name), package_of(name)
    if version is None or need is None or need.lowest is None or not is_below(version, need.lowest):
        return None
    file = imported_file(package)
    if file is not None and not is_of_the_distribution(file, metadata.distribution(name)):
        return None
    return f"is {version}, older than {need.lowest}"


def lacking(name: str, *packages: str) -> str | None:
    """Say what keeps an optional package from being used, as the end of a sentence about it; None where nothing does.

    Args:
        name: of the distribution.
        packages: what it is imported as, one of several is enough; `name` unless given.
    """
    return too_old(name) if any(map(is_installed, packages or (name,))) else "is not installed"


def _lack(name: str, needs: Mapping[str, Need]) -> str | None:
    if _version(name) is not None:
        return too_old(name, needs)
    return None if name in _MAY_BE_ABSENT or is_installed(package_of(name)) else "is not installed"


def wanted(name: str, needs: Mapping[str, Need] | None = None) -> str:
    """What pip is to be asked for: with the versions that this package takes, where it says so."""
    need = (needed() if needs is None else needs).get(same_name(name))
    return name if need is None else f'"{need.line}"'


def needed() -> Mapping[str, Need]:
    """What this package needs, by distribution; what a job needs first."""
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    if project.get("name") == _OWN:  # a checkout: its code runs, whatever an older installation's metadata says
        extras = project["optional-dependencies"].values()
        return {
            **needs_in((line for lines in extras for line in lines), optional=True),
            **needs_in(project["dependencies"]),
        }
    try:
        return needs_in(metadata.requires(_OWN) or ())
    except metadata.PackageNotFoundError:
        return {}


def package_of(name: str) -> str:
    """The package that a distribution is imported as."""
    return _PACKAGES.get(name, name.replace("-", "_"))


def distribution_of(package: str) -> str:
    """The distribution of ours that is imported as `package`."""
    return next((name for name, other in _PACKAGES.items() if other == package), package)


def imported_file(package: str) -> str | None:
    """The file that is imported in a package's name; None without one."""
    try:
        spec = find_spec(package)
    except ValueError:  # imported, by something that gave it no spec
        return getattr(sys.modules[package], "__file__", None)
    return None if spec is None else spec.origin


def untested_versions() -> str | None:
    """What is installed outside the tested range, as a sentence; None where nothing is."""
    versions = {"Python": platform.python_version()}
    for package in TESTED:
        version = _version(package)  # absent: nothing to judge; "Python" is no distribution
        if version is not None:
            versions.setdefault(package, version)
    return outside_tested(versions)


def warn_of_untested_versions() -> None:
    """Warn, once a call, where something outside the tested range is installed."""
    found = untested_versions()
    if found is not None:
        logger.warning("%s", found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _place(name: str) -> str | None:
    version = _version(name)
    return None if version is None else f"{version} in {metadata.distribution(name).locate_file('')}"
