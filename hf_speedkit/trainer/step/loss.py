"""TRL's loss and metrics without its host reads: sums stay on the device and are reduced once per logging step.

TRL 1.16 reads five scalars from the device and gathers four tensors over the ranks in every micro-batch, between
forward and backward (sft_trainer.py:1640-1653). The loss here is the same number. Entropy and accuracy are weighted by
target tokens, where TRL takes the mean of the micro-batches' means; with equal target counts both agree.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import IterableDatasetShard
from trl import SFTTrainer

from hf_speedkit.core.records import TokenCounts
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.trainer.metrics.micro_batches import new_rows_of
from hf_speedkit.trainer.metrics.nonfinite import log_refusal
from hf_speedkit.trainer.metrics.repeated_rows import NewRows
from hf_speedkit.trainer.metrics.returned_losses import forget_sum
from hf_speedkit.trainer.ranks.roll_call import RollCall
from hf_speedkit.trainer.step.expert_balance import without_padding
from hf_speedkit.trainer.step.own_loss import asked, summands, warn_of_a_mean
from hf_speedkit.trainer.throughput_callback import ThroughputCallback

logger = logging.getLogger(__name__)

_MEANS = "eval means"
_REAL_ONLY = "tokens of batches whose loss is TRL's own"
_TRLS_MEANS = ("entropy", "mean_token_accuracy")


class TokenSums(NamedTuple):
    """Sums over the micro-batches of a window and over all ranks."""

    targets: float
    entropy: float
    correct: float
    nll: float
    real: float


class Aside(NamedTuple):
    """What the collator says beside a model's inputs, kept for the loss of the micro-batch with these labels."""

    labels: torch.Tensor | None = None
    counts: TokenCounts | None = None
    positions: torch.Tensor | None = None


class DeviceMetrics(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer whose per-step metrics add no synchronisation and no collective."""

    _sums: dict[str, torch.Tensor]
    throughput: ThroughputCallback | None = None
    startup: Any
    _total_train_tokens: int
    _aside = Aside()
    _scored = False
    _asked = False
    _new_rows: NewRows | None = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Trainer's inputs on the device, and the collator's own words put aside.

        A `compute_loss` of a subclass (TRL's advice in place of `compute_loss_func`) hands all that it gets to the
        model, and the counts must be right whether or not it calls the one below.
        """
        inputs = super()._prepare_inputs(inputs)
        counts, positions = inputs.pop("token_counts", None), inputs.pop("target_positions", None)
        self._aside = Aside(inputs.get("labels"), counts, positions)
        if counts is not None:
            self.count_tokens("train" if self.model.training else "eval", counts)
        return inputs

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Trainer's; a subclass's own loss is looked at here, and its real tokens are counted."""
        self._scored = False
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._scored:
            return loss
        if self._aside.counts is not None:
            self._count_real(loss, self._aside.counts.real or 0)
        if self._asks_own_loss() and num_items_in_batch is not None:
            again = super()._prepare_inputs(inputs)
            again = {key: again[key] for key in again if key not in ("token_counts", "target_positions")}
            with self.compute_loss_context_manager():
                warn_of_a_mean(
                    self, loss, lambda: self.compute_loss(model, again, num_items_in_batch=2 * num_items_in_batch)
                )
        return loss

    def _asks_own_loss(self) -> bool:
        """Whether a loss of the user's own is still to be asked how it is divided; once a trainer."""
        asks = not self._asked and summands(self) > 1
        self._asked = True
        return asks

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's, repeated rows without targets; a subclass's own loss is weighed by the row's targets, as every is."""
        self._scored = False
        labels = inputs.get("labels")
        new = None if labels is None or self._new_rows is None else self._new_rows(len(labels))
        if labels is not None and new is not None:
            labels = labels.clone()
            labels[new:] = IGNORE_INDEX
            inputs = {**inputs, "labels": labels}
        found = super().prediction_step(model, inputs, *args, **kwargs)
        if not self._scored and found[0] is not None:
            self._add_mean(found[0], self._aside.labels)
        return found

    def _reset_sums(self, mode: str) -> None:
        # Set on first use, not in __init__: TRL's constructor may already log.
        self.__dict__.setdefault("_sums", {}).pop(mode, None)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """TRL's loss of one micro-batch.

        Args:
            model: the prepared model.
            inputs: one micro-batch, as `_prepare_inputs` left it.
            return_outputs: handed to TRL, which then runs a second forward pass.
            num_items_in_batch: target tokens of the whole accumulation window over all ranks.

        Returns:
            The loss (scalar tensor), or what TRL returns where this class steps aside: label smoothing, a custom loss,
            DFT, a mixture of experts with its auxiliary loss, and sequence parallelism.
        """
        mode = "train" if self.model.training else "eval"
        _, counts, positions = self._aside if self._aside.labels is inputs.get("labels") else Aside()
        if return_outputs or not self._is_plain_nll():
            return self._trls_own_loss(mode, model, inputs, return_outputs, num_items_in_batch, counts)
        nll, targets, entropy, correct = self._head_sums(model, inputs, positions)
        # Clamped: a row without targets (it keeps the ranks in step) must give zero, not 0 / 0.
        loss = nll / torch.as_tensor(targets if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # The divisor counts every rank's targets, and the ranks' gradients are averaged, not summed.
            loss = loss * self.accelerator.num_processes
        self._add_sums(
            mode,
            torch.stack((targets, entropy, correct, nll)),
            _real_tokens(inputs, counts),
        )
        self._look_at(mode, loss)
        return loss

    def _trls_own_loss(
        self, mode: str, model: torch.nn.Module, inputs: dict[str, Any], outputs: bool, items: Any, counts: Any
    ) -> Any:
        """TRL's loss where this class steps aside; its `num_tokens`, which counts padding of a packed row, is ours."""
        before: int = self._total_train_tokens
        own = mode == "train" and self.compute_loss_func is not None and self._asks_own_loss()
        with (
            without_padding(counts.real if counts is not None and self.aux_loss_enabled else None),
            asked(self) if own else nullcontext(),
        ):
            result = super().compute_loss(model, inputs, outputs, items)
        loss = result[0] if outputs else result
        # As TRL has just noted them for this micro-batch, over all ranks.
        means = tuple(self._metrics[mode][key][-1] for key in _TRLS_MEANS)
        if mode == "eval":
            self._add_mean(loss, inputs.get("labels"), means)
        else:
            self._total_train_tokens = before
            self._count_real(loss, _real_tokens(inputs, counts), inputs.get("labels"), means)
        return result

    def _count_real(
        self,
        loss: torch.Tensor,
        real: torch.Tensor | int,
        labels: torch.Tensor | None = None,
        means: tuple[float, ...] = (0.0, 0.0),
    ) -> None:
        """Count a training micro-batch whose loss is not ours, and weigh its means by its targets."""
        nothing = torch.zeros((), device=loss.device)
        targets = nothing if labels is None else _targets(labels)
        self._add_sums(_REAL_ONLY, torch.stack((targets, *(mean * targets for mean in means), nothing)), real)
        self._look_at("train", loss)

    def _head_sums(
        self, model: torch.nn.Module, inputs: dict[str, Any], positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Negative log-likelihood, targets, entropy and correct predictions, summed; on our head where it serves."""
        if positions is None:
            outputs = model(**{**inputs, "use_cache": False}, fused_lm_head=True)
            return (
                -outputs.log_probs.sum(),
                outputs.label_mask.sum(),
                outputs.entropy.sum(),
                outputs.is_top1.sum(),
            )
        outputs = model(**{**inputs, "use_cache": False}, target_positions=positions)
        return outputs.nll, outputs.targets, outputs.entropy, outputs.correct

    def count_tokens(self, mode: str, counts: TokenCounts) -> None:
        """Hand a micro-batch's counts, host integers, to the metrics."""
        if mode == "train" and self.throughput is not None:
            self.throughput.count(counts)

    def _look_at(self, mode: str, loss: torch.Tensor) -> None:
        if mode == "train" and self.throughput is not None and not self.throughput.losses.heard:
            self.throughput.look_at(loss)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Trainer's gradient norm, which is also what tells whether the step's gradient is finite."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.throughput is not None:
            self.throughput.look_at_norm(norm)
        return norm

    def restore_token_total(self, tokens: TokenCounts | None) -> None:
        """Let `num_tokens` go on where the resumed run stopped (TRL 1.16 starts it at 0 again)."""
        self._total_train_tokens = 0 if tokens is None or tokens.real is None else tokens.real

    def uses_fused_head(self) -> bool:
        """Whether the loss comes from a fused head, TRL's or ours, and not from the model's own logits."""
        parallel = self.accelerator.parallelism_config
        return (
            self.compute_loss_func is None
            and self.label_smoother is None
            and (parallel is None or parallel.total_size == parallel.data_parallel_size)
        )

    def _is_plain_nll(self) -> bool:
        return self.uses_fused_head() and self.args.loss_type == "nll" and not self.aux_loss_enabled

    def _add_sums(self, mode: str, sums: torch.Tensor, real: torch.Tensor | int) -> None:
        self._scored = True
        row = torch.zeros(len(TokenSums._fields), dtype=torch.float64, device=sums.device)
        row[:-1] = sums.detach()
        row[-1] += real
        sums_by_mode = self.__dict__.setdefault("_sums", {})
        sums_by_mode[mode] = sums_by_mode[mode] + row if mode in sums_by_mode else row

    def _add_mean(self, loss: torch.Tensor, labels: torch.Tensor | None, means: tuple[float, ...] = (0.0, 0.0)) -> None:
        """A micro-batch's mean loss, and its means of TRL's metrics, back to sums under a name of their own."""
        if labels is None:
            return
        targets = _targets(labels)
        # A row without targets weighs nothing, whatever its mean is.
        nll = torch.where(targets > 0, loss.detach() * targets, 0.0)
        self._add_sums(_MEANS, torch.stack((targets, *(mean * targets for mean in means), nll)), 0)

    def _reduced_sums(self, mode: str) -> TokenSums | None:
        """The window's sums over all ranks; every rank must call it. One collective and one host read."""
        sums = getattr(self, "_sums", {}).get(mode)
        if sums is None:
            return None
        # The host read of a logging step: it happens where Trainer reads its loss anyway.
        return TokenSums(*self.accelerator.reduce(sums, "sum").tolist())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log with the window's sums filled in; must be called on every rank."""
        mode = "train" if self.model.training else "eval"
        sums = self._reduced_sums(mode)
        if sums is not None:
            self._fill_metrics(mode, sums)
            self._reset_sums(mode)
        real = self._reduced_sums(_REAL_ONLY) if mode == "train" else None
        if real is not None:
            self._total_train_tokens += int(real.real)
            self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
            self._reset_sums(_REAL_ONLY)
        self._weigh_means(mode, real if mode == "train" else self._reduced_sums(_MEANS))
        # With throughput=False nobody else looks; fp16's scaler skips such steps.
        alone = mode == "train" and self.throughput is None and self.args.nonfinite == "strict" and not self.args.fp16
        refusal = log_refusal(logs, self.state.global_step) if alone else None
        if mode == "train" and self.throughput is None and not math.isfinite(logs.get("loss", 0.0)):
            forget_sum(self)  # the throughput callback does, where there is one
        super().log(logs, start_time)
        if refusal is not None:
            raise refusal

    def _weigh_means(self, mode: str, sums: TokenSums | None) -> None:
        """TRL's own entropy and accuracy by target tokens: it averages the micro-batches' means (1.16), however few
        targets, or none, some of them have (case V29)."""
        metrics = self._metrics[mode]
        if sums is not None and sums.targets > 0 and all(metrics.get(key) for key in _TRLS_MEANS):
            for key, total in zip(_TRLS_MEANS, (sums.entropy, sums.correct), strict=True):
                metrics[key] = [total / sums.targets]

    def _fill_metrics(self, mode: str, sums: TokenSums) -> None:
        metrics = self._metrics[mode]
        targets = max(sums.targets, 1.0)
        metrics["entropy"] = [sums.entropy / targets]
        metrics["mean_token_accuracy"] = [sums.correct / targets]
        if mode == "train":
            self._total_train_tokens += int(sums.real)
        metrics["num_tokens"] = [self._total_train_tokens]

    def _evaluation_call(self) -> RollCall:
        return RollCall(
            "evaluate()",
            timeout_s=self.args.ddp_timeout,
            why="each evaluates its share of the documents",
            instead=("all get the same metrics, and one rank can print them", None),
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's evaluation with a token-weighted loss.

        Trainer averages the rows' means, so that its number depends on batch size and packing; the mean over target
        tokens does not (case V26).
        """
        if not self.is_in_train:  # inside training every rank comes to it by the same settings
            self.startup.call(self.__dict__.setdefault("_evaluation", self._evaluation_call()))
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        # accelerate fills the last round of batches with rows from the beginning, which would count twice (case V28).
        loader = kwargs.get("dataloader", args[0] if args else None)
        self._new_rows = new_rows_of(self.args, self.model, loader, drop_last=False)
        if self.args.process_index == 0 and isinstance(getattr(loader, "dataset", None), IterableDatasetShard):
            logger.warning(
                "%s_loss counts some documents of a stream twice: accelerate fills the last round of the %d ranks' "
                "batches with those from its beginning. Dataset.from_list(list(stream.take(1000))) is counted once",
                prefix, self.args.world_size,
            )  # fmt: skip
        for kind in ("eval", _MEANS):
            self._reset_sums(kind)
        output = super().evaluation_loop(*args, **kwargs)
        sums = self._reduced_sums("eval") or self._reduced_sums(_MEANS)
        if sums is not None and sums.targets > 0 and f"{prefix}_loss" in output.metrics:
            output.metrics[f"{prefix}_loss"] = sums.nll / sums.targets
        return output


def _targets(labels: torch.Tensor) -> torch.Tensor:
    """Target tokens of labels [B, T], left on the device."""
    return labels[:, 1:].ne(IGNORE_INDEX).sum()


def _real_tokens(inputs: dict[str, Any], counts: TokenCounts | None) -> torch.Tensor | int:
    """Tokens that are no padding: the collator's count, else the mask's sum (left on the device), else all slots."""
    if counts is not None:
        return counts.slots if counts.real is None else counts.real
    mask = inputs.get("attention_mask")
    return int(inputs["input_ids"].numel()) if mask is None else mask.sum()
