"""Rates, totals and warm-up from StepRecords alone."""

import math
from dataclasses import fields, replace

import pytest

from hf_speedkit.core.metrics import METRICS
from hf_speedkit.core.records import GpuUsage, StepRecord, TokenCounts
from hf_speedkit.core.step_parts import ACTIVITY_FIELDS, StepActivity
from hf_speedkit.core.stepsum import decode, encode, of_step, over_ranks, rank_rows, total
from hf_speedkit.core.throughput import EARLY_STEPS, Ledger, job_window, mark_warm_up, run_totals
from hf_speedkit.core.window_metrics import metrics_of, window_metrics


def tokens(slots, real=None, target=None, documents=1, squared=None):
    return TokenCounts(
        slots=slots,
        real=slots if real is None else real,
        target=target,
        documents=documents,
        squared_lengths=squared,
    )


def step(number, seconds, counts, **more):
    return StepRecord(step=number, micro_batches=1, tokens=counts, step_time_s=seconds, **more)


def run(seconds, counts=None):
    return [step(number, time, counts or tokens(1000)) for number, time in enumerate(seconds, start=1)]


def window_of(ranks, ledger=None, gpus=(), activities=()):
    ledger = ledger or Ledger(world_size=len(ranks))
    window = job_window([rank_rows(records, ledger.early_left) for records in ranks], ledger, gpus, activities)
    return window, ledger.with_window(window)


def test_v59_minutes_of_warm_up_stay_out_of_the_steady_rate_and_are_labelled():
    records = run([300, 60] + [2] * 8)
    metrics = metrics_of([records])
    assert metrics["speed/real_tokens_per_second"] == 500
    assert metrics["speed/excluded_steps"] == 2
    assert metrics["speed/steady_steps"] == 8
    assert metrics["speed/total_real_tokens"] == 10_000  # the tokens were trained on all the same
    window, _ = window_of([records])
    assert [record.excluded for record in mark_warm_up(records, window)][:3] == ["warm-up", "warm-up", None]


def test_v59_holds_for_the_run_when_every_step_is_its_own_window():
    ledger = Ledger()
    for record in run([300, 60] + [2] * 8):
        _, ledger = window_of([[record]], ledger)
    assert run_totals(ledger).rates["speed/real_tokens_per_second"] == 500


def test_autotuning_between_normal_steps_is_warm_up_too():
    # Step times of a ragged packed run on one H200 (shared/facts/gpu.md): autotuning at steps 1, 3 and 5.
    window, _ = window_of([run([4.1, 0.85, 3.7, 0.79, 3.4, 0.86, 0.82, 0.82, 0.84, 0.66])])
    assert [index + 1 for index, flag in enumerate(window.warm_up) if flag] == [1, 3, 5]


@pytest.mark.parametrize(
    ("what", "third"),
    [
        ("a batch with five times the tokens", step(3, 5.0, tokens(5000))),
        ("a slow data loader", step(3, 5.0, tokens(1000), data_wait_s=4.0)),
        ("a slow loader, on a device", step(3, 5.0, tokens(1000), data_wait_s=0.0, device_time_s=1.0)),
        ("not that much slower", step(3, 1.9, tokens(1000))),
    ],
)
def test_a_slow_early_step_with_another_cause_is_not_called_warm_up(what, third):
    records = run([1.0] * 6)
    records[2] = third
    window, _ = window_of([records])
    assert window.warm_up == (True, False, False, False, False, False), what


def test_steps_of_milliseconds_that_vary_are_not_called_warm_up():
    window, _ = window_of([run([1.0, 0.01, 0.05, 0.01, 0.15, 0.01])])
    assert window.warm_up == (True, False, False, False, False, False)


def test_a_slow_step_after_the_first_ones_counts():
    seconds = [1.0] * EARLY_STEPS + [9.0, 1.0]
    metrics = metrics_of([run(seconds)])
    assert metrics["speed/steady_steps"] == len(seconds) - 1
    assert metrics["speed/step_time_s"] == pytest.approx((sum(seconds) - 1) / (len(seconds) - 1))


def test_a_window_of_nothing_but_warm_up_has_no_rate():
    metrics = metrics_of([run([10.0])])
    assert not [key for key in metrics if "per_second" in key or key == "speed/step_time_s"]
    assert metrics["speed/total_slots"] == 1000


def test_v64_the_global_rate_is_all_counted_tokens_over_the_step_time():
    counts = [[7, 8, 9], [10, 11, 12]]  # rank by micro-batch
    ranks = []
    for rank in counts:
        summed = sum((tokens(n) for n in rank[1:]), tokens(rank[0]))
        ranks.append([step(1, 9.0, summed), step(2, 2.0, summed)])
    metrics = metrics_of(ranks)
    assert metrics["speed/real_tokens_per_second"] == sum(sum(rank) for rank in counts) / 2.0
    assert metrics["speed/real_tokens_per_second_per_device"] == metrics["speed/real_tokens_per_second"] / 2


def test_v65_slots_real_and_target_tokens_are_three_rates():
    counts = tokens(20, real=14, target=6, documents=2)
    metrics = metrics_of([[step(1, 5.0, counts), step(2, 1.0, counts)]])
    assert metrics["speed/slots_per_second"] == 20
    assert metrics["speed/real_tokens_per_second"] == 14
    assert metrics["speed/target_tokens_per_second"] == 6
    assert metrics["speed/packing_efficiency"] == 14 / 20
    assert metrics["speed/target_share"] == 6 / 14


def test_v66_the_rate_is_of_this_session_and_the_total_of_the_run():
    ledger = Ledger(before=tokens(1_000_000, target=900_000))
    records = [step(101, 7.0, tokens(500, target=400), excluded="resume"), step(102, 1.0, tokens(500, target=400))]
    window, ledger = window_of([records], ledger)
    metrics = window_metrics(window, ledger)
    assert metrics["speed/real_tokens_per_second"] == 500
    assert metrics["speed/total_real_tokens"] == 1_001_000
    assert metrics["speed/total_target_tokens"] == 900_800


def test_the_totals_of_a_resumed_run_are_left_out_when_its_past_is_unknown():
    window, ledger = window_of([run([1.0, 1.0])], Ledger(before=None))
    assert not [key for key in window_metrics(window, ledger) if key.startswith("speed/total_")]
    assert run_totals(ledger).tokens is None
    assert run_totals(ledger).session.slots == 2000


def test_what_is_unknown_is_left_out_and_never_zero():
    unknown = TokenCounts(slots=10, real=None, target=None, documents=None)
    metrics = metrics_of([[step(1, 1.0, unknown), step(2, 1.0, unknown)]])
    assert metrics["speed/slots_per_second"] == 10
    for key in ("real_tokens_per_second", "target_tokens_per_second", "packing_efficiency", "mfu", "data_wait_s"):
        assert f"speed/{key}" not in metrics
    for key in ("device_time_s", "gpu_utilization", "eval_time_s", "nonfinite_steps", "total_real_tokens"):
        assert f"speed/{key}" not in metrics


def test_one_unknown_step_makes_the_window_unknown_rather_than_too_small():
    records = run([1.0, 1.0, 1.0])
    records[2] = step(3, 1.0, TokenCounts(slots=1000, real=None, target=None, documents=None))
    metrics = metrics_of([records])
    assert "speed/real_tokens_per_second" not in metrics
    assert metrics["speed/slots_per_second"] == 1000


@pytest.mark.parametrize("reason", ["traced", "resume", "launches counted"])
def test_a_step_someone_excluded_enters_no_rate_but_is_counted(reason):
    records = run([1.0] * 12)
    records[11] = replace(records[11], step_time_s=100.0, excluded=reason)
    metrics = metrics_of([records])
    assert metrics["speed/real_tokens_per_second"] == 1000
    assert metrics["speed/excluded_steps"] == 2
    assert metrics["speed/total_slots"] == 12_000


def test_mfu_is_model_flops_over_time_and_peak():
    records = [step(n, 2.0, tokens(10), flops=4e12) for n in range(1, 4)]
    metrics = metrics_of([records, records], peak_tflops=10.0)
    assert metrics["speed/model_tflops_per_device"] == pytest.approx(2.0)
    assert metrics["speed/mfu"] == pytest.approx(20.0)
    assert "speed/mfu" not in metrics_of([records])  # no peak, no MFU


def test_v33_unequal_target_tokens_of_the_ranks_are_visible():
    ranks = [[step(n, 1.0, tokens(4000, target=target)) for n in (1, 2)] for target in (120, 3600)]
    metrics = metrics_of(ranks)
    assert metrics["speed/target_tokens_min"] == 120
    assert metrics["speed/target_tokens_max"] == 3600
    assert metrics["speed/target_tokens_max_rank"] == 1
    assert metrics["speed/total_real_tokens"] == 16_000
    assert metrics["speed/total_target_tokens"] == 7_440


def test_a_rank_that_waits_for_the_checkpoint_of_another_does_not_slow_the_rate():
    writer = [step(1, 1.0, tokens(10)), step(2, 1.0, tokens(10)), step(3, 1.0, tokens(10), save_time_s=20.0)]
    waiter = [step(1, 1.0, tokens(10)), step(2, 1.0, tokens(10)), step(3, 21.0, tokens(10))]
    metrics = metrics_of([writer, waiter])
    assert metrics["speed/step_time_s"] == 1.0
    assert metrics["speed/save_time_s"] == 20.0
    assert metrics["speed/step_time_max_s"] == 11.0  # still visible


def test_ranks_that_fell_out_of_step_give_totals_and_no_rate():
    window, ledger = window_of([run([1.0] * 4), run([1.0] * 3)])
    assert not window.consistent
    metrics = window_metrics(window, ledger)
    assert metrics["speed/total_slots"] == 7000
    assert "speed/slots_per_second" not in metrics


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 25])
@pytest.mark.parametrize("logging_steps", [1, 4, 10, 25])
def test_totals_and_run_rates_do_not_depend_on_how_often_one_logs(steps, logging_steps):
    records = [step(n, 1.0, tokens(100 + n, target=n, squared=n * n), flops=1.0 * n) for n in range(1, steps + 1)]
    ledger = Ledger()
    for start in range(0, steps, logging_steps):
        _, ledger = window_of([records[start : start + logging_steps]], ledger)
    assert ledger.session == total(of_step(record) for record in records)
    assert ledger.steady == total(of_step(record) for record in records[1:])


def test_rows_survive_the_trip_between_ranks_exactly():
    records = [
        step(
            n,
            0.1 * n,
            tokens(2**40 + n, real=n, target=None, squared=3 * n),
            data_wait_s=None if n == 2 else 0.01,
            device_time_s=0.07,
            eval_time_s=1.5,
            nonfinite=n == 3,
        )
        for n in range(1, 14)
    ]
    rows = rank_rows(records, EARLY_STEPS)
    usage = GpuUsage(samples=3, utilization_percent=98.0, power_w=None, memory_gib=12.5)
    activity = StepActivity(**{**dict.fromkeys(ACTIVITY_FIELDS, 2.5), "overlapped_s": None})
    assert decode(encode(rows, usage)) == (rows, usage, None)
    assert decode(encode(rows, None, activity)) == (rows, None, activity)
    assert total(rows).first_nonfinite == 3


def test_every_rank_sends_the_same_length_whatever_it_has():
    lengths = {len(encode(rank_rows(run([1.0] * n), EARLY_STEPS), None)) for n in (0, 3, 10, 40)}
    assert len(lengths) == 1
    with pytest.raises(ValueError, match="rows of"):
        decode([math.nan] * 9)


def test_pauses_take_the_longest_rank_and_tokens_add_up():
    one = of_step(step(5, 1.0, tokens(3), eval_time_s=2.0, flops=5.0, host_time_s=0.5))
    two = of_step(step(5, 1.5, tokens(4), eval_time_s=3.0, flops=6.0, host_time_s=0.7))
    both = over_ranks([one, two])
    assert (both.eval_time_s, both.tokens.slots, both.flops, both.step_time_s) == (3.0, 7, 11.0, 1.0)
    assert both.host_time_s == pytest.approx(0.6)


def test_gpu_utilisation_stands_beside_the_rates():
    usages = [GpuUsage(samples=2, utilization_percent=98.0), GpuUsage(samples=2, utilization_percent=96.0), None]
    ranks = [run([1.0, 1.0])] * 3
    window, ledger = window_of(ranks, gpus=usages)
    metrics = window_metrics(window, ledger)
    assert metrics["speed/gpu_utilization"] == 97.0
    assert "speed/gpu_power_w" not in metrics


def test_every_key_that_can_be_logged_is_documented_and_the_other_way_round():
    record = step(
        2,
        1.0,
        tokens(10, target=3),
        data_wait_s=0.1,
        host_time_s=0.1,
        device_time_s=0.1,
        device_wait_s=0.1,
        eval_time_s=1.0,
        save_time_s=1.0,
        log_time_s=1.0,
        flops=1e12,
        recomputed_flops=1e11,
        compiled_kernels=0,
        nonfinite=False,
    )
    usage = GpuUsage(samples=1, **dict.fromkeys([field.name for field in fields(GpuUsage)][1:], 1.0))
    activity = StepActivity(**dict.fromkeys(ACTIVITY_FIELDS, 1.0))
    window, ledger = window_of([[record, record]] * 2, gpus=[usage, usage], activities=[activity] * 2)
    metrics = window_metrics(window, ledger, peak_tflops=100.0, tensor_clock_mhz=1830.0)
    assert set(metrics) == set(METRICS)
    assert all(metric.unit and metric.formula and all(metric.by) for metric in METRICS.values())


def test_the_keys_are_stable():
    rates = [f"{name}_per_second" for name in ("slots", "real_tokens", "target_tokens")]
    expected = {
        *rates,
        *(f"{rate}_per_device" for rate in rates),
        *("packing_efficiency", "target_share", "step_time_s", "data_wait_s", "host_time_s", "device_time_s"),
        *("device_wait_s", "model_tflops_per_device", "mfu", "hfu"),
        *("launch_calls", "launches", "kernels", "memcpy", "memset", "device_busy_s", "communication_s"),
        *("host_wait_s", "counted_step_time_s", "count_cost_s"),
        *("part_data_wait_s", "part_host_only_s", "part_overlapped_s", "part_device_only_s", "part_exposed_comm_s"),
        *("steady_steps", "excluded_steps", "nonfinite_steps", "compiled_kernels"),
        *("eval_time_s", "save_time_s", "log_time_s"),
        *("total_slots", "total_real_tokens", "total_target_tokens", "total_documents"),
        *("step_time_min_s", "step_time_max_s", "step_time_max_rank"),
        *("data_wait_min_s", "data_wait_max_s", "data_wait_max_rank"),
        *("target_tokens_min", "target_tokens_max", "target_tokens_max_rank"),
        *("gpu_utilization", "gpu_power_w", "gpu_sm_clock_mhz", "gpu_memory_gib"),
        *("gpu_throttled", "gpu_throttled_by_heat"),
        *("gpu_sm_active", "gpu_tensor_active", "gpu_dram_active", "ofu"),
    }
    assert set(METRICS) == {f"speed/{name}" for name in expected}


def test_one_rank_has_no_rates_per_device():
    one, two = (metrics_of([run([1.0, 1.0])] * ranks) for ranks in (1, 2))
    assert not [key for key in one if key.endswith("per_second_per_device")]
    assert two["speed/slots_per_second_per_device"] == one["speed/slots_per_second"]


def test_hfu_adds_what_is_computed_once_more():
    records = [step(number, 1.0, tokens(10), flops=40e12, recomputed_flops=10e12) for number in (1, 2)]
    metrics = metrics_of([records], peak_tflops=100.0)
    assert (metrics["speed/mfu"], metrics["speed/hfu"]) == (40.0, 50.0)
    unknown = [replace(record, recomputed_flops=None) for record in records]
    assert "speed/hfu" not in metrics_of([unknown], peak_tflops=100.0)


def test_ofu_is_the_tensor_pipes_activity_at_the_clock_of_the_peak():
    usage = GpuUsage(samples=1, tensor_active_percent=50.0, sm_clock_mhz=915.0)
    window, ledger = window_of([run([1.0, 1.0])], gpus=[usage])
    assert window_metrics(window, ledger, tensor_clock_mhz=1830.0)["speed/ofu"] == 25.0
    assert "speed/ofu" not in window_metrics(window, ledger)  # the peak's clock is not known: no guess


def test_compilations_are_summed_over_steps_and_the_most_over_ranks():
    ranks = [[step(number, 1.0, tokens(1), compiled_kernels=rank * number) for number in (1, 2)] for rank in (1, 3)]
    assert metrics_of(ranks)["speed/compiled_kernels"] == 9


def test_the_parts_of_a_step_without_a_device_are_waiting_and_work():
    metrics = metrics_of([[step(number, 1.0, tokens(1), data_wait_s=0.25) for number in (1, 2)]])
    assert (metrics["speed/part_data_wait_s"], metrics["speed/part_host_only_s"]) == (0.25, 0.75)
    assert "speed/part_overlapped_s" not in metrics  # there is no device: not measured, and not 0
