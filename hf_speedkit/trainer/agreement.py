"""All ranks go on together or stop together, with one message.

A rank that raises alone leaves the others waiting in a collective until the time limit (30 minutes by default). So a
start-up check catches its error, every rank tells the others with one integer, and all of them raise the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hf_speedkit.core.errors import SpeedkitError

T = TypeVar("T")


def agree(check: Callable[[], T]) -> T:
    """Run a check on every rank; if any of them fails, all raise.

    Args:
        check: the check; every rank must reach this call, and `check` may itself hold collectives only if all ranks
            reach those too.

    Returns:
        This rank's result.

    Raises:
        SpeedkitError: this rank's own error where it failed, else one that quotes the first rank that did.
        Exception: errors of other types are passed on the same way.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return check()
    error: Exception | None = None
    result: T | None = None
    try:
        result = check()
    except Exception as caught:  # noqa: BLE001 - it is raised below, on every rank
        error = caught
    texts: list[str | None] = [None] * dist.get_world_size()
    # One small object per rank, at start-up only; with NCCL it travels through the current CUDA device.
    dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}")
    failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if error is not None:
        raise error
    if failed:
        rank, text = failed[0]
        raise SpeedkitError(f"rank {rank} of {len(texts)} cannot train, so all ranks stop", evidence=(str(text),))
    return result  # type: ignore[return-value]


def say_once(say: Callable[[str], object], texts: Sequence[str]) -> None:
    """Say on rank 0 what the ranks have to say, each text once: eight ranks would print the same table eight times.

    Args:
        say: called with a text, on rank 0.
        texts: what this rank has to say; every rank must reach this call, also with nothing.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        for text in texts:
            say(text)
        return
    gathered: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, tuple(texts))  # at start-up only, as in `agree`
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(gathered):
        for text in dict.fromkeys(said):
            ranks.setdefault(text, []).append(rank)
    for text, of in ranks.items() if dist.get_rank() == 0 else ():
        whose = "" if len(of) == len(gathered) else f"rank {', '.join(map(str, of))} of {len(gathered)}: "
        say(f"{whose}{text}")
