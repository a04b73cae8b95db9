"""Trackers that a job asks for are there and can be used: said before the model is loaded, not after. Light."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.kernels.imports import is_installed
from hf_speedkit.trainer.installed_versions import lacking, wanted
from hf_speedkit.trainer.setting_names import nearest

logger = logging.getLogger(__name__)

# transformers' names for its integrations, where a package is called otherwise; one of several is enough.
_PACKAGES = {
    "azure_ml": ("azureml",), "flyte": ("flytekitplugins",), "tensorboard": ("tensorboard", "tensorboardX"),
}  # fmt: skip
_NOT_TRACKERS = {"none", "all"}
# transformers 5.23 integrations/integration_utils.py, INTEGRATION_TO_CALLBACK; a test compares.
_TRACKERS = ("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow",
             "neptune", "swanlab", "tensorboard", "trackio", "wandb")  # fmt: skip
WITHOUT_SERVER = ("offline", "disabled", "dryrun")
"""Modes in which wandb needs no login."""
# transformers 5.23, integration_utils.py:775, 840 and 2248: what a tracker does on world rank 0 alone, by the variable
# that asks for it.
_WATCHES = {"wandb": ("WANDB_WATCH", ("all", "parameters"))}
_SAVES = {
    "wandb": ("WANDB_LOG_MODEL", ("end", "checkpoint")),
    "dvclive": ("HF_DVCLIVE_LOG_MODEL", ("TRUE", "true", "1")),
}


def require_trackers(settings: Mapping[str, object]) -> None:
    """Refuse a job whose tracker is missing or not logged in.

    Args:
        settings: the job's settings; `report_to` is a name, a list of names or a comma-separated list.

    Raises:
        ConfigurationError: a name that transformers does not know, a package that is not installed, or a wandb that
            could not start: with a variable that it cannot take, without a key while it is online, with one that is
            none.
    """
    require_tracker_packages(settings.get("report_to"))
    require_tracker_names(settings.get("report_to"))
    _require_wandb_login(settings.get("report_to"))


def require_tracker_packages(report_to: object) -> None:
    """Refuse trackers that transformers does not know, or whose package is not installed or too old.

    Args:
        report_to: a name, a list of names or a comma-separated list.

    Raises:
        ConfigurationError: with the name that was meant, or the pip command.
    """
    for name in _names(report_to):
        if name not in _TRACKERS:  # a misspelt name must not become a package to install
            near = nearest(name, _TRACKERS)
            raise ConfigurationError(
                f"report_to is {name!r}, which is no tracker of transformers",
                mend=f"report_to: {near}" if near else f"one of {', '.join(_TRACKERS)}, or none",
            )
        packages = _PACKAGES.get(name, (name,))
        lacks = lacking(name, *packages)
        if lacks is not None:
            raise ConfigurationError(
                f"report_to is {name!r}, and the package {packages[0]!r} {lacks}",
                mend=f"pip install {wanted(packages[0])}",
                regardless="--report_to none: the step log in output_dir is written all the same",
            )


def require_tracker_names(report_to: object) -> None:
    """Refuse variables that wandb cannot take: a project "team/job", a mode "offlin".

    On world rank 0, the only one that talks to wandb. Costs its import, 1.5 s, where it is reported to.

    Args:
        report_to: a name, a list of names or a comma-separated list.

    Raises:
        ConfigurationError: the variables, and what wandb says of them.
    """
    if not _asks_wandb(report_to):
        return
    given = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    wrong = {name: said for name, value in given.items() if (said := _objection({name: value})) is not None}
    if "/" in (entity := given.get("WANDB_ENTITY", "")):  # wandb's server says so: a run is made, and then lost
        wrong["WANDB_ENTITY"] = f"{entity!r} is no name of a user or a team"
    if not wrong and (said := _objection(given)) is not None:
        wrong = {"WANDB_*": said}  # together, or a settings file that `wandb offline` has written
    if wrong:
        left, slash, right = (entity if "/" in entity else given.get("WANDB_PROJECT", "")).partition("/")
        both = f"WANDB_ENTITY={left} WANDB_PROJECT={right}; " if slash else ""
        raise ConfigurationError(
            f"wandb cannot start: it does not take {', '.join(wrong)}",
            evidence=tuple(f"{name}: {said}" for name, said in wrong.items()),
            mend=f"{both}correct or unset {' '.join(wrong)}",
            regardless="--report_to none: the step log in output_dir is written all the same",
        )


def refuse_lone_readers(report_to: object, state_dict_type: str, environment: Mapping[str, str] | None = None) -> None:
    """Refuse a tracker that reads the sharded weights on world rank 0 alone: it waits for the others, who never come.

    Tried over two processes: WANDB_WATCH=parameters stood still in step 100, the first that wandb looks at, and
    WANDB_LOG_MODEL=end behind the last step (transformers issue 30895, wandb issues 7423 and 9774).

    Args:
        report_to: a name, a list of names or a comma-separated list.
        state_dict_type: FSDP's, "FULL_STATE_DICT" or "SHARDED_STATE_DICT".
        environment: os.environ unless given.

    Raises:
        ConfigurationError: the variable, and what to do instead.
    """
    environment = os.environ if environment is None else environment
    watches, saves = (_asked_for(table, report_to, environment) for table in (_WATCHES, _SAVES))
    if watches is not None:
        raise ConfigurationError(
            f"{watches}: rank 0 alone would read the weights that FSDP has spread over all, and wait for the others",
            mend="unset WANDB_WATCH; the norm of all gradients is logged as grad_norm",
        )
    if saves is None:
        return
    instead = "trainer.save_model(FOLDER) writes it, which a tracker's artifact can hold afterwards"
    if "FULL" not in state_dict_type:
        logger.warning(
            "%s: the final model that it uploads will hold no weights, for FSDP shards them; %s", saves, instead
        )
        return
    raise ConfigurationError(
        f"{saves}: behind the last step rank 0 alone would gather the sharded model, and wait for the others",
        mend=f"unset {saves.partition('=')[0]}; {instead}",
    )


def _asked_for(
    table: Mapping[str, tuple[str, tuple[str, ...]]], report_to: object, environment: Mapping[str, str]
) -> str | None:
    named = _listed(report_to)
    for tracker, (variable, values) in table.items():
        value = environment.get(variable, "")
        if value in values and (tracker in named or ("all" in named and is_installed(tracker))):
            return f"{variable}={value}"
    return None


def _asks_wandb(report_to: object) -> bool:
    named = _listed(report_to)
    asked = "wandb" in named or ("all" in named and is_installed("wandb"))
    return asked and os.environ.get("RANK", "0") == "0"


def _objection(environment: Mapping[str, str]) -> str | None:
    """What wandb says against variables; pydantic's error is a ValueError, its own is not."""
    from wandb.errors import Error

    try:
        _wandb_settings(environment)
    except (ValueError, Error) as error:
        return " ".join(str(error).split())[:200]
    return None


def _require_wandb_login(report_to: object) -> None:
    """On world rank 0, the only one that talks to wandb: other nodes need no key."""
    named = _listed(report_to)
    problem = wandb_problem() if _asks_wandb(report_to) else None
    if problem is not None:
        raise ConfigurationError(
            f"report_to is {'wandb' if 'wandb' in named else 'all'!r}, and wandb cannot start: {problem[0]}",
            evidence=problem[1:],
            mend="wandb login, or WANDB_MODE=offline (upload later with `wandb sync`)",
            regardless="--report_to none: the step log in output_dir is written all the same",
        )


def _listed(value: object) -> list[str]:
    listed = value if isinstance(value, Iterable) and not isinstance(value, str) else str(value or "").split(",")
    return [str(item).strip() for item in listed]


def _names(value: object) -> list[str]:
    return [name for name in _listed(value) if name and name not in _NOT_TRACKERS]


def wandb_mode() -> str:
    """The mode wandb will start in, by environment and by the settings files that `wandb offline` writes."""
    return str(_wandb_settings().mode)


def wandb_problem() -> tuple[str, ...] | None:
    """Why `wandb.init` would raise or ask: a sentence and what was looked at; None where it will start.

    What it is told in the environment has been judged by `require_tracker_names`.

    Asks wandb itself, whose server, files and order of looking for a key change between versions. Costs its import,
    1.5 s, which a job that reports to it pays anyway. Contacts nobody.

    Private to wandb 0.31: `wandb.sdk.lib.wbauth`; tests/trainer/test_trackers.py fails when it changes.
    """
    settings = _wandb_settings()
    if settings.mode in WITHOUT_SERVER:
        return None
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib import wbauth

    try:
        key = settings.api_key or wbauth.read_netrc_auth(host=settings.base_url)
        if key:
            wbauth.AuthApiKey(host=settings.base_url, api_key=key)
    except AuthenticationError as error:
        return "its key is not one", str(error)
    if key or settings.identity_token_file:
        return None
    looked = f"no WANDB_API_KEY, no key for {settings.base_url} in ~/.netrc, and the mode is {settings.mode}"
    ignored = "WANDB_DISABLED is set, which wandb and transformers 5 do not read: WANDB_MODE=disabled"
    return "it is not logged in on this machine", looked, *([ignored] if "WANDB_DISABLED" in os.environ else [])


def _wandb_settings(environment: Mapping[str, str] | None = None) -> Any:
    """What `wandb.init` would take, without starting or keeping anything (`wandb.setup` would keep it).

    Args:
        environment: os.environ unless given.
    """
    import wandb

    settings = wandb.Settings(quiet=True)
    settings.update_from_system_settings()
    settings.update_from_env_vars(dict(os.environ if environment is None else environment))
    return settings
