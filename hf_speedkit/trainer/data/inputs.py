"""What a dataset must look like before TRL touches it, checked in milliseconds and answered with instructions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datasets import Dataset, IterableDataset
from trl import SFTConfig

from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.core.families import refuse_leaking_family
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.packing.document_columns import blocks
from hf_speedkit.packing.row_rules import OTHER_MASKS, READ_MASKS
from hf_speedkit.trainer.data.answer_rows import refuse_plain_rows
from hf_speedkit.trainer.data.other_formats import as_dataset, mend_of_columns
from hf_speedkit.trainer.data.raw_rows import (
    check_raw_rows,
    columns_of,
    is_pair,
    refuse_other_than_messages,
)
from hf_speedkit.trainer.data.streaming import check_stream_settings
from hf_speedkit.trainer.launching import refuse_split_model

if TYPE_CHECKING:
    from hf_speedkit.trainer.config import SpeedSFTConfig

_MADE_ONCE = "dataset = dataset.map(dict, remove_columns=dataset.column_names).with_format(None)"
logger = logging.getLogger(__name__)

_TEMPLATE_COLUMN = "chat_template_kwargs"


def check_dataset(
    dataset: object,
    *,
    text_field: str,
    formatting_func: object = None,
    name: str = "train",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> None:
    """Refuse a dataset that TRL could not tokenize, or would train on more of than it says.

    Args:
        dataset: `datasets.Dataset` or `IterableDataset`.
        text_field: column of plain text (`dataset_text_field`).
        formatting_func: when given, any columns are fine: it makes the text.
        name: "train" or "eval", for the message.
        completion_only_loss, assistant_only_loss: of the config.

    Raises:
        DatasetError: wrong type, no rows, no usable column, conversations without messages, rows without a value,
            masks that nothing reads.
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise DatasetError(
            f"the {name} dataset is {type(dataset).__name__}",
            mend=as_dataset(dataset),
        )
    streaming = isinstance(dataset, IterableDataset)
    if next(iter(dataset), None) is None if streaming else len(dataset) == 0:
        raise DatasetError(
            f"the {name} dataset has no rows",
            evidence=(f"columns: {', '.join(dataset.column_names or ()) or 'none'}",),
            mend="check the split and the filters that were applied to it",
        )
    columns = set(columns_of(dataset))
    _refuse_idle_mask(columns, completion_only_loss, name)
    if assistant_only_loss and formatting_func is None:
        refuse_plain_rows(dataset, columns, name)
    usable = (
        bool({"input_ids", "messages", "conversations", text_field} & columns)
        or {"prompt", "completion"} <= columns
        or formatting_func is not None
    )
    if not usable and not streaming and dataset.format["type"] == "custom":
        raise DatasetError(
            f"the {name} dataset makes its rows as they are read (with_transform), and what they are is not known",
            mend=f"{_MADE_ONCE} makes them once",
        )
    if not usable:
        raise DatasetError(
            f"the {name} dataset has no column to train on",
            evidence=(f"columns: {', '.join(sorted(columns))}",),
            mend=mend_of_columns(next(iter(dataset)))
            or f'give it "messages" (chat), "prompt" and "completion", or "{text_field}" (plain text; '
            "dataset_text_field, of a plan --text-field, names another column)",
        )
    if streaming or (formatting_func is not None and "input_ids" not in columns):
        return  # a stream's rows are looked at as they pass, see `checked_stream`
    check_raw_rows(dataset, text_field, name)
    if "input_ids" not in columns and not is_pair(columns):
        _check_conversations(dataset, name)


def _refuse_idle_mask(columns: set[str], completion_only_loss: bool | None, name: str) -> None:
    others = sorted(set(OTHER_MASKS) & columns)
    if others and "input_ids" in columns and "labels" not in columns:
        raise DatasetError(
            f"the {name} dataset brings a {others[0]} that nothing applies: every token would be trained on",
            evidence=(f"labels are read, and masks named {' or '.join(READ_MASKS)}",),
            mend=f'dataset.rename_column("{others[0]}", "assistant_masks") if it is 1 at the tokens to train on',
            regardless=f'dataset.remove_columns("{others[0]}") trains on every token',
        )
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
    dataset that brings its own column keeps it.
    """
    kwargs = getattr(args, "chat_template_kwargs", None)
    columns = columns_of(dataset)
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
    refuse_split_model(model, args.model_init_kwargs)
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
            raise DatasetError(
                f"the {name} dataset makes its rows as they are read (with_transform), and packing plans by lengths",
                mend=f"{_MADE_ONCE} makes them once, or set packing=False",
            )
    if isinstance(train_dataset, IterableDataset):
        check_stream_settings(args)
        _refuse_cut_batches(args.accelerator_config, ("split_batches",))  # TRL turns the other off
    else:
        _refuse_cut_batches(args.accelerator_config, ("split_batches", "dispatch_batches"))
        _refuse_unequal_ranks(args)
    if args.train_sampling_strategy not in ("random", "sequential") and args.process_index == 0:
        logger.warning(
            "train_sampling_strategy=%r does nothing with packing: rows have one length, and are dealt out by cost "
            "(cost_window_steps)",
            args.train_sampling_strategy,
        )
    for _, dataset in named_datasets(None, eval_dataset):
        refuse_packed_evaluation(dataset, packing=args.eval_packing is not False)
    if (args.activation_checkpointing_kwargs or {}).get("use_reentrant") or _checkpoints_reentrantly(model):
        raise ConfigurationError(
            "reentrant checkpointing cannot be probed for isolation (torch.autograd.grad does not pass through it)",
            mend='activation_checkpointing_kwargs={"use_reentrant": False}, which is also what torch recommends',
        )
    _refuse_virtual_tokens(model, peft_config)
    if not isinstance(model, str):
        refuse_leaking_family(model.config.get_text_config().model_type)


def refuse_packed_evaluation(dataset: Any, *, packing: bool) -> None:
    """Refuse to evaluate a streaming dataset in packed rows.

    Raises:
        DatasetError: with both ways out.
    """
    if packing and isinstance(dataset, IterableDataset):
        raise DatasetError(
            "packed evaluation plans its rows for all ranks at once, and a streaming dataset has no lengths",
            mend="take a part of it: Dataset.from_list(list(stream.take(1000))), or set eval_packing=False",
        )


def _checkpoints_reentrantly(model: Any) -> bool:
    """Whether the user has called `model.gradient_checkpointing_enable({"use_reentrant": True})`."""
    modules = () if isinstance(model, str) else model.modules()
    functions = (
        getattr(module, "_gradient_checkpointing_func", None)
        for module in modules
        if getattr(module, "gradient_checkpointing", False)
    )
    return any((getattr(function, "keywords", None) or {}).get("use_reentrant") for function in functions)


def _refuse_unequal_ranks(args: SpeedSFTConfig) -> None:
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigurationError(
            "average_tokens_across_devices=False gives every rank the same weight, however many targets its rows hold",
            evidence=("rows are dealt out by cost, so the ranks' targets differ from step to step",),
            mend="leave average_tokens_across_devices at its default, True",
        )


def _refuse_cut_batches(accelerator: Any, names: tuple[str, ...]) -> None:
    for name in names:
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
        refuse_other_than_messages(dataset, column, name)
        empty = _empty_lists(dataset, column)
        if empty:
            raise DatasetError(
                f'{len(empty)} of {len(dataset)} rows of the {name} dataset have an empty "{column}"',
                evidence=(f"first rows: {empty[:5]}",),
                mend=f'dataset = dataset.filter(lambda row: row["{column}"])',
            )


def _empty_lists(dataset: Dataset, column: str) -> list[int]:
    import pyarrow.compute as pc

    # Through arrow: 200,000 rows in milliseconds, where a Python loop would decode every message.
    values = dataset.select_columns([column]).with_format("arrow")[:][column]
    if pc.all(pc.is_null(values)).as_py():  # of no type that could be asked for its length
        return list(range(len(dataset)))
    lengths = pc.fill_null(pc.list_value_length(values), 0)
    return [int(i) for i in pc.indices_nonzero(pc.equal(lengths, 0)).to_pylist()]


def check_vocabulary(dataset: Any, model: Any, name: str) -> None:
    """Refuse token ids and labels that the model has no row for: on a GPU they end in a device-side assert at step 1.

    Args:
        dataset: tokenized; a streaming one passes unseen (`PackedCollator` looks at its rows).
        model: the transformers model.
        name: "train" or "eval", for the message.

    Raises:
        DatasetError: the id, and how many rows the embedding has.

    Cost: one pass over the ids and two over the labels through arrow, 0.3 s a pass for 262 M tokens (a first look).
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    import pyarrow.compute as pc

    rows = embedding_rows(model)
    for column in ("input_ids", "labels"):
        if column not in dataset.column_names:
            continue
        for block in blocks(dataset.select_columns([column]).with_format("arrow")):
            values = pc.list_flatten(block[column])
            if column == "labels":
                values = values.filter(pc.not_equal(values, IGNORE_INDEX))
            edges = pc.min_max(values).as_py()
            if edges["max"] is not None and (edges["max"] >= rows or edges["min"] < 0):
                wrong = edges["max"] if edges["max"] >= rows else edges["min"]
                what = "token id" if column == "input_ids" else "label"
                raise DatasetError(
                    f"the {name} dataset has {what} {wrong}, and the model's embedding has {rows} rows",
                    mend="tokenize with the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer))"
                    + (
                        ""
                        if _trains_embeddings(model)
                        else " with trainable_token_indices=[...] in the LoraConfig: the "
                        "new rows are drawn, and would stay so"
                    )
                    if what == "token id" or wrong >= 0
                    else f"a token that is no target has the label {IGNORE_INDEX}",
                )


def check_pad_token(pad_token_id: int, model: Any) -> None:
    """Refuse a padding token that the model has no row for: one that was added to the tokenizer alone.

    Raises:
        ConfigurationError: the id, and how many rows the embedding has.
    """
    rows = embedding_rows(model)
    if not 0 <= pad_token_id < rows:
        raise ConfigurationError(
            f"the padding token has id {pad_token_id}, and the model's embedding has {rows} rows",
            evidence=("it was added to the tokenizer, and the model does not know it",),
            mend="tokenizer.pad_token = tokenizer.eos_token (no loss depends on it), or "
            "model.resize_token_embeddings(len(tokenizer))",
        )


def _trains_embeddings(model: Any) -> bool:
    return any(weight.requires_grad for weight in model.get_input_embeddings().parameters())


def embedding_rows(model: Any) -> int:
    """Token ids that a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])
