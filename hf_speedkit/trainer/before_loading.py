"""What is known of a model's kernels and memory from its config alone, before its weights are downloaded or read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_speedkit.core.families import refuse_leaking_family
from hf_speedkit.core.records import KernelCheck
from hf_speedkit.trainer.agreement import agree
from hf_speedkit.trainer.memory_check import require_memory_of

if TYPE_CHECKING:
    from hf_speedkit.trainer.config import SpeedSFTConfig


def kernel_mode(args: SpeedSFTConfig) -> str:
    """How kernels are asserted: "strict", "warn", "off", or "report" (a CPU has no fused kernels to demand)."""
    mode: str = args.kernel_assertion
    if mode != "auto":
        return mode
    return "report" if args.device.type == "cpu" else "strict"


def require_before_loading(model_args: Any, args: SpeedSFTConfig) -> None:
    """`require_kernels` and `require_memory` for a recipe that parses TRL's ModelConfig.

    Args:
        model_args: a ModelConfig.
        args: the job's settings.

    Raises:
        KernelAssertionError, PackingError: see `require_kernels`.
        HardwareError: see `require_memory`.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    require_kernels(name, args, revision=revision, attn_implementation=model_args.attn_implementation)
    require_memory_of(model_args, args)


def require_kernels(
    model: str, args: SpeedSFTConfig, *, revision: str | None = None, attn_implementation: str | None = None
) -> None:
    """Refuse a job whose kernels are missing or known to fail on this machine before 54 GB of weights are on it.

    Reads the config (a few kB) and imports the packages in processes of their own, on one rank a host. Nothing is run
    and nothing is said in the other modes: the proof before step 1 looks at the live model.

    Args:
        model: hub id or path.
        args: the job's settings. Read here: `kernel_assertion`, `packing` and the rows, `model_init_kwargs`.
        revision, attn_implementation: as for from_pretrained; those in `args.model_init_kwargs` if None.

    Raises:
        KernelAssertionError: mode "strict", and a function would be slow or wrong. On all ranks.
        PackingError: a family whose packed rows leak.
    """
    loading: dict[str, Any] = dict(args.model_init_kwargs or {}) if isinstance(args.model_init_kwargs, dict) else {}
    options = {
        "revision": revision or loading.get("revision"),
        "attn_implementation": attn_implementation or loading.get("attn_implementation"),
        "trust_remote_code": loading.get("trust_remote_code", False),  # None would ask on the terminal, on every rank
    }
    agree(lambda: _require(model, args, {name: value for name, value in options.items() if value is not None}))


def _require(model: str, args: SpeedSFTConfig, options: dict[str, Any]) -> None:
    if args.local_process_index != 0:
        return
    config = _config(model, options)
    if config is None:
        return
    if args.packing:
        refuse_leaking_family(config.get_text_config().model_type)
    if kernel_mode(args) != "strict":
        return
    from hf_speedkit.kernels.fla_convolution import through_fla
    from hf_speedkit.kernels.inspection import assert_kernels, check_kernels

    checks = check_kernels(config, tokens_per_batch=args.row_slots if args.packing else None)
    kept = [check for check in through_fla(checks) if not _may_be_replaced(check, args)]
    assert_kernels(config, checks=kept, say=lambda _: None)  # warnings come with the live model


def _config(model: str, options: dict[str, Any]) -> Any:
    """The config, or None where there is none to be had: loading the model says why, better than could be said here."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, **options)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def _may_be_replaced(check: KernelCheck, args: SpeedSFTConfig) -> bool:
    """Attention with a mask gives way to packed attention where the model allows it, which only the model tells."""
    masked = check.evidence.startswith(("eager", "torch scaled_dot_product_attention"))
    return check.function == "attention" and masked and args.packing and args.packed_attention == "auto"
