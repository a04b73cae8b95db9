"""How many checkpointed layers keep their activations in host memory instead: tried, timed, kept if it is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.memory import GIB, NO_OFFLOADING, Offloading, layers_to_offload
from hf_speedkit.measure.host_memory import available_host_bytes
from hf_speedkit.trainer.hardware import launched_here
from hf_speedkit.trainer.memory.layer_marks import mark_layers
from hf_speedkit.trainer.memory.offload import CHUNK_BYTES, ActivationOffload, HostArena
from hf_speedkit.trainer.memory.recompute import RecomputeChoice
from hf_speedkit.trainer.ranks.reduction import gather_over_ranks

logger = logging.getLogger(__name__)

NONE = "none"
# `recompute` chooses in step 2 and looks at its choice in step 4. Copies are tried beside step 5; 5 and 6 are timed; 7
# runs with the first activations on the host; 8 and 9 are timed again.
_SETTLED, _CHOOSE, _JUDGE = 4, 6, 9
_TIMED = {5: "before", 6: "before", 8: "after", 9: "after"}
# A gain below this is within what two steps differ by.
_LEAST_GAIN = 0.005
# 8 GiB, a fifth of what a forward pass of a 27B has time for. A copy alone is no measure: beside products it is slower.
_PROBE_BYTES, _PROBES = 2**28, 32
# Of a 27B over PCIe 5 to an H200: 36 ms a copy, 13 ms a forward pass (benchmarks/NOTES.md, a first look). For a number
# of layers that is not timed.
_USUAL_COPY_LAYERS = 3.0


class OffloadChoice(TrainerCallback):  # type: ignore[misc]
    """Moves activations of some checkpointed layers to host memory and back, where that is faster than computing twice.

    "auto" acts where layers are still checkpointed after `recompute` has filled the device: it times a forward pass and
    copies beside it, takes as many layers as there is time for, and goes back if the step did not get faster. Pinning
    the memory takes about 0.7 s a GiB, once (benchmarks/NOTES.md).

    Args:
        layers: "auto" (where `recompute` measures), "none", or how many, which are neither timed nor taken back.
        recompute: the choice of the layers that keep their activations on the device.
        host_bytes: gives the memory of the host that this rank may pin.
        timer: gives a device's timer, or None where it has none; "auto" does nothing there.
    """

    def __init__(
        self,
        layers: int | str,
        recompute: RecomputeChoice,
        *,
        host_bytes: Callable[[], int] | None = None,
        timer: Callable[[torch.device], DeviceTimer | None] | None = None,
    ) -> None:
        self.layers = int(layers) if str(layers).isdecimal() else layers
        self._recompute = recompute
        self._host_bytes = host_bytes or (host_share_bytes if isinstance(self.layers, int) else pinnable_bytes)
        self._timer_of = timer or device_timer
        self._timer: DeviceTimer | None = None
        self._arena = HostArena(pinned=False)
        self._offload: ActivationOffload | None = None
        self._reset(active=False)

    def _reset(self, *, active: bool) -> None:
        self._active = active
        self._step = 0
        self._marks: list[Any] = []
        self._forward: dict[str, Any] = {}
        self._steps: dict[str, list[tuple[Any, Any]]] = {"before": [], "after": []}
        self._begun: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """With a number and nothing to wait for, begin."""
        # TRL's moves what every layer saves: two on one layer would copy everything twice.
        # Under DataParallel a replica's forward would be that of the layer on the first GPU.
        others = getattr(args, "activation_offloading", False) or args.n_gpu > 1
        wanted = self.layers not in (NONE, 0) and not others
        self._timer = self._timer_of(args.device)
        self._reset(active=wanted and self._recompute.measures and self._timer is not None)
        if not wanted or not isinstance(self.layers, int):
            return
        most = self._recompute.checkpointed
        if self.layers > most:
            raise ConfigurationError(
                f"activation_offloading_layers={self.layers}, and {most} layers are checkpointed",
                mend="activation_checkpointing=True, and activation_offloading_layers no more than those layers",
            )
        if not self._active:
            pinned = args.device.type == "cuda"
            arena = HostArena(pinned=pinned, grows=True, room=self._host_bytes if pinned else None)
            self._begin(Offloading(self.layers, _USUAL_COPY_LAYERS), arena, args.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when a timed step begins on the device."""
        if self._active and self._timer is not None and self._step + 1 in _TIMED:
            self._begun = self._timer.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Time, choose, judge. At the choice and at the judgement the host waits for the device, once in a run each."""
        self._step += 1
        timer = self._timer
        if not self._active or timer is None:
            return
        if self._begun is not None:
            self._steps[_TIMED[self._step]].append((self._begun, timer.now()))
            self._begun = None
        if self._step == _SETTLED:
            self._active = self._recompute.checkpointed > 0
            if self._active:
                self._time_forward(timer, args.device)
        elif self._step == _CHOOSE:
            self._choose(timer, args.device)
        elif self._step == _JUDGE:
            self._judge(timer, args.device)

    def undo(self) -> None:
        """Leave layers and host memory as they were, also after a failure; `recompute` undoes its own part."""
        self._unmark()
        offload, self._offload = self._offload, None
        try:
            if offload is not None:
                offload.close()
        finally:
            self._arena.release()  # reserved for a try that training did not come to

    def _time_forward(self, timer: DeviceTimer, device: torch.device) -> None:
        """Note when a forward pass begins and when its backward pass does, and copy beside the first one."""
        modules = self._recompute.modules
        self._arena = HostArena(pinned=device.type == "cuda")
        self._reserve(CHUNK_BYTES)

        def begins(number: int) -> None:
            if number == 0:
                self._forward["begin"] = timer.now()
                if "copies" not in self._forward and self._arena.total_bytes:
                    self._forward["copies"] = timer.copies(self._arena.first(_PROBE_BYTES), device)

        def ends(number: int) -> None:
            if number == len(modules) - 1:
                self._forward["end"] = timer.now()

        self._marks = mark_layers(modules, forward=begins, backward=ends)

    def _reserve(self, size: int) -> bool:
        """Pin so much of the host's memory, if it is there."""
        if size > self._host_bytes() + self._arena.total_bytes:
            return False
        try:
            self._arena.reserve(size)
        except RuntimeError as error:  # what CUDA raises where the host refuses
            logger.warning("no activations go to host memory: %s", str(error).partition("\n")[0])
            return False
        return True

    def _unmark(self) -> None:
        for handle in self._marks:
            handle.remove()
        self._marks = []

    def _choose(self, timer: DeviceTimer, device: torch.device) -> None:
        self._unmark()
        wanted = self._wanted(timer)
        # All ranks alike: one that computes a layer twice keeps the others waiting.
        rows = gather_over_ranks([wanted.layers, wanted.copy_layers], device)
        agreed = Offloading(int(min(row[0] for row in rows)), max(row[1] for row in rows))
        self._active = agreed.layers > 0
        if isinstance(self.layers, int) and agreed.layers < min(self.layers, self._recompute.checkpointed):
            logger.warning(
                "activation_offloading_layers=%d: the hosts have memory for %d, whose activations go there",
                self.layers, agreed.layers,
            )  # fmt: skip
        if self._active:
            self._begin(agreed, self._arena, device)
        else:
            self._arena.release()

    def _wanted(self, timer: DeviceTimer) -> Offloading:
        """What this rank could take; its memory is reserved."""
        recompute = self._recompute
        if not {"begin", "copies", "end"} <= self._forward.keys():
            return NO_OFFLOADING
        forward_s = timer.seconds([(self._forward["begin"], self._forward["end"])])
        rate = _PROBES * _PROBE_BYTES / timer.seconds([self._forward["copies"]])
        layer_bytes = max(recompute.kept_bytes.values())
        wanted = layers_to_offload(
            recompute.checkpointed, of=recompute.total, layer_bytes=layer_bytes, forward_s=forward_s,
            bytes_per_s=rate, host_bytes=self._host_bytes(), spare_bytes=recompute.spare_bytes,
        )  # fmt: skip
        if isinstance(self.layers, int):
            room = (self._host_bytes() + self._arena.total_bytes) // layer_bytes
            wanted = Offloading(min(self.layers, recompute.checkpointed, room), wanted.copy_layers)
        logger.info(
            "copies beside the computation run at %.0f GB/s: a forward pass of %.2f s has time, and the host room, for "
            "the activations of %d layers, %.1f GiB", rate / 1e9, forward_s, wanted.layers,
            wanted.layers * layer_bytes / GIB,
        )  # fmt: skip
        return wanted if self._reserve(wanted.layers * layer_bytes) else NO_OFFLOADING

    def _begin(self, chosen: Offloading, arena: HostArena, device: torch.device) -> None:
        recompute = self._recompute
        bare = recompute.checkpointed - recompute.with_products  # they compute everything twice
        places = spread(chosen.layers, bare if chosen.layers <= bare else recompute.checkpointed)
        recompute.offload(places)
        self._offload = ActivationOffload(recompute.modules, places, arena, device, copy_layers=chosen.copy_layers)

    def _judge(self, timer: DeviceTimer, device: torch.device) -> None:
        self._active = False
        mine = [timer.seconds(self._steps[name]) for name in ("before", "after")]
        before, after = (max(times) for times in zip(*gather_over_ranks(mine, device), strict=True))
        kept = isinstance(self.layers, int) or after < before * (1 - _LEAST_GAIN)
        logger.info(
            "activations of %d layers in host memory: %.3f s a step instead of %.3f s, %s",
            len(self._recompute.offloaded), after, before, "kept" if kept else "so they are computed twice again",
        )  # fmt: skip
        if not kept and self._offload is not None:
            self._offload.close()
            self._offload = None
            self._recompute.offload(())


def spread(count: int, over: int) -> Sequence[int]:
    """`count` of the places 0 to `over` - 1, evenly, so that copies have the time of the layers in between."""
    return [number * over // count for number in range(count)]


def host_share_bytes() -> int:
    """Memory of this host that is free, divided by the ranks on it."""
    return available_host_bytes() // launched_here()


def pinnable_bytes() -> int:
    """Memory of this host that this rank may pin by itself: half its share, so that the other half is anybody's."""
    return host_share_bytes() // 2


class DeviceTimer:
    """Times work on a CUDA device: nothing is waited for before `seconds`."""

    def now(self) -> Any:
        """A mark in the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> float:
        """The shortest of some spans between marks; the host waits for their ends."""
        for _, end in spans:
            end.synchronize()
        return min((begin.elapsed_time(end) / 1000 for begin, end in spans), default=0.0)

    def copies(self, host: torch.Tensor, device: torch.device) -> tuple[Any, Any]:
        """Copy the device's bytes into pinned memory beside what the training stream does: two marks around it."""
        source = torch.empty(len(host), dtype=torch.uint8, device=device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            begin = self.now()
            for _ in range(_PROBES):
                host.copy_(source, non_blocking=True)
            source.record_stream(stream)
            return begin, self.now()


def device_timer(device: torch.device) -> DeviceTimer | None:
    """A timer of the device; None where it is no CUDA device."""
    return DeviceTimer() if device.type == "cuda" else None
