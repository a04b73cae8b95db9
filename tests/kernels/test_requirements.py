"""Contract with the installed transformers: the tables must say what its modeling files say."""

import ast
from pathlib import Path

import pytest
import transformers
from kernel_models import tiny_model

from hf_speedkit.kernels.requirements import (
    CALLED_WITH,
    CALLED_WITH_BY,
    FAMILIES,
    FUNCTIONS,
    INTERNAL_PATHS,
    family_of,
    training_requirements,
)

DECORATOR = "use_kernel_func_from_hub_with_fallback"
MODELS = Path(transformers.__file__).parent / "models"
# Asks for the convolution since 5.24, not in 5.23; packed rows of it are refused with either (core/families.py).
LATER = {"lfm3"}


def decorated_functions(tree):
    """{name in the file: (name in the package, package)}."""
    return {
        node.name: tuple(argument.value for argument in decorator.args)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == DECORATOR
    }


def calls_of_each_class(tree, names):
    calls = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            called = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            if called & names:
                calls[node.name] = called & names
    return calls


@pytest.fixture(scope="module")
def modeling_files():
    texts = {path.parent.name: path.read_text() for path in sorted(MODELS.glob("*/modeling_*.py"))}
    asking = {family: text for family, text in texts.items() if f"@{DECORATOR}(" in text and family not in LATER}
    return {family: ast.parse(text) for family, text in asking.items()}


def test_every_family_with_the_fallback_decorator_is_in_the_table_and_no_other(modeling_files):
    assert set(modeling_files) == {family for family in FAMILIES if (MODELS / family).is_dir()}


def test_every_layer_class_calls_exactly_the_functions_in_the_table(modeling_files):
    for family, tree in modeling_files.items():
        decorated = decorated_functions(tree)
        calls = calls_of_each_class(tree, set(decorated))
        assert list(calls) == [FAMILIES[family].layer], family
        called = {decorated[name][0] for name in calls[FAMILIES[family].layer]}
        assert called == set(FAMILIES[family].functions), family


def test_contract_every_keyword_that_changes_what_a_layer_computes_is_in_the_table(modeling_files):
    """transformers drops what a kernel's signature does not name; so the table must say what it may not drop."""
    # Without a cache these are None or False; the boundaries have a column of their own; the last two pick a fallback.
    harmless = {
        *("initial_state", "initial_states", "output_final_state", "return_final_states", "return_last_state"),
        *("weight", "bias", "seq_idx", "cu_seqlens", "use_mambapy", "use_associative_scan"),
    }
    for family, tree in modeling_files.items():
        names, layer = decorated_functions(tree), FAMILIES[family].layer
        (body,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == layer)
        for call in (node for node in ast.walk(body) if isinstance(node, ast.Call)):
            function = names.get(getattr(call.func, "id", None), ("", ""))[0]
            if function not in FUNCTIONS or not FUNCTIONS[function].training:
                continue
            positional, needed = CALLED_WITH[function]
            given = {k.arg: k.value for k in call.keywords if k.arg is not None and k.arg not in harmless}
            none = {name for name, value in given.items() if getattr(value, "value", "") is None}
            assert set(given) - none <= {*needed, *CALLED_WITH_BY.get(layer, {}).get(function, ())}, (family, function)
            assert len(call.args) in (positional, 1), (family, function)  # 1: weight and bias by name


def test_every_function_comes_from_the_package_in_the_table(modeling_files):
    for family, tree in modeling_files.items():
        for function, package in decorated_functions(tree).values():
            assert FUNCTIONS[function].package == package, (family, function)


def test_the_places_inside_the_packages_are_those_transformers_looks_in():
    from transformers.integrations.hub_kernels import _KERNELS_INTERNAL_PATH_MAPPINGS

    assert dict(INTERNAL_PATHS) == {
        function: path for function, path in _KERNELS_INTERNAL_PATH_MAPPINGS.items() if function in FUNCTIONS
    }


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_decode_only_functions_are_not_demanded_for_training(family):
    names = {requirement.function for requirement in training_requirements(family)}
    assert names
    assert not any(name.endswith("_update") or name.startswith("fused_recurrent") for name in names)


def test_a_family_without_such_layers_needs_nothing():
    assert training_requirements("llama") == ()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "lfm2", "llama"])
def test_the_family_of_a_text_config_is_its_folder(family):
    assert family_of(tiny_model(family).config) == family


def test_remote_code_has_no_family():
    assert family_of(object()) is None


@pytest.mark.parametrize(("family", "count"), [("qwen3_5", 3), ("olmo_hybrid", 3), ("lfm2", 3), ("mamba", 4)])
def test_the_layer_types_in_the_table_are_those_the_configs_use(family, count):
    kinds = FAMILIES[family].layer_types
    assert sum(kind in kinds for kind in tiny_model(family).config.layer_types) == count
