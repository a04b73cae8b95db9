"""What a complete checkpoint holds: the record that is written last, into every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = 1
"""Version of the manifest; a reader refuses a number it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint.

    Args:
        size_bytes: its size.
        crc32: checksum of each `chunk_bytes` of it, in order; empty for an empty file.
    """

    size_bytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The files of a checkpoint, written after all of them.

    Args:
        step: optimizer steps taken.
        world_size: processes that wrote it.
        chunk_bytes: bytes that one checksum covers.
        files: every file by its path inside the checkpoint, with "/" between folders.
        format: version of this record.
    """

    step: int
    world_size: int
    chunk_bytes: int
    files: Mapping[str, CheckpointFile]
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size_bytes for file in self.files.values())

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> CheckpointManifest:
        """The record that `records.to_dict` gave.

        Raises:
            ValueError: it is none, or of a version this one does not know.
        """
        try:
            if saved["format"] != FORMAT:
                raise ValueError(f"format {saved['format']!r}, this version reads {FORMAT}")
            files = {
                str(name): CheckpointFile(size_bytes=int(file["size_bytes"]), crc32=tuple(map(int, file["crc32"])))
                for name, file in saved["files"].items()
            }
            numbers = {name: int(saved[name]) for name in ("step", "world_size", "chunk_bytes")}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no manifest of a checkpoint: {error!r}") from error
        if not files:
            raise ValueError("it names no files")
        return cls(files=files, **numbers)
