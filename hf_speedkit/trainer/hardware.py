"""Whether this machine can run the job, found out before anything heavy is imported or downloaded.

Light on purpose: neither torch nor transformers is imported here, so that the answer comes in a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from hf_speedkit.core.errors import ConfigurationError, HardwareError
from hf_speedkit.core.memory import GIB, TrainingState, devices_needed, training_state_bytes
from hf_speedkit.trainer.ranks.last_words import exit_with

__all__ = [
    "MOMENT_BYTES",
    "exit_with",
    "find_missing_hardware",
    "is_on",
    "launched_here",
    "launched_processes",
    "require_hardware",
]

# transformers 5.23 looks these names up in torch, so "bf16" would end in an AttributeError.
_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "auto": 2.0}
# Bytes of one AdamW moment by the Trainer's `optim`; None: as precise as the weight. Of any other optimizer (GaLore,
# LOMO, paged ones) only the weights are counted: the figure stays a lower bound and refuses no job that would run.
MOMENT_BYTES: dict[str, float | None] = {
    "adamw_torch": None,
    "adamw_torch_fused": None,
    "adamw_apex_fused": None,
    "adamw_8bit": 1.0,
    "adamw_bnb_8bit": 1.0,
    "adamw_torch_8bit": 1.0,
    "adamw_torch_4bit": 0.5,
}
# torchrun's and accelerate's, then those of MPIs in accelerate's order (1.15, utils/environment.py:277).
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
_EXAMPLE_GPU_GIB = 80
"""Size of the GPU a need is expressed in where there is none to look at: an H100 or A100 of 80 GB."""


class Gpu(Protocol):
    """What must be known of a visible GPU."""

    @property
    def name(self) -> str:
        """Product name."""

    @property
    def memory_gib(self) -> float:
        """Total memory in GiB."""


def require_hardware(settings: Mapping[str, object], *, command: str, world_size: int | None = None) -> None:
    """Refuse a job that this machine cannot run, in a fraction of a second.

    Args:
        settings: the job's settings by their names in the YAML file. Read here: `use_cpu`, `fsdp`, `fsdp_config`,
            `hybrid_sharding`, `deepspeed`, `expected_parameters` (a number; without it memory is not checked), `dtype`
            (or `torch_dtype`, also inside `model_init_kwargs`; fp32 without one), `bf16`, `fp16`, `optim`, `use_peft`,
            `load_in_4bit`, `load_in_8bit`.
        command: the small job that runs anywhere, shown as the last line of the message.
        world_size: processes of the job over all hosts; None reads WORLD_SIZE, which the launcher sets.

    Raises:
        HardwareError: no NVIDIA GPU, too little memory for weights, gradients and optimizer state, FSDP with a single
            process, or more processes than GPUs on this host.
        ConfigurationError: `expected_parameters` or a dtype that cannot be read.
    """
    from hf_speedkit.measure.environment import visible_gpus

    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") in ("bf16", "fp16"):
        settings = {**settings, "bf16": True}  # see launching.take_launchers_precision
    missing = find_missing_hardware(
        settings,
        gpus=visible_gpus(),
        world_size=launched_processes() if world_size is None else world_size,
        local_world_size=launched_here(),
        command=command,
    )
    if missing is not None:
        raise missing


def find_missing_hardware(
    settings: Mapping[str, object],
    *,
    gpus: Sequence[Gpu],
    world_size: int,
    local_world_size: int,
    command: str,
) -> HardwareError | None:
    """Say what a machine lacks for a job, None where nothing is known to be missing.

    Args:
        settings: see `require_hardware`.
        gpus: the visible GPUs of this host.
        world_size: processes over all hosts.
        local_world_size: processes on this host.
        command: the small job that runs anywhere.

    Raises:
        ConfigurationError: `expected_parameters` or a dtype that cannot be read.
    """
    state = _training_state(settings)
    if not is_on(settings.get("use_cpu")):
        if not gpus:
            return _no_gpu(state, command)
        if local_world_size > len(gpus):
            return _too_many_processes(gpus, local_world_size, command)
        # With hybrid sharding every host holds a copy: its own GPUs are all there is to hold it.
        holders = local_world_size if is_on(settings.get("hybrid_sharding")) else world_size
        too_small = _too_little_memory(settings, state, gpus, holders, command)
        if too_small is not None:
            return too_small
    if is_on(settings.get("fsdp")) and world_size == 1:
        return _nothing_to_shard_over(gpus, command)
    return None


def _no_gpu(state: TrainingState | None, command: str) -> HardwareError:
    evidence = ["found:   no NVIDIA GPU that its driver shows to this process (CUDA_VISIBLE_DEVICES counts)"]
    if state is not None:
        count = devices_needed(state, _EXAMPLE_GPU_GIB)
        evidence += [_need(state), f"enough:  {count} {_gpus(count)} of {_EXAMPLE_GPU_GIB} GiB, before activations"]
    return HardwareError(
        "This job needs an NVIDIA GPU, and there is none on this machine.",
        evidence=tuple(evidence),
        mend=_tiny("run the job on a machine that has one, or a tiny model on the CPU (use_cpu: true)", command),
    )


def _too_many_processes(gpus: Sequence[Gpu], processes: int, command: str) -> HardwareError:
    return HardwareError(
        f"{processes} processes were started on a machine with {len(gpus)} {_gpus(len(gpus))}: each needs its own.",
        evidence=(f"found:   {_describe(gpus)}", f"needed:  {processes} GPUs for LOCAL_WORLD_SIZE={processes}"),
        mend=_tiny(f"accelerate launch --num_processes {len(gpus)} ...", command),
    )


def _too_little_memory(
    settings: Mapping[str, object], state: TrainingState | None, gpus: Sequence[Gpu], world_size: int, command: str
) -> HardwareError | None:
    # Offloading and DeepSpeed can keep the state in host memory: nothing certain can be said from here.
    if state is None or is_on(settings.get("deepspeed")) or _offloads(settings):
        return None
    smallest_gib = min(gpu.memory_gib for gpu in gpus)
    sharded = is_on(settings.get("fsdp"))
    if sharded:
        # One process so far may only mean that the launcher has not been told how many: count every GPU.
        used = len(gpus) if world_size == 1 else world_size
        available_gib = sum(gpu.memory_gib for gpu in gpus) if used == len(gpus) else smallest_gib * used
        found = f"found:   {_describe(gpus)}, {used} used: {available_gib:,.0f} GiB"
    else:
        available_gib = smallest_gib
        found = f"found:   {_describe(gpus)}; without FSDP every GPU holds all of it: {available_gib:,.0f} GiB"
    if state.total <= available_gib * GIB:
        return None
    count = devices_needed(state, smallest_gib)
    how = "" if sharded else " with fsdp: true"
    if is_on(settings.get("hybrid_sharding")):
        how = " on every host, or shard over all hosts (hybrid_sharding: false)"
    advice = f"use {count} or more such GPUs{how}, or train adapters (use_peft)"
    return HardwareError(
        "The GPUs are too small for the weights, gradients and optimizer state of this model.",
        evidence=(
            found,
            _need(state),
            f"enough:  {count} {_gpus(count)} of {smallest_gib:,.0f} GiB, before activations",
        ),
        mend=_tiny(advice, command),
    )


def _nothing_to_shard_over(gpus: Sequence[Gpu], command: str) -> HardwareError:
    if len(gpus) > 1:
        advice = f"start one process a GPU: accelerate launch --num_processes {len(gpus)} ..."
    else:
        advice = "set fsdp: false, or start one process a GPU on a machine with several"
    return HardwareError(
        "fsdp is on, but there is only one process: FSDP shards a model over at least two.",
        evidence=(f"found:   world size 1, {_describe(gpus)}", "needed:  world size 2 or more (WORLD_SIZE)"),
        mend=_tiny(advice, command),
    )


def _tiny(advice: str, command: str) -> str:
    return f"{advice}, or try the tiny job, which runs on any machine:\n  {command}"


def _need(state: TrainingState) -> str:
    parts = f"weights {_gib(state.weights)} + gradients {_gib(state.gradients)} + optimizer {_gib(state.moments)}"
    return f"needed:  {_gib(state.total)} GiB of GPU memory ({parts}), before activations"


def _describe(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "no GPU"
    kinds = [f"{gpu.name} ({gpu.memory_gib:,.0f} GiB)" for gpu in gpus]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"


def _gpus(count: int) -> str:
    return "GPU" if count == 1 else "GPUs"


def _training_state(settings: Mapping[str, object]) -> TrainingState | None:
    """Lower bound of the job's training state from its settings, None without `expected_parameters`."""
    weight_bytes = _weight_bytes(settings)  # also where nothing is counted: a dtype that is none is refused
    given = settings.get("expected_parameters")
    if given is None:
        return None
    optimizer = str(settings.get("optim") or "adamw_torch_fused")
    weights_only = is_on(settings.get("use_peft")) or optimizer not in MOMENT_BYTES
    # accelerate upcasts what is trained to fp32 where FSDP meets mixed precision (accelerate 1.15 fsdp_utils.py:816).
    upcast = is_on(settings.get("fsdp")) and _mixed_precision(settings)
    try:
        return training_state_bytes(
            float(str(given)),  # YAML reads 26.9e9, without a sign in the exponent, as text
            weight_bytes=weight_bytes,
            trainable_parameters=0 if weights_only else None,
            trainable_bytes=4.0 if upcast else None,
            moment_bytes=MOMENT_BYTES.get(optimizer),
        )
    except ValueError as error:
        raise ConfigurationError(
            f"expected_parameters={given!r} is not a number of parameters", mend="expected_parameters: 26.9e9"
        ) from error


def _weight_bytes(settings: Mapping[str, object]) -> float:
    if is_on(settings.get("load_in_4bit")):
        return 0.5
    if is_on(settings.get("load_in_8bit")):
        return 1.0
    loading = settings.get("model_init_kwargs")
    places = (settings, loading if isinstance(loading, Mapping) else {})
    named = [place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key) is not None]
    # TRL loads fp32 unless told otherwise (trl 1.16 trainer/utils.py:1332).
    dtype = str(named[0]).removeprefix("torch.") if named else "float32"
    if dtype not in _BYTES:
        raise ConfigurationError(f"dtype={dtype!r} is not a precision", mend=f"dtype is one of: {', '.join(_BYTES)}")
    return _BYTES[dtype]


def _mixed_precision(settings: Mapping[str, object]) -> bool:
    """TRL turns bf16 on unless it, or fp16, is set (trl 1.16 base_config.py:107); either is mixed precision."""
    return settings.get("bf16") is None or is_on(settings.get("bf16")) or is_on(settings.get("fp16"))


def _offloads(settings: Mapping[str, object]) -> bool:
    config = settings.get("fsdp_config")
    keys = ("cpu_offload", "fsdp_cpu_offload")
    if isinstance(config, Mapping) and any(is_on(config.get(key)) for key in keys):
        return True
    return "offload" in str(settings.get("fsdp", ""))  # the older spelling, fsdp: "full_shard offload"


def is_on(value: object) -> bool:
    """Truth of a setting, which the command line may have left as text."""
    return value.lower() not in ("", "false", "no", "off", "0", "none") if isinstance(value, str) else bool(value)


def word_of(value: object) -> str:
    """A setting that takes one of several words, as its word: transformers makes enum members of some."""
    return str(getattr(value, "value", value))


def launched_processes(environment: Mapping[str, str] | None = None) -> int:
    """Processes of the job over all hosts, as the launcher says; 1 where none does.

    Raises:
        ConfigurationError: what it says is no count.
    """
    return _count(os.environ if environment is None else environment, ("WORLD_SIZE",))


def launched_here(environment: Mapping[str, str] | None = None) -> int:
    """Processes of the job on this host, as torchrun, accelerate or MPI says; 1 where none does (plain srun).

    Raises:
        ConfigurationError: what it says is no count.
    """
    return _count(os.environ if environment is None else environment, _LOCAL_SIZES)


def _count(environment: Mapping[str, str], names: Sequence[str]) -> int:
    name = next((name for name in names if name in environment), None)
    if name is None:
        return 1
    text = environment[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{name}={text!r} in the environment is not a count", mend=f"unset {name}")
    return int(text)
