"""What one counted step did, on the host and on one device, and the parts that its time adds up from.

A step is *counted* when CUPTI recorded its launches and kernels (`hf_speedkit.measure.launches`). Its time on the
device's clock is cut by two questions at every moment, what did the device run and what did the host do:

    exposed communication   the device ran communication and nothing else
    overlapped              the device computed while the host issued work
    device-only             the device computed while the host waited for it, or had issued the whole step
    data wait               the device idled while the host waited for a batch
    host-only               the device idled otherwise: it waited for the host

The five add up to the step's time by construction. A wait for data or a host that is slow under a busy device costs
nothing, and is not in these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hf_speedkit.core.records import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepActivity:
    """One counted step of one rank, or the mean over ranks.

    Args:
        launch_calls: host calls that started device work.
        kernels: kernels they started; a CUDA graph starts many with one call.
        memcpy: copies.
        memset: memsets.
        device_busy_s: union of the device work that the step started.
        communication_s: union of its communication kernels.
        host_wait_s: time the host stood in calls that wait for the device.
        step_time_s: what the next five add up to; None, like them, where the clocks could not be compared.
        exposed_comm_s, overlapped_s, device_only_s, data_wait_s, host_only_s: see the module's text.
        cost_s: host time that the counting itself took, in no step's time.
    """

    launch_calls: float
    kernels: float
    memcpy: float
    memset: float
    device_busy_s: float
    communication_s: float
    host_wait_s: float
    step_time_s: float | None = None
    exposed_comm_s: float | None = None
    overlapped_s: float | None = None
    device_only_s: float | None = None
    data_wait_s: float | None = None
    host_only_s: float | None = None
    cost_s: float | None = None

    @property
    def launches(self) -> float:
        """Kernels, copies and memsets."""
        return self.kernels + self.memcpy + self.memset


ACTIVITY_FIELDS = tuple(field.name for field in fields(StepActivity))

PARTS = ("data_wait", "host_only", "overlapped", "device_only", "exposed_comm")
"""The parts of a step, in the order a picture stacks them; metric keys are speed/part_<name>_s."""


def activity_over_ranks(activities: Sequence[StepActivity | None]) -> StepActivity | None:
    """The mean of the ranks that counted; None where none did. A number that one of them lacks is unknown."""
    seen = [activity for activity in activities if activity is not None]
    if not seen:
        return None
    means = {}
    for name in ACTIVITY_FIELDS:
        known = [value for value in (getattr(activity, name) for activity in seen) if value is not None]
        means[name] = sum(known) / len(known) if len(known) == len(seen) else None
    return StepActivity(**means)  # type: ignore[arg-type]  # the counts are always known


def activity_metrics(activity: StepActivity | None) -> Mapping[str, float | None]:
    """The metrics of a counted step, by key."""
    if activity is None:
        return {}
    return {
        "speed/launch_calls": activity.launch_calls,
        "speed/launches": activity.launches,
        "speed/kernels": activity.kernels,
        "speed/memcpy": activity.memcpy,
        "speed/memset": activity.memset,
        "speed/device_busy_s": activity.device_busy_s,
        "speed/communication_s": activity.communication_s,
        "speed/host_wait_s": activity.host_wait_s,
        "speed/counted_step_time_s": activity.step_time_s,
        "speed/count_cost_s": activity.cost_s,
        **{f"speed/part_{name}_s": getattr(activity, f"{name}_s") for name in PARTS},
    }


def with_activity(records: Sequence[StepRecord], step: int, activity: StepActivity) -> tuple[StepRecord, ...]:
    """The records with what was counted in the step of that number."""
    return tuple(
        replace(record, launches=int(activity.launches), exposed_comm_s=activity.exposed_comm_s)
        if record.step == step
        else record
        for record in records
    )
