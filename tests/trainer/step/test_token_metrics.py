"""Per-token numbers come from the tokens of the loss, and the fused head weighs tokens as plain cross entropy does."""

import pytest
import torch
from datasets import Dataset
from support import tiny_hybrid, tiny_llama
from test_sft import trainer_for
from trl.trainer.utils import add_fused_lm_head

from hf_speedkit.core.errors import ConfigurationError


def test_v29_metrics_average_the_positions_of_the_loss_after_the_shift(tmp_path):
    ids, labels = [7, 8, 4, 5], [-100, -100, 4, 5]
    model = tiny_llama()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, 1:3]  # positions 1 and 2 predict 4 and 5
    log_probs = logits.log_softmax(-1)
    dataset = Dataset.from_dict({"input_ids": [ids], "labels": [labels]})
    trainer = trainer_for(tmp_path, model=model, dataset=dataset, max_steps=1)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["entropy"] == pytest.approx(float(-(log_probs.exp() * log_probs).sum(-1).mean()), abs=1e-5)
    assert logged["loss"] == pytest.approx(-float(log_probs[0, 4] + log_probs[1, 5]) / 2, abs=1e-5)
    top1 = (logits.argmax(-1) == torch.tensor([4, 5])).float().mean()
    assert logged["mean_token_accuracy"] == pytest.approx(float(top1))


def test_v32_the_fused_head_weighs_tokens_as_plain_cross_entropy_does():
    ids = torch.tensor([[7, 8, 9, 4, 5, 6]])
    labels = torch.tensor([[-100, 8, -100, 4, 5, 6]])  # five are scored, one of them ignored
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0])
    plain, fused = tiny_llama(), tiny_llama()
    losses = torch.nn.functional.cross_entropy(
        plain(ids, use_cache=False).logits[0, :-1], labels[0, 1:], reduction="none", ignore_index=-100
    )
    (losses * weights).sum().backward()
    add_fused_lm_head(fused)
    scored = fused(ids, labels=labels, use_cache=False, fused_lm_head=True).log_probs
    (-(scored[0] * weights)).sum().backward()
    gradients = [torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (plain, fused)]
    assert gradients[1].norm() > 0
    # fp32 on both sides, sums in another order
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99999


@pytest.mark.parametrize("name", ["cp_size", "tp_size"])
def test_v05_rows_split_over_ranks_are_refused_before_any_data_is_read(tmp_path, name):
    from accelerate.parallelism_config import ParallelismConfig

    read = []
    dataset = Dataset.from_dict({"text": ["w3 w4"]}).with_transform(lambda rows: read.append(1) or rows)
    with pytest.raises(ConfigurationError, match=f"{name}=2") as refused:
        trainer_for(tmp_path, model=tiny_hybrid(), dataset=dataset, parallelism_config=ParallelismConfig(**{name: 2}))
    assert "packing=False" in str(refused.value)
    assert not read
