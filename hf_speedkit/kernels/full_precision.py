"""Keeps automatic mixed precision out of functions that choose their own precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function with autocast off on the device of its first tensor argument.

    Autocast would turn the float32 products inside back into half precision, and some of what follows has no half
    precision implementation at all (torch 2.13: `triangular_solve_cpu` for bfloat16).
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        if first.device.type == "meta":  # which has no autocast
            return function(*args, **kwargs)
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs)

    return run
