"""SpeedSFTTrainer with what real jobs bring along: metrics, mixtures of experts, mixed precision, several trainers."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral import modeling_mixtral

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, DatasetError, NonFiniteError
from hf_speedkit.trainer.proof.head_proof import probe_tokens, prove_loss_head, refuse_other_models
from hf_speedkit.trainer.proof.module_mode import in_mode
from hf_speedkit.trainer.step.expert_balance import without_padding
from hf_speedkit.trainer.step.own_loss import summands, warn_of_a_mean

LENGTHS = [9, 4, 17, 2, 30, 8]
HELD_OUT = [2, 2, 2, 30, 4, 25, 3, 3]


def trainer_for(path, *, model=None, **changes):
    extra = {
        key: changes.pop(key)
        for key in ("eval_dataset", "compute_metrics", "compute_loss_func", "peft_config")
        if key in changes
    }
    values = {
        "output_dir": str(path), "use_cpu": True, "bf16": False, "tokens_per_batch": 32, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "num_train_epochs": 1,
        "learning_rate": 1e-3, "report_to": "none",
    }  # fmt: skip
    return changes.pop("cls", SpeedSFTTrainer)(
        model=tiny_hybrid() if model is None else model,
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=tokenized(LENGTHS),
        processing_class=tiny_tokenizer(),
        **extra,
    )


def tiny_mixture():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MixtralForCausalLM(
        MixtralConfig(**sizes, vocab_size=64, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2)
    )


def token_mean_loss(model, dataset):
    model = copy.deepcopy(model).eval()
    total = 0.0
    with torch.no_grad():
        for row in dataset:
            ids = torch.tensor([row["input_ids"]])
            logits = model(ids, use_cache=False).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return total / sum(len(row["input_ids"]) - 1 for row in dataset)


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_v26_eval_loss_is_the_mean_over_target_tokens_with_compute_metrics_too(tmp_path, packed):
    held_out = tokenized(HELD_OUT, seed=7)
    changes = {} if packed else {"packing": False, "max_length": None, "per_device_eval_batch_size": 3}
    trainer = trainer_for(tmp_path, eval_dataset=held_out, compute_metrics=lambda prediction: {"rows": 1.0}, **changes)
    found = trainer.evaluate()
    assert found["eval_rows"] == 1.0
    assert found["eval_loss"] == pytest.approx(token_mean_loss(tiny_hybrid(), held_out), rel=1e-5)


def test_v26_eval_loss_of_a_mixture_of_experts_weighs_tokens_and_not_rows(tmp_path):
    """TRL's loss serves it, row by row; the auxiliary loss is made too small to be seen."""
    held_out = tokenized(HELD_OUT, seed=7)
    model = tiny_mixture()
    trainer = trainer_for(tmp_path, model=model, eval_dataset=held_out, router_aux_loss_coef=1e-9)
    assert trainer.aux_loss_enabled
    assert trainer.evaluate()["eval_loss"] == pytest.approx(token_mean_loss(model, held_out), rel=1e-5)


def test_padding_of_packed_rows_does_not_balance_experts(tmp_path):
    """The same documents in a full row and in one that is half padding have one loss, its auxiliary part included."""
    held_out = tokenized([12, 20], seed=7)
    losses = [
        trainer_for(tmp_path, model=tiny_mixture(), eval_dataset=held_out, router_aux_loss_coef=0.5, **rows)
        .evaluate()["eval_loss"]
        for rows in ({"tokens_per_batch": 32}, {"tokens_per_batch": 64})
    ]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    gates = (torch.randn(8, 4),) * 2
    with without_padding(0):
        assert modeling_mixtral.load_balancing_loss_func(gates, 4, 2) == 0
    assert modeling_mixtral.load_balancing_loss_func(gates, 4, 2) > 0


def test_v30_a_nan_loss_ends_training_without_metrics_too(tmp_path):
    trainer = trainer_for(tmp_path, throughput=False)
    trainer.model.train()
    trainer.log({"loss": 4.0, "grad_norm": 1.0})
    with pytest.raises(NonFiniteError, match="a step up to step 0 had a NaN"):
        trainer.log({"loss": float("nan")})
    trainer.args.nonfinite = "warn"
    trainer._tr_loss = torch.tensor(float("nan"))
    trainer.log({"loss": float("nan")})
    assert trainer._tr_loss == 0, "the Trainer takes its sum from itself, and NaN - NaN is NaN"


def test_rows_are_weighed_by_their_targets_where_a_model_denies_loss_arguments(tmp_path):
    """As vision-language classes do (Qwen3_5ForConditionalGeneration); of four rows here the last is empty."""
    model = tiny_hybrid()
    model.accepts_loss_kwargs = False
    expected = token_mean_loss(model, tokenized(LENGTHS))
    trainer = trainer_for(tmp_path, model=model, gradient_accumulation_steps=4)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "changes", [{"router_aux_loss_coef": 0.01}, {"label_smoothing_factor": 0.1}, {"loss_type": "dft"}], ids=str
)
def test_num_tokens_counts_real_tokens_where_trls_own_loss_serves(tmp_path, changes):
    """TRL counts every position of a packed row, padding included; two rows a step, so that micro-batches add up."""
    model = tiny_mixture() if "router_aux_loss_coef" in changes else None
    trainer = trainer_for(tmp_path, model=model, gradient_accumulation_steps=2, num_train_epochs=2, **changes)
    assert not trainer._is_plain_nll()
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["num_tokens"] for entry in logged] == [entry["speed/total_real_tokens"] for entry in logged]
    assert logged[-1]["num_tokens"] == 2 * sum(LENGTHS)
    assert logged[-1]["num_tokens"] < logged[-1]["speed/total_slots"]


@pytest.mark.parametrize("rows", [1, 3, None])
def test_v29_entropy_and_accuracy_are_weighed_by_targets_where_trls_own_loss_serves(tmp_path, rows):
    held_out = tokenized(HELD_OUT, seed=7, targets_from=2)  # three of them without targets
    padded = {"packing": False, "tokens_per_batch": None, "per_device_eval_batch_size": rows}
    trainer = trainer_for(
        tmp_path, model=tiny_llama(), eval_dataset=held_out, loss_type="dft", **(padded if rows else {})
    )
    found = trainer.evaluate()
    entropies, correct, targets = 0.0, 0, 0
    for row in held_out:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logits = trainer.model(ids, use_cache=False).logits[0, 1:-1]
        log_probs = logits.log_softmax(-1)
        entropies -= float((log_probs.exp() * log_probs).sum())
        correct += int((logits.argmax(-1) == ids[0, 2:]).sum())
        targets += logits.shape[0]
    assert found["eval_entropy"] == pytest.approx(entropies / targets, rel=1e-5)
    assert found["eval_mean_token_accuracy"] == pytest.approx(correct / targets, abs=1e-9)


class OwnLoss(SpeedSFTTrainer):
    """As TRL advises in place of compute_loss_func: everything goes to the model, labels too."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs, labels = model(**inputs), inputs["labels"][:, 1:].flatten()
        nll = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        loss = nll / (labels.ne(-100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class MeanLoss(OwnLoss):
    """A mean over the micro-batch, as before transformers knew of num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


def mean_of(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / labels.ne(-100).sum().clamp(min=1)


@pytest.mark.filterwarnings("ignore:.*compute_loss_func:FutureWarning")
@pytest.mark.parametrize("given", [{"cls": MeanLoss}, {"compute_loss_func": mean_of}], ids=["a subclass", "a function"])
def test_v25_a_mean_over_the_micro_batch_is_told_where_losses_are_added_up(tmp_path, caplog, given):
    trainer = trainer_for(tmp_path, model=tiny_llama(), gradient_accumulation_steps=2, max_steps=1, **given)
    trainer.train()
    assert caplog.text.count("2 losses a step are added up") == 1
    assert trainer.throughput.run_totals().session.slots == 64  # what is asked beside is not counted
    trainer.loss_is_scaled_for_ga = False
    assert summands(trainer) == 1


def test_a_loss_that_cannot_be_asked_is_left_alone_and_random_numbers_are_drawn_as_without(caplog):
    trainer = SimpleNamespace(
        loss_is_scaled_for_ga=None, compute_loss_func=None,
        args=SimpleNamespace(gradient_accumulation_steps=2, process_index=0, world_size=1),
    )  # fmt: skip
    weight = torch.ones(3, requires_grad=True)

    def with_a_penalty():
        return torch.autograd.grad(weight.square().sum(), weight, create_graph=True)[0].sum()

    loss, state = with_a_penalty(), torch.get_rng_state()
    warn_of_a_mean(trainer, loss, with_a_penalty)
    assert caplog.text == ""
    warn_of_a_mean(trainer, loss, lambda: loss.detach() * (1 + 0.02 * torch.rand(())))  # as dropout does
    assert "2 losses a step are added up" in caplog.text
    assert torch.equal(torch.get_rng_state(), state)


def test_v26_v32_a_subclass_with_a_loss_of_its_own_trains_and_is_measured_like_any(tmp_path, caplog):
    """Of the rows of the one step some are empty: the model's own loss of those is 0 / 0, and not used."""
    model = tiny_llama()
    expected = token_mean_loss(model, tokenized(LENGTHS))
    trainer = trainer_for(
        tmp_path, model=model, cls=OwnLoss, gradient_accumulation_steps=4, eval_dataset=tokenized(HELD_OUT, seed=7)
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        token_mean_loss(model, tokenized(HELD_OUT, seed=7)), rel=1e-5
    )
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert "losses a step are added up" not in caplog.text
    assert logged["loss"] == pytest.approx(expected, rel=1e-5)
    assert logged["num_tokens"] == logged["speed/total_real_tokens"] == sum(LENGTHS)
    assert logged["speed/total_target_tokens"] == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
def test_v26_a_short_last_batch_counts_in_evaluation_whatever_training_drops(tmp_path):
    held_out = tokenized(HELD_OUT, seed=7)
    changes = {"eval_packing": False, "per_device_eval_batch_size": 5, "dataloader_drop_last": True}
    trainer = trainer_for(tmp_path, eval_dataset=held_out, **changes)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(token_mean_loss(tiny_hybrid(), held_out), rel=1e-5)
    assert trainer.predict(held_out).metrics["test_loss"] == pytest.approx(
        token_mean_loss(tiny_hybrid(), held_out), rel=1e-5
    )
    assert trainer.args.dataloader_drop_last
    with pytest.raises(DatasetError, match="there is no evaluation set 'code'"):
        trainer.evaluate("code")


def test_the_isolation_probe_sees_the_model_as_it_trains(tmp_path):
    """A loaded model is in evaluation mode, where nothing is checkpointed and no dropout is drawn."""
    model = tiny_hybrid().eval()
    seen = []

    def look(module, args):
        seen.append(module.training)

    model.model.layers[0].register_forward_pre_hook(look)
    trainer_for(tmp_path, model=model, activation_checkpointing=True, max_steps=1).train()
    # Three passes first in which the loss head is compared, without dropout.
    assert seen[:3] == [False] * 3
    assert len(seen) >= 8
    # Behind the probe's two come two without gradients, for which a document is moved: dropout is drawn by slot.
    assert seen[5:7] == [False] * 2
    assert all(seen[3:5] + seen[7:])


def test_training_mode_gives_each_module_back_its_own():
    model = tiny_llama().eval()
    model.model.layers[1].train()
    before = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError, match="boom"), in_mode(model, training=True):
        assert all(module.training for module in model.modules())
        raise RuntimeError("boom")
    assert [module.training for module in model.modules()] == before


def test_a_hybrid_trains_in_mixed_precision_on_a_cpu(tmp_path):
    """TRL turns bf16 on by itself."""
    trainer = trainer_for(tmp_path, bf16=True, max_steps=2)
    trainer.train()
    assert (trainer.startup.isolation.output_change, trainer.startup.isolation.gradient_leak) == (0.0, 0.0)


def test_an_evaluation_set_named_train_does_not_take_the_place_of_the_data(tmp_path):
    trainer = trainer_for(tmp_path, eval_dataset={"train": tokenized([5]), "test": tokenized([6])})
    assert trainer.summary().documents.documents == len(LENGTHS)


def test_the_summary_still_says_what_was_changed_after_evaluations(tmp_path):
    trainer = trainer_for(tmp_path, eval_dataset=tokenized([5]), eval_strategy="steps", eval_steps=1, max_steps=2)
    trainer.train()
    changed = trainer.summary().changed_layers
    assert len(changed) == len(set(changed)) == 2
    assert "attention: sdpa -> speedkit_varlen" in changed


def tiny_gpt2(positions):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": positions}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=64, bos_token_id=1, eos_token_id=1, pad_token_id=0))


def test_a_model_with_attention_dropout_by_another_name_keeps_its_attention(tmp_path):
    """Its positions are learned, and fewer than the row has slots: neither documents nor padding may need more."""
    model = tiny_gpt2(30)
    assert model.config.attn_pdrop > 0
    trainer = trainer_for(tmp_path, model=model, max_steps=1, tokens_per_batch=128)
    trainer.train()
    assert trainer.startup.isolation.passed
    assert trainer.summary().changed_layers == ()
    with pytest.raises(DatasetError, match="a document of 30 tokens, and the model has 29 positions"):
        trainer_for(tmp_path, model=tiny_gpt2(29))


def test_rotary_positions_that_were_never_used_are_named_and_a_frozen_model_is_refused(tmp_path, caplog):
    model = tiny_llama().requires_grad_(False)
    model.config.max_position_embeddings = 16
    trainer = trainer_for(tmp_path, model=model)
    assert "a document of 30 tokens, and the model was made for 16 positions" in caplog.text
    with pytest.raises(ConfigurationError, match="every parameter of the model is frozen"):
        trainer.train()


@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_batches_that_accelerate_would_cut_are_refused(tmp_path, name):
    with pytest.raises(ConfigurationError, match=f"leave {name} unset"):
        trainer_for(tmp_path, accelerator_config={name: True})


def test_v36_ranks_read_batches_of_their_own_without_packing_too(tmp_path, caplog):
    trainer = trainer_for(tmp_path, packing=False, tokens_per_batch=None, accelerator_config={"dispatch_batches": True})
    assert trainer.accelerator.dispatch_batches is False
    assert "dispatch_batches=True is turned off" in caplog.text


def test_adapters_with_virtual_tokens_are_refused(tmp_path):
    """Prompt and prefix tuning; peft is not installed here, and only this attribute is read."""

    class PromptTuningConfig:
        is_prompt_learning = True

    model = tiny_llama()
    model.active_peft_config = PromptTuningConfig()
    with pytest.raises(ConfigurationError, match="PromptTuningConfig puts virtual tokens before a row"):
        trainer_for(tmp_path, model=model)


def test_v32_a_head_that_does_more_than_its_weight_is_refused_with_a_loss_that_is_right(tmp_path):
    """TRL's fused head (1.16) and ours take the last hidden states times a weight; ModernBERT's decoder does more."""
    from transformers import ModernBertDecoderConfig, ModernBertDecoderForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 1}
    model = ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**sizes, **ids, vocab_size=64))
    expected = token_mean_loss(model, tokenized(LENGTHS))
    with pytest.raises(ConfigurationError, match="does not compute the loss of the model's own logits") as refused:
        trainer_for(tmp_path, model=model).train()
    names = {"transformers": __import__("transformers.loss.loss_utils")}
    exec(refused.value.mend, names)
    total = 0.0
    for row in tokenized(LENGTHS):
        ids = torch.tensor([row["input_ids"]])
        total += names["compute_loss_func"](model(ids), ids, sum(LENGTHS) - len(LENGTHS)).item()
    assert total == pytest.approx(expected, rel=1e-5)


def test_the_head_of_every_kind_of_model_here_computes_its_own_loss():
    """fp32, random weights: the same products in another order."""
    from trl.trainer.utils import add_fused_lm_head

    for model in (tiny_llama(), tiny_mixture()):
        before = [module.training for module in model.train().modules()]
        add_fused_lm_head(model)
        tokens = {"input_ids": probe_tokens(model, torch.device("cpu"))}
        assert prove_loss_head(model, model, tokens, dtype=None, own=False) < 1e-5
        assert [module.training for module in model.modules()] == before
    model.get_output_embeddings().weight.data[3] = math.nan  # a damaged file, and no other function
    with pytest.raises(ConfigurationError, match=r"not finite before step 1\n.* weights: lm_head.weight\n"):
        prove_loss_head(model, model, tokens, dtype=None, own=False)


def test_v32_a_head_of_another_width_is_told_as_one():
    from transformers import ElectraConfig, ElectraForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ElectraForCausalLM(ElectraConfig(**sizes, vocab_size=64, embedding_size=16, is_decoder=True))
    add_fused_lm_head(model)
    tokens = {"input_ids": probe_tokens(model, torch.device("cpu"))}
    with pytest.raises(ConfigurationError, match="its output layer does not take the hidden states"):
        prove_loss_head(model, model, tokens, dtype=None, own=False)


def test_a_model_that_torch_compile_has_wrapped_is_refused_since_it_would_be_saved_under_other_names():
    class Compiled(torch.nn.Module):  # torch.compile's own would import its compiler: 3 s
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module

    model = tiny_llama()
    refuse_other_models(model, tiny_tokenizer())
    model.model.layers[1] = Compiled(model.model.layers[1])
    with pytest.raises(ConfigurationError, match=r"layers.1._orig_mod.*\n.*torch_compile=True"):
        refuse_other_models(model, tiny_tokenizer())


@pytest.mark.parametrize("kind", ["an encoder and a decoder", "no causal language model", "return_dict=False"])
def test_models_of_another_kind_are_refused_before_anything_is_tokenized(tmp_path, kind):
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    sizes = {"num_layers": 1, "num_heads": 2, "vocab_size": 64}
    bert = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = (
        T5ForConditionalGeneration(T5Config(d_model=32, d_ff=8, d_kv=8, **sizes))
        if kind.startswith("an encoder")
        else BertForMaskedLM(bert)
    )
    if kind.startswith("return"):
        model = tiny_llama()
        model.config.return_dict = False
    with pytest.raises(ConfigurationError, match=kind):
        trainer_for(tmp_path, model=model)
