"""The installed stack held against the tested range. Reads metadata; imports nothing heavy."""

from __future__ import annotations

import logging
import platform
from importlib import metadata

from hf_speedkit.core.tested_versions import TESTED, outside_tested

logger = logging.getLogger(__name__)


def untested_versions() -> str | None:
    """What is installed outside the tested range, as a sentence; None where nothing is."""
    versions = {"Python": platform.python_version()}
    for package in TESTED:
        try:
            versions.setdefault(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue  # absent: nothing to judge; "Python" is no distribution
    return outside_tested(versions)


def warn_of_untested_versions() -> None:
    """Warn, once a call, where something outside the tested range is installed."""
    found = untested_versions()
    if found is not None:
        logger.warning("%s", found)
