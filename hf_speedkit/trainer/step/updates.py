"""The parts of a step around forward and backward that SpeedSFTTrainer runs faster: loss head, clipping, optimizer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.utils import DistributedType
from trl import SFTTrainer

from hf_speedkit.kernels.adamw import FusedAdamW, fused_adamw_error
from hf_speedkit.kernels.loss_head import loss_head_error
from hf_speedkit.trainer.adapters import below_adapters
from hf_speedkit.trainer.sharded.buffers import sent_buffers
from hf_speedkit.trainer.step.loss_head import add_loss_head, head_refusal

logger = logging.getLogger(__name__)

_OURS_TO_CLIP = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
# In updates (2 ** -4). After three of them a bf16 weight of up to 0.25 is rounded to 2 ** -11, a hundredth of one.
_ADAMW_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


class FastUpdates(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer with our loss head and our AdamW in place where the settings ask for them and they are proven."""

    optimizer: Any

    def use_loss_head(self) -> bool:
        """Put our loss head into the model, if it can serve this one; whether it does.

        The base model under PEFT gets it, as TRL does with its own: PEFT's forward calls the base model's.
        """
        if self.args.loss_head == "trl":
            return False
        model = below_adapters(self.model)
        # ZeRO-3 gives the output layer its weight inside the layer's own forward only; TRL's head asks for it.
        refusal = "DeepSpeed holds its weights" if self.is_deepspeed_enabled else head_refusal(model)
        if refusal is not None:
            logger.info("TRL's loss head stays: %s", refusal)
            return False
        disproof = self._head_disproof(model)
        if disproof is not None:
            logger.warning("TRL's loss head stays: %s", disproof)
            return False
        add_loss_head(model)
        return True

    def _head_disproof(self, model: Any) -> str | None:
        device = self.args.device
        if device.type != "cuda":
            return None
        dtype = torch.bfloat16 if self.args.bf16 else model.get_output_embeddings().weight.dtype
        error = loss_head_error(device, dtype, vocabulary=len(model.get_output_embeddings().weight))
        # bf16 keeps 8 bits: 2 ** -8 of the largest gradient, twice for the two roundings on the way.
        return None if error <= 2**-7 else f"ours differs from a plain one by {error:.2g} on {device}"

    def _prepare_for_training(self, *args: Any) -> Any:
        """Trainer's; buffers of a model that rank 0 alone has read reach the other ranks as well."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if not (self.is_fsdp_enabled and plugin is not None and plugin.cpu_ram_efficient_loading):
            return super()._prepare_for_training(*args)
        with sent_buffers(self.model, device=self.args.device):
            return super()._prepare_for_training(*args)

    def create_optimizer(self, model: Any = None) -> Any:
        """Trainer's optimizer; torch's fused AdamW becomes `kernels.adamw.FusedAdamW`."""
        own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        former = super().create_optimizer(model)
        if own or not self._wants_fused_adamw(former):
            return former
        settings = {key: value for key, value in former.defaults.items() if key in ("lr", "betas", "eps")}
        self.optimizer = FusedAdamW(former.param_groups, **settings)
        return self.optimizer

    def _wants_fused_adamw(self, optimizer: Any) -> bool:
        # Deepspeed and FSDP1 clip by themselves; fp16's GradScaler looks at gradients that clipping leaves as they are.
        kind = self.accelerator.distributed_type
        ours_to_clip = kind in _OURS_TO_CLIP or (kind == DistributedType.FSDP and self.accelerator.is_fsdp2)
        if not (
            self.args.fused_optimizer
            and ours_to_clip
            and not self.args.fp16
            and type(optimizer) is torch.optim.AdamW
            and all(group["fused"] for group in optimizer.param_groups)
        ):
            return False
        for dtype in {p.dtype for group in optimizer.param_groups for p in group["params"]}:
            error = fused_adamw_error(self.args.device, dtype)
            if not error <= _ADAMW_TOLERANCE.get(dtype, 0):
                logger.warning("torch's AdamW stays: ours differs by %.2g of an update in %s", error, dtype)
                return False
        return True

    def _fused_adamw(self) -> FusedAdamW | None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper
        return optimizer if isinstance(optimizer, FusedAdamW) else None

    def _clip_grad_norm(self, model: Any) -> Any:
        optimizer = self._fused_adamw()
        if optimizer is None:
            return super()._clip_grad_norm(model)
        return optimizer.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        optimizer = self._fused_adamw()
        if grad_norm is None and optimizer is not None:
            return optimizer.clip_grad_norm_(model.parameters(), float("inf"))
        return super()._get_grad_norm(model, grad_norm)
