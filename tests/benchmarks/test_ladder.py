"""The ladder's plan, and a small part of its code path; `make bench-smoke` runs all of it."""

import json
from pathlib import Path

import ladder
import pytest
import rung
from rungs import CHOICES, LADDER, ONE_OFF, WORKLOADS, selected

from hf_speedkit.core.bench_records import bench_result, missing_provenance

ROOT = Path(__file__).resolve().parents[2]


def plan(tmp_path, *more):
    return ladder.planned(ladder.arguments(["--out", str(tmp_path), *more]))


def test_repetitions_are_interleaved(tmp_path):
    order = [(rung.name, repetition) for _, rung, repetition in plan(tmp_path, "--repetitions", "2")]
    names = [rung.name for rung in LADDER]
    assert order == [(name, 1) for name in names] + [(name, 2) for name in names]


def test_a_dense_model_has_no_fallback_to_measure():
    names = {rung.name for rung in selected(["ladder"], WORKLOADS["dense-8b-8"])}
    assert names == {"kernels", "trl", "speedkit, full checkpointing", "speedkit"}


def test_a_full_fine_tune_has_no_adapters_to_measure():
    fused = "speedkit minus fused LoRA"
    assert [rung.name for rung in selected([fused], WORKLOADS["27b-8-lora"])] == [fused]
    assert selected([fused], WORKLOADS["27b-8"]) == []


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cold_machine_compiles_in_runs_that_enter_no_table(tmp_path, monkeypatch, compiled):
    if compiled:
        (tmp_path / "kernel").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    runs = ladder.compiling(ladder.arguments(["--out", str(tmp_path), "--rungs", "ladder"]))
    assert [(rung.name, repetition) for _, rung, repetition in runs] == (
        [] if compiled else [("speedkit", 0), ("trl", 0)]
    )
    assert all(repetition > 0 for _, _, repetition in plan(tmp_path))


def test_a_cold_run_does_not_tell_how_long_a_warm_one_takes(tmp_path):
    given = ladder.arguments(["--out", str(tmp_path)])
    cold, warm = (ladder.job(given, WORKLOADS["27b-8"], rung.RUNGS["speedkit"], repetition) for repetition in (0, 1))
    assert cold.name != warm.name
    assert cold.expected_s > warm.expected_s + 100


def test_only_what_was_asked_for_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    given = ladder.arguments(["--out", str(tmp_path), "--rungs", "seed", "trl"])
    assert [rung.name for _, rung, _ in ladder.compiling(given)] == ["trl"]
    assert ladder.compiling(ladder.arguments(["--out", str(tmp_path), "--no-cold"])) == []


def test_a_rung_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        ladder.arguments(["--out", str(tmp_path), "--rungs", "speedkit plus luck"])
    assert "speedkit plus luck" in capsys.readouterr().err


def test_every_result_has_a_file_of_its_own():
    names = [
        ladder.file_name(workload, rung, 1)
        for workload in WORKLOADS.values()
        for rung in selected(["ladder", "one-off", "choices"], workload)
    ]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").replace("_", "").removesuffix(".json").isalnum() for name in names)


def test_one_off_rungs_differ_from_the_defaults_by_settings_only():
    assert all(rung.way == "speedkit" and rung.settings for rung in ONE_OFF)


def test_a_setting_of_another_version_ends_the_rung_and_not_the_ladder(tmp_path, capsys):
    other = rung.Rung(name="speedkit minus luck", way="speedkit", settings={"luck": False})
    with pytest.raises(SystemExit) as ended:
        rung.build(other, WORKLOADS["tiny"], {"luck": False})
    assert ended.value.code == rung.UNKNOWN_SETTING
    assert "has no luck" in capsys.readouterr().err


def test_a_rung_is_measured_and_not_measured_twice(tmp_path, capsys):
    common = ["--workloads", "tiny", "--rungs", "seed", "--repetitions", "1"]
    assert ladder.main([*common, "--out", str(tmp_path / "a"), "--steps", "3", "--commit", "0" * 40]) == 0
    result = bench_result(json.loads((tmp_path / "a" / "tiny_seed_rep1.json").read_text()))
    assert missing_provenance(result) == ()
    assert result.environment.commit == "0" * 40
    assert result.session_steps == 3
    assert result.steps[0].excluded == "warm-up"
    assert any("UNVERIFIED" in line for line in result.kernels)  # the seed's own fallback ran, not today's
    capsys.readouterr()
    assert ladder.main([*common, "--out", str(tmp_path / "b"), "--done", str(tmp_path / "a")]) == 0
    assert "0 runs to measure, 1 are there" in capsys.readouterr().out


@pytest.mark.parametrize("one", [*ONE_OFF, *CHOICES, *LADDER], ids=lambda one: one.name)
def test_a_rung_names_settings_that_its_config_has(one):
    from dataclasses import fields

    from trl import SFTConfig

    from hf_speedkit import SpeedSFTConfig

    known = {field.name for field in fields(SpeedSFTConfig if one.way == "speedkit" else SFTConfig)}
    assert set(one.settings) <= known


def test_one_gpu_and_two_train_the_same_rows_to_the_same_losses():
    """8 layers of the 27B, 20 steps in bf16, which rounds each loss of 13 anew: 3.8e-4 apart at most."""
    results = ROOT / "benchmarks/results"
    one, two = (
        json.loads((results / name).read_text())
        for name in ("2026-11-30_h200_27b-8-ga2_speedkit.json", "2026-11-30_2xh200_27b-8_speedkit.json")
    )
    assert (one["world_size"], two["world_size"]) == (1, 2)
    losses = [[row["loss"] for row in run["log"] if "loss" in row] for run in (one, two)]
    assert [len(each) for each in losses] == [20, 20]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
