"""Rules that name a cause: something in the step that a person can change."""

from __future__ import annotations

from hf_speedkit.core.kernel_groups import ATTENTION, MASK_BUILDING
from hf_speedkit.core.records import Finding, Severity
from hf_speedkit.core.trace_signals import Signals, ms, percent

MANY_BMM = 2_000
"""bmm calls per micro-batch. Healthy eager attention makes at most about 10 per layer, 640 in 64 layers; the reference
of older transformers makes 20 a chunk and 8 a layer, 31,104 in 48 layers of 32 chunks."""

MANY_LAUNCH_CALLS = 20_000
MANY_PER_LAYER = 1_000
"""Launch calls per micro-batch and decoder layer on H200 (benchmarks/results/ladder): fused 110 to 491, reference
GatedDeltaNet 1,551 to 3,688."""

# Two commands: causal-conv1d is built from source, and a build that fails would take fla with it.
_GDN_PACKAGES = (
    'pip install "flash-linear-attention>=0.6,<0.7"  (on Hopper also "triton>=3.7.1"); for a Trainer without '
    'SpeedSFTTrainer\'s own convolution also pip install --no-build-isolation "causal-conv1d>=1.7"  (needs nvcc)'
)
_MAMBA_PACKAGES = "pip install mamba-ssm causal-conv1d"


def gated_delta_fallback(signals: Signals) -> Finding | None:
    """The reference GatedDeltaNet by its fingerprint: a bmm per chunk, or triangular solves (transformers >= 5.23)."""
    if not signals.on_a_device or signals.has_fused("GatedDeltaNet"):
        return None
    bmm = signals.op_calls("aten::bmm") / signals.micro_batches
    solves = signals.op_calls("aten::linalg_solve_triangular") / signals.micro_batches
    a_scan = signals.table_is_whole and not signals.op_calls("aten::cumsum")  # Mamba-1 has no cumulative sum
    if (bmm <= MANY_BMM or a_scan) and solves < 4:
        return None
    evidence = [f"{bmm:,.0f} aten::bmm per micro-batch; eager attention makes some 10 per layer"]
    if solves:
        evidence.append(f"{solves:,.0f} aten::linalg_solve_triangular per micro-batch (6 per layer with recompute)")
    evidence.append("no kernel of flash-linear-attention, FlashQLA or TileLang in the trace")
    return Finding(
        rule="gated_delta_fallback",
        severity=Severity.PROBLEM,
        message="The GatedDeltaNet layers run transformers' reference implementation, not fused kernels.",
        evidence=tuple(evidence),
        advice=f"{_GDN_PACKAGES}; then `hf-speedkit doctor MODEL --probe`",
    )


def mamba_fallback(signals: Signals) -> Finding | None:
    """The reference Mamba by its fingerprint, counted on transformers 5.23 with tiny models on a CPU.

    Mamba-2, per layer: 6 cumsum, 5 einsum, 4 tril (more with recompute), whatever the length. Mamba-1: 3 bmm per
    token and layer and no cumsum.
    """
    if not signals.on_a_device or signals.has_fused("Mamba") or signals.has_fused("GatedDeltaNet"):
        return None
    sums, einsums, trils = (signals.op_calls(f"aten::{name}") for name in ("cumsum", "einsum", "tril"))
    bmm = signals.op_calls("aten::bmm") / signals.micro_batches
    second = sums >= 12 and einsums >= 10 and trils >= 8
    first = signals.table_is_whole and not sums and bmm > MANY_BMM
    if not first and not second:
        return None
    evidence = (
        f"{bmm:,.0f} aten::bmm per micro-batch and no aten::cumsum: a product per token"
        if first
        else f"{sums:,} aten::cumsum, {einsums:,} aten::einsum, {trils:,} aten::tril: the reference's segment sums",
        "no chunk_scan or selective_scan kernel in the trace",
    )
    return Finding(
        rule="mamba_fallback",
        severity=Severity.PROBLEM,
        message="The Mamba layers run transformers' reference implementation, not fused kernels.",
        evidence=evidence,
        advice=f"{_MAMBA_PACKAGES}; then `hf-speedkit doctor MODEL --probe`",
    )


def fallback_names(signals: Signals) -> list[str]:
    """Model families that run a reference implementation."""
    found = {"GatedDeltaNet": gated_delta_fallback(signals), "Mamba": mamba_fallback(signals)}
    return [name for name, finding in found.items() if finding is not None]


def too_many_launches(signals: Signals) -> Finding | None:
    """Launch calls (a CUDA graph counts once) beyond what fused layers need."""
    trace = signals.trace
    counts = [count for count in (_launch_calls_in_steps(signals), trace.launches) if count is not None]
    if not counts:
        return None
    per_micro_batch = min(counts) / signals.micro_batches
    layers = trace.facts.layers
    per_layer = per_micro_batch / layers if layers else None
    if per_micro_batch <= MANY_LAUNCH_CALLS and (per_layer is None or per_layer <= MANY_PER_LAYER):
        return None
    evidence = [f"{per_micro_batch:,.0f} launch calls per micro-batch"]
    if per_layer is not None:
        evidence.append(f"{per_layer:,.0f} per decoder layer; fused layers need 110 to 490")
    if trace.facts.micro_batches is None:
        evidence.append("the file does not say how many micro-batches a step has: taken as 1")
    return Finding(
        rule="too_many_launches",
        severity=Severity.PROBLEM,
        message=f"Too many launches: {per_micro_batch:,.0f} per micro-batch.",
        evidence=tuple(evidence),
        advice="fuse or install the missing kernels (see the other findings); each launch costs the host 5 to 50 us",
    )


def _launch_calls_in_steps(signals: Signals) -> int | None:
    steps = signals.trace.full_steps
    return sum(step.launch_calls for step in steps) if steps else signals.trace.launch_calls


def padding(signals: Signals) -> Finding | None:
    """Slots without a token. Not visible in a trace: only where the recording job wrote its counts into the file."""
    real, slots = signals.trace.facts.real_tokens, signals.trace.facts.slots
    if real is None or not slots or real / slots >= 0.9:
        return None
    return Finding(
        rule="padding",
        severity=Severity.WARNING,
        message=f"Padding: {percent(1 - real / slots)} of what is computed is not a token.",
        evidence=(f"{real:,} real tokens in {slots:,} slots",),
        advice="pack: SpeedSFTConfig(packing=True), or `hf-speedkit plan MODEL DATASET` to see what it would give",
    )


def host_syncs(signals: Signals) -> Finding | None:
    """Blocking calls inside the steps. What they cost is the idle time that begins while the host waits."""
    syncs, window = signals.trace.syncs, signals.step_ns
    calls = sum(row.calls for row in syncs)
    if not window or calls <= signals.micro_batches:
        return None
    cost = sum(row.idle_after_ns for row in syncs)
    worst = syncs[:5]
    return Finding(
        rule="host_syncs",
        severity=Severity.WARNING if cost >= 0.03 * window else Severity.NOTE,
        message=f"{calls / signals.micro_batches:,.1f} host syncs per micro-batch cost {percent(cost / window)} "
        "of the step.",
        evidence=tuple(
            f"{row.calls:,} x {row.call} in {row.cause or 'no operator'}"
            + (f" at {row.source}" if row.source else "")
            + f": waited {ms(row.wait_ns)}, idle after {ms(row.idle_after_ns)}"
            for row in worst
        ),
        advice="keep numbers on the device until a logging step (.item(), .tolist(), boolean indexing, printing)"
        + ("" if any(row.source for row in worst) else "; TraceCallback(with_stack=True) names the line"),
    )


def recompilation(signals: Signals) -> Finding | None:
    """Code compiled or loaded inside the traced step: a shape not seen before (case V58)."""
    calls, time = signals.compilations
    window = signals.step_ns or 0
    longest = signals.trace.longest_launch_call_ns or 0
    if not window or (not calls and longest < 50_000_000) or (max(time, longest) < 0.01 * window and calls < 3):
        return None
    return Finding(
        rule="recompilation",
        severity=Severity.WARNING,
        message="Compilation inside the step: "
        + (f"{calls:,} modules were loaded." if calls else f"one launch call took {ms(longest)}."),
        evidence=(f"module loading {ms(time)} of {ms(window)}", f"longest launch call {ms(longest)}"),
        advice="give every batch one shape (tokens_per_batch), warm up before measuring, keep the Triton cache on a "
        "local disk (TRITON_CACHE_DIR)",
    )


def unfused_optimizer(signals: Signals) -> Finding | None:
    """An optimizer that updates one parameter at a time."""
    ranges = [row for row in signals.trace.annotations if row.name.startswith("Optimizer.step#")]
    launches = sum(row.launches or 0 for row in ranges) / signals.steps
    device = sum(row.device_ns or 0 for row in ranges)
    total = signals.trace.device_time_ns or 0
    if not total or signals.ops_like(r"_foreach_|_fused_adam|_fused_sgd|_fused_adagrad"):
        return None
    if launches <= 500 and device <= 0.05 * total:
        return None
    return Finding(
        rule="unfused_optimizer",
        severity=Severity.WARNING,
        message=f"The optimizer is not fused: {launches:,.0f} launches per step.",
        evidence=(
            f"{ranges[0].name}: {ms(device / signals.steps)} of device time per step",
            "no foreach or fused operator",
        ),
        advice='optim="adamw_torch_fused" (the default of transformers 5)',
    )


def masked_sdpa(signals: Signals) -> Finding | None:
    """Attention with a materialised mask: sdpa takes its memory-efficient, cuDNN or math path for it."""
    slow = signals.ops_like(r"_scaled_dot_product_(efficient|cudnn|attention_math|fused_attention_overrideable)")
    fast = signals.ops_like(r"_scaled_dot_product_flash|_flash_attention_forward|flash_attn|varlen")
    share = signals.group_share(ATTENTION)
    if not slow or fast or share <= 0.05:
        return None
    return Finding(
        rule="masked_sdpa",
        severity=Severity.WARNING,
        message=f"Attention runs with a materialised mask: {percent(share)} of device time.",
        evidence=(f"{slow:,} scaled_dot_product calls outside the flash path, none inside it",),
        advice="packed rows with varlen or flash attention (attn_implementation): no mask at all",
    )


_ATTENTION_PAIRS = (
    (r"^aten::_scaled_dot_product_flash_attention$", r"^aten::_scaled_dot_product_flash_attention_backward$"),
    (r"^aten::_scaled_dot_product_efficient_attention$", r"^aten::_scaled_dot_product_efficient_attention_backward$"),
    (r"^aten::_scaled_dot_product_cudnn_attention$", r"^aten::_scaled_dot_product_cudnn_attention_backward$"),
    (r"^aten::_flash_attention_forward$", r"^aten::_flash_attention_backward$"),
    (r"^flash_attn::.*forward$", r"^flash_attn::.*backward$"),
    (r"^torch_attn::_varlen_attn$", r"^torch_attn::_varlen_attn_backward$"),
)


def double_checkpointing(signals: Signals) -> Finding | None:
    """Forward attention three times per backward: two activation checkpointings around the same layers."""
    for forward, backward in _ATTENTION_PAIRS:
        ahead, back = signals.ops_like(forward), signals.ops_like(backward)
        if back and ahead / back >= 2.5:
            return Finding(
                rule="double_checkpointing",
                severity=Severity.WARNING,
                message=f"Activations are recomputed twice: {ahead / back:.1f} forward attentions per backward.",
                evidence=(f"{ahead:,} forward and {back:,} backward attention calls; 2.0 is one checkpointing",),
                advice="use one: gradient_checkpointing, or FSDP's activation_checkpointing, not both",
            )
    return None


def mask_building(signals: Signals) -> Finding | None:
    """Time spent building attention masks, apart from attention (case V60)."""
    share = signals.group_share(MASK_BUILDING)
    if not share:
        return None
    attention = signals.group_share(ATTENTION)
    return Finding(
        rule="mask_building",
        severity=Severity.WARNING if share >= 0.05 or share > attention else Severity.NOTE,
        message=f"Mask build {percent(share)} of device time, attention {percent(attention)}.",
        evidence=(f"kernels launched inside mask-building functions, {signals.steps} step(s)",),
        advice="build the mask once per batch and compile it, or use packed varlen attention, which needs none",
    )


def profiler_cost(signals: Signals) -> Finding | None:
    """How much the recording itself distorts the step."""
    window, untraced = signals.step_ns, signals.trace.facts.untraced_step_time_s
    if not window:
        return None
    own, estimate = signals.trace.overhead_ns, signals.profiler_cost_ns
    ratio = window / signals.steps / (untraced * 1e9) if untraced else None
    if own <= 0.01 * window and estimate <= 0.1 * window and (ratio is None or ratio <= 1.2):
        return None
    evidence = [f"recording the CPU operations cost about {ms(estimate)} of {ms(window)}"]
    if own:
        evidence.append(f"the profiler's own recorded work {ms(own)}")
    if ratio is not None:
        evidence.append(f"the traced step took {ratio:.2f} x the untraced median")
    return Finding(
        rule="profiler_cost",
        severity=Severity.NOTE,
        message="The recording itself slowed the host noticeably; host times are upper bounds.",
        evidence=tuple(evidence),
        advice="trace without stacks and shapes; compare with the untraced step time",
    )


def partial_trace(signals: Signals) -> Finding | None:
    """The file is not whole."""
    if not signals.trace.partial:
        return None
    return Finding(
        rule="partial",
        severity=Severity.WARNING,
        message="The trace is partial: totals are lower bounds.",
        evidence=signals.trace.partial,
        advice="record the step again",
    )
