"""What remains: device time of one traced step by group of kernels, against the least the GPU needs for that work.

    python benchmarks/rung.py speedkit --out r.json --steps 26 --trace 24 --keep-trace
    python benchmarks/floors.py r_trace_rank0_step24.json.gz r.json --out floors.json

The step is what its host launched, whenever it ran, from the end of work queued before it to the end of its own last
kernel. A floor (floor_formulas.py) is FLOPs over what bf16 matrix products reach on an H200, bytes over what a copy
reaches, or bytes over the rated speed of the link. What is no operation of the model (copies, fills, waiting) has a
floor of zero. "exposed" is time on the main stream, and beside it only where the main stream stood still; "left" is
what the step could gain: measured less floor, at most what is exposed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import floor_formulas as formulas
from floor_formulas import Floor, Job, checkpointed_layers, floors

from hf_speedkit.core.bench_records import BenchResult, bench_result
from hf_speedkit.core.records import to_dict

NO_FLOOR = Floor(formula="")
SOURCES = "GEMM and copy: measured on one H200 before this project; link: rated speed, one way, not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One traced step of one device.

    Args:
        step: the optimizer step, as the recorder wrote it; None where it did not.
        step_ns: its length. idle_ns: of it, with nothing running.
        groups: by group of kernels, ns in which one ran, and of them the exposed ones.
    """

    step: int | None
    step_ns: int
    idle_ns: int
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def measured(path: Path) -> Measured:
    """Read a trace that holds one step.

    Raises:
        SystemExit: it holds none, or several, or no work of a device.
    """
    import numpy as np

    from hf_speedkit.measure.trace_bytes import DEFAULT_LIMIT_BYTES
    from hf_speedkit.measure.trace_columns import read_columns
    from hf_speedkit.measure.trace_reader import TraceStream
    from hf_speedkit.measure.trace_steps import step_of_events, steps_that_did_something
    from hf_speedkit.measure.trace_work import find_steps, join_work

    stream = TraceStream(path, limit_bytes=DEFAULT_LIMIT_BYTES)
    columns = read_columns(stream)
    work, steps = join_work(columns), find_steps(columns)
    full = np.flatnonzero(steps_that_did_something(columns, work, steps))
    mine = step_of_events(work, steps) == full[0] if len(full) == 1 else np.zeros(0, dtype=bool)
    if not mine.any():
        raise SystemExit(f"{path.name} is not the trace of one step on a device")
    own = work.device == np.bincount(work.device[mine]).argmax()
    main_stream = work.events.place == np.bincount(work.events.place[own & mine]).argmax()
    main = work.busy(own & main_stream)
    queued = work.events.end[own & (work.call < 0)]
    begin = max(int(steps.start[full[0]]), int(queued.max(initial=0)))
    end = int(work.events.end[own & mine].max())
    groups = {}
    for number, group in enumerate(work.groups):
        here = own & mine & (work.group == number)
        beside = work.busy(here & ~main_stream)
        exposed = work.busy(here & main_stream).total + beside.total - beside.overlap_total(main)
        if here.any():
            groups[group] = work.busy(here).total, exposed
    idle = end - begin - work.busy(own).clipped(begin, end).total
    facts = stream.metadata.get("hf_speedkit") or {}
    return Measured(step=facts.get("step"), step_ns=end - begin, idle_ns=idle, groups=groups)


def compared(trace: Path, result: BenchResult, given: argparse.Namespace) -> dict[str, Any]:
    """Measured against floors: the JSON that is written.

    Raises:
        SystemExit: trace and result do not belong together, or do not say enough.
    """
    found = measured(trace)
    step = next((one for one in result.steps if one.step == found.step), None)
    if step is None or step.flops is None:
        raise SystemExit(f"{given.result.name} has no FLOPs of step {found.step}, which {trace.name} is of")
    config = _config(result, given)
    job = Job(
        config=config,
        step=step,
        checkpointed=checkpointed_layers(config, step) if given.checkpointed is None else given.checkpointed,
        ranks=result.world_size,
        parameters=result.parameters,
        trained=given.trained or result.parameters,
    )
    least, link = floors(job), given.link_gb_s * 1e9
    if "FSDP copy" not in found.groups:  # trainer/sharded/zero_copy.py: what is not done has no floor
        least.pop("FSDP copy", None)
    rows = [_row(group, found, least.get(group, NO_FLOOR), link) for group in sorted({*found.groups, *least})]
    rows.append(_line("idle", found.idle_ns, found.idle_ns, NO_FLOOR, 0.0, found.step_ns))
    return {
        "what": "device time of one traced step by group of kernels, against its floor (benchmarks/floors.py)",
        "measured_at": result.measured_at,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": to_dict(result.environment),
        "files": {"trace": trace.name, "result": given.result.name},
        **{key: getattr(result, key) for key in ("workload", "name", "world_size", "parameters")},
        "trained_parameters": job.trained,
        "layers": config["num_hidden_layers"],
        "checkpointed_layers": job.checkpointed,
        "layers_with_products": given.with_products,
        **{key: value for key, value in to_dict(step).items() if value is not None},
        "ceilings": {
            "gemm_flops_per_s": formulas.GEMM_FLOPS_PER_S,
            "memory_bytes_per_s": formulas.MEMORY_BYTES_PER_S,
            "link_bytes_per_s": link,
            "sources": SOURCES,
        },
        "step_ms": found.step_ns / 1e6,
        "rows": sorted((row for row in rows if row["device_ms"] or row["floor_ms"]), key=lambda row: -row["left_ms"]),
    }


def _row(group: str, found: Measured, floor: Floor, link: float) -> dict[str, Any]:
    return _line(group, *found.groups.get(group, (0, 0)), floor, floor.seconds(link), found.step_ns)


def _line(group: str, device_ns: int, exposed_ns: int, floor: Floor, floor_s: float, step_ns: int) -> dict[str, Any]:
    device, exposed, least = device_ns / 1e6, exposed_ns / 1e6, floor_s * 1e3
    left = max(0.0, min(device - least, exposed))
    return {
        "group": group,
        "device_ms": device,
        "exposed_ms": exposed,
        "floor_ms": least,
        "times_the_floor": device / least if least else None,
        "left_ms": left,
        "left_percent": left / step_ns * 1e8,
        **{key: value for key, value in asdict(floor).items() if value},
    }


def _config(result: BenchResult, given: argparse.Namespace) -> dict[str, Any]:
    from geometry import GEOMETRIES

    names = "|".join(sorted(GEOMETRIES, key=len, reverse=True))
    named = re.match(rf"({names})-(\d+)", result.workload)
    workload = result.settings.get("workload")
    known: Mapping[str, Any] = workload if isinstance(workload, Mapping) else {}
    geometry = given.geometry or known.get("geometry") or (named and named[1])
    layers = given.layers or known.get("layers") or (named and named[2])
    if not geometry or not layers:
        raise SystemExit(f"workload {result.workload!r} names no model: give --geometry and --layers")
    if known.get("lora_rank") and not given.trained:
        raise SystemExit("adapters are trained: say how many parameters that are, with --trained")
    return dict(GEOMETRIES[geometry](int(layers)).to_dict())


def markdown(found: Mapping[str, Any]) -> str:
    """The table, and its formulas below."""
    heads = ("group", "device ms", "exposed ms", "floor ms", "from", "times the floor", "left ms", "left, % of step")
    lines = [" | ".join(heads), "--- | --: | --: | --: | --- | --: | --: | --:"]
    lines += [" | ".join(_cells(row)) for row in found["rows"]]
    ceilings, floor_ms = found["ceilings"], sum(r["floor_ms"] for r in found["rows"] if r["group"] != "communication")
    gemm, memory = ceilings["gemm_flops_per_s"] / 1e12, ceilings["memory_bytes_per_s"] / 1e12
    foot = (
        f"`{found['workload']}`, {found['name']}, step {found['step']}: {found['step_ms']:,.1f} ms on the device of "
        f"one of {found['world_size']} ranks, {found['checkpointed_layers']} of {found['layers']} layers checkpointed, "
        f"{_with_products(found)}{found['tokens']['real']:,} real tokens. "
        f"All floors but communication's together: {floor_ms:,.1f} ms. "
        f"Ceilings: {gemm:,.0f} TFLOP/s, {memory:.1f} TB/s, "
        f"link {ceilings['link_bytes_per_s'] / 1e9:,.0f} GB/s one way ({ceilings['sources']})."
    )
    whys = [f"- {row['group']}: {row['formula']}" for row in found["rows"] if "formula" in row]
    return "\n".join([*(f"| {line} |" for line in lines), "", foot, "", *whys]) + "\n"


def _with_products(found: Mapping[str, Any]) -> str:
    kept = found.get("layers_with_products")
    return f"the products of {kept} kept, " if kept else ""


def _cells(row: Mapping[str, Any]) -> list[str]:
    inputs = (("flops", 1e12, "TFLOP"), ("memory_bytes", 1e9, "GB"), ("sent_bytes", 1e9, "GB sent"))
    work = ", ".join(f"{row[key] / unit:,.1f} {name}" for key, unit, name in inputs if key in row)
    times = f"{row['times_the_floor']:.2f}" if row["times_the_floor"] else ""
    numbers = [f"{row[key]:,.1f}" for key in ("device_ms", "exposed_ms", "floor_ms")]
    return [row["group"], *numbers, work, times, f"{row['left_ms']:,.1f}", f"{row['left_percent']:.1f}"]


def main(argv: list[str] | None = None) -> int:
    """Compare, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("result", type=Path, help="BenchResult of the run that was traced")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--geometry", help="of geometry.py, where neither settings nor the workload's name say it")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--checkpointed", type=int, help="layers, instead of what the recomputed FLOPs say")
    parser.add_argument("--with-products", type=int, default=0, help="of how many of them products are kept")
    parser.add_argument("--trained", type=int, help="trained parameters, where not all are")
    parser.add_argument("--link-gb-s", type=float, default=formulas.LINK_BYTES_PER_S / 1e9, help="of one GPU, one way")
    given = parser.parse_args(argv)
    result = bench_result(json.loads(given.result.read_text(encoding="utf-8")), name=given.result.name)
    found = compared(given.trace, result, given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(markdown(found), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
