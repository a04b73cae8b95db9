"""Where compiled kernels are kept between processes, and how much lies there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder:
    """One compiler's folder.

    Args:
        compiler: "Triton" or "TileLang".
        variable: the environment variable that moves it.
        path: where it is now; it may not exist yet.
    """

    compiler: str
    variable: str
    path: Path

    def files(self) -> int:
        """Files in it now."""
        return sum(len(names) for _, _, names in os.walk(self.path))


def cache_folders(environment: Mapping[str, str] | None = None) -> tuple[CacheFolder, ...]:
    """The folders that a later process takes compiled kernels and tuning results from.

    Fill them once a node, keep them on a local disk (every rank reads them), and `first call` costs seconds instead of
    minutes. fla keeps its tuning results in Triton's folder (FLA_CACHE_RESULTS=1, its default). Folders as in triton
    3.6 (knobs.py, cache_knobs) and tilelang 0.1.13 (env.py).

    Args:
        environment: os.environ if None.
    """
    found = os.environ if environment is None else environment
    home = Path(found.get("HOME") or Path.home())
    triton_home = Path(found.get("TRITON_HOME") or home)
    return (
        CacheFolder(
            compiler="Triton",
            variable="TRITON_CACHE_DIR",
            path=Path(found.get("TRITON_CACHE_DIR") or triton_home / ".triton" / "cache"),
        ),
        CacheFolder(
            compiler="TileLang",
            variable="TILELANG_CACHE_DIR",
            path=Path(found.get("TILELANG_CACHE_DIR") or home / ".tilelang" / "cache"),
        ),
    )
