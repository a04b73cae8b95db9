"""Mixed precision that this machine cannot compute, or can only imitate: told before anything is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from hf_speedkit.core.errors import ConfigurationError, HardwareError
from hf_speedkit.trainer.hardware import is_on

logger = logging.getLogger(__name__)

_BF16_CAPABILITY = (8, 0)
"""Ampere. torch calls bf16 supported on older GPUs too, where it is emulated (torch 2.13, is_bf16_supported)."""


def require_accelerator(config: Any) -> None:
    """Refuse settings that leave a machine without a GPU to transformers, whose refusal names no setting to write.

    Args:
        config: a SpeedSFTConfig as its user gave it: `bf16` is None where TRL is to turn it on.

    Raises:
        HardwareError: no accelerator that torch can use, and bf16 (TRL's default) for one.
    """
    import torch

    wanted = config.bf16 or config.bf16_full_eval or (config.bf16 is None and not config.fp16)
    if config.use_cpu or not wanted or torch.accelerator.is_available():
        return
    built = "" if torch.version.cuda or torch.version.hip else ", and this torch is built for CPUs alone"
    raise HardwareError(
        f"there is no GPU that torch can use{built}",
        evidence=(f"torch {torch.__version__}; bf16 is on for GPUs unless told otherwise (TRL's default)",),
        mend="use_cpu=True trains on the CPU, a tiny model in minutes. Where there is a GPU: hf-speedkit doctor MODEL "
        "says why torch does not see it",
    )


def check_precision(config: Any) -> None:
    """Refuse bf16 on a GPU that emulates it, and say what mixed precision does on a CPU.

    Args:
        config: a SpeedSFTConfig, made.

    Raises:
        HardwareError: bf16 on an NVIDIA GPU before Ampere, unless `kernel_assertion` is "warn" or "off".
    """
    import torch

    speaks = config.local_process_index == 0
    if config.device.type == "cpu":
        if config.fp16 and speaks:
            logger.warning("fp16=True does nothing on a CPU: the job trains as with fp16=False")
        elif config.bf16 and speaks:
            logger.warning(
                "bf16=True on a CPU: products are computed in bf16, slowly where it has no instructions for it (AMX, "
                "AVX512-BF16); bf16=False trains in the weights' own type"
            )
        return
    if config.device.type != "cuda" or torch.version.hip or not config.bf16:
        return
    capability = torch.cuda.get_device_capability()
    if capability >= _BF16_CAPABILITY:
        return
    name = torch.cuda.get_device_name()
    refusal = HardwareError(
        f"bf16 on a {name}: this GPU has no bf16 arithmetic, and torch emulates it",
        evidence=(f"compute capability {capability[0]}.{capability[1]}; bf16 needs 8.0 (A100, L4, RTX 30xx or newer)",),
        mend="bf16=False, fp16=True, and the weights in float32 (dtype: float32)",
        regardless='kernel_assertion="warn"',
    )
    if config.kernel_assertion not in ("warn", "off"):
        raise refusal
    if speaks:
        logger.warning("%s", refusal)


def refuse_half_weights(args: Any, dtypes: Iterable[object]) -> None:
    """Refuse fp16 mixed precision over trained weights of 16 bits: its loss scaler raises at step 1.

    Of float16 weights without it a warning says what they lose; checkpoints of that type come so by themselves.

    Args:
        args: TrainingArguments.
        dtypes: of the weights that are trained, as torch names them ("float16" or torch.float16).

    Raises:
        ConfigurationError: with the dtype to load them in.

    Source: torch 2.13 amp/grad_scaler.py, "Attempting to unscale FP16 gradients."; of bf16 ones its CUDA kernel says
    "not implemented for 'BFloat16'" (github.com/pytorch/pytorch/issues/127176, github.com/huggingface/trl/issues/4901).
    """
    # Sharded weights are made float32 when they are prepared (accelerate 1.15 fsdp_utils.py:816).
    sharded = args.fsdp or args.deepspeed or is_on(os.environ.get("ACCELERATE_USE_FSDP"))
    half = sorted({str(one).removeprefix("torch.") for one in dtypes} & {"float16", "bfloat16"})
    if not args.fp16 and "float16" in half and args.local_process_index == 0:
        logger.warning(
            "trained weights are in float16, and nothing scales the loss: gradients and updates below 6e-8 are 0. Load "
            "them as bfloat16 or float32 (dtype: bfloat16)"
        )
    if half and args.fp16 and args.device.type != "cpu" and not sharded:
        raise ConfigurationError(
            f"fp16=True with trained weights in {half[0]}: the loss scaler cannot take their gradients",
            evidence=(
                "mixed precision keeps weights in float32 and casts them for each product",
                "adapters beside 4 bits are made in bfloat16 by TRL: there fp16=False",
            ),
            mend='load them in float32: dtype: float32, or model_init_kwargs={"dtype": "float32"}',
            regardless="fp16=False computes in the weights' own type; bf16=True needs no loss scaler (compute "
            "capability 8.0)",
        )
