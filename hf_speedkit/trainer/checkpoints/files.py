"""The files of a checkpoint: their checksums, the manifest over them, and what is wrong with one.

A checksum covers 64 MiB, so that several threads and all ranks can share the largest file. zlib.crc32 is the fastest
in the standard library (one core of the development machine: crc32 4,170 MB/s, sha1 1,930, sha256 1,810, blake2b 940),
and against damage by accident 32 bits a chunk are enough; nothing here defends against a forger.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hf_speedkit.core.checkpoint_records import CheckpointFile, CheckpointManifest
from hf_speedkit.core.records import to_json

MANIFEST_NAME = "speedkit_manifest.json"
CHUNK_BYTES = 64 << 20
_READ_BYTES = 4 << 20
_THREADS = 4
_NUMBERED = re.compile(r"checkpoint-(\d+)")
# What each rank writes for itself; every other file is written by one process.
_OWN_FILE = re.compile(r"(?:rng_state_(\d+)\.pth|__(\d+)_\d+\.distcp|speedkit_stream_rank(\d+)\.json)")


def numbered_checkpoints(directory: str | Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint-N folder in `directory`, the highest step first."""
    found = []
    for path in Path(directory).glob("checkpoint-*"):
        match = _NUMBERED.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def files_of(directory: Path, *, rank: int, saver: bool) -> list[str]:
    """The files below `directory` that this rank has written, by their path inside it.

    Args:
        directory: an unfinished checkpoint.
        rank: this process.
        saver: it also wrote the files that are nobody's own.
    """
    names = []
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            continue
        match = _OWN_FILE.fullmatch(path.name)
        owner = None if match is None else int(next(number for number in match.groups() if number is not None))
        if owner == rank or (owner is None and saver):
            names.append(path.relative_to(directory).as_posix())
    return names


def checked_files(directory: Path, names: Iterable[str]) -> dict[str, CheckpointFile]:
    """Bring files to the disk and give their sizes and checksums; they are read from the page cache.

    Raises:
        OSError: a file cannot be read or flushed.
    """
    checked = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for name in names:
            path = directory / name
            _flush(path)
            size = path.stat().st_size
            sums = threads.map(_chunk_checksum, ((path, at) for at in range(0, size, CHUNK_BYTES)))
            checked[name] = CheckpointFile(size_bytes=size, crc32=tuple(sums))
    return checked


def write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest and bring it to the disk."""
    path = directory / MANIFEST_NAME
    path.write_text(to_json(manifest), encoding="utf-8")
    _flush(path)


def read_manifest(directory: Path) -> CheckpointManifest | None:
    """The manifest of a checkpoint; None where there is none.

    Raises:
        ValueError: there is one that cannot be read.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return None
    return CheckpointManifest.from_dict(json.loads(path.read_text(encoding="utf-8")))


def wrong_sizes(directory: Path, manifest: CheckpointManifest) -> list[str]:
    """Files of the manifest that are missing or have another size, a line each."""
    lines = []
    for name, file in manifest.files.items():
        path = directory / name
        if not path.is_file():
            lines.append(f"{name} is missing")
        elif path.stat().st_size != file.size_bytes:
            lines.append(f"{name} has {path.stat().st_size:,} bytes, {file.size_bytes:,} were written")
    return lines


def damage(
    directory: Path, manifest: CheckpointManifest, *, checksums: bool = True, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """What is not as it was written, a line each; nothing for a good checkpoint.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        checksums: also read the contents; without, sizes alone are compared.
        share: (this one, how many) processes that share the reading; all of them compare sizes.
    """
    lines = wrong_sizes(directory, manifest)
    if lines or not checksums:
        return lines
    mine = list(_chunks(directory, manifest))[share[0] :: share[1]]
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = threads.map(lambda chunk: _chunk_checksum(chunk[:2], manifest.chunk_bytes), mine)
        return [
            f"{path.relative_to(directory).as_posix()} was changed after it was written, "
            f"in bytes {at:,} to {min(at + manifest.chunk_bytes, path.stat().st_size):,}"
            for (path, at, expected), found in zip(mine, sums, strict=True)
            if found != expected
        ]


def flush_folder(directory: Path) -> None:
    """Bring a folder's entries (a rename inside it) to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _chunks(directory: Path, manifest: CheckpointManifest) -> Iterator[tuple[Path, int, int]]:
    for name, file in sorted(manifest.files.items()):
        for number, expected in enumerate(file.crc32):
            yield directory / name, number * manifest.chunk_bytes, expected


def _chunk_checksum(place: tuple[Path, int], chunk_bytes: int = CHUNK_BYTES) -> int:
    path, offset = place
    checksum, left = 0, chunk_bytes
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left > 0 and (block := file.read(min(_READ_BYTES, left))):
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
    return checksum


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def cause_of(error: BaseException) -> BaseException:
    """What failed on the first rank that torch's CheckpointException tells of; any other error is its own cause."""
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException) and error.failures:
        cause: BaseException = next(iter(error.failures.values()))[0]
        return cause
    return error
