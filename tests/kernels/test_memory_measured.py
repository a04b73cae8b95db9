"""The memory plan against torch's own peaks on H200s, from committed results: within 10 %."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from geometry import qwen27b_config

from hf_speedkit.core.memory import GIB
from hf_speedkit.core.memory_choice import RESERVE_SHARE, context_gib
from hf_speedkit.core.memory_plan import plan_memory
from hf_speedkit.core.memory_sizes import PURE_BF16, MemoryJob
from hf_speedkit.kernels.memory_trace import TraceSettings, trace_memory

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DOCUMENT = Path(__file__).parents[2] / "docs" / "memory.md"
# Runs of before the fused norms and SwiGLU (their start-up has no such part) held what transformers' own keep; all ran
# on TRL's head.
RUNS = [
    ("first_look/2026-11-29_h200_27b_cut_8_layers_checkpointing.json", False),
    ("first_look/2026-11-29_h200_27b_cut_8_layers_no_checkpointing.json", False),
    ("first_look/2026-11-29_h200_27b_cut_8_layers_rung_trl.json", False),
    ("first_look/2026-11-29_h200_27b_cut_8_layers_rung_speedkit.json", True),
    ("2026-11-29_2xh200_27b_fsdp2_first_run.json", False),
]
SHARE = 0.10
"""What the plan is held to; on these five runs it is within 1 %, on the one with some layers unchecked 5 % short."""


@pytest.fixture(scope="module")
def traced():
    """Sizes by number of layers and fused or not, each traced once."""
    known = {}

    def sizes(layers, fused):
        if (layers, fused) not in known:
            known[layers, fused] = trace_memory(qwen27b_config(layers), TraceSettings(tokens=8192, fused=fused))
        return known[layers, fused]

    return sizes


@pytest.mark.parametrize(("file", "fused"), RUNS, ids=[file for file, _ in RUNS])
def test_the_plan_is_within_ten_percent_of_the_measured_peak(file, fused, traced):
    run = json.loads((RESULTS / file).read_text())
    settings = run["settings"]
    assert ("fused layers" in (run.get("startup_s") or {})) is fused
    assert settings["tokens_per_batch"] == 8192
    model = traced(settings["layers"], fused)
    assert model.parameters == run["parameters"]
    unchecked = 0 if settings["checkpointing"] else settings["layers"]
    plan = plan_memory(
        model, PURE_BF16, MemoryJob(gpus=run["world_size"], unchecked=unchecked, head="trl", zero_copy=False)
    )
    assert plan.allocated / GIB == pytest.approx(run["peak_memory_gib"], rel=SHARE)
    assert f"| {plan.allocated / GIB:.2f} | {run['peak_memory_gib']:.2f} | `{file}` |" in DOCUMENT.read_text()
    # the allocator's reserve and the context, which "fits" leaves room for, were never more than planned for
    reserved = run.get("peak_reserved_gib") or run["reserved_memory_gib"]
    assert reserved <= run["peak_memory_gib"] * (1 + RESERVE_SHARE)
    outside = run["log"][-1]["speed/gpu_memory_gib"] - reserved
    assert 0 < outside <= context_gib(run["world_size"])


@pytest.mark.parametrize(
    ("file", "floors", "zero_copy"),
    [
        ("steps/2026-11-29_2xh200_27b-64_speedkit.json", "2026-11-29_2xh200_27b_floors.json", False),
        ("steps/2026-11-30_2xh200_27b-64_speedkit.json", "2026-11-30_2xh200_27b_floors.json", False),
        ("steps/2026-11-30_2xh200_27b-64_products.json", "2026-11-30_2xh200_27b_products_floors.json", True),
        ("ladder/27b-64_speedkit_rep1.json", "2026-11-30_2xh200_27b_speedkit_floors.json", True),
    ],
)
def test_the_plan_of_the_whole_27b_is_within_ten_percent_where_some_layers_keep_their_activations(
    traced, file, floors, zero_copy
):
    run = json.loads((RESULTS / file).read_text())
    floors = json.loads((RESULTS / floors).read_text())
    eight = traced(8, True)
    model = replace(eight, layers=eight.layers * 8)
    assert model.parameters == run["parameters"]
    unchecked = len(model.layers) - floors["checkpointed_layers"]
    products = floors.get("layers_with_products", 0)
    job = MemoryJob(gpus=run["world_size"], unchecked=unchecked, with_products=products, zero_copy=zero_copy)
    plan = plan_memory(model, PURE_BF16, job)
    assert 0 < unchecked + products < len(model.layers)
    assert plan.allocated / GIB == pytest.approx(run["peak_memory_gib"], rel=SHARE)
    assert f"| {plan.allocated / GIB:.2f} | {run['peak_memory_gib']:.2f} | `{file}` |" in DOCUMENT.read_text()


def test_the_ten_percent_would_see_a_layers_activations_counted_twice_or_its_head_left_out(traced):
    run = json.loads((RESULTS / RUNS[1][0]).read_text())
    plan = plan_memory(traced(8, False), PURE_BF16, MemoryJob(unchecked=8, head="trl"))
    for wrong in (plan.allocated + plan.parts["activations"], plan.allocated - plan.parts["loss head"]):
        assert wrong / GIB != pytest.approx(run["peak_memory_gib"], rel=SHARE)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*memory_plan*.json")), ids=lambda path: path.name)
def test_committed_comparisons_hold_in_four_settings_or_more(path):
    """Files that benchmarks/memory_plan.py wrote; a setting that failed there says so and counts for nothing."""
    result = json.loads(path.read_text())
    ratios = {row["setting"]: row["planned_over_measured"] for row in result["rows"] if "error" not in row}
    assert len(ratios) >= 4
    assert all(ratio == pytest.approx(1, abs=result["target"]) for ratio in ratios.values()), ratios
