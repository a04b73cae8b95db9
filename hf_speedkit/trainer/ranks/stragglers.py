"""What ranks will wait for one another, said once before training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hf_speedkit.core.flops import model_flops
from hf_speedkit.packing.forecast import StragglerForecast, forecast_stragglers, quadratic_per_token

logger = logging.getLogger(__name__)


def log_stragglers(model: Any, lengths: Sequence[int], args: Any) -> StragglerForecast | None:
    """Predict and log the wait for the slowest rank, on the main process.

    Args:
        model: its config gives the cost of attention against the rest.
        lengths: tokens of each document.
        args: a SpeedSFTConfig.

    Returns:
        The forecast; None on other processes, and for a family whose FLOPs are not known.
    """
    if args.process_index != 0:
        return None
    flops = model_flops(model.config.to_dict())
    if flops is None:
        logger.info("the wait for the slowest rank is not predicted: no FLOPs formula for this model family")
        return None
    forecast = forecast_stragglers(
        lengths,
        tokens_per_batch=args.row_slots,
        world_size=args.world_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        quadratic_per_token=quadratic_per_token(flops),
        strategy=args.packing_strategy,
    )
    advise = forecast.window_pays and args.cost_window_steps is None
    logger.log(logging.WARNING if advise else logging.INFO, "%s", forecast.sentence())
    return forecast
