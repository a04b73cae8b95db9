"""Adapters (peft): checkpoints, resume and the final folder hold them in peft's own format."""

import pytest
from checkpoint_run import adapted, losses
from support import tiny_llama

from hf_speedkit.trainer.checkpoints.export import export_checkpoint
from hf_speedkit.trainer.checkpoints.files import read_manifest

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def test_a_resumed_adapter_run_is_the_uninterrupted_one_and_its_adapters_load(tmp_path):
    whole = adapted(tmp_path / "run")
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    files = set(read_manifest(checkpoint).files)
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    resumed = adapted(tmp_path / "run", allow_existing_output=True)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-6)
    resumed.save_model(str(tmp_path / "final"))
    export_checkpoint(tmp_path / "run" / "checkpoint-4", tmp_path / "exported")
    trained = {name: value for name, value in resumed.model.state_dict().items() if "lora_" in name}
    for name in ("final", "exported"):
        loaded = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / name).state_dict()
        assert all((loaded[key] == value).all() for key, value in trained.items())
