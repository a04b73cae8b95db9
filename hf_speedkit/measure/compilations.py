"""How many kernels and graphs were compiled since the last look: Triton's and torch.compile's. No cost per step.

Triton tells a listener of every kernel it compiles (`triton.knobs.compilation.listener`, Triton 3.4 and later; a
kernel that came from the cache on disk is told as such and does not count). torch.compile counts its graphs in
`torch._dynamo.utils.counters`, private, checked with torch 2.11 and 2.13. Neither is imported here: a package that
nobody has imported has compiled nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


class CompilationCounter:
    """Counts compilations of this process between `start` and `stop`.

    Args:
        modules: loaded modules by name; `sys.modules` by default.
    """

    def __init__(self, modules: Mapping[str, Any] | None = None) -> None:
        self._modules = sys.modules if modules is None else modules
        self._kernels = 0
        self._taken = 0
        self._knobs: Any = None
        self._previous: Any = None

    def start(self) -> None:
        """Begin to count from 0."""
        self._listen()
        self._kernels = 0
        self._taken = _graphs(self._modules)

    def take(self) -> int:
        """Compilations since the last call, or since `start`. Reads two host integers."""
        self._listen()  # Triton may have been imported only now, by the first kernel
        graphs = _graphs(self._modules)
        new = self._kernels + max(0, graphs - self._taken)
        self._kernels, self._taken = 0, graphs
        return new

    def stop(self) -> None:
        """Give Triton its former listener back."""
        if self._knobs is not None and self._knobs.listener == self._heard:
            self._knobs.listener = self._previous
        self._knobs = self._previous = None

    def _listen(self) -> None:
        if self._knobs is not None:
            return
        knobs = getattr(getattr(self._modules.get("triton"), "knobs", None), "compilation", None)
        if knobs is None or not hasattr(knobs, "listener"):
            return  # no Triton, or one before 3.4
        self._knobs, self._previous = knobs, knobs.listener
        knobs.listener = self._heard

    def _heard(self, **event: Any) -> Any:
        if not event.get("cache_hit"):
            self._kernels += 1
        return None if self._previous is None else self._previous(**event)


def _graphs(modules: Mapping[str, Any]) -> int:
    counters = getattr(modules.get("torch._dynamo.utils"), "counters", None)
    stats = counters.get("stats") if isinstance(counters, Mapping) else None
    return int(stats.get("unique_graphs", 0)) if isinstance(stats, Mapping) else 0
