"""Which functions a caller insists on, where that is not every function that training calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.records import KernelCheck, KernelRequirement, KernelVerdict

Requirement = str | KernelRequirement
"""A function by its name in the checks ("chunk_gated_delta_rule", "attention", "rms_norm"), or its record."""

_WRONG = (KernelVerdict.BROKEN, KernelVerdict.FORWARD_ONLY, KernelVerdict.NO_BOUNDARIES)
"""What learns something else, and not only slowly: nobody can do without these being right."""


def checked(requirements: Sequence[Requirement] | Requirement | None) -> tuple[Requirement, ...] | None:
    """What a caller insists on as a tuple; one function may stand by itself.

    Raises:
        ConfigurationError: something else than names and records.
    """
    if requirements is None:
        return None
    given: Any = requirements
    wanted = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    strange = [entry for entry in wanted if not isinstance(entry, str | KernelRequirement)]
    if strange:
        raise ConfigurationError(
            f"requirements are names of functions, not {strange[0]!r}",
            mend='requirements=("chunk_gated_delta_rule", "attention"), or None for every function that training calls',
        )
    return wanted


def names_of(requirements: Sequence[Requirement]) -> tuple[str, ...]:
    """The functions' names; a record stands for its function."""
    return tuple(entry if isinstance(entry, str) else entry.function for entry in requirements)


def demanded(
    checks: Sequence[KernelCheck], requirements: Sequence[Requirement] | None
) -> tuple[tuple[KernelCheck, ...], tuple[KernelCheck, ...]]:
    """Checks that must be FUSED, and those that need not be.

    Args:
        checks: what was found.
        requirements: the functions insisted on; None for all that were found.

    Returns:
        (demanded, others). Demanded too is whatever was found to compute wrong numbers or to let documents see one
        another. A function that no layer was seen to call is demanded as UNVERIFIED: what was insisted on and is not
        there, or is misspelt, must not pass.
    """
    if requirements is None:
        return tuple(checks), ()
    names = names_of(checked(requirements) or ())
    found = {check.function for check in checks}
    missing = tuple(_not_called(name, found) for name in dict.fromkeys(names) if name not in found)
    held = tuple(check for check in checks if check.function in names or check.verdict in _WRONG)
    return (*held, *missing), tuple(check for check in checks if check not in held)


def _not_called(name: str, found: set[str]) -> KernelCheck:
    return KernelCheck(
        function=name,
        verdict=KernelVerdict.UNVERIFIED,
        layer="no layer",
        layers=0,
        layers_total=0,
        evidence=f"found: {', '.join(sorted(found)) or 'nothing'}",
        reason="it is required, and no layer of this model was seen to call it",
        fix=f"leave {name!r} out of requirements, or correct its name",
    )
