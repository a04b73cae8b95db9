"""The message for kernels that must not be trained on: a table, the commands, the way to go on. Pure text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.requirements import FUNCTIONS
from hf_speedkit.kernels.verdicts import FALLBACK_EVIDENCE

GO_ON = 'kernel_assertion="warn"'

_WOULD = {
    KernelVerdict.FALLBACK: "would run the reference implementation instead of a fused kernel",
    KernelVerdict.FORWARD_ONLY: "would train without some of their gradients",
    KernelVerdict.BROKEN: "would run a kernel that fails or computes wrong numbers",
    KernelVerdict.NO_BOUNDARIES: "would let packed documents see one another",
    KernelVerdict.BLOCKED: "would run a combination of versions known to fail",
    KernelVerdict.UNVERIFIED: "would run something that could not be verified",
}


_COSTS = {
    KernelVerdict.FALLBACK: "the layer runs in many small torch operations, and transformers refuses packed rows",
    KernelVerdict.FORWARD_ONLY: "the inputs named get no gradient: what lies before the layer does not learn from it",
    KernelVerdict.BROKEN: "the run stops at the first backward, or learns from wrong numbers",
    KernelVerdict.NO_BOUNDARIES: "documents in one row are trained as if they were one text",
    KernelVerdict.BLOCKED: "the run stops, or computes wrong numbers without a word",
    KernelVerdict.UNVERIFIED: "not known: nothing is claimed",
}


def cost_of(check: KernelCheck) -> str | None:
    """What training would pay for a check's verdict, in words; None where it pays nothing.

    In words, because how many times slower a fallback is depends on the model and the GPU: see
    benchmarks/results.
    """
    if check.verdict is KernelVerdict.FALLBACK and check.function not in FUNCTIONS:
        return "many small torch operations in the place of one kernel, whose results go through memory each time"
    return _COSTS.get(check.verdict)


def refusal(checks: Sequence[KernelCheck], *, decoder_layers: int | None) -> KernelAssertionError | None:
    """The error for every check that is not FUSED, or None if all are.

    Args:
        checks: what was found.
        decoder_layers: layers of the model, for "48 of 64 layers"; None where not known.
    """
    failing = [check for check in checks if check.verdict is not KernelVerdict.FUSED]
    if not failing:
        return None
    headline = f"{_count(failing, decoder_layers)} {_what_they_would_do(failing)}."
    if all(check.layers_total == 0 for check in failing):
        headline = f"{', '.join(check.function for check in failing)}: required, and called by no layer of this model."
    fixes = dict.fromkeys(check.fix for check in failing if check.fix is not None)
    return KernelAssertionError(
        headline,
        evidence=table(failing),
        mend="\n          ".join(fixes) if fixes else None,
        regardless=GO_ON,
    )


def packed_refusal(checks: Sequence[KernelCheck], boundaries: Collection[str]) -> KernelAssertionError | None:
    """The error for packed rows that transformers' own torch functions would be given, or None.

    They raise for any boundaries (transformers 5.23, integrations/hub_kernels.py:1032), in the first forward pass:
    no mode goes on from there.

    Args:
        checks: of a model whose rows hold several documents.
        boundaries: the boundary arguments that its layers are given ("seq_idx", "cu_seqlens").
    """
    stuck = [
        check
        for check in checks
        if check.verdict is KernelVerdict.FALLBACK
        and check.evidence.startswith(FALLBACK_EVIDENCE)
        and check.function in FUNCTIONS
        and set(FUNCTIONS[check.function].boundary_arguments) & set(boundaries)
    ]
    if not stuck:
        return None
    names = " and ".join(dict.fromkeys(check.function for check in stuck))
    return KernelAssertionError(
        f"documents share rows, which transformers' torch code for {names} refuses: step 1 would fail.",
        evidence=table(stuck),
        mend="\n          ".join(dict.fromkeys(check.fix for check in stuck if check.fix is not None)) or None,
        regardless="one document a row (packing=False, padding_free=False), or SpeedSFTTrainer, whose references "
        "take packed rows",
    )


def warnings_in(checks: Sequence[KernelCheck]) -> tuple[str, ...]:
    """What a FUSED function still costs, one line each."""
    return tuple(
        f"{check.function} ({check.layer}, {check.layers} layers): {check.reason}"
        for check in checks
        if check.verdict is KernelVerdict.FUSED and check.reason is not None
    )


def table(checks: Sequence[KernelCheck]) -> tuple[str, ...]:
    """One aligned line per check: function, verdict, layers, and why."""
    function_width = max((len(check.function) for check in checks), default=0)
    verdict_width = max((len(check.verdict.value) for check in checks), default=0)
    layers = [_layers(check) for check in checks]
    layers_width = max((len(text) for text in layers), default=0)
    return tuple(
        f"{check.function:<{function_width}}   {check.verdict.value:<{verdict_width}}   {text:<{layers_width}}   "
        f"{_why(check)}"
        for check, text in zip(checks, layers, strict=True)
    )


def _layers(check: KernelCheck) -> str:
    count = f"{check.layers}" if check.layers == check.layers_total else f"{check.layers} of {check.layers_total}"
    return f"{check.layer}, {count} layer{'' if check.layers_total == 1 else 's'}"


def _why(check: KernelCheck) -> str:
    return check.evidence if check.reason is None else f"{check.reason} [{check.evidence}]"


def _count(failing: Sequence[KernelCheck], decoder_layers: int | None) -> str:
    """How many layers are concerned: a layer that fails in two functions is one layer."""
    by_function: Counter[tuple[str, str]] = Counter()
    for check in failing:
        by_function[check.layer, check.function] += check.layers
    kinds = {check.layer: check.layers_total for check in failing}
    layers = sum(max(count for (kind, _), count in by_function.items() if kind == layer) for layer in kinds)
    # Several small modules can sit in one decoder layer: then only their own number says something.
    total = decoder_layers if decoder_layers is not None and decoder_layers >= layers else sum(kinds.values())
    return f"{layers} of {total} layers"


def _what_they_would_do(failing: Sequence[KernelCheck]) -> str:
    verdicts = {check.verdict for check in failing}
    if len(verdicts) == 1:
        return _WOULD[failing[0].verdict]
    return "would run kernels that are slow, wrong or not verified"
