"""Model families whose packed rows leak in transformers 5.23, whatever kernels are installed.

The isolation proof would find each of them; this table finds them before a weight is loaded and says why. It is a
short cut, not the authority: a family that is not here is still proven before step 1.
"""

from __future__ import annotations

from hf_speedkit.core.errors import PackingError

_NO_BOUNDARIES_IN_SCAN = "its state scan takes no document boundaries: the state of one document runs into the next"
_MASK_WITHOUT_POSITIONS = (
    "it builds its attention mask without position_ids, so every document after the first sees the ones before it"
)

# model_type -> why. Measured on transformers 5.23.0 with tiny random models: log-probabilities of each document in a
# packed row against the document alone, with boundary-aware stand-ins for the kernels. Families that use a flash
# attention package read cu_seq_lens instead of the mask; that route was not measured and is not assumed.
LEAKING_MODEL_TYPES: dict[str, str] = {
    "afmoe": _MASK_WITHOUT_POSITIONS,
    "bailing_hybrid": "it drops cu_seqlens on the way to its linear attention",
    "biogpt": _MASK_WITHOUT_POSITIONS,
    "falcon": _MASK_WITHOUT_POSITIONS,
    "falcon_mamba": _NO_BOUNDARIES_IN_SCAN,
    "gpt_oss": _MASK_WITHOUT_POSITIONS,
    "granitemoehybrid": _MASK_WITHOUT_POSITIONS,
    "inkling2_text": "measured to leak; the cause is not known",
    "inkling_text": "measured to leak; the cause is not known",
    "jamba": _NO_BOUNDARIES_IN_SCAN,
    "kimi_linear": "it drops cu_seqlens on the way to its linear attention",
    "lfm3": "its convolution swallows seq_idx",
    "mamba": _NO_BOUNDARIES_IN_SCAN,
    "mamba2": _NO_BOUNDARIES_IN_SCAN,
    "minimax": "its lightning attention takes no document boundaries",
    "openai-gpt": _MASK_WITHOUT_POSITIONS,
    "opt": _MASK_WITHOUT_POSITIONS,
    "recurrent_gemma": _NO_BOUNDARIES_IN_SCAN,
    "xglm": _MASK_WITHOUT_POSITIONS,
}


def refuse_leaking_family(model_type: str) -> None:
    """Refuse packed training of a family known to leak.

    Args:
        model_type: the text config's `model_type`.

    Raises:
        PackingError: the family is in the table; the message gives the reason and the way out.
    """
    reason = LEAKING_MODEL_TYPES.get(model_type)
    if reason is not None:
        raise PackingError(
            f"packed rows of {model_type} models leak between documents",
            evidence=(reason, "measured on transformers 5.23; no kernel package changes it"),
            mend="train this model with packing=False",
        )
