"""Packages that a setting needs and that nothing else does: told before a model is loaded, with the pip command.

transformers 5.23 says so when it makes the optimizer or wraps the model: after the weights are loaded and the data is
tokenized.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels.flash_packages import FLASH_PACKAGES, judge_flash
from hf_speedkit.kernels.imports import installed_version, is_installed
from hf_speedkit.trainer.hardware import is_on, word_of
from hf_speedkit.trainer.installed_versions import lacking, wanted
from hf_speedkit.trainer.setting_names import nearest
from hf_speedkit.trainer.trackers import require_tracker_packages

_ADAMW = "optim=adamw_torch_fused needs no package"
# transformers 5.23 trainer_optimizer.py: the start of an optimizer's name, the package and what pip calls it.
_OPTIMIZERS = (
    (("adamw_bnb", "adamw_8bit", "paged_", "ademamix", "lion_", "rmsprop_bnb"), "bitsandbytes", "bitsandbytes"),
    (("galore_",), "galore_torch", "galore-torch"),
    (("apollo_",), "apollo_torch", "apollo-torch"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("schedule_free",), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
)


_OWN_ATTENTION = (
    'leave attn_implementation out: packed rows run on torch\'s own variable-length attention (packed_attention="auto")'
)


def require_packages(args: Any) -> None:
    """Refuse settings whose package is not installed, or too old.

    Args:
        args: TrainingArguments, made. Read here: `report_to`, `optim`, `use_liger_kernel`, `mixed_precision`.

    Raises:
        ConfigurationError: with the pip command, and the way on without.
    """
    require_tracker_packages(args.report_to)
    for setting, package, name, regardless in _needed(args):
        lacks = lacking(name, package)
        if lacks is not None:
            raise ConfigurationError(
                f"{setting}, and the package {package!r} {lacks}",
                mend=f"pip install {wanted(name)}",
                regardless=regardless,
            )


def _needed(args: Any) -> Iterator[tuple[str, str, str, str]]:
    optimizer = word_of(args.optim)
    for starts, package, name in _OPTIMIZERS:
        if optimizer.startswith(starts):
            yield f"optim is {optimizer!r}", package, name, _ADAMW
    if args.use_liger_kernel:
        without = "use_liger_kernel=False: fused layers are put in place by fused_layers=True, on by default"
        yield "use_liger_kernel is on", "liger_kernel", "liger-kernel", without
    if args.mixed_precision == "fp8" and not any(map(is_installed, ("torchao", "msamp"))):  # accelerate 1.15 takes any
        without = "accelerate launch --mixed_precision bf16"
        yield "the launcher asks for fp8", "transformer_engine", "transformer-engine[pytorch]", without


def require_hub_kernels(asked: str, mend: str) -> None:
    """Refuse kernels of the Hub without the package that loads them, in a version that transformers takes.

    Args:
        asked: the setting that asks for them.
        mend: what does without.

    Raises:
        ConfigurationError: with `mend`, and the pip command.
    """
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

    found, wanted = installed_version("kernels"), f">={KERNELS_MIN_VERSION},<{KERNELS_MAX_VERSION}"
    if found is None or not SpecifierSet(wanted).contains(found, prereleases=True):
        lacks = "is not installed" if found is None else f"is {found}: transformers takes {wanted}"
        raise ConfigurationError(
            f"{asked}, and the package 'kernels' {lacks}", mend=mend, regardless=f'pip install "kernels{wanted}"'
        )


def require_attention(name: object, *, device: str = "cuda") -> None:
    """Refuse an attention that transformers has not got, whose package is not installed, or that cannot train here.

    Args:
        name: `attn_implementation`; anything but a name is left to transformers.
        device: where the model will train ("cuda", "cpu").

    Raises:
        ConfigurationError: with what to leave out, and the names there are.
    """
    if not isinstance(name, str):
        return
    if "/" in name:
        require_hub_kernels(f"attn_implementation is {name!r}", _OWN_ATTENTION)
        return
    if name == "flex_attention" and device == "cpu":  # torch 2.13
        raise ConfigurationError(
            "attn_implementation is 'flex_attention', which has no backward on a CPU",
            mend='attn_implementation="sdpa", or a machine with a GPU',
        )
    if name in FLASH_PACKAGES:
        found = judge_flash(name, live=False)
        if found.verdict is KernelVerdict.BLOCKED:
            raise ConfigurationError(f"attn_implementation is {name!r}: {found.reason}", mend=_OWN_ATTENTION)
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name.rpartition("|")[2] not in names:
        near = nearest(name, names)
        raise ConfigurationError(
            f"attn_implementation is {name!r}, which transformers does not know",
            mend=(f"attn_implementation: {near}; " if near else "") + f"it is one of {', '.join(sorted(names))}",
        )


def require_deepspeed(config: Any, environment: Mapping[str, str] | None = None) -> None:
    """Refuse a DeepSpeed job without DeepSpeed; call it before transformers looks at the settings.

    Args:
        config: a SpeedSFTConfig as its user gave it.
        environment: os.environ unless given; a launcher asks for DeepSpeed there.

    Raises:
        ConfigurationError: with the pip command, and what does the same here.
    """
    environment = os.environ if environment is None else environment
    launched = is_on(environment.get("ACCELERATE_USE_DEEPSPEED"))
    if not config.deepspeed and not launched:
        return
    asked = "deepspeed is set" if config.deepspeed else "ACCELERATE_USE_DEEPSPEED is set, by the launcher or a shell"
    try:
        metadata.version("deepspeed")
    except metadata.PackageNotFoundError as error:
        raise ConfigurationError(
            f"{asked}, and the package 'deepspeed' is not installed",
            mend="pip install deepspeed" + ("" if config.deepspeed else ", or unset ACCELERATE_USE_DEEPSPEED"),
            regardless="fsdp: true with fsdp_config: {version: 2} shards as ZeRO 3 does, and is what is checked and "
            "measured here",
        ) from error
