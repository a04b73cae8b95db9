"""What a prepared model looks like to FSDP2, and what to say about it before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_speedkit.core.memory import GIB
from hf_speedkit.core.memory_words import bytes_in_words
from hf_speedkit.core.records import Finding, Severity

_SMALLEST_JUDGED_BYTES = 128 * 2**20
"""Below this a model drowns in what an interpreter takes anyway, and its loading is not judged."""
_WORTH_A_WARNING_BYTES = GIB
"""What a setting costs on each rank before it is more than a note; the smallest GPU in use has 16 times as much."""

_DECAY_ERROR = {"bfloat16": "0.79 %", "float16": "0.10 %"}
"""Largest relative change of exp(A_log): values from 2 to 4 are 1/64 and 1/512 apart, half of which is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """Parameters that are gathered together.

    Args:
        name: the modules they belong to, as the model names them.
        layers: decoder layers among those.
        trained_dtypes: dtypes in which the trained parameters are held, sorted; ("bfloat16",) is as it should be.
        odd_one: a trained parameter of the rarer dtype, where there are two.
        stored_bytes: all parameters as they are held, over all ranks together.
        gathered_bytes: all parameters as they are computed with, on every rank while the group runs.
        gradient_bytes: gradients of the trained ones before they are reduced, on every rank.
    """

    name: str
    layers: int
    trained_dtypes: tuple[str, ...]
    odd_one: str | None
    stored_bytes: int
    gathered_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayParameters:
    """The parameters a recurrent layer's decay is made of: A_log and dt_bias.

    Args:
        stored: dtype in which they are held.
        computed: dtype in which the layer sees them.
        layers: in how many layers.
    """

    stored: str
    computed: str
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model after accelerate has prepared it, and the settings that go with it.

    Args:
        ranks: processes of the job.
        shards: ranks that hold one copy of the model together: all of them, or those of one host (hybrid sharding).
        sharding_asked: whether FSDP was asked for.
        groups: empty where nothing is sharded.
        loaded_dtype, stored_dtype: of the trained parameters, before and after they were prepared.
        loaded_bytes, stored_bytes: of the trained parameters, over all ranks together where they are sharded.
        decay: None for a model without such layers.
        odd_one: a trained parameter of the rarer dtype, with it, where there are two and nothing is sharded.
        tied_wanted: whether the model's config ties input embedding and output head.
        tied: whether they are one tensor.
        layers_checkpointed_twice: layers in a checkpoint wrapper (FSDP's, or one's own) that checkpoint themselves.
        accumulation_steps: micro-batches of an optimizer step.
        reduces_each: whether gradients are reduced after every micro-batch.
        train_slots, eval_slots: positions of one forward pass; None where rows have no fixed length.
        loads_once: whether one rank was to read the checkpoint for all (`cpu_ram_efficient_loading`).
        weight_bytes: all parameters as they were loaded.
        quantized: the frozen weights are stored in 8 or 4 bits.
    """

    ranks: int
    shards: int
    sharding_asked: bool
    groups: tuple[ShardGroup, ...]
    loaded_dtype: str
    stored_dtype: str
    loaded_bytes: int
    stored_bytes: int
    weight_bytes: int
    decay: DecayParameters | None = None
    odd_one: str | None = None
    tied_wanted: bool = False
    tied: bool = False
    layers_checkpointed_twice: int = 0
    accumulation_steps: int = 1
    reduces_each: bool = False
    train_slots: int | None = None
    eval_slots: int | None = None
    loads_once: bool = False
    quantized: bool = False


def judge(model: PreparedModel) -> tuple[Finding, ...]:
    """Everything worth saying before step 1; a PROBLEM must stop the run.

    Args:
        model: as it was prepared.
    """
    findings = (
        _mixed_dtypes(model),
        _untied(model),
        _checkpointed_twice(model),
        _not_sharded(model),
        _upcast(model),
        _decay(model),
        _kept_gradients(model),
        _large_groups(model),
        _large_evaluation(model),
        _low_precision(model),
    )
    return tuple(finding for finding in findings if finding is not None)


def judge_loading(grown_bytes: Sequence[float], model: PreparedModel) -> Finding | None:
    """Whether ranks that were to receive their weights from rank 0 read the checkpoint themselves (V41).

    Args:
        grown_bytes: by how much each rank's host memory had grown at its peak, in rank order.
        model: as it was prepared.
    """
    if not model.loads_once or model.weight_bytes < _SMALLEST_JUDGED_BYTES:
        return None
    # One and a half shards, or a quarter of the model where shards are small against what else a process does.
    limit = max(1.5 * model.weight_bytes / model.shards, model.weight_bytes / 4)
    over = [rank for rank, grown in enumerate(grown_bytes) if rank > 0 and grown > limit]
    if not over:
        return None
    return Finding(
        rule="loaded_by_every_rank",
        severity=Severity.WARNING,
        message=f"{len(over)} of {model.ranks} ranks held much of the model in host memory, although one was to read "
        "it for all (cpu_ram_efficient_loading)",
        evidence=(
            f"the model is {bytes_in_words(model.weight_bytes)}; at its peak rank {over[0]} had "
            f"{bytes_in_words(grown_bytes[over[0]])} more than now, where {bytes_in_words(limit)} would do",
        ),
        advice="load it with hf_speedkit.trainer.weights.load_model(model_args, args), as recipes/qwen27b_sft.py does",
    )


def sentence(model: PreparedModel) -> str:
    """What is held and gathered, in one line."""
    but = "" if model.odd_one is None else f" (but {model.odd_one})"
    held = f"{model.stored_dtype} weights{but}, {bytes_in_words(model.stored_bytes)} to train"
    if not model.groups:
        return held
    largest = max(model.groups, key=lambda group: group.gathered_bytes)
    share = bytes_in_words(model.stored_bytes / model.shards)
    return (
        f"{held} over {model.shards} ranks ({share} a rank) in {len(model.groups)} groups; the largest, "
        f"{largest.name}, takes {bytes_in_words(largest.gathered_bytes)} while it is gathered"
    )


def _mixed_dtypes(model: PreparedModel) -> Finding | None:
    mixed = [group for group in model.groups if len(group.trained_dtypes) > 1]
    if not mixed:
        return None
    return _problem(
        "mixed_dtypes",
        f"{len(mixed)} of {len(model.groups)} FSDP2 groups have trained parameters of several dtypes: torch refuses "
        "them in the first forward pass",
        *(f"{group.name}: {' and '.join(group.trained_dtypes)}, such as {group.odd_one}" for group in mixed[:4]),
        advice=f"load all of it in one dtype (model = model.to(torch.{model.loaded_dtype})), or freeze the others "
        "(requires_grad_(False))",
    )


def _untied(model: PreparedModel) -> Finding | None:
    if not model.tied_wanted or model.tied:
        return None
    return _problem(
        "untied_weights",
        "the model's config ties the output head to the input embedding, and they are two tensors: each would be "
        "trained alone, and one of them be lost when the model is saved",
        "tie_word_embeddings=True, and get_input_embeddings().weight is not get_output_embeddings().weight",
        advice="model.tie_weights() before the trainer is made; a model that is not to be tied needs "
        "model.config.tie_word_embeddings = False",
    )


def _checkpointed_twice(model: PreparedModel) -> Finding | None:
    if not model.layers_checkpointed_twice:
        return None
    return _problem(
        "checkpointed_twice",
        f"{model.layers_checkpointed_twice} layers have two activation checkpointings, the Trainer's and "
        f"{'FSDP' if model.sharding_asked else 'a wrapper'}'s: the second saves nothing, and makes it three forward "
        "passes a step instead of two if the first is reentrant",
        advice=("fsdp_config: activation_checkpointing: false" if model.sharding_asked else "wrap no layer by hand")
        + " (the Trainer's own can skip layers and offload)",
    )


def _not_sharded(model: PreparedModel) -> Finding | None:
    if not model.sharding_asked or model.groups or model.ranks == 1:
        return None
    return _warning(
        "not_sharded",
        f"FSDP was asked for and nothing is sharded: each of {model.ranks} ranks holds all of it",
        "accelerate 1.15 leaves FSDP out on a CPU without a word (state.py:986)",
        advice="train on GPUs, or set fsdp: false",
    )


def _upcast(model: PreparedModel) -> Finding | None:
    more = model.stored_bytes - model.loaded_bytes
    if more <= 0:
        return None
    # Weights, gradients and AdamW's two moments all have the held dtype.
    return _finding(
        _severity(4 * more / model.shards),
        "upcast",
        f"the weights were loaded in {model.loaded_dtype} and are held in {model.stored_dtype}: weights, gradients and "
        f"AdamW's moments take {bytes_in_words(4 * more)} more, {bytes_in_words(4 * more / model.shards)} a rank",
        "accelerate 1.15 does so wherever FSDP2 meets mixed precision, and says it at level info only "
        "(utils/fsdp_utils.py:815)",
        advice=f"bf16=False, and no mixed_precision in the launcher's config, trains in {model.loaded_dtype} as "
        "loaded; leave it if small updates are to add up in fp32",
    )


def _decay(model: PreparedModel) -> Finding | None:
    decay = model.decay
    if decay is None or decay.computed not in _DECAY_ERROR:
        return None
    cast = "" if decay.stored == decay.computed else f" (held in {decay.stored}, and rounded at every use)"
    return _finding(
        # Of values that were bf16 when they came nothing is lost.
        Severity.WARNING if model.loaded_dtype == "float32" else Severity.NOTE,
        "rounded_decay",
        f"A_log and dt_bias of {decay.layers} recurrent layers are used in {decay.computed}{cast}",
        f"a {decay.computed} A_log changes a layer's decay by up to {_DECAY_ERROR[decay.computed]} (A from 0.02 to "
        "16); long documents add it up",
        advice=f"nothing to mend where the checkpoint holds them in {decay.computed}; FSDP2 cannot hold one parameter "
        "of a group in another dtype (torch 2.13), so keeping them means fp32 for all: dtype=float32, bf16=False",
    )


def _kept_gradients(model: PreparedModel) -> Finding | None:
    if model.accumulation_steps == 1 or model.reduces_each or not model.groups:
        return None
    kept = sum(group.gradient_bytes for group in model.groups)
    return _finding(
        _severity(kept - kept / model.shards),
        "kept_gradients",
        f"gradients of the whole model stay on every rank while {model.accumulation_steps} micro-batches accumulate: "
        f"{bytes_in_words(kept)} a rank instead of {bytes_in_words(kept / model.shards)}",
        advice='accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}} reduces them after '
        "every micro-batch, for one reduce-scatter more each",
    )


def _large_groups(model: PreparedModel) -> Finding | None:
    large = [group for group in model.groups if group.layers > 1]
    if not large:
        return None
    worst = max(large, key=lambda group: group.gathered_bytes)
    return _warning(
        "several_layers_in_a_group",
        f"{worst.layers} layers are gathered together: {bytes_in_words(worst.gathered_bytes)} on every rank at once, "
        "and nothing to gather while another computes",
        f"the group: {worst.name}",
        advice="fsdp_config: transformer_layer_cls_to_wrap: the class of one layer",
    )


def _large_evaluation(model: PreparedModel) -> Finding | None:
    if model.train_slots is None or model.eval_slots is None or model.eval_slots <= model.train_slots:
        return None
    return _warning(
        "large_evaluation",
        f"an evaluation pass has {model.eval_slots:,} positions, a training pass {model.train_slots:,}: memory that "
        "training needs may not do for it",
        advice="per_device_eval_batch_size=1",
    )


def _low_precision(model: PreparedModel) -> Finding | None:
    if model.stored_dtype != "bfloat16":
        return None
    return Finding(
        rule="bfloat16_weights",
        severity=Severity.NOTE,
        message="weights are held in bfloat16: an update of less than 1/512 of a weight rounds away",
        evidence=(),
        advice="TRL holds adapters of a quantized model so; beside weights of 16 bits (no load_in_4bit) they are fp32"
        if model.quantized
        else "bf16=True holds them in fp32, for twice the memory"
        if model.groups
        else "dtype: float32 holds them in fp32, for twice the memory; bf16=True then computes in bf16 as before",
    )


def _severity(bytes_a_rank: float) -> Severity:
    return Severity.WARNING if bytes_a_rank >= _WORTH_A_WARNING_BYTES else Severity.NOTE


def _problem(rule: str, message: str, *evidence: str, advice: str) -> Finding:
    return _finding(Severity.PROBLEM, rule, message, *evidence, advice=advice)


def _warning(rule: str, message: str, *evidence: str, advice: str) -> Finding:
    return _finding(Severity.WARNING, rule, message, *evidence, advice=advice)


def _finding(severity: Severity, rule: str, message: str, *evidence: str, advice: str) -> Finding:
    return Finding(rule=rule, severity=severity, message=message, evidence=evidence, advice=advice)
