"""What a launcher leaves unsaid: settings that accelerate reads from the environment before a Trainer exists.

`accelerate launch` with a config file of its own sets them; torchrun, Slurm, Kubernetes and a plain `accelerate launch`
do not, and the job's settings reach accelerate only when the Trainer is made. By then the process group stands.
Light: neither torch nor transformers is imported here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.kernels.requirements import FAMILIES, family_of, training_requirements
from hf_speedkit.trainer.hardware import is_on, launched_here, launched_processes, word_of

logger = logging.getLogger(__name__)

_REPLICAS, _SHARDS = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"


def announce_sharding(settings: Mapping[str, object], environment: MutableMapping[str, str] | None = None) -> None:
    """Say in the environment that the job is sharded, and how; call it before TrainingArguments are made.

    accelerate 1.15 reads ACCELERATE_USE_FSDP when the process group starts: with FULL_STATE_DICT or CPU offload it
    starts a gloo group beside NCCL, for tensors in host memory (state.py:228). What the launcher has set is kept.

    Args:
        settings: the job's settings by their names in the YAML file. Read here: `fsdp`, `fsdp_config`, `use_cpu` and
            `hybrid_sharding` (a copy of the model on every host, sharded over its GPUs: weights then travel over
            NVLink, and only gradients between hosts).
        environment: os.environ unless given.

    Raises:
        ConfigurationError: hybrid sharding without FSDP2, over hosts of different size, or of one process each.
    """
    environment = os.environ if environment is None else environment
    world, local = launched_processes(environment), launched_here(environment)
    sharded = is_on(settings.get("fsdp")) or is_on(environment.get("ACCELERATE_USE_FSDP"))
    hybrid = is_on(settings.get("hybrid_sharding"))
    if hybrid and not sharded:
        raise ConfigurationError("hybrid_sharding without fsdp: there is nothing to shard", mend="set fsdp: true")
    if world == 1 or not sharded or is_on(settings.get("use_cpu")):
        return
    given = settings.get("fsdp_config")
    config = {str(k).removeprefix("fsdp_"): v for k, v in given.items()} if isinstance(given, Mapping) else {}
    environment.setdefault("ACCELERATE_USE_FSDP", "true")
    environment.setdefault("FSDP_VERSION", str(config.get("version", 2)))
    environment.setdefault("FSDP_STATE_DICT_TYPE", str(config.get("state_dict_type", "FULL_STATE_DICT")))
    if is_on(config.get("cpu_offload")):
        environment.setdefault("FSDP_OFFLOAD_PARAMS", "true")
    if hybrid and _REPLICAS not in environment:
        if local == 1:
            raise ConfigurationError(
                "hybrid_sharding with one process on this host: every GPU would hold the whole model",
                evidence=(f"LOCAL_WORLD_SIZE is {environment.get('LOCAL_WORLD_SIZE', 'not set')}, WORLD_SIZE {world}",),
                mend="start the processes of a host by torchrun or accelerate launch, which say how many they are",
                regardless="hybrid_sharding: false shards over all GPUs",
            )
        if world % local:
            raise ConfigurationError(
                f"hybrid_sharding over {world} processes with {local} on this host: the hosts differ in size",
                mend="start the same number of processes on every host, or set hybrid_sharding: false",
            )
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        environment[_REPLICAS], environment[_SHARDS] = str(world // local), str(local)


def announce_ranks(environment: Mapping[str, str] | None = None) -> None:
    """Say for whom this process is about to wait where no launcher of torch's started it.

    WORLD_SIZE and RANK that an earlier shell left behind make a single process wait for others that nobody starts, for
    as long as ddp_timeout says.

    Args:
        environment: os.environ unless given.

    Raises:
        ConfigurationError: there are other ranks, and nothing says where they meet.
    """
    environment = os.environ if environment is None else environment
    world = launched_processes(environment)
    if world == 1 or "TORCHELASTIC_RUN_ID" in environment:
        return
    said = f"WORLD_SIZE={world} and RANK={environment.get('RANK', 'not set')} in the environment"
    alone = "if this is one process: unset WORLD_SIZE RANK LOCAL_RANK"
    if "MASTER_ADDR" not in environment or "RANK" not in environment:
        raise ConfigurationError(
            f"{said} speak of {world} processes, and MASTER_ADDR, MASTER_PORT and RANK do not say where they meet",
            mend=f"{alone}; several: accelerate launch --num_processes {world} ...",
        )
    place = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '29500')}"
    logger.warning("waiting for %d processes at %s, as %s say; %s", world, place, said, alone)


def refuse_lost_fp8(asked: str | None, got: str) -> None:
    """Refuse a launch in fp8 that the settings have turned into something else.

    transformers 5.23 takes bf16 and fp16 before the launcher's choice (training_args.py:1614), and TRL turns bf16 on by
    itself, without a word.

    Args:
        asked: ACCELERATE_MIXED_PRECISION before the settings were made.
        got: `mixed_precision` of the settings.

    Raises:
        ConfigurationError: names the setting that took its place.
    """
    if asked == "fp8" and got != "fp8":
        raise ConfigurationError(
            f"the launcher asked for fp8, and the job would train in {got}",
            evidence=(f"{got}=True in the settings (TRL's default for bf16) takes its place without a word",),
            mend="bf16=False keeps fp8",
            regardless=f"accelerate launch --mixed_precision {got} is what would run",
        )


def take_launchers_precision(args: Any) -> None:
    """Say mixed precision that the launcher alone asks for in the settings as well, where plans and metrics look.

    transformers 5.23 hands it to accelerate all the same (training_args.py:1614), whose own config files ask for bf16:
    under FSDP2 it then holds fp32 weights, gradients and moments, twice the memory.

    Args:
        args: TrainingArguments, made; `bf16` or `fp16` of it is set.
    """
    asked = args.mixed_precision
    if asked not in ("bf16", "fp16") or getattr(args, asked):
        return
    setattr(args, asked, True)
    logger.warning(
        "the launcher asks for %s mixed precision, so it is on although the settings say %s=False; to turn it off: "
        'accelerate launch --mixed_precision no, or mixed_precision: "no" in its config file', asked, asked,
    )  # fmt: skip


def take_launchers_compilation(args: Any, environment: Mapping[str, str] | None = None) -> None:
    """Say torch.compile that the launcher alone asks for in the settings as well, where hooks and proofs look.

    transformers 5.23 leaves its own plugin's backend to accelerate (trainer.py:795), which takes the launcher's: the
    model is compiled while the settings say torch_compile=False.

    Args:
        args: TrainingArguments, made; `torch_compile` and its backend of it are set.
        environment: os.environ unless given.
    """
    environment = os.environ if environment is None else environment
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend == "no" or args.torch_compile:
        return
    args.torch_compile, args.torch_compile_backend = True, backend
    if args.local_process_index == 0:
        logger.warning(
            "the launcher asks for torch.compile (ACCELERATE_DYNAMO_BACKEND=%s), so it is on although the settings say "
            "torch_compile=False; nothing compiled is measured here. To turn it off: accelerate launch "
            "--dynamo_backend no, or unset ACCELERATE_DYNAMO_BACKEND", backend,
        )  # fmt: skip


def refuse_optimizer(optim: object, fsdp_version: object, environment: Mapping[str, str] | None = None) -> None:
    """Refuse an optimizer that cannot update what FSDP2 shards, before a model is loaded for it.

    Tried over two processes and on single DTensors (torch 2.13, bitsandbytes 0.50.2): the kernels of bitsandbytes and
    transformers' Adafactor fail in their first step ("got mixed torch.Tensor and DTensor"); Adagrad trains and fails at
    the first checkpoint, since its state belongs to the weights as they were before they were sharded.

    Args:
        optim: the Trainer's name of it.
        fsdp_version: of the job's own settings, 0 on a CPU; None where only the launcher can ask for FSDP.
        environment: os.environ unless given.

    Raises:
        ConfigurationError: with one that can.
    """
    environment = os.environ if environment is None else environment
    if fsdp_version is None and is_on(environment.get("ACCELERATE_USE_FSDP")):
        fsdp_version = environment.get("FSDP_VERSION", "1")
    name = word_of(optim)
    of_bitsandbytes = name.startswith(("paged_", "ademamix", "lion_")) or "bnb" in name or name == "adamw_8bit"
    if str(fsdp_version) != "2" or not (of_bitsandbytes or name in ("adafactor", "adagrad")):
        return
    raise ConfigurationError(
        f"optim={name} cannot update weights that FSDP2 shards",
        evidence=(
            "its first checkpoint would fail"
            if name == "adagrad"
            else "its first step would fail: it takes no DTensor" + (" (bitsandbytes)" if of_bitsandbytes else ""),
        ),
        mend="optim: adamw_torch_fused; what does not fit then needs more GPUs or adapters (use_peft: true)",
    )


def warn_of_first_fsdp(fsdp_version: object, environment: Mapping[str, str] | None = None) -> None:
    """Say that FSDP's first version runs, which accelerate takes where its config file names none.

    Args:
        fsdp_version: see `refuse_optimizer`.
        environment: os.environ unless given.
    """
    environment = os.environ if environment is None else environment
    if fsdp_version is None and is_on(environment.get("ACCELERATE_USE_FSDP")):
        fsdp_version = environment.get("FSDP_VERSION", "1")
    if str(fsdp_version) == "1":
        logger.warning(
            "FSDP version 1 was asked for (accelerate's own where fsdp_version is left out): what is checked, "
            "corrected and measured here is version 2; set fsdp_config: version: 2, or fsdp_version: 2 in accelerate's "
            "config file"
        )


def sharded_states(args: Any, environment: Mapping[str, str] | None = None) -> str:
    """FSDP's `state_dict_type`, as settings or launcher ask for it; empty where the job shards nothing.

    Args:
        args: TrainingArguments, made.
        environment: os.environ unless given.
    """
    environment = os.environ if environment is None else environment
    asked = args.fsdp_plugin_args
    if launched_processes(environment) == 1 or not (asked or is_on(environment.get("ACCELERATE_USE_FSDP"))):
        return ""
    # accelerate 1.15, dataclasses.py:2047; transformers 5.23 says FULL_STATE_DICT where fsdp_config says nothing.
    default = "SHARDED_STATE_DICT" if environment.get("FSDP_VERSION") == "2" else "FULL_STATE_DICT"
    return str((asked or {}).get("state_dict_type") or environment.get("FSDP_STATE_DICT_TYPE", default)).upper()


def refuse_split_rows(parallel: object, environment: Mapping[str, str] | None = None) -> None:
    """Refuse parallelism that hands parts of one row to several ranks.

    Recurrent layers would start anew, or carry a state over from another document, where a row is cut (case V05).

    Args:
        parallel: accelerate's ParallelismConfig; None where only the launcher can ask for it.
        environment: os.environ unless given.

    Raises:
        ConfigurationError: names the sizes that are above 1.
    """
    on = _split_over(("cp_size", "sp_size", "tp_size"), parallel, environment)
    if on:
        raise ConfigurationError(
            "packed rows cannot be split over ranks: document boundaries would be lost",
            evidence=(f"the parallelism_config has {', '.join(on)}",),
            mend="set cp_size, sp_size and tp_size to 1, or packing=False",
        )


def refuse_split_recurrence(config: Any, parallel: object, environment: Mapping[str, str] | None = None) -> None:
    """Refuse to cut rows of a model with recurrent layers or convolutions, packed or not: each part would start anew.

    transformers 5.23 hands no state from one rank to the next; attention alone is computed over all parts.

    Args:
        config: the model's.
        parallel, environment: as for `refuse_split_rows`.

    Raises:
        ConfigurationError: names the sizes that are above 1, and the layers.
    """
    family = family_of(config.get_text_config())
    needs = training_requirements(family) if family is not None else ()
    on = _split_over(("cp_size", "sp_size"), parallel, environment) if needs else []
    if family is not None and on:
        raise ConfigurationError(
            f"{FAMILIES[family].layer} layers cannot be computed on parts of a row: each rank would start anew",
            evidence=(f"the parallelism_config has {', '.join(on)}",),
            mend="set cp_size and sp_size to 1; fsdp, gradient checkpointing and shorter rows save memory as well",
        )


def _split_over(names: Sequence[str], parallel: object, environment: Mapping[str, str] | None) -> list[str]:
    """The sizes above 1, as they are written."""
    environment = os.environ if environment is None else environment
    launched = is_on(environment.get("ACCELERATE_USE_PARALLELISM_CONFIG"))
    on = []
    for name in names:
        asked = environment.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") if launched else "1"
        size = int(getattr(parallel, name, None) or 1) if parallel is not None else int(asked)
        if size > 1:
            on.append(f"{name}={size}")
    return on


def refuse_split_model(model: object, loading: Mapping[str, object] | None) -> None:
    """Refuse a model that transformers spreads over ranks by tensor parallelism: those ranks need the same row.

    Args:
        model: a model, or the name of one.
        loading: `model_init_kwargs`, with which a name is loaded.

    Raises:
        ConfigurationError: names what spreads it.
    """
    asked = [name for name in ("tp_plan", "tp_size", "distributed_config") if (loading or {}).get(name)]
    size = int(getattr(model, "_tp_size", None) or 1)  # transformers 5.23, distributed/mixin.py:318
    if size > 1 or (asked and isinstance(model, str)):
        raise ConfigurationError(
            "packed rows need every rank to itself, and the model is spread over ranks by tensor parallelism: each of "
            "them would work on another row",
            evidence=(f"the model was loaded for {size} ranks" if size > 1 else f"model_init_kwargs: {asked[0]}",),
            mend="load it without tp_plan and shard it by FSDP2 (accelerate_configs/fsdp2.yaml), or set packing=False",
        )
