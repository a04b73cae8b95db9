"""Whether the Hugging Face Hub can be reached, found out in seconds before a job asks it for anything.

Without a network huggingface_hub 1.x tries every file six times, 23 s of pauses between them (`http_backoff`), also
where the file is in the cache: a tokenizer alone is some ten files. A Hub that answers slowly, or with an error, is one
that can be reached. Light: torch is not imported here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.hardware import is_on
from hf_speedkit.trainer.setting_names import nearest_path

logger = logging.getLogger(__name__)

_PAUSES_S = (1.0, 2.0, 4.0)
"""Before the next try: the network of a pod may come up some seconds after its first process."""
_LONG_TRY_S = 3.0
"""A try that fails after so long has waited for somebody already."""
_TIMEOUT_S = 5.0
# By name: which package the client is of (httpx, httpx2) is huggingface_hub's business, and so are its proxies.
_NO_WAY = ("ConnectError", "ProxyError")
_FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".gz", ".bz2", ".xz", ".zst")
_CONFIGS = ("config.json", "tokenizer_config.json", "adapter_config.json")
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A name that may be of the Hub.

    Args:
        kind: what it names.
        name: as it was given; a path that exists, or that can only be one, needs no Hub.
        revision: of a model.
        config: of a dataset.
        weights: the model's weights are needed as well.
    """

    kind: Literal["model", "dataset"]
    name: str
    revision: str | None = None
    config: str | None = None
    weights: bool = True

    def needs_hub(self) -> bool:
        """Whether it can only be the id of a repository: `name` or `owner/name`, and no path from here."""
        is_id = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", self.name) is not None
        return is_id and not self.name.endswith(_FILES) and not Path(self.name).exists() and not self._is_format()

    def is_cached(self) -> bool:
        """Whether this machine's cache has it: of a model its config and, if they are needed, all of its weights."""
        if self.kind == "dataset":
            return any(self._dataset_folder().glob("*/*/*"))
        if not any(map(self._cached, _CONFIGS)):
            return False
        return not self.weights or any(map(self._cached, _WEIGHTS)) or any(map(self._has_all_of, _INDICES))

    def _cached(self, file: str) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.name, file, revision=self.revision)
        return found if isinstance(found, str) else None

    def _has_all_of(self, index: str) -> bool:
        found = self._cached(index)
        if found is None:
            return False
        files = json.loads(Path(found).read_text(encoding="utf-8"))["weight_map"].values()
        return all(map(self._cached, set(files)))

    def missing(self) -> str:
        """A line that says where it was looked for."""
        from huggingface_hub.constants import HF_HUB_CACHE

        place = HF_HUB_CACHE if self.kind == "model" else self._dataset_folder().parent
        what = ", or not with all of its weights" if self.weights and self.kind == "model" else ""
        near = nearest_path(self.name) if "/" in self.name else None
        told = f"{self.kind} {self.name!r}: no file or folder of that name here, and not in {place}{what}"
        return told + (f"; did you mean {near}?" if near else "")

    def download(self) -> str:
        """The command that puts it into the cache."""
        if self.kind == "dataset":
            named = ", ".join(repr(part) for part in (self.name, self.config) if part)
            return f'python -c "import datasets; datasets.load_dataset({named})"'
        revision = f" --revision {self.revision}" if self.revision not in (None, "main") else ""
        return f"hf download {self.name}{revision}" + ("" if self.weights else ' --exclude "*.safetensors" "*.bin"')

    def _is_format(self) -> bool:
        """Whether it names one of datasets' own readers ("json"), which wins over a repository (datasets 5.2)."""
        if self.kind != "dataset" or "/" in self.name:
            return False
        from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

        return self.name in _PACKAGED_DATASETS_MODULES

    def _dataset_folder(self) -> Path:
        """Where datasets 5.2 looks without a network (load.py, CachedDatasetModuleFactory)."""
        from datasets import config
        from datasets.naming import camelcase_to_snakecase

        owner, _, name = self.name.rpartition("/")
        folder = "___".join(filter(None, (owner, camelcase_to_snakecase(name))))
        return Path(config.HF_DATASETS_CACHE) / folder


def require_hub_for(settings: Mapping[str, object]) -> None:
    """`require_hub` for a job by its settings, as a recipe reads them before anything heavy is imported.

    Args:
        settings: by their names in the YAML file. Read here: `tiny_chat` (needs nothing), `model_name_or_path`,
            `model_revision`, `random_weights`, `dataset_name`, `dataset_config`, `push_to_hub`, `hub_token`.

    Raises:
        ConfigurationError: see `require_hub` and `require_login`.
    """
    if is_on(settings.get("tiny_chat")):
        return
    revision = settings.get("model_revision")
    names = [
        HubName(
            kind="model",
            name=str(settings.get("model_name_or_path") or ""),
            revision=None if revision is None else str(revision),
            weights=not is_on(settings.get("random_weights")),
        ),
        HubName(
            kind="dataset",
            name=str(settings.get("dataset_name") or ""),
            config=None if settings.get("dataset_config") is None else str(settings["dataset_config"]),
        ),
    ]
    uploads = is_on(settings.get("push_to_hub"))
    require_hub(names, go_offline=True, uploads=uploads)
    if uploads:
        require_login(settings.get("hub_token"))


def require_login(token: object = None) -> None:
    """Refuse to push to the Hub without a token: the Trainer makes the repository once its model is loaded.

    Args:
        token: `hub_token` of the settings.

    Raises:
        ConfigurationError: none there, nor on this machine.
    """
    from huggingface_hub import get_token

    if not token and get_token() is None:
        raise ConfigurationError(
            "push_to_hub is on, and this machine is not logged in at the Hub",
            evidence=("no HF_TOKEN, and no token of `hf auth login`",),
            mend="hf auth login, with a token that may write",
            regardless="push_to_hub: false; `hf upload NAME OUTPUT_DIR` does it afterwards",
        )


def require_hub(
    names: Sequence[HubName],
    *,
    go_offline: bool = False,
    uploads: bool = False,
    why: Callable[[], str | None] | None = None,
) -> None:
    """Stop in seconds where a name needs the Hub, this machine cannot reach it and its cache has not got it.

    Nothing is asked for paths. Proxies and HF_ENDPOINT count as for huggingface_hub. What is cached is used: with
    HF_HUB_OFFLINE=1 (nothing is asked then either) or `go_offline` at once, else after huggingface_hub's own tries, and
    a warning says so.

    Args:
        names: what will be asked for.
        go_offline: without a way to the Hub set HF_HUB_OFFLINE=1 for this process and those that it starts; for
            programs of our own, not for a process that belongs to somebody else.
        uploads: the job pushes to the Hub, so that a cache is not enough.
        why: gives the reason why the Hub cannot be reached, None where it can be; `why_unreachable` unless given.

    Raises:
        ConfigurationError: with the command that fills the cache where there is a network.
    """
    from huggingface_hub import constants

    names = [one for one in names if one.needs_hub()]
    told = constants.is_offline_mode()
    _require_cached([one for one in names if told or (one.kind == "dataset" and _datasets_are_offline())], told=told)
    if _datasets_are_offline():
        names = [one for one in names if one.kind != "dataset"]
    if uploads and told:
        raise ConfigurationError(
            "HF_HUB_OFFLINE is set, and push_to_hub needs the Hub", mend="push_to_hub: false, or unset HF_HUB_OFFLINE"
        )
    if not (names or uploads) or told:
        return
    reason = (why or why_unreachable)()
    if reason is None:
        return
    missing = [one for one in names if not one.is_cached()]
    if missing or uploads:
        raise _unreachable(f"{constants.ENDPOINT}: {reason}", missing, uploads=uploads)
    if go_offline:
        _go_offline()
    _warn(
        "the Hugging Face Hub cannot be reached (%s: %s): %s", constants.ENDPOINT, reason,
        "the cache is used, as with HF_HUB_OFFLINE=1" if go_offline else "HF_HUB_OFFLINE=1 uses the cache at once; "
        "without it every file is asked for six times first, 23 s",
    )  # fmt: skip


def why_unreachable(*, pauses_s: Sequence[float] = _PAUSES_S, timeout_s: float = _TIMEOUT_S) -> str | None:
    """Why there is no way from here to the Hub; None where it answers, or where that cannot be told.

    One request, tried again for a few seconds where nobody can be connected to. A connection that takes longer than
    `timeout_s` is not called impossible: a warning says what is the matter.

    Args:
        pauses_s: seconds between the tries.
        timeout_s: of one try.
    """
    from huggingface_hub import constants, get_session

    reason = ""
    for number, pause_s in enumerate((*pauses_s, None)):
        began = time.monotonic()
        try:
            get_session().head(constants.ENDPOINT, timeout=timeout_s, follow_redirects=False)
            return None
        except Exception as error:  # noqa: BLE001 (those of another package, known by their names)
            kind = type(error).__name__
            reason = " ".join(str(error).split()) or kind
        if kind == "ConnectTimeout":
            _warn(
                "%s takes no connection within %g s. Without a way to the Hub stop here and set HF_HUB_OFFLINE=1",
                constants.ENDPOINT, timeout_s,
            )  # fmt: skip
        if kind not in _NO_WAY:
            return None
        if pause_s is None or time.monotonic() - began > _LONG_TRY_S:
            break
        if number == 0:
            _warn("%s cannot be reached (%s): tried for %g s more", constants.ENDPOINT, reason, sum(pauses_s))
        time.sleep(pause_s)
    return reason


def _warn(message: str, *values: object) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a host speaks
        logger.warning(message, *values)


def _datasets_are_offline() -> bool:
    return is_on(os.environ.get("HF_DATASETS_OFFLINE"))


def _require_cached(names: Sequence[HubName], *, told: bool) -> None:
    """Refuse what the cache lacks where nobody may be asked: the loaders name neither the setting nor the command."""
    missing = [one for one in names if not one.is_cached()]
    if not missing:
        return
    setting = "HF_HUB_OFFLINE" if told else "HF_DATASETS_OFFLINE"
    commands = " && ".join(one.download() for one in missing)
    raise ConfigurationError(
        f"{setting} is set, and what is asked for is not in the cache",
        evidence=tuple(one.missing() for one in missing),
        mend=f"where there is a network: {commands}, with the same HF_HOME as here. Or unset {setting}, or name a "
        "local folder",
    )


def _unreachable(reason: str, missing: Sequence[HubName], *, uploads: bool) -> ConfigurationError:
    needs = "push_to_hub needs it" if uploads and not missing else "what is asked for is not in the cache"
    commands = " && ".join(one.download() for one in missing)
    fill = (
        f"where there is a network: {commands}; then HF_HUB_OFFLINE=1 with the same HF_HOME here. Or name a local "
        "folder. Behind a proxy or mirror: HTTPS_PROXY, HF_ENDPOINT"
    )
    return ConfigurationError(
        f"the Hugging Face Hub cannot be reached from this machine, and {needs}",
        evidence=(reason, *(one.missing() for one in missing)),
        mend=fill if missing else "push_to_hub: false",
    )


def _go_offline() -> None:
    """What HF_HUB_OFFLINE=1 does, for packages that have read it already (huggingface_hub 1.x, datasets 5.2)."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    loaded: Any = sys.modules.get("datasets.config")
    if loaded is not None:
        loaded.HF_HUB_OFFLINE = loaded.HF_DATASETS_OFFLINE = True
