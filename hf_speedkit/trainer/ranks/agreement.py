"""All ranks go on together or stop together, with one message.

A rank that raises alone leaves the others waiting in a collective until the time limit (30 minutes by default). So a
start-up check catches its error, every rank tells the others with one integer, and all of them raise the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from hf_speedkit.core.errors import SpeedkitError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def runs_alone() -> bool:
    """Whether this process has no others to exchange anything with: no process group, or one of a single rank."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def is_first() -> bool:
    """Whether this process speaks for all: the only one, or rank 0."""
    import torch.distributed as dist

    return runs_alone() or dist.get_rank() == 0


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

    Cost: one all-reduce of a few bytes, 0.5 to 1 ms over two busy gloo processes (a first look).
    """
    return agree_sharing(check, lambda _: 0.0)[0]


def agree_sharing(check: Callable[[], T], number: Callable[[T], float]) -> tuple[T, list[float]]:
    """Like `agree`, and give every rank one number of each rank, in the same all-reduce.

    Args:
        check: see `agree`.
        number: what this rank's result comes to, for the others.

    Returns:
        This rank's result, and the ranks' numbers in rank order.
    """
    import torch
    import torch.distributed as dist

    if runs_alone():
        result = check()
        return result, [number(result)]
    error: Exception | None = None
    shared = 0.0
    try:
        result = check()
        shared = number(result)
    except Exception as caught:  # noqa: BLE001 - it is raised below, on every rank
        error = caught
    ranks = dist.get_world_size()
    row = torch.zeros(ranks + 1, dtype=torch.float64, device=_reducing_device())
    row[dist.get_rank()] = shared
    row[-1] = 0 if error is None else 1
    dist.all_reduce(row)
    # At start-up only; nothing runs on the device that this read could wait for.
    *numbers, failures = row.tolist()
    if failures:
        _stop_together(error, ranks)
    return result, numbers


def gather_agreed(check: Callable[[], T]) -> list[T]:
    """Like `agree`, and give every rank every rank's result.

    Args:
        check: see `agree`; small results, they travel as pickles.

    Returns:
        The results in rank order; on a single process a list of one.
    """
    import torch.distributed as dist

    result = agree(check)
    if runs_alone():
        return [result]
    results: list[T] = [result] * dist.get_world_size()
    dist.all_gather_object(results, result)  # before training and at a save
    return results


def say_once(say: Callable[[str], object], texts: Sequence[str]) -> None:
    """Say on rank 0 what the ranks have to say, each text once: eight ranks would print the same table eight times.

    Args:
        say: called with a text, on rank 0.
        texts: what this rank has to say; every rank must reach this call, also with nothing.
    """
    import torch.distributed as dist

    if runs_alone():
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


def _stop_together(error: Exception | None, ranks: int) -> None:
    """Raise on every rank; all of them call this."""
    import torch.distributed as dist

    texts: list[str | None] = [None] * ranks
    dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
    raise SpeedkitError(f"rank {rank} of {ranks} cannot train, so all ranks stop", evidence=(text,))


def _reducing_device() -> torch.device:
    """Where a small tensor can be reduced: the CPU if the process group has a CPU backend (NCCL alone has none)."""
    import torch
    import torch.distributed as dist

    if "cpu" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
