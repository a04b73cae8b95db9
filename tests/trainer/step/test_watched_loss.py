"""Losses of Trainers that are not ours, with steps of several micro-batches."""

import plain_trainer
import pytest
import torch
from support import tiny_llama
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_speedkit import ThroughputCallback, attach


class Mean(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return mean_of(model(**inputs), labels, self.items(num_items_in_batch))

    def items(self, number):
        return None


class DividedMean(Mean):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) / self.args.gradient_accumulation_steps


class OverTheStep(Mean):
    def items(self, number):
        return number


class TakesNoCount(LlamaForCausalLM):
    accepts_loss_kwargs = False


def mean_of(outputs, labels, num_items_in_batch=None):
    return ForCausalLMLoss(outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch)


MEAN, EQUAL = "2 losses a step are added up", "the 2 of a step (gradient_accumulation_steps, ranks) weigh the same"
BALANCE = "counts 2 times"
SAID = (MEAN, EQUAL, BALANCE)
EXPERTS = Qwen3MoeConfig(
    vocab_size=64, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, num_experts=2, num_experts_per_tok=1, output_router_logits=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": Mean}, MEAN),
        ({"kind": DividedMean}, None),
        ({"kind": OverTheStep}, None),
        ({"model": TakesNoCount(tiny_llama().config)}, EQUAL),
        ({"kind": Mean, "model": TakesNoCount(tiny_llama().config)}, None),  # transformers divides by the micro-batches
        ({}, None),
        ({"model": Qwen3MoeForCausalLM(EXPERTS)}, BALANCE),
        ({"gradient_accumulation_steps": 1, "model": TakesNoCount(tiny_llama().config)}, None),
    ],
    ids=[
        "a mean", "a mean divided", "over the step", "no count taken", "a mean without a count", "the model's own",
        "experts", "one micro-batch",
    ],
)  # fmt: skip
def test_v25_losses_that_weigh_a_steps_targets_otherwise_are_told_beside_a_plain_trainer(tmp_path, caplog, given, said):
    trainer = plain_trainer.make_trainer(tmp_path, **{"max_steps": 1, "gradient_accumulation_steps": 2, **given})
    callback = ThroughputCallback()
    attach(trainer, callback)
    attach(trainer, callback)
    trainer.train()
    assert [caplog.text.count(one) for one in SAID] == [one == said for one in SAID]


def test_v25_a_function_is_asked_without_another_forward_pass(tmp_path, caplog):
    trainer = plain_trainer.make_trainer(tmp_path, max_steps=1, gradient_accumulation_steps=2)
    passes, computed = [], []
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: (
        computed.append(num_items_in_batch) or mean_of(outputs, labels)
    )
    trainer.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    attach(trainer, ThroughputCallback())
    trainer.train()
    assert MEAN in caplog.text
    assert passes == [True, True]
    assert computed == [computed[0], 2 * computed[0], computed[0]]


def test_a_loss_that_was_put_into_a_trainer_stays_there(tmp_path):
    trainer = plain_trainer.make_trainer(tmp_path, kind=Mean, max_steps=2, gradient_accumulation_steps=2)
    computed = []

    def counted(compute, name):
        return lambda *args, **kwargs: computed.append(name) or compute(*args, **kwargs)

    trainer.compute_loss = counted(trainer.compute_loss, "before")
    attach(trainer, ThroughputCallback())
    trainer.compute_loss = counted(trainer.compute_loss, "behind")
    trainer.train()
    assert computed == ["behind", "before", "before", *["behind", "before"] * 3]  # the first is asked once more
