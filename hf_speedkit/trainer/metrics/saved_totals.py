"""Token totals in the checkpoint, so that they go on after a resume (case V67).

They lie in `TrainerState.stateful_callbacks`, which the Trainer writes to trainer_state.json, under a key of our own.
Being an `ExportableState` would be the documented way, but (transformers 5.23): resuming from a checkpoint made without
the callback then raises KeyError at the first save (trainer.py:3405), and with restore_callback_states_from_checkpoint
the callback is made anew from plain values and put behind the trackers (trainer.py:4020-4054).
"""

from __future__ import annotations

import logging
from dataclasses import asdict, fields

from transformers import TrainerState

from hf_speedkit.core.records import NO_TOKENS, TokenCounts

logger = logging.getLogger(__name__)

STATE_KEY = "hf_speedkit.throughput"


def save_totals(state: TrainerState, tokens: TokenCounts | None) -> None:
    """Put the run's totals over all ranks into the state; takes them out where they are unknown."""
    if tokens is None:
        state.stateful_callbacks.pop(STATE_KEY, None)
    else:
        state.stateful_callbacks[STATE_KEY] = {"step": state.global_step, "tokens": asdict(tokens)}


def load_totals(state: TrainerState) -> TokenCounts | None:
    """The totals up to the state's step; zero for a new run, None where a resumed run's are unknown."""
    if state.global_step == 0:
        return NO_TOKENS
    saved = state.stateful_callbacks.get(STATE_KEY)
    tokens = (
        _tokens(saved.get("tokens")) if isinstance(saved, dict) and saved.get("step") == state.global_step else None
    )
    if tokens is None:
        logger.warning(
            "the checkpoint does not hold the run's token totals, so none are logged; rates are not affected"
        )
    return tokens


def _tokens(saved: object) -> TokenCounts | None:
    """Counts that this version knows; what another one wrote besides is left out, and so is what is no number."""
    if not isinstance(saved, dict) or not isinstance(saved.get("slots"), int):
        return None
    known = {field.name: saved.get(field.name) for field in fields(TokenCounts)}
    return TokenCounts(**{name: value if isinstance(value, int) else None for name, value in known.items()})  # type: ignore[arg-type]
