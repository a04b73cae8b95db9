"""What is proven between "prepared" and "step 1": sharding, kernels, the real batch, isolation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import IntervalStrategy, TrainerControl, TrainerState, TrainingArguments

from hf_speedkit.core.errors import IsolationError, PackingError, SpeedkitError
from hf_speedkit.core.records import Finding, IsolationReport, KernelCheck
from hf_speedkit.kernels.fla_convolution import through_fla
from hf_speedkit.kernels.inspection import assert_kernels, check_kernels
from hf_speedkit.packing.boundaries import check_packed_batch
from hf_speedkit.packing.isolation import assert_isolation
from hf_speedkit.trainer.attach import refuse_second
from hf_speedkit.trainer.before_loading import loading_settings
from hf_speedkit.trainer.data.document_ends import end_tokens
from hf_speedkit.trainer.data.resume import compare_documents, data_of_rank, padded_order, refuse_ranks_apart
from hf_speedkit.trainer.data.template_day import DAY_KEY
from hf_speedkit.trainer.kernel_callback import activation_dtype, packed_slots
from hf_speedkit.trainer.metrics.saved_totals import load_totals
from hf_speedkit.trainer.number_rules import warn_of_long_warmup
from hf_speedkit.trainer.proof.collated import looked_at, odd_targets
from hf_speedkit.trainer.proof.first_step import FirstStep
from hf_speedkit.trainer.proof.flattening import attention_of, hidden_documents
from hf_speedkit.trainer.proof.head_proof import probe_tokens, prove_loss_head
from hf_speedkit.trainer.proof.module_mode import in_mode
from hf_speedkit.trainer.ranks.agreement import agree, gather_agreed, runs_alone, say_once
from hf_speedkit.trainer.ranks.alike import refuse_unlike, surroundings, weight_sample
from hf_speedkit.trainer.ranks.roll_call import RollCall
from hf_speedkit.trainer.ranks.watch import RankWatch
from hf_speedkit.trainer.sharded.communication import corrected_gathers
from hf_speedkit.trainer.sharded.preflight import (
    check_wrap_class,
    preflight,
    refuse_offload_without_host_group,
    refuse_sharded_four_bits,
)
from hf_speedkit.trainer.sharded.prepared import loaded_weights
from hf_speedkit.trainer.step.noise import document_noise

if TYPE_CHECKING:
    from hf_speedkit.trainer.sft import SpeedSFTTrainer

logger = logging.getLogger(__name__)


class StartupProof(FirstStep):
    """Runs the proofs in on_train_begin, where the model is prepared and no batch has been drawn.

    The first step ends them: see `FirstStep`.

    Args:
        trainer: its trainer; a callback alone sees neither the collator nor the wrapped model.
    """

    def __init__(self, trainer: SpeedSFTTrainer) -> None:
        super().__init__()
        self._trainer = trainer
        self.isolation: IsolationReport | None = None
        self.findings: tuple[Finding, ...] = ()
        self.seconds: dict[str, float] = {}
        self.resumed_at = 0
        self._begun_at: int | None = None
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        check_wrap_class(trainer.model, plugin)
        refuse_sharded_four_bits(trainer.model, plugin)
        refuse_offload_without_host_group(plugin, dist.get_backend_config() if dist.is_initialized() else "")
        self._loaded = loaded_weights(trainer.model)
        shards_its_own = trainer.is_fsdp_enabled and plugin is not None and not plugin.cpu_ram_efficient_loading
        self._weights = weight_sample(trainer.model) if shards_its_own else ""
        self._watch = RankWatch(trainer.args.stuck_rank_timeout_s)
        trainer.add_callback(self._watch)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Make the layers ready and prove them, or stop all ranks with one message."""
        trainer = self._trainer
        refuse_second(trainer.callback_handler.callbacks)  # add_callback may have brought one
        self.resumed_at = state.global_step
        if state.is_world_process_zero:
            warn_of_long_warmup(args, state.max_steps)
        trainer.restore_token_total(load_totals(state))
        refuse_ranks_apart(gather_agreed(partial(self._compare_documents, state)))
        self.findings = preflight(trainer, self._loaded)
        gathers = corrected_gathers(
            trainer.model,
            prefetch_layers=args.fsdp_prefetch_layers,
            backward_passes=args.gradient_accumulation_steps,
            without_copies=args.fsdp_zero_copy,
        )
        agree(lambda: trainer.until_trained(gathers))
        with self._timed("layers"):
            agree(trainer.prepare_layers)
        noise = args.neftune_noise_alpha if trainer.packing_active else None
        if noise:
            trainer.neftune_hook_handle.remove()  # transformers', by the length of the row
        if not trainer.packing_active:
            said = agree(lambda: self._odd_batch(given.get("train_dataloader")))
            say_once(logger.warning, [said] if said else [])
        self.prove()
        if noise:  # behind the proof, which compares outputs
            trainer.until_trained(document_noise(trainer.model, noise))
        self.expect(self._trainer.kernel_mode)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The ranks watch one another for the time of the context; see `RankWatch`. First they find out whether they
        can train together: the model's preparation is full of collectives."""
        with self._watch.running():
            self._compare_ranks()
            yield

    def call(self, roll_call: RollCall) -> None:
        """Wait for the ranks that make the same call; see `RankWatch.call`."""
        self._watch.call(roll_call)

    def meet(self, wants: Sequence[str], *, step: int, timeout_s: float) -> None:
        """Wait for the ranks before what all must do behind the same step; see `RankWatch.meet`."""
        self._watch.meet(wants, step=step, timeout_s=timeout_s)

    @property
    def kernels(self) -> tuple[KernelCheck, ...]:
        """One check per function: what was found before step 1 and, on a GPU, seen in it."""
        return self.checks

    def _compare_ranks(self) -> None:
        if runs_alone():
            return
        args = self._trainer.args
        lines = refuse_unlike(gather_agreed(lambda: surroundings(args, self._trainer.model, self._weights)))
        if lines and args.process_index == 0:
            logger.warning("the ranks do not run the same: %s", "; ".join(lines))

    def _compare_documents(self, state: TrainerState) -> dict[str, str]:
        trainer = self._trainer
        compare_documents(
            state,
            trainer.train_sampler,
            trainer.train_dataset,
            ignore=trainer.args.ignore_data_skip,
            streamed=trainer.stream is not None,
            padded=None if trainer.packing_active else padded_order(trainer.args, trainer.train_dataset),
        )
        if trainer.template_day is not None:
            state.stateful_callbacks[DAY_KEY] = trainer.template_day.isoformat()
        return data_of_rank(state, trainer.eval_dataset)

    def prove(self) -> None:
        """Kernels, the real batch, isolation; every rank must call it.

        Raises:
            KernelAssertionError, PackingError, IsolationError: on the rank that failed; SpeedkitError on the others.
        """
        with self._timed("kernels"):
            said: list[str] = []
            self.checks = agree(lambda: self._kernels(said.append))
            say_once(logger.warning, said)
        packed = self._trainer.packing_active
        batch = agree(self.probe_batch) if packed else None
        self._prove_head(batch)
        if not packed and self._trainer.args.padding_free:
            batch = agree(self.flattened_batch)
        if batch is not None and self._trainer.args.isolation_check:
            # The Trainer (transformers 5.23, trainer.py:2072) does so only at the first step, and `from_pretrained`
            # gives evaluation mode, in which nothing is checkpointed: the probe would hold every layer's activations.
            with self._timed("isolation"), in_mode(self._trainer.model_wrapped, training=True):
                self.isolation = agree(lambda: self._isolation(batch))
            logger.info("isolation proven on %d packed documents", self.isolation.documents)

    def _isolation(self, batch: dict[str, Any]) -> IsolationReport:
        try:
            return assert_isolation(self._trainer.model_wrapped, batch)
        except IsolationError as error:
            # transformers' functions without kernels have refused; packed rows get references instead.
            if self._trainer.packing_active or not isinstance(error.__cause__, ValueError):
                raise
            raise PackingError(
                "padding_free puts documents into one row, and a layer cannot keep them apart",
                evidence=error.evidence,
                mend="packing=True, or padding_free=False",
            ) from error

    def _prove_head(self, batch: dict[str, Any] | None) -> None:
        trainer = self._trainer
        if trainer.uses_fused_head() and not trainer._is_vision_dataset:
            if batch is None:
                batch = {"input_ids": probe_tokens(trainer.model, trainer.args.device)}
            prove = partial(prove_loss_head, dtype=activation_dtype(trainer.args), own=trainer.own_head)
            agree(lambda: prove(trainer.model_wrapped, trainer.model, batch))

    def _odd_batch(self, loader: Any) -> str | None:
        trainer = self._trainer
        look = looked_at(loader)
        hidden = hidden_documents(look.batch, attention_of(trainer.model.config))
        if hidden is not None and trainer.args.isolation_check:
            raise hidden
        return odd_targets(look, end_tokens(trainer._tokenizer, trainer.model))

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Tell the sampler its epoch.

        transformers 5.23 forwards set_epoch through one wrapper only (trainer.py:1851-1858); after a resume there are
        two, and the documents of a later epoch would silently come in the order of the first.
        """
        self._trainer.set_sampler_epoch(state.global_step)
        again = self._begun_at == state.global_step == self.resumed_at > 0
        if again and not self._trainer.packing_active and args.process_index == 0:
            logger.warning(
                "the stream ended within the %d batches that a resume skips, and what was read of its last pass is "
                "read again: transformers counts no passes. packing=True goes on with the very next row",
                state.global_step * args.gradient_accumulation_steps,
            )
        self._begun_at = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the last step, whatever logging_steps says, so that curve and summary end where training did."""
        if state.global_step >= state.max_steps and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began

    def _kernels(self, say: Callable[[str], object]) -> tuple[KernelCheck, ...]:
        trainer = self._trainer
        mode: Any = trainer.kernel_mode
        if mode == "off":
            return ()
        slots = trainer.args.row_slots if trainer.packing_active else packed_slots(trainer.args)
        if mode == "report":
            return check_kernels(trainer.model, tokens_per_batch=slots, liger=trainer.args.use_liger_kernel)
        checks = check_kernels(
            trainer.model,
            probe=True,
            tokens_per_batch=slots,
            dtype=activation_dtype(trainer.args),
            liger=trainer.args.use_liger_kernel,
            asked_attention=loading_settings(trainer.args).get("attn_implementation"),
        )
        return assert_kernels(trainer.model, mode=mode, checks=through_fla(checks), say=say)

    def probe_batch(self) -> dict[str, Any]:
        """A real packed batch on the model's device, through the collator that training will use."""
        batch = self._collated(self._rows())
        for key in ("token_counts", "target_positions"):  # for the trainer's own loss, not for the model
            batch.pop(key, None)
        prepared: dict[str, Any] = self._trainer._prepare_inputs(batch)
        check_packed_batch(prepared, required=("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"))
        return prepared

    def flattened_batch(self) -> dict[str, Any]:
        """Three documents as TRL's padding-free collator puts them into one row, whatever the batch size."""
        trainer = self._trainer
        rows = [row for row in islice(trainer.train_dataset, 64) if len(row["input_ids"]) > 1][:3]
        batch: dict[str, Any] = trainer._prepare_inputs(self._collated((rows * 3)[:3]))
        check_packed_batch(batch)
        return batch

    def _collated(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What the collator makes of documents; another than the trainer's own may fail on them, or make no batch."""
        collator = self._trainer.data_collator
        failure = None
        try:
            batch = collator(rows)
        except SpeedkitError:
            raise
        except Exception as error:  # noqa: BLE001 (collators raise what they like)
            failure, batch = error, None
        if not isinstance(batch, Mapping):
            said = (
                f"{type(failure).__name__}: {failure}" if failure is not None else f"it gave a {type(batch).__name__}"
            )
            raise PackingError(
                f"the data_collator, a {type(collator).__name__}, makes no row of documents",
                evidence=(said.splitlines()[0],),
                mend="leave trainer.data_collator as SpeedSFTTrainer made it, or packing=False and padding_free=False",
            ) from failure
        return dict(batch)

    def _rows(self) -> list[dict[str, Any]]:
        """Documents of one real row, two or more; the loader is not touched."""
        trainer = self._trainer
        slots = trainer.args.row_slots
        if trainer.stream is not None:
            rows = trainer.first_streamed(trainer.stream, slots // 3)
        else:
            if trainer.train_sampler is None:
                raise PackingError(
                    "the training loader was not made by this trainer, so nobody has packed its batches",
                    evidence=(f"{type(trainer).__name__}.get_train_dataloader or _get_train_sampler is an own one",),
                    mend="leave both as they are, or set packing=False",
                )
            packs = trainer.train_sampler.plan(0).packs
            pack = next((p for p in packs if len(p) >= 3), None)
            indices = list(pack) if pack is not None else list(range(min(3, len(trainer.train_dataset))))
            # Documents of half a row and more never share one: cut three of them, for the probe only.
            limit = slots if pack is not None else slots // 3
            rows = [{key: trainer.train_dataset[i][key][:limit] for key in ("input_ids", "labels")} for i in indices]
        if len(rows) == 1:  # a data set of one document: the probe needs a neighbour
            rows = [{key: value[: slots // 3] for key, value in rows[0].items()}] * 3
        return rows
