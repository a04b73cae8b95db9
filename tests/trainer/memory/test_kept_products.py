"""Outputs of products kept for the recomputation: the same numbers, fewer products, and never the wrong output."""

import pytest
import torch
from support import tiny_hybrid
from test_recompute import FakeMemory
from test_sft import trainer_for
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

from hf_speedkit.core.memory import Kept, StepPeaks, layers_that_fit
from hf_speedkit.trainer.memory.kept_products import KeptProducts, kept_flops_per_token
from hf_speedkit.trainer.memory.recompute import checkpointed_layers

IDS = torch.arange(24)[None] % 17 + 2


@pytest.fixture
def products(monkeypatch):
    """How often each linear map was multiplied out in a forward pass or a recomputation."""
    counts = {}
    linear = torch.nn.functional.linear

    def counted(rows, weight, bias=None):
        output = linear(rows, weight, bias)  # at a layer's last one recomputation ends, and does not come back
        counts[id(weight)] = counts.get(id(weight), 0) + 1
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    return counts


def checkpointed(wrapped=False, reentrant=False):
    model = tiny_hybrid().train()
    if wrapped:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
    else:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model, [KeptProducts(layer.module) for layer in checkpointed_layers(model)]


def gradients(model, *rows):
    model.zero_grad()
    losses = [model(input_ids=ids, labels=ids).loss for ids in rows]
    for loss in losses:
        loss.backward()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}


def flops(model):
    with FlopCounterMode(display=False) as counter:
        gradients(model, IDS)
    return counter.get_total_flops()


def switched_on(model, kept):
    for one in kept:
        one.watch()
    gradients(model, IDS)
    for one in kept:
        one.switch(True)


@pytest.mark.parametrize("wrapped", [False, True])
def test_gradients_are_the_same_and_no_product_is_computed_twice(products, wrapped):
    model, kept = checkpointed(wrapped)
    expected = gradients(model, IDS)
    switched_on(model, kept)
    layers = [layer.module for layer in checkpointed_layers(model)]
    weights = {
        id(module.weight): name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if type(module) is torch.nn.Linear
    }
    for _ in range(3):
        products.clear()
        found = gradients(model, IDS)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert {weights[key]: count for key, count in products.items() if key in weights} == dict.fromkeys(
            weights.values(), 1
        )
    # Every product but the down projection, at which recomputation stops by itself.
    linears = [[m for m in layer.modules() if type(m) is torch.nn.Linear] for layer in layers]
    without_last = [
        [m for name, m in layer.named_modules() if type(m) is torch.nn.Linear and "down_proj" not in name]
        for layer in layers
    ]
    multiplied = flops(model)
    saved = IDS.numel() * sum(map(kept_flops_per_token, layers))  # what speed/hfu is less by
    for layer, one, maps in zip(layers, kept, without_last, strict=True):
        assert one.bytes == sum(4 * IDS.numel() * m.out_features for m in maps)
        assert kept_flops_per_token(layer) == sum(2 * m.weight.numel() for m in maps)
        one.switch(False)
        assert kept_flops_per_token(layer) == 0
    assert flops(model) - multiplied == saved > 0
    products.clear()
    gradients(model, IDS)
    assert max(products[key] for key in weights) == 2
    assert not any("forward" in m.__dict__ for each in linears for m in each)


class AlsoPart(torch.nn.Module):
    """A layer's MLP behind a map that sees some of the rows, and one that is called twice in a pass."""

    def __init__(self, inner, width):
        super().__init__()
        self.inner, self.part, self.twice = inner, torch.nn.Linear(width, width, bias=False), inner.up_proj

    def forward(self, x):
        some = torch.nn.functional.pad(self.part(x[:, :6]), (0, 0, 0, x.shape[1] - 6))
        return self.inner(x + some + self.twice(x).mean())


def test_what_is_said_to_be_kept_is_what_is_kept_of_maps_that_run_twice_or_on_some_rows():
    model, kept = checkpointed()
    for layer in model.model.layers:
        layer.mlp = AlsoPart(layer.mlp, model.config.hidden_size)
    kept = [KeptProducts(layer.module) for layer in checkpointed_layers(model)]
    expected, multiplied = gradients(model, IDS), flops(model)
    switched_on(model, kept)
    loss = model(input_ids=IDS, labels=IDS).loss
    held = [sum(one._kept[0].nbytes for one in layer._maps if one._kept is not None and one.can_keep) for layer in kept]
    assert [layer.bytes for layer in kept] == held
    assert all(one._kept is None for layer in kept for one in layer._maps if one._module is layer._layer.mlp.twice)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    saved = IDS.numel() * sum(kept_flops_per_token(layer.module) for layer in checkpointed_layers(model))
    assert multiplied - flops(model) == saved > 0


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("count", [2, 3])
def test_forward_passes_before_a_backward_pass_never_get_one_anothers_outputs(order, count):
    model, kept = checkpointed()
    rows = [(IDS + shift) % 19 + 1 for shift in range(count)]
    expected = gradients(model, *(rows if order == "first" else rows[::-1]))
    switched_on(model, kept)
    found = gradients(model, *(rows if order == "first" else rows[::-1]))
    assert all(torch.allclose(found[name], expected[name], atol=1e-7) for name in expected)
    found = gradients(model, rows[0])  # and afterwards they are kept again
    assert kept[0]._maps[0]._kept is None
    for one in kept:
        one.switch(False)
    assert all(torch.equal(value, found[name]) for name, value in gradients(model, rows[0]).items())


def test_a_graph_that_is_kept_is_run_again_with_its_own_outputs_beside_a_pass_that_waits():
    model, kept = checkpointed()
    first, second = IDS, (IDS + 1) % 19 + 1

    def one_step():
        model.zero_grad()
        loss = model(input_ids=first, labels=first).loss
        loss.backward(retain_graph=True)
        other = model(input_ids=second, labels=second).loss
        loss.backward()
        other.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = one_step()
    switched_on(model, kept)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(one_step(), expected, strict=True))


def test_overlapping_passes_after_one_that_was_run_twice_never_get_one_anothers_outputs():
    """Passes are not counted: a recomputation too many would make a pass that waits look like none."""
    model, kept = checkpointed()
    rows = [(IDS + shift) % 19 + 1 for shift in range(3)]
    expected = gradients(model, *rows)
    switched_on(model, kept)
    model.zero_grad()
    first, second = (model(input_ids=ids, labels=ids).loss for ids in rows[:2])
    first.backward()
    for one in (each for layer in kept for each in layer._maps):
        one._waits = False  # as after a checkpointed part inside the layer
    third = model(input_ids=rows[2], labels=rows[2]).loss
    second.backward()
    third.backward()
    assert all(torch.allclose(p.grad, expected[name], atol=1e-7) for name, p in model.named_parameters())


def test_of_a_frozen_map_its_input_is_not_held():
    def held(on):
        model, kept = checkpointed()
        if on:
            switched_on(model, kept)
        model.activation_checkpointing_disable()
        model.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(True)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
            model(input_ids=IDS, labels=IDS)
        return sum(sizes)

    assert held(on=True) == held(on=False)


def test_a_pass_without_its_backward_pass_is_forgotten_at_the_next_step(products):
    model, kept = checkpointed()
    switched_on(model, kept)
    model(input_ids=IDS, labels=IDS)
    for one in kept:
        one.begin_step()
    products.clear()
    gradients(model, IDS)
    assert max(products.values()) == 1


def test_an_output_that_was_written_to_is_computed_again():
    model, kept = checkpointed()
    expected = gradients(model, IDS)
    switched_on(model, kept)
    loss = model(input_ids=IDS, labels=IDS).loss
    for one in kept[1]._maps:
        if one._kept is not None:
            one._kept[0].add_(1)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


class WritesToItsInput(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        made = self.inner(x * 2)
        x.data.mul_(2)  # no version counter moves
        return made


def test_an_output_that_a_kernel_writes_to_without_telling_torch_is_found_and_not_kept():
    """As Liger's rotary embedding does to q and k: what is kept would be rotated twice, gradients silently wrong."""
    model, kept = checkpointed()
    for layer in model.model.layers:
        layer.mlp.act_fn = WritesToItsInput(layer.mlp.act_fn)
    expected = gradients(model, IDS)
    for one in kept:
        one.watch(compare=True)
    gradients(model, IDS)
    assert all(one.overwritten for one in kept)
    for one in kept:
        one.switch(True)
    found = gradients(model, IDS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("way", ["autocast", "reentrant", "frozen"])
def test_other_ways_of_training_come_out_the_same(way):
    model, kept = checkpointed(reentrant=way == "reentrant")
    if way == "frozen":
        for name, p in model.named_parameters():
            p.requires_grad_("q_proj" in name or "embed" in name)

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    expected = step()
    for one in kept:
        one.watch()
    step()
    for one in kept:
        one.switch(True)
    for a, b in zip(step(), expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    claimed = sum(kept_flops_per_token(layer.module) for layer in checkpointed_layers(model))
    assert bool(claimed) == (way == "frozen")  # nothing is kept under the other two, and nothing is said to be


class Products(TrainerCallback):
    """How often one map is multiplied out in each step."""

    def __init__(self, counts, weight):
        self.counts, self.weight, self.of_steps = counts, weight, []

    def on_step_begin(self, *_, **__):
        self.counts.clear()

    def on_step_end(self, *_, **__):
        self.of_steps.append(self.counts[id(self.weight)])


@pytest.mark.parametrize(("layers", "expected"), [("all", 4), (3, 3), ("auto", 4)])
def test_a_run_keeps_them_from_step_2_and_its_weights_come_out_the_same(tmp_path, products, layers, expected):
    weights = []
    for name, keep in (("nothing", "nothing"), ("products", "products")):
        model = tiny_hybrid()
        trainer = trainer_for(
            tmp_path / name, model=model, max_steps=4, activation_checkpointing=True, isolation_check=False,
            activation_checkpointing_layers=layers, activation_checkpointing_keep=keep,
        )  # fmt: skip
        counts = Products(products, model.model.layers[0].mlp.gate_proj.weight)
        trainer.add_callback(counts)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert counts.of_steps[1:] == [1, 1, 1]
    assert torch.equal(*weights)
    assert f"of 4 layers, with the products of {expected} kept" in trainer.recompute.line()
    assert not any("forward" in module.__dict__ for module in model.model.layers.modules())


def test_a_run_keeps_nothing_in_any_layer_that_a_kernel_writes_to_without_telling_torch(tmp_path, caplog):
    weights = []
    for name, keep in (("nothing", "nothing"), ("products", "products")):
        model = tiny_hybrid()
        for layer in model.model.layers:
            layer.mlp.act_fn = WritesToItsInput(layer.mlp.act_fn)
        trainer = trainer_for(
            tmp_path / name, model=model, max_steps=3, activation_checkpointing=True, isolation_check=False,
            activation_checkpointing_layers="all", activation_checkpointing_keep=keep, fused_layers=False,
        )  # fmt: skip
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
    # one layer of each kind was compared, and what it found holds for the others
    assert [len(layer.products.overwritten) for layer in trainer.recompute._candidates] == [1] * 4
    assert "are written to behind torch's back" in caplog.text


@pytest.mark.parametrize(
    ("forward", "backward", "room", "expected"),
    [
        (2, [2] * 4, 100, Kept(4)),  # all fit alone
        (2, [2] * 4, 2 + 4 * 3, Kept(0, 4)),  # all products, and nothing else
        (2, [2] * 4, 2 + 3 * 3 + 10, Kept(1, 3)),  # all products, and one layer alone
        (2, [2] * 4, 2 + 2 * 3, Kept(0, 2)),  # alone none would fit
        (2, [2] * 4, 2 + 11, Kept(0, 3)),  # one alone would fit; products of three save more
        (2, [2] * 4, 2, Kept(0)),
        # Memory is highest in the first layer's backward pass: what the last layers keep is gone by then.
        (2, [14, 2, 2, 2], 14, Kept(0, 4)),
    ],
    ids=str,
)
def test_products_come_before_layers_that_keep_everything(forward, backward, room, expected):
    peaks = StepPeaks(forward, backward)
    assert layers_that_fit([10] * 4, peaks, already=(), room=room, products=[3] * 4) == expected


@pytest.mark.parametrize(
    "settings",
    [{}, {"activation_checkpointing_layers": "all"}, {"activation_checkpointing_layers": 3}],
    ids=["no memory to measure", "all", "three"],
)
def test_by_itself_nothing_is_kept_where_memory_is_not_measured(tmp_path, settings):
    trainer = trainer_for(tmp_path, activation_checkpointing=True, max_steps=2, isolation_check=False, **settings)
    assert trainer.args.activation_checkpointing_keep == "auto"
    trainer.train()
    assert trainer.recompute.with_products == 0
    assert not any(trainer.recompute._product_bytes())


@pytest.mark.parametrize("keep", ["products", "auto"])
def test_auto_measures_products_and_keeps_as_many_as_fit(tmp_path, keep):
    trainer = trainer_for(
        tmp_path, activation_checkpointing=True, activation_checkpointing_keep=keep, max_steps=8,
        num_train_epochs=20,
    )  # fmt: skip
    sizes = []
    memory = FakeMemory(trainer, kept=10**9, peak=0, fits=4)
    memory.total = lambda: 10**6

    def peak():
        found = [layer.products.bytes for layer in trainer.recompute._candidates]
        sizes[:] = found
        # So much that of the room of 0.96 MB three layers' products are left.
        return 10**6 - 10**6 // 25 - 6 - 5 - sum(found[1:])

    memory.peak_allocated = peak
    memory.peak_reserved = lambda: memory.peak_allocated() + 5
    trainer.recompute._memory_of = lambda device: memory
    watched = trainer.recompute._last_of_each_kind
    trainer.recompute._last_of_each_kind = lambda: dict(list(watched().items()) if not sizes else [])
    trainer.train()
    assert all(sizes)
    assert trainer.recompute.with_products == 3
    assert trainer.recompute.checkpointed == 4
