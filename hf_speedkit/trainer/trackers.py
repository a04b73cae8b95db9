"""Trackers that a job asks for are there and can be used: said before the model is loaded, not after. Light."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec

from hf_speedkit.core.errors import ConfigurationError

# transformers' names for its integrations, where the package is called otherwise.
_PACKAGES = {"azure_ml": "azureml", "comet_ml": "comet_ml", "dvclive": "dvclive", "flyte": "flytekitplugins"}
_NOT_TRACKERS = {"none", "all"}
# transformers 5.23 integrations/integration_utils.py, INTEGRATION_TO_CALLBACK; a test compares.
_TRACKERS = ("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow",
             "neptune", "swanlab", "tensorboard", "trackio", "wandb")  # fmt: skip


def require_trackers(settings: Mapping[str, object]) -> None:
    """Refuse a job whose tracker is missing or not logged in.

    Args:
        settings: the job's settings; `report_to` is a name, a list of names or a comma-separated list.

    Raises:
        ConfigurationError: a name that transformers does not know, a package that is not installed, or wandb without a
            key while it is online.
    """
    for name in _names(settings.get("report_to")):
        if name not in _TRACKERS:  # a misspelt name must not become a package to install
            near = get_close_matches(name, _TRACKERS, n=1)
            raise ConfigurationError(
                f"report_to is {name!r}, which is no tracker of transformers",
                mend=f"report_to: {near[0]}" if near else f"one of {', '.join(_TRACKERS)}, or none",
            )
        package = _PACKAGES.get(name, name)
        if find_spec(package) is None:
            raise ConfigurationError(
                f"report_to is {name!r}, and the package {package!r} is not installed",
                mend='pip install ".[wandb]"' if name == "wandb" else f"pip install {package}",
                regardless="--report_to none: the step log in output_dir is written all the same",
            )
        if name == "wandb" and not wandb_can_start():
            raise ConfigurationError(
                "report_to is 'wandb', and wandb is not logged in on this machine",
                evidence=("no WANDB_API_KEY, no entry in ~/.netrc, and WANDB_MODE is not offline",),
                mend="wandb login, or WANDB_MODE=offline (upload later with `wandb sync`)",
                regardless="--report_to none: the step log in output_dir is written all the same",
            )


def _names(value: object) -> list[str]:
    listed = value if isinstance(value, Iterable) and not isinstance(value, str) else str(value or "").split(",")
    return [name for name in (str(item).strip() for item in listed) if name and name not in _NOT_TRACKERS]


def wandb_can_start() -> bool:
    """Whether wandb has a key for its server, or is told to do without one."""
    if os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun") or "WANDB_DISABLED" in os.environ:
        return True
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].split("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
