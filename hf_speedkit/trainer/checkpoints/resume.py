"""Which checkpoint a run goes on from: the last one that is whole, and none that would see other documents.

`get_last_checkpoint` (transformers 5.23, trainer_utils.py:270) takes the highest number and looks at nothing: after a
kill in the middle of a save every restart dies on the same half checkpoint, with a good one beside it.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import CheckpointError, ConfigurationError
from hf_speedkit.trainer.checkpoints.files import cause_of, damage, numbered_checkpoints, read_manifest
from hf_speedkit.trainer.ranks.agreement import agree, gather_agreed

logger = logging.getLogger(__name__)

WEIGHTS_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
NO_WEIGHTS = "it holds no weights"
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_model.safetensors", "adapter_model.bin", "pytorch_model_fsdp.bin",
)  # fmt: skip
_TORCH_FILE = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|training_args|pytorch_model|adapter_model)\S*\.(pt|pth|bin)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How the ranks share the reading of a checkpoint.

    Args:
        index: this process among those that see the same disk, 0 <= index < count.
        count: how many they are.
        checksums: read every byte; without, sizes alone are compared.
        main: this process speaks for all.
    """

    index: int = 0
    count: int = 1
    checksums: bool = True
    main: bool = True


def settle_resume(resume: str | bool | None, output_dir: str | Path, reader: Reader) -> str | None:
    """The checkpoint to go on from, whole on every rank; all ranks must call it.

    Args:
        resume: a path; True for the last good checkpoint in `output_dir`; "auto" for that one or a new run where there
            is none; None or False for a new run.
        output_dir: the run's directory.
        reader: this rank's part of the reading.

    Returns:
        The checkpoint's path, or None for a new run.

    Raises:
        CheckpointError: the named checkpoint is damaged, or there is no good one; on all ranks.
    """
    if not resume:
        return None
    if resume is not True and resume != "auto":
        return _named(Path(str(resume)), Path(output_dir), reader)
    names = gather_agreed(lambda: [str(path) for _, path in numbered_checkpoints(output_dir)])[0]
    damaged: dict[str, str] = {}
    for path in map(Path, names):
        problems = _problems(path, reader)
        if not problems:
            if damaged and reader.main:
                logger.warning("resuming from %s: %s", path.name, _told(damaged))
            return str(path)
        damaged[path.name] = problems[0]
    if not damaged and resume == "auto":
        return None
    raise CheckpointError(
        f"there is no good checkpoint in output_dir {str(output_dir)!r} to resume from",
        evidence=tuple(f"{name}: {problem}" for name, problem in damaged.items()),
        mend="name a good one: resume_from_checkpoint=PATH",
        regardless="start a new run in another output_dir",
    )


def _named(path: Path, output_dir: Path, reader: Reader) -> str:
    agree(partial(_refuse_no_checkpoint, path))
    problems = _problems(path, reader)
    if problems:
        others = [other for _, other in numbered_checkpoints(output_dir) if other.resolve() != path.resolve()]
        raise CheckpointError(
            f"{str(path)!r} is no whole checkpoint",
            evidence=tuple(problems[:5]),
            mend="resume_from_checkpoint=True takes the last good one"
            + (f" of {len(others)} more in output_dir" if others else ""),
        )
    return str(path)


def _refuse_no_checkpoint(path: Path) -> None:
    """Tell a path that is none, and a run's folder, from a save that did not end."""
    inside = [other.name for _, other in numbered_checkpoints(path)] if path.is_dir() else []
    if path.is_dir() and (not inside or (path / "trainer_state.json").is_file()):
        return
    raise CheckpointError(
        f"{str(path)!r} is a run's folder, and no checkpoint"
        if inside
        else f"there is no checkpoint {str(path)!r}: {'it is a file' if path.is_file() else 'nothing is there'}",
        mend=f"resume_from_checkpoint={path / inside[0]}"
        if inside
        else "correct the path; resume_from_checkpoint=True takes the last good one in output_dir",
    )


def _problems(path: Path, reader: Reader) -> list[str]:
    """What any rank found wrong with a checkpoint."""
    found = gather_agreed(lambda: _own_problems(path, reader))
    return [problem for problems in found for problem in problems]


def _own_problems(path: Path, reader: Reader) -> list[str]:
    try:
        manifest = read_manifest(path)
    except (ValueError, OSError) as error:
        return [f"its manifest cannot be read: {error}"]
    if manifest is not None:
        return damage(path, manifest, checksums=reader.checksums, share=(reader.index, reader.count))
    problems = visible_damage(path)
    if not problems and reader.main:
        logger.warning(
            "%s has no manifest of hf_speedkit: its files are there and have the right sizes, but nobody can tell "
            "whether their contents are as they were written", path,
        )  # fmt: skip
    return problems


def visible_damage(path: Path) -> list[str]:
    """What can be seen to be wrong with a checkpoint that has no manifest, without reading a tensor."""
    try:
        if not isinstance(json.loads((path / "trainer_state.json").read_text(encoding="utf-8")), dict):
            raise ValueError("it holds no state")
    except (ValueError, OSError) as error:
        return [f"trainer_state.json cannot be read, so the save did not end: {error}"]
    problems = _unpaired_optimizer(path) + weights_damage(path)
    if (path / OPTIMIZER_FOLDER).is_dir():
        problems += _sharded_damage(path / OPTIMIZER_FOLDER)
    # What torch.save writes is a zip archive, whose directory comes last.
    saved = [file for file in sorted(path.iterdir()) if _TORCH_FILE.fullmatch(file.name)]
    return problems + [f"{file.name} ends early" for file in saved if not zipfile.is_zipfile(file)]


def weights_damage(path: Path) -> list[str]:
    """What can be seen to be wrong with the weights of a checkpoint, without reading a tensor."""
    sharded = (path / WEIGHTS_FOLDER).is_dir()
    problems = _sharded_damage(path / WEIGHTS_FOLDER) if sharded else []
    present = [name for name in _WEIGHTS if (path / name).is_file()]
    # A kind of adapter may lie in a folder of its own.
    if not present and not sharded and not list(path.glob("*/adapter_model.*")):
        problems.append(NO_WEIGHTS)
    for name in present:
        problems += _index_damage(path / name) if name.endswith(".json") else _safetensors_damage(path / name)
    return problems


def _unpaired_optimizer(path: Path) -> list[str]:
    """An optimizer's state or the schedule beside it, and not the other one: transformers would leave out both."""
    optimizer, schedule = _has_optimizer(path), (path / "scheduler.pt").is_file()
    if optimizer == schedule or list(path.glob("global_step*")):  # DeepSpeed keeps both in a folder of its own
        return []
    return ["scheduler.pt is missing" if optimizer else "the optimizer's state is missing"]


def _has_optimizer(path: Path) -> bool:
    return (path / OPTIMIZER_FOLDER).is_dir() or any((path / f"optimizer.{kind}").is_file() for kind in ("pt", "bin"))


def _index_damage(index: Path) -> list[str]:
    try:
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        return [f"{index.name} cannot be read: {error!r}"]
    missing = [name for name in parts if not (index.parent / name).is_file()]
    there = [index.parent / name for name in parts if name not in missing]
    return [f"{name} is missing" for name in missing] + [line for part in there for line in _safetensors_damage(part)]


def _sharded_damage(folder: Path) -> list[str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        places = FileSystemReader(folder).read_metadata().storage_data
    except Exception as error:  # noqa: BLE001 - a cut pickle raises anything; it is told, not hidden
        return [f"{folder.name}/.metadata cannot be read: {error}"]
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    files = {name: folder / name for name in ends}
    return [
        f"{folder.name}/{name} ends before its last tensor"
        for name, path in files.items()
        if not path.is_file() or path.stat().st_size < ends[name]
    ]


def _safetensors_damage(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return []
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):
            return []
    except (SafetensorError, OSError) as error:
        return [f"{path.name} cannot be read: {error}"]


def check_contents(checkpoint: Path, *, fsdp: bool) -> None:
    """Refuse a checkpoint that a run cannot go on from; see `check_kind` and `refuse_weights_alone`."""
    check_kind(checkpoint, fsdp=fsdp)
    refuse_weights_alone(checkpoint)


def check_kind(checkpoint: Path, *, fsdp: bool) -> None:
    """Refuse a checkpoint of whole weights for a sharded run, where accelerate would look for a file in vain.

    Raises:
        ConfigurationError: with the two ways to go on.
    """
    if not fsdp or (checkpoint / WEIGHTS_FOLDER).is_dir() or (checkpoint / "pytorch_model_fsdp.bin").is_file():
        return
    raise ConfigurationError(
        f"{checkpoint} was written by a run without FSDP, and this one shards its model",
        evidence=(f"there is no {WEIGHTS_FOLDER} in it",),
        mend="resume without fsdp",
        regardless=f"start a new run from its weights: model_name_or_path={checkpoint}",
    )


def refuse_weights_alone(checkpoint: Path) -> None:
    """Refuse a checkpoint without optimizer and schedule: Trainer would begin both anew in the middle of the run.

    Raises:
        ConfigurationError: with the way to use its weights.
    """
    if _has_optimizer(checkpoint) or (checkpoint / "scheduler.pt").is_file() or list(checkpoint.glob("global_step*")):
        return
    raise ConfigurationError(
        f"{checkpoint} holds weights alone (save_only_model): the learning rate would begin anew in the middle of the "
        "run, and so would the optimizer",
        evidence=("there is neither an optimizer's state nor scheduler.pt in it",),
        mend=f"start a new run from its weights: model_name_or_path={checkpoint}",
    )


def refuse_unread_resume(args: Any, given: str | bool | None) -> None:
    """Refuse `resume_from_checkpoint` among the settings that `train()` was not handed: a new run would begin.

    transformers leaves it to the script (5.23, training_args.py), and says nothing.

    Args:
        args: TrainingArguments.
        given: what `train()` got; None where it got nothing.

    Raises:
        ConfigurationError: with the call that resumes.
    """
    if given is not None or not args.resume_from_checkpoint:
        return
    raise ConfigurationError(
        f"resume_from_checkpoint={args.resume_from_checkpoint!r} is among the settings, and train() was not told: a "
        "new run would begin",
        mend="trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)",
        regardless="trainer.train(resume_from_checkpoint=False) begins a new run",
    )


@contextmanager
def loading_optimizer(optimizer: Any, checkpoint: str | Path | None) -> Iterator[None]:
    """Say in words that a saved optimizer state is not that of this run's optimizer or parameters.

    Another optimizer's settings replace this one's without a word, and its first step fails with a KeyError.

    Args:
        optimizer: this run's, as the Trainer holds it.
        checkpoint: where its state is read from in the context; None for a new run.

    Raises:
        ConfigurationError: in place of what the loading raised.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    if checkpoint is None:
        yield
        return
    inner = getattr(optimizer, "optimizer", optimizer)
    settings = _settings_of(inner)
    try:
        yield
        lost = settings - _settings_of(inner)
        if lost:
            raise KeyError(f"the saved optimizer has no {', '.join(sorted(lost))}")
    except (KeyError, ValueError, CheckpointException) as error:
        raise ConfigurationError(
            f"the optimizer state of {checkpoint} does not fit this run",
            evidence=(f"{type(inner).__name__}: {reason_of(error)}",),
            mend="resume with the model, adapters and optim of the saved run",
            regardless=f"start a new run from its weights: model_name_or_path={checkpoint}",
        ) from error


def _settings_of(optimizer: Any) -> set[str]:
    return {name for group in getattr(optimizer, "param_groups", ()) for name in group}


def reason_of(error: BaseException) -> str:
    """What went wrong, without torch's tracebacks of every rank."""
    cause = cause_of(error)
    return str(cause.args[0] if cause.args else cause).split("\n", 1)[0]


def _told(damaged: dict[str, str]) -> str:
    return "; ".join(f"{name} is damaged ({problem})" for name, problem in damaged.items())
