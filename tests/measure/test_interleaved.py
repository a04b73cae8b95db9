"""Processes one after the other, within a time."""

import sys
import time

import pytest

from hf_speedkit.measure.interleaved import Job, run_jobs

QUIET = {"say": lambda line: None}


def job(path, code, *, name="a", **more):
    return Job(name=name, command=(sys.executable, "-c", code), out=path, **more)


def writes(path, text="done"):
    return f"open({str(path)!r}, 'w').write({text!r})"


def test_jobs_run_in_the_order_given(tmp_path):
    log = tmp_path / "log"
    jobs = [
        job(tmp_path / str(at), f"open({str(log)!r}, 'a').write('{at}'); {writes(tmp_path / str(at))}")
        for at in range(3)
    ]
    outcomes = run_jobs(jobs, **QUIET)
    assert log.read_text() == "012"
    assert all(one.failure is None and one.seconds > 0 for one in outcomes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "log"]


def test_a_failure_is_shown_and_its_name_not_tried_again(tmp_path):
    jobs = [
        job(tmp_path / "1", "raise SystemExit('out of memory, or so')"),
        job(tmp_path / "2", writes(tmp_path / "2"), name="other"),
        job(tmp_path / "3", writes(tmp_path / "3")),
    ]
    first, second, third = run_jobs(jobs, **QUIET)
    assert "exit code 1" in first.failure
    assert "out of memory, or so" in first.failure
    assert second.failure is None
    assert third.failure == "left out: it failed before"
    assert "out of memory" in (tmp_path / "1.failed.txt").read_text()


def test_a_refusal_that_a_launchers_report_has_pushed_away_is_shown_before_it(tmp_path):
    refusal = "started\\n\\nConfigurationError: no such thing\\nMend it:  write it\\nGo on all the same:  so\\n\\n"
    (far,) = run_jobs(
        [job(tmp_path / "1", f"print('{refusal}' + 'traceback\\n' * 60, end=''); raise SystemExit(1)")], **QUIET
    )
    assert (
        far.failure.count("ConfigurationError: no such thing\n    Mend it:  write it\n    Go on all the same:  so") == 1
    )
    assert far.failure.count("traceback") == 40
    assert "started" not in far.failure
    (near,) = run_jobs([job(tmp_path / "2", f"print('{refusal}'); raise SystemExit(1)")], **QUIET)
    assert near.failure.count("Mend it:  write it") == 1


def test_a_job_that_writes_nothing_has_failed(tmp_path):
    (outcome,) = run_jobs([job(tmp_path / "1", "pass")], **QUIET)
    assert "it wrote no result" in outcome.failure


def test_what_does_not_fit_into_the_budget_is_left_out_and_what_fits_is_run(tmp_path):
    jobs = [
        job(tmp_path / "1", writes(tmp_path / "1"), expected_s=1000.0),
        job(tmp_path / "2", writes(tmp_path / "2"), name="short", expected_s=1.0),
    ]
    long, short = run_jobs(jobs, budget_s=60.0, **QUIET)
    assert long.failure == "left out: needs about 1000 s, 60 s are left"
    assert short.failure is None


def test_what_a_job_took_counts_for_the_next_of_its_name(tmp_path):
    times = iter([0.0, 0.0, 0.0, 50.0, 50.0])  # begin; asked, began, ended; asked
    jobs = [job(tmp_path / str(at), writes(tmp_path / str(at)), expected_s=1.0) for at in range(2)]
    first, second = run_jobs(jobs, budget_s=60.0, clock=lambda: next(times), **QUIET)
    assert first.seconds == 50.0
    assert second.failure == "left out: needs about 50 s, 10 s are left"


def test_a_job_that_hangs_is_ended_with_its_children(tmp_path):
    child = f"import time; time.sleep(3); {writes(tmp_path / 'child')}"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    began = time.monotonic()
    (outcome,) = run_jobs([job(tmp_path / "1", code, expected_s=0.1)], budget_s=1.0, **QUIET)
    assert outcome.failure == "ended: the time budget is used up"
    assert time.monotonic() - began < 20
    time.sleep(3.5)
    assert not (tmp_path / "child").exists()


def test_an_interrupt_ends_the_job_under_way_and_passes_on(tmp_path):

    def say(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([job(tmp_path / "1", writes(tmp_path / "1")), job(tmp_path / "2", "pass")], say=say)
    assert (tmp_path / "1").read_text() == "done"
