"""A whole checkpoint with its manifest, made without training."""

from __future__ import annotations

from support import tiny_llama, tiny_tokenizer

from hf_speedkit.trainer.checkpoints.files import checked_files, files_of, write_manifest
from hf_speedkit.trainer.checkpoints.folder import manifest_of


def whole_checkpoint(path):
    tiny_llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    for name in ("trainer_state.json", "optimizer.pt", "rng_state.pth"):
        (path / name).write_text("{}")
    files = checked_files(path, files_of(path, rank=0, saver=True))
    write_manifest(path, manifest_of(4, 1, [files]))
    return path
