"""`KernelAssertionCallback`: refuse slow or wrong kernels in any Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_speedkit.core.errors import ConfigurationError, KernelAssertionError
from hf_speedkit.core.records import KernelCheck
from hf_speedkit.kernels.demands import Requirement, checked, names_of
from hf_speedkit.kernels.inspection import assert_kernels, check_kernels
from hf_speedkit.kernels.model_checks import model_config
from hf_speedkit.kernels.refusal import packed_refusal
from hf_speedkit.trainer.data.document_ends import end_tokens
from hf_speedkit.trainer.proof.collated import Look, looked_at, odd_targets
from hf_speedkit.trainer.proof.first_step import FirstStep
from hf_speedkit.trainer.proof.flattening import (
    attention_of,
    boundaries_given,
    flattening_checks,
    flattening_collator,
    hidden_documents,
    padded_all_the_same,
    rows_by_content,
)
from hf_speedkit.trainer.ranks.agreement import agree, say_once

logger = logging.getLogger(__name__)

_WITH_A_GPU = "on a machine with a GPU:\n          "


class KernelAssertionCallback(FirstStep):
    """Inspects the prepared model before step 1 and stops all ranks when training would run slow or wrong kernels.

    Under a config that packs (TRL's `packing` or `padding_free`) families whose documents would see one another are
    refused too, and so is a collator that pads there; under any, one that trains on what the labels of its rows leave
    out. On a GPU the kernels of the first micro-batch are read as well and must hold those of every fused function; see
    `FirstStep`.

    Args:
        mode: "strict" raises KernelAssertionError; "warn" logs the same text, and raises only where transformers would
            in step 1 (packed rows without the kernels that take them); "off" does nothing.
        requirements: the functions that must be fused, by name or as KernelRequirement, for example
            ("chunk_gated_delta_rule", "attention"); others are warned about, unless they compute wrong numbers or let
            packed documents see one another. None: every function that training calls.
        probe: also run each fused function forward and backward on the device and compare with the reference.

    After `on_train_begin`, `checks` holds one KernelCheck per function; after the first step, `runs` what was seen.
    """

    only_one = "the kernels would be run and compared twice"

    def __init__(
        self,
        *,
        mode: Literal["strict", "warn", "off"] = "strict",
        requirements: Sequence[Requirement] | None = None,
        probe: bool = True,
    ) -> None:
        if mode not in ("strict", "warn", "off"):
            raise ConfigurationError(f"mode is {mode!r}", mend='use "strict", "warn" or "off"')
        super().__init__()
        self.mode: Literal["strict", "warn", "off"] = mode
        self.probe = probe
        self.requirements = checked(requirements)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **given: Any
    ) -> None:
        """Inspect, or stop all ranks with one message."""
        if self.mode != "off":
            said: list[str] = []
            loader = given.get("train_dataloader")
            look = agree(lambda: self._refused(lambda: looked_at(loader), said.append)) or Look(None, [], None)
            self.checks = agree(lambda: self._assert(args, model, loader, look.batch, said.append))
            ends = end_tokens(given.get("processing_class"), model)
            odd = agree(lambda: self._refused(lambda: odd_targets(look, ends), said.append))
            said += [odd] if odd else []
            say_once(logger.warning, said)
        self.expect(self.mode)

    def demands(self, function: str) -> bool:
        """Whether a function that was found must also run."""
        return self.requirements is None or function in names_of(self.requirements)

    def own_way_on(self, error: KernelAssertionError) -> KernelAssertionError:
        """The refusal names SpeedSFTConfig's setting; whoever reads this one has the callback in hand."""
        return KernelAssertionError(
            error.what,
            evidence=error.evidence,
            mend=error.mend,
            regardless='KernelAssertionCallback(mode="warn")',
        )

    def _assert(
        self, args: TrainingArguments, model: Any, loader: Any, batch: Any, say: Callable[[str], object]
    ) -> tuple[KernelCheck, ...]:
        collator = flattening_collator(loader) or rows_by_content(batch)
        slots = getattr(collator, "tokens_per_batch", None) or packed_slots(args, flattens=collator is not None)
        try:
            checks = check_kernels(
                model,
                probe=self.probe,
                tokens_per_batch=slots,
                dtype=activation_dtype(args),
                liger=getattr(args, "use_liger_kernel", False),
            )
            checks = (*checks, *flattening_checks(model_config(model), collator))
            warnings: list[str] = []
            assert_kernels(model, mode=self.mode, checks=checks, requirements=self.requirements, say=warnings.append)
        except KernelAssertionError as error:
            own = self.own_way_on(error)
            if args.device.type == "cpu":
                own = _on_a_cpu(own, packed=slots is not None)
            raise own from None
        stuck = packed_refusal(checks, boundaries_given(collator)) if slots is not None else None
        if stuck is not None:
            raise stuck
        attention = attention_of(model_config(model))
        padded = padded_all_the_same(loader) if packed_slots(args) is not None else hidden_documents(batch, attention)
        if padded is not None and self.mode == "strict":
            raise padded
        if args.device.type == "cpu":  # see `_on_a_cpu`
            warnings = [told.replace("Mend it:  pip", f"Mend it:  {_WITH_A_GPU}pip") for told in warnings]
        if (
            slots is not None and args.neftune_noise_alpha
        ):  # transformers 5.23, integrations/neftune.py; `step/noise.py`
            warnings.append(
                "neftune_noise_alpha: the noise shrinks with the length of the whole row, so each document gets less "
                "than it would alone; a SpeedSFTTrainer measures it by documents"
            )
        for warning in (*warnings, *filter(None, [padded])):
            say(str(warning))
        return checks

    def _refused(self, check: Callable[[], Any], say: Callable[[str], object]) -> Any:
        try:
            return check()
        except ConfigurationError as error:
            if self.mode == "strict":
                raise
            say(str(error))
            return None


def _on_a_cpu(error: KernelAssertionError, *, packed: bool) -> KernelAssertionError:
    """No package makes a CPU run fused kernels, and some cannot be built without a GPU's compiler."""
    if "pip install" not in (error.mend or ""):  # a setting, which is the same there
        return error
    mend = error.mend if error.mend is None else f"{_WITH_A_GPU}{error.mend}"
    if packed:  # transformers 5.23's torch functions take no boundaries and raise in the first forward pass
        regardless = f"packing=False and {error.regardless}, or SpeedSFTTrainer, whose references take packed rows"
    else:
        regardless = f"{error.regardless}, which is right on a CPU: no fused kernel runs there"
    return KernelAssertionError(error.what, evidence=error.evidence, mend=mend, regardless=regardless)


def packed_slots(args: TrainingArguments, *, flattens: bool = False) -> int | None:
    """Slots of a row where TRL's SFTTrainer packs documents that must not see one another; None for other rows.

    So where a collator `flattens` by itself, in any Trainer. The strategy "wrapped" (TRL 1.16) cuts one long text into
    rows and means documents to run into one another.
    """
    packs = getattr(args, "packing", False) and getattr(args, "packing_strategy", "bfd") != "wrapped"
    if not packs and not flattens and not getattr(args, "padding_free", False):
        return None
    # Without a maximal length nobody knows how long a row gets: then TRL's own default length.
    length = getattr(args, "max_length", None) or 1024
    return int(length) * int(args.per_device_train_batch_size)


def activation_dtype(args: TrainingArguments) -> torch.dtype | None:
    """What the layers will compute in: the autocast type of mixed precision, else the parameters' own (None)."""
    if getattr(args, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(args, "fp16", False) else None
