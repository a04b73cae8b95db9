"""Chat templates and masks of one dataset: looked at before tokenization, applied and reported after it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from hf_speedkit.core.document_records import DocumentReport
from hf_speedkit.core.errors import DatasetError, SpeedkitError
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.packing.documents import prepare_documents
from hf_speedkit.packing.row_rules import refuse_shifted_labels
from hf_speedkit.packing.stream_documents import no_documents, read_document
from hf_speedkit.trainer.data.conversation_checks import (
    SAMPLE_ROWS,
    Messages,
    conversations_of,
    generation_prompt_spans,
    judge_differences,
    refuse_reasoning_line,
    rendering_differences,
)
from hf_speedkit.trainer.data.conversation_refusals import (
    lost_answers,
    opened_by_nothing,
    refuse_lost_messages,
    refuse_missing_template,
    refuse_weighed_messages,
    trained_question_tokens,
)
from hf_speedkit.trainer.data.conversation_roles import refuse_foreign_roles, written_roles
from hf_speedkit.trainer.data.document_ends import sample_rows
from hf_speedkit.trainer.data.empty_contents import blanks, refuse_null_contents
from hf_speedkit.trainer.data.raw_rows import refuse_merged_prompts, trained_questions
from hf_speedkit.trainer.data.template_faults import marks_in_contents, named_failure, refuse_broken_template
from hf_speedkit.trainer.data.tool_calls import refuse_odd_calls, unfilled_columns
from hf_speedkit.trainer.data.unread_columns import unread_prompts

logger = logging.getLogger(__name__)

_SHOWN_TOKENS, _ANY_LENGTH = 120, 1 << 62
_SAMPLED_STREAM_ROWS = 10_000
_TOLERATED_DRY_SHARE = 0.01
# A question may be taken for a like word nearby; where a mask is wrong, whole turns are.
_TOLERATED_QUESTIONS = 0.1


@dataclass(frozen=True, slots=True)
class TemplateChecks:
    """The checks of one dataset.

    Args:
        tokenizer: with its own chat template, which inference uses.
        training_template: what TRL trains with instead, if anything.
        mode: "strict" refuses, "warn" says so and goes on, "off" looks at nothing.
        exclude_generation_prompt: take tokens that the prompt supplies at inference out of the targets.
        quiet: only refuse; what there is to say is said when the trainer looks once more.
        processor: what TRL renders with, where that is more than the tokenizer.
        answers_only: `assistant_only_loss` was asked for.
        text_field: column of plain text.
        inference_template: what inference renders with, where it is not the tokenizer's own.
    """

    tokenizer: Any
    training_template: str | None
    mode: str
    exclude_generation_prompt: bool
    quiet: bool = False
    processor: Any = None
    answers_only: bool = False
    text_field: str = "text"
    inference_template: str | None = None

    def before(self, dataset: Dataset | IterableDataset, name: str) -> None:
        """Look at the first conversations as they will be rendered.

        Raises:
            ConfigurationError, DatasetError: see conversation_checks; only in strict mode.
        """
        if self.mode == "off" or "input_ids" in (dataset.column_names or ()):
            return
        sample = sample_rows(dataset)
        self._refuse(lambda: refuse_null_contents(dataset, name), name)
        for sentence in () if self.quiet else blanks(dataset, sample, name, self.text_field):
            logger.warning("%s", sentence)
        self._refuse(lambda: refuse_merged_prompts(sample, self.tokenizer), name)
        conversations = conversations_of(sample)
        refuse_missing_template(self.processor or self.tokenizer, conversations)
        self._refuse(lambda: self._refuse_broken(conversations), name)
        prompts = any("prompt" in row for row in sample)
        self._refuse(lambda: refuse_foreign_roles(conversations, self._train, rows=sample), name)
        self._refuse(lambda: refuse_weighed_messages(conversations), name)
        questions = None if self.answers_only else trained_questions(sample)
        lost = (*lost_answers(conversations, self._train), opened_by_nothing(conversations, self._train))
        lost = (*lost, marks_in_contents(conversations, self._train, self.tokenizer))
        said = (unread_prompts(sample), written_roles(conversations, self._train, rows=sample), questions, *lost)
        for sentence in () if self.quiet else filter(None, said):
            logger.warning("%s documents: %s", name, sentence)
        self._refuse(lambda: refuse_reasoning_line(conversations, self._infer), name)
        unfilled = unfilled_columns(dataset, sample)
        self._refuse(lambda: refuse_odd_calls(conversations, self._train, unfilled=unfilled), name)
        self._refuse(lambda: refuse_lost_messages(conversations, self._train), name)
        differences = self._refuse(lambda: rendering_differences(conversations, self._train, self._infer), name) or []
        warning = self._refuse(lambda: judge_differences(differences, len(conversations), prompts=prompts), name)
        if warning and not self.quiet:
            logger.warning("%s documents: %s", name, warning)

    def after(self, dataset: Dataset | IterableDataset, name: str, **map_arguments: Any) -> Dataset | IterableDataset:
        """Take the tokens of generation prompts out of the targets, where that was asked for; look at answers' masks.

        Args:
            dataset: tokenized by TRL, its messages still there.
            name: "train" or the name of an evaluation set, for the log.
            map_arguments: handed to `Dataset.map`.
        """
        if self.answers_only and self.mode != "off":
            self._refuse(lambda: self._refuse_trained_questions(sample_rows(dataset)), name)
        columns = dataset.column_names  # None: a stream that does not know its columns
        if not self.exclude_generation_prompt or (columns is not None and "messages" not in columns):
            return dataset
        if isinstance(dataset, IterableDataset):
            return dataset.map(self.without_generation_prompt)
        dataset = dataset.map(self.without_generation_prompt, desc="Masking generation prompts", **map_arguments)
        excluded = sum(dataset["generation_prompt_tokens"])
        logger.info("%s documents: %s tokens of generation prompts are no targets", name, f"{excluded:,}")
        return dataset

    def without_generation_prompt(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Labels of one row with -100 where the prompt supplies the token at inference, and how many those are."""
        labels = list(row["labels"])
        conversations = conversations_of([row])
        if not conversations:
            return {"labels": labels, "generation_prompt_tokens": 0}
        messages, arguments = conversations[0]
        text = self._train(messages, **arguments)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if list(encoded["input_ids"]) != list(row["input_ids"]):
            raise DatasetError(
                "generation prompts cannot be found: tokens do not come from the rendered conversation",
                mend="exclude_generation_prompt=False",
            )
        spans = generation_prompt_spans(messages, arguments, self._train, self._infer)
        excluded = 0
        for at, (start, stop) in enumerate(encoded["offset_mapping"]):
            if labels[at] != IGNORE_INDEX and any(first <= start and stop <= last for first, last in spans):
                labels[at] = IGNORE_INDEX
                excluded += 1
        return {"labels": labels, "generation_prompt_tokens": excluded}

    def _refuse_trained_questions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a mask of answers that holds questions.

        transformers 5.23 marks everything behind a generation span whose last character belongs to no token, such as a
        space that the tokenizer strips (huggingface/transformers#47325).
        """
        trained = found = 0
        for row in rows:
            for messages, arguments in conversations_of([row]):
                text = self._train(messages, **arguments)
                encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
                if list(encoded["input_ids"]) == list(row["input_ids"]):
                    counts = trained_question_tokens(messages, text, encoded["offset_mapping"], row["labels"])
                    trained, found = trained + counts[0], found + counts[1]
        if trained > _TOLERATED_QUESTIONS * found:
            raise DatasetError(
                f"assistant_only_loss was asked for, and {trained:,} of {found:,} tokens of questions are targets",
                evidence=(f"in the {len(rows)} conversations that were looked at",),
                mend="put the template's generation markers around answers only"
                if trained == found
                else "end each generation span of the template on a character that is part of a token, not on a space",
                regardless='template_check="warn"',
            )

    def _refuse_broken(self, conversations: Sequence[tuple[Messages, dict[str, Any]]]) -> None:
        refuse_broken_template(
            conversations, self._infer, getattr(self.processor or self.tokenizer, "chat_template", None)
        )
        if self.training_template is not None:
            refuse_broken_template(conversations, self._train, self.training_template)

    def failure_of(self, dataset: Dataset) -> DatasetError | None:
        """The row that the template fails on, after TRL's tokenization has failed without a number."""
        return named_failure(dataset, self._train)

    def _refuse(self, check: Any, name: str) -> Any:
        try:
            return check()
        except SpeedkitError as error:
            if self.mode == "strict":
                raise
            logger.warning("%s documents: %s", name, error)
            return None

    def _train(self, messages: Messages, **arguments: Any) -> str:
        return self._render(messages, chat_template=self.training_template, **arguments)

    def _infer(self, messages: Messages, **arguments: Any) -> str:
        return self._render(messages, chat_template=self.inference_template, **arguments)

    def _render(self, messages: Messages, **arguments: Any) -> str:
        renderer = self.tokenizer
        if isinstance(self.processor, ProcessorMixin):  # of images, whose templates take contents in parts: as TRL does
            renderer, messages = self.processor, prepare_multimodal_messages(list(messages))
        return str(renderer.apply_chat_template(messages, tokenize=False, **arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskCheck:
    """What the targets of one dataset must look like.

    Args:
        name: of the dataset, for messages.
        assistant_only: `assistant_only_loss` was asked for.
        completion_only: so was completion-only loss.
    """

    name: str
    assistant_only: bool
    completion_only: bool

    def packed(self, report: DocumentReport, rows: Iterable[Mapping[str, Any]]) -> None:
        """Refuse a mask that masks nothing, or everything in the part of a stream that was looked at.

        Args:
            report: of the dataset after tokenization.
            rows: its documents, of which the first are looked at.

        Raises:
            DatasetError: every token that can be a target is one, or none is; labels are shifted already.
        """
        refuse_shifted_labels(islice(rows, SAMPLE_ROWS))
        if not report.documents:  # only a stream: `prepare_documents` has refused such a dataset
            looked = f"the first {report.documents_found:,}" if report.documents_found else "those"
            raise DatasetError(
                f"no document with targets among {looked} of the {self.name} dataset",
                evidence=(f"{report.empty_documents:,} are empty",),
                mend="check the stream, its filters, the template's assistant mask and that answers lie within "
                "tokens_per_batch; each rank needs at least one document",
            )
        if report.target_tokens < report.real_tokens - report.documents:
            return
        if self.assistant_only or (self.completion_only and not _first_tokens_masked(rows)):
            raise DatasetError(
                f"a mask was asked for and 100 % of the {self.name} dataset's tokens are targets",
                evidence=(f"{report.target_tokens:,} targets in {report.documents:,} documents",),
                mend="put the template's generation markers around answers only, or assistant_only_loss=False"
                if self.assistant_only
                else 'completion_only_loss=False; or rows of "prompt" and "completion" (of "messages", '
                "assistant_only_loss=True masks what is no answer)",
            )

    def padded(self, dataset: Dataset | IterableDataset, found: int | None) -> Iterable[Mapping[str, Any]]:
        """Count the targets of documents that are not packed, refuse what `packed` refuses, and return those looked at.

        Args:
            dataset: after TRL, which drops documents that truncation left without targets and says nothing.
            found: documents before; None for a stream.

        Raises:
            DatasetError: as `packed`; 0 documents with targets.
        """
        if not isinstance(dataset, Dataset):
            rows, report = _first_documents(dataset)
        elif {"input_ids", "labels"} <= set(dataset.column_names):
            if not len(dataset):
                raise DatasetError(
                    f"0 of {found:,} documents have targets in the {self.name} dataset",
                    evidence=("within max_length the label mask covers every token",),
                    mend="raise max_length, or check the template's assistant mask",
                )
            rows = dataset
            report = prepare_documents(dataset, tokens_per_batch=_ANY_LENGTH)[1]
        else:  # images: tokenized batch by batch
            return ()
        if report is None:
            return ()
        self.packed(report, rows)
        if found is not None:
            dry = found - report.documents
            say = logger.warning if dry > _TOLERATED_DRY_SHARE * found else logger.info
            lost = f" {dry:,} of {found:,} have none." if dry else ""
            say("%s documents: %s of tokens are targets.%s", self.name, f"{report.target_share:.1%}", lost)
        return rows


def _first_tokens_masked(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a mask is at work that every possible target escapes: prompts of one token, which is never a target."""
    labels = [row["labels"] for row in islice(rows, SAMPLE_ROWS) if row.get("labels") is not None]
    return any(int(given[0]) == IGNORE_INDEX for given in labels if len(given))


def _first_documents(stream: IterableDataset) -> tuple[list[dict[str, Any]], DocumentReport | None]:
    """The first documents with targets of a stream that is not packed; no report where rows hold no tokens yet."""
    report = no_documents(_ANY_LENGTH, "drop")
    rows: list[dict[str, Any]] = []
    for row in stream.take(_SAMPLED_STREAM_ROWS):
        if row.get("input_ids") is None:
            return rows, None
        documents, report = read_document(row, report)
        rows += [document.as_row() for document in documents]
        if len(rows) >= SAMPLE_ROWS:
            break
    return rows, report


def marked_example(input_ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> str:
    """The text of a document with its targets in double square brackets, cut to a readable length.

    The first token of a document is never a target, whatever its label says.
    """
    target = [label != IGNORE_INDEX and at > 0 for at, label in enumerate(labels)]
    parts: list[str] = []
    start = 0
    for at in range(1, len(input_ids) + 1):
        if at == len(input_ids) or target[at] != target[start]:
            text = _cut(tokenizer, list(input_ids[start:at]))
            parts.append(f"[[{text}]]" if target[start] else text)
            start = at
    return "".join(parts)


def log_example(rows: Any, tokenizer: Any, name: str) -> None:
    """Log the first document with its targets marked: once a dataset, by the first process of a job."""
    if int(os.environ.get("RANK", "0")):
        return
    row = next(islice(iter(rows), 1), None)
    if (
        row is not None and min(row["input_ids"], default=0) >= 0
    ):  # else tokenizers raise: `check_vocabulary` refuses it
        labels = row["labels"] if row.get("labels") is not None else row["input_ids"]
        shown = marked_example(list(row["input_ids"]), list(labels), tokenizer)
        logger.info("%s example, targets in [[ ]]: %s", name, shown)


def _cut(tokenizer: Any, ids: list[int]) -> str:
    if len(ids) <= _SHOWN_TOKENS:
        return str(tokenizer.decode(ids))
    half = _SHOWN_TOKENS // 2
    return f"{tokenizer.decode(ids[:half])} ... ({len(ids) - 2 * half:,} tokens) ... {tokenizer.decode(ids[-half:])}"
