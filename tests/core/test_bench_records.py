"""Results of benches as files, and rows of them."""

import json
from dataclasses import replace

import pytest
from bench_results import bench

from hf_speedkit.core.bench_records import as_text, bench_result, missing_provenance
from hf_speedkit.core.bench_table import SPEED, by_workload, rows, shapes, shares
from hf_speedkit.core.errors import BenchError
from hf_speedkit.core.records import StepRecord, TokenCounts


def test_a_result_survives_its_file():
    result = bench(speed=1000.0)
    assert bench_result(json.loads(as_text(result))) == result


@pytest.mark.parametrize("field", ["environment", "rates", "tokens", "name", "seeds"])
def test_a_file_that_lacks_a_field_is_refused_by_name(field):
    values = json.loads(as_text(bench()))
    del values[field]
    with pytest.raises(BenchError, match=rf"a\.json is damaged or incomplete: .*{field}"):
        bench_result(values, name="a.json")


@pytest.mark.parametrize(("changed", "words"), [({"kind": "run"}, "not the result"), ({"format": 9}, "format '9'")])
def test_another_kind_of_file_is_refused(changed, words):
    with pytest.raises(BenchError, match=words):
        bench_result({**json.loads(as_text(bench())), **changed})


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({"seeds": {}}, "seeds"),
        ({"settings": {}}, "settings"),
        ({"measured_at": ""}, "date"),
        ({"steady_steps": 0}, "rates of steady steps"),
        ({"flops_formula": ""}, "FLOPs formula"),
        ({"log": ()}, "clock, power and utilisation of the GPU"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_result_lacks_to_be_committed_is_named(changed, lacking):
    assert missing_provenance(bench()) == ()
    assert missing_provenance(replace(bench(), **changed)) == (lacking,)


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({"commit": None}, "commit"),
        ({"driver": None}, "driver"),
        ({"packages": {"torch": "2.11"}}, "versions of torch, transformers and trl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_so_is_what_its_environment_lacks(changed, lacking):
    result = bench()
    assert missing_provenance(replace(result, environment=replace(result.environment, **changed))) == (lacking,)


def test_a_row_is_the_median_of_the_repetitions_and_says_how_far_they_were_apart():
    speeds = [1000.0, 1300.0, 1100.0]
    (row,) = rows([bench(speed=speed, repetition=n) for n, speed in enumerate(speeds, start=1)])
    found = row.values[SPEED]
    assert (found.median, found.low, found.high, found.runs, row.runs) == (1100.0, 1000.0, 1300.0, 3, 3)


def test_a_cold_run_is_in_no_row():
    assert rows([bench(repetition=0)]) == ()


def test_a_ladder_goes_from_slow_to_fast_and_workloads_stay_apart():
    found = by_workload(
        rows(
            [
                bench(name="b", speed=2.0),
                bench(name="a", speed=1.0),
                bench(name="c", speed=3.0, workload="other"),
            ]
        )
    )
    assert {workload: [row.name for row in of] for workload, of in found.items()} == {"w": ["a", "b"], "other": ["c"]}


def test_an_items_share_is_the_time_per_token_that_it_saves():
    speeds = {"speedkit": (200.0, 202.0), "speedkit minus a": (100.0, 101.0), "speedkit minus b": (201.0, 210.0)}
    results = [bench(name=name, speed=s, repetition=n) for name, of in speeds.items() for n, s in enumerate(of, 1)]
    found = shares(rows([*results, bench(name="trl", speed=50.0), bench(name="speedkit minus c", speed=150.75)]))
    assert [(share.item, round(share.time_saved, 3), share.apart) for share in found] == [
        ("a", 0.5, True), ("c", 0.25, False), ("b", -0.022, False),
    ]  # fmt: skip
    assert shares(rows([bench(name="speedkit minus a"), bench(name="trl")])) == ()


def test_workloads_stand_side_by_side_where_two_have_our_run():
    def of(workload, **speeds):
        return [bench(name=name, workload=workload, speed=speed) for name, speed in speeds.items()]

    results = [*of("9b", trl=10.0, speedkit=20.0), *of("27b", seed=1.0, trl=5.0, speedkit=20.0), *of("8b", trl=3.0)]
    found = shapes(
        by_workload(rows([*results, replace(bench(name="speedkit", workload="64", speed=9.0), world_size=2)]))
    )
    assert [(shape.ours.place, list(shape.beside), shape.times_others) for shape in found] == [
        ("27b", ["trl"], 4.0), ("9b", ["trl"], 2.0), ("64 on 2 GPUs", [], None),
    ]  # fmt: skip
    assert shapes(by_workload(rows([*of("27b", speedkit=2.0), *of("8b", trl=3.0)]))) == ()


def test_runs_on_more_gpus_are_another_row_of_another_table():
    one, two = (replace(bench(name="speedkit", speed=100.0), world_size=count) for count in (1, 2))
    assert [(where, [row.speed_per_device for row in of]) for where, of in by_workload(rows([one, two])).items()] == [
        ("w", [100.0]), ("w on 2 GPUs", [50.0]),
    ]  # fmt: skip


def test_what_was_not_measured_is_in_no_row():
    (row,) = rows([bench()])
    assert "launches" not in row.values
    assert "hfu" not in row.values


def test_the_median_step_is_not_moved_by_one_that_compiled():
    def step(number, seconds, excluded=None):
        tokens = TokenCounts(slots=100, real=100, target=100, documents=1)
        return StepRecord(step=number, micro_batches=1, tokens=tokens, step_time_s=seconds, excluded=excluded)

    steps = (step(1, 50.0, "warm-up"), step(2, 1.0), step(3, 9.0), step(4, 1.0))
    (row,) = rows([replace(bench(), steps=steps)])
    assert row.values["median_step_tokens_per_second"].median == 100.0


def test_the_first_window_with_the_warm_up_in_it_is_left_out_of_the_utilisation():
    windows = tuple({"speed/gpu_utilization": value} for value in (10.0, 90.0, 100.0))
    (row,) = rows([replace(bench(), log=windows)])
    assert row.values["gpu_utilization"].median == 95.0


def test_v37_step_time_and_peak_memory_of_accumulation_1_and_4_stand_side_by_side():
    one, four = (
        replace(bench(), name=f"accumulation {count}", rates={**bench().rates, "speed/step_time_s": seconds},
                peak_memory_gib=memory)
        for count, seconds, memory in ((1, 0.5, 40.0), (4, 2.2, 94.0))
    )  # fmt: skip
    found = {row.name: row.values for row in rows([one, four])}
    assert found["accumulation 1"]["step_time_s"].median == 0.5
    assert found["accumulation 4"]["step_time_s"].median == 2.2
    assert [values["peak_memory_gib"].median for values in found.values()] == [40.0, 94.0]
