"""A checkpoint of another model is named before its weights are read, in every form that a checkpoint has."""

import copy as copies
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from checkpoint_run import small
from support import tiny_llama

from hf_speedkit.core.errors import CheckpointError, ConfigurationError
from hf_speedkit.trainer.checkpoints.other_model import refuse_other_model
from hf_speedkit.trainer.checkpoints.resume import refuse_unread_resume


def other(**changes):
    config = copies.deepcopy(tiny_llama().config)
    for name, value in changes.items():
        setattr(config, name, value)
    return type(tiny_llama())(config)


def test_a_checkpoint_of_this_model_passes(copy):
    refuse_other_model(tiny_llama(seed=1), copy / "checkpoint-4")
    refuse_other_model(other(max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=3), copy / "checkpoint-4")
    sharded = tiny_llama()
    for weight in sharded.parameters():  # as DeepSpeed's third stage leaves them
        weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    refuse_other_model(sharded, copy / "checkpoint-4")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"intermediate_size": 64},
            r"intermediate_size: 48 in .*, 64 here\n.*gate_proj.*\[48, 32\] in .*\[64, 32\] here",
        ),
        ({"num_hidden_layers": 1}, "num_hidden_layers: 2 in the checkpoint, 1 here"),
        # Nothing differs in size: it was another model without a word.
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, "num_attention_heads: 4 in .*, 2 here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(copy, changes, said):
    with pytest.raises(CheckpointError, match=rf"(?s)checkpoint-4 is of another model than this run\n.*{said}"):
        refuse_other_model(other(**changes), copy / "checkpoint-4")


def test_training_does_not_begin_on_one_and_weights_alone_are_enough_to_tell(copy, tmp_path):
    trainer = small(tmp_path / "new", model=other(intermediate_size=64))
    with pytest.raises(
        CheckpointError, match=r"(?s)intermediate_size.*start a new run from its weights: model_name_or"
    ):
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-4"))
    (copy / "checkpoint-4" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"\[48, 32\] in the checkpoint, \[64, 32\] here; so do 5 more"):
        refuse_other_model(other(intermediate_size=64), copy / "checkpoint-4")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_sharded_weights_are_told_by_their_metadata(tmp_path):
    from torch.distributed.checkpoint import save

    folder = tmp_path / "checkpoint-1" / "pytorch_model_fsdp_0"
    save({"model": tiny_llama().state_dict()}, checkpoint_id=folder, no_dist=True)
    refuse_other_model(tiny_llama(seed=1), tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"\[48, 32\] in the checkpoint, \[64, 32\] here"):
        refuse_other_model(other(intermediate_size=64), tmp_path / "checkpoint-1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": 8}, r"r: 4 in .*8 here\n.*lora_A.*\[4, 32\] in the checkpoint, \[8, 32\] here"),
        ({"lora_alpha": 32}, "lora_alpha: 8 in the checkpoint, 32 here"),
        ({"target_modules": ["q_proj"]}, "target_modules: .*q_proj.*v_proj.* in the checkpoint, .*q_proj.* here"),
    ],
    ids=["rank", "alpha", "layers"],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_so_are_other_adapters(tmp_path, changes, said):
    peft = pytest.importorskip("peft")
    base = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "task_type": "CAUSAL_LM"}

    def adapted(**given):
        return peft.get_peft_model(tiny_llama(), peft.LoraConfig(**{**base, **given}))

    adapted().save_pretrained(tmp_path)
    refuse_other_model(adapted(), tmp_path)
    with pytest.raises(CheckpointError, match=rf"(?s)is of other adapters than this run\n.*{said}"):
        refuse_other_model(adapted(**changes), tmp_path)


def test_a_config_that_cannot_be_read_or_leaves_a_size_to_the_code_is_not_judged(copy):
    path = copy / "checkpoint-2" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": None}))
    refuse_other_model(tiny_llama(), copy / "checkpoint-2")
    shutil.rmtree(copy / "checkpoint-2")
    (copy / "checkpoint-4" / "config.json").write_text(json.dumps([1]))
    refuse_other_model(tiny_llama(), copy / "checkpoint-4")


def test_a_resume_among_the_settings_that_train_was_not_told_of_is_refused(tmp_path):
    """It is left to the script, and a new run began without a word."""
    trainer = small(tmp_path, resume_from_checkpoint="runs/a/checkpoint-4")
    with pytest.raises(ConfigurationError, match=r"train\(resume_from_checkpoint=args.resume_from_checkpoint\)"):
        trainer.train()
    for given, setting in ((False, "x"), ("x", "x"), (None, None), (None, False)):
        refuse_unread_resume(SimpleNamespace(resume_from_checkpoint=setting), given)
