"""On a real GPU: the plan is within 10 % of torch's own peak (benchmarks/memory_plan.py has the 8-layer cut)."""

import memory_plan
import pytest
from geometry import qwen27b_config

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]


@pytest.mark.parametrize("name", ["pure bf16, checkpointing", "pure bf16, no checkpointing"])
def test_the_plan_is_within_ten_percent_of_the_peak_of_four_layers(name):
    row = memory_plan.compare(name, qwen27b_config(4, vocab_size=65_536))
    assert row["planned_over_measured"] == pytest.approx(1, abs=memory_plan.TARGET), row
    assert row["held_before_gib"] < 0.5
