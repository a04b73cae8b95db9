"""What the trainer puts in place on the layers that it trains, and what not."""

import functools
from contextlib import ExitStack

import pytest
import torch
from support import tiny_hybrid, tiny_llama
from test_sft import trainer_for

from hf_speedkit.kernels.fused_layers import fused_layer_checks, fused_layers
from hf_speedkit.trainer import sft
from hf_speedkit.trainer.step import packed_layers


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


@pytest.mark.parametrize(("gpus", "fused"), [(1, 1), (2, 0)])
def test_layers_that_dataparallel_would_copy_keep_their_own_forward(tmp_path, monkeypatch, caplog, gpus, fused):
    """A replica takes over what is bound on a layer, still bound to the layer and the weights of the first GPU."""
    layer = tiny_hybrid().model.layers[3].self_attn
    layer.__dict__["forward"] = layer.forward
    assert layer._replicate_for_data_parallel().forward.__self__ is layer
    monkeypatch.setattr(sft, "fused_layers", functools.partial(fused_layers, devices=("cpu",)))
    trainer = trainer_for(tmp_path, packing=False)
    trainer.args._n_gpu = gpus
    with ExitStack() as trainer._running:
        trainer.prepare_layers()
        assert len(fused_layer_checks(trainer.model)) == fused
    assert ("by DataParallel" in caplog.text) == (gpus > 1)
