"""What the ladder measures: rungs (how one trains) and workloads (what one trains). Two tables; add a line to add one.

A rung is a way of training and the settings that differ from that way's defaults. "speedkit minus one item" rungs
switch one optimisation off by its setting in SpeedSFTConfig; a setting that this version does not have is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WAYS = ("seed", "stock-fallback", "kernels", "trl", "speedkit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way of training.

    Args:
        name: its name in results.
        way: what trains. seed, stock-fallback, kernels: SFTTrainer on rows padded in two dimensions. trl: SFTTrainer
            with packing="bfd". speedkit: SpeedSFTTrainer.
        settings: settings of the trainer's config that differ.
        environment: environment variables of the process.
        steps: optimizer steps at gradient accumulation 1; a slow rung needs fewer for the same certainty.
        hybrid_only: it is about GatedDeltaNet layers.
        lora_only: it is about adapters.
    """

    name: str
    way: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: int = 30
    hybrid_only: bool = False
    lora_only: bool = False


def _minus(item: str, **settings: Any) -> Rung:
    return Rung(name=f"speedkit minus {item}", way="speedkit", settings=settings)


def _with(item: str, **settings: Any) -> Rung:
    return Rung(name=f"speedkit, {item}", way="speedkit", settings=settings)


LADDER = (
    Rung(name="seed", way="seed", steps=10, hybrid_only=True),
    Rung(name="stock-fallback", way="stock-fallback", steps=16, hybrid_only=True),
    Rung(name="kernels", way="kernels", steps=24),
    Rung(name="trl", way="trl"),
    _with("full checkpointing", activation_checkpointing_layers="all"),
    Rung(name="speedkit", way="speedkit"),
)
"""From older transformers to SpeedSFTTrainer. All checkpoint every layer but `speedkit`: as many as memory asks for."""

ONE_OFF = (
    _minus("packing", packing=False),
    _minus("fused layers", fused_layers=False),
    _minus("fused convolution", fused_layers_exclude=["convolution"]),
    _minus("split convolution", fused_layers_exclude=["split_convolution"]),
    _minus("fused norms", fused_layers_exclude=["rms_norm", "gated_norm"]),
    _minus("fused SwiGLU", fused_layers_exclude=["swiglu"]),
    _minus("qk rotary", fused_layers_exclude=["qk_rotary"]),
    Rung(name="speedkit minus fused LoRA", way="speedkit", settings={"fused_lora": False}, lora_only=True),
    _minus("packed attention", packed_attention="keep"),
    _minus("loss head", loss_head="trl"),
    _minus("fused optimizer", fused_optimizer=False),
    _minus("AdamW of one kernel", optim="adamw_torch", fused_optimizer=False),
    _minus("automatic checkpointing", activation_checkpointing_layers="all"),
    _minus("non-blocking copies", accelerator_config={"non_blocking": False}, dataloader_num_workers=0),
    _minus("unfiltered loss", logging_nan_inf_filter=True),
)
"""SpeedSFTTrainer less one item: each item's own share."""

CHOICES = (
    _with("no checkpointing", activation_checkpointing=False),
    _with("products kept", activation_checkpointing_layers="all", activation_checkpointing_keep="products"),
    Rung(name="trl, no checkpointing", way="trl", settings={"activation_checkpointing": False}),
    Rung(
        name="trl, selective checkpointing",
        way="trl",
        settings={"activation_checkpointing_kwargs": {"use_reentrant": False, "selective": True}},
    ),
    Rung(name="speedkit, FlashQLA", way="speedkit", environment={"FLA_FLASH_QLA": "1"}, hybrid_only=True),
)
"""Free choice within the memory of the device."""

RUNGS = {rung.name: rung for rung in (*LADDER, *ONE_OFF, *CHOICES)}
GROUPS: Mapping[str, tuple[Rung, ...]] = {"ladder": LADDER, "one-off": ONE_OFF, "choices": CHOICES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained.

    Args:
        name: its name in results.
        geometry: a model of `geometry.GEOMETRIES`. layers: cut to this depth.
        slots: of a micro-batch: the packed row, and rows x longest of a padded one.
        accumulation: micro-batches of a step.
        lora_rank: train adapters of this rank on all linear layers; None trains everything.
        mean_tokens: of a document; None for that of ultrachat_200k.
        device: "cuda" or "cpu".
    """

    name: str
    geometry: str
    layers: int = 8
    slots: int = 8192
    accumulation: int = 1
    lora_rank: int | None = None
    mean_tokens: float | None = None
    device: str = "cuda"

    @property
    def hybrid(self) -> bool:
        """Whether the model has GatedDeltaNet layers."""
        return "dense" not in self.geometry


WORKLOADS = {
    one.name: one
    for one in (
        Workload(name="27b-8", geometry="27b"),
        Workload(name="27b-8-ga2", geometry="27b", accumulation=2),  # as 27b-8 on two GPUs: the same rows a step
        Workload(name="27b-8-ga4", geometry="27b", accumulation=4),
        Workload(name="27b-8-32k", geometry="27b", slots=32_768),
        Workload(name="27b-8-lora", geometry="27b", lora_rank=16),
        Workload(name="9b-8", geometry="9b"),
        Workload(name="dense-8b-8", geometry="dense-8b"),
        Workload(name="tiny", geometry="tiny", layers=4, slots=256, mean_tokens=60, device="cpu"),
        Workload(name="tiny-ga2", geometry="tiny", layers=4, slots=128, accumulation=2, mean_tokens=60, device="cpu"),
        Workload(name="tiny-dense", geometry="tiny-dense", layers=2, slots=256, mean_tokens=60, device="cpu"),
    )
}
SHAPES = ("27b-8", "27b-8-32k", "27b-8-lora", "9b-8", "dense-8b-8")
"""The workloads of the "other shapes" table."""


def selected(names: list[str], workload: Workload) -> list[Rung]:
    """The rungs that names (of rungs or of groups) stand for, those left out that the workload has no use for.

    Raises:
        KeyError: a name that is neither.
    """
    found: dict[str, Rung] = {}
    for name in names:
        for rung in GROUPS.get(name, ()) or (RUNGS[name],):
            fits = workload.hybrid or not rung.hybrid_only
            if fits and (workload.lora_rank is not None or not rung.lora_only):
                found[rung.name] = rung
    return list(found.values())
