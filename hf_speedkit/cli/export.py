"""`hf-speedkit export`: a checkpoint of a sharded run becomes a model that `from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SUBJECT_IS_BAD = 1


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint-N folder.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the model.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn a checkpoint into a safetensors model (or peft adapters), on a CPU and in one process.

    Exit 0: good. 1: the checkpoint is bad, or there is no room. 2: wrong use.
    """
    if not checkpoint.is_dir():
        raise typer.BadParameter(f"{str(checkpoint)!r} is no folder", param_hint="CHECKPOINT")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter("one of: bfloat16, float16, float32", param_hint="--dtype")
    from hf_speedkit.core.errors import SpeedkitError
    from hf_speedkit.trainer.checkpoints.export import export_checkpoint

    try:
        size_bytes = export_checkpoint(checkpoint, output, dtype=dtype)
    except SpeedkitError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(SUBJECT_IS_BAD) from error
    if as_json:
        import json

        typer.echo(json.dumps({"output": str(output), "size_bytes": size_bytes}))
    else:
        typer.echo(
            f"{size_bytes / (1 << 30):.3f} GiB of weights in {output}; load it with from_pretrained({str(output)!r})"
        )
