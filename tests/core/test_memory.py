"""The arithmetic of a training state's memory (core/memory.py)."""

from __future__ import annotations

import math

import pytest

from hf_speedkit.core.memory import GIB, TrainingState, devices_needed, training_state_bytes
from hf_speedkit.core.memory_words import bytes_in_words

QWEN_27B = 26.9e9


@pytest.mark.parametrize(
    ("weight_bytes", "bytes_per_parameter"),
    [(2, 8), (4, 16)],
    ids=["all bf16", "all fp32"],
)
def test_weights_gradients_and_two_moments_share_the_weights_precision(weight_bytes, bytes_per_parameter):
    state = training_state_bytes(QWEN_27B, weight_bytes=weight_bytes)
    assert (state.weights, state.gradients, state.moments) == (
        QWEN_27B * weight_bytes,
        QWEN_27B * weight_bytes,
        QWEN_27B * weight_bytes * 2,
    )
    assert state.total == QWEN_27B * bytes_per_parameter


def test_qwen_27b_in_pure_bf16_takes_the_215_gb_of_the_readme():
    assert round(training_state_bytes(QWEN_27B, weight_bytes=2).total / 1e9) == 215


def test_weights_upcast_for_training_cost_16_bytes_however_they_were_loaded():
    assert training_state_bytes(1e6, weight_bytes=2, trainable_bytes=4).total == 16e6


def test_eight_bit_moments_take_a_byte_each():
    assert training_state_bytes(1e6, weight_bytes=2, moment_bytes=1).moments == 2e6


def test_an_optimizer_without_moments_takes_no_memory_for_them():
    assert training_state_bytes(1e6, weight_bytes=4, moments=0) == TrainingState(
        weights=4_000_000, gradients=4_000_000, moments=0
    )


def test_frozen_weights_have_neither_gradients_nor_moments():
    state = training_state_bytes(1e6, weight_bytes=0.5, trainable_parameters=1e4, trainable_bytes=4)
    assert state == TrainingState(weights=495_000 + 40_000, gradients=40_000, moments=80_000)


@pytest.mark.parametrize(
    ("parameters", "trainable"),
    [(0, None), (-1, None), (math.nan, None), (math.inf, None), (10, 11), (10, -1)],
)
def test_impossible_counts_are_refused(parameters, trainable):
    with pytest.raises(ValueError, match="is not possible"):
        training_state_bytes(parameters, weight_bytes=2, trainable_parameters=trainable)


@pytest.mark.parametrize(
    ("total_gib", "memory_gib", "devices"),
    [(80, 80, 1), (80.01, 80, 2), (200.4, 139.8, 2), (1, 80, 1)],
)
def test_devices_needed_rounds_up(total_gib, memory_gib, devices):
    state = TrainingState(weights=math.ceil(total_gib * GIB), gradients=0, moments=0)
    assert devices_needed(state, memory_gib) == devices


def test_a_device_without_memory_is_refused():
    with pytest.raises(ValueError, match="holds nothing"):
        devices_needed(TrainingState(weights=1, gradients=0, moments=0), 0)


@pytest.mark.parametrize(
    ("size", "said"),
    [(900, "900 bytes"), (1536, "1.5 KiB"), (412.4 * 2**20, "412 MiB"), (GIB - 1, "1 GiB"), (2345 * GIB, "2,345 GiB")],
)
def test_bytes_are_told_in_a_unit_that_shows_something(size, said):
    assert bytes_in_words(size) == said
