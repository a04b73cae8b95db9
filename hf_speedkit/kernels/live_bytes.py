"""Counts the bytes of live tensors while code runs, on real, meta or fake tensors alike.

torch.distributed._tools.mem_tracker.MemTracker does more (it sorts bytes by module and phase) and gives the same peak,
which tests/kernels/test_memory_trace.py checks; it is private, and a window of a run cannot be asked for its own peak.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside its `with` block every storage that an operation makes is counted until it is freed.

    Args:
        outside: tensors whose storages are not counted, views of them included: weights and inputs.
    """

    def __init__(self, outside: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self._highest = 0
        self._outside = [tensor.untyped_storage() for tensor in outside]
        self._seen = {storage._cdata for storage in self._outside}

    def take_highest(self) -> int:
        """The highest number of live bytes since the last call; starts a new window."""
        highest, self._highest = self._highest, self.live
        return highest

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.live += size
        self._highest = max(self._highest, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class OperationLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside its `with` block only so many operations run; the next one raises.

    Args:
        most: how many.
        error: what is raised.
    """

    def __init__(self, most: int, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left, self._error = most, error

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, or raise where there were too many."""
        self._left -= 1
        if self._left < 0:
            raise self._error
        return function(*args, **(kwargs or {}))
