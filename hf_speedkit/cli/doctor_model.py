"""The model that doctor is asked about: its config by any of three names, or what is wrong with the name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

ACCEPTED = (
    "MODEL is a folder with a config.json, a config file, or the id of a model on the Hub whose config is in the local "
    "cache (doctor downloads nothing)"
)


def find_config(model: str) -> Any:
    """The transformers config of MODEL, without weights and without a network.

    Raises:
        typer.BadParameter: nothing there, no config in it, or one that cannot be read (exit code 2).
    """
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise _refused(f"no config.json in {path}. {ACCEPTED}.")
    if path.exists():
        return _read(path)
    if _is_path(model):
        raise _refused(f"{model}: no such file or directory. {ACCEPTED}.")
    return _from_cache(model)


def _is_path(model: str) -> bool:
    """Whether a name that does not exist can only have been a path: ids are `name` or `owner/name`."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) is None or model.startswith(".") or model.endswith(".json")


def _read(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(f"{path}: its config cannot be read ({_first_line(error)})") from error


def _from_cache(model: str) -> Any:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers import AutoConfig
    from transformers.utils import cached_file

    try:
        cached = cached_file(model, "config.json", local_files_only=True)
    except (OSError, ValueError, LocalEntryNotFoundError):
        cached = None
    if cached is None:
        raise _refused(
            f"{model}: no file or folder of that name here, and its config is not in the local cache ({HF_HUB_CACHE}). "
            f"{ACCEPTED}.\nGet it with:  hf download {model} config.json"
        )
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(f"{model}: its config in the local cache cannot be read ({_first_line(error)})") from error


def _refused(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="MODEL")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
