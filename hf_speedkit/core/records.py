"""The vocabulary everything else speaks: frozen records and their JSON form.

`None` means "not measured", never 0 and never a guess. Field names carry units.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from hf_speedkit.core.document_records import DocumentReport as DocumentReport
from hf_speedkit.core.trace_records import TraceSummary as TraceSummary

if TYPE_CHECKING:
    from hf_speedkit.core.bench_records import BenchResult as BenchResult


class KernelVerdict(StrEnum):
    """What an inspected function turned out to be."""

    FUSED = "FUSED"
    """An optimised implementation is bound (and, where probed, ran forward and backward and agreed)."""
    FALLBACK = "FALLBACK"
    """The reference implementation would run: correct, but many times slower."""
    FORWARD_ONLY = "FORWARD_ONLY"
    """No gradient reaches an input."""
    BROKEN = "BROKEN"
    """It raises, or its numbers disagree with the reference."""
    NO_BOUNDARIES = "NO_BOUNDARIES"
    """It ignores document boundaries: packed documents would see one another."""
    BLOCKED = "BLOCKED"
    """A combination of versions known to fail, found before anything ran."""
    UNVERIFIED = "UNVERIFIED"
    """The layout of the library is not one this version knows; nothing is claimed."""


class Severity(StrEnum):
    """How much a finding matters."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRequirement:
    """One optimised function a model family needs for training.

    Args:
        function: name of the module global that the layer calls.
        package: import name of the package that holds the fast implementation.
        distribution: name to `pip install`.
        boundary_arguments: parameters through which document boundaries reach it; empty where none are needed.
        training: False for decode-only functions, which training must not demand.
    """

    function: str
    package: str
    distribution: str
    boundary_arguments: tuple[str, ...] = ()
    training: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """What one function of a model is bound to, and what that means.

    Args:
        function: the function's name.
        verdict: see `KernelVerdict`.
        layer: class name of the layers that call it.
        layers: how many layers this check speaks of.
        layers_total: how many layers of that class the model has.
        evidence: what is bound (package and version, hub kernel, reference), as found.
        reason: why it is not FUSED (the real import error where there is one), or what a FUSED one still costs.
        fix: the exact command that mends it; None where nothing needs mending.
        first_call_s: time of its first forward and backward in the probe, compilation and tuning included.
        call_s: time of a later one, of the same sizes.
    """

    function: str
    verdict: KernelVerdict
    layer: str
    layers: int
    layers_total: int
    evidence: str
    reason: str | None = None
    fix: str | None = None
    first_call_s: float | None = None
    call_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """Outcome of the proof that packed documents do not see one another.

    Args:
        passed: no document influenced another, and the probe was shown to be alive.
        documents: documents in the probed row.
        probed_document: index of the document under test.
        output_change: largest change of its log-probabilities when every other document is replaced.
        gradient_leak: largest gradient of its log-probabilities at other documents' embeddings.
        own_gradient: largest such gradient at its own embeddings (must be > 0, else the probe is dead).
        others_change: largest change of the replaced documents' log-probabilities (must be > 0 likewise).
        tolerance: the bound both leaks were held to.
        leaks: names of the operations that leak, where they could be told apart.
        operations: operations that were looked at one by one.
        placement_change: largest change of its log-probabilities at the row's start; None where rounding hides it.
    """

    passed: bool
    documents: int
    probed_document: int
    output_change: float
    gradient_leak: float
    own_gradient: float
    others_change: float
    tolerance: float
    leaks: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    placement_change: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """Which documents share a row.

    Args:
        packs: document indices of each pack, in the order they lie in the row.
        tokens_per_batch: slots of one row.
        strategy: the planner that made it ("fifo_close", "best_fit_decreasing", "next_fit").
        documents: number of documents planned.
        real_tokens: their tokens.
    """

    packs: tuple[tuple[int, ...], ...]
    tokens_per_batch: int
    strategy: str
    documents: int
    real_tokens: int

    @property
    def packing_efficiency(self) -> float | None:
        """Real tokens / slots, 0..1; None for an empty plan."""
        slots = len(self.packs) * self.tokens_per_batch
        return self.real_tokens / slots if slots else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """What a batch, a step or a run computed, in tokens.

    Args:
        slots: positions computed, padding included.
        real: slots that hold a document's token.
        target: labels != -100, i.e. tokens that enter the loss.
        documents: training examples.
        squared_lengths: sum over documents of their length squared; attention FLOPs follow from it.
        window_pairs: causal (query, key) pairs inside the model's sliding window, over documents; None without one.

    `None` where a batch does not say (for example labels that live on the device).
    """

    slots: int
    real: int | None
    target: int | None
    documents: int | None
    squared_lengths: int | None = None
    window_pairs: int | None = None

    def __add__(self, other: TokenCounts) -> TokenCounts:
        """Sum field by field; unknown plus anything is unknown."""
        if not isinstance(other, TokenCounts):
            return NotImplemented
        return TokenCounts(
            slots=self.slots + other.slots,
            real=_add(self.real, other.real),
            target=_add(self.target, other.target),
            documents=_add(self.documents, other.documents),
            squared_lengths=_add(self.squared_lengths, other.squared_lengths),
            window_pairs=_add(self.window_pairs, other.window_pairs),
        )


NO_TOKENS = TokenCounts(slots=0, real=0, target=0, documents=0, squared_lengths=0, window_pairs=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step of one rank.

    Args:
        step: global step after the step ended (first step = 1).
        micro_batches: forward/backward passes of the accumulation window.
        tokens: sum over them.
        step_time_s: end of the previous step to end of this one, data wait included, the three pauses below left out.
        data_wait_s: time the loop waited for its batches.
        host_time_s: time the host needed to issue the step, waits on the device excluded.
        device_time_s: device span of the step.
        device_wait_s: time the host was seen waiting for the device.
        eval_time_s: evaluation between the previous step and this one; not in `step_time_s`, like the next two.
        save_time_s: checkpoint writing, likewise.
        log_time_s: logging, likewise.
        exposed_comm_s: communication not hidden behind computation.
        launches: kernels, memcpy and memset started.
        flops: model FLOPs (forward and backward, no recompute).
        recomputed_flops: FLOPs of what activation checkpointing computed once more.
        compiled_kernels: kernels compiled or autotuned during the step.
        nonfinite: whether the loss or a gradient was NaN or infinite.
        nonfinite_loss: whether the loss was.
        excluded: why the step must not enter a rate ("warm-up", "resume", "traced", ...); None if it may.
    """

    step: int
    micro_batches: int
    tokens: TokenCounts
    step_time_s: float
    data_wait_s: float | None = None
    host_time_s: float | None = None
    device_time_s: float | None = None
    device_wait_s: float | None = None
    eval_time_s: float = 0.0
    save_time_s: float = 0.0
    log_time_s: float = 0.0
    exposed_comm_s: float | None = None
    launches: int | None = None
    flops: float | None = None
    recomputed_flops: float | None = None
    compiled_kernels: int | None = None
    nonfinite: bool | None = None
    nonfinite_loss: bool | None = None
    excluded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One conclusion drawn from records.

    Args:
        rule: stable identifier of the rule that fired.
        severity: how much it matters.
        message: the conclusion in one sentence.
        evidence: the numbers behind it.
        advice: what to do.
    """

    rule: str
    severity: Severity
    message: str
    evidence: tuple[str, ...]
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """Means over one window of one GPU's samples; None for what the driver does not report.

    Args:
        samples: how many samples the means are of.
        utilization_percent: share of time with any kernel running, 0..100; says nothing about how well it ran.
        power_w: board power.
        sm_clock_mhz: clock of the multiprocessors.
        memory_gib: memory in use on the board, by all processes.
        throttled_percent: share of samples in which the driver held the clock back for power or heat, 0..100.
        throttled_by_heat_percent: share of samples in which it was for heat, 0..100.
        sm_active_percent: share of multiprocessors with work (NVML GPM, Hopper and later), 0..100, like the next two.
        tensor_active_percent: share of time the tensor pipes were active.
        dram_active_percent: share of the memory's peak bandwidth in use.
    """

    samples: int
    utilization_percent: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    memory_gib: float | None = None
    throttled_percent: float | None = None
    throttled_by_heat_percent: float | None = None
    sm_active_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where something was measured. Holds no user name, path, token or environment variable.

    Args:
        python: interpreter version.
        packages: version of each package that matters, absent ones left out.
        devices: device names, one per visible device; empty without a GPU.
        driver: NVIDIA driver version.
        cpu_count: usable cores.
        commit: commit of the checkout, with "+" appended when files were changed; None outside a checkout.
    """

    python: str
    packages: Mapping[str, str]
    devices: tuple[str, ...]
    driver: str | None
    cpu_count: int
    commit: str | None


def __getattr__(name: str) -> object:
    """`BenchResult`, whose module is made of the records of this one."""
    if name != "BenchResult":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_speedkit.core.bench_records import BenchResult

    return BenchResult


def to_dict(record: object) -> dict[str, object]:
    """A record as plain JSON types, nested records included.

    Raises:
        TypeError: `record` is not one of the dataclasses of this module's kind.
    """
    if not is_dataclass(record) or isinstance(record, type):
        raise TypeError(f"expected a record, got {type(record).__name__}")
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def to_json(record: object) -> str:
    """A record as one line of JSON. Non-finite floats are refused: they are not JSON."""
    return json.dumps(to_dict(record), allow_nan=False, sort_keys=True)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _add(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right
