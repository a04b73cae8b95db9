"""Binding the references: what it touches, what it leaves alone, and that it can be undone."""

import importlib

import pytest
import torch
from kernel_models import packed_row, random_documents, tiny_model

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.kernels.bindings import BoundReference, bind_references

LENGTHS = (3, 11, 5, 8)
NAMES = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")


def modeling_file(model):
    return importlib.import_module(type(model).__module__)


def globals_of(model):
    return [getattr(modeling_file(model), name) for name in NAMES]


def test_an_unbound_model_refuses_packed_rows_which_is_why_binding_exists():
    model = tiny_model("qwen3_5")
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(**packed_row(random_documents(LENGTHS))[0])


def test_binding_names_what_it_replaced_and_undo_puts_it_back():
    model = tiny_model("qwen3_5")
    before = globals_of(model)
    binding = bind_references(model)
    assert binding.functions == tuple(f"{type(model).__module__}.{name}" for name in NAMES)
    assert all(isinstance(found, BoundReference) for found in globals_of(model))
    binding.undo()
    assert globals_of(model) == before
    binding.undo()
    assert globals_of(model) == before


def test_leaving_the_block_undoes_even_after_an_error():
    model = tiny_model("qwen3_5")
    before = globals_of(model)
    with pytest.raises(KeyboardInterrupt), bind_references(model):
        raise KeyboardInterrupt
    assert globals_of(model) == before


def test_a_second_model_of_the_family_stays_bound_when_the_first_is_undone():
    first, second = tiny_model("qwen3_5"), tiny_model("qwen3_5")
    before = globals_of(first)
    outer, inner = bind_references(first), bind_references(second)
    assert inner.functions == outer.functions
    outer.undo()
    second(**packed_row(random_documents(LENGTHS))[0])
    inner.undo()
    assert globals_of(first) == before


def test_other_modeling_files_are_not_touched():
    other = globals_of(tiny_model("qwen3_next"))
    with bind_references(tiny_model("qwen3_5")):
        assert globals_of(tiny_model("qwen3_next")) == other


def test_importing_the_package_binds_nothing():
    assert not any(isinstance(found, BoundReference) for found in globals_of(tiny_model("qwen3_5")))


def test_a_model_without_such_layers_gets_an_empty_binding():
    assert bind_references(tiny_model("llama")).functions == ()
    full_attention = tiny_model("qwen3_5", layer_types=["full_attention"] * 4)
    assert bind_references(full_attention).functions == ()


def test_generation_gives_the_same_tokens_bound_and_unbound():
    model = tiny_model("qwen3_5").eval()
    prompt = {"input_ids": random_documents((9,))[0][None], "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**prompt)
    with bind_references(model):
        assert torch.equal(model.generate(**prompt), expected)


def test_calls_without_boundaries_go_to_the_original_bit_for_bit():
    model = tiny_model("qwen3_5")
    inputs = {"input_ids": torch.stack(random_documents((20, 20))), "use_cache": False}
    expected = model(**inputs).logits
    with bind_references(model):
        assert torch.equal(model(**inputs).logits, expected)


def test_a_live_fused_kernel_is_never_replaced(monkeypatch):
    model = tiny_model("qwen3_5")
    fused = _as_bound_by_transformers(modeling_file(model).causal_conv1d_fn.__wrapped__)
    monkeypatch.setattr(modeling_file(model), "causal_conv1d_fn", fused)
    with bind_references(model) as binding:
        assert binding.functions == (f"{type(model).__module__}.torch_chunk_gated_delta_rule",)
        assert modeling_file(model).causal_conv1d_fn is fused


def test_what_was_put_on_top_of_the_reference_survives_undo(monkeypatch):
    model = tiny_model("qwen3_5")
    binding = bind_references(model)
    ours = modeling_file(model).causal_conv1d_fn

    def on_top(*args, **kwargs):
        return ours(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_file(model), "causal_conv1d_fn", on_top)
        binding.undo()
        assert modeling_file(model).causal_conv1d_fn is on_top
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            model(**packed_row(random_documents(LENGTHS))[0])  # nothing of ours acts any more
    modeling_file(model).causal_conv1d_fn = ours.speedkit_original


@pytest.mark.parametrize(
    ("family", "function"), [("mamba", "selective_scan_fn"), ("mamba2", "mamba_chunk_scan_combined")]
)
def test_a_family_without_a_reference_is_refused_before_anything_changes(family, function):
    model = tiny_model(family)
    before = modeling_file(model).causal_conv1d_fn
    with pytest.raises(KernelAssertionError, match="no boundary-aware implementation") as error:
        bind_references(model)
    assert function in str(error.value)
    assert "4 layers" in str(error.value)
    assert 'pip install "mamba-ssm"' in str(error.value)
    assert modeling_file(model).causal_conv1d_fn is before


def test_a_wrapped_model_is_bound_like_the_model_itself():
    wrapped = torch.nn.Sequential(tiny_model("qwen3_5"))
    with bind_references(wrapped) as binding:
        assert len(binding.functions) == 2


def _as_bound_by_transformers(implementation):
    """A wrapper with the closure that transformers' decorator leaves when the package was importable."""
    func_name, package, torch_function, applicable_params = "causal_conv1d_fn", "causal_conv1d", None, ()
    is_new_implementation = True

    def wrapped(*args, **kwargs):
        if is_new_implementation and torch_function is not None:
            return func_name, package
        return implementation(*args, **{k: v for k, v in kwargs.items() if k in applicable_params})

    return wrapped
