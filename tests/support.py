"""Tiny models and data shared by the tests. Everything is real, only small."""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

VOCABULARY = 64


def tiny_hybrid(*, seed: int = 0, layers: int = 4, **overrides) -> Qwen3_5ForCausalLM:
    """Three GatedDeltaNet layers and one of full attention, fp32, about 60,000 parameters."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
        **overrides,
    )
    return Qwen3_5ForCausalLM(config)


def tiny_llama(*, seed: int = 0) -> LlamaForCausalLM:
    """Two layers of full attention, fp32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of VOCABULARY entries: <pad>, <eos>, then w2 ... w63."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w2")


def token_documents(lengths, *, seed: int = 0) -> list[list[int]]:
    """Random documents of the given lengths, without pad and eos ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def tokenized(lengths, *, seed: int = 0, targets_from: int = 0) -> Dataset:
    """A tokenized dataset; the first `targets_from` tokens of each document are no targets."""
    documents = token_documents(lengths, seed=seed)
    labels = [[-100 if i < targets_from else t for i, t in enumerate(d)] for d in documents]
    return Dataset.from_dict({"input_ids": documents, "labels": labels})
