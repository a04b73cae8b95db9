"""Where a job's weights come from: a checkpoint read by one process for all of them, or a draw on the device.

`fsdp_config.cpu_ram_efficient_loading` promises that one process reads the checkpoint and sends the weights to the
others. accelerate 1.15 does send them (utils/fsdp_utils.py:570), but transformers 5.23 opens the checkpoint on every
rank all the same. As a memory map, where it holds the dtype asked for, that costs nothing (measured: 0 MB of private
memory on each of two ranks); to another dtype every rank converts and keeps a copy (300 MB on each for 75 M parameters
as fp32; a 27B model on eight GPUs would take 860 GB). Here the other ranks get an empty shell, and only one reads.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_speedkit.core.errors import ConfigurationError, SpeedkitError
from hf_speedkit.trainer.ranks.agreement import agree, runs_alone
from hf_speedkit.trainer.whole_weights import MODEL_SOURCE, reading_weights, refuse_missing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
    from trl import ModelConfig

logger = logging.getLogger(__name__)

_SHARE_BEFORE_SHARDING = 0.6
"""Drawn weights stay on the device up to this share of its free memory where a shard of them is made beside them."""


def load_model(
    model_args: ModelConfig, args: TrainingArguments, *, random_weights: bool = False, receives: bool | None = None
) -> PreTrainedModel:
    """Make the model of a job, with its weights in the memory of one process only where FSDP2 sends them on.

    Every process must call it. The model is built from its config alone with `random_weights`, so that a benchmark of
    any size starts in seconds and downloads nothing but a config; the same seed gives the same weights on any number
    of processes of one kind of device.

    Args:
        model_args: TRL's ModelConfig. Read here: `model_name_or_path` (hub id, folder, or with `random_weights` the
            path of a config.json), `model_revision`, `dtype`, `attn_implementation`, `load_in_4bit`, `load_in_8bit`.
        args: the job's settings; their process group is started here if it is not yet.
        random_weights: draw the weights as the model's own initialisation does, instead of reading a checkpoint.
        receives: whether this process gets its weights from rank 0; None finds out from `args`.

    Returns:
        On the CPU where it was read, on the device where it was drawn (on the CPU if it does not fit, or if FSDP2 will
        shard it and it takes more than 0.6 of the device's free memory).

    Raises:
        ConfigurationError: random weights to be quantized, a model that says nowhere how a weight is drawn, or a
            checkpoint whose files are damaged or lack some of the model's weights.
        SpeedkitError: any rank failed; all ranks raise.
    """
    if random_weights and (model_args.load_in_4bit or model_args.load_in_8bit):
        raise ConfigurationError(
            "random weights cannot be quantized: quantization happens while a checkpoint is read",
            mend="leave load_in_4bit and load_in_8bit out, or name a checkpoint and set random_weights: false",
        )
    if receives is None:
        receives = receives_weights(args, quantized=model_args.load_in_4bit or model_args.load_in_8bit)
    model = agree(lambda: _model(model_args, args, random_weights, receives))
    _refuse_other_layouts(model)
    return model


def load_tokenizer(model_args: ModelConfig) -> Any:
    """Load the tokenizer that belongs to a model: of the same hub id or folder, or beside the config.json named.

    Raises:
        ConfigurationError: there is none, with what transformers says about it; or one without a vocabulary, which
            transformers 5.23 makes of a config alone, and which turns every text into nothing.
    """
    from transformers import AutoTokenizer

    path = Path(str(model_args.model_name_or_path))
    source = str(path.parent) if path.is_file() else model_args.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=model_args.model_revision)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no tokenizer can be loaded from {source!r}",
            evidence=tuple(line for line in str(error).splitlines() if line.strip()),
            mend=MODEL_SOURCE,
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigurationError(
            f"the tokenizer in {source!r} has no vocabulary",
            evidence=(f"{len(tokenizer)} tokens: its files (tokenizer.json ...) are not there",),
            mend="copy tokenizer.json, tokenizer_config.json and special_tokens_map.json of the model beside its config"
            if Path(str(source)).is_dir()
            else MODEL_SOURCE,
        )
    return tokenizer


def receives_weights(args: TrainingArguments, *, quantized: bool = False) -> bool:
    """Whether rank 0 will send this process its weights: FSDP2 with cpu_ram_efficient_loading, on another rank.

    accelerate ignores FSDP on a CPU (state.py:986), and does not send quantized weights (fsdp_utils.py:829).
    """
    return _are_sent(args, quantized=quantized) and args.process_index != 0


def _are_sent(args: TrainingArguments, *, quantized: bool = False) -> bool:
    device = args.device  # starts the process group, without which world_size is 1
    if args.world_size == 1 or device.type == "cpu" or quantized:
        return False
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import parse_flag_from_env

    if args.fsdp_plugin_args is not None:
        plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    elif parse_flag_from_env("ACCELERATE_USE_FSDP"):
        plugin = FullyShardedDataParallelPlugin()  # from the environment of `accelerate launch`, as accelerate does it
    else:
        return False
    return plugin.fsdp_version == 2 and bool(plugin.cpu_ram_efficient_loading)


def random_model(
    config: PreTrainedConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    attn_implementation: str | None = None,
    largest_share: float = 1.0,
) -> PreTrainedModel:
    """Build a model with weights drawn by its own initialisation, module by module on the device.

    Args:
        config: of any causal language model that transformers knows.
        device: where the weights are drawn, and stay if they fit.
        dtype: of the weights.
        seed: with one kind of device it decides every weight.
        attn_implementation: as for `from_config`.
        largest_share: weights that take more than this share of the device's free memory are moved to the CPU as they
            are drawn, module by module.

    Raises:
        ConfigurationError: the model's initialisation leaves a weight out.
    """
    model = _meta_model(config, dtype, attn_implementation)
    device = torch.device(device)
    home = device if _fits(model, device, largest_share) else torch.device("cpu")
    if home != device:
        logger.warning("random weights fill more than %.0f %% of %s: kept on the CPU", 100 * largest_share, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for name, module, owner in _modules(model):
            _draw(name, module, owner, device)
            if home != device:
                _apply(module, lambda tensor: tensor.to(home))
    model.tie_weights()
    return model


def empty_model(
    config: PreTrainedConfig, *, dtype: torch.dtype, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Build a model that waits for its weights: parameters on the CPU that take no memory until they are written.

    On the meta device all parameters would have the address 0, by which accelerate 1.15 finds the optimizer's
    parameters again after sharding (accelerator.py:1674): the optimizer would hold the last one many times. What is
    not sent, the non-persistent buffers, is right; vectors are NaN, so that weights that never came cannot be missed.
    """
    model = _meta_model(config, dtype, attn_implementation)
    for name, module, owner in _modules(model):
        if module._non_persistent_buffers_set:
            _draw(name, module, owner, torch.device("cpu"))
            continue
        _apply(module, lambda tensor: torch.empty_like(tensor, device="cpu"))
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and tensor.dim() < 2 and tensor.is_floating_point():
                torch.nn.init.constant_(tensor, float("nan"))
    model.tie_weights()
    return model


def _model(model_args: ModelConfig, args: TrainingArguments, random_weights: bool, receives: bool) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import get_quantization_config

    name, revision, attention = (
        model_args.model_name_or_path,
        model_args.model_revision,
        model_args.attn_implementation,
    )
    if not (random_weights or receives):
        quantization = get_quantization_config(model_args)
        placed = {} if quantization is None else {"quantization_config": quantization, "device_map": {"": args.device}}
        with reading_weights(str(name)):
            model, found = AutoModelForCausalLM.from_pretrained(
                name,
                revision=revision,
                dtype=model_args.dtype,
                attn_implementation=attention,
                output_loading_info=True,
                **placed,
            )
        refuse_missing(str(name), model, found)
        loaded: PreTrainedModel = model
        return loaded
    config = AutoConfig.from_pretrained(name, revision=revision)
    dtype = _dtype(model_args.dtype, config)
    if receives:
        return empty_model(config, dtype=dtype, attn_implementation=attention)
    return random_model(
        config,
        device=args.device,
        dtype=dtype,
        seed=args.seed,
        attn_implementation=attention,
        largest_share=_SHARE_BEFORE_SHARDING if _are_sent(args) else 1.0,
    )


def _dtype(name: str | None, config: PreTrainedConfig) -> torch.dtype:
    if name in (None, "auto"):
        written = config.get_text_config().dtype or config.dtype
        return written if isinstance(written, torch.dtype) else torch.float32
    dtype: torch.dtype = getattr(torch, str(name))
    return dtype


def _meta_model(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str | None) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen)
    return model


def _modules(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module, PreTrainedModel]]:
    """Every module once, children first, with the model inside the model whose initialisation is in charge of it."""
    from transformers import PreTrainedModel

    seen: set[int] = set()

    def visit(name: str, module: torch.nn.Module, owner: PreTrainedModel) -> Iterator[tuple[str, Any, Any]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}".lstrip("."), child, owner)
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module, owner

    return visit("", model, model)


def _apply(module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module._apply(change, recurse=False)  # the module's own tensors; what `to` and `to_empty` are made of


@torch.no_grad()
def _draw(name: str, module: torch.nn.Module, owner: PreTrainedModel, device: torch.device) -> None:
    """Give a module of the meta device real weights: NaN first, so that one that nothing sets is found."""

    def blank(tensor: torch.Tensor) -> torch.Tensor:
        real = torch.empty_like(tensor, device=device)
        return real.fill_(float("nan")) if real.is_floating_point() else real.zero_()

    _apply(module, blank)
    owner._init_weights(module)
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        # One read of the weights and one wait a tensor, before training: 54 GB take an H200 a tenth of a second.
        if tensor is not None and tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ConfigurationError(
                f"{type(owner).__name__} does not say how {name}.{key} is initialised, so it cannot be drawn",
                mend="load a checkpoint instead: random_weights: false",
            )


def _fits(model: torch.nn.Module, device: torch.device, share: float) -> bool:
    if device.type != "cuda":
        return True
    needed = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    return needed <= share * torch.cuda.mem_get_info(device)[0]


def _refuse_other_layouts(model: torch.nn.Module) -> None:
    """Stop if the ranks' models differ in a name, shape or dtype: sending weights would mix them up or hang."""
    import torch.distributed as dist

    if runs_alone():
        return
    described = {key: (str(value.dtype), *value.shape) for key, value in model.state_dict().items()}
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        raise SpeedkitError(
            "the ranks made models of different names, shapes or dtypes",
            evidence=tuple(f"rank {rank}: {digest[:12]}" for rank, digest in enumerate(digests)),
            mend="give every node the same model files and the same transformers, "
            "or let each rank read its own: fsdp_config: {cpu_ram_efficient_loading: false}",
        )
