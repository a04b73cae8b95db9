"""Results of benches -> rows of a table: the median over repetitions, and how far they were apart. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hf_speedkit.core.bench_records import BenchResult

SPEED = "tokens_per_second"
MEDIAN_STEP = "median_step_tokens_per_second"
UTILIZATION = "gpu_utilization"

OURS = "speedkit"
"""The run that the tables over several workloads are about, by name."""

MINUS = f"{OURS} minus "
"""How the name of that run without one item begins."""

OTHERS = "trl"
"""What it is compared with there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One number over the repetitions of a run."""

    median: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """The repetitions of one thing that was measured.

    Args:
        name: what was varied.
        workload: what was trained.
        ranks: processes that trained it. device: what each of them had, "GPU" or "process".
        runs: repetitions.
        commits: of the code they ran, in order of first use.
        values: by column (`COLUMNS`); what was not measured is not there.
    """

    name: str
    workload: str
    ranks: int
    device: str
    runs: int
    commits: tuple[str, ...]
    values: Mapping[str, Spread]

    @property
    def speed(self) -> float:
        """Median real tokens per second, 0 where not one step was steady."""
        found = self.values.get(SPEED)
        return 0.0 if found is None else found.median

    @property
    def speed_per_device(self) -> float:
        """The same of one GPU."""
        return self.speed / self.ranks

    @property
    def place(self) -> str:
        """What was trained, and on how many GPUs where they were several: only rows of one place may be compared."""
        return place(self.workload, self.ranks, self.device)


def place(workload: str, ranks: int, device: str = "GPU") -> str:
    """A workload and the GPUs it ran on, in words."""
    return workload if ranks == 1 else f"{workload} on {ranks} {device}{'es' if device.endswith('s') else 's'}"


def rows(results: Iterable[BenchResult]) -> tuple[BenchRow, ...]:
    """One row for each name, workload and number of ranks, in the order in which they first come.

    Cold runs (repetition 0) are left out.
    """
    groups: dict[tuple[str, int, str], list[BenchResult]] = {}
    for result in results:
        if result.repetition > 0:
            groups.setdefault((result.workload, result.world_size, result.name), []).append(result)
    return tuple(_row(group) for group in groups.values())


def by_workload(found: Sequence[BenchRow]) -> dict[str, tuple[BenchRow, ...]]:
    """Rows by `place`, the slowest first: a ladder."""
    ordered = sorted(found, key=lambda row: (row.speed, row.name))
    return {where: tuple(row for row in ordered if row.place == where)
            for where in dict.fromkeys(row.place for row in found)}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one item of `OURS` gives.

    Args:
        item: its name. without: the row measured without it.
        time_saved: share of the time per token without it that it saves; negative where it costs time.
        apart: as in `Gain`.
    """

    item: str
    without: BenchRow
    time_saved: float
    apart: bool


def shares(ladder: Sequence[BenchRow]) -> tuple[Share, ...]:
    """The share of each item, the largest first, from the rows of one place; empty without `OURS` among them."""
    ours = next((row for row in ladder if row.name == OURS), None)
    if ours is None:
        return ()
    found = []
    for row in ladder:
        compared = gain(row, ours) if row.name.startswith(MINUS) else None
        if compared is not None:
            item = row.name.removeprefix(MINUS)
            found.append(Share(item=item, without=row, time_saved=1 - compared.ratio, apart=compared.apart))
    return tuple(sorted(found, key=lambda share: -share.time_saved))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One place in a table of several.

    Args:
        ours: its row of `OURS`.
        beside: the other rows that more than one place has, and that of `OTHERS`, by name.
        times_others: its speed over that of `OTHERS`; None where that was not measured.
        times_others_median: the same of their median steps, as if nothing ever compiled.
    """

    ours: BenchRow
    beside: Mapping[str, BenchRow]
    times_others: float | None
    times_others_median: float | None


def shapes(ladders: Mapping[str, Sequence[BenchRow]]) -> tuple[Shape, ...]:
    """The places that have a row of `OURS`, the one with most rows first; empty where fewer than two have."""
    named = [{row.name: row for row in ladder} for ladder in ladders.values()]
    named = sorted((found for found in named if OURS in found), key=len, reverse=True)
    if len(named) < 2:
        return ()
    everywhere = [name for found in named for name in found if name != OURS and not name.startswith(MINUS)]
    # From slow to fast, as the first place has them.
    order = [name for name in dict.fromkeys(everywhere) if everywhere.count(name) > 1 or name == OTHERS]
    return tuple(
        Shape(
            ours=found[OURS],
            beside={name: found[name] for name in order if name in found},
            times_others=_ratio(found[OURS], found.get(OTHERS), SPEED),
            times_others_median=_ratio(found[OURS], found.get(OTHERS), MEDIAN_STEP),
        )
        for found in named
    )


def _ratio(row: BenchRow, base: BenchRow | None, column: str) -> float | None:
    if base is None or column not in row.values or column not in base.values or not base.values[column].median:
        return None
    return row.values[column].median / base.values[column].median


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How one row's speed compares with another's.

    Args:
        name: the faster or slower one. base: what it is compared with.
        ratio: of the medians.
        apart: no run of one lies among those of the other; False also where one of them ran only once.
    """

    name: str
    base: str
    ratio: float
    apart: bool


def gain(row: BenchRow, base: BenchRow) -> Gain | None:
    """What `row` gains over `base`; None where one of them has no speed."""
    ours, theirs = row.values.get(SPEED), base.values.get(SPEED)
    if ours is None or theirs is None or theirs.median == 0:
        return None
    separate = ours.low > theirs.high or ours.high < theirs.low
    return Gain(
        name=row.name,
        base=base.name,
        ratio=ours.median / theirs.median,
        apart=separate and min(ours.runs, theirs.runs) > 1,
    )


def median_step_rate(result: BenchResult) -> float | None:
    """Real tokens per second of the median steady step: what a run would do if no step compiled anything."""
    found = [
        step.tokens.real / step.step_time_s
        for step in result.steps
        if step.excluded is None and step.tokens.real and step.step_time_s > 0
    ]
    return median(found) * result.world_size if found else None


def gpu_mean(result: BenchResult, name: str) -> float | None:
    """Mean over the logged windows of what NVML said; the first, with the warm-up in it, left out if there are more."""
    found = [entry[key] for entry in result.log for key in (f"speed/gpu_{name}",) if key in entry]
    return fmean(found[1:] or found) if found else None


def device_groups(results: Iterable[BenchResult]) -> dict[str, dict[str, dict[str, float]]]:
    """Device seconds of a traced step by `place`, name and group; of each name, its first traced run."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for result in results:
        if result.device_groups_s:
            where = place(result.workload, result.world_size, _device(result))
            found.setdefault(where, {}).setdefault(result.name, dict(result.device_groups_s))
    return found


def first_step_s(result: BenchResult) -> float | None:
    """Time of the first step: what is compiled or tuned only when training runs shows here."""
    return result.steps[0].step_time_s if result.steps else None


def startup_s(result: BenchResult) -> float | None:
    """Time of the proofs before step 1, compilation included; None where nothing was proven."""
    return sum(result.startup_s.values()) if result.startup_s else None


def _rate(key: str) -> Callable[[BenchResult], float | None]:
    return lambda result: result.rates.get(f"speed/{key}")


def _gpu(name: str) -> Callable[[BenchResult], float | None]:
    return lambda result: gpu_mean(result, name)


def _efficiency(result: BenchResult) -> float | None:
    return None if result.tokens.real is None else result.tokens.real / result.tokens.slots


COLUMNS: Mapping[str, Callable[[BenchResult], float | None]] = {
    SPEED: _rate("real_tokens_per_second"),
    MEDIAN_STEP: median_step_rate,
    "mfu": _rate("mfu"),
    "hfu": _rate("hfu"),
    "launches": lambda result: result.launches,
    "host_waits": lambda result: result.host_waits,
    "step_time_s": _rate("step_time_s"),
    "host_time_s": _rate("host_time_s"),
    "device_time_s": _rate("device_time_s"),
    "data_wait_s": _rate("data_wait_s"),
    "device_wait_s": _rate("device_wait_s"),
    "packing_efficiency": _efficiency,
    "startup_s": startup_s,
    "first_step_s": first_step_s,
    "peak_memory_gib": lambda result: result.peak_memory_gib,
    UTILIZATION: _gpu("utilization"),
    "gpu_power_w": _gpu("power_w"),
    "gpu_sm_clock_mhz": _gpu("sm_clock_mhz"),
}
"""What a row may say, and where each number comes from."""


def _device(result: BenchResult) -> str:
    return "GPU" if result.environment.devices else "process"


def _row(group: Sequence[BenchResult]) -> BenchRow:
    values = {}
    for column, of in COLUMNS.items():
        found = [value for value in map(of, group) if value is not None]
        if found:
            values[column] = Spread(median=median(found), low=min(found), high=max(found), runs=len(found))
    return BenchRow(
        name=group[0].name,
        workload=group[0].workload,
        ranks=group[0].world_size,
        device=_device(group[0]),
        runs=len(group),
        commits=tuple(dict.fromkeys(one.environment.commit for one in group if one.environment.commit)),
        values=values,
    )
