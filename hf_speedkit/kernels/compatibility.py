"""Whether versions and a GPU are known to work together, decided before any weight is loaded. Pure.

The facts are rows (`compatibility_rows.py`), each with its source; this file only matches them. A combination that no
row speaks of is unknown, never "ok": the probe on the device decides then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


class Compatibility(StrEnum):
    """What is known about a combination."""

    OK = "ok"
    """Somebody ran it, forward and backward, and a source says so."""
    BLOCKED = "blocked"
    """It is known to fail, to abort or to compute wrong numbers."""
    UNKNOWN = "unknown"
    """No row speaks of it (or one says that it needs a closer look): the probe decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What decides whether kernels work: device and versions.

    Args:
        capability: compute capability of this rank's GPU, (major, minor); None without one.
        versions: version of each installed distribution, absent ones left out.
        python: interpreter version.
        cuda: CUDA version that torch was built for; None for a build without CUDA.
        nvcc: whether a CUDA compiler was found.
        amd: architecture of an AMD GPU ("gfx90a"), whose capability has the numbers of a Hopper; None for others.
        unused: distributions that are installed and that fla is told by its switches not to use.
        variables: environment variables that a row looks at and that are set.
        torch_lacks: architectures that torch was built for, where this GPU's is not among them; empty where it is.
    """

    capability: tuple[int, int] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    cuda: str | None = None
    nvcc: bool = False
    amd: str | None = None
    unused: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    torch_lacks: tuple[str, ...] = ()

    @property
    def architecture(self) -> str | None:
        """Name of the GPU architecture as compilers spell it ("sm90"); None without a GPU."""
        if self.amd is not None:
            return self.amd
        return None if self.capability is None else f"sm{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One known combination.

    Args:
        subject: import name of the package, or name of the attention implementation, that it is about.
        verdict: see `Compatibility`.
        reason: what happens, one sentence.
        source: where that is known from.
        architectures: GPUs it holds on, "sm90" or "sm8*"; empty for every machine, one without a GPU included.
        versions: distribution -> specifier; all must be installed and match.
        absent: distributions that must not be installed.
        nvcc: True or False if it holds only with or without a CUDA compiler.
        cuda: specifier of torch's CUDA version.
        when_set: environment variable without which it does not hold.
        unless_set: environment variable that lifts it.
        pins: requirements to install instead.
        fix: what mends it where an installation does not.
    """

    subject: str
    verdict: Compatibility
    reason: str
    source: str
    architectures: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    nvcc: bool | None = None
    cuda: str | None = None
    when_set: str | None = None
    unless_set: str | None = None
    pins: tuple[str, ...] = ()
    fix: str | None = None

    def matches(self, stack: Stack) -> bool:
        """Whether this row speaks of `stack`."""
        if self.architectures and not any(_is_of(stack.architecture, name) for name in self.architectures):
            return False
        if self.nvcc is not None and self.nvcc != stack.nvcc:
            return False
        if self.when_set is not None and self.when_set not in stack.variables:
            return False
        if self.unless_set is not None and self.unless_set in stack.variables:
            return False
        used = {name: version for name, version in stack.versions.items() if name not in stack.unused}
        if any(name in used for name in self.absent):
            return False
        if self.cuda is not None and not _within(stack.cuda, self.cuda):
            return False
        return all(_within(used.get(name), wanted) for name, wanted in self.versions.items())

    @property
    def command(self) -> str | None:
        """What mends it, as a command."""
        if self.pins:
            return "pip install " + " ".join(f'"{pin}"' for pin in self.pins)
        return self.fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the rows say about one subject on one machine.

    Args:
        verdict: see `Compatibility`.
        reason: of the row that decided; None where no row matched.
        source: likewise.
        fix: the command that mends it; None where nothing needs mending or nothing mends it.
        pins: requirements to install beside the package.
    """

    verdict: Compatibility
    reason: str | None = None
    source: str | None = None
    fix: str | None = None
    pins: tuple[str, ...] = ()


def decide(subject: str, stack: Stack, rows: Sequence[Row] | None = None) -> Decision:
    """Say whether a package can be trained with on this machine, as far as it is known.

    Args:
        subject: "fla", "causal_conv1d", "flash_attention_4", ...; a subject without rows is unknown.
        stack: device and versions.
        rows: the table; the one that comes with this package if None.

    Returns:
        The first BLOCKED row that matches; else the first UNKNOWN one, which carries a warning; else the first OK one;
        else UNKNOWN without a reason. A failure outweighs a success: tables are never complete.
    """
    if rows is None:
        from hf_speedkit.kernels.compatibility_rows import ROWS

        rows = ROWS
    matching = [row for row in rows if row.subject == subject and row.matches(stack)]
    for verdict in (Compatibility.BLOCKED, Compatibility.UNKNOWN, Compatibility.OK):
        for row in matching:
            if row.verdict is verdict:
                return Decision(verdict=verdict, reason=row.reason, source=row.source, fix=row.command, pins=row.pins)
    return Decision(verdict=Compatibility.UNKNOWN)


def install_pins(subject: str, stack: Stack, versions: Mapping[str, str]) -> tuple[str, ...]:
    """What must be installed beside a package that is absent now, so that it works once it is there.

    Args:
        subject: as for `decide`.
        stack: as it is.
        versions: distributions that the installation would bring, with the versions it would choose.
    """
    after = MappingProxyType({**versions, **stack.versions})
    decision = decide(subject, replace(stack, versions=after))
    return decision.pins if decision.verdict is Compatibility.BLOCKED else ()


def _is_of(architecture: str | None, pattern: str) -> bool:
    if architecture is None:
        return False
    return architecture.startswith(pattern[:-1]) if pattern.endswith("*") else architecture == pattern


def _within(version: str | None, wanted: str) -> bool:
    """Whether an installed version is in a range; builds of a commit ("3.6.0+git12") count as the release."""
    if version is None:
        return False
    try:
        parsed = Version(version)
    except InvalidVersion:
        return False
    return SpecifierSet(wanted).contains(parsed, prereleases=True)
