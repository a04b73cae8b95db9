"""Whatever numbers a log holds, the page is whole and its drawings hold numbers only."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import step_logs as logs
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speedkit.cli.report_page import page
from hf_speedkit.core.records import to_dict
from hf_speedkit.core.run_report import run_report
from hf_speedkit.core.step_log import parse_step_log

NUMBERS = st.one_of(st.floats(), st.sampled_from([0, 5e-324, 1e-310, 1e17, 1e300, -1.0, -0.0]), st.integers(0, 10**20))
KEYS = ["loss", "speed/real_tokens_per_second", "speed/slots_per_second", "speed/gpu_utilization", "speed/step_time_s",
        "speed/host_time_s", "speed/mfu", "speed/steady_steps", "speed/gpu_memory_gib", "speed/device_time_s",
        "speed/total_slots", "speed/slots_per_second_per_device", "speed/part_data_wait_s", "speed/part_host_only_s",
        "speed/part_device_only_s", "speed/ofu", "speed/gpu_sm_clock_mhz", "speed/data_wait_s", "speed/launches",
        "speed/device_wait_s", "speed/eval_time_s"]  # fmt: skip
COORDINATES = re.compile(r"[MHVZvhz \d.-]*")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(KEYS), NUMBERS), max_size=8),
    st.lists(st.sampled_from([0.0, 5e-324, 0.5, 1e9, 1e17]), min_size=4, max_size=4),
)
def test_any_numbers_make_a_page_of_finite_coordinates(changes, seconds):
    windows = [logs.window(number) for number in range(1, 5)]
    for index, key, value in changes:
        windows[index]["metrics"][key] = value
    lines = [logs.session(), *(logs.step(number, time) for number, time in enumerate(seconds, start=1)), *windows]
    report = run_report(parse_step_log(map(json.dumps, lines)), name="run")
    json.dumps(to_dict(report), allow_nan=False)  # what --json prints
    for text in (page([report], []), page([report, report], [])):
        assert not re.search(r"\b(nan|inf)\b", text)
        for svg in re.findall(r"<svg.*?</svg>", text):
            for node in ElementTree.fromstring(svg).iter():
                assert COORDINATES.fullmatch(node.get("d") or "")
                assert float(node.get("width") or 0) >= 0
                assert float(node.get("height") or 0) >= 0
