"""The bytes of a trace file, plain or gzip, in pieces: whatever can be read of a broken file is read.

Compression is recognised by content, not by name: both spellings occur with either content.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hf_speedkit.core.errors import TraceError

PIECE_BYTES = 1 << 20
"""Piece handed on. At 4 MiB reading took twice the page faults of 1 MiB (a first look)."""

DEFAULT_LIMIT_BYTES = 4 << 30
"""JSON read at most, decompressed. A step of 272,000 launches is 0.6 GB (benchmarks/results/trace_reading.json); a gzip
bomb has no end."""

_READ_BYTES = 1 << 18
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's code for "gzip wrapper": header and checksum are verified by zlib itself


class ByteStream:
    """Iterate over the decompressed pieces of one file.

    Args:
        path: the file.
        limit_bytes: decompressed bytes read at most.

    After iteration `broken` says why the bytes end early (None when they do not).

    Raises:
        TraceError: the file is absent, empty, or longer than the limit.
    """

    def __init__(self, path: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self.broken: str | None = None
        self.bytes_read = 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            handle = self._path.open("rb")
        except OSError as error:
            raise TraceError(
                f"cannot open {self._path.name}: {error.strerror or error}",
                mend="give the path of a trace written by torch.profiler (.json or .json.gz)",
            ) from error
        with handle:
            magic = handle.read(2)
            if not magic:
                raise TraceError(f"{self._path.name} is empty", mend="record the step again")
            handle.seek(0)
            pieces = _gunzip(handle, self) if magic == _GZIP_MAGIC else iter(lambda: handle.read(PIECE_BYTES), b"")
            yield from self._counted(pieces)

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.bytes_read += len(piece)
            if self.bytes_read > self._limit_bytes:
                raise TraceError(
                    f"{self._path.name} holds more than {self._limit_bytes / 2**30:.3g} GiB of JSON",
                    evidence=("reading costs about 9 s of CPU time and 0.7 GB of memory per GiB",),
                    mend="record fewer steps, without stacks and shapes: TraceCallback(steps=(20,))",
                    regardless="hf-speedkit trace FILE --max-gib N",
                )
            yield piece


def _gunzip(handle: BinaryIO, stream: ByteStream) -> Iterator[bytes]:
    """All members of a gzip file, by zlib directly.

    `gzip.open().read(n)` loses up to n bytes in front of the place where a file was cut off; a killed job's trace
    is cut off, and the last pieces hold the kernels.
    """
    inflater = zlib.decompressobj(_GZIP_WINDOW)
    started = False
    while True:
        compressed = handle.read(_READ_BYTES)
        if not compressed:
            break
        while compressed:
            try:
                piece = inflater.decompress(compressed, PIECE_BYTES)
            except zlib.error as error:
                stream.broken = f"the gzip data is damaged after {stream.bytes_read:,} bytes of JSON ({error})"
                return
            started = True
            if piece:
                yield piece
            compressed = inflater.unconsumed_tail
            if inflater.eof:
                compressed = inflater.unused_data
                if not compressed.startswith(_GZIP_MAGIC[:1]):  # end, or padding after the last member
                    compressed = compressed.lstrip(b"\0")
                    if compressed:
                        stream.broken = "bytes that are not gzip follow the gzip data"
                        return
                inflater = zlib.decompressobj(_GZIP_WINDOW)
                started = False
    if started:
        stream.broken = f"the gzip data ends early, after {stream.bytes_read:,} bytes of JSON"
