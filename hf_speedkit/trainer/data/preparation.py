"""From the datasets that a user passes to documents: TRL tokenizes and masks, what it would do silently is said."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from functools import partial
from json import JSONDecodeError
from typing import Any, Self

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from trl import SFTTrainer

from hf_speedkit.core.document_records import DocumentReport
from hf_speedkit.core.errors import DatasetError
from hf_speedkit.packing.documents import document_lengths, prepare_documents
from hf_speedkit.packing.row_rules import PACKED_COLUMNS
from hf_speedkit.packing.stream import PackedStream
from hf_speedkit.packing.stream_source import refuse_other_orders, share_of_rank, shuffles_of
from hf_speedkit.trainer.combination_rules import require_best_metric
from hf_speedkit.trainer.config import SpeedSFTConfig
from hf_speedkit.trainer.data.answer_rows import answered, no_answers, without_marks
from hf_speedkit.trainer.data.conversation_checks import SAMPLE_ROWS
from hf_speedkit.trainer.data.document_ends import say_what_is_odd
from hf_speedkit.trainer.data.inputs import (
    check_dataset,
    check_vocabulary,
    named_datasets,
    refuse_packed_evaluation,
    with_template_kwargs,
)
from hf_speedkit.trainer.data.positions import check_lengths
from hf_speedkit.trainer.data.raw_rows import (
    as_rows,
    checked_stream,
    columns_of,
    formatted,
    is_pair,
    one_format,
)
from hf_speedkit.trainer.data.template_day import day_of_run, on_day, writes_the_day
from hf_speedkit.trainer.data.templates import MaskCheck, TemplateChecks, log_example
from hf_speedkit.trainer.precision_rules import refuse_half_weights
from hf_speedkit.trainer.ranks.agreement import agree, gather_agreed
from hf_speedkit.trainer.setting_names import refuse_unknown_arguments

logger = logging.getLogger(__name__)

_TOLERATED_CUT_SHARE = 0.01
_TOLERATED_DRY_SHARE = 0.01


class PreparedDatasets(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer whose datasets are checked, masked each as it is made, and packed where that is asked for."""

    _reports: dict[str, DocumentReport]
    completion_only_loss: bool
    chat_template: Any
    template_day: datetime | None = None
    _prepared: Any
    train_dataset: Any

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Say where arguments belong that there are not: many were once the trainer's, and are its config's now."""
        known = inspect.signature(cls.__init__).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in known.values()):
            refuse_unknown_arguments(given, [*known][1:], [setting.name for setting in fields(SpeedSFTConfig)])
        made: Self = super().__new__(cls)
        return made

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: SpeedSFTConfig, packing: bool, formatting_func: Any, name: str
    ) -> Any:
        """TRL's tokenization and masks, the template looked at before them; its packing is replaced by ours."""
        streaming = isinstance(dataset, IterableDataset)
        dataset = as_rows(dataset)
        if packing and streaming:
            if getattr(dataset, "_distributed", None) is None:
                refuse_other_orders(gather_agreed(partial(shuffles_of, dataset)))
            dataset = share_of_rank(dataset, rank=args.process_index, world_size=args.world_size)
        tokenized = "input_ids" in columns_of(dataset)
        if formatting_func is not None and not tokenized:
            dataset = formatted(dataset, formatting_func, args.dataset_text_field)
        dataset = with_template_kwargs(one_format(dataset, args.dataset_text_field), args)
        if streaming:
            dataset = checked_stream(dataset, args.dataset_text_field, nulls=args.template_check != "strict")
        columns = columns_of(dataset)
        if args.assistant_only_loss and "messages" in columns:
            dataset = answered(dataset, name)
        conversational = bool({"messages", "conversations", "prompt"} & set(columns))
        if tokenized or not conversational:
            _say_what_is_idle(args, name)
        if not tokenized and not conversational and args.dataset_text_field in columns:
            self._require_end_token()
        found = None if streaming else len(dataset)
        own_template = getattr(processing_class, "chat_template", None)
        self._settle_day(args, own_template)
        checks = TemplateChecks(
            self._tokenizer,
            self.chat_template,
            args.template_check,
            args.exclude_generation_prompt,
            processor=processing_class,
            answers_only=args.assistant_only_loss,
            text_field=args.dataset_text_field,
            inference_template=None if self.template_day is None else on_day(own_template, self.template_day),
        )
        checks.before(dataset, name)
        with self._masking(args, columns):
            dataset = self._tokenized(dataset, processing_class, args, checks, name)
            masks = MaskCheck(
                name=name, assistant_only=args.assistant_only_loss, completion_only=bool(self.completion_only_loss)
            )
        if not packing:
            rows = masks.padded(_without_boundaries(dataset) if args.padding_free else dataset, found)
            log_example(rows, self._tokenizer, name)
            return dataset
        if streaming:
            stream = PackedStream(dataset, tokens_per_batch=args.row_slots, overlong=args.overlong)
            rows, report = agree(lambda: stream.sample(SAMPLE_ROWS))
            agree(lambda: masks.packed(report, rows))
            log_example(rows, self._tokenizer, name)
            return stream
        dataset, report = self._documents(dataset, args, masks)
        self._reports.setdefault(name, report)  # "train" is the first of that name: an evaluation set may have it too
        return dataset

    def _settle_day(self, args: SpeedSFTConfig, own: Any) -> None:
        """Write the day on which the run was begun, the same on all ranks, where the template writes that of its use.

        TRL renders with `chat_template` whatever it saves with the model.
        """
        template = self.chat_template or own
        if self.template_day is None and writes_the_day(template):
            self.template_day = min(gather_agreed(partial(day_of_run, args)))
            self.chat_template = on_day(template, self.template_day)

    def _documents(self, dataset: Dataset, args: SpeedSFTConfig, masks: MaskCheck) -> tuple[Dataset, DocumentReport]:
        """What of a tokenized dataset can be packed, counted and shown."""
        documents, report = prepare_documents(dataset, tokens_per_batch=args.row_slots, overlong=args.overlong)
        masks.packed(report, documents)
        dry = report.empty_documents + report.targetless_documents
        say = logger.warning if dry > _TOLERATED_DRY_SHARE * report.documents_found else logger.info
        say("%s documents: %s", masks.name, report.sentence())
        log_example(documents, self._tokenizer, masks.name)
        return documents, report

    def _tokenized(
        self, dataset: Any, processing_class: Any, args: SpeedSFTConfig, checks: TemplateChecks, name: str
    ) -> Any:
        """TRL's preparation; a dataset is cut to `max_length` in a second go, so that it can be said what is lost."""
        cut = args.max_length is not None and isinstance(dataset, Dataset)
        whole = args
        if cut:
            whole = copy.copy(args)
            whole.max_length, whole.shuffle_dataset = None, False
        try:
            tokens = super()._prepare_dataset(dataset, processing_class, whole, False, None, name)
        except RuntimeError as error:
            raise without_marks(error, dataset, name) from error
        except StopIteration as error:  # a stream whose rows `answered` has left out
            raise no_answers(name) from error
        except (TemplateError, TypeError, JSONDecodeError) as error:
            # Of a row that no sample held; it says neither which nor why.
            named = checks.failure_of(dataset) if isinstance(dataset, Dataset) else None
            if named is None:
                raise
            raise named from error
        dataset = checks.after(tokens, name, num_proc=args.dataset_num_proc)
        if not cut:
            return dataset
        _say_what_is_cut(dataset, args.max_length, name)
        return super()._prepare_dataset(dataset, processing_class, args, False, None, name)

    @contextmanager
    def _masking(self, args: SpeedSFTConfig, columns: list[str]) -> Iterator[None]:
        """Mask the prompts of a dataset that has them.

        TRL decides by the training data for all: an evaluation set of prompts and completions beside training data of
        text would be scored on its prompts too.
        """
        former = self.completion_only_loss
        if args.completion_only_loss is None:
            self.completion_only_loss = is_pair(columns)
        try:
            yield
        finally:
            self.completion_only_loss = former

    def check_prepared(self) -> None:
        """Refuse tokens, labels, lengths and weights that training cannot take, and say what is odd about ends.

        Raises:
            ConfigurationError: see `refuse_half_weights`.
            DatasetError, PackingError: see `check_vocabulary` and `check_lengths`.
        """
        refuse_half_weights(self.args, (w.dtype for w in self.model.parameters() if w.requires_grad))
        self._prepared = self.train_dataset
        for name, dataset in named_datasets(self.train_dataset, self.eval_dataset):
            check_vocabulary(dataset, self.model, name)
            packed = self.args.packing if dataset is self.train_dataset else self._eval_is_packed()
            check_lengths(dataset, self.model, name, packed=packed or self.args.padding_free)
            if dataset is self.train_dataset and self.args.process_index == 0:
                say_what_is_odd(dataset, self._tokenizer, self.model, name)

    def _require_end_token(self) -> None:
        if self._tokenizer.eos_token is None:
            raise DatasetError(
                "the tokenizer has no eos_token to end a text with",
                mend='set one: eos_token="..." in the config, a token of the vocabulary',
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer.train; a dataset put into the prepared one's place is looked at first (see `_check_replaced`).

        Raises:
            DatasetError, PackingError: it cannot be trained on.
            ConfigurationError: see `require_best_metric`.
        """
        require_best_metric(self)
        agree(self._check_replaced)
        return super().train(*args, **kwargs)

    def _check_replaced(self) -> None:
        """Check and count tokenized rows that somebody has assigned to `train_dataset`, as masks of answers do."""
        dataset, was = self.train_dataset, self._prepared
        if dataset is was or (
            not (isinstance(was, Dataset) and "input_ids" in was.column_names) and not isinstance(was, PackedStream)
        ):
            return  # rows that TRL does not prepare, either: images, or a stream that is not packed
        columns = getattr(dataset, "column_names", None)
        others = (
            dataset is not None and not isinstance(dataset, Dataset) and (columns is None or "input_ids" in columns)
        )
        if others and not self.args.packing:
            return  # any sequence or stream of tokenized rows can be padded; none is planned or counted before
        if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
            raise DatasetError(
                f"the train_dataset was replaced by a {type(dataset).__name__}, and not by a tokenized Dataset",
                evidence=(f"its columns: {', '.join(columns or ()) or 'unknown'}",),
                mend="pass it to SpeedSFTTrainer(train_dataset=...), which tokenizes, checks and packs it",
            )
        masks = MaskCheck(
            name="train",
            assistant_only=self.args.assistant_only_loss,
            completion_only=bool(self.completion_only_loss),
        )
        if self.args.packing:
            self.train_dataset, self._reports["train"] = self._documents(dataset, self.args, masks)
        else:
            masks.padded(dataset, len(dataset))
        logger.warning("the train_dataset was replaced after the trainer was made: its rows are trained on")
        self.check_prepared()

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's predictions on a dataset of any kind that `evaluate` takes; the parent's takes a prepared one."""
        if not self._skip_prepare_dataset:
            self._check_new(test_dataset, "test")
            test_dataset = self._prepare_dataset(
                test_dataset, self.processing_class, self.args, self._eval_is_packed(), self._formatting_func, "test"
            )
        return super().predict(test_dataset, *args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's evaluation; a dataset passed here is looked at as those of the constructor are.

        Raises:
            DatasetError, PackingError: it cannot be evaluated.
        """
        if isinstance(eval_dataset, str):
            names = list(self.eval_dataset) if isinstance(self.eval_dataset, dict) else []
            if eval_dataset not in names:
                raise DatasetError(
                    f"there is no evaluation set {eval_dataset!r}",
                    evidence=(f"those there are: {', '.join(names) or 'one without a name'}",),
                    mend="pass a name out of eval_dataset={name: dataset, ...}, or the dataset",
                )
        elif eval_dataset is not None and not self._skip_prepare_dataset:
            for name, dataset in (eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}).items():
                self._check_new(dataset, name)
        return super().evaluate(eval_dataset, *args, **kwargs)

    def _eval_is_packed(self) -> bool:
        return bool(self.args.packing if self.args.eval_packing is None else self.args.eval_packing)

    def _check_new(self, dataset: Any, name: str) -> None:
        refuse_packed_evaluation(dataset, packing=self._eval_is_packed())
        check_dataset(
            dataset, text_field=self.args.dataset_text_field, formatting_func=self._formatting_func, name=name,
            completion_only_loss=self.args.completion_only_loss,
        )  # fmt: skip


def _without_boundaries(dataset: Any) -> Any:
    """The dataset without the columns that TRL's padding-free collator reads."""
    return dataset.remove_columns([name for name in columns_of(dataset) if name in PACKED_COLUMNS])


def _say_what_is_idle(args: SpeedSFTConfig, name: str) -> None:
    """Settings for conversations do nothing to rows that hold text or tokens."""
    for setting in ("chat_template_kwargs", "exclude_generation_prompt"):
        if getattr(args, setting):
            logger.warning("%s does nothing to the %s dataset: its rows are no conversations", setting, name)


def _say_what_is_cut(dataset: Dataset, max_length: int, name: str) -> None:
    lengths = document_lengths(dataset)
    beyond = int((lengths - max_length).clip(min=0).sum())
    if not beyond:
        return
    share = beyond / int(lengths.sum())
    say = logger.warning if share > _TOLERATED_CUT_SHARE else logger.info
    say(
        "%s documents: %s of %s are longer than max_length=%s and cut there; %s of %s tokens (%.1f%%) are lost. "
        "max_length=%s keeps all",
        name, f"{int((lengths > max_length).sum()):,}", f"{len(lengths):,}", f"{max_length:,}", f"{beyond:,}",
        f"{int(lengths.sum()):,}", 100 * share, int(lengths.max()),
    )  # fmt: skip
