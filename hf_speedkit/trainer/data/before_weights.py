"""Rows and templates looked at before a model's weights are read, which for 54 GB takes minutes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, IterableDataset
from transformers.training_args import ParallelMode

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.data.answer_rows import require_answers, training_template
from hf_speedkit.trainer.data.document_ends import spread
from hf_speedkit.trainer.data.empty_contents import refuse_null_contents
from hf_speedkit.trainer.data.inputs import check_dataset, with_template_kwargs
from hf_speedkit.trainer.data.raw_rows import columns_of, one_format
from hf_speedkit.trainer.data.templates import TemplateChecks

if TYPE_CHECKING:
    from hf_speedkit.trainer.config import SpeedSFTConfig


def check_rows(
    named: Iterable[tuple[str, Any]],
    args: SpeedSFTConfig,
    *,
    tokenizer: Any = None,
    formatting_func: Any = None,
    loaded: bool = False,
) -> None:
    """Refuse datasets that could not be trained on, and templates that would change what they say.

    Args:
        named: datasets and their names, see `named_datasets`.
        args: the job's settings.
        tokenizer: where it is there before the model: what the trainer would refuse once the model is there.
        formatting_func: as for SpeedSFTTrainer.
        loaded: the model is there: the trainer is about to look at templates itself.

    Raises:
        DatasetError: see `check_dataset`, `refuse_null_contents` and `TemplateChecks`.
        ConfigurationError: images in rows that documents share, a template that is not there, a token of the settings
            that the tokenizer does not know, documents that share rows where one process drives several GPUs, FSDP
            without a launcher.
    """
    named = list(named)
    if args.n_gpu > 1 and (args.packing or args.padding_free):
        raise ConfigurationError(
            f"one process drives {args.n_gpu} GPUs (DataParallel), which cuts a row's boundaries and targets in parts",
            mend=f"accelerate launch --num_processes {args.n_gpu} SCRIPT, or CUDA_VISIBLE_DEVICES=0 for one GPU",
        )
    if args.fsdp and args.parallel_mode is not ParallelMode.DISTRIBUTED:
        raise ConfigurationError(
            "fsdp is on, and no launcher has started this process: FSDP shards a model over several",
            mend="accelerate launch --num_processes N SCRIPT, with the number of GPUs for N",
            regardless="fsdp=False trains on one GPU",
        )
    _refuse_missing_template_file(args.chat_template_path)
    if args.packing or args.padding_free:
        _refuse_pictures(named)
    if tokenizer is not None:
        _refuse_unknown_tokens(tokenizer, args)
    for name, dataset in named:
        check_dataset(
            dataset, text_field=args.dataset_text_field, formatting_func=formatting_func, name=name,
            completion_only_loss=args.completion_only_loss, assistant_only_loss=args.assistant_only_loss,
        )  # fmt: skip
        if formatting_func is None and args.template_check == "strict":
            refuse_null_contents(dataset, name)
        # With the model only where TRL itself renders a conversation in its constructor, and fails in jinja's words.
        early = tokenizer is not None and (args.assistant_only_loss or not loaded)
        if early and formatting_func is None and isinstance(dataset, Dataset):
            _check_templates(spread(dataset), tokenizer, args, name)
    if args.assistant_only_loss:
        require_answers(named[0][1], tokenizer, args, formatting_func)


def _refuse_pictures(named: Iterable[tuple[str, Any]]) -> None:
    """TRL 1.16 says so after the model is loaded."""
    for name, dataset in named:
        if isinstance(dataset, (Dataset, IterableDataset)) and {"image", "images"} & set(columns_of(dataset)):
            raise ConfigurationError(
                f"the {name} dataset holds images, which cannot share rows",
                mend="packing=False and padding_free=False; or remove the columns image and images to train on text",
            )


def _refuse_missing_template_file(path: str | None) -> None:
    """Anything else may be the id of a model on the Hub, whose template TRL takes."""
    if (
        path is None
        or Path(path).exists()
        or not (path.endswith((".jinja", ".j2")) or path.startswith(("/", ".", "~")))
    ):
        return
    raise ConfigurationError(
        f"chat_template_path: there is no file or folder {path!r}",
        mend=f"chat_template_path: {Path(path).expanduser()}"
        if Path(path).expanduser().exists()
        else "a .jinja file, the folder of a tokenizer, or the id of a model on the Hub",
    )


def _refuse_unknown_tokens(tokenizer: Any, args: SpeedSFTConfig) -> None:
    known = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds one
    for setting in ("eos_token", "pad_token"):
        token = getattr(args, setting)
        if token is not None and token not in known.get_vocab():
            own = getattr(known, setting)
            raise ConfigurationError(
                f"{setting}={token!r} is no token of this tokenizer ({type(known).__name__}, {len(known):,} tokens)",
                mend=f"leave {setting} unset, for {own!r}" if own else f"{setting} is a token of its vocabulary",
            )


def _check_templates(sample: Dataset, tokenizer: Any, args: SpeedSFTConfig, name: str) -> None:
    if args.template_check != "strict":
        return
    if args.chat_template_path is not None:
        given = _template_file(args.chat_template_path)
        if given is None:
            return  # the template of another tokenizer, which TRL fetches once the model is there
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = given
    rows = with_template_kwargs(one_format(sample, args.dataset_text_field), args)
    if "input_ids" in columns_of(rows):
        return
    template = training_template(tokenizer) if args.assistant_only_loss else None
    checks = TemplateChecks(
        getattr(tokenizer, "tokenizer", tokenizer),  # a processor holds one
        template,
        args.template_check,
        args.exclude_generation_prompt,
        quiet=True,
        processor=tokenizer,
    )
    checks.before(rows, name)


def _template_file(path: str) -> str | None:
    """What TRL 1.16 takes for the template itself (sft_trainer.py:749)."""
    return Path(path).read_text(encoding="utf-8") if path.endswith((".jinja", ".j2")) and Path(path).is_file() else None
