"""The model that doctor is asked about: its config by any of three names, or what is wrong with the name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer

ACCEPTED = (
    "MODEL is a folder with a config.json, a config file, or the id of a model on the Hub whose config is in the local "
    "cache (doctor downloads nothing)"
)


_HUB = ("https://huggingface.co/", "https://hf.co/", "hf.co/", "huggingface.co/")


def find_config(model: str) -> Any:
    """The transformers config of MODEL, without weights and without a network.

    Raises:
        typer.BadParameter: nothing there, no config in it, or one that cannot be read (exit code 2).
    """
    name = next((model.removeprefix(start) for start in _HUB if model.startswith(start)), model)
    path = Path(name).expanduser()
    if not path.exists() and not name.startswith((".", "/", "~")):
        name = name.rstrip("/")  # as a browser and a shell's completion leave it
    if not name.strip():
        raise _refused(f"no name was given. {ACCEPTED}.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise _refused(f"no config.json in {path}{_adapter_of(path)}. {ACCEPTED}.")
    if path.exists():
        return _read(path, path / "config.json" if path.is_dir() else path)
    if _is_path(name):
        raise _refused(f"{model}: no such file or directory. {ACCEPTED}.{_meant(model)}")
    return _from_cache(name)


def _adapter_of(folder: Path) -> str:
    """Names the base model of a folder that holds an adapter only."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f": it holds an adapter; ask about the model that it is for:  hf-speedkit doctor {base}"


def _meant(name: str) -> str:
    from hf_speedkit.trainer.setting_names import nearest_path

    near = nearest_path(Path(name).expanduser())
    return "" if near is None else f"\nOr was {near} meant?"


def _is_path(model: str) -> bool:
    """Whether a name that does not exist can only have been a path: ids are `name` or `owner/name`."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) is None or model.startswith(".") or model.endswith(".json")


def _read(path: Path, file: Path) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise _refused(f"{file} is no JSON file ({_first_line(error)}). {ACCEPTED}.") from error
    if not isinstance(content, dict):
        raise _refused(f"{file} holds no config (it is a {type(content).__name__}). {ACCEPTED}.")
    return _config_of(str(path), f"{path}: its config", content)


def _from_cache(model: str) -> Any:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers.utils import cached_file

    try:
        cached = cached_file(model, "config.json", local_files_only=True)
    except (OSError, ValueError, LocalEntryNotFoundError):
        cached = None
    if cached is None:
        raise _refused(
            f"{model}: no file or folder of that name here, and its config is not in the local cache ({HF_HUB_CACHE}). "
            f"{ACCEPTED}.\nGet it with:  hf download {model} config.json{_meant(model)}"
        )
    content = json.loads(Path(cached).read_text(encoding="utf-8-sig"))
    return _config_of(model, f"{model}: its config in the local cache", content)


def _config_of(name: str, what: str, content: dict[str, Any]) -> Any:
    """The config, with a text part that is one; foreign configs raise whatever they like while they are read."""
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = content.get("model_type")
    if "auto_map" in content and model_type not in CONFIG_MAPPING:
        raise _refused(
            f"{what} needs code that comes with the model (model_type {model_type!r}): doctor runs no foreign code. "
            f"KernelAssertionCallback inspects the loaded model before step 1"
        )
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        config.get_text_config()
    except Exception as error:
        raise _refused(f"{what} cannot be read ({_first_line(error)})") from error
    return config


def _refused(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="MODEL")


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
