"""What is known of a model's kernels and memory from its config alone, before its weights are downloaded or read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.errors import ConfigurationError, SpeedkitError
from hf_speedkit.core.families import refuse_leaking_family
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.imports import is_installed
from hf_speedkit.kernels.requirements import stands_alone
from hf_speedkit.trainer.adapters import require_peft, require_targets
from hf_speedkit.trainer.hardware import word_of
from hf_speedkit.trainer.hub_access import HubName, require_hub, require_login
from hf_speedkit.trainer.launching import refuse_split_recurrence, sharded_states
from hf_speedkit.trainer.memory.check import require_memory_of
from hf_speedkit.trainer.optional_packages import require_attention, require_hub_kernels, require_packages
from hf_speedkit.trainer.output import require_output_dir
from hf_speedkit.trainer.precision_rules import refuse_half_weights
from hf_speedkit.trainer.ranks.agreement import agree
from hf_speedkit.trainer.stored_weights import refuse_stored_quantized
from hf_speedkit.trainer.trackers import refuse_lone_readers, require_tracker_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_speedkit.trainer.config import SpeedSFTConfig

logger = logging.getLogger(__name__)


def kernel_mode(args: SpeedSFTConfig) -> str:
    """How kernels are asserted: "strict", "warn", "off", or "report" (a CPU has no fused kernels to demand)."""
    mode: str = args.kernel_assertion
    if mode != "auto":
        return mode
    return "report" if args.device.type == "cpu" else "strict"


def require_parts(
    args: SpeedSFTConfig, eval_dataset: object = None, callbacks: object = None, *, adapted: bool = False
) -> None:
    """Refuse a job whose settings name what is not there: a package, a folder to write to, an evaluation set.

    Callbacks that are no list are refused as well; transformers adds lists and says no more than that.

    Raises:
        ConfigurationError: see `require_packages`, `require_peft` (with `adapted`), `require_tracker_names`,
            `refuse_lone_readers` and `require_output_dir`; an evaluation without rows.
    """
    if callbacks is not None and not isinstance(callbacks, list):
        one = hasattr(callbacks, "on_train_begin")
        raise ConfigurationError(
            f"callbacks is a {type(callbacks).__name__}, not a list",
            mend=f"callbacks=[{type(callbacks).__name__}(...)]" if one else "callbacks=[...]",
        )
    require_packages(args)
    if adapted:
        require_peft("adapters are trained")
    require_tracker_names(args.report_to)
    if states := sharded_states(args):
        refuse_lone_readers(args.report_to, states)
    require_output_dir(args.output_dir)
    if args.push_to_hub:
        require_login(args.hub_token)
    strategy = word_of(args.eval_strategy)
    if (strategy != "no" or args.eval_on_start) and eval_dataset is None:
        asked = f"eval_strategy={strategy!r}" if strategy != "no" else "eval_on_start=True"
        raise ConfigurationError(
            f"{asked}, and there is no eval_dataset",
            mend='eval_dataset=..., for example of dataset.train_test_split(test_size=0.01), or eval_strategy="no"',
        )


def require_before_loading(model_args: Any, args: SpeedSFTConfig) -> None:
    """What can be refused before weights are there, for a recipe that parses TRL's ModelConfig.

    Args:
        model_args: a ModelConfig.
        args: the job's settings.

    Raises:
        KernelAssertionError, PackingError: see `require_kernels`.
        HardwareError: see `require_memory`.
        ConfigurationError: see `require_packages`, `refuse_half_weights` and `require_targets`.
    """
    require_packages(args)
    if not model_args.use_peft:  # adapters have a type of their own, float32 beside 16 bits (peft)
        refuse_half_weights(args, [model_args.dtype])
    name, revision = model_args.model_name_or_path, model_args.model_revision
    attention, dtype = model_args.attn_implementation, model_args.dtype
    # Whether the weights will be read, or drawn, is the recipe's to know: `require_hub_for` has asked for them.
    quantized = bool(model_args.load_in_4bit or model_args.load_in_8bit)
    require_kernels(
        name, args, revision=revision, attn_implementation=attention, dtype=dtype, weights=False,
        adapted=bool(model_args.use_peft), quantized=quantized,
    )  # fmt: skip
    subject = _config(name, {} if revision is None else {"revision": revision}) if model_args.use_peft else None
    if subject is not None:
        require_targets(model_args, subject)
    require_memory_of(model_args, args)


def require_kernels(
    model: str | PreTrainedModel,
    args: SpeedSFTConfig,
    *,
    revision: str | None = None,
    attn_implementation: str | None = None,
    dtype: object = None,
    weights: bool = True,
    adapted: bool = False,
    quantized: bool = False,
) -> None:
    """Refuse a job whose kernels are missing, known to fail or found wrong, before it loads weights or tokenizes data.

    By name: reads the config (a few kB), imports the packages in processes of their own and, on a GPU with packing,
    runs the functions at the model's sizes on a skeleton of it (4 of 64 layers for Qwen3.5-27B). One rank of each host
    does so, which also fills its caches once; the others read them. Of a model that is there its bindings are
    looked at. Nothing is said in the other modes: the proof before step 1 looks at the prepared model again.

    Args:
        model: hub id or path, or the model.
        args: the job's settings. Read here: `kernel_assertion`, `packing` and the rows, what may be put in place,
            `model_init_kwargs`.
        revision, attn_implementation, dtype: as for from_pretrained; those in `args.model_init_kwargs` if None.
        weights: those of an id of the Hub will be read, so that without a network the cache must have them.
        adapted: adapters are trained.
        quantized: the job quantizes the model as it is loaded.

    Raises:
        KernelAssertionError: mode "strict", and a function would be slow or wrong. On all ranks.
        PackingError: a family whose packed rows leak.
        ConfigurationError: rows of recurrent layers that would be cut; see `refuse_stored_quantized`.
        ConfigurationError: an id of the Hub, which cannot be reached; see `require_hub`. No such attention.
    """
    loading = loading_settings(args)
    dtype = str(dtype or loading.get("dtype") or "auto").removeprefix("torch.")
    options = {
        "revision": revision or loading.get("revision"),
        "attn_implementation": attn_implementation or loading.get("attn_implementation"),
        "trust_remote_code": loading.get("trust_remote_code", False),  # None would ask on the terminal, on every rank
    }
    options = {name: value for name, value in options.items() if value is not None}
    given = quantized or "quantization_config" in loading

    def look() -> None:
        subject = _looked_up(model, args, options, weights)
        if subject is None:
            return
        if isinstance(model, str):
            refuse_stored_quantized(subject, adapted=adapted, given=given, capability=lambda: _capability(args.device))
        _require(model, subject, args, options, dtype)

    agree(look)


def loading_settings(args: SpeedSFTConfig) -> dict[str, Any]:
    """What TRL hands to from_pretrained; empty where it is given as text that TRL has not read yet."""
    return dict(args.model_init_kwargs) if isinstance(args.model_init_kwargs, dict) else {}


def _flex_in(config: Any) -> str | None:
    """Flex attention, where a model has it already; any other would not have been loaded without its package."""
    found = getattr(config, "_attn_implementation", None)
    return found if found == "flex_attention" else None


def _capability(device: Any) -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _looked_up(model: str | PreTrainedModel, args: SpeedSFTConfig, options: dict[str, Any], weights: bool) -> Any:
    """The model, or the config of the one that is named; None where this rank looks at none."""
    if isinstance(model, str):  # every rank will load it
        require_hub([HubName(kind="model", name=model, revision=options.get("revision"), weights=weights)])
    if args.local_process_index != 0:
        return None
    if isinstance(model, str) and loading_settings(args).get("use_kernels"):
        without = "leave use_kernels out of model_init_kwargs: fused layers are put in place by fused_layers=True"
        require_hub_kernels("use_kernels is on", without)
    return _config(model, options) if isinstance(model, str) else model


def _require(
    model: str | PreTrainedModel, subject: Any, args: SpeedSFTConfig, options: dict[str, Any], dtype: str
) -> None:
    config = subject if isinstance(model, str) else model.config
    if args.packing:
        refuse_leaking_family(config.get_text_config().model_type)
    refuse_split_recurrence(config, args.parallelism_config)
    if kernel_mode(args) != "strict":  # which finds it too, and says what it costs
        chosen = options.get("attn_implementation")
        require_attention(chosen or _flex_in(config), device=args.device.type)
        return
    from hf_speedkit.kernels.inspection import check_kernels

    slots = args.row_slots if args.packing else None
    found = check_kernels(subject, tokens_per_batch=slots)
    replaceable = stands_alone(check.function for check in found)
    checks = [check for check in found if not _may_be_replaced(check, args, convolution=replaceable)]
    _refuse(checks, config)
    if isinstance(model, str) and slots is not None and args.device.type == "cuda" and checks:
        _refuse(_run(config, args, slots, dtype), config)


def _refuse(checks: Sequence[KernelCheck], config: Any) -> None:
    from hf_speedkit.kernels.fla_convolution import through_fla
    from hf_speedkit.kernels.inspection import assert_kernels

    assert_kernels(config, checks=through_fla(checks), say=lambda _: None)  # warnings come with the prepared model


def _run(config: Any, args: SpeedSFTConfig, slots: int, weights: str) -> tuple[KernelCheck, ...]:
    import torch

    from hf_speedkit.kernels.skeleton import probe_config
    from hf_speedkit.trainer.kernel_callback import activation_dtype

    if weights == "auto":  # the checkpoint's own, which its config may name
        weights = str(config.get_text_config().dtype or "bfloat16").removeprefix("torch.")
    dtype: Any = activation_dtype(args) or getattr(torch, weights, torch.bfloat16)
    try:
        checks, _ = probe_config(config, device=args.device, dtype=dtype, tokens_per_batch=slots)
    except Exception as error:
        # No later call on this device will work either; and what we refuse ourselves is a refusal.
        if "CUDA error" in str(error) or isinstance(error, SpeedkitError):
            raise
        # A skeleton that cannot be made (a config that only remote code understands, no memory) proves nothing.
        logger.info("kernels are not run before loading: %s: %s", type(error).__name__, error)
        return ()
    return checks


def _config(model: str, options: dict[str, Any]) -> Any:
    """The config, or None where there is none to be had: loading the model says why, better than could be said here."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, **options)
    except Exception:  # noqa: BLE001 (configs raise what they like)
        return None


def _may_be_replaced(check: KernelCheck, args: SpeedSFTConfig, *, convolution: bool) -> bool:
    """What SpeedSFTTrainer will put something faster in the place of, where the prepared model allows it.

    Args:
        check: what was found.
        args: the job's settings.
        convolution: another convolution can stand in for causal-conv1d in this family.
    """
    if check.function == "attention":
        masked = check.evidence.startswith(("eager", "torch scaled_dot_product_attention"))
        return masked and args.packing and args.packed_attention == "auto"
    if check.function != "causal_conv1d_fn" or check.verdict is not KernelVerdict.FALLBACK:
        return False
    fuses = args.fused_layers and "convolution" not in (args.fused_layers_exclude or ())
    return convolution and fuses and args.device.type == "cuda" and is_installed("fla")
