"""Where a checkpoint is written, how it gets its name, and which older ones go.

A save is written below `_unfinished` and becomes checkpoint-N by one rename, when every file of every rank is on the
disk and the manifest over them is written. What is killed before leaves the last good checkpoint as it was.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_speedkit.core.checkpoint_records import CheckpointFile, CheckpointManifest
from hf_speedkit.core.errors import CheckpointError
from hf_speedkit.core.memory_words import bytes_in_words
from hf_speedkit.trainer.checkpoints.files import (
    CHUNK_BYTES,
    cause_of,
    flush_folder,
    numbered_checkpoints,
    read_manifest,
    write_manifest,
    wrong_sizes,
)

logger = logging.getLogger(__name__)

UNFINISHED_NAME = "_unfinished"  # neither checkpoint-*, which transformers sorts and deletes, nor pushed to the Hub
_REPLACED_NAME = "replaced"
_CHECKPOINT = "a checkpoint"
_FULL_BYTES = 16 << 20
_OF_A_FULL_DISK = ("no space left", "os error 28", "quota", "file too large")


def clean_leftovers(run_dir: Path) -> None:
    """Remove what a killed save has left; a checkpoint that lacked its name alone, or was being replaced, gets it."""
    unfinished = run_dir / UNFINISHED_NAME
    if not unfinished.is_dir():
        return
    for _, path in numbered_checkpoints(unfinished):
        if not os.path.lexists(run_dir / path.name) and _is_whole(path):
            path.rename(run_dir / path.name)
            logger.warning("%s was whole and only lacked its name: kept", path.name)
    for _, path in numbered_checkpoints(unfinished / _REPLACED_NAME):
        if not (run_dir / path.name).exists():
            path.rename(run_dir / path.name)
    left = [path.name for _, path in numbered_checkpoints(unfinished)]
    shutil.rmtree(unfinished)
    if left:
        logger.warning("removed %s, which was not written to its end", ", ".join(left))


def require_space(run_dir: Path, needed_bytes: int, *, what: str = _CHECKPOINT) -> None:
    """Refuse a save that the disk has no room for, before anything of it is written.

    Args:
        run_dir: the run's directory; it need not exist yet.
        needed_bytes: size of what is to come.
        what: its name in the message.

    Raises:
        CheckpointError: with what is needed, what is free, and what takes room there.
    """
    place = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    disk = shutil.disk_usage(place)
    free = disk.free
    if free >= needed_bytes or disk.total == 0:  # some network and object stores tell no size: 0 of 0 is no full disk
        return
    older = numbered_checkpoints(run_dir)
    evidence = tuple(f"{path.name} takes {bytes_in_words(_size_bytes(path))}" for _, path in older)
    mend, regardless = "free space there or choose another output_dir", None
    if what == _CHECKPOINT:  # neither helps the model at the end
        mend += (
            "; save_total_limit keeps fewer (the old ones are deleted after the new one is whole, so room for one more "
            "is always needed)"
        )
        regardless = 'save_strategy="no" trains without checkpoints'
    raise CheckpointError(
        f"{what} takes {bytes_in_words(needed_bytes)}, and the disk of {str(run_dir)!r} has {bytes_in_words(free)} "
        "free; nothing was written",
        evidence=evidence,
        mend=mend,
        regardless=regardless,
    )


def checkpoint_bytes(model: Any, optimizer: Any, *, adapters_only: bool = False) -> int:
    """Bytes of weights and optimizer state of all ranks together; what else a checkpoint holds is a few MB.

    Before the first step an optimizer has no state: two moments of the trained weights' type are counted for an AdamW.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    saved = trained if adapters_only else model.parameters()
    weights = sum(_tensor_bytes(parameter) for parameter in saved)
    states = getattr(optimizer, "state", None) or {}
    moments = sum(_tensor_bytes(value) for state in states.values() for value in state.values() if _is_tensor(value))
    if not moments and type(getattr(optimizer, "optimizer", optimizer)).__name__.endswith("AdamW"):  # not AdamW8bit
        moments = 2 * sum(_tensor_bytes(parameter) for parameter in trained)
    return weights + moments


def publish(folder: Path, run_dir: Path, manifest: CheckpointManifest) -> None:
    """Give a written checkpoint its manifest and its name.

    Raises:
        CheckpointError: a file that some rank has written is not there, or not in full.
    """
    missing = wrong_sizes(folder, manifest)
    if missing:
        raise CheckpointError(
            f"{folder.name} is not whole: {len(missing)} of {len(manifest.files)} files that the ranks have written "
            "are not in it",
            evidence=tuple(missing[:5]),
            mend="output_dir must be on a disk that all nodes share",
        )
    write_manifest(folder, manifest)
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        flush_folder(inner)
    flush_folder(folder)
    final = run_dir / folder.name
    if os.path.lexists(final):  # of an earlier attempt; `clean_leftovers` knows this place
        aside = run_dir / UNFINISHED_NAME / _REPLACED_NAME
        aside.mkdir(exist_ok=True)
        final.rename(aside / folder.name)
    folder.rename(final)
    flush_folder(run_dir)
    shutil.rmtree(run_dir / UNFINISHED_NAME)


def failed_write(error: BaseException, run_dir: Path, name: str) -> BaseException:
    """What to raise for a save that failed: a full disk by its name, torch's report of all ranks as an error.

    Args:
        error: what was raised. torch's CheckpointException is no Exception: nothing that handles errors would see it.
        run_dir: the run's directory.
        name: of the checkpoint.

    Returns:
        A CheckpointError, or `error` itself where there is nothing to add.
    """
    cause = cause_of(error)
    reported = cause is not error
    disk = shutil.disk_usage(run_dir)
    said = f"{type(cause).__name__}: {cause}".split("\n", 1)[0]
    full = 0 <= disk.free < _FULL_BYTES <= disk.total or any(words in said.lower() for words in _OF_A_FULL_DISK)
    if not (full or reported):
        return error
    good = [path.name for _, path in numbered_checkpoints(run_dir)]
    return CheckpointError(
        f"{name} could not be written{': the disk is full, or a quota is used up' if full else ''}",
        evidence=(said, f"{bytes_in_words(disk.free)} free; last whole checkpoint: {good[0] if good else 'none'}"),
        mend=("free space" if full else "mend what is named")
        + (", then go on with resume_from_checkpoint=True" if good else ", and start anew: there is no checkpoint"),
    )


@contextmanager
def named_failures(run_dir: Path, name: str) -> Iterator[None]:
    """Raise what fails while a checkpoint is written as `failed_write` says it.

    Args:
        run_dir, name: see `failed_write`.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:
        raise failed_write(error, run_dir, name) from error


def rotate(run_dir: Path, *, keep: int | None, newest: Path, best: str | None) -> None:
    """Delete checkpoints until `keep` are left; never the newest, which was just proven whole, nor the best.

    Those of a higher step than the newest go first: a resumed run has gone back behind them.
    """
    if keep is None or keep <= 0:
        return
    protected = {newest.resolve()} | ({Path(best).resolve()} if best is not None else set())
    step = int(newest.name.rsplit("-", 1)[1])
    others = [(number, path) for number, path in numbered_checkpoints(run_dir) if path.resolve() not in protected]
    others.sort(key=lambda entry: (entry[0] < step, entry[0]))
    surplus = len(others) + len([path for path in protected if path.exists()]) - keep
    for _, path in others[: max(surplus, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def manifest_of(step: int, world_size: int, written: Sequence[Mapping[str, CheckpointFile]]) -> CheckpointManifest:
    """One manifest over what every rank has written."""
    files = {name: file for part in written for name, file in part.items()}
    return CheckpointManifest(step=step, world_size=world_size, chunk_bytes=CHUNK_BYTES, files=files)


def _is_whole(folder: Path) -> bool:
    """Whether a save got as far as its manifest, which is written behind everything else."""
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError):
        return False
    return manifest is not None and not wrong_sizes(folder, manifest)


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _is_tensor(value: object) -> bool:
    return hasattr(value, "element_size")


def _tensor_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())  # of a sharded one: all ranks' parts
