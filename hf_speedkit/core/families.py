"""Which model families keep the documents of a packed row apart in transformers 5.23, whatever kernels are installed.

The isolation proof would find each leak; this table finds it before a weight is loaded and says why. It is a short cut,
not the authority: a family that is not here is still proven before step 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hf_speedkit.core.errors import PackingError

_NO_BOUNDARIES_IN_SCAN = "its state scan takes no document boundaries: the state of one document runs into the next"
_DROPS_CU_SEQLENS = "it drops cu_seqlens on the way to its linear attention"
_CAUSE_UNKNOWN = "measured to leak; the cause is not known"
_MASK_WITHOUT_POSITIONS = (
    "it builds its attention mask without position_ids, so every document after the first sees the ones before it"
)

# Measured on transformers 5.23.0 with tiny random models: log-probabilities of each document in a packed row against
# those of the document alone, with boundary-aware stand-ins for the kernels. Families that use a flash attention
# package read cu_seq_lens instead of the mask; that route was not measured and is not assumed.
LEAKS: Mapping[str, str] = MappingProxyType(
    {
        "afmoe": _MASK_WITHOUT_POSITIONS,
        "bailing_hybrid": _DROPS_CU_SEQLENS,
        "bart": _MASK_WITHOUT_POSITIONS,
        "bigbird_pegasus": _MASK_WITHOUT_POSITIONS,
        "biogpt": _MASK_WITHOUT_POSITIONS,
        "blenderbot": _MASK_WITHOUT_POSITIONS,
        "blenderbot-small": _MASK_WITHOUT_POSITIONS,
        "bloom": _MASK_WITHOUT_POSITIONS,
        "cpmant": _CAUSE_UNKNOWN,
        "deepseek_v4": _CAUSE_UNKNOWN,
        "falcon": _MASK_WITHOUT_POSITIONS,
        "falcon_mamba": _NO_BOUNDARIES_IN_SCAN,
        "glm5_next": _DROPS_CU_SEQLENS,
        "gpt_oss": _MASK_WITHOUT_POSITIONS,
        "granitemoehybrid": _MASK_WITHOUT_POSITIONS,
        "inkling": _CAUSE_UNKNOWN,
        "inkling2": _CAUSE_UNKNOWN,
        "jamba": _NO_BOUNDARIES_IN_SCAN,
        "kimi_linear": _DROPS_CU_SEQLENS,
        "lfm3": "its convolution swallows seq_idx",
        "mamba": _NO_BOUNDARIES_IN_SCAN,
        "mamba2": _NO_BOUNDARIES_IN_SCAN,
        "marian": _MASK_WITHOUT_POSITIONS,
        "mbart": _MASK_WITHOUT_POSITIONS,
        "minimax": "its lightning attention takes no document boundaries",
        "mpt": _MASK_WITHOUT_POSITIONS,
        "mvp": _MASK_WITHOUT_POSITIONS,
        "openai-gpt": _MASK_WITHOUT_POSITIONS,
        "opt": _MASK_WITHOUT_POSITIONS,
        "pegasus": _MASK_WITHOUT_POSITIONS,
        "plbart": _MASK_WITHOUT_POSITIONS,
        "recurrent_gemma": _NO_BOUNDARIES_IN_SCAN,
        "roformer": _CAUSE_UNKNOWN,
        "rwkv": _NO_BOUNDARIES_IN_SCAN,
        "trocr": _MASK_WITHOUT_POSITIONS,
        "xglm": _MASK_WITHOUT_POSITIONS,
        "xlnet": _CAUSE_UNKNOWN,
        "xlstm": _NO_BOUNDARIES_IN_SCAN,
        "zamba": _NO_BOUNDARIES_IN_SCAN,
        "zaya": "its attention convolves queries and keys over the row, which takes no document boundaries",
    }
)
"""model_type, without the "_text" of a text config -> why packed rows of it leak."""


def why_it_leaks(model_type: str) -> str | None:
    """Why packed rows of a family leak between documents; None where that is not known to happen.

    Args:
        model_type: of the text config or of the whole one ("inkling_text", "inkling").
    """
    return LEAKS.get(model_type.removesuffix("_text"))


def refuse_leaking_family(model_type: str) -> None:
    """Refuse packed training of a family known to leak.

    Args:
        model_type: as for `why_it_leaks`.

    Raises:
        PackingError: the family is in the table; the message gives the reason and the way out.
    """
    reason = why_it_leaks(model_type)
    if reason is not None:
        raise PackingError(
            f"packed rows of {model_type} models leak between documents",
            evidence=(reason, "measured on transformers 5.23; no kernel package changes it"),
            mend="train this model with packing=False and padding_free=False",
        )
