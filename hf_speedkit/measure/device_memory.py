"""What torch's allocator holds of a GPU: host counters, read without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Counters of one CUDA device, all in bytes."""

    device: torch.device

    def allocated(self) -> int:
        """What tensors take now."""
        return torch.cuda.memory_allocated(self.device)

    def reset_peak(self) -> None:
        """Count the peak anew."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_allocated(self) -> int:
        """The most that tensors took."""
        return torch.cuda.max_memory_allocated(self.device)

    def peak_reserved(self) -> int:
        """The most that the allocator held, pieces that no tensor used included."""
        return torch.cuda.max_memory_reserved(self.device)

    def total(self) -> int:
        """Memory of the device."""
        return torch.cuda.mem_get_info(self.device)[1]

    def others(self) -> int:
        """What is taken outside the allocator: context, communication buffers, other processes."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def searches(self) -> int:
        """How often the allocator found no piece large enough and had to give its cache back to find one."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def give_back_cache(self) -> None:
        """Free what is reserved and unused; the pieces that come after have the sizes of what is asked for then."""
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The device's counters; None where it is no CUDA device."""
    return DeviceMemory(device) if device.type == "cuda" else None
