"""What a window's metrics say: the limit of the step by its parts, and FLOPs that do not fit."""

import pytest

from hf_speedkit.core.records import Severity
from hf_speedkit.core.window_findings import flop_gap, step_limit, window_findings


def parts(data_wait=0.0, host_only=0.0, overlapped=0.0, device_only=0.0, exposed_comm=0.0):
    return {f"speed/part_{name}_s": value for name, value in locals().items()}


@pytest.mark.parametrize(
    ("metrics", "rule", "number"),
    [
        (parts(data_wait=0.3, overlapped=0.7), "input_bound", "30%"),
        (parts(host_only=0.6, overlapped=0.4), "host_bound", "60%"),
        (parts(exposed_comm=0.2, device_only=0.8), "communication_bound", "20%"),
        (parts(overlapped=0.3, device_only=0.65, host_only=0.05), "device_bound", "95%"),
        (parts(data_wait=0.2, host_only=0.3, overlapped=0.5), "host_bound", "30%"),  # the larger of the two
        ({"speed/part_data_wait_s": 0.5, "speed/part_host_only_s": 0.5}, "input_bound", "50%"),
    ],
)
def test_the_largest_part_that_is_no_computing_limits_the_step(metrics, rule, number):
    (finding,) = window_findings(metrics)
    assert finding.rule == rule
    assert number in finding.message
    assert finding.evidence[0].startswith("step 1,000.0 ms: ")
    assert (finding.severity is Severity.NOTE) is (rule == "device_bound")


def test_on_a_cpu_the_host_computes_and_that_is_no_fault():
    finding = step_limit({"speed/part_data_wait_s": 0.01, "speed/part_host_only_s": 0.99})
    assert (finding.rule, finding.severity) == ("host_computes", Severity.NOTE)


def test_between_counted_steps_the_devices_clock_still_tells_waiting_for_data():
    window = {"speed/step_time_s": 1.0, "speed/device_time_s": 0.7, "speed/data_wait_s": 0.4}
    assert step_limit(window).rule == "input_bound"
    assert "30%" in step_limit(window).message
    # The host waited as long, but under a busy device: nothing is lost, and what limits the step is not known here.
    assert step_limit({**window, "speed/device_time_s": 0.99}) is None
    assert step_limit({}) is None
    # A damaged log divides nothing by 0 and has no share beyond 100 %.
    assert step_limit(dict.fromkeys(window, 0.0)) is None
    assert "100%" in step_limit({**window, "speed/step_time_s": 5e-324, "speed/device_time_s": -1.0}).message
    assert "100%" in step_limit(parts(data_wait=1.0, overlapped=-0.99)).message
    assert step_limit({"speed/part_device_only_s": 1.0}).rule == "device_bound"
    assert step_limit({"speed/part_host_only_s": 5e-324}).rule == "host_computes"


FIT = {"speed/mfu": 40.0, "speed/ofu": 43.0, "speed/excluded_steps": 0.0}


@pytest.mark.parametrize(
    ("changed", "flagged"),
    [
        ({}, False),
        ({"speed/ofu": 50.5}, True),
        ({"speed/ofu": 29.5}, True),
        ({"speed/ofu": 52.0, "speed/hfu": 50.0}, False),  # recompute is work to the counter
        ({"speed/ofu": 60.0, "speed/excluded_steps": 1.0}, False),  # the counter saw steps that the rate did not
        ({"speed/ofu": 60.0, "speed/eval_time_s": 5.0}, False),
    ],
)
def test_a_gap_of_ten_points_between_formula_and_counter_is_flagged(changed, flagged):
    finding = flop_gap({**FIT, **changed})
    assert (finding is not None) is flagged
    if finding is not None:
        assert finding.rule == "flop_gap"
        assert "40.0 %" in finding.message


@pytest.mark.parametrize(("share", "said"), [(0.0, True), (0.01, False), (None, False)])
def test_v31_a_window_without_targets_is_a_problem_and_not_a_perfect_loss(share, said):
    findings = window_findings({} if share is None else {"speed/target_share": share})
    assert [finding.rule for finding in findings] == (["no_targets"] if said else [])


@pytest.mark.parametrize(("metrics", "said"), [({"mfu": 99.0, "hfu": 101.0}, "HFU"), ({"mfu": 140.0}, "MFU"), ({}, "")])
def test_v71_more_than_a_device_can_compute_is_said_to_be_wrong(metrics, said):
    findings = window_findings({f"speed/{name}": value for name, value in metrics.items()})
    assert [finding.message.split()[0] for finding in findings] == said.split()
