"""Adapters through the recipe: the real job's settings, and a tiny one trained, proven, counted and saved."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import qwen27b_sft as recipe
from tiny_chat import tiny_config

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.flops import model_flops
from hf_speedkit.core.memory import GIB, training_state_bytes
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.trainer.hardware import find_missing_hardware

RECIPES = Path(__file__).parents[2] / "recipes"
LORA = RECIPES / "qwen27b_lora.yaml"
TINY = RECIPES / "tiny_sft.yaml"


def test_the_real_job_is_what_it_says():
    values = recipe.take_settings(LORA, [])
    script, args, model = recipe.parse(LORA, ["--tf32", "false"])  # tf32 cannot be asked for without a GPU
    assert (model.use_peft, model.lora_r, model.lora_target_modules) == (True, 16, "all-linear")
    assert values["tf32"] is True
    assert args.fsdp_plugin_args is None
    assert (args.activation_checkpointing, args.bf16) == (True, False)
    # The same rows an optimizer step as the full fine-tune on one GPU.
    _, full, _ = recipe.parse(RECIPES / "qwen27b_sft.yaml", [])
    rows = [one.tokens_per_batch * one.gradient_accumulation_steps for one in (args, full)]
    assert rows[0] == rows[1]
    # 117 M adapter weights in fp32 beside bf16 weights, counted on the meta device with peft 0.21.
    state = training_state_bytes(
        script.expected_parameters + 116.7e6, weight_bytes=2, trainable_parameters=116.7e6, trainable_bytes=4
    )
    assert state.total / GIB == pytest.approx(50.1 + 1.74, abs=0.1)


class Gpu:
    name = "NVIDIA H100 80GB HBM3"
    memory_gib = 79.6


def test_one_80_gb_gpu_is_enough_and_one_of_48_is_not():
    job = recipe.take_settings(LORA, [])
    given = {"world_size": 1, "local_world_size": 1, "command": "tiny"}
    assert find_missing_hardware(job, gpus=[Gpu()], **given) is None
    small = Gpu()
    small.memory_gib = 47.5
    assert "too small" in str(find_missing_hardware(job, gpus=[small], **given))


def test_qlora_without_bitsandbytes_stops_before_a_download(monkeypatch):
    from hf_speedkit.trainer import installed_versions

    monkeypatch.setattr(recipe, "require_hardware", lambda *_, **__: None)
    monkeypatch.setattr(installed_versions, "is_installed", lambda name: name != "bitsandbytes")
    with pytest.raises(ConfigurationError, match="'bitsandbytes' is not installed"):
        recipe.main(["--config", str(LORA), "--load_in_4bit", "true", "--report_to", "none"])


# peft 0.21 asks transformers by the older name of a property.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_tiny_adapter_is_trained_proven_counted_and_saved(tmp_path, capsys, monkeypatch):
    pytest.importorskip("peft", reason="pip install peft")
    from safetensors import safe_open

    monkeypatch.setattr(recipe, "use_all_cores", lambda args: 1)  # the cores of the other tests
    out = tmp_path / "run"
    settings = {"use_peft": "true", "max_steps": 2, "conversations": 16, "tokens_per_batch": 512, "logging_steps": 1,
                "activation_checkpointing": "true", "lora_r": 4, "output_dir": out, "disable_tqdm": "true"}  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    recipe.main(["--config", str(TINY), *words])

    said = capsys.readouterr().out
    for line in ("isolation", "proven on", "kernels FALLBACK", "packing efficiency", "real tokens / s"):
        assert line in said
    assert not (out / "model.safetensors").exists()
    with safe_open(out / "adapter_model.safetensors", "pt") as saved:
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    # 3 x (5 of GatedDeltaNet + 3 of the MLP) + (4 of attention + 3), each of two matrices.
    assert len(shapes) == 2 * (3 * 8 + 7)
    assert not any("lm_head" in name for name in shapes)

    trained = sum(a * b for a, b in shapes.values())
    lora = model_flops(tiny_config().to_dict(), head_on="target", frozen=True, adapter_parameters=trained)
    steps = [json.loads(line) for line in (out / "speedkit_steps.jsonl").read_text().splitlines()]
    for step in (one for one in steps if one["kind"] == "step"):
        counts = TokenCounts(**step["tokens"])
        assert step["flops"] == pytest.approx(lora(counts), rel=1e-9)
        full = replace(lora, frozen=False, adapter_per_token=0.0)(counts)
        assert 0.6 < step["flops"] / full < 0.8  # two passes through frozen weights instead of three, and adapters
