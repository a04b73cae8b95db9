"""What pyproject.toml asks of other packages, read from its lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A package that is needed.

    Args:
        line: what pip is asked for, "transformers>=5.23,<6".
        lowest: the lowest version that will do; None for any.
        optional: for some jobs only, in an extra.
    """

    line: str
    lowest: str | None
    optional: bool


def needs_in(lines: Iterable[str], *, optional: bool = False) -> Mapping[str, Need]:
    """Needs by the name of the distribution, lower case with dashes.

    Args:
        lines: as in pyproject.toml, or as metadata has them ("peft>=0.20; extra == 'lora'").
        optional: all of them are of extras.
    """
    found: dict[str, Need] = {}
    for whole in lines:
        line, _, marker = whole.partition(";")
        name = re.match(r"[\w.-]+", line.strip())
        if name is None:
            continue
        lowest = re.search(r">=\s*([\d.]+)", line)
        need = Need(line=line.strip(), lowest=lowest and lowest[1], optional=optional or "extra" in marker)
        found.setdefault(same_name(name[0]), need)
    return found


def is_below(version: str, lowest: str) -> bool:
    """Whether a release is older than another; what images have, 5.23.0.dev0 and 2.11.0a0+nv26.4, counts as theirs.

    What a build without git's tags calls itself, "0.0.0" or "0+unknown", says nothing and is not.
    """
    return () < _numbers(version) < _numbers(lowest)


def same_name(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in release[1].split(".")] if release else []
    while numbers and numbers[-1] == 0:  # 1.16 is 1.16.0
        numbers.pop()
    return tuple(numbers)
