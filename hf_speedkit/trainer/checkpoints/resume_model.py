"""A checkpoint holds the weights of the model that they are loaded into."""

from __future__ import annotations

from typing import Any

from hf_speedkit.core.errors import CheckpointError


def refuse_missing_weights(model: Any, load_result: Any) -> None:
    """Refuse a checkpoint without some of the model's parameters: Trainer only warns, and trains them from scratch.

    Args:
        model: that was loaded into.
        load_result: torch's, with `missing_keys`.

    Raises:
        CheckpointError: names some of them.
    """
    # Each tensor once: of tied weights a checkpoint holds one.
    own = {name for name, _ in model.named_parameters()}
    missing = [name for name in load_result.missing_keys if name in own]
    if missing and set(missing) != set(getattr(model, "_keys_to_ignore_on_save", None) or ()):
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the model's {len(own)} parameters",
            evidence=(f"the first: {', '.join(missing[:3])}",),
            mend="resume with the model that the checkpoint was saved from",
        )
