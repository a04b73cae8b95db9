"""Writes docs/settings.md from SpeedSFTConfig and the recipe's arguments: `python scripts/render_settings.py`."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path

from hf_speedkit import SpeedSFTConfig

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "settings.md"
HEAD = """# Settings

What `SpeedSFTConfig` adds to TRL's SFTConfig and transformers' TrainingArguments, all of whose settings it has as well.
In Python they are arguments (`SpeedSFTConfig(tokens_per_batch=8192)`), in a recipe's YAML lines
(`tokens_per_batch: 8192`), on the recipe's command line options (`--tokens_per_batch 8192`). Made by
`scripts/render_settings.py` from the code; do not edit by hand. Words: a *document* is one training example in a packed
row, *slots* are positions of a row.

| setting | default | what it does | more |
|---|---|---|---|
"""
RECIPE = """
## The recipe's own

`recipes/qwen27b_sft.py` takes these too, and those of TRL's ModelConfig: `model_name_or_path`, `model_revision`,
`dtype` (`bfloat16`, `float16`, `float32`), `attn_implementation`, `use_peft`, `lora_r`, `lora_alpha`, `lora_dropout`,
`lora_target_modules`, `load_in_4bit`. A name that none of them has is refused, with the one that was meant.

| setting | default | what it is |
|---|---|---|
"""
PAGES = {  # the page that says most about a setting
    "packing": "packing_strategy tokens_per_batch cost_window_steps overlong isolation_check packing",
    "packing.md#templates-and-masks": "chat_template_kwargs template_check exclude_generation_prompt",
    "kernels": "kernel_assertion fused_layers fused_layers_exclude fused_lora packed_attention",
    "speed": "loss_head fused_optimizer activation_checkpointing_layers",
    "memory": "activation_checkpointing_keep activation_offloading_layers memory_check",
    "metrics": "throughput peak_tflops count_launches_every nonfinite logging_nan_inf_filter",
    "tracing": "trace_steps step_log",
    "fsdp2": "stuck_rank_timeout_s fsdp_prefetch_layers fsdp_zero_copy",
    "checkpoints": "allow_existing_output checkpoint_verification export_dtype stop_signals",
    "packing.md#evaluation": "per_device_eval_batch_size",
}


def rendered() -> str:
    """The document as it should be."""
    said, ours = described(), {field.name: field for field in fields(SpeedSFTConfig)}
    said["logging_nan_inf_filter"] = "replace non-finite losses in the log; transformers has it on"
    said["per_device_eval_batch_size"] = "packed rows of one evaluation pass; 8 in transformers"
    rows = [f"| `{name}` | {_default(ours[name])} | {text} | {_page(name)} |" for name, text in said.items()]
    return HEAD + "\n".join(rows) + "\n" + RECIPE + "\n".join(recipe_rows()) + "\n"


def described() -> dict[str, str]:
    """Each setting with what the class's docstring says of it."""
    arguments = inspect.cleandoc(SpeedSFTConfig.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", arguments, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()).rstrip(".") for name, text in found}


def recipe_rows() -> list[str]:
    """What the recipe itself needs to know."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from qwen27b_sft import RecipeArguments

    return [
        f"| `{one.name}` | {_default(one)} | {one.metadata['help'].rstrip('.')} |" for one in fields(RecipeArguments)
    ]


def _default(field: Field) -> str:  # type: ignore[type-arg]
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    return "unset" if value is None else f"`{value}`" if isinstance(value, str) else f"`{value!r}`"


def _page(name: str) -> str:
    page = next(page for page, names in PAGES.items() if name in names.split())
    return f"[{page.partition('.')[0]}]({page if '.' in page else page + '.md'})"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(), encoding="utf-8")
