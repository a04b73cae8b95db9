"""Our metrics in the tracker people use: read back from an offline run's own file."""

import sys
from types import SimpleNamespace

import pytest
from plain_trainer import documents, make_trainer
from transformers import TrainerCallback
from wandb_file import history

from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.metrics.window_report import WindowReport
from hf_speedkit.trainer.throughput_callback import ThroughputCallback

RATES = [f"train/speed/{name}_per_second" for name in ("slots", "real_tokens", "target_tokens")]


@pytest.fixture
def offline_run(tmp_path, monkeypatch):
    """Run `train` with wandb writing under tmp_path; gives the rows of the one run it made."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")

    def run(*sessions):
        for train in sessions:
            try:
                train()
            finally:
                wandb.finish()
        # finish() comes back before the service has written the last rows: on a busy machine four of nine reads
        # found none. The service writes them out before it ends.
        wandb.teardown()
        files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)
        assert len(files) == len(sessions)
        return [row for file in files for row in history(file)]

    return run


class Late(TrainerCallback):
    """What people try first: a key added by a callback that stands behind the trackers."""

    def on_log(self, args, state, control, logs=None, **keywords):
        logs["late"] = 1.0


def test_v80_our_keys_stand_in_the_rows_of_the_global_step(tmp_path, offline_run):
    trainer = make_trainer(
        tmp_path,
        data=documents((5,) * 16),
        report_to="wandb",
        run_name="tiny",
        logging_steps=2,
        gradient_accumulation_steps=2,
        eval_data=documents((4, 4)),
        eval_strategy="steps",
        eval_steps=2,
        callbacks=[Late()],
    )
    attach(trainer, ThroughputCallback())
    rows = offline_run(trainer.train)
    trained = [row for row in rows if "train/loss" in row]
    assert [row["train/global_step"] for row in trained] == [2, 4]
    for row in trained:
        assert set(RATES) <= set(row)
        assert row["train/speed/packing_efficiency"] == 1.0
    assert trained[-1]["train/speed/total_real_tokens"] == 16 * 5
    others = [row for row in rows if "train/loss" not in row]
    assert any("eval/loss" in row for row in others)
    assert not [key for row in others for key in row if "speed/" in key]
    assert not [key for row in rows for key in row if key.endswith("late")]  # the guard this test is about


def test_v79_no_point_is_lost_when_a_run_goes_back_to_an_older_checkpoint(tmp_path, offline_run, monkeypatch):
    """wandb's own step cannot go back; ours is the global step, and every session's rows are kept."""
    monkeypatch.setenv("WANDB_RUN_ID", "same")
    monkeypatch.setenv("WANDB_RESUME", "allow")

    def session(checkpoint=None):
        trainer = make_trainer(
            tmp_path, data=documents((5,) * 16), report_to="wandb", save_strategy="steps", save_steps=3
        )
        attach(trainer, ThroughputCallback())
        trainer.train(resume_from_checkpoint=checkpoint)

    rows = offline_run(session, lambda: session(str(tmp_path / "checkpoint-6")))
    steps = [row["train/global_step"] for row in rows if "train/speed/total_real_tokens" in row]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 7, 8]
    totals = [
        row["train/speed/total_real_tokens"] for row in rows if row["train/global_step"] == 8 and "train/loss" in row
    ]
    assert totals == [80, 80]  # the later session goes on from the checkpoint's total


@pytest.mark.parametrize(
    ("environment", "mode", "reports", "said"),
    [
        ({"RANK": "1"}, "online", False, 1),
        ({"RANK": "2"}, "online", False, 0),  # one rank speaks for all
        ({"RANK": "1"}, "shared", False, 0),
        ({"RANK": "0"}, "online", True, 0),
        ({"RANK": "1"}, None, False, 0),
    ],
    ids=["stray", "another", "shared", "the_one_that_reports", "none"],
)
def test_v78_a_run_on_a_rank_that_reports_nothing_is_said(monkeypatch, caplog, environment, mode, reports, said):
    """`wandb.init` before the Trainer runs on every rank, and as many runs appear."""
    run = SimpleNamespace(settings=SimpleNamespace(mode=mode)) if mode else None
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    WindowReport(()).begin(SimpleNamespace(is_world_process_zero=reports, global_step=0))
    assert caplog.text.count("an empty run for each of them") == said
