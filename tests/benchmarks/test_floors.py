"""benchmarks/floors.py: measured device time against closed forms, on made-up traces and results."""

import json
from dataclasses import replace
from pathlib import Path

import floor_formulas
import floors
import pytest
from bench_results import bench
from geometry import qwen27b_config, tiny_config
from trace_files import TraceFile

from hf_speedkit.core.bench_records import as_text
from hf_speedkit.core.flops import LAYER_PARTS, model_flops
from hf_speedkit.core.records import StepRecord, TokenCounts

ROOT = Path(__file__).parents[2]

COUNTS = TokenCounts(slots=256, real=200, target=180, documents=4, squared_lengths=12_000)


def step_of(config, layers, *, extra=frozenset()):
    """Step 7 with its first layers checkpointed."""
    again = model_flops(config, head_on="target", layers=range(layers)).recomputed(COUNTS, LAYER_PARTS | extra)
    flops = model_flops(config, head_on="target")(COUNTS)
    return StepRecord(step=7, micro_batches=1, tokens=COUNTS, step_time_s=0.001, flops=flops, recomputed_flops=again)


def trace_of_a_step():
    """1 ms after 0.1 ms of queued work: 400 us GEMM, 100 us optimizer, 200 us communication, half of it under GEMM."""
    trace = TraceFile(hf_speedkit={"step": 7}).device("gemm", 0, 200, correlation=99).step(1, 100, 800)
    trace.launch(110, "gemm", 200, 400).launch(120, "_adamw_kernel", 900, 100).launch(130, "direct_copy", 700, 50)
    return trace.launch(140, "ncclDevKernel_AllGather_RING_LL", 500, 200, stream=22)


@pytest.fixture
def files(tmp_path):
    result = replace(bench(), workload="tiny-4-ga2", world_size=2, steps=(step_of(tiny_config(4).to_dict(), 2),))
    trace_of_a_step().write(tmp_path / "t.json.gz")
    (tmp_path / "r.json").write_text(as_text(result))
    return [str(tmp_path / name) for name in ("t.json.gz", "r.json")], tmp_path / "f.json"


def test_every_group_has_its_time_its_floor_and_what_is_left(files, capsys):
    given, out = files
    assert floors.main([*given, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = {row["group"]: row for row in found["rows"]}
    assert (found["step"], found["step_ms"], found["checkpointed_layers"]) == (7, pytest.approx(0.8), 2)
    assert found["what"]
    assert found["environment"]["commit"] == "a" * 40
    times = {name: (row["device_ms"], row["exposed_ms"]) for name, row in rows.items() if row["device_ms"]}
    assert times == {
        "GEMM": (0.4, 0.4),
        "optimizer": (0.1, 0.1),
        "copy": (0.05, 0.05),
        "communication": (0.2, pytest.approx(0.1)),  # the other half ran beside the GEMM
        "idle": (pytest.approx(0.15), pytest.approx(0.15)),
    }
    for row in rows.values():
        assert row["left_ms"] == pytest.approx(max(0.0, min(row["device_ms"] - row["floor_ms"], row["exposed_ms"])))
        assert row["floor_ms"] == 0 or row["formula"]
    assert rows["copy"]["floor_ms"] == rows["idle"]["floor_ms"] == 0
    printed = capsys.readouterr().out
    assert "| copy | 0.1 | 0.1 | 0.0 |  |  | 0.1 | 6.2 |" in printed
    assert "rated speed, one way, not measured" in printed
    assert "- optimizer: AdamW reads w, g, m, v" in printed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": ()}, "no FLOPs of step 7"),
        ({"workload": "mine"}, "give --geometry and --layers"),
        ({"settings": {"workload": {"geometry": "tiny", "layers": 4, "lora_rank": 16}}}, "with --trained"),
        ({"steps": (replace(step_of(tiny_config(4).to_dict(), 1), recomputed_flops=1e7),)}, "give --checkpointed"),
    ],
    ids=["steps", "workload", "adapters", "recompute"],
)
def test_a_result_that_does_not_say_enough_is_refused(files, change, words):
    (trace, path), out = files
    result = floors.bench_result(json.loads(Path(path).read_text()))
    Path(path).write_text(as_text(replace(result, **change)))
    with pytest.raises(SystemExit, match=words):
        floors.main([trace, path, "--out", str(out)])


def test_a_trace_of_two_steps_is_refused(tmp_path):
    trace = TraceFile().step(1, 0, 10).launch(1, "gemm", 2, 3).step(2, 10, 10).launch(11, "gemm", 12, 3)
    with pytest.raises(SystemExit, match="not the trace of one step"):
        floors.measured(trace.write(tmp_path / "t.json"))


@pytest.mark.parametrize("layers", [0, 1, 4])
@pytest.mark.parametrize("extra", [frozenset(), frozenset({"head"})], ids=["ours", "trl"])
def test_recomputed_flops_say_how_many_layers_were_checkpointed(layers, extra):
    config = tiny_config(4).to_dict()
    assert floor_formulas.checkpointed_layers(config, step_of(config, layers, extra=extra)) == layers


def test_sharding_sends_what_a_trace_of_two_gpus_shows():
    """NCCL's message sizes in a 27B's traced step (H200 x 2, FSDP2, torch 2.11): elements received per rank, times."""
    gathers = 96 * 191_636_592 + 32 * 186_127_616 + 635_699_200 + 635_701_760
    reduces = 48 * 191_636_592 + 16 * 186_127_616 + 635_699_200 + 635_701_760
    config = qwen27b_config().to_dict()
    job = floor_formulas.Job(
        config=config, step=step_of(config, 47), checkpointed=47, ranks=2,
        parameters=26_895_998_464, trained=26_895_998_464,
    )  # fmt: skip
    found = floor_formulas.floors(job)
    assert found["communication"].sent_bytes == pytest.approx(2 * (gathers + reduces), rel=1e-6)
    alone = floor_formulas.floors(replace(job, ranks=1))
    assert alone["communication"].sent_bytes == alone["FSDP copy"].memory_bytes == 0
    # 48 + 36 forwards and 48 backwards of the convolution over 10,240 channels, as the trace has them
    assert found["convolution"].memory_bytes == 2 * COUNTS.real * 10_240 * (2 * 84 + 3 * 48)
    # What the parts are made of adds up to what core/flops.py counts, recompute included.
    mixers = found["linear attention"].flops + found["attention"].flops
    assert 0 < found["GEMM"].flops < job.step.flops + job.step.recomputed_flops
    assert found["GEMM"].flops + mixers == pytest.approx(job.step.flops + job.step.recomputed_flops, rel=0.01)


def test_the_table_in_the_docs_is_that_of_the_committed_step():
    found = json.loads((ROOT / "benchmarks/results/2026-11-30_2xh200_27b_speedkit_floors.json").read_text())
    assert floors.markdown(found) in (ROOT / "docs/speed.md").read_text()
