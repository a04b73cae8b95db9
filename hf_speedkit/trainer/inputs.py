"""What a dataset must look like before TRL touches it, checked in milliseconds and answered with instructions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datasets import Dataset, IterableDataset, Value
from trl import SFTConfig

from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.core.families import refuse_leaking_family
from hf_speedkit.packing.documents import blocks
from hf_speedkit.trainer.streaming import check_stream_settings

if TYPE_CHECKING:
    from hf_speedkit.trainer.config import SpeedSFTConfig

logger = logging.getLogger(__name__)

_TEMPLATE_COLUMN = "chat_template_kwargs"


def check_dataset(dataset: object, *, text_field: str, formatting_func: object = None, name: str = "train") -> None:
    """Refuse a dataset that TRL could not tokenize.

    Args:
        dataset: `datasets.Dataset` or `IterableDataset`.
        text_field: column of plain text (`dataset_text_field`).
        formatting_func: when given, any columns are fine: it makes the text.
        name: "train" or "eval", for the message.

    Raises:
        DatasetError: wrong type, no rows, no usable column, or conversations without messages.
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise DatasetError(
            f"the {name} dataset is {type(dataset).__name__}",
            mend='pass a datasets.Dataset, for example datasets.load_dataset("json", data_files=...)["train"]',
        )
    streaming = isinstance(dataset, IterableDataset)
    if next(iter(dataset), None) is None if streaming else len(dataset) == 0:
        raise DatasetError(
            f"the {name} dataset has no rows",
            evidence=(f"columns: {', '.join(dataset.column_names or ()) or 'none'}",),
            mend="check the split and the filters that were applied to it",
        )
    if streaming:
        return
    columns = set(dataset.column_names)
    usable = (
        bool({"input_ids", "messages", "conversations", text_field} & columns)
        or {"prompt", "completion"} <= columns
        or formatting_func is not None
    )
    if not usable:
        raise DatasetError(
            f"the {name} dataset has no column to train on",
            evidence=(f"columns: {', '.join(sorted(columns))}",),
            mend=f'give it "messages" (chat), "prompt" and "completion", or "{text_field}" (plain text; '
            "dataset_text_field names another column)",
        )
    if "input_ids" not in columns:
        _check_conversations(dataset, name)


def _refuse_idle_mask(columns: set[str], completion_only_loss: bool | None, name: str) -> None:
    # TRL 1.16 takes completion_only_loss=None for False where prompts are tokenized already (sft_trainer.py, __init__).
    if completion_only_loss is None and {"input_ids", "completion_mask"} <= columns and "labels" not in columns:
        raise DatasetError(
            f"the {name} dataset brings a completion_mask that nothing applies: prompts would be trained on too",
            mend="completion_only_loss=True",
            regardless="completion_only_loss=False trains on prompts and completions",
        )


def with_template_kwargs(dataset: Dataset | IterableDataset, args: SFTConfig) -> Dataset | IterableDataset:
    """The dataset with the config's `chat_template_kwargs` on every row, as TRL's tokenization reads it.

    TRL 1.16 has no setting for them: a column of that name is the only way in (sft_trainer.py, `tokenize_fn`). A
    dataset that brings its own column keeps it. A `prompt` column without a `completion` beside `messages`
    (ultrachat_200k has one) goes: TRL would take the row for a prompt-completion pair and fail on the missing half.
    """
    kwargs = getattr(args, "chat_template_kwargs", None)
    columns = dataset.column_names or ()
    if "messages" in columns and "prompt" in columns and "completion" not in columns:
        dataset = dataset.remove_columns("prompt")
    if not kwargs or _TEMPLATE_COLUMN in columns or "input_ids" in columns:
        return dataset
    if isinstance(dataset, IterableDataset):
        return dataset.map(_add_constant, fn_kwargs={"kwargs": dict(kwargs)})
    return dataset.add_column(_TEMPLATE_COLUMN, [dict(kwargs)] * len(dataset))


def named_datasets(train_dataset: Any, eval_dataset: Any) -> list[tuple[str, Any]]:
    """The datasets of a trainer with their names, as messages and reports use them."""
    named = [("train", train_dataset)]
    if isinstance(eval_dataset, dict):
        return [*named, *eval_dataset.items()]
    return [*named, ("eval", eval_dataset)] if eval_dataset is not None else named


def check_packing_request(
    args: SpeedSFTConfig,
    data_collator: Any,
    train_dataset: Any,
    eval_dataset: Any,
    model: Any,
    peft_config: Any = None,
) -> None:
    """Refuse what packing cannot do, before anything is tokenized.

    Raises:
        ConfigurationError, DatasetError, PackingError: each names the setting to change.
    """
    if data_collator is not None:
        raise ConfigurationError(
            "a data_collator of your own cannot be used with packing: it would replace the packed rows",
            mend="leave data_collator out, or set packing=False",
        )
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        _refuse_idle_mask(set(dataset.column_names or ()), args.completion_only_loss, name)
    if isinstance(train_dataset, IterableDataset):
        check_stream_settings(args)
    else:
        _refuse_cut_batches(args.accelerator_config)
    if args.train_sampling_strategy not in ("random", "sequential") and args.process_index == 0:
        logger.warning(
            "train_sampling_strategy=%r does nothing with packing: rows have one length, and are dealt out by cost "
            "(cost_window_steps)",
            args.train_sampling_strategy,
        )
    if args.eval_packing is not False and any(
        isinstance(d, IterableDataset) for _, d in named_datasets(None, eval_dataset)
    ):
        raise DatasetError(
            "packed evaluation plans its rows for all ranks at once, and a streaming dataset has no lengths",
            mend="take a part of it: Dataset.from_list(list(stream.take(1000))), or set eval_packing=False",
        )
    if (args.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ConfigurationError(
            "reentrant checkpointing cannot be probed for isolation (torch.autograd.grad does not pass through it)",
            mend='activation_checkpointing_kwargs={"use_reentrant": False}, which is also what torch recommends',
        )
    _refuse_virtual_tokens(model, peft_config)
    if not isinstance(model, str):
        refuse_leaking_family(model.config.get_text_config().model_type)


def _refuse_cut_batches(accelerator: Any) -> None:
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name, None):
            raise ConfigurationError(
                f"accelerator_config has {name}=True, which cuts rows and hands the parts to the ranks",
                evidence=("packing gives every rank rows of its own, planned for all ranks at once",),
                mend=f"leave {name} unset",
            )


def _refuse_virtual_tokens(model: Any, peft_config: Any) -> None:
    adapter = peft_config if peft_config is not None else getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ConfigurationError(
            f"{type(adapter).__name__} puts virtual tokens before a row, not before each of its documents",
            mend="use LoRA, or set packing=False",
        )


def _add_constant(_row: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {_TEMPLATE_COLUMN: dict(kwargs)}


def _check_conversations(dataset: Dataset, name: str) -> None:
    for column in ("messages", "conversations"):
        if column not in dataset.column_names:
            continue
        feature = dataset.features[column]
        if isinstance(feature, Value):
            raise DatasetError(
                f'the {name} dataset\'s "{column}" column holds {feature.dtype}, not conversations',
                mend='each row of "messages" is a list of {"role": ..., "content": ...}',
            )
        empty = _empty_lists(dataset, column)
        if empty:
            raise DatasetError(
                f'{len(empty)} of {len(dataset)} rows of the {name} dataset have an empty "{column}"',
                evidence=(f"first rows: {empty[:5]}",),
                mend=f'dataset = dataset.filter(lambda row: len(row["{column}"]) > 0)',
            )


def _empty_lists(dataset: Dataset, column: str) -> list[int]:
    import pyarrow.compute as pc

    # Through arrow: 200,000 rows in milliseconds, where a Python loop would decode every message.
    values = dataset.select_columns([column]).with_format("arrow")[:][column]
    lengths = pc.fill_null(pc.list_value_length(values), 0)
    return [int(i) for i in pc.indices_nonzero(pc.equal(lengths, 0)).to_pylist()]


def check_vocabulary(dataset: Any, model: Any, name: str) -> None:
    """Refuse token ids that the model has no embedding for: on a GPU they end in a device-side assert at step 1.

    Args:
        dataset: tokenized; a streaming one passes unseen.
        model: the transformers model.
        name: "train" or "eval", for the message.

    Raises:
        DatasetError: the largest id, and how many rows the embedding has.

    Cost: one pass over the ids through arrow, some 0.3 s for 262 M tokens.
    """
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return
    import pyarrow.compute as pc

    rows = int(model.get_input_embeddings().weight.shape[0])
    for block in blocks(dataset.select_columns(["input_ids"]).with_format("arrow")):
        edges = pc.min_max(pc.list_flatten(block["input_ids"])).as_py()
        if edges["max"] is not None and (edges["max"] >= rows or edges["min"] < 0):
            wrong = edges["max"] if edges["max"] >= rows else edges["min"]
            raise DatasetError(
                f"the {name} dataset has token id {wrong}, and the model's embedding has {rows} rows",
                mend="tokenize with the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer))",
            )
