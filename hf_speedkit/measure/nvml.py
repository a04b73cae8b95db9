"""NVML behind one small door: start it, find the GPUs this process may use, stop it.

Everything that reads NVML takes the module as an argument, so that tests can hand in a fake one. `pynvml` (from
nvidia-ml-py) is imported on first use only: it is absent on machines without the package, and raises on machines
without the driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class NvmlUnavailableError(Exception):
    """NVML cannot be used; the text says why."""


@contextmanager
def nvml_session(module: Any = None) -> Iterator[Any]:
    """Start NVML, give the module, stop it. NVML counts its users, so sessions may overlap.

    Raises:
        NvmlUnavailableError: no package, no driver, no permission; anything NVML raises inside the session is turned
            into this error as well, so that callers have one thing to catch.
    """
    nvml = module if module is not None else _import()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML does not start: {error}") from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML: {error}") from error
    finally:
        nvml.nvmlShutdown()


def visible_handles(nvml: Any, environment: Mapping[str, str] | None = None) -> tuple[Any, ...]:
    """Handles of the GPUs that CUDA would show to this process, in CUDA_VISIBLE_DEVICES order.

    Without that variable, all of them, in NVML's order (by PCI bus). CUDA's own default order is fastest first, which
    is the same on a machine with one kind of GPU; set CUDA_DEVICE_ORDER=PCI_BUS_ID on others. As in CUDA, the list ends
    at the first entry that names no device.
    """
    listed = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    count = nvml.nvmlDeviceGetCount()
    if listed is None:
        return tuple(nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count))
    handles: list[Any] = []
    for entry in filter(None, (part.strip() for part in listed.split(","))):
        handle = _handle(nvml, entry, count)
        if handle is None:
            break
        handles.append(handle)
    return tuple(handles)


def text(value: str | bytes) -> str:
    """NVML's strings: old bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def optional(nvml: Any, read: Callable[[], Any]) -> Any:
    """What `read` returns; None where this device or driver does not support it."""
    try:
        return read()
    except nvml.NVMLError:
        return None


def _handle(nvml: Any, entry: str, count: int) -> Any:
    if entry.lstrip("-").isdigit():
        index = int(entry)
        return nvml.nvmlDeviceGetHandleByIndex(index) if 0 <= index < count else None
    exact = optional(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(entry))
    if exact is not None or entry.startswith("MIG-"):
        return exact
    # CUDA accepts a shortened UUID if only one device starts with it.
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    matching = [handle for handle in handles if text(nvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _import() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailableError("the package nvidia-ml-py is not installed") from error
    return pynvml
