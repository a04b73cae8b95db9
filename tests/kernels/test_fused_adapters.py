"""Fused layers of a model that peft has wrapped: the same ones are found, and adapters keep their gradients."""

import pytest
import torch
from fake_kernels import forget_fakes, model_bound_to
from fused_fakes import write_fused_fakes
from kernel_models import random_documents, summed_loss

from hf_speedkit.kernels.fused_layers import PARTS, fused_layer_checks, fused_layers


@pytest.fixture(autouse=True)
def _no_fake_stays_behind():
    yield
    forget_fakes()


def adapter_gradients(model):
    (document,) = random_documents([40])
    model.zero_grad()
    summed_loss(model, {"input_ids": document[None], "use_cache": False}, document[None]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_every_part_is_fused_below_an_adapter(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft", reason="pip install peft")
    write_fused_fakes(tmp_path)
    model = peft.get_peft_model(
        model_bound_to(tmp_path, monkeypatch),
        peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0),
    )
    for parameter in model.parameters():  # of an adapter that is zero no gradient reaches its first matrix
        torch.nn.init.normal_(parameter, std=0.3)
    before = adapter_gradients(model)
    with fused_layers(model, devices=("cpu",)) as lines:
        after = adapter_gradients(model)
        checks = {check.function: (check.layers, check.layers_total) for check in fused_layer_checks(model)}
    assert {line.partition(":")[0] for line in lines} == set(PARTS)
    assert checks == {
        "split_convolution": (3, 3),
        "rms_norm": (11, 11),
        "gated_norm": (3, 3),
        "swiglu": (4, 4),
        "qk_rotary": (1, 1),
        "lora": (31, 31),
    }
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


def test_an_mlp_of_packed_weights_is_compared_at_its_true_width(tmp_path, monkeypatch):
    # bitsandbytes keeps [out x in / 2, 1] bytes: only out_features says how wide the layer is.
    write_fused_fakes(tmp_path)
    model = model_bound_to(tmp_path, monkeypatch)
    for layer in model.model.layers:
        up = layer.mlp.up_proj
        up.weight = torch.nn.Parameter(torch.zeros(up.weight.numel() // 2, 1), requires_grad=False)
    with fused_layers(model, devices=("cpu",)) as lines:
        assert any(line.startswith("swiglu") for line in lines)
        from hf_speedkit.kernels import fused_parity

        inputs = fused_parity._inputs(
            layer.mlp, "swiglu", 3, torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0)
        )
    assert inputs[0].shape == (1, 3, 2 * up.out_features)
