"""Drawn weights on a GPU: the same wherever they are kept, and the 27B geometry in seconds."""

import time

import pytest
import torch
from geometry import qwen27b_config
from support import tiny_hybrid

from hf_speedkit.trainer.weights import random_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def test_weights_moved_to_the_cpu_are_those_that_stay_on_the_gpu():
    config = tiny_hybrid().config
    stay = random_model(config, device="cuda", dtype=torch.bfloat16, seed=2)
    moved = random_model(config, device="cuda", dtype=torch.bfloat16, seed=2, largest_share=0.0)
    assert {p.device.type for p in stay.parameters()} == {"cuda"}
    assert {p.device.type for p in moved.parameters()} == {"cpu"}
    assert all(torch.equal(a.cpu(), b) for a, b in zip(stay.parameters(), moved.parameters(), strict=True))
    assert torch.equal(stay.model.rotary_emb.inv_freq.cpu(), tiny_hybrid().model.rotary_emb.inv_freq)


def test_eight_layers_of_the_27b_geometry_are_drawn_in_seconds():
    torch.zeros(1, device="cuda")  # the context is made before the clock starts
    began = time.perf_counter()
    model = random_model(qwen27b_config(8), device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 20
    assert model.num_parameters() == 5_586_951_488
    spread = model.model.layers[0].mlp.up_proj.weight.float().std().item()
    assert spread == pytest.approx(model.config.initializer_range, rel=0.01)
