"""The auxiliary loss that balances experts, over the tokens of documents and not over padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_padding(real: int | None) -> Iterator[None]:
    """Leave the padding at the end of a packed row out of the auxiliary loss while TRL's loss is computed.

    TRL 1.16 hands the mask of a padded batch on (trainer/utils.py, `add_fused_lm_head`), and a packed row has none: all
    of its slots would count, so that a row that is a third padding teaches the router where padding goes.

    Args:
        real: slots of the row that hold a token, which come first; None leaves everything as it is.
    """
    if real is None:
        yield
        return
    # TRL imports it from here at every call, for all families; put back afterwards.
    from transformers.models.mixtral import modeling_mixtral as home

    former = home.load_balancing_loss_func

    def balanced(gate_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(gate_logits, tuple):
            return former(gate_logits, *args, **kwargs)
        if not real:  # a row without documents, which keeps the ranks in step
            return gate_logits[0].sum() * 0.0
        return former(tuple(layer[:real] for layer in gate_logits), *args, **kwargs)

    home.load_balancing_loss_func = balanced
    try:
        yield
    finally:
        home.load_balancing_loss_func = former
