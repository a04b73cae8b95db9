"""Writes docs/metrics.md from the table of metrics in the code: `python scripts/render_metrics.py`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from hf_speedkit.core.layer_flops import FAMILIES
from hf_speedkit.core.metrics import METRICS

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

Everything below goes through `Trainer.log`, in the same row as the loss; a tracker puts `train/` in front. Keys do
not change their meaning between releases. What was not measured is left out of the log, never shown as 0. Made by
`scripts/render_metrics.py` from `hf_speedkit/core/metrics.py`; do not edit by hand.

**Words.** A *document* is one training example in a packed row. *Slots* are positions computed, padding included.
*Real tokens* are slots that hold a document's token. *Target tokens* are labels that enter the loss. A *window* is
the optimizer steps since the previous logging step; its *steady* steps are those that nothing excluded: not the first
of a session, not warm-up (compilation, autotuning), not traced, not counted. The *counted* step is one in
`count_launches_every` that CUPTI records; its keys stand in the row of the window that holds it.

**What cannot be told apart.** On several ranks accelerate fills an epoch's last round with rows of its begin. They are
slots and nothing else, so totals over ranks are those of the data; but in a stream that is not dispatched, and in a row
that a collator has put together from several samples, what repeats counts again. TRL's `pad_to_multiple_of` makes each
padding token of a packed row a document of its own, so it counts as real; leave it unset (rows of SpeedSFTTrainer are
padded by one document that counts as none).

**The step adds up.** `part_data_wait_s + part_host_only_s + part_overlapped_s + part_device_only_s +
part_exposed_comm_s` is the time of the counted step. A part of 10 % or more of it limits the run, and the console
says so once: input-bound, host-bound or communication-bound; else the run is device-bound. Work of the host that is
hidden under a busy device costs nothing and is in no part.

**Why GPU utilisation is never shown alone.** NVML's utilisation is the share of samples in which any kernel was
running. A slow kernel, a kernel on padding and a fast kernel on real tokens all count the same.

**FLOP utilisation, three ways.** MFU counts what the model needs, HFU also what is computed once more, OFU what the
tensor pipes did by their own counter. OFU close to HFU says that the formula and the run are what they seem to be; a
gap of more than 10 points is said on the console and in the report: FLOPs are counted that were not computed, or work
is done that nobody counts. Families whose formula is known, each equal to torch's FlopCounterMode in
`tests/core/test_flops.py`:
{families}.
Text in a composed model costs what its text model costs, towers and projections left out. Frozen towers, embeddings,
heads and norms are known, frozen weights of layers in a full fine-tune (two passes of three; one where backward does
not reach), and LoRA beside linear maps from the first layer on (`modules_to_save` included); other adapters are not,
nor is a batch with images or sound, nor rows cut over ranks by context or sequence
parallelism. DoRA has an MFU, and with activation checkpointing no HFU. Without the gradient of the first layer's input,
which LoRA needs only under activation checkpointing, LoRA's FLOPs are counted high by a part of one layer. For another
model: `flops=` ([extending](extending.md)).

**NaN.** A loss or gradient that is not finite is counted and its step named at the next logging step, and never shown
as 0: the loss of that window is logged as NaN, also where transformers' filter has hidden it, and the next window's is
its own again. After `attach` it is the loss that `training_step` returns, else the one among the model's outputs. With
fp16 a gradient that
overflows is the loss scaler's way of working: it is counted, and no more. `nonfinite="strict"` (the default of
SpeedSFTConfig) ends training there, on all ranks, before a checkpoint is written; `"warn"` (the default of
ThroughputCallback) goes on.

**What differs from TRL.** `entropy` and `mean_token_accuracy` are TRL's own keys; here they are weighted by target
tokens over the window and all ranks, where TRL 1.16 averages the micro-batches' means. With equal target counts both
agree. `num_tokens` counts real tokens and goes on after a resume. `eval_loss` is the mean over target tokens,
whatever the batch size, packing or number of ranks.

"""


def rendered() -> str:
    """The document as it should be."""
    lines = ["| key | unit | formula | source | cost per step |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        lines.append(f"| `{metric.key}` | {metric.unit} | {metric.formula} | {metric.by.source} | {metric.by.cost} |")
    families = textwrap.fill(", ".join(sorted(FAMILIES)), 118, break_on_hyphens=False)
    return HEAD.replace("{families}", families) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(), encoding="utf-8")
