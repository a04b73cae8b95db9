"""Models and data of the benchmarks: the 27B geometry with random weights, and documents of chat lengths.

Random weights cost the same arithmetic as trained ones, and nothing is downloaded. Lengths follow the reconstruction of
ultrachat_200k's training split: lognormal, mean 1,258.9 tokens, sigma 0.457, clipped (the published mean comes from
9,396 tokens/s x 7 h 44 min / 207,865 conversations; the spread is the one that reproduces the reported 36 %).
"""

from __future__ import annotations

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

MEAN_TOKENS, SIGMA = 1258.9, 0.457


def qwen27b_config(layers: int = 64, **overrides: object) -> Qwen3_5TextConfig:
    """The text geometry of Qwen3.5/3.6/3.8-27B, cut to `layers` (a multiple of 4: three linear, one full attention)."""
    values: dict[str, object] = {
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": layers,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
        "tie_word_embeddings": False,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return Qwen3_5TextConfig(**{**values, **overrides})


def random_model(config: Qwen3_5TextConfig, *, device: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, made where it will run."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def chat_lengths(documents: int, *, longest: int, seed: int = 0) -> list[int]:
    """Token lengths of `documents` conversations."""
    generator = np.random.default_rng(seed)
    mu = np.log(MEAN_TOKENS) - SIGMA**2 / 2
    drawn = generator.lognormal(mu, SIGMA, documents)
    return np.clip(np.rint(drawn), 90, longest).astype(int).tolist()


def chat_dataset(documents: int, *, vocabulary: int, longest: int, seed: int = 0) -> Dataset:
    """Tokenized documents of chat lengths with random tokens; every token is a target, as in the published run."""
    generator = np.random.default_rng(seed + 1)
    rows = [generator.integers(2, vocabulary, n).tolist() for n in chat_lengths(documents, longest=longest, seed=seed)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def stub_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that is never asked to tokenize: the documents are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
