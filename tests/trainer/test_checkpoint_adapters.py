"""Adapters (peft): checkpoints, resume and the final folder hold them in peft's own format."""

import pytest
from checkpoint_run import build, losses
from support import tiny_llama

from hf_speedkit.trainer.checkpoint_files import read_manifest
from hf_speedkit.trainer.export import export_checkpoint

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted(path, **changes):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return build(path, model=tiny_llama(), peft_config=config, max_steps=4, save_steps=2, learning_rate=1e-2, **changes)


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


@pytest.mark.two_process
def test_sharded_adapters_go_on_on_two_processes_or_one(tmp_path, free_port):
    import json

    import torch.multiprocessing as mp
    from checkpoint_run import rank_main

    mp.start_processes(rank_main, args=(free_port, str(tmp_path), "adapters"), nprocs=2, start_method="spawn")
    said = json.loads((tmp_path / "rank0.json").read_text())
    run = tmp_path / "run"
    assert read_manifest(run / "checkpoint-2").world_size == 2
    assert said["resumed"] == pytest.approx(said["losses"], abs=1e-6)
    alone = adapted(run, gradient_accumulation_steps=2, allow_existing_output=True, save_strategy="no")
    alone.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert {str(step): loss for step, loss in losses(alone).items()} == pytest.approx(said["losses"], abs=1e-4)
    export_checkpoint(run / "checkpoint-4", tmp_path / "exported")
    states = [
        peft.PeftModel.from_pretrained(tiny_llama(), path).state_dict()
        for path in (run / "final", tmp_path / "exported")
    ]
    assert all((states[0][key] == value).all() for key, value in states[1].items())
    assert any("lora_B" in key and value.any() for key, value in states[1].items())
