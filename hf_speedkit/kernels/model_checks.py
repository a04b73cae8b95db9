"""Which attention and which experts implementation a live model runs, and what that costs with packed rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.memory_words import bytes_in_words
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.flash_packages import FLASH_PACKAGES, judge_flash
from hf_speedkit.kernels.hub import is_hub_name, judge_hub_kernel
from hf_speedkit.kernels.layout import effective_forward, names_used, plain_function
from hf_speedkit.kernels.verdicts import Judgement, check_of, nothing_known

if TYPE_CHECKING:
    from torch import nn

SDPA_WARNING_SLOTS = 4096
"""Rows longer than this make the mask worth a word: 16 MiB at 4,096 slots, four times as much for each doubling."""


def model_config(model: nn.Module) -> Any:
    """Config of the transformers model inside `model` (PEFT, DDP and FSDP wrappers are looked through), or None."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            return config
    return None


def attention_checks(model: nn.Module, tokens_per_batch: int | None) -> Iterator[KernelCheck]:
    """One check per attention class and implementation among the layers of the text model."""
    config = model_config(model)
    text_config: Any = config.get_text_config() if config is not None else None
    modules = _dispatching(model).values()
    attention = [(type(module).__name__, module.config) for module in modules if hasattr(module, "config")]
    # Towers for images and sound have configs of their own; their rows are not the packed ones.
    of_text = [(layer, own) for layer, own in attention if own is text_config]
    found = Counter((layer, str(own._attn_implementation)) for layer, own in of_text or attention)
    replaced = _replaced_attention(model, text_config)
    totals: Counter[str] = Counter(layer for (layer, _), names in replaced.items() for _ in names)
    for (layer, _), count in found.items():
        totals[layer] += count
    for (layer, implementation), count in sorted(found.items()):
        judgement = judge_attention(implementation, text_config, tokens_per_batch, live=True, sdpa=_takes_sdpa(model))
        yield check_of("attention", layer, count, totals[layer], judgement)
    for (layer, place), names in sorted(replaced.items()):
        yield check_of("attention", layer, len(names), totals[layer], judge_replaced(place), names)


def judge_replaced(place: str) -> Judgement:
    """A layer whose forward another one has taken the place of: nothing is claimed."""
    return Judgement(
        verdict=KernelVerdict.UNVERIFIED,
        evidence=f"the layer's forward was replaced by {place}",
        reason="what that forward calls is not known to this version",
    )


def _replaced_attention(model: nn.Module, text_config: Any) -> dict[tuple[str, str], list[str]]:
    """Attention layers of the text model whose forward is somebody else's, by class and by whose it is.

    Of an instance the class's own forward still tells that it is an attention layer; of a patched class only its name.
    """
    found: dict[tuple[str, str], list[str]] = {}
    known = _dispatching(model)
    for name, module in model.named_modules():
        forward = effective_forward(module)
        homes = {kind.__module__ for kind in type(module).__mro__}
        if forward is not None and (forward.__module__ in homes or forward.__module__.startswith("hf_speedkit.")):
            continue
        kind = next((kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")), type(module))
        own = plain_function(getattr(type(module), "forward", None))
        dispatches = own is not None and "ALL_ATTENTION_FUNCTIONS" in names_used(own, type(module))
        theirs = kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("Attention")
        of_text = text_config is None or getattr(module, "config", text_config) is text_config
        if of_text and (dispatches or theirs) and name not in known:
            place = f"{forward.__module__}.{forward.__qualname__}" if forward else "an unreadable forward"
            found.setdefault((kind.__name__, place), []).append(name)
    return found


def asked_attention_checks(model: nn.Module, asked: str | None, stack: Stack) -> Iterator[KernelCheck]:
    """A check where a Hub kernel was asked for and another attention was loaded in its place (V46).

    Args:
        model: the live model.
        asked: the implementation that was asked for; None where nobody knows.
        stack: this machine.
    """
    config = model_config(model)
    if asked is None or config is None or not is_hub_name(asked):
        return
    loaded = str(config.get_text_config()._attn_implementation)
    # Ours takes the place of sdpa for packed rows, by choice; a revision is no part of the repository.
    if _is_ours(loaded) or loaded.partition("@")[0] == asked.partition("@")[0]:
        return
    layers = len(_dispatching(model))
    yield check_of("attention", "attention layers", layers, layers, judge_hub_kernel(asked, stack, loaded=loaded))


def unread_layers(model: nn.Module, config: Any, read: Sequence[str]) -> Iterator[KernelCheck]:
    """A check for decoder layers with other people's code in them of which nothing was recognised.

    Without it, a hybrid whose attention layers are known would pass for the rest of its layers as well.

    Args:
        model: the live model.
        config: its config; None without one.
        read: names of the modules whose functions are known.
    """
    from torch.nn import ModuleList

    layers = getattr(config.get_text_config(), "num_hidden_layers", None) if config is not None else None
    known = [*read, *_dispatching(model)]
    stacks = [
        (name, each) for name, each in model.named_modules() if isinstance(each, ModuleList) and len(each) == layers
    ]
    if not known or not stacks:
        return
    name, stack = max(stacks, key=lambda found: sum(1 for _ in found[1].parameters()))
    foreign: dict[str, list[str]] = {}
    for index, layer in enumerate(stack):
        place = f"{name}.{index}"
        kind = next((type(each) for each in layer.modules() if _is_foreign(type(each))), None)
        if kind is not None and not any(f"{other}.".startswith(f"{place}.") for other in known):
            foreign.setdefault(f"{kind.__name__} of {kind.__module__.partition('.')[0]}", []).append(place)
    for what, names in foreign.items():
        yield check_of("layers", type(stack[0]).__name__, len(names), len(stack), nothing_known(what), names)


def _is_foreign(kind: type) -> bool:
    """Whether a class is neither torch's, transformers' nor of a library that wraps those."""
    homes = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "liger_kernel", "hf_speedkit", "fla")
    written = next((each for each in kind.__mro__ if not each.__module__.startswith("torch.")), kind)
    return written.__module__.partition(".")[0] not in homes and written is not object


def _dispatching(model: nn.Module) -> dict[str, Any]:
    """The modules that call transformers' attention dispatch, by name; each forward is read once."""
    reads: dict[object, bool] = {}
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        forward = effective_forward(module)
        key = (forward, type(module))
        if key not in reads:
            reads[key] = forward is not None and "ALL_ATTENTION_FUNCTIONS" in names_used(forward, type(module))
        if reads[key]:
            found[name] = module
    return found


def _takes_sdpa(model: nn.Module) -> bool:
    """Whether transformers' class inside a model (or any of them) lists sdpa among what it can run."""
    flags = [flag for module in model.modules() if isinstance(flag := getattr(module, "_supports_sdpa", None), bool)]
    return any(flags) or not flags


def judge_attention(
    implementation: str, config: Any, tokens_per_batch: int | None, *, live: bool, sdpa: bool = True
) -> Judgement:
    """What an attention implementation means for packed rows of `tokens_per_batch` slots (None: not packed).

    Args:
        implementation: its name in transformers' AttentionInterface.
        config: text config, for the number of heads.
        tokens_per_batch: slots of a packed row.
        live: a model was built with it, so that its package was importable; False for a config alone.
        sdpa: the model's class can run sdpa, so that eager attention can be mended by it.
    """
    taken = _taken_by(implementation) if live else None
    if taken is not None:
        return Judgement(
            verdict=KernelVerdict.UNVERIFIED,
            evidence=f"{implementation}, a name that {taken} was registered under",
            reason="it is not what transformers means by that name, so nothing is claimed about it",
        )
    if implementation == "eager":
        return Judgement(
            verdict=KernelVerdict.FALLBACK,
            evidence="eager attention",
            reason="it builds the scores of every head"
            + _score_bytes(config, tokens_per_batch)
            + ("" if sdpa else "; transformers has no sdpa for this class"),
            fix='attn_implementation="sdpa"' if sdpa else None,
        )
    if implementation == "sdpa":
        return _judge_sdpa(tokens_per_batch, live=live)
    if implementation in FLASH_PACKAGES:
        return judge_flash(implementation, live=live)
    if implementation == "flex_attention":
        return _judge_flex(live=live)
    if is_hub_name(implementation):
        return Judgement(verdict=KernelVerdict.FUSED, evidence=f"{implementation}, loaded from the Hub")
    if _is_ours(implementation):
        return Judgement(
            verdict=KernelVerdict.FUSED,
            evidence=f"{implementation}: torch variable-length attention (on a CPU sdpa, document by document)",
        )
    return Judgement(
        verdict=KernelVerdict.UNVERIFIED,
        evidence=f"attention implementation {implementation!r}",
        reason="it is not one this version knows, so nothing is claimed about packed rows",
        fix='attn_implementation="sdpa"',
    )


def _taken_by(implementation: str) -> str | None:
    """Whose function stands under one of transformers' own names; None where it is transformers' (or no such name)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registered = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if implementation not in ("sdpa", "flex_attention", *FLASH_PACKAGES) or registered is None:
        return None
    place = str(getattr(registered, "__module__", "an unknown place"))
    return (
        None
        if place.startswith("transformers.integrations.")
        else f"{place}.{getattr(registered, '__qualname__', registered)}"
    )


def _switched_to_math(tokens_per_batch: int | None) -> str | None:
    """Why torch's sdpa can only run its unfused kernel; None where a fused one is allowed.

    Flash takes no mask, and packed rows have one.
    """
    import torch

    cuda: Any = torch.backends.cuda
    if cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled():
        return None
    if cuda.flash_sdp_enabled() and tokens_per_batch is None:
        return None
    flash = ", and its flash kernel takes no mask" if cuda.flash_sdp_enabled() else ""
    return f"this process has switched torch's fused kernels off{flash}: only the one that builds all scores is left"


def _judge_sdpa(tokens_per_batch: int | None, *, live: bool) -> Judgement:
    evidence = "torch scaled_dot_product_attention"
    unfused = _switched_to_math(tokens_per_batch) if live else None
    if unfused is not None:
        return Judgement(
            verdict=KernelVerdict.FALLBACK,
            evidence=evidence,
            reason=unfused,
            fix="torch.backends.cuda.enable_mem_efficient_sdp(True)  # before training",
        )
    if tokens_per_batch is None:
        return Judgement(verdict=KernelVerdict.FUSED, evidence=evidence)
    mask = f"a boolean mask of {bytes_in_words(tokens_per_batch**2)} a row of {tokens_per_batch:,} slots"
    reason = None
    if tokens_per_batch > SDPA_WARNING_SLOTS:
        reason = (
            f"sdpa needs {mask} to keep packed documents apart, and attends over all of it; attention that takes the "
            f"boundaries instead needs no mask and computes the documents only"
        )
    return Judgement(verdict=KernelVerdict.FUSED, evidence=f"{evidence}, {mask}", reason=reason)


def _judge_flex(*, live: bool) -> Judgement:
    evidence = "torch flex_attention"
    if live:
        import torch._dynamo

        if torch._dynamo.config.disable:
            return Judgement(
                verdict=KernelVerdict.FALLBACK,
                evidence=evidence,
                reason="torch.compile is switched off (TORCH_COMPILE_DISABLE), and without it flex attention builds "
                "the scores of every head",
                fix="unset TORCH_COMPILE_DISABLE",
            )
    return Judgement(verdict=KernelVerdict.FUSED, evidence=evidence)


def _is_ours(implementation: str) -> bool:
    from transformers import AttentionInterface

    registered = AttentionInterface().get(implementation)
    return getattr(registered, "__module__", "").startswith("hf_speedkit.")


def _score_bytes(config: Any, tokens_per_batch: int | None) -> str:
    # A config whose layers differ raises for what they do not share.
    heads = None if getattr(config, "is_heterogeneous", False) else getattr(config, "num_attention_heads", None)
    if tokens_per_batch is None or not isinstance(heads, int):
        return ""
    # softmax runs in float32: 4 bytes per score (eager_attention_forward in each modeling file).
    return f": {bytes_in_words(4 * heads * tokens_per_batch**2)} per layer for a row of {tokens_per_batch:,} slots"
