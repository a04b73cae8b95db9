"""Training with fused adapters: the same losses and gradients, and what is made again is what is counted."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from test_sft import settings, trainer_for
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from hf_speedkit.core.flops import model_flops
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.kernels.fused_layers import PARTS, fused_layers
from hf_speedkit.trainer import sft
from hf_speedkit.trainer.memory.kept_products import KeptProducts
from hf_speedkit.trainer.memory.recompute import checkpointed_layers
from hf_speedkit.trainer.metrics.mfu_inputs import RecomputedFlops, flops_of

peft = pytest.importorskip("peft", reason="pip install peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(24)[None] % 17 + 2
FUSED = partial(fused_layers, exclude=tuple(part for part in PARTS if part != "lora"), devices=("cpu",))


def lora_config():
    return peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def adapted(checkpointed=None):
    model = peft.get_peft_model(tiny_llama(), lora_config()).train()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first: no gradient would reach lora_A
            torch.nn.init.normal_(weight, std=0.1)
    if checkpointed is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointed == "reentrant"})
        model.enable_input_require_grads()
    return model


def gradients(model):
    """Of two micro-batches that are added up."""
    model.zero_grad()
    for ids in (IDS, IDS.flip(1)):
        model(input_ids=ids, labels=ids).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_gradients_of_a_model_are_those_without_below_reentrant_checkpointing_too():
    model = adapted("reentrant")
    wanted = gradients(model)
    with FUSED(model) as lines:
        same(gradients(model), wanted)
    assert lines
    assert torch.equal(gradients(model), wanted)


def multiply_adds(_, a, b, *, out_shape=None, **__):  # torch 2.13 does not count it in place
    return 2 * a[0] * a[1] * b[1]


def test_what_is_made_again_is_what_is_counted_and_what_is_kept_is_not_made_again(monkeypatch):
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    model, tokens = adapted("plain"), IDS.numel()
    counts = TokenCounts(
        slots=2 * tokens, real=2 * tokens, target=2 * tokens - 2, documents=2, squared_lengths=2 * tokens**2
    )
    kept = [KeptProducts(layer.module) for layer in checkpointed_layers(model)]

    def again():
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: multiply_adds}) as counter:
            found = gradients(model)
        claimed = RecomputedFlops(model, flops_of(model), None)(counts)
        return found, claimed, counter.get_total_flops() - claimed  # which leaves what is made once

    wanted, pefts, once = again()
    with FUSED(model):
        found, fused, fused_once = again()
        same(found, wanted)
        for one in kept:
            one.watch(compare=True)
        same(gradients(model), wanted)
        for one in kept:
            one.switch(True)
        found, with_products, kept_once = again()
        same(found, wanted)
        assert not any(one.overwritten or not one.bytes for one in kept)
        assert not any(one._kept for layer in kept for one in layer._maps)
    assert once == fused_once == kept_once
    down = model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight.numel()
    assert pefts - fused == 2 * 2 * 2 * tokens * down  # in two layers: the products before which it ends
    assert 0 < with_products < fused / 3


def test_a_run_has_the_same_losses_with_and_without_and_says_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sft, "fused_layers", partial(fused_layers, devices=("cpu",)))
    losses, lines = [], []
    for on in (False, True):
        trainer = trainer_for(
            tmp_path / str(on), model=adapted(), fused_lora=on, max_steps=3, isolation_check=False,
            gradient_accumulation_steps=2, learning_rate=0.05,
        )  # fmt: skip
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        lines.append([check.function for check in trainer.startup.kernels])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[0])) == 3
    assert ["lora" in functions for functions in lines] == [False, True]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, ()),
        ({"fused_lora": False}, ("lora",)),
        ({"fused_lora": False, "fused_layers_exclude": ["swiglu"]}, ("swiglu", "lora")),
    ],
    ids=["default", "off", "others"],
)
def test_adapters_are_fused_unless_one_says_no(tmp_path, given, left):
    assert settings(tmp_path, **given).unfused_layers == left


def test_adapters_that_fsdp2_has_sharded_are_fused_in_bf16(tmp_path):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = adapted("plain")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh, policy = dist.init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        layers = model.base_model.model.model.layers
        for part in (*layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        ran = []
        with FUSED(model, dtype=torch.bfloat16) as lines:
            adapter = layers[0].mlp.down_proj
            adapter.register_forward_hook(lambda module, args, output: ran.append(type(output.grad_fn).__name__))
            model(input_ids=IDS, labels=IDS).loss.backward()
            found = adapter.lora_A["default"].weight.grad.full_tensor()
    finally:
        dist.destroy_process_group()
    assert lines
    assert ran[0] == "_OutputBackward"
    assert found.abs().max() > 0
