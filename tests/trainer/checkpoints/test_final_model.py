"""The model at the end: its dtype, and which ranks have to be there to save it."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from checkpoint_run import small
from safetensors.torch import load_file
from support import tiny_hybrid
from transformers import AutoModelForCausalLM

from hf_speedkit.core.errors import CheckpointError
from hf_speedkit.trainer.ranks.roll_call import leave


def test_v43_the_final_model_is_stored_as_asked_and_its_decays_stay_as_trained(tmp_path):
    trainer = small(tmp_path, model=tiny_hybrid(), export_dtype="bfloat16", save_strategy="no")
    trainer.save_model(str(tmp_path / "final"))
    stored = {name: tensor.dtype for name, tensor in load_file(tmp_path / "final" / "model.safetensors").items()}
    decays = {name for name in stored if name.endswith(("A_log", "dt_bias"))}
    assert decays
    assert {stored[name] for name in decays} == {torch.float32}
    assert {stored[name] for name in stored.keys() - decays} == {torch.bfloat16}
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not loading["missing_keys"]
    assert model.dtype == torch.bfloat16
    assert trainer.model.dtype == torch.float32, "the live model is left as it is"


@pytest.mark.parametrize(("dtype", "stored"), [("auto", torch.float32), ("float16", torch.float16)])
def test_auto_stores_what_a_run_computes_in_and_a_whole_model_is_saved_by_one_rank_alone(
    tmp_path, monkeypatch, dtype, stored
):
    # What people write with the Trainer's own save_model: if trainer.is_world_process_zero(): trainer.save_model()
    monkeypatch.setattr(
        "hf_speedkit.trainer.checkpoints.final_model.agree", lambda _: pytest.fail("it waits for the other ranks")
    )
    small(tmp_path, export_dtype=dtype, save_strategy="no").save_model(str(tmp_path / "final"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto").dtype == stored


class _Compiled(torch.nn.Module):
    """Names weights as the wrapper of torch.compile does, which would import its compiler for 3 s."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


@pytest.mark.parametrize("internal", [True, False], ids=["checkpoint", "final"])
def test_weights_of_a_model_that_accelerate_has_compiled_are_saved_under_the_names_that_loaders_look_for(
    tmp_path, internal
):
    trainer = small(tmp_path, save_strategy="no", export_dtype="stored" if internal else "float16")
    names = set(dict(trainer.model.named_parameters()))
    trainer.model = _Compiled(trainer.model)  # as it is left under FSDP2
    trainer.save_model(str(tmp_path / "final"), _internal_call=internal)
    assert set(load_file(tmp_path / "final" / "model.safetensors")) == names


@pytest.mark.parametrize("spread", ["FSDP", "DeepSpeed", None])
def test_only_a_model_that_is_spread_over_the_ranks_calls_the_roll(tmp_path, monkeypatch, spread):
    trainer = small(tmp_path, export_dtype="bfloat16")
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = spread == "FSDP", spread == "DeepSpeed"
    store = dist.HashStore()
    watch = trainer.startup._watch
    watch._store, watch._rank, watch._ranks = store, 0, 2
    store.set("here/0", "")
    store.set("here/1", "")
    leave(store, 1)
    alone = pytest.raises(CheckpointError, match="rank 1 of 2 ended without it")
    with nullcontext() if spread is None else alone:
        trainer.save_model(str(tmp_path / "final"))
