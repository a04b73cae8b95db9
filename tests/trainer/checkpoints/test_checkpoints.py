"""Checkpoints of one process: whole or not there, verified before they are loaded, never the last one deleted."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoint_run import SignalAt, build, losses
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from test_sft import Recorder
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainerState

from hf_speedkit import SpeedSFTTrainer
from hf_speedkit.core.errors import CheckpointError, ConfigurationError, PackingError
from hf_speedkit.core.records import to_json
from hf_speedkit.packing.sampler import PackedBatchSampler
from hf_speedkit.trainer.checkpoints import run_lock as run_lock_module
from hf_speedkit.trainer.checkpoints.files import MANIFEST_NAME, read_manifest
from hf_speedkit.trainer.checkpoints.folder import (
    UNFINISHED_NAME,
    clean_leftovers,
    failed_write,
    manifest_of,
    publish,
    require_space,
    rotate,
)
from hf_speedkit.trainer.checkpoints.resume import Reader, check_kind, settle_resume
from hf_speedkit.trainer.checkpoints.resume_model import refuse_missing_weights
from hf_speedkit.trainer.data.resume import compare_documents, data_of_rank, refuse_ranks_apart
from hf_speedkit.trainer.ranks.roll_call import leave

Usage = namedtuple("Usage", "total used free")


def small(path, **changes):
    return build(path, **{"model": tiny_llama(), "max_steps": 4, "save_steps": 2, **changes})


def names(path):
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith(("checkpoint", "_")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    trainer = small(path)
    trainer.processing_class.chat_template = "{{ messages[0]['content'] }}"
    trainer.train()
    return path, losses(trainer)


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "copy")
    return tmp_path / "copy"


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


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(lambda c: flip(c / "model.safetensors"), "model.safetensors was changed after", id="byte flipped"),
        pytest.param(lambda c: flip(c / "optimizer.pt"), "optimizer.pt was changed after", id="optimizer flipped"),
        pytest.param(lambda c: os.truncate(c / "optimizer.pt", 99), "optimizer.pt has 99 bytes", id="cut"),
        pytest.param(lambda c: (c / "scheduler.pt").unlink(), "scheduler.pt is missing", id="missing"),
        pytest.param(lambda c: (c / MANIFEST_NAME).write_text("{"), "manifest cannot be read", id="manifest cut"),
        pytest.param(
            lambda c: (c / MANIFEST_NAME).write_text(to_json(manifest_of(4, 1, []))), "names no files", id="no files"
        ),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message_and_refused_by_name(copy, caplog, harm, said):
    harm(copy / "checkpoint-4")
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        assert settle_resume(True, copy, Reader()) == str(copy / "checkpoint-2")
    assert "resuming from checkpoint-2: checkpoint-4 is damaged" in caplog.text
    assert said in caplog.text
    with pytest.raises(CheckpointError, match=said) as refused:
        settle_resume(str(copy / "checkpoint-4"), copy, Reader())
    assert "resume_from_checkpoint=True takes the last good one" in str(refused.value)


def test_each_rank_reads_a_share_of_the_bytes_and_together_they_read_all(copy):
    flip(copy / "checkpoint-4" / "model.safetensors")
    chosen = [settle_resume(True, copy, Reader(index=index, count=3)) for index in range(3)]
    assert sorted(chosen) == [str(copy / "checkpoint-2"), *[str(copy / "checkpoint-4")] * 2]
    assert settle_resume(True, copy, Reader(checksums=False)) == str(copy / "checkpoint-4")


def test_without_any_good_checkpoint_the_refusal_says_why_of_each(copy, tmp_path):
    for step in (2, 4):
        (copy / f"checkpoint-{step}" / "trainer_state.json").unlink()
    for resume in (True, "auto"):
        with pytest.raises(CheckpointError, match=r"checkpoint-4: trainer_state\.json is missing"):
            settle_resume(resume, copy, Reader())
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        settle_resume(True, tmp_path / "new", Reader())
    assert settle_resume("auto", tmp_path / "new", Reader()) is None
    assert settle_resume(None, copy, Reader()) is None


@pytest.mark.parametrize("max_steps", [4, 3])
def test_a_run_that_is_over_trains_no_step_more_when_it_is_started_again(copy, run, caplog, max_steps):
    """As a job is that was killed while it wrote its final model, and queued again with resume_from_checkpoint auto."""
    recorder = Recorder()
    again = small(copy, max_steps=max_steps, callbacks=[recorder])
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        again.train(resume_from_checkpoint="auto")
    assert recorder.rows == []
    assert again.state.global_step == 4
    assert names(copy) == ["checkpoint-2", "checkpoint-4"]
    assert f"checkpoint-4 has 4 of {max_steps} steps: nothing is left to train" in caplog.text
    assert losses(again) == run[1]
    again.summary()


def in_parts(checkpoint, *, lose):
    """Weights in two files and an index, as a model of more than 50 GB is saved."""
    whole = load_file(checkpoint / "model.safetensors")
    parts = {f"model-0000{number}-of-00002.safetensors": list(whole)[number - 1 :: 2] for number in (1, 2)}
    for name, keys in parts.items():
        save_file({key: whole[key] for key in keys}, checkpoint / name)
    places = {key: name for name, keys in parts.items() for key in keys}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (checkpoint / "model.safetensors").unlink()
    if lose:
        (checkpoint / "model-00002-of-00002.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "step"),
    [
        pytest.param(lambda c: None, 4, id="whole"),
        pytest.param(lambda c: (c / "trainer_state.json").unlink(), 2, id="state not written"),
        pytest.param(lambda c: os.truncate(c / "model.safetensors", 999), 2, id="weights cut"),
        pytest.param(lambda c: (c / "model.safetensors").unlink(), 2, id="no weights"),
        pytest.param(lambda c: (c / "trainer_state.json").write_text("[]"), 2, id="no state"),
        pytest.param(lambda c: os.truncate(c / "optimizer.pt", 999), 2, id="optimizer cut"),
        pytest.param(lambda c: (c / "optimizer.pt").unlink(), 2, id="no optimizer"),
        pytest.param(lambda c: (c / "scheduler.pt").unlink(), 2, id="no schedule"),
        pytest.param(lambda c: os.truncate(c / "rng_state.pth", 99), 2, id="random state cut"),
        pytest.param(lambda c: in_parts(c, lose=False), 4, id="in parts"),
        pytest.param(lambda c: in_parts(c, lose=True), 2, id="a part missing"),
    ],
)
def test_a_checkpoint_that_transformers_wrote_is_taken_if_it_looks_whole(copy, caplog, harm, step):
    for number in (2, 4):
        (copy / f"checkpoint-{number}" / MANIFEST_NAME).unlink()
    harm(copy / "checkpoint-4")
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        assert settle_resume(True, copy, Reader()) == str(copy / f"checkpoint-{step}")
    assert "has no manifest" in caplog.text


def test_whole_weights_are_refused_by_a_sharded_run_with_a_way_on(copy):
    check_kind(copy / "checkpoint-4", fsdp=False)
    with pytest.raises(ConfigurationError, match="without FSDP") as refused:
        check_kind(copy / "checkpoint-4", fsdp=True)
    assert "start a new run from its weights" in str(refused.value)
    (copy / "checkpoint-4" / "pytorch_model_fsdp_0").mkdir()
    check_kind(copy / "checkpoint-4", fsdp=True)


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


def test_weights_alone_and_the_state_of_another_optimizer_are_refused_with_a_way_on(copy):
    with pytest.raises(ConfigurationError, match="SGD: the saved optimizer has no dampening, momentum") as refused:
        small(copy, optim="sgd", max_steps=5).train(resume_from_checkpoint=True)
    assert "model_name_or_path=" in str(refused.value)
    for name in ("optimizer.pt", "scheduler.pt", MANIFEST_NAME):
        (copy / "checkpoint-4" / name).unlink()
    with pytest.raises(ConfigurationError, match="holds weights alone") as refused:
        small(copy, max_steps=5).train(resume_from_checkpoint=True)
    assert "model_name_or_path=" in str(refused.value)


def test_a_second_run_waits_for_the_directory_and_then_is_refused(tmp_path, monkeypatch, caplog):
    """Its start would remove what the first one has in writing."""
    monkeypatch.setattr(run_lock_module, "_POLL_S", 0.01)
    monkeypatch.setattr(run_lock_module, "_WAIT_S", 0.02)
    trainer = small(tmp_path, max_steps=2)
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
    assert names(tmp_path) == ["checkpoint-2"], "the lock is gone"


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


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(200_000, 100_000, 100_000))
    trainer = small(tmp_path)
    with pytest.raises(CheckpointError, match=r"a checkpoint takes .* GiB free; nothing was written"):
        trainer.train()
    assert trainer.state.global_step == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(200_000, 199_000, 1_000))
    small(tmp_path / "none", save_strategy="no", max_steps=1).train()
    assert "nothing but a final model will be kept, if that: the model at the end takes" in caplog.text


def test_a_disk_that_tells_no_size_is_not_taken_for_a_full_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 0))
    require_space(tmp_path, 1 << 40)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "checkpoint-6 could not be written: the disk is full"),
        (CheckpointException("", {1: (OSError("planted"), None)}), "could not be written\n  OSError: planted"),
    ],
    ids=["full", "torch's own"],
)
def test_a_save_that_fails_says_so_and_names_the_checkpoint_that_is_left(copy, error, said):
    found = failed_write(error, copy, "checkpoint-6")
    assert isinstance(found, CheckpointError)
    assert said in str(found)
    assert "last whole checkpoint: checkpoint-4" in str(found)
    other = ValueError("planted")
    assert failed_write(other, copy, "checkpoint-6") is other


@pytest.mark.parametrize("at", [".safetensors", MANIFEST_NAME])
def test_a_quota_that_shows_when_files_are_flushed_is_named_as_well(tmp_path, monkeypatch, at):
    """NFS and delayed allocation take a write and refuse the flush."""
    flush = os.fsync

    def refuse(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if "checkpoint-4" in path.parts and path.name.endswith(at):
            raise OSError(122, "Disk quota exceeded")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match="checkpoint-4 could not be written: the disk is full, or a quota") as no:
        small(tmp_path).train()
    assert "last whole checkpoint: checkpoint-2" in str(no.value)
    assert names(tmp_path) == [UNFINISHED_NAME, "checkpoint-2"]


def test_a_disk_that_fills_up_under_the_final_model_is_named(tmp_path, monkeypatch):
    trainer = small(tmp_path, max_steps=2, export_dtype="bfloat16")
    trainer.train()
    full = SafetensorError('I/O error: Os { code: 28, kind: StorageFull, message: "No space left on device" }')
    monkeypatch.setattr(trainer, "_save", lambda *_, **__: (_ for _ in ()).throw(full))
    with pytest.raises(CheckpointError, match="the final model could not be written: the disk is full") as refused:
        trainer.save_model(str(tmp_path))
    assert "last whole checkpoint: checkpoint-2" in str(refused.value)


def test_a_disk_that_fills_up_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    class FillsUp(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(200_000, 100_000, 100_000))

    with pytest.raises(CheckpointError, match="checkpoint-2 takes") as refused:
        small(tmp_path, callbacks=[FillsUp()]).train()
    assert 'save_strategy="no"' in str(refused.value)
    assert names(tmp_path) == ["checkpoint-2"]


def test_what_a_checkpoint_takes_is_known_before_and_after_the_first_step(run):
    """Weights and two moments of an AdamW; its step counters and the text files are the rest."""
    from hf_speedkit.trainer.checkpoints.folder import checkpoint_bytes

    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    before = checkpoint_bytes(model, optimizer)
    assert before == 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    model(input_ids=torch.tensor([[2, 3]]), labels=torch.tensor([[2, 3]])).loss.backward()
    optimizer.step()
    assert 0 < checkpoint_bytes(model, optimizer) - before < 1000
    files = read_manifest(run[0] / "checkpoint-4").files
    written = sum(files[name].size_bytes for name in ("model.safetensors", "optimizer.pt"))
    assert before < written < 1.15 * before  # pickles and headers weigh something in 300 kB


@pytest.mark.parametrize(
    ("dataset", "changes", "said", "mend"),
    [
        pytest.param(tokenized([9, 4, 17]), {}, "documents: other ones", "settings and data", id="other data"),
        pytest.param(None, {"tokens_per_batch": 64}, "tokens_per_batch: saved 32, now 64", "settings", id="rows"),
        pytest.param(
            None, {"gradient_accumulation_steps": 2}, "packs_per_step: saved 1, now 2", "divides 1", id="step"
        ),
    ],
)
def test_a_resume_that_would_see_other_documents_is_refused_with_a_way_on(copy, dataset, changes, said, mend):
    if "gradient_accumulation_steps" in changes:
        mend = "gradient_accumulation_steps=1 gives 1 ranks the saved steps"
    with pytest.raises(PackingError) as refused:
        small(copy, dataset=dataset, max_steps=5, **changes).train(resume_from_checkpoint=True)
    assert said in str(refused.value)
    assert mend in str(refused.value)
    assert "ignore_data_skip=True" in str(refused.value)
    small(copy, dataset=dataset, max_steps=5, ignore_data_skip=True, **changes).train(resume_from_checkpoint=True)


def test_a_resume_on_rows_of_another_kind_is_refused_unless_the_data_begins_anew():
    sampler, data = PackedBatchSampler([5, 6], tokens_per_batch=8), tokenized([5, 6])
    kinds = {"packed": (sampler, False), "padded": (None, False), "streamed": (None, True)}
    for before in kinds:
        for now, (its_sampler, streamed) in kinds.items():
            state = TrainerState(global_step=0)
            compare_documents(state, kinds[before][0], data, ignore=False, streamed=kinds[before][1])
            state.global_step = 1
            compared = partial(compare_documents, state, its_sampler, data, streamed=streamed)
            if before != now:
                with pytest.raises(PackingError, match="the saved run trained on") as refused:
                    compared(ignore=False)
                assert "ignore_data_skip=True" in str(refused.value)
            compared(ignore=True)
            compared(ignore=False)


def test_v35_ranks_with_other_evaluation_rows_are_told_apart_and_like_ones_are_not():
    """Each rank counts its own rows: one would evaluate once more than the other, and wait."""
    state = TrainerState()

    def rank(*sets, **named):
        return data_of_rank(state, named or (sets[0] if sets else None))

    same = [rank(tokenized([5, 6])), rank(tokenized([5, 6]))]
    refuse_ranks_apart(same)
    refuse_ranks_apart([rank(), rank()])
    refuse_ranks_apart([rank(a=tokenized([5]), b=tokenized([6]))] * 2)
    for ranks, what in (
        ([same[0], rank(tokenized([5, 7]))], "the evaluation data"),
        ([same[0], rank(tokenized([5, 6], targets_from=1))], "the evaluation data"),
        ([rank(), same[0]], "the evaluation data"),
        ([rank(a=tokenized([5]), b=tokenized([6])), rank(a=tokenized([5]), b=tokenized([7]))], "the evaluation data b"),
    ):
        with pytest.raises(PackingError, match=f"1 of 2 ranks have other documents than rank 0 in {what}\n") as refused:
            refuse_ranks_apart(ranks)
        assert "rank 1:" in str(refused.value)


def test_a_resume_with_other_targets_in_documents_of_the_same_lengths_is_refused(copy):
    from checkpoint_run import LENGTHS

    masked = tokenized(LENGTHS, targets_from=1)
    with pytest.raises(PackingError, match="tokens or targets differ"):
        small(copy, dataset=masked, max_steps=5).train(resume_from_checkpoint=True)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_training_with_a_whole_checkpoint_and_the_resumed_run_is_the_uninterrupted_one(
    tmp_path, run, number, caplog
):
    recorder = Recorder()
    stopped = small(tmp_path, save_steps=50, callbacks=[SignalAt(2, number), recorder], eval_strategy="no")
    with caplog.at_level(logging.WARNING, logger="hf_speedkit"):
        stopped.train()
    assert stopped.stopped_by == number.name
    assert stopped.state.global_step == 3 == len(recorder.rows), "the step under way is finished"
    assert f"{number.name}: stopped after step 3 of 4, checkpoint-3 is complete" in caplog.text
    assert names(tmp_path) == ["checkpoint-3"]
    assert signal.getsignal(number) is signal.SIG_DFL
    resumed = small(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.stopped_by is None
    assert losses(resumed) == pytest.approx(run[1], abs=1e-6)


def test_a_signal_to_every_process_of_the_job_does_not_take_the_data_away(tmp_path):
    """Slurm's way; without the workers' deafness torch raises "DataLoader worker is killed by signal" in the step."""

    class ToAll(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                workers = multiprocessing.active_children()
                assert workers
                # By another process: torch's workers end quietly when the signal is their parent's.
                subprocess.run(
                    ["kill", "-TERM", *(str(worker.pid) for worker in workers), str(os.getpid())], check=True
                )
                time.sleep(0.5)  # long enough for a dead worker to be noticed

    stopped = small(tmp_path, max_steps=6, dataloader_num_workers=1, callbacks=[ToAll()])
    stopped.train()
    assert (stopped.stopped_by, stopped.state.global_step) == ("SIGTERM", 2)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("changes", [{"save_strategy": "no"}, {"stop_signals": []}])
def test_signals_are_left_alone_where_no_checkpoint_could_be_written_or_none_is_wanted(tmp_path, changes):
    seen = []

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(signal.getsignal(signal.SIGTERM))

    small(tmp_path, max_steps=1, callbacks=[Looks()], **changes).train()
    assert seen == [signal.SIG_DFL]


def test_a_signal_before_the_first_step_ends_the_process_as_ever_since_nothing_is_there_to_save(tmp_path):
    """Deaf to it, a rank that waits for one that failed while starting would outlive torchrun's SIGTERM by minutes."""
    seen = []

    class Looks(TrainerCallback):
        def on_train_begin(self, *_, **__):
            seen.append(signal.getsignal(signal.SIGTERM))

        def on_step_end(self, *_, **__):
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer = small(tmp_path, max_steps=2, save_steps=50, callbacks=[Looks()])
    trainer.train()
    assert seen == [signal.SIG_DFL, trainer.stop_signal._receive, trainer.stop_signal._receive]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_handler_stays(tmp_path):
    def handler(number, frame):
        """Not ours."""

    before = signal.signal(signal.SIGTERM, handler)
    try:
        small(tmp_path, max_steps=1).train()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_word_that_is_no_signal_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'SIGNOTHING' is no signal"):
        small(tmp_path, stop_signals=["SIGNOTHING"])


def test_v43_the_final_model_is_stored_as_asked_and_its_decays_stay_as_trained(tmp_path):
    trainer = small(tmp_path, model=tiny_hybrid(), export_dtype="bfloat16", save_strategy="no")
    trainer.save_model(str(tmp_path / "final"))
    stored = {name: tensor.dtype for name, tensor in load_file(tmp_path / "final" / "model.safetensors").items()}
    decays = {name for name in stored if name.endswith(("A_log", "dt_bias"))}
    assert decays
    assert {stored[name] for name in decays} == {torch.float32}
    assert {stored[name] for name in stored.keys() - decays} == {torch.bfloat16}
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not loading["missing_keys"]
    assert model.dtype == torch.bfloat16
    assert trainer.model.dtype == torch.float32, "the live model is left as it is"


@pytest.mark.parametrize(("dtype", "stored"), [("auto", torch.float32), ("float16", torch.float16)])
def test_auto_stores_what_a_run_computes_in_and_a_whole_model_is_saved_by_one_rank_alone(
    tmp_path, monkeypatch, dtype, stored
):
    # What people write with the Trainer's own save_model: if trainer.is_world_process_zero(): trainer.save_model()
    monkeypatch.setattr(
        "hf_speedkit.trainer.checkpoints.export.agree", lambda _: pytest.fail("it waits for the other ranks")
    )
    small(tmp_path, export_dtype=dtype, save_strategy="no").save_model(str(tmp_path / "final"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto").dtype == stored


@pytest.mark.parametrize("spread", ["FSDP", "DeepSpeed", None])
def test_only_a_model_that_is_spread_over_the_ranks_calls_the_roll(tmp_path, monkeypatch, spread):
    trainer = small(tmp_path, export_dtype="bfloat16")
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = spread == "FSDP", spread == "DeepSpeed"
    store = dist.HashStore()
    watch = trainer.startup._watch
    watch._store, watch._rank, watch._ranks = store, 0, 2
    store.set("here/0", "")
    store.set("here/1", "")
    leave(store, 1)
    alone = pytest.raises(CheckpointError, match="rank 1 of 2 ended without it")
    with nullcontext() if spread is None else alone:
        trainer.save_model(str(tmp_path / "final"))


def test_a_checkpoint_of_trls_trainer_goes_on_with_padded_batches_and_is_refused_for_packed_rows(tmp_path, caplog):
    from trl import SFTConfig, SFTTrainer

    sizes = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", "logging_steps": 1}
    lengths = [9, 4, 17, 2, 30, 8, 8, 21]
    whole = SFTTrainer(
        tiny_llama(), SFTConfig(**settings, **sizes, disable_tqdm=True, gradient_checkpointing=False),
        train_dataset=tokenized(lengths), processing_class=tiny_tokenizer(),
    )  # fmt: skip
    whole.train()
    checkpoint = str(tmp_path / "checkpoint-2")
    ours = {**sizes, "save_strategy": "no", "dataset": tokenized(lengths), "allow_existing_output": True}
    padded = {"packing": False, "tokens_per_batch": None, "lr_scheduler_type": "linear"}
    resumed = small(tmp_path, **{**ours, **padded})
    resumed.train(resume_from_checkpoint=checkpoint)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)  # sums in another order
    assert "the checkpoint is another trainer's" in caplog.text
    with pytest.raises(PackingError, match="with batches of 2 documents a device; here they have 1"):
        small(tmp_path, **{**ours, **padded, "per_device_train_batch_size": 1}).train(resume_from_checkpoint=checkpoint)

    ours |= {"per_device_train_batch_size": 1}
    with pytest.raises(PackingError, match=r"step 2 of 4 held other documents(.|\n)*model_name_or_path=.*checkpoint-2"):
        small(tmp_path, **ours).train(resume_from_checkpoint=checkpoint)
    anew = small(tmp_path, **ours, ignore_data_skip=True)
    anew.train(resume_from_checkpoint=checkpoint)
    assert list(losses(anew)) == [1, 2, 3, 4]


PADDED = {"packing": False, "documents": 4, "documents_per_step": 2, "seed": 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"seed": 2}, "seed: saved 1, now 2"),
        ({"documents_per_step": 4}, "documents_per_step: saved 2, now 4"),
        ({"documents": 5}, "documents: saved 4, now 5"),
        (None, "train on other documents"),
    ],
)
def test_a_padded_resume_that_would_skip_other_documents_is_refused(changed, message):
    """Trainer skips as many batches as the saved run took, whatever is in them."""
    state = TrainerState()
    compare_documents(state, None, tokenized([4, 5, 6, 7]), ignore=False, padded=PADDED)
    state.global_step = 3
    again = tokenized([4, 5, 6, 7], seed=int(changed is None))
    with pytest.raises(PackingError, match=message) if message else nullcontext():
        compare_documents(state, None, again, ignore=False, padded=PADDED | (changed or {}))
    compare_documents(state, None, again, ignore=True, padded=PADDED | (changed or {}))


def test_a_checkpoint_without_some_of_the_weights_is_refused():
    """Trainer warns and trains them from where they began."""
    model = tiny_llama()
    refuse_missing_weights(model, SimpleNamespace(missing_keys=["a.buffer"]))
    with pytest.raises(CheckpointError, match="lacks 1 of the model's"):
        refuse_missing_weights(model, SimpleNamespace(missing_keys=["model.norm.weight"]))
