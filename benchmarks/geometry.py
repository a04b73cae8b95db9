"""Models and data of the benchmarks: geometries with random weights, and documents of chat lengths.

Random weights cost the same arithmetic as trained ones, and nothing is downloaded. Lengths follow the reconstruction of
ultrachat_200k's training split: lognormal, mean 1,258.9 tokens, sigma 0.457, clipped (the published mean comes from
9,396 tokens/s x 7 h 44 min / 207,865 conversations; the spread is the one that reproduces the reported 36 %).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

MEAN_TOKENS, SIGMA = 1258.9, 0.457


_ROTARY = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def _hybrid(layers: int, **values: object) -> Qwen3_5TextConfig:
    """A Qwen3.5 text model of `layers` layers (a multiple of 4: three linear, one of full attention)."""
    common: dict[str, object] = {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262_144,
        "rope_parameters": _ROTARY,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return Qwen3_5TextConfig(**{**common, **values})


def qwen27b_config(layers: int = 64, **overrides: object) -> Qwen3_5TextConfig:
    """The text geometry of Qwen3.5/3.6/3.8-27B, cut to `layers`."""
    values: dict[str, object] = {
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    return _hybrid(layers, **{**values, **overrides})


def qwen9b_config(layers: int = 32, **overrides: object) -> Qwen3_5TextConfig:
    """The text geometry of Qwen3.5-9B, cut to `layers`."""
    values: dict[str, object] = {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    }
    return qwen27b_config(layers, **{**values, **overrides})


def qwen3_8b_config(layers: int = 36, **overrides: object) -> Qwen3Config:
    """The geometry of Qwen3-8B, a dense model, cut to `layers`."""
    values: dict[str, object] = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return Qwen3Config(**{**values, **overrides})


def tiny_config(layers: int = 4, **overrides: object) -> Qwen3_5TextConfig:
    """A hybrid that a CPU trains in no time, with head sizes that the GPU kernels take."""
    values: dict[str, object] = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "rope_parameters": {**_ROTARY, "mrope_section": [3, 3, 2]},
    }
    return _hybrid(layers, **{**values, **overrides})


def tiny_dense_config(layers: int = 2, **overrides: object) -> Qwen3Config:
    """A dense model that a CPU trains in no time."""
    values: dict[str, object] = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return qwen3_8b_config(layers, **{**values, **overrides})


GEOMETRIES: dict[str, Callable[[int], PreTrainedConfig]] = {
    "27b": qwen27b_config,
    "9b": qwen9b_config,
    "dense-8b": qwen3_8b_config,
    "tiny": tiny_config,
    "tiny-dense": tiny_dense_config,
}
"""By name; each takes a number of layers."""


def random_model(config: PreTrainedConfig, *, device: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, made where it will run."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def chat_lengths(documents: int, *, longest: int, seed: int = 0, mean_tokens: float = MEAN_TOKENS) -> list[int]:
    """Token lengths of `documents` conversations; `mean_tokens` scales all of them, for rows of a toy's size."""
    generator = np.random.default_rng(seed)
    mu = np.log(mean_tokens) - SIGMA**2 / 2
    drawn = generator.lognormal(mu, SIGMA, documents)
    shortest = round(90 * mean_tokens / MEAN_TOKENS)
    return np.clip(np.rint(drawn), shortest, longest).astype(int).tolist()


def chat_dataset(
    documents: int, *, vocabulary: int, longest: int, seed: int = 0, mean_tokens: float = MEAN_TOKENS
) -> Dataset:
    """Tokenized documents of chat lengths with random tokens; every token is a target, as in the published run."""
    generator = np.random.default_rng(seed + 1)
    lengths = chat_lengths(documents, longest=longest, seed=seed, mean_tokens=mean_tokens)
    rows = [generator.integers(2, vocabulary, n).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def learnable_dataset(
    documents: int, *, vocabulary: int, longest: int, seed: int = 0, mean_tokens: float = MEAN_TOKENS
) -> Dataset:
    """Documents of chat lengths in which each token has four followers, one likelier than the others.

    A model can learn that: its loss falls from log(vocabulary) towards 1.1, so that two loss curves can be compared.
    """
    generator = np.random.default_rng(seed + 1)
    followers = np.random.default_rng(7).integers(2, vocabulary, (vocabulary, 4))  # one language for all seeds
    rows = []
    for length in chat_lengths(documents, longest=longest, seed=seed, mean_tokens=mean_tokens):
        choices = generator.choice(4, length, p=(0.55, 0.25, 0.15, 0.05))
        token, row = int(generator.integers(2, vocabulary)), []
        for choice in choices:
            row.append(token)
            token = int(followers[token, choice])
        rows.append(row)
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def stub_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that is never asked to tokenize: the documents are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
