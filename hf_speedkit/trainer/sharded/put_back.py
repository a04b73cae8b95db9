"""What FSDP2 keeps of a pass that raised, put back: groups that are gathered, what is under way, states of the pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_speedkit.trainer.sharded.units import is_sharded

# What is read and written below, the same in torch 2.11 to 2.14.
_OF_THE_PASS = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
_OF_COMMUNICATION = ("all_gather_state", "post_forward_order")
_OF_A_STATE = ("_modules_to_run_forward", "_training_state")
_OF_A_GROUP = ("_partial_reduce_output", "_training_state", "_to_sharded", "finalize_backward")


def put_back(model: Any, groups: list[Any]) -> None:
    """Let the next pass begin as if the one that raised had not been; its gradients that were not reduced are lost.

    Else a layer that raised stays gathered, and runs on with the weights of before the optimizer's step.

    Args:
        model: the sharded model, of which a pass raised. One that has not begun a pass is left alone.
        groups: its groups; `parameter_groups`. None that is being gathered: that was waited for.

    Source: `FSDPModule.reset_iter_state`, since torch 2.13; before, the same by torch's private parts. A torch without
    either is left as it is.
    """
    if not is_sharded(model) or not (root := model._get_fsdp_state())._is_root:
        return
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    elif _is_known(root, groups):
        _by_hand(root, groups)


def forget_gradients(groups: list[Any]) -> None:
    """Forget gradients that a backward pass which raised has left unreduced: no `zero_grad` reaches them.

    torch 2.13's own `reset_iter_state` leaves them, and the next backward pass adds to them.
    """
    for group in groups:
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if (whole := getattr(param, "_unsharded_param", None)) is not None:
                whole.grad = None


def _is_known(root: Any, groups: list[Any]) -> bool:
    parts = [(getattr(root, "_state_ctx", None), _OF_THE_PASS), (getattr(root, "_comm_ctx", None), _OF_COMMUNICATION)]
    states = getattr(parts[0][0], "all_states", ())
    parts += [(state, _OF_A_STATE) for state in states] + [(group, _OF_A_GROUP) for group in groups]
    return all(hasattr(part, name) for part, names in parts for name in names)


def _by_hand(root: Any, groups: list[Any]) -> None:
    one_pass, communication = root._state_ctx, root._comm_ctx
    idle = type(root._training_state).IDLE
    for copied in _kept_for_copies(communication):
        if copied.event is not None:
            root._device_handle.current_stream().wait_event(copied.event)
    communication.post_forward_order.clear()
    for state in one_pass.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
    for group in groups:
        group.finalize_backward()  # waits for its reduction, and for gradients on their way to the host
        group._partial_reduce_output = None
        group._training_state = idle
        group._to_sharded()
    one_pass.iter_forward_root = None
    one_pass.post_backward_final_callback_queued = False


def _kept_for_copies(communication: Any) -> Iterator[Any]:
    """Take out what is held until it was copied from or sent: of a gather, and of one reduction, since 2.12 of several.

    A state of torch's has the tensor, and the event behind it.
    """
    for name in ("all_gather_state", "reduce_scatter_state"):
        if (state := getattr(communication, name, None)) is not None:
            yield state
            setattr(communication, name, None)
    several = getattr(communication, "reduce_scatter_states", [])
    yield from several
    several.clear()
