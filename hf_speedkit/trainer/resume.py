"""Which checkpoint a run goes on from: the last one that is whole, and none that would see other documents.

`get_last_checkpoint` (transformers 5.23, trainer_utils.py:270) takes the highest number and looks at nothing: after a
kill in the middle of a save every restart dies on the same half checkpoint, with a good one beside it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from hf_speedkit.core.errors import CheckpointError, ConfigurationError
from hf_speedkit.trainer.agreement import gather_agreed
from hf_speedkit.trainer.checkpoint_files import damage, numbered_checkpoints, read_manifest

logger = logging.getLogger(__name__)

WEIGHTS_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_model.safetensors", "adapter_model.bin", "pytorch_model_fsdp.bin",
)  # fmt: skip


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
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        return [f"trainer_state.json cannot be read, so the save did not end: {error}"]
    problems = []
    for folder in (path / WEIGHTS_FOLDER, path / OPTIMIZER_FOLDER):
        if folder.is_dir():
            problems += _sharded_damage(folder)
    present = [name for name in _WEIGHTS if (path / name).is_file()]
    # A kind of adapter may lie in a folder of its own.
    if not present and not (path / WEIGHTS_FOLDER).is_dir() and not list(path.glob("*/adapter_model.*")):
        problems.append("it holds no weights")
    return problems + [line for name in present for line in _safetensors_damage(path / name)]


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


def _told(damaged: dict[str, str]) -> str:
    return "; ".join(f"{name} is damaged ({problem})" for name, problem in damaged.items())
