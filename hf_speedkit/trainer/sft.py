"""`SpeedSFTTrainer`: a drop-in SFTTrainer that packs to one shape, proves what it runs and measures it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from trl import SFTConfig

from hf_speedkit.core.families import refuse_leaking_family
from hf_speedkit.core.records import DocumentReport
from hf_speedkit.core.summary import PackingSummary, RunSummary, loss_summary, packing_summary
from hf_speedkit.kernels.fused_layers import fused_layers
from hf_speedkit.packing.collator import PackedCollator
from hf_speedkit.packing.documents import document_lengths
from hf_speedkit.packing.planner import count_padded_batches
from hf_speedkit.packing.sampler import PackedBatchSampler
from hf_speedkit.packing.stream import StreamCollator
from hf_speedkit.trainer.adapters import complete_head
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.before_loading import kernel_mode, require_kernels, require_parts
from hf_speedkit.trainer.checkpoints.interrupt import interrupts_told
from hf_speedkit.trainer.checkpoints.resume import refuse_unread_resume
from hf_speedkit.trainer.checkpoints.safe import SafeCheckpoints
from hf_speedkit.trainer.config import settled_config
from hf_speedkit.trainer.data.answer_rows import as_messages
from hf_speedkit.trainer.data.before_weights import check_rows
from hf_speedkit.trainer.data.inputs import check_packing_request, check_pad_token, embedding_rows, named_datasets
from hf_speedkit.trainer.data.positions import first_position, longest_padding, refuse_rows
from hf_speedkit.trainer.data.preparation import PreparedDatasets
from hf_speedkit.trainer.kernel_callback import activation_dtype
from hf_speedkit.trainer.memory.check import bits_of, require_memory
from hf_speedkit.trainer.memory.offload_choice import OffloadChoice
from hf_speedkit.trainer.memory.recompute import RecomputeChoice
from hf_speedkit.trainer.metrics.mfu_inputs import flops_of, sliding_window
from hf_speedkit.trainer.metrics.progress import CompactProgress
from hf_speedkit.trainer.output import STEP_LOG_NAME, existing_run, refuse_existing_run
from hf_speedkit.trainer.proof.head_proof import check_trained, refuse_other_models
from hf_speedkit.trainer.proof.startup import StartupProof
from hf_speedkit.trainer.ranks.stragglers import log_stragglers
from hf_speedkit.trainer.sinks import JsonlSink
from hf_speedkit.trainer.step.garbage import QuietGarbage
from hf_speedkit.trainer.step.loss import DeviceMetrics
from hf_speedkit.trainer.step.packed_layers import packed_layers, padded_attention
from hf_speedkit.trainer.step.updates import FastUpdates
from hf_speedkit.trainer.throughput_callback import ThroughputCallback
from hf_speedkit.trainer.trace_callback import TraceCallback
from hf_speedkit.trainer.whole_weights import checked_loading

logger = logging.getLogger(__name__)


class SpeedSFTTrainer(PreparedDatasets, FastUpdates, SafeCheckpoints):
    """SFTTrainer with packing, proof and metrics on by default; same signature.

    TRL tokenizes and masks. Then documents are checked and counted, planned into rows of `tokens_per_batch` slots anew
    every epoch, collated as one row [1, tokens_per_batch] a micro-batch, and before step 1 the kernels are inspected
    and documents are shown not to see one another. Every log carries tokens per second, through `Trainer.log`.

    Args:
        model: as for SFTTrainer.
        args: a SpeedSFTConfig. A plain SFTConfig is taken over as it is: packed if it says packing=True.
        data_collator: only without packing; packing brings its own.
        train_dataset, eval_dataset, processing_class: as for SFTTrainer.
        compute_loss_func, compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs,
        preprocess_logits_for_metrics, quantization_config, peft_config, formatting_func: as for SFTTrainer.

    Raises:
        ConfigurationError, DatasetError, PackingError: before anything is tokenized or written.
        KernelAssertionError, IsolationError: from `train()`, before step 1.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[..., Any] | None = None,
    ) -> None:
        refuse_other_models(model, processing_class)
        args = settled_config(args, model)
        require_parts(args, eval_dataset, callbacks, adapted=peft_config is not None or hasattr(model, "peft_config"))
        self._existing_run = None if args.allow_existing_output else existing_run(args.output_dir)
        self._reports: dict[str, DocumentReport] = {}
        self.train_sampler: PackedBatchSampler | None = None
        self._changed_layers: tuple[str, ...] = ()
        self.packing_active, self.own_head = args.packing, False
        loaded = not isinstance(model, str)
        named = named_datasets(train_dataset, eval_dataset)
        check_rows(named, args, tokenizer=processing_class, formatting_func=formatting_func, loaded=loaded)
        if self.packing_active:
            check_packing_request(args, data_collator, train_dataset, eval_dataset, model, peft_config)
        quantized, adapted = quantization_config is not None, peft_config is not None
        require_kernels(model, args, adapted=adapted, quantized=quantized)
        if not loaded:  # before anything is loaded
            require_memory(model, args, peft_config=peft_config, weight_bits=bits_of(quantization_config))
        with checked_loading():
            super().__init__(
                model=model,
                args=args,
                data_collator=data_collator,
                train_dataset=as_messages(train_dataset, args, formatting_func),
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                compute_loss_func=compute_loss_func,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
                quantization_config=quantization_config,
                peft_config=peft_config,
                formatting_func=formatting_func,
            )
        complete_head(self.model)
        self.check_prepared()
        if self.packing_active or max(args.per_device_train_batch_size, args.per_device_eval_batch_size) > 1:
            check_pad_token(self._tokenizer.pad_token_id, self.model)
        if self.packing_active or args.padding_free:
            refuse_leaking_family(self.model.config.get_text_config().model_type)
            refuse_rows(self.model, args.row_slots if self.packing_active else None)
        if self.packing_active or type(self).compute_loss is DeviceMetrics.compute_loss:
            # Vision-language classes deny it of their own loss, which is not used here; uncounted, an emptier row or
            # micro-batch would weigh as much as a full one.
            self.model_accepts_loss_kwargs = True
        if self.packing_active:
            self._padding_collator = self.data_collator
            self.own_head = self.use_loss_head()
            # TRL refuses a collator of one's own beside packing, so it takes its place afterwards.
            self.data_collator = StreamCollator(
                PackedCollator(
                    self._tokenizer.pad_token_id,
                    args.row_slots,
                    first_position=first_position(self.model),
                    target_positions=self.own_head,
                    sliding_window=sliding_window(self.model),
                    longest_segment=longest_padding(self.model),
                    vocabulary=embedding_rows(self.model) if self.stream is not None else None,
                )
            )
        self.startup = StartupProof(self)
        self.throughput = self._throughput_callback() if args.throughput else None
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(CompactProgress())
        self.recompute = RecomputeChoice(
            args.activation_checkpointing_layers, packed=self.packing_active, keep=args.activation_checkpointing_keep
        )
        self.add_callback(self.recompute)
        self.offloading = OffloadChoice(args.activation_offloading_layers, self.recompute)
        self.add_callback(self.offloading)
        self.add_callback(QuietGarbage(self.until_trained))
        self.trace = TraceCallback(args.trace_steps) if args.trace_steps else None
        attach(self, *(callback for callback in (self.startup, self.throughput, self.trace) if callback is not None))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if not self.packing_active:
            return super()._get_train_sampler(train_dataset)
        self.train_sampler = self._packed_sampler(dataset, train=True)
        return self.train_sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if not self._eval_is_packed():
            return super()._get_eval_sampler(eval_dataset)
        return self._packed_sampler(eval_dataset, train=False)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's loader, see `_evaluated`."""
        with self._evaluated():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Trainer's loader, see `_evaluated`."""
        with self._evaluated():
            return super().get_test_dataloader(test_dataset)

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        """TRL's padding collator where evaluation is not packed but training is; a last, short batch counts as well."""
        collator, drop_last = self.data_collator, self.args.dataloader_drop_last
        if self.packing_active and not self._eval_is_packed():
            self.data_collator = self._padding_collator
        self.args.dataloader_drop_last = False
        try:
            yield
        finally:
            self.data_collator, self.args.dataloader_drop_last = collator, drop_last

    def _packed_sampler(self, dataset: Dataset, *, train: bool) -> PackedBatchSampler:
        args = self.args
        lengths = document_lengths(dataset).tolist()
        if train and args.world_size > 1:
            log_stragglers(self.model, lengths, args)
        return PackedBatchSampler(
            lengths,
            tokens_per_batch=args.row_slots,
            epochs=args.epochs(sum(lengths)) if train else 1,
            world_size=args.world_size,
            rank=args.process_index,
            gradient_accumulation_steps=args.gradient_accumulation_steps if train else 1,
            strategy=args.packing_strategy,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            shuffle=train and args.train_sampling_strategy != "sequential",
            cost_window_steps=(args.cost_window_steps or 1) if train else 1,
        )

    def set_sampler_epoch(self, global_step: int) -> None:
        """Set the sampler's epoch from the number of optimizer steps taken."""
        if self.train_sampler is not None:
            self.train_sampler.set_epoch(global_step // self.train_sampler.steps_per_epoch)

    @property
    def kernel_mode(self) -> str:
        """How kernels are asserted; see `before_loading.kernel_mode`."""
        return kernel_mode(self.args)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Prove, then train; see Trainer.train.

        Raises:
            ConfigurationError: output_dir holds another run and this is no resume; nothing is trained.
            CheckpointError, PackingError: the checkpoint is damaged, or this run would see other documents.
            KernelAssertionError, IsolationError: before step 1, on all ranks.
        """
        check_trained(self.model)
        refuse_unread_resume(self.args, resume_from_checkpoint)
        if not resume_from_checkpoint:
            refuse_existing_run(self.args.output_dir, self._existing_run)
        self._existing_run = None  # from here on what lies there is ours
        with interrupts_told(self), ExitStack() as self._running:
            self._running.enter_context(self.startup.watched())  # sharding and loading can fail on one rank alone
            self._running.callback(self.recompute.undo)
            self._running.callback(self.offloading.undo)
            if self.throughput is not None:
                self._running.callback(self.throughput.close)
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        report = self.stream_report()
        if report is not None:
            self._reports["train"] = report
            logger.info("train documents: %s", report.sentence())
        return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluation with the same layers as training; see `DeviceMetrics.evaluation_loop`."""
        if not self._eval_is_packed():
            with padded_attention(self.model):
                return super().evaluation_loop(*args, **kwargs)
        with self._packed_layers():
            return super().evaluation_loop(*args, **kwargs)

    def summary(self) -> RunSummary:
        """What the run came to, for `hf_speedkit.trainer.summary.print_summary`; call it after `train()`."""
        return RunSummary(
            world_size=self.args.world_size,
            documents=self._reports.get("train"),
            packing=self._packing_summary(),
            packed_slots=self.args.row_slots if self.packing_active else None,
            totals=None if self.throughput is None else self.throughput.run_totals(),
            loss=loss_summary(self.state.log_history, after_step=self.startup.resumed_at),
            kernels=self.startup.kernels,
            isolation=self.startup.isolation,
            changed_layers=self._changed_layers + tuple(filter(None, [self.recompute.line()])),
            startup_s=dict(self.startup.seconds),
            resumed_at=self.startup.resumed_at,
            traces=() if self.trace is None else tuple(map(str, self.trace.files)),
            output_dir=self.args.output_dir,
            step_log=STEP_LOG_NAME if self.throughput is not None and self.args.step_log else None,
            report_to=tuple(self.args.report_to),
        )

    def _packing_summary(self) -> PackingSummary | None:
        if self.train_sampler is None:
            return None
        padded = count_padded_batches(self.train_sampler.lengths, self.args.row_slots)
        return packing_summary(self.train_sampler.plan(0), padded)

    def until_trained(self, context: AbstractContextManager[Any]) -> Any:
        """Enter a context that is left when training ends, or fails."""
        return self._running.enter_context(context)

    def prepare_layers(self) -> None:
        """Make the prepared model's layers ready until training ends: proven fused kernels, then packed rows."""
        if self.args.fused_layers and self.args.n_gpu > 1:
            # A replica's copy of a bound forward is still that of the layer on the first GPU, weights included.
            logger.warning("fused layers are left out: one process drives %d GPUs by DataParallel", self.args.n_gpu)
        elif self.args.fused_layers:  # first: a reference is bound only where nothing faster is
            self._running.enter_context(
                fused_layers(
                    self.model,
                    exclude=self.args.unfused_layers,
                    dtype=activation_dtype(self.args),
                    tokens_per_batch=self.args.row_slots if self.packing_active else None,
                )
            )
        self._running.enter_context(self._packed_layers())

    @contextmanager
    def _packed_layers(self) -> Iterator[None]:
        if not self.packing_active:
            yield
            return
        with packed_layers(
            self.model,
            device=self.args.device,
            references=self.kernel_mode != "strict",
            attention=self.args.packed_attention,
            dtype=activation_dtype(self.args),
        ) as changed:
            # Evaluation between steps finds most of it done already.
            self._changed_layers += tuple(line for line in changed if line not in self._changed_layers)
            yield

    def _throughput_callback(self) -> ThroughputCallback:
        sinks = (JsonlSink(Path(self.args.output_dir) / STEP_LOG_NAME),) if self.args.step_log else ()
        flops = flops_of(self.model)
        if flops is not None:
            # TRL's fused head scores target positions only on a GPU, and makes its product again in backward.
            on_targets = self.own_head or self.args.device.type == "cuda"
            flops = replace(flops, head_on="target" if on_targets else "real", head_again=not self.own_head)
        return ThroughputCallback(
            flops=flops,
            sinks=sinks,
            peak_tflops=self.args.peak_tflops,
            count_launches_every=self.args.count_launches_every,
            nonfinite=self.args.nonfinite,
        )

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """Trainer's count of target tokens, which all ranks gather: waiting for the slowest is no data wait."""
        if self.throughput is not None:
            self.throughput.batches_ready()
        return super()._get_num_items_in_batch(batch_samples, device)
