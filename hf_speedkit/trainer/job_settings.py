"""A job's settings from its YAML file and its command line, before anything heavy is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.dataset_source import refuse_missing_file
from hf_speedkit.trainer.hardware import is_on
from hf_speedkit.trainer.setting_names import nearest_path, what_was_meant


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
        ConfigurationError: there is no such file, or it holds something else than `key: value` lines, or one key twice.
    """
    if not config.is_file():
        near = None if config.exists() else nearest_path(config)
        raise ConfigurationError(
            f"there is no config file {str(config)!r}",
            mend=f"did you mean {near}?" if near else "--config FILE.yaml; recipes/tiny_sft.yaml runs on any machine",
        )
    values: object
    try:
        text = config.read_text(encoding="utf-8")
        _refuse_doubled(yaml.compose(text, Loader=yaml.SafeLoader), config)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        values = error
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{str(config)!r} holds no settings",
            evidence=(f"read as YAML it is: {' '.join(str(values).split()) or 'empty'}",),
            mend="save it as UTF-8 text" if isinstance(values, UnicodeDecodeError) else "write one `key: value` a line",
        )
    return values | {name: _plain(value) for name, value in options(argv)}


def take_settings(
    config: Path, argv: Sequence[str], environment: MutableMapping[str, str] | None = None
) -> dict[str, Any]:
    """The job's settings, see `settings`; the variables of the file's `env:` are set now.

    TrlParser (trl 1.16) sets them too late: torch is there, and wandb's login was asked for.

    Args:
        config, argv: see `settings`.
        environment: os.environ unless given.

    Raises:
        ConfigurationError: see `settings`; `env` is no mapping.
    """
    job = settings(config, argv)
    given = job.get("env")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigurationError(f"env: {given!r} holds no variables", mend="env: {WANDB_PROJECT: mine}")
    environment = os.environ if environment is None else environment
    environment.update({str(name): str(value) for name, value in (given or {}).items()})
    return job


def _refuse_doubled(node: yaml.Node | None, config: Path) -> None:
    """Refuse a key that stands twice in one mapping: of YAML's readers this one takes the last, without a word."""
    lines: dict[str, int] = {}
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    for key, _ in pairs:
        line = key.start_mark.line + 1
        if str(key.value) in lines:
            raise ConfigurationError(
                f"{key.value} stands twice in {str(config)!r}, in lines {lines[key.value]} and {line}",
                evidence=("the last one alone would count",),
                mend="leave one of them out",
            )
        lines[str(key.value)] = line
    inner = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in pairs]
    for one in inner:
        _refuse_doubled(one, config)


def require_named(job: Mapping[str, Any]) -> None:
    """Refuse a job whose model or data are not named, or lie at a path where there is nothing.

    Args:
        job: see `settings`. Read here: `tiny_chat` (takes neither), `model_name_or_path`, `dataset_name`,
            `eval_strategy` (the recipe has no evaluation set, which transformers says after the model is loaded).

    Raises:
        ConfigurationError: the setting to write, or the path that is not there.
        DatasetError: the file that is not there.
    """
    if str(job.get("eval_strategy") or "no") != "no":
        raise ConfigurationError(
            f"eval_strategy is {job['eval_strategy']!r}, and the recipe has no evaluation set",
            mend="leave eval_strategy out, or give SpeedSFTTrainer an eval_dataset in a copy of the recipe",
        )
    if is_on(job.get("tiny_chat")):
        idle = [name for name in ("model_name_or_path", "dataset_name") if job.get(name)]
        if idle:
            raise ConfigurationError(
                f"tiny_chat: true brings a model and data of its own, and {' and '.join(idle)} would not be read",
                mend="--tiny_chat false --model_name_or_path MODEL --dataset_name DATA (in YAML tiny_chat: false ...); "
                "runs/tiny_sft, which `make demo` leaves, is a MODEL for a CPU",
            )
        return
    for name, example in (("model_name_or_path", "Qwen/Qwen3.8-27B"), ("dataset_name", "HuggingFaceH4/ultrachat_200k")):
        value = str(job.get(name) or "")
        if not value:
            raise ConfigurationError(f"{name} is not set", mend=f"{name}: {example}")
        # Anything else may be the id of a repository on the Hub.
        if value.startswith(("/", "./", "../", "~")) and not Path(value).exists():
            raise ConfigurationError(
                f"{name}: there is no file or folder {value!r}",
                evidence=("nothing expands ~ here",) if value.startswith("~") else (),
                mend=f"{name}: {Path(value).expanduser()}"
                if value.startswith("~")
                else (f"did you mean {near}? Correct" if (near := nearest_path(value)) else "correct")
                + " the path, or name what it is called on the Hub",
            )
        if name == "model_name_or_path":
            refuse_no_model(value, name)
        else:
            refuse_missing_file(value)


def refuse_no_model(given: str, name: str = "model") -> None:
    """Refuse a path that holds no model; a folder wins over a repository of that name.

    Args:
        given: id of the Hub, or a path.
        name: what it was given as.

    Raises:
        ConfigurationError: nothing is there, or something else than a model.
    """
    path = Path(given)
    is_path = not given or given.startswith(("/", "./", "../", "~"))
    if not path.exists() and not is_path:
        return
    inside = path.is_dir() and any((path / one).is_file() for one in ("config.json", "adapter_config.json"))
    if given and (inside or (path.is_file() and path.suffix == ".json")):
        return
    if not given:
        found = "the name is empty"
    else:
        found = "it holds no config.json" if path.is_dir() else "it is a file" if path.is_file() else "nothing is there"
    raise ConfigurationError(
        f"{name}: {given!r} is no folder of a model",
        evidence=(found,),
        mend="the folder that holds config.json, the tokenizer and the weights (of a checkpoint: checkpoint-N), or the "
        "id of a model on the Hub",
    )


def unusable(message: str, file: str, *, known: Iterable[str]) -> ConfigurationError:
    """The refusal of settings that a parser did not take: a misspelt name gets the one that was meant.

    Args:
        message: what the parser said; names that it does not know stand there as '--name'.
        file: name of the YAML file.
        known: all settings.
    """
    unknown = [name.replace("-", "_") for name in re.findall(r"'--([\w-]+)", message)]
    if not unknown:
        quotes = (
            'write "no" in quotes, which YAML reads as False without them. ' if message.startswith("False ") else ""
        )
        return ConfigurationError(
            f"a setting cannot be used: {message}",
            mend=f"{quotes}correct it in {file} or on the command line; --help lists all settings",
        )
    # Not evidence: below a launcher's traceback only the first and the last lines are said again.
    guess = f"{what_was_meant(unknown, known)} Correct it in {file} or on the command line; --help lists all settings"
    return ConfigurationError(f"there is no setting {', '.join(unknown)}", mend=guess.strip())


def _plain(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:  # "a: b: c" or "@me": a text like any other
        return value
