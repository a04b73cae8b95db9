"""The loss that is trained is that of the model's own logits, shown on a few tokens before step 1.

TRL's loss head (and ours) multiplies the last hidden states by the output layer's weight. A model that does more
between the two, such as a dense layer and a norm (BERT, ModernBERT's decoder), would train another function than the
one it is used with, and its loss curve looks like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.adapters import below_adapters
from hf_speedkit.trainer.job_settings import refuse_no_model
from hf_speedkit.trainer.proof.module_mode import in_mode
from hf_speedkit.trainer.step.own_loss import OWN_LOGITS

_TOKENS = 16
# Of the largest logit: both ways round products of the same numbers, in fp32 perhaps through TF32 (11 bits).
_TOLERANCE = {torch.float32: 2.0**-8}
_COARSE_TOLERANCE = 2.0**-6

_TOKENIZER = "processing_class=AutoTokenizer.from_pretrained(...), of the model that is trained"


def refuse_other_models(model: Any, processing_class: Any = None) -> None:
    """Refuse models that are no causal language models, before anything is tokenized.

    Raises:
        ConfigurationError: an encoder with a decoder, a model without an output layer to generate with, something that
            is no model, a path where there is none, or no tokenizer.
    """
    if isinstance(processing_class, str):
        raise ConfigurationError(f"processing_class={processing_class!r} is a text, not a tokenizer", mend=_TOKENIZER)
    if isinstance(model, str):
        refuse_no_model(model)
        return
    if isinstance(model, type) or not hasattr(model, "config"):
        raise ConfigurationError(
            f"model is {f'the class {model.__name__}' if isinstance(model, type) else f'a {type(model).__name__}'}",
            mend='a loaded model, AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B") for example, or its name; of '
            "a config alone: AutoModelForCausalLM.from_config(config)",
        )
    if processing_class is None and not getattr(model.config, "_name_or_path", None):
        raise ConfigurationError(
            "there is no tokenizer, and the model was not loaded from anywhere that has one", mend=_TOKENIZER
        )
    wrapped = next((name for name, _ in model.named_parameters() if "_orig_mod." in name), None)
    if wrapped is not None:
        raise ConfigurationError(
            "torch.compile has wrapped the model, and its weights would be saved under names that no loader looks for",
            evidence=(f"{wrapped}: of such a file from_pretrained, and peft, draw the weights anew",),
            mend="pass the model as it was, with torch_compile=True; or compile it in place: model.compile()",
        )
    name = type(below_adapters(model)).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{name} has an encoder and a decoder; supervised fine-tuning here is that of causal language models",
            mend="transformers' Seq2SeqTrainer, with hf_speedkit.attach(trainer, ThroughputCallback())",
        )
    if model.config.return_dict is False:
        raise ConfigurationError(
            "the model's config says return_dict=False, and the loss reads its outputs by name",
            mend="model.config.return_dict = True",
        )
    if model.get_output_embeddings() is None or getattr(model, "generation_config", None) is None:
        raise ConfigurationError(
            f"{name} is no causal language model: it cannot generate",
            mend="load it with AutoModelForCausalLM",
        )


def check_trained(model: Any) -> None:
    """Refuse a model of which nothing is trained: the first backward pass would end in torch's own words.

    Raises:
        ConfigurationError: every parameter is frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            "every parameter of the model is frozen, so there is nothing to train",
            mend="set requires_grad of the parts to train, or pass a peft_config",
        )


def probe_tokens(model: Any, device: torch.device) -> torch.Tensor:
    """Some tokens that a model knows, int64 [1, 16]."""
    return torch.arange(_TOKENS, device=device)[None] % len(model.get_input_embeddings().weight)


def prove_loss_head(
    model: torch.nn.Module, inner: Any, batch: Mapping[str, Any], *, dtype: torch.dtype | None, own: bool
) -> float:
    """Compare the loss head's log-probabilities with those of the model's own logits; all ranks must call it.

    The last 16 slots of a real packed row are looked at, with the row in front of them where the model can leave the
    other logits out: a row of another length would be compiled and tuned for on a GPU, for this alone. Other models,
    and batches that are no packed row, are looked at in 16 tokens.

    Args:
        model: as prepared for training; its modes are left as they were.
        inner: the same before it was wrapped.
        batch: what the model takes: input_ids, int64 [1, T] or [B, T], and the keys of a packed row.
        dtype: that the model computes in; None: that of its output layer.
        own: our head is in place, beside TRL's.

    Returns:
        The largest difference of a log-probability.

    Raises:
        ConfigurationError: they differ by more than rounding, or the model's own are not finite.

    Cost: two or three forward passes.
    """
    base = below_adapters(inner)
    if base.base_model is base:
        raise ConfigurationError(
            f"TRL's loss head finds no layers below the output layer of {type(base).__name__}",
            evidence=(f"its base_model_prefix {base.base_model_prefix!r} is the name of nothing in it",),
            mend="transformers' Trainer, with hf_speedkit.attach(trainer, ThroughputCallback())",
        )
    row = {key: value for key, value in batch.items() if key != "labels"}
    few: dict[str, Any] = {"logits_to_keep": _TOKENS}
    if len(row) == 1 or "logits_to_keep" not in inspect.signature(base.forward).parameters:
        row, few = {"input_ids": row["input_ids"][:1, :_TOKENS]}, {}
    ids = row["input_ids"]
    labels = torch.full_like(ids, -100)
    labels[:, -_TOKENS + 1 :] = ids[:, -_TOKENS + 1 :]
    with in_mode(model, training=False), torch.no_grad():  # dropout would draw other masks
        logits = model(**row, use_cache=False, **few).logits[0, -_TOKENS:-1].float()
        targets = ids[0, -len(logits) :]
        expected = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
        try:
            found = model(**row, labels=labels, use_cache=False, fused_lm_head=True).log_probs[0, -len(logits) :]
        except RuntimeError as error:
            if "shapes cannot be multiplied" not in str(error):
                raise
            # ELECTRA: a layer between hidden states and output layer changes their width.
            raise _other_logits(base, f"its output layer does not take the hidden states: {error}") from error
        difference = float((found.float() - expected).abs().max())
        if own:
            positions = torch.arange(ids.shape[1] - 1 - len(logits), ids.shape[1] - 1, device=ids.device)
            nll = model(**row, labels=labels, use_cache=False, target_positions=positions).nll
            difference = max(difference, float((nll + expected.sum()).abs()) / len(positions))
    if dtype is None:
        dtype = base.get_output_embeddings().weight.dtype
    allowed = _TOLERANCE.get(dtype, _COARSE_TOLERANCE) * max(1.0, float(logits.abs().max()))
    if not bool(torch.isfinite(expected).all()):
        raise _not_finite(base)
    if not difference <= allowed:
        raise _other_logits(
            base,
            f"log-probabilities differ by up to {difference:.2g} (rounding: {allowed:.2g}): the model does more than "
            "multiply by its output layer's weight",
        )
    return difference


def _not_finite(base: Any) -> ConfigurationError:
    own = {name: getattr(weight, "_local_tensor", weight) for name, weight in base.named_parameters()}
    bad = [name for name, weight in own.items() if not bool(torch.isfinite(weight).all())]
    return ConfigurationError(
        f"the logits of {type(base).__name__} are not finite before step 1",
        evidence=(
            f"NaN or infinite weights: {', '.join(bad[:3])}{f' and {len(bad) - 3} more' if len(bad) > 3 else ''}"
            if bad
            else "all weights are finite: a layer's output is too large for the type it is computed in",
        ),
        mend="load the weights anew: the file is damaged, or the run that wrote it had diverged"
        if bad
        else "compute in bf16 or fp32",
    )


def _other_logits(base: Any, evidence: str) -> ConfigurationError:
    return ConfigurationError(
        f"the loss head of {type(base).__name__} does not compute the loss of the model's own logits",
        evidence=(evidence,),
        mend=OWN_LOGITS,
    )
