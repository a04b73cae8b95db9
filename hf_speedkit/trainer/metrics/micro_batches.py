"""Counts the micro-batches of each optimizer step, told by the trainer or seen by a hook on the model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import TrainingArguments

from hf_speedkit.core.records import NO_TOKENS, TokenCounts
from hf_speedkit.trainer.metrics.observation import (
    TOKEN_COUNTS_KEY,
    CountedStep,
    GradientProbe,
    LabelRule,
    Observation,
    read,
)
from hf_speedkit.trainer.metrics.repeated_rows import NewRows, count_new_rows
from hf_speedkit.trainer.metrics.returned_losses import ReturnedLosses

MOST_UNREAD = 1000
"""Finished steps that are read at the latest, where nothing is logged for so long: each keeps some 2.5 kB of the
device's memory (five scalars of 512 B, the least an allocation takes)."""

_HEAD_ON_TARGETS = ("cuda",)
"""Devices on which TRL's fused head (1.16, trainer/utils.py:1638) scores target positions only; elsewhere all."""

_UNKNOWN = TokenCounts(slots=0, real=None, target=None, documents=None)


def parallel_size(args: TrainingArguments, axis: str) -> int:
    """Ranks along an axis of accelerate's ParallelismConfig ("tp", "cp", "sp"), which the launcher may have set."""
    config = getattr(args, "parallelism_config", None) or AcceleratorState._shared_state.get("parallelism_config")
    return int(getattr(config, f"{axis}_size", None) or 1)


def ranks_on_one_batch(args: TrainingArguments, model: torch.nn.Module) -> int:
    """How many ranks see the same batch: those of one tensor-parallel group.

    Accelerate lays such a group over neighbouring ranks (parallelism_config.py:267, "tp" last).
    """
    return int(getattr(model, "_tp_size", None) or parallel_size(args, "tp"))


def ranks_on_one_row(args: TrainingArguments) -> int:
    """Over how many ranks the positions of one row are spread (context or sequence parallelism)."""
    return parallel_size(args, "cp") * parallel_size(args, "sp")


def counts_its_batch(args: TrainingArguments, model: torch.nn.Module) -> bool:
    """Whether this rank's batch is its own: of the ranks that see the same, the first counts it."""
    return bool(args.process_index % ranks_on_one_batch(args, model) == 0)


def new_rows_of(
    args: TrainingArguments, model: torch.nn.Module, dataloader: object, *, drop_last: bool | None = None
) -> NewRows | None:
    """What tells the rows of a loader that accelerate has not repeated; None where ranks share out batches afterwards.

    Args:
        args, model: of the job.
        dataloader, drop_last: as for `NewRows`.
    """
    if parallel_size(args, "sp") > 1:  # every rank draws batches of its own
        return None
    shared_by = ranks_on_one_batch(args, model) * ranks_on_one_row(args)
    return NewRows(args, dataloader, shared_by=shared_by, drop_last=drop_last)


class MicroBatchCounter:
    """Keeps one Observation per step until the steps are taken.

    Two sources: `count`, called by a trainer that knows its counts, and the hook that `watch` puts on a model. The
    first `count` takes precedence for good: what the hook saw in that step is dropped and the hook stops counting.

    Args:
        own_batch: False where another rank counts the same batch (`counts_its_batch`): its tokens are zero here.
        new_rows: tells which rows of a batch accelerate has not repeated; None: no one has.
        cut: this rank sees a part of each row (`ranks_on_one_row`).
    """

    def __init__(self, *, own_batch: bool = True, new_rows: NewRows | None = None, cut: bool = False) -> None:
        self._cut = cut
        self._own_batch = own_batch
        self._new_rows = new_rows
        self.current = Observation()
        self._waiting: list[tuple[int, Observation]] = []
        self._read: list[tuple[int, CountedStep]] = []
        self._told = False
        self.head_on_targets = False
        """Whether TRL's fused head was seen at work: it scores target positions only."""
        self._handles: tuple[Any, ...] = ()
        self._losses = ReturnedLosses(None)
        self._batch: Callable[[], object] = _nothing
        self._probe = GradientProbe()
        self._norm_given = False

    @classmethod
    def of(cls, args: TrainingArguments, model: torch.nn.Module, dataloader: object) -> MicroBatchCounter:
        """The counter of one rank of a training run."""
        return cls(
            own_batch=counts_its_batch(args, model),
            new_rows=new_rows_of(args, model, dataloader),
            cut=ranks_on_one_row(args) > 1,
        )

    @property
    def steps_waiting(self) -> int:
        """Finished steps that were not taken yet."""
        return len(self._waiting) + len(self._read)

    def count(self, counts: TokenCounts) -> None:
        """Count one micro-batch."""
        if not self._told:
            self._told = True
            self.current = Observation(excluded=self.current.excluded)
        self.current.add(counts)

    def watch(
        self,
        model: torch.nn.Module,
        *,
        counting: Callable[[], bool],
        window: int | None = None,
        losses: ReturnedLosses | None = None,
    ) -> None:
        """Look at the inputs and the loss of every training forward pass while `counting()` is true.

        `token_counts` is taken out of the inputs in any case: it is ours, and the model does not know it.

        Args:
            model: the model whose forward gets the batch; hooks of a model inside DDP, FSDP2 or PEFT run as well.
            counting: whether a training step is under way; start-up probes and evaluation are not.
            window: sliding window whose pairs are to be counted.
            losses: of the trainer, where it is known: what it logs counts, and not the loss among the model's outputs.
        """
        if losses is not None:
            self._losses = losses
            losses.hear(lambda loss: self.current.look_at_loss(loss))  # `current` is another one every step
        rule = LabelRule.of(model, window, cut=self._cut)
        one_at_a_time = threading.Lock()  # DataParallel calls its replicas in threads

        def look(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            counts = keywords.get(TOKEN_COUNTS_KEY)
            if counting() and torch.is_grad_enabled() and not self._told:
                with one_at_a_time:
                    self._see(arguments, keywords, counts, rule)
            if counts is None:
                return None
            return arguments, {key: value for key, value in keywords.items() if key != TOKEN_COUNTS_KEY}

        def look_at_loss(module: torch.nn.Module, arguments: tuple[Any, ...], outputs: Any) -> None:
            # A trainer that tells its counts tells its loss: the model's own of an empty row is 0 / 0 and not used.
            used = not self._told and counting() and torch.is_grad_enabled()
            used = used and not self._losses.heard
            if used and isinstance(outputs, Mapping):
                with one_at_a_time:
                    self.current.look_at_loss(outputs.get("loss"))

        # Left out of torch.compile: it changes Python state, which a compiled graph must not capture.
        disable: Any = torch.compiler.disable
        self._handles = (
            model.register_forward_pre_hook(disable(look), with_kwargs=True),
            model.register_forward_hook(disable(look_at_loss)),
        )

    def unwatch(self) -> None:
        """Take the hooks off again."""
        self._losses.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def look_at_gradient(self, model: torch.nn.Module) -> None:
        """Queue a look at whether the step's gradient is finite; its norm, where a trainer gave it, says more."""
        if not self._norm_given:
            self.current.look_at_gradient(self._probe.smallest(model))

    def look_at_norm(self, norm: object) -> None:
        """Queue a look at whether the norm of the step's gradient is finite."""
        self._norm_given = self._norm_given or isinstance(norm, torch.Tensor)
        self.current.look_at_gradient(norm)

    def end_step(self, number: int, *, excluded: str | None) -> None:
        """The optimizer step with this number is over."""
        if self.current.excluded is None:
            self.current.excluded = excluded
        if self.current.micro_batches == 0:
            self.current.add(_UNKNOWN)  # no one saw a batch: unknown, not zero
            self.current.micro_batches = 0
        self._waiting.append((number, self.current))
        if len(self._waiting) >= MOST_UNREAD:
            self.peek()  # waits for the device, once in so many steps
        self.current = Observation()
        self._batch = _nothing  # the next step may train on the same batch again

    def peek(self) -> list[tuple[int, CountedStep]]:
        """The finished steps, read from the device in one transfer. Waits for it: not for every step."""
        numbers = [number for number, _ in self._waiting]
        counted = read([observation for _, observation in self._waiting])
        if not self._own_batch:
            counted = [replace(step, tokens=NO_TOKENS) for step in counted]
        self._read += zip(numbers, counted, strict=True)
        self._waiting = []
        return self._read

    def take(self) -> list[tuple[int, CountedStep]]:
        """As `peek`, and forget them."""
        taken, self._read = self.peek(), []
        return taken

    def _see(self, arguments: tuple[Any, ...], keywords: dict[str, Any], counts: Any, rule: LabelRule) -> None:
        batch = keywords.get("input_ids", arguments[0] if arguments else None)
        again = batch is not None and self._batch() is batch
        self._batch = weakref.ref(batch) if torch.is_tensor(batch) else _nothing
        if again:
            # A second forward pass over one batch (R-Drop, a consistency loss): no new token, and FLOPs nobody knows.
            self.current.tokens = self.current.tokens + replace(NO_TOKENS, squared_lengths=None, window_pairs=None)
            return
        if isinstance(counts, TokenCounts):
            self.current.add(counts)
            return
        ids = keywords.get("input_ids")
        if keywords.get("fused_lm_head") and torch.is_tensor(ids) and ids.device.type in _HEAD_ON_TARGETS:
            self.head_on_targets = True
        with torch.no_grad():
            seen = count_new_rows(arguments, keywords, rule, self._new_rows)
        if seen is None:
            self.current.add(_UNKNOWN)
        else:
            self.current.add(*seen)


def _nothing() -> None:
    """No batch."""
