"""Reading transformers' private layout: right on the installed version, unknown (not guessed) on any other."""

import functools
import importlib
from importlib import util
from types import MethodType

import pytest
import torch
from kernel_models import tiny_model

from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.kernels.layout import BoundTo, _functions_of, effective_forward, live_layers, read_function
from hf_speedkit.kernels.requirements import FAMILIES

INSTALLED = sorted(family for family in FAMILIES if util.find_spec(f"transformers.models.{family}") is not None)


@pytest.mark.parametrize("family", INSTALLED)
def test_contract_every_layer_class_of_the_installed_transformers_is_read_in_full(family):
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    layer = getattr(modeling, FAMILIES[family].layer)
    forward = effective_forward(_Uninitialised(layer))
    found = {f.function: f.binding for f in _functions_of(forward, layer)}
    assert set(found) == set(FAMILIES[family].functions)
    assert BoundTo.UNKNOWN not in found.values()


class _Uninitialised:
    """Only what `effective_forward` reads: the class and an empty instance dictionary."""

    def __new__(cls, layer):
        return layer.__new__(layer)


def test_three_of_four_layers_are_found_by_name():
    assert [layer.name for layer in live_layers(tiny_model("qwen3_5"))] == [
        f"model.layers.{index}.linear_attn" for index in range(3)
    ]


def test_a_bound_reference_is_told_apart_from_the_fallback():
    model = tiny_model("qwen3_5")

    def bindings():
        return {f.function: f.binding for f in live_layers(model)[0].functions}

    assert set(bindings().values()) == {BoundTo.TORCH}
    with bind_references(model):
        assert bindings()["chunk_gated_delta_rule"] is BoundTo.REFERENCE
        assert bindings()["fused_recurrent_gated_delta_rule"] is BoundTo.TORCH


def test_a_forward_replaced_on_one_layer_is_seen_on_that_layer_only():
    model = tiny_model("qwen3_5")

    def other_forward(self, hidden_states, **kwargs):
        return hidden_states

    layer = model.model.layers[1].linear_attn
    layer.forward = MethodType(other_forward, layer)
    replaced = {found.name: found.replaced_by for found in live_layers(model)}
    assert replaced["model.layers.0.linear_attn"] is None
    assert replaced["model.layers.1.linear_attn"].endswith("other_forward")


def test_decorated_and_partial_forwards_are_looked_through():
    model = tiny_model("qwen3_5")
    layer = model.model.layers[0].linear_attn
    old = layer.forward
    layer.forward = functools.update_wrapper(functools.partial(lambda self, *a, **k: old(*a, **k), layer), old)
    assert live_layers(model)[0].functions  # accelerate's hooks wrap this way


def test_a_class_put_in_front_by_fsdp2_does_not_hide_the_layer():
    model = tiny_model("qwen3_5")
    layer = model.model.layers[0].linear_attn
    front = type("FSDPLayer", (type(layer),), {"__module__": "torch.distributed.fsdp"})
    layer.__class__ = front
    assert {found.kind for found in live_layers(model)} == {"Qwen3_5GatedDeltaNet"}
    assert len(live_layers(model)) == 3


def _wrapper(**cells):
    is_new_implementation = cells["is_new_implementation"]
    func_name, package, implementation = (cells.get(name) for name in ("func_name", "package", "implementation"))

    def wrapped():
        return is_new_implementation, func_name, package, implementation

    return wrapped


@pytest.mark.parametrize(
    "cells",
    [
        {"is_new_implementation": True},
        {"is_new_implementation": True, "func_name": "f", "package": "p"},
        {"is_new_implementation": "yes", "func_name": "f", "package": "p", "implementation": len},
    ],
)
def test_another_layout_of_the_closure_is_unknown_and_not_guessed(cells):
    assert read_function("f", _wrapper(**cells)).binding is BoundTo.UNKNOWN


@pytest.mark.parametrize("other", [None, 3, torch.nn.Linear, torch.nn.Linear(1, 1), len, lambda: None])
def test_what_is_not_behind_the_decorator_is_left_out(other):
    assert read_function("f", other) is None


def _module_as_kernels_makes_it(func):
    """The layout of kernels 0.17.2, layer/layer.py: a module class per function, the function in a closure."""

    class Func(torch.nn.Module):
        kernel_layer_name = "causal_conv1d_fn"

        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    return Func()


def test_a_function_that_kernels_wrapped_is_read_before_and_after_a_hub_kernel_took_it():
    wrapper = _wrapper(is_new_implementation=False, func_name="f", package="p", implementation=len)
    func = _module_as_kernels_makes_it(wrapper)
    assert read_function("f", func).binding is BoundTo.TORCH

    def hub_forward(self, x):
        return x

    func.forward = MethodType(hub_forward, func)
    found = read_function("f", func)
    assert (found.binding, found.implementation) == (BoundTo.HUB, hub_forward)
    func.forward = MethodType(type(func).forward, func)  # kernelize puts the fallback back like this
    assert read_function("f", func).binding is BoundTo.TORCH
