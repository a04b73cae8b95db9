"""Counting a step: events -> numbers from data, and the counter with a profiler that writes what a test gives it."""

import pytest
from trace_files import AUTOGRAD, DATA, FakeProfiler, TraceFile

from hf_speedkit.core.step_parts import PARTS
from hf_speedkit.measure.launches import HostMarks, LaunchCounter, step_activity
from hf_speedkit.measure.trace_columns import read_columns
from hf_speedkit.measure.trace_reader import TraceStream

US = 1000
RECORD = "cudaEventRecordWithFlags"


def activity_of(trace, path, *, start=0, begin=0, end=1000, skew_us=0):
    """The activity of a step whose marks lie in the trace at `start` and `end`, in microseconds of its clock."""
    columns = read_columns(TraceStream(trace.write(path / "step.json")))
    shifted = [(moment + skew_us) * US for moment in (start, begin, end)]
    return step_activity(columns, HostMarks(start=shifted[0], begin=shifted[1], end=shifted[2]))


def marked(end=1000):
    """A trace with the two marks: their calls end where the host reads its clock."""
    return TraceFile(schemaVersion=1).call(RECORD, -3, 3).call(RECORD, end - 3, 3)


def parts_us(activity):
    return {name: round(getattr(activity, f"{name}_s") * 1e6) for name in PARTS}


def test_the_five_parts_of_a_step_add_up_to_its_time(tmp_path):
    trace = (
        marked()
        .launch(210, "gemm", 300, 200)  # idle until 200 for data, 100 more for the host; then overlapped with issuing
        .launch(400, "gemm", 500, 300)
        .launch(450, "ncclDevKernel_AllReduce", 700, 200, stream=9)  # 100 hidden, 100 exposed
        .call("cudaStreamSynchronize", 500, 400)  # the host waits from 500 to 900
        .launch(950, "adam", 960, 40, call="cudaLaunchKernel")
    )
    activity = activity_of(trace, tmp_path, begin=200)
    assert parts_us(activity) == {
        "data_wait": 200,
        "host_only": 160,  # 200 to 300 and 900 to 960
        "overlapped": 240,  # 300 to 500 and 960 to 1,000
        "device_only": 300,
        "exposed_comm": 100,
    }
    assert sum(parts_us(activity).values()) == round(activity.step_time_s * 1e6) == 1000
    assert (activity.kernels, activity.memcpy, activity.memset, activity.launch_calls) == (4, 0, 0, 4)
    assert activity.host_wait_s == pytest.approx(400e-6)
    assert activity.communication_s == pytest.approx(200e-6)
    assert activity.device_busy_s == pytest.approx(640e-6)


def test_a_wait_for_data_under_a_busy_device_costs_nothing(tmp_path):
    trace = marked().device("gemm", -500, 1000).launch(650, "gemm", 660, 340)  # the first was launched before
    parts = parts_us(activity_of(trace, tmp_path, begin=600))
    # The device finished the step before at 500: this one's time begins there.
    assert parts == {"data_wait": 100, "host_only": 60, "overlapped": 340, "device_only": 0, "exposed_comm": 0}


def test_a_step_lasts_until_the_device_is_done_with_it(tmp_path):
    trace = marked().launch(10, "gemm", 20, 3000)
    activity = activity_of(trace, tmp_path)
    assert activity.step_time_s == pytest.approx(3020e-6)
    assert parts_us(activity)["device_only"] == 2020  # the host had issued everything at 1,000


def test_work_that_an_earlier_step_launched_is_not_counted(tmp_path):
    trace = (
        marked().device("gemm", -100, 300).launch(-50, "gemm", 300, 100).launch(100, "Memset", 500, 1, cat="gpu_memset")
    )
    activity = activity_of(trace, tmp_path)
    assert (activity.kernels, activity.memset, activity.launches) == (0, 1, 1)


def test_a_graph_starts_many_kernels_with_one_call(tmp_path):
    trace = marked().launch(100, "gemm", 200, 10, call="cudaGraphLaunch")
    for at in (220, 240):
        trace.device("gemm", at, 10, correlation=1)
    activity = activity_of(trace, tmp_path)
    assert (activity.launch_calls, activity.kernels) == (1, 3)


def test_a_launch_into_a_full_queue_is_a_wait_and_a_slow_one_on_an_idle_device_is_not(tmp_path):
    full = marked().launch(0, "gemm", 10, 900).launch(100, "gemm", 910, 50, call_dur=700)
    assert activity_of(full, tmp_path).host_wait_s == pytest.approx(700e-6)
    loading = marked().launch(100, "gemm", 900, 50, call_dur=700)
    assert activity_of(loading, tmp_path).host_wait_s == 0


def test_the_profilers_own_wait_behind_the_step_is_none_of_the_steps(tmp_path):
    trace = marked().launch(10, "gemm", 20, 3000).call("cudaDeviceSynchronize", 1100, 1920)
    activity = activity_of(trace, tmp_path)
    assert activity.host_wait_s == 0
    assert parts_us(activity)["device_only"] == 2020


def test_clocks_need_not_agree_in_their_zero_but_in_their_pace(tmp_path):
    trace = marked().launch(100, "gemm", 200, 100)
    assert activity_of(trace, tmp_path, skew_us=10**9).step_time_s == pytest.approx(1000e-6)
    stretched = activity_of(trace, tmp_path, end=5000)
    assert stretched.step_time_s is None
    assert stretched.kernels == 1
    unmarked = TraceFile(schemaVersion=1).launch(100, "gemm", 200, 100)
    assert activity_of(unmarked, tmp_path).overlapped_s is None


def test_backward_on_autograds_thread_is_work_of_the_host(tmp_path):
    trace = marked().launch(100, "gemm", 150, 850, where=AUTOGRAD)
    assert parts_us(activity_of(trace, tmp_path))["overlapped"] == 850


def test_a_recording_without_device_work_says_nothing(tmp_path):
    assert activity_of(marked().call("cudaLaunchKernel", 10, 2, correlation=7), tmp_path) is None


def test_a_real_step_of_one_h200_counts_what_its_trace_holds():
    columns = read_columns(TraceStream(DATA / "trace_h200_speedkit.json.gz"))
    activity = step_activity(columns, HostMarks(start=0, begin=0, end=1))
    launched = columns.table("kernel"), columns.table("memcpy"), columns.table("memset")
    called = {number for table in launched for number in table.correlation.tolist()} & set(
        columns.table("call").correlation.tolist()
    )
    assert activity.launch_calls == len(called)
    assert activity.launches == sum(sum(n in called for n in table.correlation.tolist()) for table in launched)
    assert activity.host_wait_s > 0  # five cudaStreamSynchronize


class Clock:
    """Microseconds that a test sets, told in nanoseconds."""

    at = 0

    def __call__(self):
        return self.at * US


def counter_of(profiler, clock):
    return LaunchCounter(profiler=lambda: profiler, mark=lambda: None, now_ns=clock)


def test_a_counter_counts_one_step_behind_a_warm_up_step():
    clock = Clock()
    profiler = FakeProfiler(marked().launch(300, "gemm", 400, 500))
    counter = counter_of(profiler, clock)
    assert counter.warm_up()
    assert counter.warm
    assert not counter.counting
    counter.start()
    clock.at = 200
    counter.begin()
    clock.at = 1000
    activity = counter.stop()
    assert profiler.done == ["prepare", "start", "stop"]
    assert (activity.kernels, counter.reason, counter.broken) == (1, None, False)
    assert activity.data_wait_s == pytest.approx(200e-6)
    assert activity.cost_s == 0
    assert not counter.warm
    assert not counter.counting
    assert counter.warm_up()  # and again


@pytest.mark.parametrize(
    ("fails", "broken", "says"),
    [("prepare", True, "CUPTI cannot be used"), ("start", False, "did not start"), ("stop", False, "gave nothing")],
)
def test_a_profiler_that_fails_costs_the_count_and_not_the_run(fails, broken, says):
    counter = counter_of(FakeProfiler(marked(), fails=fails), Clock())
    assert counter.warm_up() is (fails != "prepare")
    counter.start()
    assert counter.stop() is None
    assert says in counter.reason
    assert "more" not in counter.reason  # one line
    assert counter.broken is broken


def test_cupti_that_records_nothing_is_not_asked_again():
    clock = Clock()
    counter = counter_of(FakeProfiler(marked()), clock)
    counter.warm_up()
    counter.start()
    clock.at = 1000
    assert counter.stop() is None
    assert counter.broken
    assert "no device work" in counter.reason


def test_a_count_that_is_given_up_ends_the_profiler():
    profiler = FakeProfiler(marked())
    counter = counter_of(profiler, Clock())
    counter.warm_up()
    counter.cancel("training ended")
    assert profiler.done == ["prepare", "start", "stop"]
    assert counter.reason == "training ended"
    assert not counter.warm
    assert counter.stop() is None


def test_beside_another_profiler_nothing_is_counted():
    from torch.profiler import ProfilerActivity, profile

    profiler = FakeProfiler(marked())
    counter = counter_of(profiler, Clock())
    with profile(activities=[ProfilerActivity.CPU]):
        assert not counter.warm_up()
    assert profiler.done == []
    assert "another profiler" in counter.reason
    assert not counter.broken
    assert counter.warm_up()


def test_without_a_gpu_torchs_own_profiler_is_refused_in_one_sentence():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    counter = LaunchCounter()
    assert not counter.warm_up()
    assert counter.reason == "CUPTI cannot be used (this torch records no CUDA activity here)"
    assert counter.broken
