"""Our loss head and AdamW inside SpeedSFTTrainer: same numbers as TRL's head and torch's optimizer."""

import pytest
import torch
from support import tiny_hybrid, tiny_llama
from test_sft import trainer_for
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from hf_speedkit.kernels.adamw import FusedAdamW
from hf_speedkit.kernels.attention import NAME, register
from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.trainer.step.loss_head import head_refusal


def run(path, **changes):
    model = tiny_hybrid()
    trainer = trainer_for(path, model=model, max_steps=6, num_train_epochs=3, **changes)
    trainer.train()
    return trainer, [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [0.05, 0.0], ids=["clipped", "not_clipped"])
def test_losses_metrics_and_weights_are_those_of_trls_head_and_torchs_adamw(tmp_path, accumulation, max_grad_norm):
    shared = {"gradient_accumulation_steps": accumulation, "max_grad_norm": max_grad_norm}
    ours, logs = run(tmp_path / "ours", **shared)
    theirs, expected = run(tmp_path / "theirs", loss_head="trl", fused_optimizer=False, **shared)
    assert ours._fused_adamw() is not None
    assert theirs._fused_adamw() is None
    for log, other in zip(logs, expected, strict=True):
        for key in ("loss", "entropy", "mean_token_accuracy", "grad_norm", "num_tokens"):
            assert log[key] == pytest.approx(other[key], rel=1e-4), key
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        # Six AdamW steps of 1e-3: where a gradient is rounding noise, AdamW makes a whole step of it.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_generation_and_logits_of_the_model_stay_its_own(tmp_path):
    model = tiny_hybrid()
    before = model(input_ids=torch.arange(2, 12)[None]).logits
    trainer_for(tmp_path, model=model)
    after = model(input_ids=torch.arange(2, 12)[None], labels=torch.arange(2, 12)[None])
    assert torch.equal(after.logits, before)
    assert after.loss is not None
    assert model.generate(torch.arange(2, 6)[None], max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_a_head_that_changes_its_logits_or_has_a_bias_is_left_to_trl():
    assert head_refusal(tiny_hybrid()) is None
    capped = tiny_llama()
    capped.config.final_logit_softcapping = 30.0
    assert "final_logit_softcapping" in head_refusal(capped)
    biased = tiny_llama()
    biased.lm_head = torch.nn.Linear(32, 64)
    assert "without bias" in head_refusal(biased)
    spread = tiny_llama()
    spread.hf_device_map = {"model": 0, "lm_head": 1}
    assert "several devices" in head_refusal(spread)
    spread.hf_device_map = {"": 0}
    assert head_refusal(spread) is None
    half = tiny_llama().half()
    assert "float16" in head_refusal(half)


class _Wrapped(torch.nn.Module):
    """As peft wraps the output layer of tied embeddings for `trainable_token_indices`: it hands on the weight alone."""

    def __init__(self, layer):
        super().__init__()
        self.token_adapter = torch.nn.Module()
        self.token_adapter.base_layer = layer

    def __getattr__(self, name):
        return self.token_adapter.base_layer.weight if name == "weight" else super().__getattr__(name)

    def forward(self, hidden):
        return self.token_adapter.base_layer(hidden)


def test_an_output_layer_that_peft_has_wrapped_trains_on_trls_head_which_reads_a_bias(tmp_path):
    model = tiny_llama()
    model.lm_head = _Wrapped(model.lm_head)
    trainer = trainer_for(tmp_path, model=model)
    assert not trainer.own_head
    trainer.train()
    assert "lm_head.bias" not in model.state_dict()


def test_a_model_that_deepspeed_holds_is_left_to_trls_head(tmp_path):
    trainer = trainer_for(tmp_path)
    assert trainer.own_head
    trainer.is_deepspeed_enabled = True
    assert not trainer.use_loss_head()


def test_another_optimizer_is_left_alone(tmp_path):
    trainer = trainer_for(tmp_path, optim="adamw_torch")
    assert not isinstance(trainer.create_optimizer(), FusedAdamW)
    trainer = trainer_for(tmp_path)
    assert isinstance(trainer.create_optimizer(), FusedAdamW)
    decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
    assert len(trainer.optimizer.param_groups) == 2
    assert decays == [trainer.args.weight_decay, 0.0]


def test_an_optimizer_of_the_users_own_is_left_alone(tmp_path):
    from hf_speedkit import SpeedSFTTrainer

    base = trainer_for(tmp_path)
    own = torch.optim.AdamW(base.model.parameters(), lr=1e-3, fused=True)
    trainer = SpeedSFTTrainer(
        model=base.model, args=base.args, train_dataset=base.train_dataset,
        processing_class=base.processing_class, optimizers=(own, None),
    )  # fmt: skip
    assert trainer.create_optimizer() is own


class HostReads(TorchDispatchMode):
    """Counts reads of a value from the device: on a GPU the host waits for each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [tiny_hybrid, tiny_llama])
def test_a_packed_forward_pass_reads_nothing_from_the_device_for_a_mask(tmp_path, make):
    """The CPU's own attention reads the boundaries, once a layer; transformers' search for documents must be gone."""
    trainer = trainer_for(tmp_path, model=make())
    model = trainer.model
    register()
    model.set_attn_implementation(NAME)
    rows = trainer.train_dataset.select(range(3))
    batch = trainer.data_collator([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
    del batch["token_counts"]
    positions = batch.pop("target_positions")
    with bind_references(model):
        counted = {}
        for kind in ("with", "without"):
            searches = []
            original = masking_utils.find_packed_sequence_indices
            masking_utils.find_packed_sequence_indices = lambda ids: searches.append(1) or original(ids)  # noqa: B023
            try:
                with HostReads() as reads:
                    if kind == "without":
                        model(**batch, use_cache=False, target_positions=positions)
                    else:
                        model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False)
            finally:
                masking_utils.find_packed_sequence_indices = original
            counted[kind] = (len(searches), reads.count)
    assert counted["with"][0] == 1
    assert counted["without"][0] == 0
    assert counted["without"][1] == counted["with"][1] - 1
    assert NAME in masking_utils.AttentionMaskInterface._global_mapping
