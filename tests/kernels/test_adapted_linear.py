"""Fused adapters: the numbers of the formula, whatever is trained, and what they hold and make again."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_speedkit.kernels.lora import Adapter, adapted_linear

WIDE, OUT, RANK, SCALING = 7, 6, 3, 0.7
TRAINED = [("x",), ("down",), ("up",), ("x", "down"), ("x", "up"), ("down", "up")]


def drawn(dtype=torch.float64, adapters=None, shape=(2, 5, WIDE), seed=0):
    """Input, weight, bias, and the adapter's two matrices."""
    make = torch.Generator().manual_seed(seed)
    shapes = {"x": shape, "weight": (OUT, WIDE), "bias": (OUT,), "down": (RANK, WIDE), "up": (OUT, RANK)}
    values = {name: torch.randn(size, generator=make, dtype=torch.float64) for name, size in shapes.items()}
    kinds = {"down": adapters or dtype, "up": adapters or dtype}
    return {name: value.to(kinds.get(name, dtype)) for name, value in values.items()}


def by_formula(x, weight, bias, down, up):
    return functional.linear(x, weight, bias) + functional.linear(functional.linear(x, down), up) * SCALING


def ours(x, weight, bias, down, up):
    return adapted_linear(x, weight, bias, Adapter(down=down, up=up, scaling=SCALING))


def results(forward, values, trained=("x", "down", "up")):
    """The output and the gradients of what is trained."""
    values = {name: None if value is None else value.detach().clone() for name, value in values.items()}
    leaves = [values[name].requires_grad_() for name in trained]
    output = forward(**values)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("shape", [(2, 5, WIDE), (5, WIDE), (WIDE,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_formula(shape, bias):
    values = drawn(shape=shape)
    values["bias"] = values["bias"] if bias else None
    for found, wanted in zip(results(ours, values), results(by_formula, values), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", TRAINED, ids="+".join)
def test_each_gradient_comes_without_the_others(trained):
    values = drawn()
    values["x"] = values["x"].transpose(0, 1)  # in no order that a product could take
    for found, wanted in zip(results(ours, values, trained), results(by_formula, values, trained), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
def test_in_bf16_adapters_keep_their_dtype_and_numbers_are_within_rounding(adapters):
    values = drawn(torch.bfloat16, adapters)
    exact = results(by_formula, {name: value.double() for name, value in values.items()})
    found = results(ours, values)
    assert [value.dtype for value in found] == [torch.bfloat16, torch.bfloat16, adapters, adapters]
    for value, wanted in zip(found, exact, strict=True):
        # 8 bits: at most 2 ** -9 a rounding, and there are three: the adapter, the narrow product, the result.
        assert (value.double() - wanted).norm() / wanted.norm() < 3 * 2**-9


def test_nothing_is_held_but_the_input_and_what_is_narrow():
    values, sizes = drawn(torch.float32, shape=(64, WIDE)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(tuple(x.shape)) or x, lambda x: x):
        results(ours, values)
    assert sorted(sizes) == sorted([(64, WIDE), (OUT, WIDE), (RANK, WIDE), (OUT, RANK), (64, RANK)])
    with torch.no_grad():
        assert not ours(**values).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_below_checkpointing_gradients_are_the_same_and_the_last_product_is_not_made_again(reentrant, monkeypatch):
    values, products, linear = drawn(), [], functional.linear
    wanted = results(ours, values)
    monkeypatch.setattr(functional, "linear", lambda *args: products.append(1) or linear(*args))

    def again(x, **others):
        return checkpoint(lambda x: ours(x, **others), x, use_reentrant=reentrant)

    assert all(torch.equal(a, b) for a, b in zip(results(again, values), wanted, strict=True))
    assert len(products) == 1 + reentrant  # the reentrant kind makes everything again


def test_a_backward_pass_inside_autocast_computes_in_the_forwards_dtype():
    values = drawn(torch.float32)
    leaves = [values[name].requires_grad_() for name in ("x", "down", "up")]
    wanted = torch.autograd.grad(ours(**values).square().sum(), leaves)
    loss = ours(**values).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_second_derivative_is_refused():
    values = drawn()
    x = values["x"].requires_grad_()
    (first,) = torch.autograd.grad(ours(**values).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
