"""What FSDP2 holds behind passes that ended early, and whether the weights that are then used are the new ones."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from zero_copy_run import Tower, sharded

from hf_speedkit.trainer.sharded.communication import corrected_gathers


def rows(tower):
    """The same on both ranks, so that the mean of their gradients is the gradient."""
    return torch.arange(10, device=tower.head.weight.device).view(2, 5)


def groups(tower):
    """FSDP2's groups by the names of their modules; of a unit of several modules, the first."""
    found = {}
    for name, module in tower.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            here = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one before torch 2.13
            found.update((name, group) for group in here if group is not None and group not in found.values())
    return found


def left(tower):
    """Names of groups that are gathered or being gathered, or have memory for it."""
    return [
        name
        for name, group in groups(tower).items()
        if not group.is_sharded
        or group._all_gather_result is not None
        or any(out.untyped_storage().size() for param in group.fsdp_params for out in param.all_gather_outputs)
    ]


def change(tower, how):
    """As an optimizer does it, or a checkpoint that is loaded."""
    if how == "loaded":
        tower.load_state_dict({name: 1.1 * weight for name, weight in tower.state_dict().items()})
        return
    with torch.no_grad():
        for group in groups(tower).values():
            for param in group.fsdp_params:
                param.sharded_param._local_tensor.mul_(1.1)


def wrong(tower, whole_model=True):
    """In what a pass differs from that of one process with the weights that the ranks hold; gradients, too."""
    alone = Tower(width=tower.head.in_features, vision=len(tower.visual)).to(tower.head.weight.device)
    held = {name: p.detach() for name, p in tower.named_parameters()}
    held = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in held.items()}
    alone.load_state_dict(held)
    passes = []
    for model in (tower, alone):
        model.zero_grad()
        out = (model if whole_model else model.base_model)(rows(tower))
        out.square().mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        passes.append({"out": out, **{n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}})
    ours, expected = passes
    # Over gloo all numbers are equal; a GPU may sum in another order. Weights that are not the new ones are 10 % off.
    differ = [
        name
        for name, value in expected.items()
        if name not in ours or (ours[name] - value).abs().max() > 1e-4 * value.abs().max()
    ]
    tower.zero_grad()
    return differ


def stops_early(tower):
    tower.base_model.runs = [0]
    with torch.no_grad():
        tower(rows(tower))


def leaves_one_out(tower):
    tower.base_model.runs = [0, 2]
    tower(rows(tower)).square().mean().backward()


@contextmanager
def as_before_torch_2_13():
    """Without the method that puts a pass back, where this torch has it."""
    own = FSDPModule.__dict__.get("reset_iter_state")
    if own is not None:
        del FSDPModule.reset_iter_state
    try:
        yield
    finally:
        if own is not None:
            FSDPModule.reset_iter_state = own


def fails(tower):
    tower.layers[1].fails_with = ValueError("caught by the user")
    with suppress(ValueError):
        tower(rows(tower))


def fails_before_2_13(tower):
    with as_before_torch_2_13():
        fails(tower)


def below_the_root(tower):
    tower.base_model.runs = [0]
    with torch.no_grad():
        tower.base_model(rows(tower))


def twice(tower):
    """Nothing is left out: two passes before a backward pass."""
    losses = [tower(ids).square().mean() for ids in (rows(tower), rows(tower) + 1)]
    sum(losses).backward()


def aims_behind(tower):
    """No layer is left out, but at the embedding's gradient torch gathers the last layer of the pass before."""
    with torch.no_grad():
        tower(rows(tower))
    tower(rows(tower)).square().mean().backward()


CASES = {
    "stops early": (stops_early, "loaded"),
    "leaves one out": (leaves_one_out, "stepped"),
    "fails": (fails, "stepped"),
    "fails, before 2.13": (fails_before_2_13, "stepped"),
    "below the root": (below_the_root, "stepped"),
    "twice": (twice, "stepped"),
    "aims behind": (aims_behind, "stepped"),
}


def in_training(without_copies, **how):
    said = {}
    tower = sharded(**how)
    with corrected_gathers(tower, prefetch_layers=1, without_copies=without_copies):
        said["at first"] = [left(tower), wrong(tower)]
        for name, (leave, how) in CASES.items():
            leave(tower)
            tower.base_model.runs = tower.layers[1].fails_with = None
            held = left(tower) if name != "below the root" else []  # until the next pass begins
            change(tower, how)
            said[name] = [held, wrong(tower, whole_model=name != "below the root")]
            tower.zero_grad()
            with torch.no_grad():
                tower(rows(tower))
    return said


def _keep(held, _module, _given, output):
    held.append(output)


def written_behind(tower, passes=5):
    """The largest number in zeros that take memory as soon as a backward pass ends: weights that arrive late show.

    Behind a pass without a backward one, torch gathers that pass's last layer once more when the gradient reaches the
    embedding, and nothing waits for it.
    """
    with corrected_gathers(tower, prefetch_layers=1):
        largest = []
        for _ in range(passes):
            with torch.no_grad():
                tower(rows(tower))
            embedded = []
            handle = tower.get_input_embeddings().register_forward_hook(partial(_keep, embedded))
            torch.autograd.grad(tower(rows(tower)).square().mean(), embedded[0])
            handle.remove()
            width, device = tower.head.in_features, tower.head.weight.device
            zeros = [torch.zeros(2 * width, width, device=device) for _ in range(6)]
            largest.append(max(float(one.abs().max()) for one in zeros))
    return largest


class Stop(KeyboardInterrupt):
    """No Exception: hooks that run in any case do not see it."""


def fails_backward(tower):
    def stop(_):
        raise RuntimeError("in the backward pass")

    # Below a product whose gradient is there, and not reduced yet.
    handle = tower.layers[1].second.register_forward_pre_hook(lambda _, given: given[0].register_hook(stop) and None)
    loss = tower(rows(tower)).square().mean()
    handle.remove()
    loss.backward()


def interrupted(tower):
    tower.layers[1].fails_with = Stop()
    tower(rows(tower))


def after_training(**how):
    """A training that ends by an error, and the next one of the same model with other settings."""
    said = {}
    endings = {"backward": fails_backward, "interrupted": interrupted}
    cases = [(name, ends, nullcontext) for name, ends in endings.items()]
    cases += [(f"{name}, before 2.13", ends, as_before_torch_2_13) for name, ends in endings.items()]
    for name, ends, torch_is in cases:
        tower = sharded(**how)
        comms = {place: (group._all_gather_comm, group._reduce_scatter_comm) for place, group in groups(tower).items()}
        with suppress(RuntimeError, Stop), torch_is(), corrected_gathers(tower):
            wrong(tower)
            ends(tower)
        tower.layers[1].fails_with = None
        held = left(tower)
        change(tower, "stepped")
        same = all(
            (group._all_gather_comm, group._reduce_scatter_comm) == comms[place]
            for place, group in groups(tower).items()
        )
        said[name] = [held, same, wrong(tower)]
        for without_copies, passes in ((False, 2), (True, 1)):
            with corrected_gathers(tower, without_copies=without_copies, backward_passes=passes):
                said[name].append(wrong(tower))
    return said


def prefetched(tower):
    """What each group gathers ahead."""
    names = {id(module._get_fsdp_state()): name for name, module in tower.named_modules()
             if isinstance(module, FSDPModule)}  # fmt: skip
    return {
        name: [names[id(state)] for state in module._get_fsdp_state()._states_to_forward_prefetch]
        for name, module in tower.named_modules()
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._states_to_forward_prefetch
    }


def reentrant():
    """What is gathered ahead, the lines of what was changed, and those of what was not."""
    tower, said = sharded(), []
    for layer in tower.layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("hf_speedkit")
    logger.addHandler(handler)
    try:
        with corrected_gathers(tower, prefetch_layers=2) as lines:
            return [prefetched(tower), lines, said]
    finally:
        logger.removeHandler(handler)


def chains():
    said = {}
    for ahead, vision in ((1, 3), (2, 5)):
        tower = sharded(model={"vision": vision})
        with corrected_gathers(tower, prefetch_layers=ahead):
            said[f"{vision} and {ahead} ahead"] = prefetched(tower)
        said[f"{vision} and {ahead} ahead, behind"] = prefetched(tower)
    return {**said, "reentrant": reentrant()}
