"""Activations of some layers in host memory between their forward and their backward pass.

A layer that is checkpointed computes its forward pass twice; one whose activations wait in host memory does not, and
copies over PCIe run beside the computation. Each storage that autograd saves in such a layer is copied out while the
next layers run, let go of on the device, and copied back a few layers before it is needed. Bytes are what they were, so
the values computed are the same. Weights stay: FSDP frees and gathers them itself.

Source: torch.autograd.graph.saved_tensors_hooks. TRL's `activation_offloading` moves what every layer saves, tensor by
tensor, and begins to fetch it when it is asked for (trl 1.16 models/activation_offloading.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_speedkit.core.errors import HardwareError
from hf_speedkit.core.memory import GIB, Offloading, copied_before
from hf_speedkit.trainer.memory.layer_marks import lay_over, mark_layers

SMALLEST_BYTES = 2**20
"""Storages below this stay on the device: a copy of them costs its launch."""
CHUNK_BYTES = 2**30
"""Pinned memory comes in pieces of this size: torch rounds what it pins to a power of two."""


class HostArena:
    """Host memory that activations are copied to, pinned where the device is a GPU.

    Args:
        pinned: only copies to and from pinned memory run beside the host.
        grows: take more from the host when what is reserved is used up, instead of giving nothing.
        room: gives the bytes that the host has for one piece more; None asks nobody. Pinned memory cannot be swapped
            out: what takes more than there is ends in a process that the kernel kills.
        chunk_bytes: size of one piece; no larger storage can be held.
    """

    def __init__(
        self,
        *,
        pinned: bool,
        grows: bool = False,
        room: Callable[[], int] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._pinned, self._grows, self._room, self._chunk_bytes = pinned, grows, room, chunk_bytes
        self._chunks: list[torch.Tensor] = []
        self._used: list[int] = []

    @property
    def total_bytes(self) -> int:
        """Bytes held."""
        return len(self._chunks) * self._chunk_bytes

    def reserve(self, size: int) -> None:
        """Hold at least `size` bytes. Raises RuntimeError where the host has not got them."""
        while self.total_bytes < size:
            left = None if self._room is None else self._room()
            if left is not None and left < self._chunk_bytes:
                raise RuntimeError(f"{left / GIB:.1f} GiB of the host are left for this rank")
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned))
            self._used.append(0)

    def take(self, size: int) -> torch.Tensor | None:
        """`size` bytes that nothing else gets; None where no piece has them left."""
        if size > self._chunk_bytes:
            return None
        for number, used in enumerate(self._used):
            if used + size <= self._chunk_bytes:
                self._used[number] = -(-(used + size) // 512) * 512
                return self._chunks[number][used : used + size]
        if not self._grows:
            return None
        self.reserve(self.total_bytes + self._chunk_bytes)
        return self.take(size)

    def first(self, size: int) -> torch.Tensor:
        """The first bytes, for a try before anything is taken."""
        return self._chunks[0][:size]

    def release(self) -> None:
        """Give everything back to the host; torch would keep what it pinned."""
        self._chunks, self._used = [], []
        give_back = getattr(torch._C, "_host_emptyCache", None)  # since torch 2.5
        if give_back is not None and self._pinned:
            give_back()


@dataclass(slots=True, weakref_slot=True)
class _Held:
    """One storage that a layer saved. The saved tensors on it own it, so it is gone when autograd lets go of them.

    Args:
        source: its bytes while they are on the device, None in between.
        host: its bytes in host memory.
        back: when the copy back is done, until it was waited for.
    """

    source: torch.Tensor | None
    host: torch.Tensor
    back: Any = None

    def __del__(self) -> None:
        self.wait()  # also where nobody asked for it: its memory is written to until then

    def wait(self) -> None:
        """Let the device wait for the copy back."""
        if self.back is not None and self.source is not None:
            torch.cuda.current_stream(self.source.device).wait_event(self.back)
            self.back = None


@dataclass(slots=True)
class _Pass:
    """What one forward pass of one layer saved, by the address of its storage."""

    held: dict[int, weakref.ref[_Held]] = field(default_factory=dict)
    weights: set[int] | None = None
    out: Any = None
    buffers_used: int = 0

    def alive(self) -> Iterator[_Held]:
        """What autograd still needs."""
        for reference in self.held.values():
            held = reference()
            if held is not None:
                yield held


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor as what it is of its storage."""

    held: _Held
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Keeps what the given layers save in host memory until their backward passes.

    Args:
        layers: all decoder layers, first layer first.
        chosen: numbers of those whose activations leave the device.
        arena: where they go, large enough.
        device: where the layers compute.
        copy_layers: how many layers' forward passes take as long as one layer's copy. Nothing is let go of before its
            copy should be done, so that the device does not wait for it; copies back begin as many layers ahead.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        chosen: Sequence[int],
        arena: HostArena,
        device: torch.device,
        *,
        copy_layers: float,
    ) -> None:
        self.arena = arena
        self._device = device
        self._ahead = Offloading(len(chosen), copy_layers).layers_ahead
        self._copied: dict[int, list[int]] = {}
        for number, before in zip(chosen, copied_before(chosen, copy_layers), strict=True):
            self._copied.setdefault(before, []).append(number)
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffers: dict[int, list[torch.Tensor | None]] = {number: [] for number in chosen}
        self._passes: dict[int, _Pass] = {}
        self._undo: list[Callable[[], None]] = []
        self._handles = mark_layers(layers, forward=self._let_go, backward=self._fetch)
        for number in chosen:
            self._hook(layers[number], number)

    @property
    def device_bytes(self) -> int:
        """Bytes of saved storages that are on the device now."""
        alive = [held for one in self._passes.values() for held in one.alive()]
        return sum(len(held.source) for held in alive if held.source is not None)

    def close(self) -> None:
        """Leave the layers as they were. Belongs between two steps."""
        for handle in self._handles:
            handle.remove()
        for undo in self._undo:
            undo()
        self._passes.clear()
        self._buffers.clear()
        try:
            if self._stream is not None:
                self._stream.synchronize()  # nothing is on its way into memory that is given back
        finally:
            self.arena.release()

    def _hook(self, layer: torch.nn.Module, number: int) -> None:
        def forward(former: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            last = self._passes.get(number)
            waits = last is not None and any(True for _ in last.alive())
            # An evaluation keeps nothing. While a pass waits for its backward pass, its activations are in the buffers:
            # this one keeps its own on the device, instead of writing over them.
            if not torch.is_grad_enabled() or waits:
                return former(*args, **kwargs)
            one = self._passes[number] = _Pass()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda saved: self._pack(saved, one, layer, number), self._unpack
            ):
                output = former(*args, **kwargs)
            if self._stream is not None:
                one.out = self._stream.record_event()
            return output

        self._undo.append(lay_over(layer, forward))

    def _pack(self, saved: torch.Tensor, one: _Pass, layer: torch.nn.Module, number: int) -> torch.Tensor | _View:
        if type(saved) is not torch.Tensor or saved.device.type != self._device.type or saved.layout != torch.strided:
            return saved
        if one.weights is None:  # now, since FSDP gathers them after the layer has been entered
            one.weights = {_address(own) for own in (*layer.parameters(), *layer.buffers())}
        address = _address(saved)
        known = one.held.get(address)
        held = None if known is None else known()
        if held is None or held.source is None:
            if saved.untyped_storage().nbytes() < SMALLEST_BYTES or address in one.weights:
                return saved
            held = self._copy_out(saved, one, number)
            if held is None:
                return saved
            one.held[address] = weakref.ref(held)
        return _View(held, saved.dtype, saved.size(), tuple(map(int, saved.stride())), int(saved.storage_offset()))

    def _copy_out(self, saved: torch.Tensor, one: _Pass, number: int) -> _Held | None:
        whole = _whole(saved.untyped_storage())
        buffers, place = self._buffers[number], one.buffers_used
        if place == len(buffers):
            try:
                buffers.append(self.arena.take(len(whole)))
            except RuntimeError as error:
                raise self._too_many(number, error) from error
        one.buffers_used += 1
        buffer = buffers[place]
        if buffer is None or len(buffer) < len(whole):  # no room, or rows that grew: it stays on the device
            return None
        host = buffer[: len(whole)]
        if self._stream is None:
            host.copy_(whole)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                host.copy_(whole, non_blocking=True)
        return _Held(whole, host)

    def _too_many(self, number: int, error: RuntimeError) -> HardwareError:
        chosen = list(self._buffers)
        fits = chosen.index(number)  # those before it are held whole
        return HardwareError(
            f"activation_offloading_layers={len(chosen)}, and this host has memory for the activations of {fits}",
            evidence=(
                f"this rank holds {self.arena.total_bytes / GIB:.1f} GiB of it, pinned",
                str(error).partition("\n")[0],
            ),
            mend=f"activation_offloading_layers={fits or 'none'}, or auto, which looks at the host first",
        )

    def _let_go(self, layer: int) -> None:
        """Before the forward pass of a layer: let go of what should have been copied by now."""
        for number in self._copied.get(layer, ()):
            one = self._passes.get(number)
            if one is None:
                continue
            if one.out is not None:
                # On the device, not the host: nothing may be written there before it was read.
                torch.cuda.current_stream(self._device).wait_event(one.out)
            for held in one.alive():
                held.wait()  # fetched for a backward pass that did not come to it
                held.source = None

    def _fetch(self, layer: int) -> None:
        """Before the backward pass of a layer: begin to copy back what a layer some way below needs."""
        for number in range(layer, layer - self._ahead - 1, -1):
            one = self._passes.get(number)
            for held in () if one is None else one.alive():
                if held.source is None:
                    self._copy_back(held)

    def _copy_back(self, held: _Held) -> torch.Tensor:
        held.source = torch.empty(len(held.host), dtype=torch.uint8, device=self._device)
        if self._stream is None:
            held.source.copy_(held.host)
        else:
            # The memory was the training stream's: what it did there must be over.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                held.source.copy_(held.host, non_blocking=True)
                held.back = self._stream.record_event()
        return held.source

    def _unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        held = saved.held
        whole = held.source
        if whole is None:  # nobody fetched it: the layer's output has no gradient hook in this graph
            whole = self._copy_back(held)
        held.wait()
        return torch.empty(0, dtype=saved.dtype, device=self._device).set_(
            whole.untyped_storage(), saved.offset, saved.size, saved.stride
        )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
