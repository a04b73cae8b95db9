"""Where a job's rows come from: a dataset of the Hub, a folder, one file, or what `save_to_disk` wrote."""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import DatasetError, SpeedkitError
from hf_speedkit.trainer.hub_access import HubName, require_hub
from hf_speedkit.trainer.setting_names import nearest, nearest_path

logger = logging.getLogger(__name__)

_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""What datasets 5.2 unpacks by itself."""
_KINDS = f"the id of a dataset on the Hub, a folder, or a file ({', '.join(_LOADERS)}, also as .gz)"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BLOCK_BYTES, _READ_BYTES = 1 << 24, 1 << 30


def load_rows(name: str, config: str | None = None, *, split: str = "train") -> Any:
    """Load one split of a dataset, wherever it is.

    `datasets.load_dataset` alone takes neither one file ("Couldn't find any data file at" that very file, datasets 5.2)
    nor what `save_to_disk` wrote.

    Args:
        name: hub id, folder, file, or folder written by `save_to_disk`.
        config: as for `datasets.load_dataset`.
        split: as there; a file has the split "train" alone. Slices ("train[:100]") are taken.

    Returns:
        A `datasets.Dataset`.

    Raises:
        DatasetError: nothing of that name, no such split, no rows, or contents that cannot be read.
        ConfigurationError: an id of the Hub, which cannot be reached; see `require_hub`.
    """
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    path = Path(name)
    if not name:
        raise DatasetError("the name of the dataset is empty", mend=_KINDS)
    if path.is_file() and not path.stat().st_size:
        raise DatasetError(f"{path} is empty", mend="write it anew: one JSON object a line, for example")
    loader = _loader(path)
    refuse_missing_file(name)
    if loader == "json" and path.is_file() and path.suffix.lower() not in _COMPRESSED:
        _refuse_other_encoding(path)
    try:
        if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
            loaded = load_from_disk(name)
            return _one_of(loaded, split) if isinstance(loaded, DatasetDict) else loaded
        if loader is not None and path.is_file():
            return load_dataset(loader, data_files=str(path), split=split)
        require_hub([HubName(kind="dataset", name=name, config=config)])
        rows = load_dataset(name, config, split=split)
        if path.is_dir():
            _tell_unread(path, rows)
        return rows
    except SpeedkitError:
        raise
    except DatasetGenerationError as error:  # its own text only says that there is a cause
        raise _unreadable(name, error.__cause__ or error) from error
    except IndexError as error:  # datasets 5.2 cannot load what it saved without rows
        raise DatasetError(f"dataset {name!r} holds no rows", mend="check what was saved there") from error
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(name, error) from error


def refuse_missing_file(name: str) -> None:
    """Refuse the name of a file that is not there: with such an ending it can be nothing else.

    Raises:
        DatasetError: no such file.
    """
    if _loader(Path(name)) and not Path(name).exists():
        near = nearest_path(name)
        raise DatasetError(
            f"no such file: {name}",
            mend=(f"did you mean {near}? Correct" if near else "correct") + f" the path (here is {Path.cwd()})",
        )


def _loader(path: Path) -> str | None:
    """Which reader of datasets a file's name asks for, compressed or not."""
    ending = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return _LOADERS.get(ending.suffix.lower())


def _refuse_other_encoding(path: Path) -> None:
    """Refuse JSON that is no UTF-8: Arrow keeps such bytes, and whoever reads them as text fails.

    The first GB is looked at, which takes a second.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 1
    with path.open("rb") as file:
        while file.tell() < _READ_BYTES and (block := file.read(_BLOCK_BYTES)):
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                lines += error.object[: error.start].count(b"\n")
                begin = error.object[:2]
                encoding = "UTF-16" if begin in _UTF_16 and lines == 1 and not error.start else "LATIN1"
                raise DatasetError(
                    f"{path} is not UTF-8 (line {lines}: byte 0x{error.object[error.start]:02x})",
                    mend=f"iconv -f {encoding} -t UTF-8 {path} > utf8{path.suffix}, and name that file"
                    + ("" if encoding == "UTF-16" else " (another encoding than Latin-1: name it after -f)"),
                ) from error
            lines += block.count(b"\n")


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]


def _tell_unread(folder: Path, rows: Any) -> None:
    """Say which files of a folder were left out: datasets reads those of one kind alone, without a word."""
    kinds = {_loader(path) for path in _files(folder)} - {None, "text"}
    read = getattr(getattr(rows, "info", None), "builder_name", None)
    if read in kinds and len(kinds) > 1 and os.environ.get("LOCAL_RANK", "0") == "0":
        unread = ", ".join(sorted(str(kind) for kind in kinds - {read}))
        logger.warning(
            "%s holds files of several kinds, and only %s was read (%d rows), not %s: name one file, or give each kind "
            "a folder", folder, read, len(rows), unread,
        )  # fmt: skip


def _one_of(loaded: Any, split: str) -> Any:
    if split not in loaded:
        raise _no_split(split, list(map(str, loaded)))
    return loaded[split]


def _no_split(split: str, there: list[str]) -> DatasetError:
    near = there[0] if len(there) == 1 else nearest(split, there)
    return DatasetError(
        f"there is no split {split!r}",
        evidence=(f"there are: {', '.join(there)}",),
        mend=f"dataset_train_split: {near or there[0]} (of a plan: --split {near or there[0]})",
    )


def _unreadable(name: str, error: BaseException) -> DatasetError:
    told = f"dataset {name!r} cannot be loaded: {error}"
    unknown = re.match(
        r"Unknown split \"(.*)\"\. Should be one of \[(.*)\]", str(error)
    )  # datasets 5.2, arrow_reader.py
    if unknown:
        return _no_split(unknown[1], re.findall(r"'([^']+)'", unknown[2]))
    if (
        isinstance(error, OSError)
        and (error.errno is not None or "disk space" in str(error))
        and not _is_about(error, name)
    ):
        from datasets.config import HF_DATASETS_CACHE

        return DatasetError(
            told,
            evidence=(f"datasets writes what it reads to {HF_DATASETS_CACHE} first",),
            mend="give HF_HOME (or HF_DATASETS_CACHE) a folder that can be written and has room",
        )
    if Path(name).is_file() and _loader(Path(name)):
        found = _first_bad_line(Path(name))
        return DatasetError(
            told,
            evidence=(found,) if found else (),
            mend=f"correct that line of {name}, or write the file anew" if found else f"write {name} anew, as "
            f"{_loader(Path(name))}",
        )  # fmt: skip
    if Path(name).is_dir() and not any(map(_loader, _files(Path(name)))):
        there = [str(path.relative_to(name)) for path in _files(Path(name))]
        return DatasetError(
            f"there are no data in the folder {name}",
            evidence=(f"it holds {', '.join(there[:5]) or 'no file'}{' ...' if len(there) > 5 else ''}",),
            mend=f"name a folder that holds files of one kind of {', '.join(_LOADERS)}",
        )
    return DatasetError(told, mend=f"it is {_KINDS}, with this split")


def _first_bad_line(path: Path) -> str | None:
    """Which line is no JSON: pyarrow counts rows of a block, not lines of the file."""
    if path.suffix.lower() != ".jsonl":
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    json.loads(line)
            except ValueError as error:
                return f"line {number} is no JSON: {error}"
    return None


def _is_about(error: OSError, name: str) -> bool:
    """Whether it was the data set's own file or folder that could not be read."""
    return error.filename is not None and Path(name).exists() and str(error.filename).startswith(str(Path(name)))
