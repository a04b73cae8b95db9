"""Our loss head and AdamW inside SpeedSFTTrainer: same numbers as TRL's head and torch's optimizer."""

import pytest
import torch
from support import tiny_hybrid, tiny_llama
from test_sft import trainer_for

from hf_speedkit.kernels.adamw import FusedAdamW
from hf_speedkit.trainer.loss_head import head_refusal


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
