"""`hf-speedkit export`: a checkpoint of a sharded run becomes a model that `from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SUBJECT_IS_BAD = 1


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint-N folder; of a run's folder the newest.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the model.")],
    dtype: Annotated[str, typer.Option(help="stored (as they are), bfloat16, float16 or float32.")] = "stored",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn a checkpoint into a safetensors model (or peft adapters), on a CPU and in one process.

    Exit 0: good. 1: the checkpoint is bad, or there is no room. 2: wrong use.
    """
    if not checkpoint.is_dir():
        raise typer.BadParameter(f"{str(checkpoint)!r} is no folder", param_hint="CHECKPOINT")
    if dtype not in ("stored", "bfloat16", "float16", "float32"):
        raise typer.BadParameter("one of: stored, bfloat16, float16, float32", param_hint="--dtype")
    from hf_speedkit.trainer.installed_versions import require_versions

    require_versions("torch", "transformers")
    from hf_speedkit.core.errors import SpeedkitError
    from hf_speedkit.trainer.checkpoints.export import export_checkpoint

    try:
        made = export_checkpoint(checkpoint, output, dtype=dtype)
    except SpeedkitError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(SUBJECT_IS_BAD) from error
    if as_json:
        import json

        result = {"output": str(output), "source": str(made.source), "size_bytes": made.size_bytes, "dtype": made.dtype}
        typer.echo(json.dumps(result))
        return
    from hf_speedkit.core.memory_words import bytes_in_words

    if made.source != checkpoint or made.others:
        what = f"the model in {checkpoint} itself" if made.source == checkpoint else made.source.name
        typer.echo(f"{checkpoint} is a run: exported {what}; also there: {', '.join(made.others) or 'no other'}")
    half = "; --dtype bfloat16 halves it" if made.dtype == "float32" and dtype == "stored" else ""
    typer.echo(
        f"{bytes_in_words(made.size_bytes)} of {made.dtype} weights in {output}{half}; load it with "
        f"from_pretrained({str(output)!r})"
    )
