"""Checkpoints are whole or not there, carry their names, and the last good one is never deleted."""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_run import SignalAt, losses, names, small
from support import tokenized
from transformers import Trainer, TrainerCallback

from hf_speedkit import SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.checkpoints import run_lock as run_lock_module
from hf_speedkit.trainer.checkpoints.files import MANIFEST_NAME, read_manifest
from hf_speedkit.trainer.checkpoints.folder import (
    UNFINISHED_NAME,
    clean_leftovers,
    publish,
    rotate,
)
from hf_speedkit.trainer.checkpoints.resume import Reader, settle_resume
from hf_speedkit.trainer.combination_rules import require_best_metric


def test_a_checkpoint_holds_what_loads_it_and_a_manifest_over_all_of_it(run):
    checkpoint = run[0] / "checkpoint-4"
    manifest = read_manifest(checkpoint)
    present = {path.name for path in checkpoint.iterdir()} - {MANIFEST_NAME}
    assert set(manifest.files) == present
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= present
    assert manifest.size_bytes == sum((checkpoint / name).stat().st_size for name in present)
    assert (manifest.step, manifest.world_size) == (4, 1)


class Dies(SpeedSFTTrainer):
    """Fails inside the save of step 4, weights and optimizer written; nothing is tidied up, as after a kill."""

    def _save_rng_state(self, output_dir):
        if self.state.global_step == 4:
            raise RuntimeError("killed here")
        super()._save_rng_state(output_dir)


def test_a_save_that_is_cut_off_leaves_the_last_good_checkpoint_and_the_next_run_tidies_up(tmp_path, run, caplog):
    with pytest.raises(RuntimeError, match="killed here"):
        small(tmp_path, kind=Dies).train()
    assert names(tmp_path) == [UNFINISHED_NAME, "checkpoint-2"]
    resumed = small(tmp_path)
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        resumed.train(resume_from_checkpoint=True)
    assert "removed checkpoint-4, which was not written to its end" in caplog.text
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert losses(resumed) == pytest.approx(run[1], abs=1e-6)


def test_a_checkpoint_that_was_being_replaced_gets_its_name_back(copy):
    aside = copy / UNFINISHED_NAME / "replaced"
    aside.mkdir(parents=True)
    (copy / "checkpoint-4").rename(aside / "checkpoint-4")
    clean_leftovers(copy)
    assert names(copy) == ["checkpoint-2", "checkpoint-4"]
    assert settle_resume(True, copy, Reader()) == str(copy / "checkpoint-4")


@pytest.mark.parametrize(
    ("harm", "left"), [(None, ["checkpoint-2", "checkpoint-4"]), ("optimizer.pt", ["checkpoint-2"])]
)
def test_a_checkpoint_that_only_lacks_its_name_gets_it(copy, harm, left):
    (copy / UNFINISHED_NAME).mkdir()
    (copy / "checkpoint-4").rename(copy / UNFINISHED_NAME / "checkpoint-4")
    if harm is not None:
        os.truncate(copy / UNFINISHED_NAME / "checkpoint-4" / harm, 9)
    clean_leftovers(copy)
    assert names(copy) == left


def test_a_link_to_nowhere_does_not_keep_a_checkpoint_from_its_name(copy):
    (copy / UNFINISHED_NAME).mkdir()
    folder = (copy / "checkpoint-4").rename(copy / UNFINISHED_NAME / "checkpoint-4")
    (copy / "checkpoint-4").symlink_to("nowhere")
    publish(folder, copy, read_manifest(folder))
    assert settle_resume(True, copy, Reader()) == str(copy / "checkpoint-4")


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_second_run_waits_for_the_directory_and_then_is_refused(tmp_path, monkeypatch, caplog, strategy):
    """Its start would remove what the first one has in writing."""
    monkeypatch.setattr(run_lock_module, "_POLL_S", 0.01)
    monkeypatch.setattr(run_lock_module, "_WAIT_S", 0.02)
    trainer = small(tmp_path, max_steps=2, save_strategy=strategy)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", hold, str(tmp_path / "_running")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(ConfigurationError, match="another run is writing into output_dir"):
            trainer.train()
        assert "waiting for another run" in caplog.text
        other.communicate()
    trainer.train()
    assert names(tmp_path) == (["checkpoint-2"] if strategy == "steps" else [])
    assert not (tmp_path / "_running").exists()


@pytest.mark.parametrize(
    ("present", "newest", "best", "keep", "left"),
    [
        ((2, 4, 6), 6, None, 2, (4, 6)),
        ((2, 4, 6), 6, 2, 2, (2, 6)),
        ((2, 4, 6), 6, 2, 1, (2, 6)),
        ((5, 8, 10, 15), 8, None, 2, (5, 8)),  # 10 and 15 are what a resumed run has gone back behind
        ((2, 4), 4, None, None, (2, 4)),
    ],
)
def test_rotation_never_deletes_the_newest_nor_the_best(tmp_path, present, newest, best, keep, left):
    for step in present:
        (tmp_path / f"checkpoint-{step}").mkdir()
    best = None if best is None else str(tmp_path / f"checkpoint-{best}")
    rotate(tmp_path, keep=keep, newest=tmp_path / f"checkpoint-{newest}", best=best)
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in left)


class WritesLate(SpeedSFTTrainer):
    """As under SHARDED_STATE_DICT: the folder is made with the weights, behind Trainer's look for the best one."""

    def save_model(self, output_dir=None, _internal_call=False):
        if not _internal_call:
            super().save_model(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir):
        super().save_model(output_dir, _internal_call=True)
        super()._save_optimizer_and_scheduler(output_dir)


def test_a_limit_of_one_and_the_best_model_keep_their_names(tmp_path):
    trainer = small(
        tmp_path, kind=WritesLate, max_steps=6, save_total_limit=1, eval_dataset=tokenized([9, 20], seed=7),
        eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="loss",
        learning_rate=0.1,
    )  # fmt: skip
    trainer.train()
    best = trainer.state.best_global_step
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    state = json.loads((tmp_path / f"checkpoint-{best}" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint
    assert names(tmp_path) == [f"checkpoint-{best}"]


class AddsRouge(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **_):
        metrics["eval_rouge"] = 0.5


@pytest.mark.parametrize(
    ("metric", "more", "meant"),
    [
        (None, {}, None),
        ("eval_mean_token_accuracy", {}, None),
        ("mean_token_acuracy", {}, "eval_mean_token_accuracy"),
        ("rouge", {}, "eval_loss"),
        ("rouge", {"compute_metrics": dict}, None),
        ("rouge", {"callbacks": [AddsRouge()]}, None),
        (None, {"sets": True}, "eval_chats_loss"),
        ("eval_tasks_loss", {"sets": True}, None),
        ("rouge", {"sets": True, "compute_metrics": dict}, "eval_chats_loss"),
        ("eval_x_loss", {"sets": "eval_x"}, "eval_eval_x_loss"),
        ("eval_eval_x_loss", {"sets": "eval_x"}, None),
    ],
)
def test_a_best_metric_that_no_evaluation_returns_is_refused_before_step_1(tmp_path, metric, more, meant):
    rows = tokenized([9, 20], seed=7)
    more = dict(more)
    given = more.pop("sets", None)
    sets = {given: rows} if isinstance(given, str) else {"chats": rows, "tasks": rows} if given else rows
    measured = more.pop("compute_metrics", None)
    trainer = small(
        tmp_path, max_steps=1, eval_dataset=sets, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        save_steps=1, metric_for_best_model=metric, **more,
    )  # fmt: skip
    trainer.compute_metrics = measured
    if meant is None:
        require_best_metric(trainer)
        return
    with pytest.raises(ConfigurationError, match=f'metric_for_best_model="{meant}"'):
        trainer.train()


def test_what_goes_to_the_hub_is_the_whole_checkpoint_under_its_name(tmp_path, monkeypatch):
    pushed = []

    def push(self, folder):
        pushed.append((Path(folder).name, (Path(folder) / MANIFEST_NAME).exists()))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    trainer = small(tmp_path, max_steps=2)
    trainer.args.push_to_hub = True  # set afterwards: the constructor would make a repository
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: None)
    trainer.train()
    assert pushed == [("checkpoint-2", True)]


def test_the_last_checkpoint_of_a_stopped_run_stays_beside_the_best(tmp_path):
    trainer = small(
        tmp_path, save_steps=1, eval_strategy="steps", eval_steps=1, save_total_limit=1, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=False, callbacks=[SignalAt(2, signal.SIGTERM)],
        eval_dataset=tokenized([9, 4, 17]),
    )  # fmt: skip
    trainer.train()
    assert trainer.stopped_by is not None
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-1"
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert trainer.args.save_total_limit == 1


def test_v34_v35_ranks_meet_before_each_checkpoint_evaluation_and_the_end_and_evaluate_together_afterwards(tmp_path):
    trainer = small(tmp_path, eval_dataset=tokenized([5, 6]), eval_strategy="steps", eval_steps=4)
    met, calls = [], []
    trainer.startup.meet = lambda wants, *, step, timeout_s: met.append((step, *wants))
    trainer.startup.call = calls.append
    trainer.train()
    end = (4, "end training")
    assert met == [(2, "save"), (4, "evaluate", "save", "end training"), end, end]
    assert not calls
    trainer.evaluate()
    trainer.evaluate()
    assert len(calls) == 2
    assert calls[0] is calls[1], "the ranks count the calls"


def test_v34_ranks_that_differ_stop_before_the_model_is_prepared(tmp_path, monkeypatch):
    from hf_speedkit.trainer.proof import startup

    trainer = small(tmp_path)
    monkeypatch.setattr(startup, "runs_alone", lambda: False)
    other = startup.surroundings(replace(trainer.args, learning_rate=0.5), trainer.model)
    monkeypatch.setattr(startup, "gather_agreed", lambda check: [check(), other])
    trainer._prepare_for_training = None
    with pytest.raises(ConfigurationError, match="learning_rate"):
        trainer.train()
