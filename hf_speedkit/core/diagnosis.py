"""From a trace to findings: every rule in one table, in the order in which a reader should see them.

A rule is a function of `Signals`; it gives a Finding with its evidence and advice, or None. Limits come first (what
the device waits for), then causes. Thresholds live beside the rules with the measurements they rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hf_speedkit.core import trace_causes as causes
from hf_speedkit.core import trace_limits as limits
from hf_speedkit.core.records import Finding, Severity
from hf_speedkit.core.trace_records import TraceSummary
from hf_speedkit.core.trace_signals import Signals

Rule = Callable[[Signals], Finding | None]

RULES: tuple[Rule, ...] = (
    limits.unknown,
    limits.input_bound,
    limits.host_bound,
    causes.gated_delta_fallback,
    causes.mamba_fallback,
    causes.too_many_launches,
    limits.communication_bound,
    limits.stalled,
    causes.recompilation,
    causes.host_syncs,
    causes.padding,
    causes.masked_sdpa,
    causes.mask_building,
    causes.double_checkpointing,
    causes.unfused_optimizer,
    causes.partial_trace,
    causes.profiler_cost,
)

_WEIGHT = {Severity.PROBLEM: 0, Severity.WARNING: 1, Severity.NOTE: 2}


def diagnose(subject: TraceSummary, *, rules: Iterable[Rule] = RULES) -> tuple[Finding, ...]:
    """What is wrong with a traced step, worst first; what limits it when nothing is.

    Args:
        subject: a trace, read by `summarize_trace`. Fields that are None are unknown and decide nothing; a summary
            with nothing but published totals (CPU time, device time, launches, some rows of table 1) is enough for
            a verdict.
        rules: the table; one of your own goes behind it: (*RULES, mine).

    Returns:
        Findings by severity, then in the order of the table. Exactly one of them names the limit of the step, or
        says that it is unknown, except where several limits hold at once.

    Raises:
        TypeError: `subject` is not a TraceSummary.
    """
    if not isinstance(subject, TraceSummary):
        raise TypeError(f"expected a TraceSummary, as summarize_trace(PATH) returns, got {type(subject).__name__}")
    signals = Signals(subject)
    found = [finding for finding in (rule(signals) for rule in rules) if finding is not None]
    if any(finding.rule == "unknown" for finding in found):  # then idle time names no limit either
        found = [finding for finding in found if finding.rule == "unknown" or finding.rule not in limits.NAMES_A_LIMIT]
    if not any(finding.rule in limits.NAMES_A_LIMIT for finding in found):
        found.append(limits.device_bound(signals) if _busy(signals) else limits.unclear(signals))
    return tuple(sorted(found, key=lambda finding: _WEIGHT[finding.severity]))


def _busy(signals: Signals) -> bool:
    return signals.device is None or signals.device.idle_share < limits.IDLE_MATTERS


def headline(findings: Sequence[Finding]) -> str:
    """The verdict in one sentence: the worst finding that names a limit, else the worst one."""
    naming = [finding for finding in findings if finding.rule in limits.NAMES_A_LIMIT | {"device_bound", "unclear"}]
    first = min([*naming, *findings], key=lambda finding: _WEIGHT[finding.severity], default=None)
    return first.message if first is not None else "Nothing to say."
