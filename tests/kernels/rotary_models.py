"""Small models of attention layers whose norms and rotation are fused."""

import torch
import transformers
from kernel_models import COMMON, packed_row, random_documents, summed_loss, tiny_model

from hf_speedkit.kernels.fused_layers import PARTS, fused_layers

FULL = ("full_attention",) * 2


def small(family):
    """Two attention layers whose norms let no mistake through, with a gate (qwen3_5) or without one."""
    if family == "qwen3_5":
        model = tiny_model("qwen3_5", num_hidden_layers=2, layer_types=list(FULL))
    else:
        config = getattr(transformers, f"{family}Config")(**{**COMMON, "num_hidden_layers": 2})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def fused(model, **kwargs):
    others = set(PARTS) - {"qk_rotary"}
    return fused_layers(model, exclude=others, devices=("cpu",), tokens_per_batch=50, **kwargs)


def loss_and_gradients(model):
    inputs, labels = packed_row(random_documents([17, 1, 9]), slots=32)
    model.zero_grad()
    loss = summed_loss(model, inputs, labels)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])
