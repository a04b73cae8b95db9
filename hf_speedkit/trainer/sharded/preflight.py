"""The last look before step 1: what FSDP2 has made of the model, said once or refused on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.records import Finding, Severity
from hf_speedkit.core.sharding import judge, judge_loading, sentence
from hf_speedkit.trainer.ranks.agreement import agree_sharing
from hf_speedkit.trainer.sharded.prepared import LoadedWeights, peak_host_growth, prepared_model
from hf_speedkit.trainer.sharded.units import decoder_layers

if TYPE_CHECKING:
    from hf_speedkit.trainer.sft import SpeedSFTTrainer

logger = logging.getLogger(__name__)


def preflight(trainer: SpeedSFTTrainer, loaded: LoadedWeights) -> tuple[Finding, ...]:
    """Judge the prepared model and its settings; every rank must call it.

    Args:
        trainer: in `on_train_begin`, where its model is prepared.
        loaded: the model's weights before they were prepared.

    Returns:
        What is worth knowing; rank 0 has logged it as one message.

    Raises:
        ConfigurationError: what must be mended first, all of it; on every rank.

    Cost: one all-reduce; reads no weight.
    """
    (model, findings), grown = agree_sharing(
        lambda: _judged(trainer, loaded), lambda _: float(peak_host_growth(trainer.model))
    )
    loading = judge_loading(grown, model)
    findings = findings if loading is None else (*findings, loading)
    if trainer.is_world_process_zero():
        _log(sentence(model), findings)
    return findings


def refuse(findings: Sequence[Finding]) -> None:
    """Stop for findings that must be mended.

    Raises:
        ConfigurationError: one message for all of them.
    """
    problems = [finding for finding in findings if finding.severity == Severity.PROBLEM]
    if not problems:
        return
    if len(problems) == 1:
        raise ConfigurationError(problems[0].message, evidence=problems[0].evidence, mend=problems[0].advice)
    raise ConfigurationError(
        f"{len(problems)} things must be mended before this job can train",
        evidence=tuple(f"{place}. {problem.message}" for place, problem in enumerate(problems, 1)),
        mend="\n".join(("", *(f"  {place}. {problem.advice}" for place, problem in enumerate(problems, 1)))),
    )


def check_wrap_class(model: Any, plugin: Any) -> None:
    """Refuse a layer class that the model has not got, before anything is tokenized or sharded.

    accelerate raises as well, when training begins, and names neither the setting nor the class it should be.

    Args:
        model: the model before it is sharded.
        plugin: accelerate's FullyShardedDataParallelPlugin, or None.

    Raises:
        ConfigurationError: names the setting and the class of the model's layers.
    """
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    if plugin is None or plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return
    given = plugin.transformer_cls_names_to_wrap
    classes = {type(module).__name__ for module in model.modules()}
    # A set for autodetection in transformers 5.23.
    missing = sorted(set(given or getattr(model, "_no_split_modules", None) or ()) - classes)
    if not missing:
        return
    layers = decoder_layers(model)
    layer = type(layers[0]).__name__ if layers else "the class of its layers"
    how = "transformer_layer_cls_to_wrap names" if given else "the model itself (_no_split_modules) names"
    raise ConfigurationError(
        f"FSDP would find no layer to shard: {how} {', '.join(missing)}, and the model has no such module",
        evidence=(f"its {len(layers)} layers are {layer}",),
        mend=f"fsdp_config: transformer_layer_cls_to_wrap: {layer}",
    )


def refuse_sharded_four_bits(model: Any, plugin: Any) -> None:
    """Refuse 4-bit weights that FSDP2 would shard: those that bitsandbytes stores in a floating dtype.

    A shard is a plain tensor without the scales, and another number for every NaN among its bytes (bitsandbytes issue
    1945). Run over two processes (torch 2.13, bitsandbytes 0.50.2): logits moved by 0.2, and nothing raised. Stored as
    uint8, accelerate 1.15 leaves such weights out of the sharding (fsdp_utils.py:797), and losses are those of DDP.

    Args:
        model: the model before it is sharded.
        plugin: accelerate's FullyShardedDataParallelPlugin, or None.

    Raises:
        ConfigurationError: names the setting.
    """
    if plugin is None or plugin.fsdp_version != 2:
        return
    packed = [p for p in model.parameters() if type(p).__name__ == "Params4bit" and p.is_floating_point()]
    if not packed:
        return
    dtype = str(packed[0].dtype).removeprefix("torch.")
    raise ConfigurationError(
        f"FSDP2 would shard {len(packed)} 4-bit weights that are stored as {dtype}, and compute with wrong ones",
        evidence=("a shard loses bitsandbytes' scales; nothing would raise",),
        mend="leave bnb_4bit_quant_storage out (uint8): each GPU then holds all 4-bit weights",
        regardless="without load_in_4bit, LoRA shards the frozen weights in 16 bits",
    )


def refuse_offload_without_host_group(plugin: Any, backends: str) -> None:
    """Refuse weights in host memory where ranks can exchange nothing that lies there: step 1 would end at the clipping.

    "No backend type associated with device type cpu" (axolotl issue 3058, pytorch issue 148532). accelerate starts gloo
    beside NCCL where the environment says so when the process group starts, which `fsdp_config` alone does not.

    Args:
        plugin: accelerate's FullyShardedDataParallelPlugin, or None.
        backends: torch.distributed.get_backend_config(); empty for one process.

    Raises:
        ConfigurationError: with the variables to set.
    """
    if not backends or "cpu:" in backends or type(getattr(plugin, "cpu_offload", None)).__name__ != "CPUOffloadPolicy":
        return
    raise ConfigurationError(
        "cpu_offload keeps weights and gradients in host memory, and the ranks have no way to exchange what lies there",
        evidence=(f"the process group was started with {backends}: clipping would fail in step 1",),
        mend="export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_OFFLOAD_PARAMS=true before the job starts, as "
        "accelerate launch with fsdp_offload_params: true does",
    )


def _judged(trainer: SpeedSFTTrainer, loaded: LoadedWeights) -> tuple[Any, tuple[Finding, ...]]:
    model = prepared_model(trainer, loaded)
    findings = judge(model)
    refuse(findings)
    return model, findings


def _log(held: str, findings: Sequence[Finding]) -> None:
    worst = any(finding.severity == Severity.WARNING for finding in findings)
    lines = [f"prepared: {held}"]
    for finding in findings:
        lines += [f"  {finding.message}", *(f"    {line}" for line in finding.evidence), f"    {finding.advice}"]
    logger.log(logging.WARNING if worst else logging.INFO, "%s", "\n".join(lines))
