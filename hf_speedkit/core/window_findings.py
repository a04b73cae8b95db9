"""What a logging window's metrics say: what limits the step, with the numbers, and what does not fit together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hf_speedkit.core.records import Finding, Severity
from hf_speedkit.core.step_parts import PARTS

LIMIT_SHARE = 0.10
"""Share of a step from which on a part limits it; the traces' rules use the same (`trace_limits.IDLE_MATTERS`)."""

OFU_GAP = 10.0
"""Points between FLOP utilisation by our formula and by the tensor pipes' counter beyond which one of them is wrong.

The counter's authors found about 2 points on healthy runs (arXiv 2605.20799).
"""

LATE_COMPILATIONS, LATE_SHARE = 3, 0.05
"""Compilations behind the warm-up that are no accident: so many, and one in 20 steps. A second graph for the shorter
batch at an epoch's end is one."""

_LIMITS = {
    "data_wait": (
        "input_bound",
        "Input-bound: {share:.0%} of the step passes waiting for a batch.",
        "raise dataloader_num_workers and dataloader_prefetch_factor, tokenize before training",
    ),
    "host_only": (
        "host_bound",
        "Host-bound: for {share:.0%} of the step the device waits for the host to issue work.",
        "hf-speedkit doctor MODEL names slow fallbacks; else start fewer, larger kernels (fused layers, packing)",
    ),
    "exposed_comm": (
        "communication_bound",
        "Communication-bound: {share:.0%} of the step is communication that nothing hides.",
        "compare the ranks' step times for a straggler first; then accumulate gradients or raise tokens_per_batch",
    ),
}


def window_findings(metrics: Mapping[str, float]) -> tuple[Finding, ...]:
    """What is to be said of a window; the limit of the step first, where its parts are known.

    Args:
        metrics: of one window, by key.
    """
    found = (step_limit(metrics), flop_gap(metrics), impossible_mfu(metrics), no_targets(metrics))
    return tuple(finding for finding in found if finding is not None)


def step_limit(metrics: Mapping[str, float]) -> Finding | None:
    """What limits the step: input, host, communication or the device.

    By the parts of the counted step where the window holds one. Without a count the device's clock still tells waiting
    for data: step time less device time is what passes between two steps on the device. None where nothing is known.
    """
    parts = {name: metrics[f"speed/part_{name}_s"] for name in PARTS if f"speed/part_{name}_s" in metrics}
    step = sum(parts.values())
    if not parts or step <= 0:
        return _input_bound_by_clock(metrics)
    evidence = tuple(f"{name.replace('_', ' ')} {seconds * 1e3:,.1f} ms" for name, seconds in parts.items())
    evidence = (f"step {step * 1e3:,.1f} ms: {', '.join(evidence)}",)
    able = _LIMITS if "device_only" in parts else ("data_wait",)  # no device: the host computes
    largest = max(able, key=lambda name: parts.get(name, 0.0))
    # A damaged log may lack a part, or have a step so short that its tenth is 0.
    limiting = largest if _share(parts.get(largest, 0.0), step) >= LIMIT_SHARE else None
    if limiting is not None:
        rule, message, advice = _LIMITS[limiting]
        return Finding(
            rule=rule,
            severity=Severity.WARNING,
            message=message.format(share=_share(parts[limiting], step)),
            evidence=evidence,
            advice=advice,
        )
    if "device_only" not in parts:
        return Finding(
            rule="host_computes",
            severity=Severity.NOTE,
            message="Without a device the host does the computing: nothing else limits the step.",
            evidence=evidence,
            advice="train on a GPU",
        )
    busy = _share(parts.get("overlapped", 0.0) + parts["device_only"], step)
    return Finding(
        rule="device_bound",
        severity=Severity.NOTE,
        message=f"Device-bound, as it should be: the device computes for {busy:.0%} of the step.",
        evidence=evidence,
        advice="look at MFU; hf-speedkit trace shows which kernels the time goes to",
    )


def flop_gap(metrics: Mapping[str, float]) -> Finding | None:
    """Whether our FLOPs and the tensor pipes' counter disagree; recompute is work to the counter, so HFU is compared.

    Only in a window without pauses and excluded steps: the counter is a mean over all of the window's time.
    """
    ofu, ours = metrics.get("speed/ofu"), metrics.get("speed/hfu", metrics.get("speed/mfu"))
    pauses = sum(metrics.get(f"speed/{kind}_time_s", 0.0) for kind in ("eval", "save", "log"))
    seconds = metrics.get("speed/steady_steps", 0.0) * metrics.get("speed/step_time_s", 0.0)
    if ofu is None or ours is None or metrics.get("speed/excluded_steps") or pauses > 0.02 * seconds:
        return None
    if abs(ofu - ours) <= OFU_GAP:
        return None
    active, clock = metrics.get("speed/gpu_tensor_active"), metrics.get("speed/gpu_sm_clock_mhz")
    name = "HFU" if "speed/hfu" in metrics else "MFU"
    return Finding(
        rule="flop_gap",
        severity=Severity.WARNING,
        message=f"{name} by formula is {ours:.1f} %, by the tensor pipes' counter {ofu:.1f} %: one of them is wrong.",
        evidence=(f"tensor pipes active {active:.1f} % of the time at {clock:,.0f} MHz",)
        if active is not None and clock is not None
        else (),
        advice="counter far below: FLOPs are counted that are not computed (pass flops=, or the peak is another "
        "dtype's); far above: work is done that the formula does not know (recompute, padding, another process)",
    )


def impossible_mfu(metrics: Mapping[str, float]) -> Finding | None:
    """Whether more was computed than the device can: then the FLOPs, the peak or the token counts are wrong."""
    name = next((name for name in ("mfu", "hfu") if metrics.get(f"speed/{name}", 0.0) > 100.0), None)
    if name is None:
        return None
    return Finding(
        rule="impossible_mfu",
        severity=Severity.WARNING,
        message=f"{name.upper()} is {metrics[f'speed/{name}']:,.0f} %, and no device computes more than its peak.",
        evidence=(f"{metrics.get('speed/model_tflops_per_device', 0.0):,.0f} TFLOP/s a device by the model's formula",),
        advice="the peak is another dtype's or another GPU's (peak_tflops=), flops= counts too much, or tokens are "
        "counted that no device computed",
    )


def no_targets(metrics: Mapping[str, float]) -> Finding | None:
    """Whether a window held no token that enters the loss: then its loss is 0 and nothing is learned (case V31)."""
    if metrics.get("speed/target_share") != 0.0:
        return None
    return Finding(
        rule="no_targets",
        severity=Severity.PROBLEM,
        message="Nothing was learned in this window: none of its tokens enters the loss.",
        evidence=(f"target tokens of the run so far: {metrics.get('speed/total_target_tokens', 0):,.0f}",),
        advice="look at the labels: truncation or a mask (completion_only_loss, assistant_only_loss) removed them all",
    )


def still_compiling(compiled: float, steps: int) -> Finding | None:
    """Whether kernels or graphs are compiled long after the warm-up: at every shape not seen before (case V58).

    Args:
        compiled: kernels and graphs, on the rank that compiled most.
        steps: of the windows in which they were, behind the session's first steps.
    """
    if compiled < LATE_COMPILATIONS or compiled < LATE_SHARE * steps:
        return None
    return Finding(
        rule="still_compiling",
        severity=Severity.WARNING,
        message=f"Still compiling: {compiled:,.0f} kernels or graphs in {steps:,} steps behind the warm-up.",
        evidence=("each is a pause of the step it comes in; speed/compiled_kernels counts them, window by window",),
        advice="train on rows of one shape (SpeedSFTTrainer packs to one; else pad to a fixed length); of "
        "torch.compile, TORCH_LOGS=recompiles names the input that changed",
    )


def _input_bound_by_clock(metrics: Mapping[str, float]) -> Finding | None:
    step, device = metrics.get("speed/step_time_s"), metrics.get("speed/device_time_s")
    waited = metrics.get("speed/data_wait_s")
    if step is None or step <= 0 or device is None or waited is None:
        return None
    gap = min(step - device, waited)
    if gap < LIMIT_SHARE * step:
        return None
    rule, message, advice = _LIMITS["data_wait"]
    return Finding(
        rule=rule,
        severity=Severity.WARNING,
        message=message.format(share=_share(gap, step)),
        evidence=(f"step {step * 1e3:,.1f} ms, of it {device * 1e3:,.1f} ms from the first to the last kernel's mark",),
        advice=advice,
    )


def _share(part: float, step: float) -> float:
    """Part of a step, 0..1 whatever a damaged log holds."""
    return max(0.0, min(1.0, part / step))
