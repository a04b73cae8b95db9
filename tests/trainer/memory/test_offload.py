"""Activations in host memory between forward and backward pass: the same numbers, off the device, back in time."""

import copy
from types import SimpleNamespace

import pytest
import torch
from support import tiny_hybrid
from test_recompute import FakeMemory
from test_sft import trainer_for
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_speedkit.core.errors import ConfigurationError, HardwareError
from hf_speedkit.core.memory import GIB, NO_OFFLOADING, Offloading, copied_before, layers_to_offload
from hf_speedkit.measure.host_memory import available_host_bytes
from hf_speedkit.trainer.memory import offload
from hf_speedkit.trainer.memory.offload import ActivationOffload, HostArena
from hf_speedkit.trainer.memory.offload_choice import OffloadChoice, spread
from hf_speedkit.trainer.memory.recompute import checkpointed_layers

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """Storages of a tiny model count as large."""
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 64)


def batch(length=24):
    return torch.arange(length)[None] % 17 + 2


def gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def offloaded(model, chosen, *, ahead=1, chunk=2**22, **arena):
    layers = list(model.model.layers)
    memory = HostArena(pinned=False, chunk_bytes=chunk, **{"grows": True, **arena})
    return ActivationOffload(layers, chosen, memory, CPU, copy_layers=ahead)


@pytest.mark.parametrize("chosen", [[0], [0, 2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_gradients_are_the_same_bit_for_bit_pass_after_pass_and_after_it_ends(small, chosen, ahead):
    model = tiny_hybrid().train()
    ids = batch()
    expected = gradients(model, ids)
    moved = offloaded(model, chosen, ahead=ahead)
    taken = []
    for _ in range(2):
        found = gradients(model, ids)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        taken.append([[len(b) for b in buffers] for buffers in moved._buffers.values()])
        assert moved.device_bytes == 0  # the backward pass has let go of everything
    assert taken[0] == taken[1]
    assert all(taken[0])
    moved.close()
    assert not any("forward" in layer.__dict__ or layer._forward_pre_hooks for layer in model.model.layers)
    assert torch.equal(gradients(model, ids)["lm_head.weight"], expected["lm_head.weight"])


def test_what_a_layer_saved_is_off_the_device_a_copy_later_and_back_before_it_is_needed(small):
    model = tiny_hybrid().train()
    moved = offloaded(model, [0, 1])
    layers, found = model.model.layers, {}

    def note(when):
        there = {number: [held.source is not None for held in one.alive()] for number, one in moved._passes.items()}
        found[when] = {number: (sum(on), len(on)) for number, on in there.items()}

    for number in (2, 3):
        layers[number].register_forward_pre_hook(lambda *_, number=number: note(f"before layer {number}"))
    for number in range(4):
        layers[number].register_forward_hook(
            lambda _, __, out, number=number: out.register_hook(lambda _: note(f"backward of {number}")) and None
        )
    gradients(model, batch())
    first, second = (found["before layer 2"][number][1] for number in (0, 1))
    assert min(first, second) > 5
    assert found == {
        "before layer 2": {0: (0, first), 1: (second, second)},
        "before layer 3": {0: (0, first), 1: (0, second)},
        "backward of 3": {0: (0, first), 1: (0, second)},
        "backward of 2": {0: (0, first), 1: (second, second)},
        "backward of 1": {0: (first, first), 1: (second, second)},
        "backward of 0": {0: (first, first), 1: (0, 0)},
    }


def test_weights_stay_where_they_are(small):
    model = tiny_hybrid().train()
    moved = offloaded(model, [1])
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    copied = []
    whole = offload._whole

    def noted(storage):
        copied.append(storage.data_ptr())
        return whole(storage)

    offload._whole = noted
    try:
        gradients(model, batch())
    finally:
        offload._whole = whole
    assert copied
    assert not weights & set(copied)
    assert moved._passes[1].weights <= weights | {b.untyped_storage().data_ptr() for b in model.buffers()}


@pytest.mark.parametrize("limit", [{"grows": False}, {"chunk": 256}], ids=["no room", "small pieces"])
def test_what_has_no_room_on_the_host_stays_on_the_device(small, limit):
    model = tiny_hybrid().train()
    ids = batch()
    expected = gradients(model, ids)
    offloaded(model, [0, 1], **limit)
    found = gradients(model, ids)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("pieces", "fits"), [(0, "none"), (30, "1"), (50, "2")], ids=["nothing", "one", "two"])
def test_a_host_without_memory_for_all_layers_is_told_with_how_many_it_has_room_for(small, pieces, fits):
    """Not torch's own error of CUDA, and no process that the kernel kills. A layer here takes 20 pieces."""
    model, chunk = tiny_hybrid().train(), 2**13
    moved = offloaded(model, [0, 1, 2], chunk=chunk, room=lambda: pieces * chunk - moved.arena.total_bytes)
    with pytest.raises(HardwareError, match=r"activation_offloading_layers=3.*\n.*GiB.*\n") as told:
        gradients(model, batch())
    assert told.value.mend.startswith(f"activation_offloading_layers={fits}, or auto")
    moved.close()
    assert gradients(model, batch())


@pytest.mark.parametrize(("asked", "room", "taken"), [(3, 5, 3), (3, 2, 2), ("auto", 5, 2)])
def test_a_number_that_was_asked_for_is_bounded_by_what_the_host_has_alone(asked, room, taken):
    recompute = SimpleNamespace(kept_bytes={0: 8}, checkpointed=4, total=4, spare_bytes=10**9)
    choice = OffloadChoice(asked, recompute, host_bytes=lambda: 8 * room)
    choice._forward = {"begin": 0.0, "copies": (0.0, 2**33 / 26), "end": 1.0}  # 26 bytes a second: time for two of four
    choice._arena = HostArena(pinned=False, chunk_bytes=8)
    assert choice._wanted(FakeTimer(recompute, 1.0)).layers == taken


def test_longer_rows_and_a_graph_that_is_used_twice_are_right_too(small):
    model = tiny_hybrid().train()
    moved = offloaded(model, [0, 1, 2])
    gradients(model, batch(8))
    first = [[len(b) for b in buffers] for buffers in moved._buffers.values()]
    found = gradients(model, batch(40))
    assert [[len(b) for b in bs[: len(was)]] for bs, was in zip(moved._buffers.values(), first, strict=True)] == first
    loss = model(input_ids=batch(8), labels=batch(8)).loss
    model.zero_grad()
    loss.backward(retain_graph=True)
    once = model.lm_head.weight.grad.clone(), model.model.embed_tokens.weight.grad.clone()
    loss.backward()
    assert torch.allclose(model.lm_head.weight.grad, 2 * once[0])
    assert torch.allclose(model.model.embed_tokens.weight.grad, 2 * once[1], rtol=1e-5)
    moved.close()
    expected = gradients(model, batch(40))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0)], ids=["first", "last", "one twice"])
def test_a_pass_before_the_backward_pass_of_another_does_not_write_over_it(small, order):
    model = tiny_hybrid().train()

    def one_step():
        model.zero_grad()
        losses = [model(input_ids=ids, labels=ids).loss for ids in (batch(), batch() + 1)]
        for place, number in enumerate(order):
            losses[number].backward(retain_graph=number in order[place + 1 :])
        return [p.grad.clone() for p in model.parameters()]

    expected = one_step()
    offloaded(model, [0, 1, 2])
    for _ in range(2):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one_step(), expected, strict=True))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_copy_of_the_model_computes_with_its_own_weights(small, wrapped):
    model = tiny_hybrid().train()
    expected = gradients(model, batch())
    if wrapped:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
        for layer in checkpointed_layers(model):
            layer.switch(False)
    offloaded(model, [0, 2])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    found = gradients(copied, batch())
    found = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layers", [2, "4"])
def test_a_number_of_layers_changes_no_weight_and_is_undone(tmp_path, small, layers):
    weights = []
    for name, changes in (("twice", {}), ("host", {"activation_offloading_layers": layers})):
        model = tiny_hybrid()
        trainer = trainer_for(
            tmp_path / name, model=model, max_steps=3, activation_checkpointing=True, isolation_check=False, **changes
        )
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert all(layer.gradient_checkpointing and "forward" not in layer.__dict__ for layer in model.model.layers)
    assert torch.equal(*weights)
    twice = 4 - int(layers)
    said = f"activation checkpointing: {twice} of 4 layers, activations of {layers} in host memory"
    assert said in trainer.summary().changed_layers


def test_layers_that_keep_no_products_go_to_the_host_first(tmp_path, small):
    trainer = trainer_for(tmp_path, activation_checkpointing=True, max_steps=1)
    recompute, choice = trainer.recompute, trainer.offloading
    trainer.train()
    for with_products, places in ((2, {0, 1}), (3, {0, 2})):
        recompute.with_products = with_products
        choice._begin(Offloading(2, 1.0), HostArena(pinned=False), CPU)
        assert recompute.offloaded == places
        choice._offload.close()


def test_settings_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="none, auto, or a number"):
        trainer_for(tmp_path, activation_offloading_layers="many")
    trainer = trainer_for(tmp_path, activation_checkpointing=True, activation_offloading_layers=5)
    with pytest.raises(ConfigurationError, match="4 layers are checkpointed"):
        trainer.train()


def test_trls_own_offloading_leaves_ours_out(tmp_path):
    trainer = trainer_for(tmp_path, activation_checkpointing=True, activation_offloading_layers=2, max_steps=1)
    trainer.args.activation_offloading = True  # TRL itself refuses it on a CPU
    trainer.train()
    assert not trainer.recompute.offloaded


def test_nothing_lies_over_a_layer_that_dataparallel_would_replicate(tmp_path):
    trainer = trainer_for(
        tmp_path,
        activation_checkpointing=True,
        activation_offloading_layers=2,
        activation_checkpointing_keep="products",
    )
    trainer.model.activation_checkpointing_enable()
    args = SimpleNamespace(device=CPU, n_gpu=2)
    memory = FakeMemory(trainer, kept=10, peak=10, fits=4)
    trainer.recompute._memory_of = lambda device: memory
    trainer.recompute.on_train_begin(args, None, None, model=trainer.model)
    trainer.offloading.on_train_begin(args, None, None)
    assert trainer.recompute.total == 4
    assert not trainer.recompute.measures
    assert not any("forward" in part.__dict__ for part in trainer.model.model.modules())


class FakeTimer:
    """A step takes a second until layers are offloaded, `after` seconds then; copies have time for two layers."""

    def __init__(self, recompute, after):
        self.recompute, self.after = recompute, after

    def now(self):
        return self.after if self.recompute.offloaded else 1.0

    def seconds(self, spans):
        return min(end for _, end in spans)

    def copies(self, host, device):
        assert len(host) == 2**28
        return 0.0, 2**33 / 26


@pytest.mark.parametrize(
    ("layers", "after", "host", "peaks", "kept"),
    [
        ("auto", 0.9, 2 * GIB, (85, 40), 2),  # of two that are checkpointed: 0.85 of a second at 26 bytes a second
        ("auto", 0.999, 2 * GIB, (85, 40), 0),
        ("auto", 0.9, GIB - 1, (85, 40), 0),
        ("auto", 0.9, 2 * GIB, (40, 40), 0),  # nothing is checkpointed any more
        ("auto", 0.9, 2 * GIB, (85, 80), 0),  # no room for what is on its way
        ("none", 0.9, 2 * GIB, (85, 40), 0),
        (None, 0.9, 2 * GIB, (85, 40), 0),  # what it is by itself
        (1, 1.5, 2 * GIB, (85, 40), 1),
    ],
)
def test_auto_tries_times_and_keeps_what_is_faster(tmp_path, caplog, layers, after, host, peaks, kept):
    asked = {} if layers is None else {"activation_offloading_layers": layers}
    trainer = trainer_for(tmp_path, activation_checkpointing=True, max_steps=12, num_train_epochs=20, **asked)
    memory, forward = FakeMemory(trainer, kept=10, peak=peaks[1], fits=4), iter([0, peaks[0]])
    memory.peak_allocated = lambda: next(forward, peaks[1])
    trainer.recompute._memory_of = lambda device: memory
    choice = trainer.offloading
    choice._timer_of = lambda device: FakeTimer(trainer.recompute, after)
    choice._host_bytes = lambda: host
    with caplog.at_level("INFO", "hf_speedkit.trainer.memory.offload_choice"):
        trainer.train()
    assert len(trainer.recompute.offloaded) == kept
    assert ("they are computed twice again" in caplog.text) == (after == 0.999)
    assert ("s a step instead of 1.000 s, kept" in caplog.text) == bool(kept)
    assert all(layer.gradient_checkpointing and "forward" not in layer.__dict__ for layer in trainer.recompute.modules)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Offloading(8, 2.0)),  # 0.85 of a second at 20 bytes a second: one layer of two bytes in 0.1 s
        ({"bytes_per_s": 2}, Offloading(0, 20.0)),
        ({"host_bytes": 5}, Offloading(2, 2.0)),
        ({"checkpointed": 3}, Offloading(3, 2.0)),
        ({"spare_bytes": 4}, Offloading(5, 2.0)),  # of 10 layers: one, and as many again as two layers' time holds
        ({"spare_bytes": 1}, Offloading(0, 2.0)),
        ({"forward_s": 0.0}, NO_OFFLOADING),
        ({"checkpointed": 0}, NO_OFFLOADING),
    ],
    ids=str,
)
def test_as_many_layers_as_copies_have_time_and_room_for(change, expected):
    job = {
        "checkpointed": 10, "of": 20, "layer_bytes": 2, "forward_s": 1.0, "bytes_per_s": 20.0, "host_bytes": 100,
        "spare_bytes": 100,
    }  # fmt: skip
    job |= change
    assert layers_to_offload(job.pop("checkpointed"), **job) == expected


@pytest.mark.parametrize(
    ("places", "copy_layers", "expected"),
    [([0, 4, 8], 1.0, [2, 6, 10]), ([0, 2, 4], 2.7, [4, 7, 10]), ([3], 0.2, [5]), ([], 1.0, [])],
    ids=["in time", "one waits for the other", "less than a layer", "none"],
)
def test_a_layer_is_let_go_of_when_its_copy_should_be_done(places, copy_layers, expected):
    assert copied_before(places, copy_layers) == expected


@pytest.mark.parametrize(("count", "over", "places"), [(3, 9, [0, 3, 6]), (2, 5, [0, 2]), (4, 4, [0, 1, 2, 3])])
def test_layers_are_spread_over_those_that_are_checkpointed(count, over, places):
    assert list(spread(count, over)) == places


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 8 * GIB),
        ({"memory.max": f"{4 * GIB}\n", "memory.current": f"{GIB}\n"}, 3 * GIB),
        ({"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 0),
        ({"memory/memory.limit_in_bytes": f"{6 * GIB}", "memory/memory.usage_in_bytes": f"{GIB}"}, 5 * GIB),
        (
            {
                "memory.max": f"{4 * GIB}",
                "memory.current": f"{4 * GIB}",
                "memory.stat": f"anon {GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\n",
            },
            3 * GIB,  # all but what no file holds
        ),
    ],
    ids=["no container", "no limit", "a limit", "over it", "version 1", "files that were read"],
)
def test_host_memory_is_what_host_and_container_leave(tmp_path, files, expected):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:       99 kB\nMemAvailable:   {8 * 2**20} kB\n")
    for name, text in files.items():
        path = tmp_path / "group" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_host_bytes(cgroups=tmp_path / "group", meminfo=meminfo) == expected
    assert available_host_bytes(cgroups=tmp_path / "none", meminfo=tmp_path / "none") == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_on_a_gpu_copies_beside_the_computation_change_no_bit_and_free_the_memory():
    """Many passes with little to compute, so that a copy that is late or early would be seen."""
    torch.manual_seed(0)
    device, width, rows = torch.device("cuda"), 1024, 16_384

    def layer():
        return torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.SiLU(), torch.nn.Linear(4 * width, width)
        )

    layers = torch.nn.ModuleList(layer() for _ in range(16)).to(device, torch.bfloat16)
    hidden = torch.randn(rows, width, device=device, dtype=torch.bfloat16)

    def one_pass():
        layers.zero_grad()
        out = hidden
        for one in layers:
            out = out + one(out)
        held = torch.cuda.memory_allocated()
        out.float().square().mean().backward()
        return held

    held = one_pass()
    expected = [p.grad.clone() for p in layers.parameters()]
    arena = HostArena(pinned=True)
    arena.reserve(8 * GIB)
    moved = ActivationOffload(list(layers), range(12), arena, device, copy_layers=1)
    for _ in range(20):
        less = one_pass()
        assert all(torch.equal(p.grad, was) for p, was in zip(layers.parameters(), expected, strict=True))
    moved.close()
    print("held after the forward pass, GiB:", held / GIB, "with offloading", less / GIB)
    assert less < held * 0.5  # without twelve of sixteen layers; weights, rows and what was expected are in both
