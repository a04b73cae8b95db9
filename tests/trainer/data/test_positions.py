"""Positions: which a model has, and where the longest document of a row would change what the others train."""

import warnings

import pytest
import torch
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Llama4TextConfig

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import IsolationError, PackingError
from hf_speedkit.trainer.data.positions import (
    check_lengths,
    first_position,
    learned_positions,
    longest_padding,
    refuse_chunks,
    refuse_rows,
)

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def test_patches_of_images_are_no_positions_of_text():
    text = {**SIZES, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 16}
    config = Gemma3Config(text_config=text, vision_config={**SIZES, "image_size": 8, "patch_size": 4})
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(config)
    assert any("position_embedding" in name for name, _ in model.named_parameters())
    assert learned_positions(model) is None
    check_lengths(tokenized((3, 30)), model, "train", packed=True)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [(LONGROPE, 8), ({"full_attention": LONGROPE}, 8), (DYNAMIC, 16), ({**DYNAMIC, "alpha": 2.0}, None), ({}, None)],
    ids=["longrope", "of one kind of layer", "dynamic", "of a fixed scale", "plain"],
)
def test_v01_a_document_that_changes_the_frequencies_of_its_row_is_refused(rope, limit):
    """The isolation proof replaces tokens and no lengths, so it cannot see this."""
    model = tiny_llama()
    model.config.rope_parameters, model.config.max_position_embeddings = rope, 16
    assert longest_padding(model) == limit
    rows = tokenized((3, 30))
    check_lengths(rows, model, "train", packed=False)
    check_lengths(tokenized((3, limit or 99)), model, "train", packed=True)
    if limit is not None:
        with pytest.raises(PackingError, match=f"1 documents of more than {limit} tokens"):
            check_lengths(rows, model, "train", packed=True)


def test_v01_rows_that_attention_would_cut_anywhere_are_refused():
    config = Llama4TextConfig(**SIZES, attention_chunk_size=64)
    refuse_chunks(config, 64)
    refuse_chunks(tiny_llama().config, None)
    for slots in (65, None):
        with pytest.raises(PackingError, match="tokens_per_batch=64"):
            refuse_chunks(config, slots)


def test_v14_positions_begin_where_the_models_own_do(tmp_path):
    """RoBERTa's begin behind the index of padding: from 0 it would train embeddings that it never uses."""
    from transformers import RobertaConfig, RobertaForCausalLM

    ids = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "is_decoder": True}
    model = RobertaForCausalLM(RobertaConfig(**SIZES, **ids, max_position_embeddings=17))
    assert (first_position(model), learned_positions(model), first_position(tiny_llama())) == (1, 16, 0)
    args = SpeedSFTConfig(str(tmp_path), use_cpu=True, bf16=False, tokens_per_batch=16, report_to="none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL's, of compute_loss_func
        trainer = SpeedSFTTrainer(
            model, args, train_dataset=tokenized((3, 5)), processing_class=tiny_tokenizer(), compute_loss_func=print
        )
    row = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    assert row["position_ids"][0].tolist() == [1, 2, 3, 1, 2, 3, 4, 5, *range(1, 9)]
    inputs = {key: row[key][:, 3:8] for key in ("input_ids", "position_ids")}
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, model(inputs["input_ids"]).logits)
    with pytest.raises(PackingError, match="positions of roberta begin at 1"):
        refuse_rows(model, None)


def without_positions():
    model = tiny_llama()
    forward = model.model.forward
    model.model.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    return model


def known_to_leak():
    model = tiny_llama()
    model.config.model_type = "opt"
    return model


@pytest.mark.parametrize(
    ("build", "error", "said"),
    [
        (without_positions, IsolationError, "see one another through attention"),
        (known_to_leak, PackingError, "opt models leak"),
        (tiny_hybrid, PackingError, "packing=True, or padding_free=False"),
    ],
)
def test_v07_documents_in_rows_without_padding_are_kept_apart_or_refused_without_packing_too(
    tmp_path, build, error, said
):
    args = SpeedSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=1, packing=False, padding_free=True,
        max_length=None, per_device_train_batch_size=4, save_strategy="no", report_to="none",
        activation_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(error, match=said):
        SpeedSFTTrainer(build(), args, train_dataset=tokenized((3, 5, 4)), processing_class=tiny_tokenizer()).train()
