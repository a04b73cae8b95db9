"""Everything the recipe needs, made here: a model config, a tokenizer and conversations of chat lengths. No network.

    python benchmarks/recipe_inputs.py /tmp/inputs [--layers 64] [--conversations 2000] [--config CONFIG.json]
    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 recipes/qwen27b_sft.py \\
        --model_name_or_path /tmp/inputs/model --dataset_name /tmp/inputs/chats --random_weights true \\
        --report_to none --save_strategy no --max_steps 20 --output_dir /tmp/run

Lengths are those of benchmarks/geometry.py, chat template and special tokens included: the mean is that of
ultrachat_200k with Qwen's tokenizer. A word is a token, so that a conversation has the length that was drawn for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from geometry import chat_lengths, qwen27b_config
from transformers import PreTrainedTokenizerFast

SPLIT = "train_sft"  # as in recipes/qwen27b_sft.yaml
WORDS = 4096
PAIRS = 3.16
"""Mean number of user and assistant pairs in ultrachat_200k (shared/data/length_quantiles.json, "turns")."""
TEMPLATE_TOKENS = 3  # <|im_start|>, the role, <|im_end|>
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 4,103 entries in which every word between spaces is one token, with a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = [*SPECIAL, "<unk>", *ROLES, *(f"w{index}" for index in range(WORDS))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2], unk_token="<unk>",
        additional_special_tokens=[SPECIAL[1]],
    )  # fmt: skip
    made.chat_template = CHAT_TEMPLATE
    return made


def conversation(tokens: int, generator: np.random.Generator) -> list[dict[str, str]]:
    """A conversation of exactly `tokens` tokens, chat template included; 8 at least."""
    pairs = max(1, min(int(generator.poisson(PAIRS - 1)) + 1, tokens // (2 * (TEMPLATE_TOKENS + 1))))
    turns = 2 * pairs
    words = max(turns, tokens - turns * TEMPLATE_TOKENS)
    # Every turn has a word, what is left is shared out at random.
    lengths = 1 + generator.multinomial(words - turns, [1 / turns] * turns)
    return [
        {"role": ROLES[1 + turn % 2], "content": " ".join(f"w{word}" for word in generator.integers(0, WORDS, length))}
        for turn, length in enumerate(lengths)
    ]


def write_inputs(
    directory: Path, *, config: dict[str, Any], conversations: int, longest: int = 12_000, seed: int = 0
) -> list[int]:
    """Write `directory/model` (config and tokenizer) and `directory/chats`; returns the conversations' token counts.

    Args:
        directory: made if it is not there.
        config: what stands in config.json; its vocabulary must hold the tokenizer's 4,103 entries.
        conversations: how many.
        longest: no conversation has more tokens than this.
        seed: of lengths and words.
    """
    from datasets import Dataset

    model, chats = directory / "model", directory / "chats" / "data"
    for folder in (model, chats):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = word_tokenizer()
    if config["vocab_size"] < len(tokenizer):
        raise ValueError(f"the model's vocabulary of {config['vocab_size']} is smaller than {len(tokenizer)}")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    (model / "config.json").write_text(json.dumps({**config, **ids}, indent=2) + "\n")
    tokenizer.save_pretrained(model)
    lengths = chat_lengths(conversations, longest=longest, seed=seed)
    generator = np.random.default_rng(seed + 1)
    # The name from which load_dataset knows the split.
    Dataset.from_dict({"messages": [conversation(length, generator) for length in lengths]}).to_parquet(
        str(chats / f"{SPLIT}-00000-of-00001.parquet")
    )
    return lengths


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--config", type=Path, help="another model's config.json instead of the 27B geometry")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    config = json.loads(given.config.read_text()) if given.config else qwen27b_config(given.layers).to_dict()
    lengths = write_inputs(
        given.directory, config=config, conversations=given.conversations, longest=given.longest, seed=given.seed
    )
    print(f"{given.directory}: {len(lengths):,} conversations, {sum(lengths):,} tokens, mean {np.mean(lengths):,.0f}")


if __name__ == "__main__":
    main()
