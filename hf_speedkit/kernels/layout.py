"""The one place that reads private parts of transformers and `kernels`: what a live layer's functions are bound to.

Checked against transformers 5.23.0 (integrations/hub_kernels.py:990-1055) and kernels 0.17.2 (layer/layer.py:705).
There a layer calls module globals of its modeling file; each is a wrapper whose closure holds what it was bound to when
the file was imported, or, with `kernels` switched on, a module round that wrapper whose forward `kernelize` replaces.
tests/kernels/test_layout.py fails when that changes; what is not recognised is reported as unknown, never guessed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

REFERENCE_MARK = "speedkit_original"
"""Attribute of a reference that we bound: the object it stands in for."""

STAND_IN_MARK = "speedkit_package"
"""Attribute of a fused function that we bound in the place of another package's: the package it is from."""


class BoundTo(StrEnum):
    """What kind of implementation a function has."""

    PACKAGE = "package"
    HUB = "hub"
    TORCH = "torch"
    REFERENCE = "reference"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFunction:
    """One function as a live layer calls it.

    Args:
        function: the name its package gives it; the global's name where the layout is unknown.
        global_name: the name under which the layer finds it.
        binding: what kind of implementation runs.
        package: import name of the package it was looked for in; None where unknown.
        called: the object that the layer calls.
        implementation: what runs in the end; None where unknown.
    """

    function: str
    global_name: str
    binding: BoundTo
    package: str | None
    called: Callable[..., object]
    implementation: Callable[..., object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLayer:
    """One module of the model and the functions its forward calls.

    Args:
        name: dotted name inside the model.
        kind: name of the class.
        namespace: globals of the forward that runs: where the functions are looked up.
        functions: in the order of their names; empty where `replaced_by` is set.
        replaced_by: where the forward comes from, when a whole-layer kernel took its place; None otherwise.
    """

    name: str
    kind: str
    namespace: dict[str, object]
    functions: tuple[LiveFunction, ...]
    replaced_by: str | None = None


def live_layers(model: nn.Module) -> tuple[LiveLayer, ...]:
    """Every layer of `model` that calls functions behind transformers' fallback decorator.

    A layer whose class calls such functions but whose forward was replaced by one that calls none is listed too, with
    `replaced_by`. Reads only; runs nothing of the model.
    """
    seen: dict[object, tuple[dict[str, object], tuple[LiveFunction, ...]]] = {}
    layers = []
    for name, module in model.named_modules():
        forward = effective_forward(module)
        key = (forward, type(module))
        if key not in seen:
            seen[key] = (forward.__globals__, _functions_of(forward, type(module))) if forward else ({}, ())
        namespace, functions = seen[key]
        replaced_by = None
        if not functions:
            usual = plain_function(getattr(type(module), "forward", None))
            if usual is None or usual is forward or not _functions_of(usual, type(module)):
                continue
            replaced_by = f"{forward.__module__}.{forward.__qualname__}" if forward else "an unreadable forward"
        layers.append(
            LiveLayer(
                name=name,
                kind=_class_name(module),
                namespace=namespace,
                functions=functions,
                replaced_by=replaced_by,
            )
        )
    return tuple(layers)


def held_functions(model: nn.Module, names: Container[str]) -> tuple[LiveLayer, ...]:
    """Layers of other people's code that hold or call kernel functions by name, without the fallback decorator.

    As transformers' own layers did before version 5: `self.chunk_gated_delta_rule = chunk_gated_delta_rule or
    torch_chunk_gated_delta_rule`, and `None` where a package is missing. A name with `torch_` in front is a fallback.

    Args:
        model: any module.
        names: the functions to look for.
    """
    layers = []
    read: dict[object, dict[str, object]] = {}
    for name, module in model.named_modules():
        forward = effective_forward(module)
        if forward is not None and (forward, type(module)) not in read:
            used = (key for key in names_used(forward, type(module)) if key.removeprefix("torch_") in names)
            read[forward, type(module)] = {key: forward.__globals__[key] for key in used if key in forward.__globals__}
        called = read[forward, type(module)] if forward is not None else {}
        values = called | {key: value for key, value in vars(module).items() if key in names}
        functions = tuple(
            _held(key, value)
            for key, value in sorted(values.items())
            if read_function(key, value) is None and not _is_transformers(value)
        )
        if functions:
            layers.append(LiveLayer(name=name, kind=_class_name(module), namespace={}, functions=functions))
    return tuple(layers)


def _is_transformers(value: object) -> bool:
    """LFM3 has a torch function of the name in its own file (5.23), which no package could take the place of."""
    return str(getattr(value, "__module__", "")).startswith("transformers.")


def _held(name: str, value: Any) -> LiveFunction:
    function, home = name.removeprefix("torch_"), str(getattr(value, "__module__", ""))
    torch = value is None or name != function or getattr(value, "__name__", "").startswith("torch_")
    package = home.partition(".")[0]
    known = callable(value) and package in ("fla", "causal_conv1d", "mamba_ssm")
    return LiveFunction(
        function=function,
        global_name=name,
        binding=BoundTo.TORCH if torch else BoundTo.PACKAGE if known else BoundTo.UNKNOWN,
        package=package if known else None,
        called=value,
        implementation=value if callable(value) else None,
    )


def config_of(layer: Any) -> Any:
    """The config of one layer, None without one: a model's common config raises for what its layers do not share.

    transformers 5.23, integrations/heterogeneity/configuration_utils.py:287; Gemma 4 is such a model.
    """
    config, place = getattr(layer, "config", None), getattr(layer, "layer_idx", None)
    several = getattr(config, "is_heterogeneous", False) and isinstance(place, int)
    return config.per_layer_config[place] if config is not None and several else config


def effective_forward(module: nn.Module) -> FunctionType | None:
    """The undecorated function that a call of `module` runs, an override on the instance included."""
    return plain_function(module.__dict__.get("forward", getattr(type(module), "forward", None)))


def names_used(function: FunctionType, owner: type) -> frozenset[str]:
    """Global and attribute names in `function`, in functions inside it, and in the methods of `owner` it mentions."""
    names: set[str] = set()
    todo, done = [function.__code__], set()
    while todo:
        code = todo.pop()
        if code in done:
            continue
        done.add(code)
        todo.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
        for name in code.co_names:
            names.add(name)
            method = plain_function(inspect.getattr_static(owner, name, None))
            if method is not None and not method.__module__.startswith("torch."):
                todo.append(method.__code__)
    return frozenset(names)


def read_function(global_name: str, called: object) -> LiveFunction | None:
    """What `called` is bound to, or None if it is not behind the fallback decorator."""
    if not callable(called) or isinstance(called, type):
        return None
    original = getattr(called, REFERENCE_MARK, None)
    if original is not None:
        inner = read_function(global_name, original)
        stands_in = getattr(called, STAND_IN_MARK, None)
        return LiveFunction(
            function=inner.function if inner else global_name,
            global_name=global_name,
            binding=BoundTo.PACKAGE if stands_in else BoundTo.REFERENCE,
            package=stands_in or (inner.package if inner else None),
            called=called,
            implementation=called,
        )
    if hasattr(type(called), "kernel_layer_name"):
        return _read_kernels_module(global_name, called)
    cells = _closure(called)
    if "is_new_implementation" not in cells:
        return None
    return _read_wrapper(global_name, called, cells)


def torch_fallback(called: object) -> Callable[..., object] | None:
    """Transformers' torch function behind what a layer calls, whatever is bound there; None if it is not found."""
    original = getattr(called, REFERENCE_MARK, None)
    if original is not None:
        return torch_fallback(original)
    if hasattr(type(called), "kernel_layer_name"):
        own = inspect.getattr_static(type(called), "forward", None)
        return torch_fallback(_closure(own).get("func"))
    found = _closure(called).get("torch_function")
    return found if isinstance(found, FunctionType) else None


def _functions_of(forward: FunctionType, owner: type) -> tuple[LiveFunction, ...]:
    namespace = forward.__globals__
    found = (read_function(name, namespace.get(name)) for name in sorted(names_used(forward, owner)))
    return tuple(function for function in found if function is not None)


def _read_wrapper(global_name: str, called: Callable[..., object], cells: dict[str, object]) -> LiveFunction:
    name, package, implementation = cells.get("func_name"), cells.get("package"), cells.get("implementation")
    known = isinstance(name, str) and isinstance(package, str) and callable(implementation)
    if not known or not isinstance(cells["is_new_implementation"], bool):
        return _unknown(global_name, called)
    return LiveFunction(
        function=str(name),
        global_name=global_name,
        binding=BoundTo.PACKAGE if cells["is_new_implementation"] else BoundTo.TORCH,
        package=str(package),
        called=called,
        implementation=implementation if callable(implementation) else None,
    )


def _read_kernels_module(global_name: str, called: Callable[..., object]) -> LiveFunction | None:
    """A function that `kernels` turned into a module: its own forward calls the wrapper, any other is the hub's."""
    own = inspect.getattr_static(type(called), "forward", None)
    wrapper = _closure(own).get("func") if isinstance(own, FunctionType) else None
    if wrapper is None or "is_new_implementation" not in _closure(wrapper):
        return None  # a layer class (RMSNorm ...), not one of the functions
    inner = _read_wrapper(global_name, called, _closure(wrapper))
    current = getattr(called, "__dict__", {}).get("forward")
    replacement = current.__func__ if isinstance(current, MethodType) else current
    if replacement is None or replacement is own:
        return inner
    return LiveFunction(
        function=inner.function,
        global_name=global_name,
        binding=BoundTo.HUB,
        package=inner.package,
        called=called,
        implementation=replacement,
    )


def _unknown(global_name: str, called: Callable[..., object]) -> LiveFunction:
    return LiveFunction(
        function=global_name,
        global_name=global_name,
        binding=BoundTo.UNKNOWN,
        package=None,
        called=called,
        implementation=None,
    )


def _closure(function: object) -> dict[str, object]:
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    return dict(_filled_cells(function))


def _filled_cells(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that was never assigned: the cell is empty
            continue


def plain_function(forward: object) -> FunctionType | None:
    """The function under decorators, bound methods, partials and static methods; None if there is none."""
    for _ in range(32):  # deeper than any stack of decorators seen; ends a cycle
        if isinstance(forward, (staticmethod, classmethod, MethodType)):
            forward = forward.__func__
        elif hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        else:
            break
    return forward if isinstance(forward, FunctionType) else None


def _class_name(module: nn.Module) -> str:
    """Name of the class that wrote the forward: FSDP2 puts a class of its own in front of it."""
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            return kind.__name__
    return type(module).__name__
