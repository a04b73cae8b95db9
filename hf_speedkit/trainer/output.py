"""The output directory: a run is never written over another one by accident."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import ConfigurationError

STEP_LOG_NAME = "speedkit_steps.jsonl"
# What a finished or interrupted run leaves behind, cheapest look first.
_TRACES_OF_A_RUN = (STEP_LOG_NAME, "trainer_state.json", "model.safetensors", "model.safetensors.index.json",
                    "adapter_model.safetensors")  # fmt: skip


def require_output_dir(output_dir: str | Path) -> None:
    """Refuse a place in which no folder can be written, before a model is loaded for it. Nothing is made.

    Raises:
        ConfigurationError: a file lies there or above it, or this user may not write there.
    """
    place = Path(output_dir).absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if place.is_dir():
        if os.access(place, os.W_OK | os.X_OK):
            return
        what = f"{str(place)!r} may not be written to by this user"
    else:
        what = f"{str(place)!r} is no folder"
    raise ConfigurationError(
        f"output_dir {str(output_dir)!r} cannot be written", evidence=(what,), mend="choose another output_dir"
    )


def existing_run(output_dir: str | Path) -> str | None:
    """The name of a file or checkpoint in `output_dir` that shows a run was there; None if there is none."""
    directory = Path(output_dir)
    for name in _TRACES_OF_A_RUN:
        if (directory / name).exists():
            return name
    checkpoints = sorted(path.name for path in directory.glob("checkpoint-*") if path.is_dir())
    return checkpoints[-1] if checkpoints else None


def refuse_existing_run(output_dir: str | Path, found: str | None) -> None:
    """Stop if a run was found.

    Raises:
        ConfigurationError: with the ways to go on: another directory, resume where there is a checkpoint, on purpose.
    """
    if found is None:
        return
    mend = "choose another output_dir"
    if any(Path(output_dir).glob("checkpoint-*")):  # else there is nothing to continue from
        mend += (
            ", or continue that run: trainer.train(resume_from_checkpoint=True), in the recipe "
            "--resume_from_checkpoint true"
        )
    raise ConfigurationError(
        f"output_dir {str(output_dir)!r} already holds a run",
        evidence=(f"found {found}",),
        mend=mend,
        regardless="allow_existing_output=True (in YAML: true) writes over it",
    )


def require_output(args: Any, resume: str | bool | None) -> None:
    """What a recipe asks of its output directory: it can be written, and holds what is resumed or no run.

    Args:
        args: a SpeedSFTConfig. Read here: `output_dir`, `allow_existing_output`.
        resume: see `require_checkpoint`; nothing for a new run.

    Raises:
        ConfigurationError: see the functions that it calls.
    """
    require_output_dir(args.output_dir)
    if resume:
        require_checkpoint(resume, args.output_dir)
    elif not args.allow_existing_output:
        refuse_existing_run(args.output_dir, existing_run(args.output_dir))


def require_checkpoint(resume: str | bool, output_dir: str | Path) -> None:
    """Refuse to resume from what is not there, before a model is loaded for it.

    Args:
        resume: True for the last good checkpoint in `output_dir`, "auto" for it or a new run, or the path of one.
        output_dir: the run's directory.

    Raises:
        ConfigurationError: no checkpoint, with what was looked for.
    """
    if resume == "auto":
        return
    if resume is True:
        if any(path.is_dir() for path in Path(output_dir).glob("checkpoint-*")):
            return
        what = f"there is no checkpoint in output_dir {str(output_dir)!r} to resume from"
    elif (Path(str(resume)) / "trainer_state.json").is_file():
        return
    else:
        lacks = "it holds no trainer_state.json" if Path(str(resume)).exists() else "nothing is there"
        what = f"resume_from_checkpoint={str(resume)!r} is no checkpoint: {lacks}"
    there = {
        path
        for folder in (Path(output_dir), Path(str(resume)), Path(str(resume)).parent)
        for path in folder.glob("checkpoint-*")
        if (path / "trainer_state.json").is_file()
    }
    last = max(there, key=lambda path: path.stat().st_mtime, default=None)
    raise ConfigurationError(
        what,
        mend=(f"resume_from_checkpoint: {last}, the last one there" if last else "name a checkpoint-N directory")
        + ", or leave it out to start a new run",
    )
