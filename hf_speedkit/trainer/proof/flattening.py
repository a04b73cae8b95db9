"""Rows that a collator packs, transformers' flattening one or ours, which no setting of the job speaks of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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
from hf_speedkit.trainer.proof.collated import later_documents

_SETTINGS = {"seq_idx": "return_seq_idx", "cu_seqlens": "return_flash_attn_kwargs"}
"""Boundary argument of a function -> the collator's switch for the key that transformers makes it from."""


_TRANSFORMERS_OWN = ("sdpa", "eager", "flash_attention", "flex_attention")
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


@dataclass(frozen=True, slots=True)
class OwnRows:
    """What a collator of one's own, or rows that were packed before, hand to the layers; as `_SETTINGS` asks."""

    return_seq_idx: bool
    return_flash_attn_kwargs: bool


def rows_by_content(batch: Any) -> OwnRows | None:
    """What a batch of one row says of its documents, where it holds several and no class we know has made it."""
    begins = later_documents(batch)
    if begins is None or len(begins) != 1 or not bool(begins.any()):
        return None
    return OwnRows(return_seq_idx="seq_idx" in batch, return_flash_attn_kwargs="cu_seq_lens_q" in batch)


def attention_of(config: Any) -> str | None:
    """The name of the attention that a model's text layers run on; None without a config of transformers'."""
    return getattr(config.get_text_config(), "_attn_implementation", None) if config is not None else None


def hidden_documents(batch: Any, attention: str | None) -> PackingError | None:
    """The refusal of rows of several documents where attention does not look for them.

    transformers 5.23 looks at positions, and only without an attention_mask, be it all ones (masking_utils.py;
    huggingface/transformers#46634); flash attention looks only in a batch of one row.

    Args:
        batch: as training will get it.
        attention: the implementation's name; other than transformers' may do as they like.
    """
    begins = later_documents(batch)
    if begins is None or not bool(begins.any()) or not str(attention).startswith(_TRANSFORMERS_OWN):
        return None
    mask, flash = batch.get("attention_mask"), str(attention).startswith("flash")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:  # of four axes: it may hold the documents itself
        mend = "leave attention_mask out of the batch (a column of that name, or what the collator adds)"
    elif "position_ids" not in batch and not flash:
        mend = "position_ids that begin again with each document, which is all that this attention reads"
    elif len(begins) > 1 and flash and "cu_seq_lens_q" not in batch:
        mend = "one row a batch: per_device_train_batch_size=1, or a collator that puts all rows end to end"
    else:
        return None
    return PackingError(
        "documents share rows, and attention lets each see those before it",
        evidence=(
            f"{int(begins.sum())} documents behind others in a batch {list(begins.shape)}, with {attention}: they are "
            "told by position_ids, without an attention_mask, and by flash attention in one row only",
        ),
        mend=mend,
        regardless='KernelAssertionCallback(mode="warn"); in a SpeedSFTTrainer isolation_check=False',
    )


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
    own = isinstance(collator, OwnRows)
    lacking = sorted(needed - given) if own else missing
    made = "rows of several documents" if own else "DataCollatorWithFlattening"
    wanted = ", ".join(f"{switch}=True" for switch in _SETTINGS.values())
    return (
        KernelCheck(
            function="packed_rows",
            verdict=KernelVerdict.NO_BOUNDARIES,
            layer=FAMILIES[family].layer,
            layers=layers,
            layers_total=layers,
            evidence=f"{made} without {' and '.join(lacking)}",
            reason="position ids alone keep documents apart in attention, and these layers do not read them",
            fix=f"DataCollatorWithFlattening({wanted})"
            + (", or seq_idx and cu_seq_lens_q from your own" if own else ""),
        ),
    )
