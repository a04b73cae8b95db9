"""TraceCallback on real Trainers: which step is recorded, what is written, and that it is never silent."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
from plain_trainer import documents, make_trainer
from torch.profiler import profile
from transformers import Trainer, TrainerCallback
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_speedkit.core.diagnosis import diagnose
from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.measure.trace import summarize_trace
from hf_speedkit.trainer import trace_callback as module
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.metrics.trace_marks import MASK_RANGE, marked_mask_building
from hf_speedkit.trainer.metrics.trace_sessions import remarks, sessions_of
from hf_speedkit.trainer.trace_callback import TraceCallback


def traced(tmp_path, callback, *, kind=Trainer, **more):
    """Train on 12 documents, 2 a batch: 6 steps an epoch."""
    trainer = make_trainer(tmp_path / "run", callbacks=[callback], kind=kind, **more)
    trainer.train()
    return trainer


def only_summary(callback):
    (path,) = callback.files
    return summarize_trace(path)


def test_one_step_is_recorded_and_its_file_named_at_the_end(tmp_path, caplog):
    callback = TraceCallback(4)
    with caplog.at_level(logging.WARNING):
        traced(tmp_path, callback)
    (path,) = callback.files
    assert path == tmp_path / "run" / "traces" / "trace_rank0_step4.json.gz"
    assert f"trace of step 4 in {path}" in caplog.text
    assert "hf-speedkit trace" in caplog.text
    assert "verdict: Unknown: GPU timing unavailable" in caplog.text
    assert "CPU operations: " in caplog.text
    summary = summarize_trace(path)
    assert len(summary.full_steps) == 1
    assert summary.partial == ()
    assert (summary.facts.step, summary.facts.micro_batches, summary.facts.layers) == (4, 1, 1)
    assert {row.name: row.calls for row in summary.cpu_ops}["aten::embedding"] == 1
    assert any(row.name.startswith("Optimizer.step#") for row in summary.annotations)
    assert diagnose(summary)[0].rule == "unknown"  # a CPU run


def test_the_recorded_step_holds_the_wait_for_its_batch(tmp_path):
    callback = TraceCallback(3)
    traced(tmp_path, callback, logging_steps=1)
    summary = only_summary(callback)
    assert any("DataLoader" in row.name for row in summary.annotations)
    assert summary.steps[0].data_wait_ns > 0


class Evaluated(Trainer):
    def evaluate(self, *args, **kwargs):
        with torch.profiler.record_function("evaluation"):
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):
        with torch.profiler.record_function("saving"):
            return super()._save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize("save", ["steps", "no"])
def test_evaluation_and_saving_before_the_step_are_no_part_of_it(tmp_path, save):
    callback = TraceCallback(4)
    traced(
        tmp_path, callback, kind=Evaluated, eval_data=documents(), eval_strategy="steps", eval_steps=3,
        save_strategy=save, save_steps=3,
    )  # fmt: skip
    names = {row.name for row in only_summary(callback).annotations}
    assert not names & {"evaluation", "saving"}
    assert any("DataLoader" in name for name in names)


def test_accumulation_records_all_micro_batches_of_the_step(tmp_path):
    callback = TraceCallback(2)
    traced(tmp_path, callback, gradient_accumulation_steps=3)
    summary = only_summary(callback)
    assert summary.facts.micro_batches == 3
    assert {row.name: row.calls for row in summary.cpu_ops}["aten::embedding"] == 3


def test_activation_checkpointing_is_recorded_too(tmp_path):
    callback = TraceCallback(3)
    traced(tmp_path, callback, gradient_checkpointing=True)
    assert {row.name: row.calls for row in only_summary(callback).cpu_ops}["aten::silu"] == 2


def test_a_compiled_model_is_recorded_too(tmp_path):
    callback = TraceCallback(4)
    traced(tmp_path, callback, torch_compile=True, torch_compile_backend="eager")
    assert any("Torch-Compiled Region" in row.name for row in only_summary(callback).cpu_ops)


def test_consecutive_steps_share_a_file_and_others_have_their_own(tmp_path):
    callback = TraceCallback((2, 3, 5))
    traced(tmp_path, callback)
    assert [path.name for path in callback.files] == ["trace_rank0_steps2-3.json.gz", "trace_rank0_step5.json.gz"]
    assert [len(summarize_trace(path).full_steps) for path in callback.files] == [2, 1]


def test_v72_every_step_is_marked_without_help_and_an_unreached_step_is_reported(tmp_path, caplog):
    callback = TraceCallback((3, 60))
    traced(tmp_path, callback)
    assert len(callback.files) == 1
    assert "no trace of step 60: training ended before it (at step 6)" in caplog.text
    assert caplog.text.index("step 60 cannot be traced") < caplog.text.index("trace of step")  # before the first step


def test_v73_a_run_that_ends_inside_the_window_leaves_a_partial_trace_that_says_so(tmp_path, caplog):
    callback = TraceCallback((3, 4))
    traced(tmp_path, callback, max_steps=3)
    summary = only_summary(callback)
    assert summary.partial == ("partial: 1 of 2 steps (at step 3)",)
    assert "partial: 1 of 2 steps" in caplog.text
    assert diagnose(summary)[0].rule in {"partial", "unknown"}
    assert len(summary.full_steps) == 1


@pytest.mark.parametrize("max_steps", [2, 3], ids=["before", "behind_the_warm_up_step"])
def test_a_run_that_ends_before_the_step_says_why_there_is_none(tmp_path, caplog, max_steps):
    callback = TraceCallback(4)
    traced(tmp_path, callback, max_steps=max_steps)
    assert callback.files == []
    assert f"no trace of step 4: training ended before it (at step {max_steps})" in caplog.text


class Fails(TrainerCallback):
    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_substep_end(self, args, state, control, **kwargs):
        self._raise(state)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._raise(state)

    def _raise(self, state):
        if state.global_step + 1 == self.step:
            raise self.error


@pytest.mark.parametrize(
    ("error", "attached"),
    [(ValueError("broken batch"), False), (ValueError("broken batch"), True), (KeyboardInterrupt(), True)],
    ids=["exception", "attached", "interrupt"],
)
@pytest.mark.parametrize(("step", "files"), [(5, 1), (4, 1), (3, 0), (2, 0)])
def test_v73_an_exception_closes_the_profiler_and_keeps_what_was_recorded(
    tmp_path, caplog, error, attached, step, files
):
    """An exception that a notebook catches left the profiler running, and no later trace could begin."""
    callback = TraceCallback((4, 5))
    trainer = make_trainer(tmp_path / "run", callbacks=[callback, Fails(step, error)])
    if attached:
        attach(trainer, callback)
        attach(trainer, callback)
    with pytest.raises(type(error)), nullcontext() if attached else callback.closing():
        trainer.train()
    assert len(callback.files) == files
    assert not callback.is_recording
    assert type(error).__name__ in caplog.text
    if files:
        assert only_summary(callback).partial == (f"partial: {step - 4} of 2 steps ({type(error).__name__})",)
    with profile():  # nothing is left running
        pass


def test_v73_a_process_that_dies_of_an_exception_still_writes_and_speaks(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from plain_trainer import make_trainer\n"
        "from test_trace_callback import Fails\n"
        "from hf_speedkit.trainer.trace_callback import TraceCallback\n"
        "folder = Path(sys.argv[2])\n"
        "make_trainer(folder, callbacks=[TraceCallback((3, 4)), Fails(4, ValueError('x'))]).train()\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "partial: 1 of 2 steps (the process ended)" in done.stderr
    assert (tmp_path / "traces" / "trace_rank0_steps3-4.json.gz").is_file()


def test_v74_a_default_trace_is_small_and_a_large_one_warns_how_to_record_less(tmp_path, caplog, monkeypatch):
    lean, full = TraceCallback(3), TraceCallback(3, with_stack=True)
    traced(tmp_path / "lean", lean)
    assert "over" not in caplog.text
    monkeypatch.setattr(module, "SIZE_LIMIT_BYTES", 1 << 10)
    traced(tmp_path / "full", full)
    assert "trace one step, without stacks" in caplog.text
    assert full.files[0].stat().st_size > 1.5 * lean.files[0].stat().st_size
    assert b"python_function" not in gzip.decompress(lean.files[0].read_bytes())
    modules = {row.name for row in only_summary(full).modules}
    assert "LlamaForCausalLM_0" in modules


@pytest.mark.parametrize(("steps", "expected"), [(1, 2), ((1, 2), 2)])
def test_v76_a_first_step_is_moved_so_that_a_warm_up_step_comes_before(tmp_path, caplog, steps, expected):
    callback = TraceCallback(steps)
    traced(tmp_path, callback)
    assert "step 1 is traced as step 2: a warm-up step has to run before it" in caplog.text
    assert only_summary(callback).facts.step == expected


def test_v77_ranks_write_files_of_their_own_and_a_later_run_overwrites_nothing(tmp_path):
    names = []
    for rank in (0, 1):
        callback = TraceCallback(2, output_dir=tmp_path, all_ranks=True)
        callback._rank, callback._folder = rank, tmp_path
        path = callback._free_path(range(2, 3))
        path.touch()
        names.append(path.name)
    assert names == ["trace_rank0_step2.json.gz", "trace_rank1_step2.json.gz"]
    traced(tmp_path, again := TraceCallback(2, output_dir=tmp_path))
    assert [path.name for path in again.files] == ["trace_rank0_step2_run2.json.gz"]


@pytest.mark.two_process
def test_v77_two_ranks_in_all_rank_mode_leave_two_readable_files(tmp_path, free_port):
    from rank_processes import start_ranks  # here: a process of another test imports this file by its folder alone
    from trace_two_ranks import rank_main

    start_ranks(rank_main, free_port, str(tmp_path))
    summaries = [summarize_trace(tmp_path / f"trace_rank{rank}_step3.json.gz") for rank in range(2)]
    assert [(summary.rank, summary.world_size) for summary in summaries] == [(0, 2), (1, 2)]
    assert all(len(summary.full_steps) == 1 for summary in summaries)
    modules = {row.name: row for row in summarize_trace(tmp_path / "fsdp_rank0.json.gz").modules}
    assert {"0", "1"} <= set(modules)
    assert modules["0"].forward_host_ns > 0
    assert modules["0"].backward_host_ns > 0


def test_only_rank_0_records_by_default_but_every_rank_knows_which_steps_to_leave_out(tmp_path, caplog):
    callback = TraceCallback(4)
    trainer = make_trainer(tmp_path / "run")
    state, control = trainer.state, trainer.control
    other = type("OtherRank", (), {"process_index": 1, "output_dir": str(tmp_path), "gradient_accumulation_steps": 1})()
    callback.on_train_begin(other, state, control, model=trainer.model)
    for step in range(8):
        state.global_step = step
        callback.on_step_begin(other, state, control, model=trainer.model)
        assert not callback.is_recording
    assert [step for step in range(9) if callback.excluded(step)] == [3, 4, 5]
    callback.on_train_end(other, state, control)
    assert caplog.text == ""


def test_warm_up_traced_and_following_steps_stay_out_of_the_rates(tmp_path):
    callback = TraceCallback((3, 5))
    traced(tmp_path, callback)
    assert [step for step in range(1, 8) if callback.excluded(step)] == [2, 3, 4, 5, 6]
    assert callback.excluded(3) == "traced"


def test_v59_the_untraced_step_time_is_a_median_that_no_cold_step_moves(tmp_path):
    """Steps of 300 s, 60 s, then 2 s: what a cold Triton cache looks like."""
    times = iter([0.0, 300.0, 360.0, 362.0, 364.0, 366.0, *(366.0 + 50 * i for i in range(1, 20))])
    callback = TraceCallback(7, clock=lambda: next(times))
    traced(tmp_path, callback, num_train_epochs=2)
    assert only_summary(callback).facts.untraced_step_time_s == 2.0


def test_too_few_untraced_steps_say_nothing_about_their_time(tmp_path):
    callback = TraceCallback(3)
    traced(tmp_path, callback)
    assert only_summary(callback).facts.untraced_step_time_s is None


def test_numbers_of_the_ledger_become_part_of_the_file_and_of_the_verdict(tmp_path):
    class Ledger(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            callback.annotate(real_tokens=60, slots=100)

    callback = TraceCallback(3)
    trainer = make_trainer(tmp_path / "run", callbacks=[Ledger(), callback])
    trainer.train()
    summary = only_summary(callback)
    assert (summary.facts.real_tokens, summary.facts.slots) == (60, 100)
    assert "padding" in {finding.rule for finding in diagnose(summary)}


def test_a_running_profiler_costs_the_trace_and_not_the_training(tmp_path, caplog):
    callback = TraceCallback(3)
    with profile():
        trainer = traced(tmp_path, callback)
    assert trainer.state.global_step == 6
    assert callback.files == []
    assert "no trace of step 3: the profiler did not start (another profiler is running" in caplog.text


def test_a_full_disk_costs_the_trace_and_not_the_training(tmp_path, caplog):
    (tmp_path / "a file").touch()
    callback = TraceCallback(3, output_dir=tmp_path / "a file")
    trainer = traced(tmp_path, callback)
    assert trainer.state.global_step == 6
    assert "no trace of step 3:" in caplog.text


def test_a_resumed_run_says_which_steps_it_cannot_trace(tmp_path, caplog):
    more = {"save_strategy": "steps", "save_steps": 4}
    traced(tmp_path, TraceCallback(60), max_steps=4, **more)
    caplog.clear()
    callback = TraceCallback((3, 6))
    trainer = make_trainer(tmp_path / "run", callbacks=[callback], **more)
    trainer.train(resume_from_checkpoint=True)
    assert "no trace of step 3: this run began after step 4" in caplog.text
    assert only_summary(callback).facts.step == 6


def test_a_callback_used_twice_starts_afresh(tmp_path):
    callback = TraceCallback(3)
    traced(tmp_path / "one", callback)
    (first,) = callback.files
    traced(tmp_path / "two", callback)
    (second,) = callback.files
    assert first != second
    assert first.is_file()
    assert second.is_file()


@pytest.mark.parametrize("steps", [0, -1, (), (3, 0), ("4",), (True,), 2.5, None, "20"])
def test_steps_that_are_no_steps_are_refused(steps):
    with pytest.raises(ConfigurationError, match="positive integers"):
        TraceCallback(steps)


@pytest.mark.parametrize("steps", [range(3, 5), {4, 3}, numpy.array([3, 4]), (numpy.int64(3), 4)], ids=str)
def test_steps_may_be_any_whole_numbers(steps):
    assert TraceCallback(steps)._wanted == (3, 4)


@pytest.mark.parametrize(
    ("steps", "last_step", "said"),
    [
        ((20,), 100, []),
        ((20,), 0, []),  # an iterable data set that says no length
        ((4, 60), 6, ["step 60 cannot be traced in full: training ends with step 6"]),
        ((5, 6, 7), 6, ["steps 5 to 7 cannot be traced in full: training ends with step 6"]),
        (range(2, 200), 500, ["steps 2 to 199 are traced as one recording: "]),
    ],
    ids=["one", "endless", "beyond_the_end", "half", "whole_run"],
)
def test_v72_v74_what_no_recording_will_show_is_said_as_training_begins(steps, last_step, said):
    found = remarks(sessions_of(steps), last_step)
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_v60_mask_building_of_a_traced_step_is_a_named_range_and_the_functions_are_put_back(tmp_path):
    before = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()}
    callback = TraceCallback(3)
    traced(tmp_path, callback)
    assert MASK_RANGE in {row.name for row in only_summary(callback).annotations}
    after = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()}
    assert after == before


def test_a_compiled_model_keeps_its_mask_functions():
    model = torch.nn.Linear(2, 2)
    model._compiled_call_impl = model._call_impl  # what model.compile() sets, without importing the compiler
    before = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    with marked_mask_building(model):
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is before
    with marked_mask_building(torch.nn.Linear(2, 2)):
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is before


def test_no_host_name_or_path_is_in_the_file(tmp_path):
    callback = TraceCallback(3)
    traced(tmp_path, callback)
    document = json.loads(gzip.decompress(callback.files[0].read_bytes()))
    assert document.get("host_name", "") == ""  # torch 2.11 writes none
    assert str(tmp_path) not in json.dumps(document)
