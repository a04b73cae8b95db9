"""`hf-speedkit plan`: what memory, batches and steps a job will have, before anyone rents a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_speedkit.cli.plan_data import Documents

SUBJECT_IS_BAD = 1
WRONG_USE = 2


def plan(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL_OR_TOKENIZER", help="Hub id or folder; its config gives the costs.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Argument(metavar="DATASET", help="Hub id, .json/.jsonl/.parquet/.csv file, or saved folder.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Token counts instead of DATASET: a JSON list.")
    ] = None,
    tokens_per_batch: Annotated[int, typer.Option(min=2, help="Slots of a row.")] = 8192,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs the states are sharded over (FSDP2).")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Kind of GPU: h200, h100, a100-80gb ...")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, max=100_000, metavar="GIB", help="Memory of a GPU instead.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Devices that train on rows of their own; --gpus, or 8, without it.")
    ] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches of an optimizer step.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 1,
    split: Annotated[str, typer.Option(help="Split of DATASET.")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of DATASET.")] = None,
    text_field: Annotated[str, typer.Option(help="Column of plain text.")] = "text",
    template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="For the chat template, e.g. '{\"enable_thinking\": false}'.")
    ] = None,
    overlong: Annotated[
        str, typer.Option(help="Documents longer than a row: error, split, truncate or drop.")
    ] = "error",
    processes: Annotated[int, typer.Option(min=1, help="Processes that tokenize.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan a job on a CPU: memory, lengths, batches padded and packed, steps, and what ranks wait for one another.

    MODEL alone gives the memory. Exit 0: good. 1: the data cannot be packed as asked, or no setting fits. 2: wrong use.
    """
    from hf_speedkit.trainer.installed_versions import require_versions

    require_versions("torch", "transformers", "datasets", "numpy", "pyarrow")
    from hf_speedkit.cli import plan_data, plan_memory
    from hf_speedkit.core.errors import SpeedkitError

    if (lengths is not None and dataset is not None) or (model is None and lengths is None):
        raise typer.BadParameter(
            "give MODEL (its memory), MODEL and DATASET, or --lengths FILE.json", param_hint="DATASET"
        )
    try:
        planned = plan_memory.planned_gpu(gpu, gpu_memory)
    except plan_memory.UnknownGpuError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from error
    from hf_speedkit.packing.documents import OVERLONG

    if overlong not in OVERLONG:
        raise typer.BadParameter(f"one of: {', '.join(OVERLONG)}", param_hint="--overlong")
    arguments = _template_arguments(template_kwargs)
    settings: dict[str, Any] = {
        "tokens_per_batch": tokens_per_batch,
        "ranks": ranks or gpus or 8,
        "accumulation": accumulation,
        "epochs": epochs,
        "overlong": overlong,
    }

    _require_hub(model, dataset, config, settings, as_json=as_json)

    def plan_model() -> tuple[Any, dict[str, Any] | None]:
        found = None if model is None else plan_data.model_config(model)
        if found is None:
            return None, None
        count = gpus or settings["ranks"]
        return found, plan_memory.memory_result(
            found, tokens=tokens_per_batch, gpus=count, gpu=planned, accumulation=accumulation
        )

    if lengths is None and dataset is None:
        raise typer.Exit(_report_memory(str(model), plan_model()[1], settings, as_json=as_json))
    try:
        documents = (
            plan_data.from_file(lengths)
            if lengths is not None
            else plan_data.from_dataset(
                str(model),
                str(dataset),
                split=split,
                config=config,
                text_field=text_field,
                template_arguments=arguments,
                processes=processes,
            )
        )
    except plan_data.NotFoundError as error:
        raise typer.BadParameter(str(error), param_hint=error.where) from error
    except SpeedkitError as error:
        if as_json:
            typer.echo(json.dumps(_empty_result(settings) | {"error": str(error)}, indent=1))
        _refuse(error)
    raise typer.Exit(_report(*plan_model(), documents, settings, as_json=as_json))


def _require_hub(
    model: str | None, dataset: str | None, config: str | None, settings: dict[str, Any], *, as_json: bool
) -> None:
    """Names of the Hub that cannot be had now end in exit code 2, like those that do not exist."""
    from hf_speedkit.core.errors import ConfigurationError
    from hf_speedkit.trainer.hub_access import HubName, require_hub, why_unreachable

    _refuse_missing_file(dataset)  # a wrong path is told whatever the network is like
    names = [HubName(kind="model", name=model, weights=False)] if model is not None else []
    names += [HubName(kind="dataset", name=dataset, config=config)] if dataset is not None else []
    try:
        require_hub(names, go_offline=True, why=lambda: why_unreachable(pauses_s=(1.0,)))  # somebody waits for it
    except ConfigurationError as error:
        if as_json:
            typer.echo(json.dumps(_empty_result(settings) | {"error": str(error)}, indent=1))
        _refuse(error, code=WRONG_USE)


def _refuse_missing_file(dataset: str | None) -> None:
    from hf_speedkit.core.errors import DatasetError
    from hf_speedkit.trainer.dataset_source import refuse_missing_file

    try:
        refuse_missing_file(dataset or "")
    except DatasetError as error:
        raise typer.BadParameter(str(error), param_hint="DATASET") from error


def _report_memory(model: str, memory: dict[str, Any] | None, settings: dict[str, Any], *, as_json: bool) -> int:
    from hf_speedkit.cli.plan_view import print_memory

    if memory is None:
        raise typer.BadParameter(
            f"no model configuration can be loaded from {model!r}: it is no folder with a config.json, and neither the "
            "Hub nor the local cache gave one (without a network: copy the model's config.json into a folder)",
            param_hint="MODEL",
        )
    if as_json:
        typer.echo(json.dumps(_empty_result(settings) | {"memory": memory}, indent=1, allow_nan=False))
    else:
        print_memory(memory)
    return SUBJECT_IS_BAD if memory["fits"] is False or memory["error"] else 0


def _report(
    model_config: Any,
    memory: dict[str, Any] | None,
    documents: Documents,
    settings: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    from hf_speedkit.cli.plan_view import print_memory, print_plan
    from hf_speedkit.core.errors import SpeedkitError
    from hf_speedkit.core.flops import model_flops
    from hf_speedkit.packing.forecast import compare_batchings, forecast_stragglers, quadratic_per_token

    slots = settings["tokens_per_batch"]
    kept, fits = documents.fitted(slots, settings["overlong"])
    result = _empty_result(settings) | {
        "memory": memory,
        "documents": documents.summary(slots),
        "findings": list(documents.findings),
    }
    try:
        if not kept:
            from hf_speedkit.core.errors import DatasetError

            raise DatasetError("there are no documents to pack", mend="check the data and its filters")
        if not fits:
            from hf_speedkit.packing.planner import checked_lengths

            checked_lengths(documents.lengths, slots)  # raises, with the numbers
        parallel = {"world_size": settings["ranks"], "gradient_accumulation_steps": settings["accumulation"]}
        batchings = compare_batchings(kept, tokens_per_batch=slots, **parallel)
        result["batchings"] = [_as_dict(way) | {"steps_in_all": way.steps * settings["epochs"]} for way in batchings]
        flops = None if model_config is None else model_flops(model_config.to_dict())
        if flops is not None:
            quadratic = quadratic_per_token(flops)
            forecast = forecast_stragglers(kept, tokens_per_batch=slots, quadratic_per_token=quadratic, **parallel)
            result["stragglers"] = _as_dict(forecast) | {"sentence": forecast.sentence()}
    except SpeedkitError as error:
        result["error"] = str(error)
    if as_json:
        typer.echo(json.dumps(result, indent=1, allow_nan=False))
    else:
        if memory is not None:
            print_memory(memory)
        print_plan(result, documents.lengths)
    return SUBJECT_IS_BAD if result["error"] or (memory is not None and memory["fits"] is False) else 0


def _empty_result(settings: dict[str, Any]) -> dict[str, Any]:
    """The keys of `--json`, whatever comes of it."""
    return {
        "settings": settings,
        "memory": None,
        "documents": None,
        "findings": [],
        "batchings": [],
        "stragglers": None,
        "error": None,
    }


def _as_dict(record: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(record)


def _template_arguments(given: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        arguments = json.loads(given)
    except ValueError as error:
        raise typer.BadParameter(
            f"not JSON: {error}; e.g. '{{\"enable_thinking\": false}}'", param_hint="--template-kwargs"
        ) from error
    if not isinstance(arguments, dict):
        raise typer.BadParameter("a JSON object is needed", param_hint="--template-kwargs")
    return arguments


def _refuse(error: Exception, *, code: int = SUBJECT_IS_BAD) -> None:
    from hf_speedkit.core.printable import printable

    typer.echo("\n".join(map(printable, str(error).splitlines())), err=True)
    raise typer.Exit(code) from error
