"""What `assistant_only_loss` asks of rows and templates, said before a model is loaded; TRL says it after, or never."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from datasets import Dataset, IterableDataset

from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.trainer.data.conversation_refusals import refuse_missing_template
from hf_speedkit.trainer.data.conversation_roles import RENAME
from hf_speedkit.trainer.data.raw_rows import columns_of, one_format

if TYPE_CHECKING:
    from hf_speedkit.trainer.config import SpeedSFTConfig

logger = logging.getLogger(__name__)

_CHATS = ("messages", "conversations")
_NO_ASSISTANT_TOKENS = "no assistant tokens"
"""Part of what TRL 1.16 raises for a row whose mask is empty (sft_trainer.py:1388)."""

_OTHER_NAMES = (
    'roles = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}; dataset = '
    'dataset.map(lambda row: {"messages": [{**m, "role": roles.get(m["role"].lower(), m["role"].lower())} for m in '
    'row["messages"]]})'
)


def as_messages(dataset: Any, args: SpeedSFTConfig, formatting_func: Callable[[Any], Any] | None) -> Any:
    """Training data whose `conversations` of roles and contents are called `messages`.

    TRL 1.16 asks the first row for that name before it tokenizes (sft_trainer.py:933); later `one_format` does this.
    """
    if not args.assistant_only_loss or formatting_func is not None:
        return dataset
    columns = set(columns_of(dataset))
    if "conversations" in columns and not {"messages", "prompt", "input_ids"} & columns:
        return one_format(dataset, args.dataset_text_field)
    return dataset


def refuse_plain_rows(dataset: Any, columns: set[str], name: str) -> None:
    """Refuse rows that are no conversations where the loss is to be of the assistant's words alone.

    Raises:
        DatasetError: with what masks a prompt in such rows.
    """
    row: Mapping[str, Any] = next(iter(dataset), {})
    if {*_CHATS, "input_ids"} & columns or isinstance(row.get("prompt"), list):
        return
    raise DatasetError(
        f"assistant_only_loss=True, and the rows of the {name} dataset are no conversations",
        evidence=(f"columns: {', '.join(sorted(columns))}",),
        mend='give them "messages", or leave assistant_only_loss out: of "prompt" and "completion" only the completion '
        "is trained on by itself",
    )


def require_answers(dataset: Any, tokenizer: Any, args: SpeedSFTConfig, formatting_func: Any) -> None:
    """Refuse training data and a template from which answers cannot be told.

    Args:
        dataset: the training data.
        tokenizer: or a processor; None where TRL loads it with the model.
        args: the job's settings, with assistant_only_loss.
        formatting_func: as for SpeedSFTTrainer.

    Raises:
        ConfigurationError: a formatting function, whose texts have no turns; a template without markers.
        DatasetError: rows that are tokens already, or messages of "from" and "value"; no template at all.
    """
    if formatting_func is not None:
        raise ConfigurationError(
            "assistant_only_loss=True beside formatting_func, which makes one text of each row",
            mend='leave formatting_func out and give rows "messages"; or leave assistant_only_loss out, and return '
            '"prompt" and "completion" by dataset.map',
        )
    columns = set(columns_of(dataset))
    if "input_ids" in columns:
        read = next((column for column in ("labels", "assistant_masks") if column in columns), None)
        raise DatasetError(
            "assistant_only_loss=True, and the rows of the train dataset are tokens already",
            mend="leave assistant_only_loss out: "
            + ("give them labels, -100 for no target" if read is None else f"their {read} say what is a target"),
        )
    row: Mapping[str, Any] = next(iter(dataset), {})
    for column in _CHATS:
        turns = row.get(column)
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and "from" in turns[0]:
            raise DatasetError(
                f'assistant_only_loss=True, and the "{column}" of the train dataset are of "from" and "value"',
                mend=RENAME.replace('"conversations"', f'"{column}"'),
            )
    if tokenizer is not None and args.chat_template_path is None:
        training_template(tokenizer)


def training_template(tokenizer: Any) -> str | None:
    """What TRL will render with for assistant_only_loss (1.16, sft_trainer.py:941); None: the tokenizer's own.

    Raises:
        DatasetError: the tokenizer has no template.
        ConfigurationError: it marks nothing, and TRL has none to put in its place.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    refuse_missing_template(tokenizer, [((), {})])
    if has_generation_markers(tokenizer.chat_template):
        return None
    try:
        template: str | None = get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ConfigurationError(
            "assistant_only_loss=True, and the chat template does not mark what the assistant says",
            evidence=(" ".join(str(error).split()),),
            mend="chat_template_path=FILE.jinja, the template with {% generation %} and {% endgeneration %} around the "
            'assistant\'s words; or rows of "prompt" and "completion", whose prompts are no targets by themselves',
            regardless="assistant_only_loss=False trains on every message",
        ) from error
    return template


def answered(dataset: Any, name: str) -> Any:
    """The conversations that have an answer: TRL stops at the first that has none, in a stream hours later.

    Args:
        dataset: with `messages`.
        name: for the log.

    Raises:
        DatasetError: no conversation has one.
    """
    kept = dataset.filter(_has_answer, input_columns="messages")
    if isinstance(dataset, IterableDataset):
        return kept
    if not len(kept):
        roles = dict.fromkeys(str(turn.get("role")) for turn in dataset[0]["messages"])
        raise DatasetError(
            f"assistant_only_loss=True, and none of {len(dataset):,} conversations of the {name} dataset has an answer",
            evidence=(f"roles of the first: {', '.join(roles)}",),
            mend=_OTHER_NAMES if len(roles) > 1 else 'answers are messages with "role": "assistant"',
        )
    if len(kept) < len(dataset):
        logger.warning("%s documents: %s of %s conversations have no answer and are left out", name,
                       f"{len(dataset) - len(kept):,}", f"{len(dataset):,}")  # fmt: skip
    return kept


def without_marks(error: RuntimeError, dataset: Any, name: str) -> Exception:
    """What to raise for an error of TRL's tokenization: ours, with the rows, where a row's mask is empty."""
    if _NO_ASSISTANT_TOKENS not in str(error):
        return error
    empty = []
    if isinstance(dataset, Dataset) and "messages" in dataset.column_names:
        empty = [at for at, messages in enumerate(dataset["messages"]) if not _says_something(messages)]
    rows = f"rows without a word of the assistant: {', '.join(map(str, empty[:5]))}{', ...' if len(empty) > 5 else ''}"
    return DatasetError(
        f"assistant_only_loss=True, and the template marks no token of a conversation of the {name} dataset",
        evidence=(rows,) if empty else (),
        mend='dataset = dataset.filter(lambda row: any(m["role"] == "assistant" and m["content"] for m in '
        'row["messages"]))'
        if empty
        else "let the template's generation markers begin with a token of the answer, not with a space",
    )


def no_answers(name: str) -> DatasetError:
    """The refusal of a stream that ends before a row that can be trained on: TRL asks for its first one."""
    return DatasetError(
        f"assistant_only_loss=True, and no conversation of the {name} stream has an answer", mend=_OTHER_NAMES
    )


def _has_answer(messages: Any) -> bool:
    return any(message.get("role") == "assistant" or message.get("from") == "gpt" for message in messages)


def _says_something(messages: Any) -> bool:
    return any(turn.get("role") == "assistant" and (turn.get("content") or turn.get("tool_calls")) for turn in messages)
