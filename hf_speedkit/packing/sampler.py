"""A batch sampler that gives every rank its packs, as many as every other rank, epoch after epoch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_speedkit.core.errors import PackingError
from hf_speedkit.core.records import PackingPlan
from hf_speedkit.packing.balance import Pack, deal_packs
from hf_speedkit.packing.planner import checked_lengths, document_order, plan_packing

# Counting the packs of every epoch costs 2 to 5 microseconds a document (plan_packing): up to 25 s for this many.
_COUNTED_DOCUMENTS = 5_000_000


class PackedBatchSampler(BatchRebalanceSampler):  # type: ignore[misc]
    """Yields the packs of one rank, one list of dataset indices a micro-batch; `[]` is a row without documents.

    Packs are made anew every epoch from (seed, epoch), while `len()` stays what it was: the Trainer reads it once,
    stops early where an epoch turns out shorter and drops what a longer one has over. The epoch with the most packs
    decides, the others are filled with empty rows, spread so that every optimizer step has documents. All ranks compute
    the same plan; nothing is communicated.

    Args:
        lengths: tokens of each document, 1 to tokens_per_batch.
        tokens_per_batch: slots of a row.
        epochs: how many epochs `len()` must be right for. Later ones work too (see `plan`).
        world_size: ranks that train on rows of their own.
        rank: this one, 0 <= rank < world_size.
        gradient_accumulation_steps: micro-batches of an optimizer step; an epoch is a whole number of them.
        strategy: see `plan_packing`.
        seed: of the document order.
        shuffle: False keeps the dataset's order in every epoch (evaluation).
        cost_window_steps: steps inside which packs of like cost are put on the ranks of one micro-batch. 1 changes no
            step's documents; see `balance.deal_packs`.

    Raises:
        PackingError: no documents, documents that do not fit, a rank outside the world, counts below 1.

    Source: transformers 5.23 tests the training sampler for being a BatchRebalanceSampler (trainer.py:1038, 1056): it
    then is the batch sampler, and accelerate's sharding is undone. Nothing else of that class is used, its `__init__`
    does not run. There is no `batch_size` attribute: accelerate would cut gathered values of the last batch by it.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        tokens_per_batch: int,
        epochs: int = 1,
        world_size: int = 1,
        rank: int = 0,
        gradient_accumulation_steps: int = 1,
        strategy: str = "auto",
        seed: int = 0,
        shuffle: bool = True,
        cost_window_steps: int = 1,
    ) -> None:
        _check_counts(
            epochs=epochs,
            world_size=world_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cost_window_steps=cost_window_steps,
        )
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise PackingError(f"rank {rank!r} is not one of {world_size} ranks", mend="0 <= rank < world_size")
        # 8 bytes a document; a list of integers takes 40.
        self.lengths = array("q", checked_lengths(lengths, tokens_per_batch))
        if not self.lengths:
            raise PackingError("there are no documents to sample", mend="check the dataset and its filters")
        self.tokens_per_batch = tokens_per_batch
        self.epochs = epochs
        self.world_size = world_size
        self.rank = rank
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.strategy = strategy
        self.seed = seed
        self.shuffle = shuffle
        self.cost_window_steps = cost_window_steps
        self.epoch = 0
        self._latest_plan: tuple[int, PackingPlan] | None = None
        self._steps_per_epoch = -(-self._most_packs() // (world_size * gradient_accumulation_steps))

    @property
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches of one rank in one epoch, the same for every rank and epoch."""
        return self._steps_per_epoch * self.gradient_accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return self._steps_per_epoch

    def __len__(self) -> int:
        return self.micro_batches_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` yields; an iterator already under way stays in its own.

        After a resume on two or more processes transformers 5.23 does not reach this (trainer.py:1851 looks through one
        wrapper, accelerate's skip_first_batches adds a second): call it from a callback's `on_epoch_begin`.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(slot[self.rank]) for slot in self.slots(self.epoch)])

    def slots(self, epoch: int) -> list[list[Pack]]:
        """Every rank's micro-batches of an epoch, `[micro_batches_per_epoch][world_size]` packs of document indices."""
        return deal_packs(
            self.plan(epoch).packs,
            self.lengths,
            tokens_per_batch=self.tokens_per_batch,
            steps=self._steps_per_epoch,
            world_size=self.world_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            window_steps=self.cost_window_steps,
            seed=self.seed,
            epoch=epoch,
        )

    def plan(self, epoch: int) -> PackingPlan:
        """The packs of all ranks in an epoch.

        An epoch that was not counted at the start and needs more rows than there are gets the packs of epoch 0, which
        fit, in an order of its own.
        """
        plan = self._plan(epoch)
        if len(plan.packs) <= self._steps_per_epoch * self.world_size * self.gradient_accumulation_steps:
            return plan
        packs = self._plan(0).packs
        order = document_order(len(packs), seed=self.seed, epoch=epoch)
        return replace(plan, packs=tuple([packs[index] for index in order]))

    def state_dict(self) -> dict[str, object]:
        """What fixes the order of documents. How far an epoch has come is the Trainer's to know: it skips batches."""
        window = 1 if self.world_size == 1 else self.cost_window_steps
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "strategy": self.strategy,
            "tokens_per_batch": self.tokens_per_batch,
            "packs_per_step": self.world_size * self.gradient_accumulation_steps,
            "steps_per_epoch": self._steps_per_epoch,
            "cost_window_steps": window,
            # Inside a window the number of ranks decides which documents make a step.
            "ranks_of_a_cost_window": None if window == 1 else self.world_size,
            "lengths": hashlib.sha256(self.lengths.tobytes()).hexdigest(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on in the epoch of a saved state.

        Raises:
            PackingError: the documents would come in another order than in the run that saved it; names what differs.
        """
        own = self.state_dict()
        state = {"cost_window_steps": 1, "ranks_of_a_cost_window": None, **state}  # not noted by earlier versions
        changed = [name for name in own if name != "epoch" and own[name] != state.get(name)]
        if changed:
            raise PackingError(
                "the resumed run would see its documents in another order",
                evidence=tuple(_difference(name, state.get(name), own[name]) for name in changed),
                mend=self._same_steps(state) or "resume with the settings and data of the saved run",
                regardless="ignore_data_skip=True goes on from the saved weights and begins the documents anew",
            )
        epoch = state.get("epoch")
        if not isinstance(epoch, int):
            raise PackingError(f"a saved state with epoch {epoch!r}", mend="pass what state_dict() returned")
        self.set_epoch(epoch)

    def _same_steps(self, state: Mapping[str, object]) -> str | None:
        """The setting that gives another number of ranks the saved run's steps; None where no number does."""
        saved = state.get("packs_per_step")
        if not isinstance(saved, int) or saved == self.world_size * self.gradient_accumulation_steps:
            return None
        if saved % self.world_size:
            return f"resume with a number of ranks that divides {saved}, the micro-batches of a saved step on all ranks"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"gradient_accumulation_steps={saved // self.world_size} gives {ranks} the saved steps"

    def _most_packs(self) -> int:
        """Rows that the fullest epoch needs."""
        documents = len(self.lengths)
        counted = min(self.epochs, max(1, _COUNTED_DOCUMENTS // documents)) if self.shuffle else 1
        # Downwards, so that the plan of epoch 0, which comes first, is the one that is kept.
        most = max(len(self._plan(epoch).packs) for epoch in reversed(range(counted)))
        if counted < self.epochs and self.shuffle:
            # Packs of one epoch and the next differ by some 0.01 % where there are millions of documents.
            most = min(documents, most + -(-most // 1000))
        return most

    def _plan(self, epoch: int) -> PackingPlan:
        if self._latest_plan is not None and self._latest_plan[0] == epoch:
            return self._latest_plan[1]
        self._latest_plan = None  # freed first: 10 million documents take half a GiB
        plan = plan_packing(
            self.lengths,
            tokens_per_batch=self.tokens_per_batch,
            strategy=self.strategy,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
        )
        self._latest_plan = (epoch, plan)
        return plan

    def __getstate__(self) -> dict[str, object]:
        # A plan takes some 60 bytes a document and can be made again.
        return {**self.__dict__, "_latest_plan": None}


def _difference(name: str, saved: object, now: object) -> str:
    if name == "lengths":
        return "documents: other ones, or in another order (their token counts differ)"
    return f"{name}: saved {saved!r}, now {now!r}"


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise PackingError(f"{name}={count!r} is not a count", mend=f"set {name} to a whole number from 1 up")
