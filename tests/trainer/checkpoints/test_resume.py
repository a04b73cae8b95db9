"""What a run goes on from is verified first: damage, missing parts, other kinds are refused with a way on."""

import json
import logging
import os
from types import SimpleNamespace

import pytest
import torch
from checkpoint_run import build, losses, names, small
from safetensors.torch import load_file, save_file
from support import tiny_llama, tiny_tokenizer, tokenized
from test_sft import Recorder
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_speedkit.core.errors import CheckpointError, ConfigurationError, PackingError
from hf_speedkit.core.records import to_json
from hf_speedkit.trainer.checkpoints.files import MANIFEST_NAME
from hf_speedkit.trainer.checkpoints.folder import (
    manifest_of,
)
from hf_speedkit.trainer.checkpoints.resume import Reader, check_kind, settle_resume
from hf_speedkit.trainer.checkpoints.resume_model import refuse_missing_weights, taking_saved_names


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(lambda c: flip(c / "model.safetensors"), "model.safetensors was changed after", id="byte flipped"),
        pytest.param(lambda c: flip(c / "optimizer.pt"), "optimizer.pt was changed after", id="optimizer flipped"),
        pytest.param(lambda c: os.truncate(c / "optimizer.pt", 99), "optimizer.pt has 99 bytes", id="cut"),
        pytest.param(lambda c: (c / "scheduler.pt").unlink(), "scheduler.pt is missing", id="missing"),
        pytest.param(lambda c: (c / MANIFEST_NAME).write_text("{"), "manifest cannot be read", id="manifest cut"),
        pytest.param(
            lambda c: (c / MANIFEST_NAME).write_text(to_json(manifest_of(4, 1, []))), "names no files", id="no files"
        ),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message_and_refused_by_name(copy, caplog, harm, said):
    harm(copy / "checkpoint-4")
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        assert settle_resume(True, copy, Reader()) == str(copy / "checkpoint-2")
    assert "resuming from checkpoint-2: checkpoint-4 is damaged" in caplog.text
    assert said in caplog.text
    with pytest.raises(CheckpointError, match=said) as refused:
        settle_resume(str(copy / "checkpoint-4"), copy, Reader())
    assert "resume_from_checkpoint=True takes the last good one" in str(refused.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "there is no checkpoint .*: nothing is there"),
        ("README.md", "it is a file"),
        (".", "(?s)is a run's folder, and no checkpoint.*resume_from_checkpoint=.*checkpoint-4$"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_told_from_a_save_that_did_not_end(copy, path, said):
    with pytest.raises(CheckpointError, match=said):
        settle_resume(str(copy / path), copy, Reader())


def test_each_rank_reads_a_share_of_the_bytes_and_together_they_read_all(copy):
    flip(copy / "checkpoint-4" / "model.safetensors")
    chosen = [settle_resume(True, copy, Reader(index=index, count=3)) for index in range(3)]
    assert sorted(chosen) == [str(copy / "checkpoint-2"), *[str(copy / "checkpoint-4")] * 2]
    assert settle_resume(True, copy, Reader(checksums=False)) == str(copy / "checkpoint-4")


def test_without_any_good_checkpoint_the_refusal_says_why_of_each(copy, tmp_path):
    for step in (2, 4):
        (copy / f"checkpoint-{step}" / "trainer_state.json").unlink()
    for resume in (True, "auto"):
        with pytest.raises(CheckpointError, match=r"checkpoint-4: trainer_state\.json is missing"):
            settle_resume(resume, copy, Reader())
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        settle_resume(True, tmp_path / "new", Reader())
    assert settle_resume("auto", tmp_path / "new", Reader()) is None
    assert settle_resume(None, copy, Reader()) is None


@pytest.mark.parametrize("max_steps", [4, 3])
def test_a_run_that_is_over_trains_no_step_more_when_it_is_started_again(copy, run, caplog, max_steps):
    """As a job is that was killed while it wrote its final model, and queued again with resume_from_checkpoint auto."""
    recorder = Recorder()
    again = small(copy, max_steps=max_steps, callbacks=[recorder])
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        again.train(resume_from_checkpoint="auto")
    assert recorder.rows == []
    assert again.state.global_step == 4
    assert names(copy) == ["checkpoint-2", "checkpoint-4"]
    assert f"checkpoint-4 has 4 of {max_steps} steps: nothing is left to train" in caplog.text
    assert losses(again) == run[1]
    again.summary()


def in_parts(checkpoint, *, lose):
    """Weights in two files and an index, as a model of more than 50 GB is saved."""
    whole = load_file(checkpoint / "model.safetensors")
    parts = {f"model-0000{number}-of-00002.safetensors": list(whole)[number - 1 :: 2] for number in (1, 2)}
    for name, keys in parts.items():
        save_file({key: whole[key] for key in keys}, checkpoint / name)
    places = {key: name for name, keys in parts.items() for key in keys}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (checkpoint / "model.safetensors").unlink()
    if lose:
        (checkpoint / "model-00002-of-00002.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "step"),
    [
        pytest.param(lambda c: None, 4, id="whole"),
        pytest.param(lambda c: (c / "trainer_state.json").unlink(), 2, id="state not written"),
        pytest.param(lambda c: os.truncate(c / "model.safetensors", 999), 2, id="weights cut"),
        pytest.param(lambda c: (c / "model.safetensors").unlink(), 2, id="no weights"),
        pytest.param(lambda c: (c / "trainer_state.json").write_text("[]"), 2, id="no state"),
        pytest.param(lambda c: os.truncate(c / "optimizer.pt", 999), 2, id="optimizer cut"),
        pytest.param(lambda c: (c / "optimizer.pt").unlink(), 2, id="no optimizer"),
        pytest.param(lambda c: (c / "scheduler.pt").unlink(), 2, id="no schedule"),
        pytest.param(lambda c: os.truncate(c / "rng_state.pth", 99), 2, id="random state cut"),
        pytest.param(lambda c: in_parts(c, lose=False), 4, id="in parts"),
        pytest.param(lambda c: in_parts(c, lose=True), 2, id="a part missing"),
    ],
)
def test_a_checkpoint_that_transformers_wrote_is_taken_if_it_looks_whole(copy, caplog, harm, step):
    for number in (2, 4):
        (copy / f"checkpoint-{number}" / MANIFEST_NAME).unlink()
    harm(copy / "checkpoint-4")
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        assert settle_resume(True, copy, Reader()) == str(copy / f"checkpoint-{step}")
    assert "has no manifest" in caplog.text


def test_whole_weights_are_refused_by_a_sharded_run_with_a_way_on(copy):
    check_kind(copy / "checkpoint-4", fsdp=False)
    with pytest.raises(ConfigurationError, match="without FSDP") as refused:
        check_kind(copy / "checkpoint-4", fsdp=True)
    assert "start a new run from its weights" in str(refused.value)
    (copy / "checkpoint-4" / "pytorch_model_fsdp_0").mkdir()
    check_kind(copy / "checkpoint-4", fsdp=True)


def test_weights_alone_and_the_state_of_another_optimizer_are_refused_with_a_way_on(copy):
    with pytest.raises(ConfigurationError, match="SGD: the saved optimizer has no dampening, momentum") as refused:
        small(copy, optim="sgd", max_steps=5).train(resume_from_checkpoint=True)
    assert "model_name_or_path=" in str(refused.value)
    for name in ("optimizer.pt", "scheduler.pt", MANIFEST_NAME):
        (copy / "checkpoint-4" / name).unlink()
    with pytest.raises(ConfigurationError, match="holds weights alone") as refused:
        small(copy, max_steps=5).train(resume_from_checkpoint=True)
    assert "model_name_or_path=" in str(refused.value)


def test_a_checkpoint_of_trls_trainer_goes_on_with_padded_batches_and_is_refused_for_packed_rows(tmp_path, caplog):
    from trl import SFTConfig, SFTTrainer

    sizes = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", "logging_steps": 1}
    lengths = [9, 4, 17, 2, 30, 8, 8, 21]
    whole = SFTTrainer(
        tiny_llama(), SFTConfig(**settings, **sizes, disable_tqdm=True, gradient_checkpointing=False),
        train_dataset=tokenized(lengths), processing_class=tiny_tokenizer(),
    )  # fmt: skip
    whole.train()
    checkpoint = str(tmp_path / "checkpoint-2")
    ours = {**sizes, "save_strategy": "no", "dataset": tokenized(lengths), "allow_existing_output": True}
    padded = {"packing": False, "tokens_per_batch": None, "lr_scheduler_type": "linear"}
    resumed = small(tmp_path, **{**ours, **padded})
    resumed.train(resume_from_checkpoint=checkpoint)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)  # sums in another order
    assert "the checkpoint is another trainer's" in caplog.text
    with pytest.raises(PackingError, match="with batches of 2 documents a device; here they have 1"):
        small(tmp_path, **{**ours, **padded, "per_device_train_batch_size": 1}).train(resume_from_checkpoint=checkpoint)

    ours |= {"per_device_train_batch_size": 1}
    with pytest.raises(PackingError, match=r"step 2 of 4 held other documents(.|\n)*model_name_or_path=.*checkpoint-2"):
        small(tmp_path, **ours).train(resume_from_checkpoint=checkpoint)
    anew = small(tmp_path, **ours, ignore_data_skip=True)
    anew.train(resume_from_checkpoint=checkpoint)
    assert list(losses(anew)) == [1, 2, 3, 4]


def test_a_checkpoint_without_some_of_the_weights_is_refused():
    """Trainer warns and trains them from where they began."""
    model = tiny_llama()
    refuse_missing_weights(model, SimpleNamespace(missing_keys=["a.buffer"]))
    with pytest.raises(CheckpointError, match="lacks 1 of the model's"):
        refuse_missing_weights(model, SimpleNamespace(missing_keys=["model.norm.weight"]))


MOE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def experts(family, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**MOE))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe"])
@pytest.mark.parametrize("mixed", [False, True])
def test_v40_weights_that_are_saved_under_other_names_are_found_again_to_the_bit(tmp_path, family, mixed):
    saved, other = experts(family), experts(family, seed=1)
    for model in (saved, other):
        model.to(torch.bfloat16)
        model.model.norm.to(torch.float32 if mixed else torch.bfloat16)
    saved.model.norm.weight.data += 1e-4 * torch.randn_like(saved.model.norm.weight)
    saved.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    assert not set(file) <= set(other.state_dict()), "else there is nothing to find"
    with taking_saved_names(other):
        result = other.load_state_dict(file, False)
    assert not result.missing_keys
    assert not result.unexpected_keys
    for name, weight in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name
        assert other.state_dict()[name].dtype == weight.dtype
    with taking_saved_names(other):
        file.pop("model.norm.weight")
        with pytest.raises(CheckpointError, match="the checkpoint lacks"):
            refuse_missing_weights(other, other.load_state_dict(file, False))
    assert "load_state_dict" not in vars(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_v38_a_run_that_goes_on_in_another_precision_is_told_so(caplog, dtype):
    model, saved = tiny_llama(), tiny_llama().to(dtype).state_dict()
    with taking_saved_names(model):
        model.load_state_dict(saved)
    assert ("in bfloat16 and this run in float32" in caplog.text) is (dtype == torch.bfloat16)


def test_v40_experts_go_on_from_the_checkpoint_and_the_best_of_them_come_back(tmp_path):
    settings = {"max_steps": 3, "save_steps": 2, "learning_rate": 1e-2}
    whole = build(tmp_path / "whole", model=experts("qwen3_moe"), **settings)
    whole.train()
    stopped = build(tmp_path / "stopped", model=experts("qwen3_moe"), **{**settings, "max_steps": 2})
    stopped.train()
    resumed = build(tmp_path / "stopped", model=experts("qwen3_moe"), allow_existing_output=True, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed)[3] == losses(whole)[3]
    resumed.state.best_model_checkpoint = str(tmp_path / "stopped" / "checkpoint-2")
    resumed._load_best_model()
    for name, weight in stopped.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name
