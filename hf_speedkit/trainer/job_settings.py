"""A job's settings from its YAML file and its command line, before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_speedkit.core.errors import ConfigurationError


def options(argv: Sequence[str]) -> list[tuple[str, str]]:
    """The command line as (name, value) pairs: `--name value`, `--name=value`, or `--name` for true.

    Hyphens in names become underscores, as transformers' argument parser takes them.
    """
    pairs = []
    for word, following in zip(argv, [*argv[1:], "--"], strict=False):
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            value = value if given else ("true" if following.startswith("--") else following)
            pairs.append((name.replace("-", "_"), value))
    return pairs


def without_option(argv: Sequence[str], name: str) -> list[str]:
    """The command line without `--name value` and `--name=value`, wherever they stand."""
    kept: list[str] = []
    value_follows = False
    for word in argv:
        option, given, _ = word.partition("=")
        if option == f"--{name}":
            value_follows = not given
            continue
        if not value_follows or word.startswith("--"):
            kept.append(word)
        value_follows = False
    return kept


def settings(config: Path, argv: Sequence[str]) -> dict[str, Any]:
    """The YAML file's settings with those of the command line on top, as plain values.

    Raises:
        ConfigurationError: the file holds something else than `key: value` lines.
    """
    values: object
    try:
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        values = error
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{str(config)!r} holds no settings",
            evidence=(f"read as YAML it is: {' '.join(str(values).split()) or 'empty'}",),
            mend="write one `key: value` a line",
        )
    return values | {name: _plain(value) for name, value in options(argv)}


def _plain(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:  # "a: b: c" or "@me": a text like any other
        return value
