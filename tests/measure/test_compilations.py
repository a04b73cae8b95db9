"""Compilations are counted: torch.compile's with torch, Triton's with a stand-in for its listener."""

from types import SimpleNamespace

import torch

from hf_speedkit.measure.compilations import CompilationCounter


def fake_triton(listener=None):
    return SimpleNamespace(knobs=SimpleNamespace(compilation=SimpleNamespace(listener=listener)))


def test_graphs_of_torch_compile_are_counted_as_they_come():
    torch._dynamo.reset()
    counter = CompilationCounter()
    counter.start()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(2))
    assert counter.take() == 1
    double(torch.ones(2))
    assert counter.take() == 0
    double(torch.ones(3))  # another shape: compiled anew
    assert counter.take() == 1
    torch._dynamo.reset()


def test_kernels_that_triton_compiles_are_counted_and_those_from_its_cache_are_not():
    heard = []
    triton = fake_triton(lambda **event: heard.append(event))
    former = triton.knobs.compilation.listener
    counter = CompilationCounter({"triton": triton})
    counter.start()
    for cache_hit in (False, True, False):
        triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)
    assert counter.take() == 2
    assert counter.take() == 0
    assert len(heard) == 3  # whoever listened before still does
    counter.stop()
    assert triton.knobs.compilation.listener is former


def test_triton_imported_during_training_is_listened_to_from_then_on():
    modules = {}
    counter = CompilationCounter(modules)
    counter.start()
    assert counter.take() == 0
    modules["triton"] = fake_triton()
    counter.take()
    modules["triton"].knobs.compilation.listener(cache_hit=False)
    assert counter.take() == 1
    counter.stop()
    assert modules["triton"].knobs.compilation.listener is None


def test_an_old_triton_without_a_listener_is_left_alone():
    counter = CompilationCounter({"triton": SimpleNamespace(), "torch._dynamo.utils": SimpleNamespace()})
    counter.start()
    assert counter.take() == 0
    counter.stop()
