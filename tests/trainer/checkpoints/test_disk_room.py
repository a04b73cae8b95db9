"""Disks without room: refused before the first step, named when they fill up, the last good checkpoint kept."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from checkpoint_run import names, small
from safetensors import SafetensorError
from support import tiny_llama
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerCallback

from hf_speedkit.core.errors import CheckpointError
from hf_speedkit.trainer.checkpoints.files import MANIFEST_NAME, read_manifest
from hf_speedkit.trainer.checkpoints.final_model import require_room_at_end
from hf_speedkit.trainer.checkpoints.folder import (
    UNFINISHED_NAME,
    failed_write,
    require_space,
)

Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(200_000, 100_000, 100_000))
    trainer = small(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint takes \d+ KiB, and .* 97\.7 KiB free; nothing was written"):
        trainer.train()
    assert trainer.state.global_step == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(200_000, 199_000, 1_000))
    trainer = small(tmp_path / "none", save_strategy="no", max_steps=1)
    trainer.train()
    assert "nothing but a final model will be kept, if that: the model at the end takes" in caplog.text
    # A job that saves it into output_dir asks before step 1, as the recipe does; else the call itself refuses.
    for ask in (lambda: require_room_at_end(trainer), trainer.save_model):
        with pytest.raises(CheckpointError, match=r"the final model takes .* nothing was written") as refused:
            ask()
        assert refused.value.regardless is None  # it has save_strategy="no"
    assert names(tmp_path / "none") == []


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


@pytest.mark.parametrize("export_dtype", ["bfloat16", "stored"])  # gathered here, and saved by the Trainer itself
def test_a_disk_that_fills_up_under_the_final_model_is_named(tmp_path, monkeypatch, export_dtype):
    trainer = small(tmp_path, max_steps=2, export_dtype=export_dtype)
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
