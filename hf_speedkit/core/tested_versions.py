"""Which versions this release was tested with, and what to say where others are installed. Pure.

The range rests on the runs that docs/versions.md names. Outside it the package works as far as it does: private
parts of other libraries are read with a check, but nobody has run the tests there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

TESTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Python": ("3.11", "3.13"),
        "torch": ("2.11", "2.14"),
        "transformers": ("5.23", "5.24"),
        "trl": ("1.16", "1.16"),
        "accelerate": ("1.15", "1.15"),
        "datasets": ("5.1", "5.2"),
    }
)
"""Lowest and highest release tested, as major.minor: a patch release of either is inside."""


def range_tested(package: str) -> str:
    """The range in words: "5.23", or "2.11 to 2.14"."""
    low, high = TESTED[package]
    return low if low == high else f"{low} to {high}"


def outside_tested(versions: Mapping[str, str]) -> str | None:
    """One warning for everything installed that lies outside the tested range; None where nothing does.

    Args:
        versions: installed version of each package, "Python" among them; what is absent is not judged.
    """
    outside = [
        f"{package} {versions[package]} (tested: {range_tested(package)})"
        for package, (low, high) in TESTED.items()
        if package in versions and not _release(low) <= _release(versions[package]) <= _release(high)
    ]
    if not outside:
        return None
    return (
        f"hf_speedkit was not tested with {', '.join(outside)}. It goes on; should something fail, try those versions "
        "first"
    )


def _release(version: str) -> tuple[int, ...]:
    """(major, minor) of a version; 5.24.0.dev0 counts as 5.24."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
