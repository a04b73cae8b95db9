"""From the lines of a step log to what a page shows: damage, resumed runs, gaps, marks, rates."""

from __future__ import annotations

import json

import pytest
import step_logs as logs
from hypothesis import given
from hypothesis import strategies as st

from hf_speedkit.core.errors import StepLogError
from hf_speedkit.core.run_report import PartsLevel, merged_parts, run_report
from hf_speedkit.core.step_log import FORMAT, parse_step_log
from hf_speedkit.core.timeline import step_picture
from hf_speedkit.core.trace_records import Timeline


def parse(lines, tail=""):
    return parse_step_log([*(json.dumps(line) + "\n" for line in lines), *([tail] if tail else [])])


def report(lines):
    return run_report(parse(lines), name="run")


def test_reader_and_writer_speak_of_the_same_format():
    from hf_speedkit.trainer import sinks

    assert sinks.FORMAT == FORMAT


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "is empty"),
        ([logs.session()], "holds no steps"),
        ([logs.step(1)], "not a step log"),
        ([logs.session(format=2), logs.step(1)], "format '2'"),
        ([logs.session(format="<b>"), logs.step(1)], "format '<b>'"),
        ([{"hello": 1}], "not a step log"),
    ],
)
def test_a_log_that_cannot_be_shown_says_why_and_what_to_do(lines, words):
    with pytest.raises(StepLogError, match=words) as caught:
        parse(lines)
    assert caught.value.mend


def test_a_half_written_last_line_is_left_out_and_told():
    log = parse(logs.run(10), tail='{"kind": "step", "step": 11, "tok')
    assert len(log.steps) == 10
    assert log.notes == ("the last line is cut off and left out: the run was stopped while it wrote, or still writes",)


def test_damaged_lines_are_counted_and_the_rest_is_read():
    lines = [json.dumps(line) + "\n" for line in logs.run(10)]
    lines.insert(3, "\x00\x01\n")
    lines.insert(5, json.dumps(logs.step(4, "fast")) + "\n")
    lines.insert(6, "[" * 100_000 + "\n")
    log = parse_step_log(lines)
    assert len(log.steps) == 10
    assert log.notes == ("3 lines are left out, which could not be read: 4, 6, 7",)


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = ["step", "tokens", "step_time_s", "metrics", "environment", "excluded", "host_time_s", "kind"]


@given(ANYTHING, st.sampled_from(FIELDS))
def test_any_value_in_any_field_gives_a_report_or_an_error_that_says_why(value, field):
    lines = [{**line, field: value} if index % 3 == 0 and field in line else line
             for index, line in enumerate(logs.run(10))]  # fmt: skip
    try:
        shown = report(lines)
    except StepLogError:
        return
    json.dumps(shown.rates, allow_nan=False)


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "1e400", "1" + "0" * 400, "true", '"9"', "null"])
def test_numbers_that_are_none_are_not_measured(bad):
    line = json.dumps(logs.window(5, utilization=None)).replace('"loss": 3.95', f'"loss": {bad}')
    log = parse_step_log([json.dumps(logs.session()), json.dumps(logs.step(5)), line])
    assert "loss" not in log.windows[0].metrics


def test_the_later_session_of_a_resumed_run_holds():
    first = logs.run(20, rate=3600)
    again = logs.run(20, rate=1800, start=10)
    shown = report([*first, *again])
    assert (shown.steps, shown.first_step, shown.last_step) == (30, 1, 30)
    assert shown.resumed == ((pytest.approx(5.0), 10),)  # ten steps of 0.5 s
    assert shown.duration_s == pytest.approx(5 + 20 * 1.0)
    assert [level.value for level in shown.curves["real_tokens"]] == [3600] * 2 + [1800] * 4
    assert shown.notes == ("10 steps are left out, run again by a later session; the later run is shown",)
    assert shown.excluded_steps == {"warm-up": 2}


def test_a_run_begun_afresh_in_the_same_file_replaces_the_old_one():
    shown = report([*logs.run(20), *logs.run(5, rate=1800)])
    assert (shown.steps, shown.resumed) == (5, ())


def test_lost_steps_are_told():
    lines = [line for line in logs.run(20) if not 6 <= line["step"] <= 10 or line["kind"] == "session"]
    assert report(lines).notes == ("5 steps are missing; the time is not known",)


def test_a_window_without_a_rate_is_a_gap_of_its_own_time():
    lines = [logs.window(10, None) if (line["kind"], line["step"]) == ("window", 10) else line for line in logs.run(15)]
    levels = report(lines).curves["real_tokens"]
    assert [(level.start, level.end, level.value) for level in levels] == [
        (0, 2.5, 3600), (2.5, 5, None), (5, 7.5, 3600)]  # fmt: skip


def test_a_curve_never_measured_is_absent():
    lines = [logs.window(line["step"], utilization=None) if line["kind"] == "window" else line for line in logs.run(10)]
    curves = report(lines).curves
    assert "utilization" not in curves
    assert "power" not in curves
    assert "real_tokens" in curves


def test_pauses_take_elapsed_time_and_no_training_time():
    lines = [{**line, "eval_time_s": 4.0, "save_time_s": 2.0} if (line["kind"], line["step"]) == ("step", 6) else line
             for line in logs.run(10)]  # fmt: skip
    shown = report(lines)
    assert shown.training_time_s == pytest.approx(5.0)
    assert shown.duration_s == pytest.approx(11.0)
    assert {(mark.what, mark.start, mark.end) for mark in shown.pauses} == {
        ("evaluation", 2.5, 6.5), ("saving", 6.5, 8.5)}  # fmt: skip
    assert shown.curves["real_tokens"][1].start == pytest.approx(8.5)


def test_excluded_steps_that_follow_one_another_are_one_mark():
    lines = [{**line, "excluded": "traced"} if line["kind"] == "step" and line["step"] in (4, 5, 9) else line
             for line in logs.run(10)]  # fmt: skip
    assert [(mark.what, mark.start, mark.end) for mark in report(lines).excluded] == [
        ("warm-up", 0, 0.5), ("traced", 1.5, 2.5), ("traced", 4, 4.5)]  # fmt: skip


def test_the_runs_rate_is_tokens_over_time_and_no_mean_of_rates():
    lines = [logs.session(), *(logs.step(i, 0.5) for i in range(1, 6)), logs.window(5, 3600.0),
             *(logs.step(i, 2.0) for i in range(6, 11)), logs.window(10, 900.0)]  # fmt: skip
    # 5 steps of 0.5 s at 3,600/s and 5 of 2 s at 900/s: 18,000 tokens in 12.5 s.
    assert report(lines).rates["speed/real_tokens_per_second"] == pytest.approx(18_000 / 12.5)
    assert report(lines).world_size == 2


def test_a_run_that_goes_on_with_another_number_of_ranks_says_so():
    four = {"speed/slots_per_second": 8000.0, "speed/slots_per_second_per_device": 2000.0}
    alone = logs.window(15)
    del alone["metrics"]["speed/slots_per_second_per_device"]
    lines = [*logs.run(5), *logs.run(5, start=5)[:-1], logs.window(10, **four), *logs.run(5, start=10)[:-1], alone]
    shown = report(lines)
    assert shown.world_size == 1
    assert shown.notes == ("the number of ranks changed: 2, then 4, then 1; rates per device are means over them",)


def test_parts_add_up_to_the_step_and_rest_is_never_negative():
    (first, *_) = report(logs.run(10)).parts
    assert sum(first.parts) == pytest.approx(0.5)
    lines = [logs.window(line["step"], **{"speed/host_time_s": 9.0}) if line["kind"] == "window" else line
             for line in logs.run(5)]  # fmt: skip
    assert report(lines).parts[0].parts[3] == 0.0


def test_bars_put_together_are_means_by_time_and_keep_gaps():
    levels = [PartsLevel(0, 1, (1.0,)), PartsLevel(1, 4, (2.0,)), PartsLevel(4, 5, None), PartsLevel(5, 6, (5.0,))]
    assert merged_parts(levels, 2) == (
        PartsLevel(0, 4, (1.75,)), PartsLevel(4, 5, None), PartsLevel(5, 6, (5.0,)))  # fmt: skip
    assert merged_parts(levels, 4) == tuple(levels)


def test_without_windows_totals_are_of_rank_0_and_say_so():
    shown = report([line for line in logs.run(10) if line["kind"] != "window"])
    assert shown.tokens_of_rank_0
    assert shown.tokens.real == 9_000
    assert shown.notes == ("no logging step was reached: rates of all ranks are not known",)


def test_the_picture_of_a_step_stacks_groups_and_leaves_idle_time_open():
    timeline = Timeline(device="0", bin_ns=10, groups={"copy": (5, 0, 0, 0), "GEMM": (5, 10, 0, 2)})
    picture = step_picture(timeline, most_bins=4)
    assert picture.bars == {"GEMM": ((0, 0.0, 0.5), (1, 0.0, 1.0), (3, 0.0, 0.2)), "copy": ((0, 0.5, 1.0),)}
    assert (picture.idle_ns, picture.top, picture.totals) == (18, 1.0, {"GEMM": 17, "copy": 5})
    coarse = step_picture(timeline, most_bins=2)
    assert (coarse.bin_ns, coarse.idle_ns) == (20, 18)
    assert coarse.bars["GEMM"] == ((0, 0.0, 0.75), (1, 0.0, 0.1))


def test_two_streams_at_once_make_a_picture_higher_than_one_device():
    picture = step_picture(Timeline(device="0", bin_ns=10, groups={"a": (10,), "b": (6,)}), most_bins=300)
    assert (picture.top, picture.idle_ns) == (1.6, 0)
