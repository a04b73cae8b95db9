"""One optimizer step on packed documents is the step on the same documents one at a time. Loss alone cannot tell."""

import sys

import pytest
import torch
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import Phi3Config, Phi3ForCausalLM, TrainerCallback

from hf_speedkit import PackedBatchSampler, SpeedSFTConfig, SpeedSFTTrainer

LENGTHS = (3, 11, 5, 8)
SLOTS = 32
SPLITS = {"4x1": [[0], [1], [2], [3]], "2x2": [[0, 1], [2, 3]], "1x4": [[0, 1, 2, 3]]}
MODELS = {"hybrid": tiny_hybrid, "llama": tiny_llama}


class FixedSampler(PackedBatchSampler):
    """Yields the micro-batches that a test asks for."""

    def __init__(self, micro_batches):
        super().__init__(LENGTHS, tokens_per_batch=SLOTS)
        self.micro_batches = micro_batches

    def __len__(self):
        return len(self.micro_batches)

    def __iter__(self):
        return iter(self.micro_batches)


class GradientRecorder(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradient = torch.cat([p.grad.flatten() for p in model.parameters()])


def one_at_a_time(model, dataset):
    """Sum of the documents' losses over all targets, each document alone, through transformers as it is."""
    model.train()
    total = sum(len(row["input_ids"]) - 1 for row in dataset)
    for row in dataset:
        ids = torch.tensor([row["input_ids"]])
        logits = model(ids, use_cache=False).logits[0, :-1]
        (torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / total).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def packed_step(
    tmp_path, build, split, *, collate=None, keep_proof=True, steps=1, eval_dataset=None, callbacks=(), **settings
):
    recorder = GradientRecorder()
    micro_batches = SPLITS[split]

    class Trainer(SpeedSFTTrainer):
        def _packed_sampler(self, dataset, *, train):
            return FixedSampler(micro_batches) if train else super()._packed_sampler(dataset, train=False)

    trainer = Trainer(
        model=build(),
        args=SpeedSFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, tokens_per_batch=SLOTS, max_steps=steps,
            max_grad_norm=0.0, gradient_accumulation_steps=len(micro_batches), activation_checkpointing=False,
            save_strategy="no", disable_tqdm=True, **settings,
        ),
        train_dataset=tokenized(LENGTHS),
        processing_class=tiny_tokenizer(),
        eval_dataset=eval_dataset,
        callbacks=[recorder, *callbacks],
    )  # fmt: skip
    if collate is not None:
        original = trainer.data_collator
        trainer.data_collator = lambda rows: collate(original(rows))
    if not keep_proof:
        trainer.startup.prove = lambda: None
    trainer.train()
    return recorder.gradient


def remembering(model):
    """Slow decay, as trained heads have it: random ones forget within a token, and a recurrence leak with them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4.0)
    return model


def relative_error(found, expected):
    # The global norm: per tensor, gradients of 1e-5 (A_log, dt_bias) carry rounding of 1e-5 relative.
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("split", SPLITS)
def test_v25_the_gradient_is_that_of_the_documents_alone_for_every_split(tmp_path, build, split):
    expected = one_at_a_time(build(), tokenized(LENGTHS))
    # The case asks for 1e-6 of a Llama; a recurrence rounds more.
    assert relative_error(packed_step(tmp_path, build, split), expected) <= (1e-6 if build is tiny_llama else 1e-5)


def tiny_longrope():
    """Beyond 12 positions all documents of a row are turned by other frequencies: here only padding could get there."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    return Phi3ForCausalLM(
        Phi3Config(
            **sizes, vocab_size=64, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, initializer_range=0.2,
            rope_parameters={**rope, "original_max_position_embeddings": 12}, max_position_embeddings=64,
            original_max_position_embeddings=12,
        )
    )  # fmt: skip


def test_v25_padding_changes_no_frequency_of_a_documents_positions(tmp_path):
    expected = one_at_a_time(tiny_longrope(), tokenized(LENGTHS))
    assert relative_error(packed_step(tmp_path, tiny_longrope, "4x1"), expected) <= 1e-5


def without_loss_arguments():
    """As most vision-language classes are, of whose own loss that is true."""
    model = tiny_llama()
    model.accepts_loss_kwargs = False
    return model


@pytest.mark.parametrize("padding_free", [False, True], ids=["padded", "padding_free"])
@pytest.mark.parametrize("build", [tiny_llama, without_loss_arguments])
def test_v25_the_gradient_of_rows_that_are_not_packed_is_that_of_the_documents_alone(tmp_path, build, padding_free):
    recorder, rows = GradientRecorder(), tokenized(LENGTHS)
    args = SpeedSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=1, max_grad_norm=0.0, packing=False,
        padding_free=padding_free, max_length=None, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        activation_checkpointing=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = SpeedSFTTrainer(
        build(), args, train_dataset=rows, processing_class=tiny_tokenizer(), callbacks=[recorder]
    )
    trainer.train()
    assert relative_error(recorder.gradient, one_at_a_time(build(), rows)) <= 1e-5
    assert (trainer.startup.isolation is not None) is padding_free


@pytest.mark.parametrize("attention", ["auto", "keep"])
def test_the_gradient_does_not_depend_on_the_attention_implementation(tmp_path, attention):
    expected = one_at_a_time(tiny_hybrid(), tokenized(LENGTHS))
    assert relative_error(packed_step(tmp_path, tiny_hybrid, "1x4", packed_attention=attention), expected) <= 1e-5


def test_checkpointing_changes_no_gradient(tmp_path):
    expected = one_at_a_time(tiny_hybrid(), tokenized(LENGTHS))

    def checkpointed():
        model = tiny_hybrid()
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        return model

    assert relative_error(packed_step(tmp_path, checkpointed, "2x2"), expected) <= 1e-5


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_an_evaluation_between_steps_changes_no_gradient_and_measures_the_documents_alone(tmp_path, build):
    held_out = tokenized((7, 2, 16, 5), seed=9)
    straight = packed_step(tmp_path / "a", build, "2x2", steps=2)
    evaluated = {}

    class Watch(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, model=None, **_):
            if not evaluated:
                evaluated["loss"] = metrics["eval_loss"]
                evaluated["weights"] = {name: value.clone() for name, value in model.state_dict().items()}

    interrupted = packed_step(
        tmp_path / "b", build, "2x2", steps=2, eval_dataset=held_out, eval_strategy="steps", eval_steps=1,
        callbacks=[Watch()],
    )  # fmt: skip
    assert relative_error(interrupted, straight) <= 1e-6
    model = build()
    model.load_state_dict(evaluated["weights"])
    losses, targets = 0.0, 0
    for row in held_out:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, :-1]
        losses += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        targets += len(row["input_ids"]) - 1
    assert evaluated["loss"] == pytest.approx(losses / targets, abs=1e-5)


@pytest.mark.parametrize("function", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"])
def test_without_boundaries_in_a_layer_the_gradient_is_wrong(tmp_path, monkeypatch, function):
    from hf_speedkit.kernels.bindings import bind_references

    expected = one_at_a_time(remembering(tiny_hybrid()), tokenized(LENGTHS))
    model = remembering(tiny_hybrid())
    with bind_references(model):
        module = sys.modules[type(model).__module__]
        bound = vars(module)[function]
        monkeypatch.setattr(module, function, lambda *a, **k: bound(*a, **{**k, "cu_seqlens": None, "seq_idx": None}))
        found = packed_step(tmp_path, lambda: model, "1x4", keep_proof=False)
    assert relative_error(found, expected) > 1e-3


def not_resetting(batch):
    return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}


def shifted_twice(batch):
    labels = batch["labels"].roll(-1, dims=1)
    labels[0, -1] = -100
    return {**batch, "labels": labels}


def scoring_first_tokens(batch):
    return {**batch, "labels": batch["input_ids"]}


@pytest.mark.parametrize("collate", [not_resetting, shifted_twice, scoring_first_tokens])
def test_a_wrong_collator_gives_a_wrong_gradient(tmp_path, collate):
    expected = one_at_a_time(tiny_hybrid(), tokenized(LENGTHS))
    # "keep": sdpa takes its mask from the positions; with boundaries from cu_seq_lens, rotary positions are relative.
    found = packed_step(tmp_path, tiny_hybrid, "1x4", collate=collate, keep_proof=False, packed_attention="keep")
    assert relative_error(found, expected) > 1e-2


@pytest.mark.parametrize("collate", [not_resetting, scoring_first_tokens])
def test_a_wrong_collator_does_not_get_past_the_start(tmp_path, collate):
    from hf_speedkit.core.errors import PackingError

    with pytest.raises(PackingError):
        packed_step(tmp_path, tiny_hybrid, "1x4", collate=collate)
