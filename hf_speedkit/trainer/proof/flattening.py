"""Rows that a collator packs, transformers' flattening one or ours, which no setting of the job speaks of."""

from __future__ import annotations

from typing import Any

from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
)

from hf_speedkit.core.errors import PackingError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.config_checks import layers_of_family
from hf_speedkit.kernels.requirements import FAMILIES, family_of, training_requirements
from hf_speedkit.packing.collator import PackedCollator

_SETTINGS = {"seq_idx": "return_seq_idx", "cu_seqlens": "return_flash_attn_kwargs"}
"""Boundary argument of a function -> the collator's switch for the key that transformers makes it from."""


_FLATTENING = (DataCollatorWithFlattening, PackedCollator)
_PADDING = (DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding)


def collator_of(dataloader: Any) -> Any:
    """The collator of a loader, None without one; the Trainer may have wrapped it."""
    collator = getattr(dataloader, "collate_fn", None)
    return getattr(collator, "data_collator", collator)


def flattening_collator(dataloader: Any) -> Any:
    """The collator of a loader, where it lays documents end to end, else None."""
    collator = collator_of(dataloader)
    return collator if isinstance(collator, _FLATTENING) else None


def padded_all_the_same(dataloader: Any) -> PackingError | None:
    """The refusal of a collator that pads, for rows that the settings call packed or padding-free (case V10).

    Others put collators of their own in a trainer's (masking helpers do), and every flag still says what it said. TRL's
    own (1.16) says by `padding_free` which of the two it does.
    """
    collator = collator_of(dataloader)
    if not (isinstance(collator, _PADDING) or getattr(collator, "padding_free", None) is False):
        return None
    return PackingError(
        f"packing or padding_free is on, and the trainer's data_collator, a {type(collator).__name__}, pads",
        evidence=("every row is as long as the longest of its batch, and no document shares one",),
        mend="leave trainer.data_collator as the trainer made it, or packing=False and padding_free=False",
    )


def boundaries_given(collator: Any) -> frozenset[str]:
    """The boundary arguments that layers get in packed rows; TRL's collators (1.16) and ours give both."""
    switched = (argument for argument, switch in _SETTINGS.items() if getattr(collator, switch, True))
    return frozenset(switched)


def flattening_checks(config: Any, collator: Any) -> tuple[KernelCheck, ...]:
    """A check where the layers of a family need boundaries that the collator does not hand over.

    By default it gives position ids only, which attention reads and no recurrent layer does: the state runs on from
    one document into the next. Tiny Qwen3.5, three documents: logits off by 0.02, by 6e-8 with both switches.

    Args:
        config: of the model; None for one without.
        collator: of the training loader; None where rows are not flattened.
    """
    text = config.get_text_config() if collator is not None and hasattr(config, "get_text_config") else None
    family = family_of(text) if text is not None else None
    layers = layers_of_family(text, family) if family is not None else 0
    if family is None or not layers:
        return ()
    needed = {argument for row in training_requirements(family) for argument in row.boundary_arguments}
    given = boundaries_given(collator)
    missing = [switch for argument, switch in _SETTINGS.items() if argument in needed and argument not in given]
    if not missing:
        return ()
    wanted = ", ".join(f"{switch}=True" for switch in _SETTINGS.values())
    return (
        KernelCheck(
            function="packed_rows",
            verdict=KernelVerdict.NO_BOUNDARIES,
            layer=FAMILIES[family].layer,
            layers=layers,
            layers_total=layers,
            evidence=f"DataCollatorWithFlattening without {' and '.join(missing)}",
            reason="position ids alone keep documents apart in attention, and these layers do not read them",
            fix=f"DataCollatorWithFlattening({wanted})",
        ),
    )
