"""Packed attention is chosen by what the layers compute in, not by what their weights are stored in."""

import pytest
import torch
from support import tiny_llama

from hf_speedkit.trainer import packed_layers


@pytest.mark.parametrize(
    ("given", "asked"), [(None, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=["weights", "mixed precision"]
)
def test_fp32_weights_under_mixed_precision_are_asked_about_in_bf16(monkeypatch, given, asked):
    seen = []

    def reason(config, *, dtype, device, **flags):
        seen.append(dtype)
        return

    monkeypatch.setattr(packed_layers, "unsupported_reason", reason)
    model = tiny_llama()
    model.set_attn_implementation("sdpa")
    settings = {"device": torch.device("cpu"), "references": False, "attention": "auto", "dtype": given}
    with packed_layers.packed_layers(model, **settings) as changed:
        assert changed == ("attention: sdpa -> speedkit_varlen",)
    assert seen == [asked]
