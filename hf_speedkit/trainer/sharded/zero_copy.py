"""FSDP2's collectives without its copies: weights gathered into the parameters, gradients reduced from where they are.

torch (2.11 to 2.14, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py) copies a group's shards into one flat
buffer, gathers that, and copies the result to the parameters, which training waits for; gradients are copied into one
flat buffer before they are reduced. In a step of a 27B on two H200 these copies take 156 ms, of which training waits
for 99 of 2,913 (benchmarks/results/2026-11-30_2xh200_27b_floors.json), and what was gathered is held twice for a time.

A parameter sharded along its first dimension is its shards one behind the other, so none of it is needed: the backends
run several gathers, or reductions, as one (`ProcessGroup.allgather_into_tensor_coalesced` and
`reduce_scatter_tensor_coalesced`). Numbers are the same: the same shards, summed in the same precision.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hf_speedkit.trainer.sharded.gradient_memory import ReduceScatterInOneMemory

logger = logging.getLogger(__name__)

# Results begin at multiples of this many bytes, as torch's allocator would place each: NCCL and our optimizer move 16
# bytes at once only where an address allows it, and a shard of 6 numbers in front of a matrix would spoil that.
_ALIGNMENT_BYTES = 128
_NOTHING_TO_COPY: list[int] = []  # of a gather's result: known again by its identity
_REDUCE = ("fsdp_params", "unsharded_grads", "reduce_scatter_group", "reduce_scatter_stream", "reduce_scatter_comm",
           "orig_dtype", "reduce_dtype", "device", "gradient_divide_factor", "all_reduce_group", "all_reduce_stream",
           "all_reduce_grads", "partial_reduce_output", "all_reduce_hook", "force_sum_reduction_for_comms")  # fmt: skip
_RESULT = ("all_gather_output", "all_gather_event", "all_gather_work", "param_all_gather_input_dtypes",
           "param_all_gather_input_numels", "all_gather_input_split_sizes")  # fmt: skip
_TAKEN = {
    "all_gather": ("fsdp_params", "group", "async_op", "all_gather_copy_in_stream", "all_gather_stream", "device",
                   "all_gather_comm"),
    "all_gather_copy_out": ("all_gather_result", "fsdp_params", "group"),
    "reduce": _REDUCE,
}  # fmt: skip


class ZeroCopyAllGather:
    """For `FSDPModule.set_custom_all_gather`: inside `zero_copy`, groups that have it are gathered without copies.

    Called by torch itself, for groups that need the copies, it does what torch's own does.

    Args:
        let_go_of_unused: called behind each backward pass. torch forgets then what was gathered for a layer whose
            backward pass did not come, but not the memory that was gathered into: with its own copies there is none.
    """

    def __init__(self, let_go_of_unused: Callable[[], None]) -> None:
        self._let_go_of_unused = let_go_of_unused
        self._backward_pass = -1

    def begin(self) -> None:
        """A gather begins. The first one of a backward pass queues what follows that, behind torch's own end of it."""
        running = torch._C._current_graph_task_id()
        if running not in (-1, self._backward_pass):
            self._backward_pass = running
            torch.autograd.Variable._execution_engine.queue_callback(self._let_go_of_unused)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The flat buffer of a group that needs it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Gather a flat buffer."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ZeroCopyReduceScatter:
    """For `FSDPModule.set_custom_reduce_scatter`: inside `zero_copy`, gradients of these groups are reduced in place.

    Args:
        memory: where results are allocated, and the reduction of groups that need torch's copies.
    """

    def __init__(self, memory: ReduceScatterInOneMemory) -> None:
        self.allocate = memory.allocate
        self._reduce = memory

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce and scatter a flat buffer."""
        return self._reduce(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def obstacle() -> str | None:
    """Why this torch cannot do without its copies; None where it can.

    The functions that are wrapped are private to torch: another set of parameters or results is not guessed at.
    """
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torchs

        functions = {name: getattr(torchs, f"foreach_{name}") for name in _TAKEN}
        fields = vars(torchs)["AllGatherResult"]._fields
    except (ImportError, AttributeError, KeyError) as error:
        return f"torch {torch.__version__} gathers in another way ({error})"
    for name, function in functions.items():
        if tuple(inspect.signature(function).parameters) != _TAKEN[name]:
            return f"foreach_{name} of torch {torch.__version__} takes other arguments"
    if fields != _RESULT:
        return f"a gather's result of torch {torch.__version__} has other parts"
    if _results_of_reduce(functions["reduce"]) is None:
        return f"foreach_reduce of torch {torch.__version__} gives other results"
    return None


@contextmanager
def zero_copy() -> Iterator[None]:
    """Let groups with a `ZeroCopyAllGather` or `ZeroCopyReduceScatter` do without copies, for the time of the context.

    All other groups of the process, and those of such a group's calls that need a copy, run torch's own code: gathers
    along dimensions behind the first, of CPU offload and of quantized shards; reductions of these, those under hybrid
    sharding, and those in another precision (`gathers_directly`, `reduces_directly`). Only call it where `obstacle`
    finds none. The choice depends on what is the same on all ranks.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torchs

    wrappers = {"foreach_all_gather": _gather, "foreach_all_gather_copy_out": _arrive, "foreach_reduce": _reduce}
    own: dict[str, tuple[Any, Any]] = {}
    for name, wrapper in wrappers.items():
        original = getattr(torchs, name)
        own[name] = original, functools.partial(wrapper, original)
        setattr(torchs, name, own[name][1])
    try:
        yield
    finally:
        for name, (original, wrapped) in own.items():
            if getattr(torchs, name) is wrapped:
                setattr(torchs, name, original)


def gathers_directly(group: Any) -> bool:
    """Whether this parameter group of FSDP2's is gathered without copies inside `zero_copy`.

    Args:
        group: torch's FSDPParamGroup, after its `lazy_init`.
    """
    return bool(group.fsdp_params) and _shards_of(group) > 1 and _can_gather(group.fsdp_params)


def reduces_directly(group: Any) -> bool:
    """Whether gradients of this group are reduced without copies inside `zero_copy`; see `gathers_directly`."""
    trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    if not trained or _shards_of(group) == 1:
        return False
    given = {
        "fsdp_params": trained, "reduce_scatter_group": group._reduce_scatter_process_group, "device": group.device,
        "reduce_dtype": group._reduce_dtype, "gradient_divide_factor": group.gradient_divide_factor,
        "all_reduce_group": group.mesh_info if group._is_hsdp else None, "all_reduce_hook": group._all_reduce_hook,
        "force_sum_reduction_for_comms": group.force_sum_reduction_for_comms,
    }  # fmt: skip
    return _how_reduced(given, {param.param_dtype or param.orig_dtype for param in trained}) is not None


def gather_shards(wholes: list[torch.Tensor], shards: list[torch.Tensor], group: Any) -> None:
    """Gather several tensors at once, on the current stream: `wholes[i]` is [ranks x shards[i].numel()], 1-D."""
    options = AllgatherOptions()
    options.asyncOp = False
    _finish(group.allgather_into_tensor_coalesced(wholes, shards, options))


def reduce_shards(shards: list[torch.Tensor], wholes: list[torch.Tensor], group: Any, op: Any) -> None:
    """Reduce several tensors at once, each rank keeping its piece of the first dimension, on the current stream."""
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = False
    _finish(group.reduce_scatter_tensor_coalesced(shards, wholes, options))


def _finish(work: Any) -> None:
    if work is not None:  # gloo's host waits here; NCCL has run on the current stream, which has nothing to wait for
        work.wait()


def _gather(original: Callable[..., Any], *args: Any) -> Any:
    params, group, async_op, _, stream, device, comm = args
    if not isinstance(comm, ZeroCopyAllGather) or async_op or not _can_gather(params):
        return original(*args)
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

    comm.begin()
    devices = torch.get_device_module(device)
    with torch.no_grad():
        wholes = []
        for param in params:
            dtype = param.param_dtype or param._sharded_param_data.dtype
            param.init_all_gather_outputs([param._sharded_param_data.numel()], [dtype], group.size(), device)
            param.alloc_all_gather_outputs()
            wholes.append(param.all_gather_outputs[0])
        # Their room is free for the training stream only, behind what it has been given so far.
        stream.wait_stream(devices.current_stream())
        with devices.stream(stream):
            shards = [p._sharded_param_data.to(whole.dtype) for p, whole in zip(params, wholes, strict=True)]
            # Autograd has saved these weights: what is gathered again are the same numbers, not a change of them.
            counted = tuple(whole for whole in wholes if not whole.is_inference())
            with _unsafe_preserve_version_counter(counted) if counted else nullcontext():
                gather_shards(wholes, shards, group)
            arrived = stream.record_event()
    return AllGatherResult(
        torch.empty(0, dtype=wholes[0].dtype, device=device), arrived, None, [], [], _NOTHING_TO_COPY
    )


def _arrive(original: Callable[..., Any], *args: Any) -> None:
    result = args[0]
    if result.all_gather_input_split_sizes is not _NOTHING_TO_COPY:
        original(*args)
        return
    if result.all_gather_event is not None:
        devices = torch.get_device_module(result.all_gather_output.device)
        devices.current_stream().wait_event(result.all_gather_event)


def _can_gather(params: Sequence[Any]) -> bool:
    dtypes = {param.param_dtype or param._sharded_param_data.dtype for param in params}
    return len(dtypes) == 1 and all(_plain_shard(param) and param.sharded_state.name == "SHARDED" for param in params)


def _shards_of(group: Any) -> int:
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def _plain_shard(param: Any) -> bool:
    return (
        param.fsdp_placement.dim == 0
        and not param.is_dtensor
        and not param.offload_to_cpu
        and not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
    )


def _reduce(original: Callable[..., Any], *args: Any) -> Any:
    given = dict(zip(_REDUCE, args, strict=False))
    params, grads, device = given["fsdp_params"], given["unsharded_grads"], given["device"]
    group, stream, comm = (given[f"reduce_scatter_{part}"] for part in ("group", "stream", "comm"))
    how = _how_reduced(given, {grad.dtype for grad in grads})
    if not isinstance(comm, ZeroCopyReduceScatter) or how is None:
        return original(*args)
    dtype, op, after = how
    devices = torch.get_device_module(device)
    with torch.no_grad():
        wholes = [grad.contiguous() for grad in grads]
        grads.clear()
        stream.wait_stream(devices.current_stream())
        with devices.stream(stream):
            shards = _rooms(params, comm, dtype, device)
            reduce_shards(shards, wholes, group, op)
            reduced = stream.record_event()
            if after is not None and after != 1:
                torch._foreach_div_(shards, after)
            for param, reduced_shard in zip(params, shards, strict=True):
                shard = reduced_shard.to(given["orig_dtype"] or dtype)
                if param.sharded_param.grad is None:
                    param.sharded_param.grad = param.to_sharded_dtensor(shard)
                else:
                    param.sharded_param.grad._local_tensor += shard
            ready = stream.record_event()
    # torch holds the first of these until training has waited for `reduced`: whole gradients are read until then.
    results = (wholes, reduced, stream, ready, None, None, None)
    return results if _results_of_reduce(original) == len(results) else (*results[:2], *results[3:])


def _how_reduced(given: dict[str, Any], dtypes: set[torch.dtype]) -> tuple[torch.dtype, Any, float | None] | None:
    """The dtype and the operation of a reduction without copies, and by what its results are divided; else None."""
    params, group = given["fsdp_params"], given["reduce_scatter_group"]
    alone = group is not None and given["all_reduce_group"] is None and given["all_reduce_hook"] is None
    if not alone or len(dtypes | ({given["reduce_dtype"]} - {None})) != 1:
        return None
    whole = all(
        _plain_shard(param)
        and param._orig_size[0] % group.size() == 0
        and not getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
        for param in params
    )
    if group.size() == 1 or not whole:
        return None
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors as divisions

    (dtype,) = dtypes
    factor, force_sum = given["gradient_divide_factor"], given.get("force_sum_reduction_for_comms", False)
    before, after, op, _ = divisions(group, None, dtype, given["device"].type, factor, force_sum)
    return None if before is not None else (dtype, op, after)  # fp16: divided before the sum, in a copy


def _rooms(params: Sequence[Any], comm: Any, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """One allocation for the shards of all gradients of a group."""
    step = _ALIGNMENT_BYTES // dtype.itemsize
    sizes = [-(-param.sharded_size.numel() // step) * step for param in params]
    pieces = comm.allocate((sum(sizes),), dtype=dtype, device=device).split(sizes)
    return [
        piece[: param.sharded_size.numel()].view(param.sharded_size)
        for piece, param in zip(pieces, params, strict=True)
    ]


def _results_of_reduce(function: Any) -> int | None:
    """How many results torch's `foreach_reduce` has: 6 to torch 2.12, and since then 7, the third being a stream."""
    count = len(get_args(inspect.signature(function).return_annotation))
    return count if count in (6, 7) else None
