"""Build small Chrome traces, event by event. Times in microseconds, as in the files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

SHARED_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
DATA = Path(__file__).parent / "data"

MAIN, AUTOGRAD = (10, 10), (10, 11)


class TraceFile:
    """Events of one trace, in the order they are added."""

    def __init__(self, **top_level: Any) -> None:
        self.events: list[Any] = []
        self.top_level = top_level
        self._correlation = 0

    def add(self, cat: str, name: Any, ts: Any, dur: Any, where=MAIN, **args: Any) -> TraceFile:
        pid, tid = where
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )
        return self

    def step(self, number: int, ts: float, dur: float) -> TraceFile:
        return self.add("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def op(self, name: str, ts: float, dur: float, where=MAIN, **args: Any) -> TraceFile:
        return self.add("cpu_op", name, ts, dur, where, **args)

    def call(self, name: str, ts: float, dur: float, where=MAIN, **args: Any) -> TraceFile:
        return self.add("cuda_runtime", name, ts, dur, where, **args)

    def launch(
        self,
        at: float,
        kernel: str,
        ts: float,
        dur: float,
        *,
        where=MAIN,
        device: int = 0,
        stream: int = 7,
        cat: str = "kernel",
        call: str = "cudaLaunchKernel",
        call_dur: float = 2,
    ) -> TraceFile:
        """A launch call and the device event it starts."""
        self._correlation += 1
        self.call(call, at, call_dur, where, correlation=self._correlation)
        return self.device(kernel, ts, dur, device=device, stream=stream, cat=cat, correlation=self._correlation)

    def device(
        self, name: str, ts: float, dur: float, *, device: int = 0, stream: int = 7, cat: str = "kernel", **args: Any
    ) -> TraceFile:
        return self.add(cat, name, ts, dur, (device, stream), device=device, stream=stream, **args)

    def document(self) -> dict[str, Any]:
        return {**self.top_level, "traceEvents": self.events}

    def text(self, **how: Any) -> str:
        return json.dumps(self.document(), **how)

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path


def small_trace() -> TraceFile:
    """One step, 1,000 us: three operators, two kernels on one device, a sync."""
    return (
        TraceFile(schemaVersion=1, deviceProperties=[{"id": 0, "name": "NVIDIA Test"}], distributedInfo={"rank": 3})
        .step(1, 0, 1000)
        .op("aten::linear", 100, 100)
        .op("aten::addmm", 120, 60)
        .launch(130, "ampere_sgemm_32x32", 140, 300)
        .op("aten::item", 300, 200)
        .launch(305, "Memcpy DtoH (Device -> Pinned)", 440, 10, cat="gpu_memcpy", call="cudaMemcpyAsync")
        .call("cudaStreamSynchronize", 310, 145)
    )


def steady_trace(*, kernels: int, kernel_us: float, every_us: float, latency_us: float = 5.0) -> TraceFile:
    """One step of equal kernels launched at equal distances; the device queues what it cannot run at once."""
    trace = TraceFile()
    trace.step(1, 0, kernels * every_us)
    free = 0.0
    for i in range(kernels):
        at = i * every_us
        start = max(at + latency_us, free)
        trace.op("aten::add", at, every_us * 0.8)
        trace.launch(at + 0.1, "void at::native::vectorized_elementwise_kernel<4>", start, kernel_us, call_dur=1)
        free = start + kernel_us
    return trace


class FakeProfiler:
    """What torch's profiler does, without a device."""

    def __init__(self, trace=None, *, fails=None):
        self.trace = trace
        self.fails = fails
        self.done = []

    def _step(self, name):
        self.done.append(name)
        if name == self.fails:
            raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED\nmore")

    def prepare_trace(self):
        self._step("prepare")

    def start_trace(self):
        self._step("start")

    def stop_trace(self):
        self._step("stop")

    def export_chrome_trace(self, path):
        with Path(path).open("w") as file:
            file.write(self.trace.text())
