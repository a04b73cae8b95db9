"""What limited a run, window by window: a counted step speaks for the windows up to the next one."""

from hf_speedkit.core.run_limits import run_limits
from hf_speedkit.core.step_log import LoggedWindow

PARTS = ("data_wait", "host_only", "overlapped", "device_only", "exposed_comm")
WAITS = {"speed/step_time_s": 1.0, "speed/device_time_s": 0.5, "speed/data_wait_s": 0.5}


def counted(**parts):
    return {f"speed/part_{name}_s": parts.get(name, 0.0) for name in PARTS} | {"speed/launches": 100.0}


def limits_of(*windows):
    return run_limits([LoggedWindow(step=number, metrics=metrics) for number, metrics in enumerate(windows, start=1)])


def test_a_counted_step_speaks_for_the_windows_up_to_the_next_one():
    found = limits_of({}, counted(host_only=0.5, overlapped=0.5), {}, counted(overlapped=1.0), {}, {})
    assert found.windows == {"host_bound": 2, "device_bound": 3}  # the first window is not known
    assert found.last.rule == "device_bound"
    assert found.counted["speed/launches"] == 100


def test_waiting_for_data_shows_in_the_window_in_which_it_happens():
    found = limits_of(counted(overlapped=1.0), WAITS, {})
    assert found.windows == {"device_bound": 2, "input_bound": 1}


def test_a_run_that_says_nothing_has_no_limit():
    found = limits_of({}, {"loss": 1.0})
    assert (found.windows, found.last, found.flop_gap, found.counted) == ({}, None, None, {})
