"""Forecasts: the coefficients of the studied model, the table of the study, and when a cost window pays."""

import logging
from types import SimpleNamespace

import pytest
from support import tiny_hybrid

from hf_speedkit.core.flops import model_flops
from hf_speedkit.packing.forecast import compare_batchings, forecast_stragglers, quadratic_per_token
from hf_speedkit.trainer.ranks.stragglers import log_stragglers


def qwen27b_flops(**options):
    from geometry import qwen27b_config

    return model_flops(qwen27b_config().to_dict(), **options)


def test_attention_costs_of_the_27b_geometry_are_those_of_its_config():
    # facts/packing.md: 51.2 GFLOP a token in linear layers, 0.34 in the delta rule, 196,608 per squared length. Our
    # delta rule counts less (0.23): the study counted the chunked algorithm's arithmetic.
    assert quadratic_per_token(qwen27b_flops()) == pytest.approx(196_608 / 51.4e9, rel=0.02)
    assert quadratic_per_token(qwen27b_flops(causal=False)) == pytest.approx(2 * quadratic_per_token(qwen27b_flops()))


def test_batchings_of_chat_data_come_in_the_order_of_the_study(chat_lengths):
    padded, trl, ours = compare_batchings(chat_lengths(20_000), tokens_per_batch=8192, world_size=8)
    assert padded.batches > 1.6 * trl.batches
    assert trl.batches > ours.batches
    assert 0.55 < padded.full < 0.6 < 0.985 < trl.full < ours.full
    assert ours.full > 0.999
    assert ours.steps == -(-ours.batches // 8)


@pytest.mark.parametrize(("slots", "pays"), [(8192, False), (65_536, True)])
def test_a_cost_window_pays_for_long_rows_and_not_for_chat(chat_lengths, long_chat_lengths, slots, pays):
    lengths = chat_lengths(20_000) if slots == 8192 else long_chat_lengths(20_000, longest=slots)
    forecast = forecast_stragglers(
        lengths, tokens_per_batch=slots, world_size=8, gradient_accumulation_steps=1,
        quadratic_per_token=quadratic_per_token(qwen27b_flops()),
    )  # fmt: skip
    assert forecast.windowed_share < forecast.share
    assert forecast.window_pays is pays
    assert ("worth setting" in forecast.sentence()) is pays
    # the study: 1.003 and 1.11 without a window, 1.001 and 1.02 with one
    assert forecast.share == pytest.approx({8192: 0.003, 65_536: 0.11}[slots], rel=0.5)


def test_sorting_inside_an_accumulation_window_gains_what_a_window_of_steps_does(long_chat_lengths):
    lengths = long_chat_lengths(10_000)
    common = {"tokens_per_batch": 65_536, "world_size": 8, "quadratic_per_token": 4e-6}
    alone = forecast_stragglers(lengths, gradient_accumulation_steps=1, **common)
    accumulated = forecast_stragglers(lengths, gradient_accumulation_steps=8, **common)
    assert accumulated.share == pytest.approx(alone.windowed_share, abs=0.01)


@pytest.mark.parametrize(("rank", "level"), [(0, logging.INFO), (1, None)])
def test_the_forecast_is_logged_once_with_its_coefficient(caplog, rank, level):
    args = SimpleNamespace(
        process_index=rank, world_size=2, gradient_accumulation_steps=1, row_slots=64, packing_strategy="auto",
        cost_window_steps=None,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, logger="hf_speedkit"):
        log_stragglers(tiny_hybrid(), [20, 30, 40, 50] * 10, args)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    if level is not None:
        assert "e-0" in caplog.text
        assert "slowest rank" in caplog.text


def test_an_unknown_family_has_no_forecast(caplog):
    model = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"model_type": "mystery"}))
    with caplog.at_level(logging.INFO, logger="hf_speedkit"):
        assert log_stragglers(model, [1], SimpleNamespace(process_index=0)) is None
    assert "not predicted" in caplog.text
