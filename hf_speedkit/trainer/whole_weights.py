"""Weights that are read are whole: damaged files and weights that are not there are refused, whoever loads them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import ConfigurationError

logger = logging.getLogger(__name__)

MODEL_SOURCE = "the model (model_name_or_path): its id on the Hub, or a folder with config, weights and tokenizer"


_MARK = "speedkit_checked"


@contextmanager
def reading_weights(name: str) -> Iterator[None]:
    """What transformers raises while it reads a checkpoint, as an error that says what to do.

    Args:
        name: hub id or folder.

    Raises:
        ConfigurationError: files that are damaged or of other sizes; no such model, no way to it.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:  # cut short, a Git LFS pointer, or of other sizes
        if isinstance(error, RuntimeError) and "mismatched" not in str(error):
            raise
        again = (
            "git lfs pull, or copy the files again" if Path(name).exists() else f"hf download {name} --force-download"
        )
        raise ConfigurationError(
            f"the weights of {name!r} cannot be read",
            evidence=tuple(line for line in str(error).splitlines() if line.strip())[:5],
            mend=f"{again}; where sizes differ, the config.json of these weights",
        ) from error
    except OSError as error:  # no such repository or file, no way to the Hub, no access
        raise ConfigurationError(
            f"no model can be loaded from {name!r}",
            evidence=tuple(line for line in str(error).splitlines() if line.strip()),
            mend=MODEL_SOURCE,
        ) from error


def refuse_missing(name: str, model: Any, found: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights: the loader draws them and says so in a table; layers would be random.

    Args:
        name: hub id or folder.
        model: that was loaded.
        found: transformers' loading info.

    Raises:
        ConfigurationError: names some of them.
    """
    own = {key for key, _ in model.named_parameters()}
    missing = sorted(key for key in found["missing_keys"] if key in own)
    if missing:
        raise ConfigurationError(
            f"the checkpoint {name!r} lacks {len(missing)} of the model's {len(own)} weights",
            evidence=(f"the first: {', '.join(missing[:3])}", "they would be drawn at random"),
            mend="the config.json and all files of these weights; new weights on purpose: load the model with "
            "transformers, save_pretrained() it, and name that folder",
        )
    left = sorted(key for key in found["unexpected_keys"] if re.search(r"\blayers\.\d+\.", key))
    if left:  # layers for predicting further tokens are left out by design, by name or by number
        logger.warning("%s: %d weights of layers that the model's config does not have are left out, the first: %s",
                       name, len(left), left[0])  # fmt: skip


@contextmanager
def checked_loading() -> Iterator[None]:
    """While it lasts, a model that TRL loads by its name is looked at as one that `load_model` loads.

    SFTTrainer (1.16, sft_trainer.py:690) loads inside its constructor and keeps nothing of what transformers found, so
    its loader is replaced for that long, in that module alone; in a TRL without that name, nothing is. Of trainers that
    are made at once, in threads or one inside the other, the first one's loader looks for all.

    Raises:
        ConfigurationError: see `reading_weights` and `refuse_missing`.
    """
    from trl.trainer import sft_trainer

    original: Callable[..., Any] | None = getattr(sft_trainer, "create_model_from_path", None)
    if original is None or getattr(original, _MARK, False):
        yield
        return

    def load(model_id: str, *given: Any, **settings: Any) -> Any:
        with reading_weights(model_id):
            model, found = original(model_id, *given, **settings, output_loading_info=True)
        refuse_missing(model_id, model, found)
        return model

    setattr(load, _MARK, True)
    sft_trainer.create_model_from_path = load
    try:
        yield
    finally:
        sft_trainer.create_model_from_path = original
